//! The filter `tojson` as templates expect it: what Python's `json.dumps(value, ensure_ascii=False)` writes. Jinja's own
//! filter would escape characters that matter in HTML, and the model would see that.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Values nested deeper than this are refused.
const MAX_DEPTH: usize = 64;

/// The filter. `indent` (a number) spreads the text over lines, `sort_keys` sorts, `ensure_ascii` escapes what is not
/// ASCII; other options of `json.dumps` are accepted and have no effect.
pub(super) fn to_json(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get("indent")?,
    };
    let flag = |name| options.get::<Option<bool>>(name).map(|flag| flag.unwrap_or(false));
    let (sort, ascii) = (flag("sort_keys")?, flag("ensure_ascii")?);
    let mut writer = Writer { out: String::new(), indent: indent.map(|width| width.min(16)), sort, ascii };
    writer.value(value, 0)?;
    Ok(Value::from_safe_string(writer.out))
}

struct Writer {
    out: String,
    indent: Option<usize>,
    sort: bool,
    ascii: bool,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: the value is nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&value.to_string()),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                self.out.push('[');
                for (index, item) in value.try_iter()?.enumerate() {
                    self.separate(index, depth + 1);
                    self.value(&item, depth + 1)?;
                }
                self.close(']', value.len() == Some(0), depth);
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                self.out.push('{');
                for (index, key) in keys.iter().enumerate() {
                    self.separate(index, depth + 1);
                    match key.as_str() {
                        Some(key) => self.string(key),
                        None => self.string(&key.to_string()),
                    }
                    self.out.push_str(": ");
                    self.value(&value.get_item(key)?, depth + 1)?;
                }
                self.close('}', keys.is_empty(), depth);
            }
            kind => {
                return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: {kind} has no form in JSON")));
            }
        }
        Ok(())
    }

    fn string(&mut self, text: &str) {
        // A string always serializes.
        let quoted = serde_json::to_string(text).unwrap_or_default();
        if !self.ascii {
            self.out.push_str(&quoted);
            return;
        }
        for char in quoted.chars() {
            if char.is_ascii() {
                self.out.push(char);
            } else {
                let mut units = [0; 2];
                self.out.extend(char.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
            }
        }
    }

    /// Before element `index`.
    fn separate(&mut self, index: usize, depth: usize) {
        match (index, self.indent) {
            (0, None) => {}
            (_, None) => self.out.push_str(", "),
            (0, Some(_)) => self.line(depth),
            (_, Some(_)) => {
                self.out.push(',');
                self.line(depth);
            }
        }
    }

    fn close(&mut self, bracket: char, empty: bool, depth: usize) {
        if !empty {
            self.line(depth);
        }
        self.out.push(bracket);
    }

    /// A new line, if there are lines.
    fn line(&mut self, depth: usize) {
        if let Some(width) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', width * depth));
        }
    }
}
