//! The metadata of a model: an ordered map from key to value, with typed getters whose errors name file and key.
//! What the keys mean belongs to the engine.

use std::path::Path;
use std::sync::Arc;

use crate::array::Strings;
use crate::error::{ErrorKind, GgufError, memory_name, type_in_words};
use crate::{Array, Value};

/// A model's metadata: key and value, in the file's order, no key twice.
///
/// Each type has two getters: `u32(key)` makes a missing key an error, `opt_u32(key)` makes it `None`. In both, a value
/// of another kind is an error, and so is an integer out of the type's range; integers convert between widths where
/// they fit, and `f32` accepts any number.
///
/// ```
/// use hanzo_gguf::Metadata;
/// let mut metadata = Metadata::new();
/// metadata.set("llama.block_count", 30_u64);
/// metadata.set("general.architecture", "llama");
/// assert_eq!(metadata.u32("llama.block_count")?, 30);
/// assert_eq!(metadata.opt_f32("llama.rope.freq_base")?, None);
/// assert_eq!(
///     metadata.u32("general.architecture").unwrap_err().to_string(),
///     "<memory>: metadata key \"general.architecture\" is a string, expected an integer: convert the model again"
/// );
/// # Ok::<(), hanzo_gguf::GgufError>(())
/// ```
#[derive(Clone)]
pub struct Metadata {
    file: Arc<Path>,
    entries: Vec<(String, Value)>,
    /// Positions in `entries`, sorted by key.
    sorted: Vec<u32>,
}

impl Metadata {
    /// No metadata, for a file to be written.
    pub fn new() -> Self {
        Metadata { file: memory_name(), entries: Vec::new(), sorted: Vec::new() }
    }

    /// The metadata of `file`.
    pub(crate) fn of_file(file: Arc<Path>, entries: Vec<(String, Value)>) -> Result<Self, ErrorKind> {
        let mut sorted: Vec<u32> = (0..entries.len() as u32).collect();
        sorted.sort_unstable_by(|&a, &b| entries[a as usize].0.cmp(&entries[b as usize].0));
        for pair in sorted.windows(2) {
            let key = &entries[pair[0] as usize].0;
            if *key == entries[pair[1] as usize].0 {
                return Err(ErrorKind::DuplicateKey { key: key.clone() });
            }
        }
        Ok(Metadata { file, entries, sorted })
    }

    fn find(&self, key: &str) -> Result<usize, usize> {
        self.sorted.binary_search_by(|&i| self.entries[i as usize].0.as_str().cmp(key))
    }

    /// The file the metadata came from; `<memory>` if it came from none.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Keys and values, in the file's order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of `key`, whatever its type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.find(key).ok().map(|at| &self.entries[self.sorted[at] as usize].1)
    }

    /// True if `key` is there.
    pub fn contains(&self, key: &str) -> bool {
        self.find(key).is_ok()
    }

    /// Sets `key`, in its old place if it exists, else at the end.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        let (key, value) = (key.into(), value.into());
        match self.find(&key) {
            Ok(at) => self.entries[self.sorted[at] as usize].1 = value,
            Err(at) => {
                self.sorted.insert(at, self.entries.len() as u32);
                self.entries.push((key, value));
            }
        }
    }

    /// Removes `key` and returns its value.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        let at = self.find(key).ok()?;
        let removed = self.sorted.remove(at);
        for i in &mut self.sorted {
            *i -= u32::from(*i > removed);
        }
        Some(self.entries.remove(removed as usize).1)
    }

    /// Sets every key of `other`: how a quantized copy inherits a model's metadata.
    pub fn copy_from(&mut self, other: &Metadata) {
        for (key, value) in other.iter() {
            self.set(key, value.clone());
        }
    }

    pub(crate) fn error(&self, kind: ErrorKind) -> GgufError {
        GgufError::new(&self.file, kind)
    }

    #[cold]
    fn wrong_type(&self, key: &str, value: &Value, expected: &'static str) -> GgufError {
        let found = match value {
            Value::Bytes(_) => "a string that is not UTF-8".to_owned(),
            Value::Array(array) if !array.is_empty() => format!("an array of {}", array.element_type()),
            other => type_in_words(other.value_type()),
        };
        self.error(ErrorKind::wrong_type(key, found, expected))
    }

    fn missing(&self, key: &str) -> GgufError {
        self.error(ErrorKind::MissingKey { key: key.to_owned() })
    }

    fn opt_integer<T: TryFrom<i128>>(&self, key: &str, name: &'static str) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let integer = value.as_integer().ok_or_else(|| self.wrong_type(key, value, "an integer"))?;
        let fits = T::try_from(integer).map_err(|_| {
            self.error(ErrorKind::OutOfRange { key: key.to_owned(), found: value.to_string(), expected: name })
        })?;
        Ok(Some(fits))
    }

    fn opt_integers<T: TryFrom<i128>>(&self, key: &str, name: &'static str) -> Result<Option<Vec<T>>, GgufError> {
        let Some(array) = self.opt_array(key)? else { return Ok(None) };
        if let Some(integers) = array.integers() {
            return Ok(Some(integers));
        }
        // An array of integers that did not convert has one out of range.
        let misfit = array.iter().find(|v| v.as_integer().is_none_or(|v| T::try_from(v).is_err()));
        Err(match misfit {
            Some(v) if v.as_integer().is_some() => {
                let found = format!("an array with {v}");
                self.error(ErrorKind::OutOfRange { key: key.to_owned(), found, expected: name })
            }
            _ => self.wrong_type(key, &Value::Array(array.clone()), "an array of integers"),
        })
    }

    /// `key` as an array, if it is there.
    pub fn opt_array(&self, key: &str) -> Result<Option<&Array>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(array)) => Ok(Some(array)),
            Some(other) => Err(self.wrong_type(key, other, "an array")),
        }
    }

    /// `key` as an `f32` (any number, rounded to nearest), if it is there.
    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        Ok(self.opt_f64(key)?.map(|v| v as f32))
    }

    /// `key` as an `f64` (any number), if it is there.
    pub fn opt_f64(&self, key: &str) -> Result<Option<f64>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.wrong_type(key, value, "a number"))
    }

    /// `key` as a bool, if it is there.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong_type(key, value, "a bool"))
    }

    /// `key` as a string, if it is there. A string that is not UTF-8 is an error; [`Metadata::get`] has its bytes.
    pub fn opt_str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong_type(key, value, "a string in UTF-8"))
    }

    /// `key` as an array of strings (bytes, see [`Strings`]), if it is there.
    pub fn opt_strs(&self, key: &str) -> Result<Option<Strings<'_>>, GgufError> {
        let Some(array) = self.opt_array(key)? else { return Ok(None) };
        let wrong = || self.wrong_type(key, &Value::Array(array.clone()), "an array of strings");
        array.as_strings().map(Some).ok_or_else(wrong)
    }

    /// `key` as an array of numbers, rounded to `f32`, if it is there.
    pub fn opt_f32s(&self, key: &str) -> Result<Option<Vec<f32>>, GgufError> {
        let Some(array) = self.opt_array(key)? else { return Ok(None) };
        let wrong = || self.wrong_type(key, &Value::Array(array.clone()), "an array of numbers");
        array.floats().map(Some).ok_or_else(wrong)
    }

    /// `key` as an array of bools, if it is there.
    pub fn opt_bools(&self, key: &str) -> Result<Option<Vec<bool>>, GgufError> {
        let Some(array) = self.opt_array(key)? else { return Ok(None) };
        let wrong = || self.wrong_type(key, &Value::Array(array.clone()), "an array of bools");
        array.bools().map(Some).ok_or_else(wrong)
    }

    /// `key` as one `u32` per layer: an array of `layers` integers, or a single one that holds for all of them.
    /// Head counts and feed-forward lengths come in both forms.
    pub fn opt_u32_per_layer(&self, key: &str, layers: usize) -> Result<Option<Vec<u32>>, GgufError> {
        if !matches!(self.get(key), Some(Value::Array(_))) {
            return Ok(self.opt_u32(key)?.map(|v| vec![v; layers]));
        }
        let values = self.opt_u32s(key)?;
        match values {
            Some(values) if values.len() != layers => {
                Err(self.error(ErrorKind::WrongLength { key: key.to_owned(), found: values.len(), expected: layers }))
            }
            values => Ok(values),
        }
    }
}

