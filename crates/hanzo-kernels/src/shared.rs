//! How much workgroup memory a kernel takes: the sizes in its header, worked out for given constants.

use crate::{Key, format_file, op, tables};

/// Bytes of workgroup memory of a kernel with constants as given (others at their defaults), a staged codebook included;
/// none if there is no such kernel, or a size does not come out as a number.
pub fn shared_bytes(key: Key, constants: &[(&str, u32)]) -> Option<u64> {
    let file = op(key.op)?;
    let defaults = crate::constants(key.op);
    let value = |name: &str| {
        let set = constants.iter().find(|c| c.0 == name).map(|c| c.1);
        set.or_else(|| defaults.iter().find(|c| c.0 == name).map(|c| c.1))
    };
    let table = key.format.and_then(format_file).and_then(|f| f.table.as_deref());
    let mut bytes = if file.grid { table.map_or(0, |t| 4 * tables::codebook(t).len() as u64) } else { 0 };
    for array in &file.shared {
        let element = match array.ty.as_str() {
            "u32x4" | "f32x4" => 16,
            "u32x2" => 8,
            _ => 4,
        };
        let mut rest = array.size.as_str();
        let count = sum(&mut rest, &value)?;
        if !rest.trim().is_empty() {
            return None;
        }
        bytes += element * count;
    }
    Some(bytes)
}

/// The next character that is no space.
fn peek(rest: &mut &str) -> Option<char> {
    *rest = rest.trim_start();
    rest.chars().next()
}

fn sum(rest: &mut &str, value: &dyn Fn(&str) -> Option<u32>) -> Option<u64> {
    let mut n = product(rest, value)?;
    while let Some(c @ ('+' | '-')) = peek(rest) {
        *rest = &rest[1..];
        let m = product(rest, value)?;
        n = if c == '+' { n.checked_add(m)? } else { n.checked_sub(m)? };
    }
    Some(n)
}

fn product(rest: &mut &str, value: &dyn Fn(&str) -> Option<u32>) -> Option<u64> {
    let mut n = atom(rest, value)?;
    while let Some(c @ ('*' | '/')) = peek(rest) {
        *rest = &rest[1..];
        let m = atom(rest, value)?;
        n = if c == '*' { n.checked_mul(m)? } else { n.checked_div(m)? };
    }
    Some(n)
}

fn atom(rest: &mut &str, value: &dyn Fn(&str) -> Option<u32>) -> Option<u64> {
    if peek(rest)? == '(' {
        *rest = &rest[1..];
        let n = sum(rest, value)?;
        let closed = peek(rest)? == ')';
        *rest = &rest[1..];
        return closed.then_some(n);
    }
    let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
    let (word, behind) = rest.split_at(end);
    *rest = behind;
    let digits = word.trim_end_matches('u');
    if digits.starts_with(|c: char| c.is_ascii_digit()) { digits.parse().ok() } else { value(word).map(u64::from) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hanzo_gguf::Format;

    #[test]
    fn sizes_are_worked_out_as_a_compiler_would() {
        let value = |name: &str| (name == "BM").then_some(6);
        for (text, want) in [
            ("2 * (BM + 10u) * 3", Some(96)),
            ("(BM + 15) / 16 * 16", Some(16)),
            ("BM / 4 + 1", Some(2)),
            ("7 - BM", Some(1)),
            ("BN", None),
            ("BM - 7", None),
        ] {
            assert_eq!(sum(&mut &*text, &value), want, "{text}");
        }
    }

    #[test]
    fn every_kernels_memory_is_known_and_codebooks_are_counted() {
        for o in crate::ops() {
            assert!(shared_bytes(Key { op: &o.name, format: None }, &[]).is_some(), "{}", o.name);
        }
        let bytes = |format, set: &[(&str, u32)]| shared_bytes(Key { op: "gemm_dot", format }, set);
        // 16 + 16 + 4 * 4 bytes a line of a unit.
        assert_eq!(bytes(None, &[]), Some(48 * 128 * 2));
        assert_eq!(bytes(Some(Format::IQ3_XXS), &[("BU", 1)]), Some(48 * 128 + 4 * 256));
    }
}
