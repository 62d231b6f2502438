//! Metadata arrays: kept as the file's bytes, decoded on access. A 151,936-token vocabulary costs one offset a token,
//! not one allocation a token. Keys do not enter, except into error texts.

use std::borrow::Cow;
use std::fmt::{self, Arguments};
use std::sync::Arc;

use crate::cursor::Cursor;
use crate::error::ErrorKind;
use crate::value::encode_string;
use crate::{TensorBytes, Value, ValueType};

/// The deepest nesting of arrays that is read or written: `[[1]]` has depth 2. Models use 1.
pub const MAX_ARRAY_DEPTH: usize = 16;

/// A metadata array: elements of one type, in the file's own encoding; cheap to hold, decoded on access.
///
/// ```
/// use hanzo_gguf::{Array, Value};
/// let tokens = Array::strings(["<s>", "a", "b"]);
/// assert_eq!(tokens.as_strings().unwrap().get(1), Some(&b"a"[..]));
/// let ids = Array::from(vec![3_i32, 1]);
/// assert_eq!(ids.get(0), Some(Value::I32(3)));
/// assert_eq!(ids.integers::<u32>(), Some(vec![3, 1]));
/// ```
#[derive(Clone)]
pub struct Array(Arc<Elements>);

// Behind one pointer, so that a `Value` is small (files can have many) and copying a model's metadata is cheap.
struct Elements {
    element: ValueType,
    depth: u8,
    len: usize,
    /// The elements as the file holds them.
    body: TensorBytes,
    /// For strings and arrays: where each element's bytes end in `body`.
    ends: Box<[usize]>,
}

impl Array {
    fn new(element: ValueType, depth: u8, len: usize, body: TensorBytes, ends: Vec<usize>) -> Array {
        Array(Arc::new(Elements { element, depth, len, body, ends: ends.into() }))
    }

    /// An array of strings, which need not be UTF-8 (`&str` and `&[u8]` both do).
    pub fn strings<S: AsRef<[u8]>>(strings: impl IntoIterator<Item = S>) -> Array {
        let (mut body, mut ends) = (Vec::new(), Vec::new());
        for string in strings {
            encode_string(string.as_ref(), &mut body);
            ends.push(body.len());
        }
        Array::new(ValueType::String, 1, ends.len(), body.into(), ends)
    }

    /// An array of arrays.
    ///
    /// # Panics
    /// If it would be more than [`MAX_ARRAY_DEPTH`] deep, which no reader accepts.
    pub fn nested(arrays: impl IntoIterator<Item = Array>) -> Array {
        let (mut body, mut ends, mut depth) = (Vec::new(), Vec::new(), 1);
        for array in arrays {
            array.encode(&mut body);
            ends.push(body.len());
            depth = depth.max(1 + array.0.depth);
        }
        assert!(usize::from(depth) <= MAX_ARRAY_DEPTH, "arrays nested {depth} deep");
        Array::new(ValueType::Array, depth, ends.len(), body.into(), ends)
    }

    /// Reads element type, length and elements; `file` is the whole file that the cursor walks over.
    pub(crate) fn read(cursor: &mut Cursor<'_>, file: &TensorBytes, field: Arguments<'_>) -> Result<Array, ErrorKind> {
        let mut ends = Vec::new();
        let Scan { element, depth, len, start } = scan(cursor, MAX_ARRAY_DEPTH as u8, Some(&mut ends), field)?;
        Ok(Array::new(element, depth, len, file.slice(start..cursor.position()), ends))
    }