macro_rules! integer_getters {
    ($( $ty:ident, $opt:ident, $array:ident, $opt_array:ident; )*) => { impl Metadata { $(
        #[doc = concat!("`key` as a `", stringify!($ty), "`, if it is there.")]
        pub fn $opt(&self, key: &str) -> Result<Option<$ty>, GgufError> {
            self.opt_integer(key, stringify!($ty))
        }

        #[doc = concat!("`key` as a `", stringify!($ty), "`; missing is an error.")]
        pub fn $ty(&self, key: &str) -> Result<$ty, GgufError> {
            self.$opt(key)?.ok_or_else(|| self.missing(key))
        }

        #[doc = concat!("`key` as an array of `", stringify!($ty), "`, if it is there.")]
        pub fn $opt_array(&self, key: &str) -> Result<Option<Vec<$ty>>, GgufError> {
            self.opt_integers(key, stringify!($ty))
        }

        #[doc = concat!("`key` as an array of `", stringify!($ty), "`; missing is an error.")]
        pub fn $array(&self, key: &str) -> Result<Vec<$ty>, GgufError> {
            self.$opt_array(key)?.ok_or_else(|| self.missing(key))
        }
    )* } };
}

integer_getters! {
    u32, opt_u32, u32s, opt_u32s;
    i32, opt_i32, i32s, opt_i32s;
    u64, opt_u64, u64s, opt_u64s;
    i64, opt_i64, i64s, opt_i64s;
    usize, opt_usize, usizes, opt_usizes;
}

macro_rules! needed_getters {
    ($( $get:ident, $opt:ident, $ty:ty, $what:literal; )*) => { impl Metadata { $(
        #[doc = concat!("`key` as ", $what, "; missing is an error. See [`Metadata::", stringify!($opt), "`].")]
        pub fn $get(&self, key: &str) -> Result<$ty, GgufError> {
            self.$opt(key)?.ok_or_else(|| self.missing(key))
        }
    )* } };
}

needed_getters! {
    f32, opt_f32, f32, "an `f32`";
    f64, opt_f64, f64, "an `f64`";
    bool, opt_bool, bool, "a bool";
    str, opt_str, &str, "a string";
    array, opt_array, &Array, "an array";
    strs, opt_strs, Strings<'_>, "an array of strings";
    f32s, opt_f32s, Vec<f32>, "an array of `f32`";
    bools, opt_bools, Vec<bool>, "an array of bools";
}

impl Metadata {
    /// `key` as one `u32` per layer; missing is an error. See [`Metadata::opt_u32_per_layer`].
    pub fn u32_per_layer(&self, key: &str, layers: usize) -> Result<Vec<u32>, GgufError> {
        self.opt_u32_per_layer(key, layers)?.ok_or_else(|| self.missing(key))
    }
}

impl Default for Metadata {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Metadata {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// The same keys with the same values in the same order, whatever the file.
impl PartialEq for Metadata {
    fn eq(&self, other: &Metadata) -> bool {
        self.entries == other.entries
    }
}
