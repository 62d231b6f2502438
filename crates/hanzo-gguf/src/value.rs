//! One metadata value: its type, its scalars and their conversions. Arrays are next door; keys do not enter.

use std::fmt;

use crate::Array;

macro_rules! value_types {
    ($( $variant:ident, $id:literal, $size:expr, $name:literal; )*) => {
        /// The type of a metadata value or of an array's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ValueType { $(
            #[doc = concat!("GGUF value type ", $id, ": ", $name, ".")]
            $variant,
        )* }

        impl ValueType {
            /// Every type, in the order of their ids.
            pub const ALL: &'static [ValueType] = &[$(ValueType::$variant),*];

            /// The type's id in a file.
            pub const fn id(self) -> u32 { match self { $(ValueType::$variant => $id),* } }

            /// The type of an id, if GGUF defines it.
            pub const fn from_id(id: u32) -> Option<ValueType> {
                match id { $($id => Some(ValueType::$variant),)* _ => None }
            }

            /// Bytes of one value, or `None` for strings and arrays, whose values differ in size.
            pub const fn size(self) -> Option<usize> { match self { $(ValueType::$variant => $size),* } }

            /// The type's name, e.g. `u32`.
            pub const fn name(self) -> &'static str { match self { $(ValueType::$variant => $name),* } }
        }
    };
}

value_types! {
    U8, 0, Some(1), "u8";
    I8, 1, Some(1), "i8";
    U16, 2, Some(2), "u16";
    I16, 3, Some(2), "i16";
    U32, 4, Some(4), "u32";
    I32, 5, Some(4), "i32";
    F32, 6, Some(4), "f32";
    Bool, 7, Some(1), "bool";
    String, 8, None, "string";
    Array, 9, None, "array";
    U64, 10, Some(8), "u64";
    I64, 11, Some(8), "i64";
    F64, 12, Some(8), "f64";
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One metadata value.
///
/// Numbers keep the width they have in the file; [`Metadata`](crate::Metadata)'s getters and the `as_` methods
/// convert between widths where the value fits.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Unsigned, 8 bits.
    U8(u8),
    /// Signed, 8 bits.
    I8(i8),
    /// Unsigned, 16 bits.
    U16(u16),
    /// Signed, 16 bits.
    I16(i16),
    /// Unsigned, 32 bits.
    U32(u32),
    /// Signed, 32 bits.
    I32(i32),
    /// Unsigned, 64 bits.
    U64(u64),
    /// Signed, 64 bits.
    I64(i64),
    /// Float, 32 bits.
    F32(f32),
    /// Float, 64 bits.
    F64(f64),
    /// True or false.
    Bool(bool),
    /// A string.
    String(String),
    /// A string whose bytes are not UTF-8: the format forbids it, files in the wild have it. Kept as it is, so that a
    /// damaged description does not refuse a good model; asking for it as a `str` is an error.
    Bytes(Vec<u8>),
    /// An array, of arrays perhaps.
    Array(Array),
}

impl Value {
    /// The value's type.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F32(_) => ValueType::F32,
            Value::F64(_) => ValueType::F64,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) | Value::Bytes(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
        }
    }

    /// An integer of any width.
    pub fn as_integer(&self) -> Option<i128> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::I8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::I16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::I32(v) => Some(v.into()),
            Value::U64(v) => Some(v.into()),
            Value::I64(v) => Some(v.into()),
            _ => None,
        }
    }

    /// An integer that fits 64 bits unsigned.
    pub fn as_u64(&self) -> Option<u64> {
        self.as_integer()?.try_into().ok()
    }

    /// An integer that fits 64 bits signed.
    pub fn as_i64(&self) -> Option<i64> {
        self.as_integer()?.try_into().ok()
    }

    /// A float, or an integer (rounded to the nearest `f64` beyond 53 bits).
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => self.as_integer().map(|v| v as f64),
        }
    }

    /// A bool.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Value::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// A string that is UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(v) => Some(v),
            _ => None,
        }
    }

    /// A string's bytes, UTF-8 or not.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        match self {
            Value::String(v) => Some(v.as_bytes()),
            Value::Bytes(v) => Some(v),
            _ => None,
        }
    }

    /// An array.
    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Value::Array(v) => Some(v),
            _ => None,
        }
    }

    /// A value from its little-endian bytes, as many as the type's size; `None` for strings and arrays, for a wrong
    /// number of bytes, and for a bool that is neither 0 nor 1.
    pub(crate) fn from_scalar_bytes(ty: ValueType, bytes: &[u8]) -> Option<Value> {
        Some(match ty {
            ValueType::U8 => Value::U8(u8::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::U32 => Value::U32(u32::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::I32 => Value::I32(i32::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::U64 => Value::U64(u64::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::I64 => Value::I64(i64::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(bytes.try_into().ok()?)),
            ValueType::Bool => match bytes {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                _ => return None,
            },
            ValueType::String | ValueType::Array => return None,
        })
    }

    /// Appends the value as a file holds it, without its type.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Value::U8(v) => out.extend(v.to_le_bytes()),
            Value::I8(v) => out.extend(v.to_le_bytes()),
            Value::U16(v) => out.extend(v.to_le_bytes()),
            Value::I16(v) => out.extend(v.to_le_bytes()),
            Value::U32(v) => out.extend(v.to_le_bytes()),
            Value::I32(v) => out.extend(v.to_le_bytes()),
            Value::U64(v) => out.extend(v.to_le_bytes()),
            Value::I64(v) => out.extend(v.to_le_bytes()),
            Value::F32(v) => out.extend(v.to_le_bytes()),
            Value::F64(v) => out.extend(v.to_le_bytes()),
            Value::Bool(v) => out.push(u8::from(*v)),
            Value::String(v) => encode_string(v.as_bytes(), out),
            Value::Bytes(v) => encode_string(v, out),
            Value::Array(v) => v.encode(out),
        }
    }
}

/// Appends a string as a file holds it: its length, then its bytes.
pub(crate) fn encode_string(bytes: &[u8], out: &mut Vec<u8>) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// Prints scalars plainly, strings quoted and escaped, arrays as their type, length and first few elements.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(v) => v.fmt(f),
            Value::I8(v) => v.fmt(f),
            Value::U16(v) => v.fmt(f),
            Value::I16(v) => v.fmt(f),
            Value::U32(v) => v.fmt(f),
            Value::I32(v) => v.fmt(f),
            Value::U64(v) => v.fmt(f),
            Value::I64(v) => v.fmt(f),
            // Debug prints the shortest digits that read back the same, with an exponent where that is shorter.
            Value::F32(v) => write!(f, "{v:?}"),
            Value::F64(v) => write!(f, "{v:?}"),
            Value::Bool(v) => v.fmt(f),
            Value::String(v) => write!(f, "{v:?}"),
            Value::Bytes(v) => write!(f, "b\"{}\"", v.escape_ascii()),
            Value::Array(v) => v.fmt(f),
        }
    }
}

macro_rules! value_from {
    ($( $variant:ident: $ty:ty; )*) => { $(
        impl From<$ty> for Value {
            fn from(v: $ty) -> Self { Value::$variant(v) }
        }
    )* };
}

value_from! {
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
    Bool: bool;
    String: String;
    Array: Array;
}

impl From<&str> for Value {
    fn from(v: &str) -> Self {
        Value::String(v.to_owned())
    }
}

impl<T> From<Vec<T>> for Value
where
    Array: From<Vec<T>>,
{
    fn from(v: Vec<T>) -> Self {
        Value::Array(Array::from(v))
    }
}