    /// Appends the array as a file holds it: element type, length, elements.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.0.element.id().to_le_bytes());
        out.extend((self.0.len as u64).to_le_bytes());
        out.extend_from_slice(&self.0.body);
    }

    /// The type of the elements.
    pub fn element_type(&self) -> ValueType {
        self.0.element
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// How many arrays deep the array is: 1, or more if its elements are arrays; at most [`MAX_ARRAY_DEPTH`].
    pub fn depth(&self) -> usize {
        self.0.depth.into()
    }

    /// The bytes of element `i`, as the file holds it.
    fn element_bytes(&self, i: usize) -> Option<std::ops::Range<usize>> {
        if i >= self.0.len {
            return None;
        }
        Some(match self.0.element.size() {
            Some(size) => i * size..(i + 1) * size,
            None => {
                let start = if i == 0 { 0 } else { self.0.ends[i - 1] };
                start..self.0.ends[i]
            }
        })
    }

    fn child(&self, i: usize) -> Option<Array> {
        let bytes = self.0.body.slice(self.element_bytes(i)?);
        // Cannot fail: the outermost array was scanned when it was read, or built by `nested`.
        Array::read(&mut Cursor::new(&bytes), &bytes, format_args!("an array")).ok()
    }

    /// Element `i`, decoded; `None` past the end.
    pub fn get(&self, i: usize) -> Option<Value> {
        match self.0.element {
            ValueType::Array => self.child(i).map(Value::Array),
            ValueType::String => self.as_strings()?.get(i).map(string_value),
            scalar => Value::from_scalar_bytes(scalar, &self.0.body[self.element_bytes(i)?]),
        }
    }

    /// The elements, decoded one by one.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Value> + '_ {
        // Every index below len decodes, by construction; the default is never used.
        (0..self.0.len).map(|i| self.get(i).unwrap_or(Value::Bool(false)))
    }

    /// The strings, without a copy, if this is an array of strings (or an empty array).
    pub fn as_strings(&self) -> Option<Strings<'_>> {
        (self.0.element == ValueType::String || self.is_empty()).then_some(Strings { array: self })
    }

    /// The elements as integers of type `T`, if all are integers that fit (an empty array always does).
    pub fn integers<T: TryFrom<i128>>(&self) -> Option<Vec<T>> {
        if self.is_empty() {
            return Some(Vec::new());
        }
        macro_rules! decode {
            ($ty:ty) => {{
                let (chunks, _) = self.0.body.as_chunks::<{ size_of::<$ty>() }>();
                chunks.iter().map(|c| T::try_from(i128::from(<$ty>::from_le_bytes(*c))).ok()).collect()
            }};
        }
        match self.0.element {
            ValueType::U8 => decode!(u8),
            ValueType::I8 => decode!(i8),
            ValueType::U16 => decode!(u16),
            ValueType::I16 => decode!(i16),
            ValueType::U32 => decode!(u32),
            ValueType::I32 => decode!(i32),
            ValueType::U64 => decode!(u64),
            ValueType::I64 => decode!(i64),
            _ => None,
        }
    }

    /// The elements as `f32`, if they are floats or integers, rounded to nearest (an empty array always works).
    pub fn floats(&self) -> Option<Vec<f32>> {
        match self.0.element {
            ValueType::F32 => {
                let (chunks, _) = self.0.body.as_chunks::<4>();
                Some(chunks.iter().map(|c| f32::from_le_bytes(*c)).collect())
            }
            ValueType::F64 => {
                let (chunks, _) = self.0.body.as_chunks::<8>();
                Some(chunks.iter().map(|c| f64::from_le_bytes(*c) as f32).collect())
            }
            _ => Some(self.integers::<i128>()?.into_iter().map(|v| v as f32).collect()),
        }
    }

    /// The elements as bools, if they are (an empty array always works).
    pub fn bools(&self) -> Option<Vec<bool>> {
        (self.0.element == ValueType::Bool || self.is_empty()).then(|| self.0.body.iter().map(|&b| b != 0).collect())
    }
}

/// A string's bytes as a value.
pub(crate) fn string_value(bytes: &[u8]) -> Value {
    match std::str::from_utf8(bytes) {
        Ok(text) => Value::String(text.to_owned()),
        Err(_) => Value::Bytes(bytes.to_owned()),
    }
}

/// An array walked over: its elements lie from byte `start` of the file to the cursor.
struct Scan {
    element: ValueType,
    depth: u8,
    len: usize,
    start: usize,
}

/// Walks over an array, checking everything. `ends` receives where each string or array ends, counted from the first
/// element. `levels` arrays may nest, this one included.
fn scan(
    cursor: &mut Cursor<'_>,
    levels: u8,
    mut ends: Option<&mut Vec<usize>>,
    field: Arguments<'_>,
) -> Result<Scan, ErrorKind> {
    let at = cursor.position() as u64;
    if levels == 0 {
        return Err(ErrorKind::Nesting { field: field.to_string(), at, limit: MAX_ARRAY_DEPTH });
    }
    let id = cursor.u32(format_args!("the element type of {field}"))?;
    let element = ValueType::from_id(id).ok_or_else(|| ErrorKind::ValueType {
        field: format!("the element type of {field}"),
        at,
        id,
    })?;
    // The least bytes of an element: a string's length; a nested array's type and length.
    let least = match element {
        ValueType::String => 8,
        ValueType::Array => 12,
        _ => element.size().unwrap_or(1) as u64,
    };
    let len = cursor.count(least, format_args!("the length of {field}"))?;
    let start = cursor.position();
    let mut depth = 1;
    if element.size().is_none()
        && let Some(ends) = ends.as_deref_mut()
    {
        ends.reserve_exact(len);
    }
    match element {
        ValueType::String => {
            for i in 0..len {
                cursor.string(format_args!("string {i} of {field}"))?;
                if let Some(ends) = ends.as_deref_mut() {
                    ends.push(cursor.position() - start);
                }
            }
        }
        ValueType::Array => {
            for _ in 0..len {
                depth = depth.max(1 + scan(cursor, levels - 1, None, field)?.depth);
                if let Some(ends) = ends.as_deref_mut() {
                    ends.push(cursor.position() - start);
                }
            }
        }
        _ => {
            let bytes = cursor.take(len as u64 * least, field)?;
            if element == ValueType::Bool
                && let Some(i) = bytes.iter().position(|&b| b > 1)
            {
                let field = format!("element {i} of {field}");
                return Err(ErrorKind::Bool { field, at: (start + i) as u64, found: bytes[i] });
            }
        }
    }
    Ok(Scan { element, depth, len, start })
}

/// The strings of an array, borrowed from the file.
///
/// The format wants UTF-8, yet token lists in the wild hold byte sequences that are not; so strings come as bytes, and
/// [`Strings::get_str`] and [`Strings::iter_lossy`] decode them.
#[derive(Clone, Copy, Debug)]
pub struct Strings<'a> {
    array: &'a Array,
}

impl<'a> Strings<'a> {
    /// The number of strings.
    pub fn len(&self) -> usize {
        self.array.0.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.array.is_empty()
    }

    /// String `i`'s bytes; `None` past the end.
    pub fn get(&self, i: usize) -> Option<&'a [u8]> {
        let array = self.array;
        // Past the length that precedes each string.
        array.0.body[array.element_bytes(i)?].get(8..)
    }

    /// String `i`; `None` past the end or where it is not UTF-8.
    pub fn get_str(&self, i: usize) -> Option<&'a str> {
        std::str::from_utf8(self.get(i)?).ok()
    }

    /// The strings' bytes, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        let array = self.array;
        let mut start = 0;
        let body: &'a [u8] = &array.0.body;
        array.0.ends.iter().map(move |&end| {
            let string = &body[start + 8..end];
            start = end;
            string
        })
    }

    /// The strings, in order; invalid UTF-8 becomes U+FFFD.
    pub fn iter_lossy(&self) -> impl ExactSizeIterator<Item = Cow<'a, str>> + use<'a> {
        self.iter().map(String::from_utf8_lossy)
    }
}

impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array({self})")
    }
}

/// Type and length, then the first few elements: `[string; 49152] ["<|endoftext|>", "!", ...]`.
impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 6;
        write!(f, "[{}; {}] [", self.0.element, self.0.len)?;
        for (i, value) in self.iter().take(SHOWN).enumerate() {
            write!(f, "{}{value}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str(if self.0.len > SHOWN { ", ...]" } else { "]" })
    }
}

/// Bit for bit: NaN equals itself, 0.0 differs from -0.0.
impl PartialEq for Array {
    fn eq(&self, other: &Array) -> bool {
        self.0.element == other.0.element && self.0.len == other.0.len && *self.0.body == *other.0.body
    }
}

macro_rules! array_from {
    ($( $variant:ident: $ty:ty; )*) => { $(
        impl From<Vec<$ty>> for Array {
            fn from(values: Vec<$ty>) -> Self {
                let body: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                Array::new(ValueType::$variant, 1, values.len(), body.into(), Vec::new())
            }
        }
    )* };
}

array_from! {
    U8: u8;
    I8: i8;
    U16: u16;
    I16: i16;
    U32: u32;
    I32: i32;
    U64: u64;
    I64: i64;
    F32: f32;
    F64: f64;
}

impl From<Vec<bool>> for Array {
    fn from(values: Vec<bool>) -> Self {
        let body: Vec<u8> = values.iter().map(|&v| u8::from(v)).collect();
        Array::new(ValueType::Bool, 1, values.len(), body.into(), Vec::new())
    }
}

impl From<Vec<String>> for Array {
    fn from(values: Vec<String>) -> Self {
        Array::strings(values)
    }
}

impl From<Vec<&str>> for Array {
    fn from(values: Vec<&str>) -> Self {
        Array::strings(values)
    }
}

impl From<Vec<Array>> for Array {
    fn from(values: Vec<Array>) -> Self {
        Array::nested(values)
    }
}
