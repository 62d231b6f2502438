//! Split models: which file of `NAME-00001-of-0000N.gguf` is which, and that all of them belong together.
//! Part k says `split.no` = k - 1, `split.count` = N and `split.tensors.count` = the tensors of all parts; the first
//! part has the model's metadata. A file without `split.count` is a whole model, whatever its name.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{ErrorKind, GgufError};
use crate::gguf::File;
use crate::{Metadata, TensorBytes};

const NO: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// What a part says of the whole.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    /// This part, from 0.
    no: u64,
    /// How many parts there are, at least 2.
    pub(crate) count: u64,
    /// How many tensors all parts have together, if the file says so.
    tensors: Option<u64>,
}

impl Part {
    /// Reads the `split.` keys; `None` for a model in one file.
    pub(crate) fn of(metadata: &Metadata, tensor_count: usize) -> Result<Option<Part>, ErrorKind> {
        let get = |key: &'static str| match metadata.get(key) {
            None => Ok(None),
            Some(value) => value.as_u64().map(Some).ok_or_else(|| {
                let found = crate::error::type_in_words(value.value_type());
                ErrorKind::wrong_type(key, found, "an integer of 0 or more")
            }),
        };
        let (no, tensors) = (get(NO)?.unwrap_or(0), get(TENSORS)?);
        let count = match get(COUNT)? {
            None | Some(0) => return Ok(None),
            Some(count) => count,
        };
        if no >= count {
            return Err(ErrorKind::SplitValue { key: NO, found: no, expected: count - 1 });
        }
        if count > 1 {
            return Ok(Some(Part { no, count, tensors }));
        }
        check_tensors(tensors, tensor_count)?;
        Ok(None)
    }
}

fn check_tensors(said: Option<u64>, counted: usize) -> Result<(), ErrorKind> {
    match said {
        Some(found) if found != counted as u64 => {
            Err(ErrorKind::SplitValue { key: TENSORS, found, expected: counted as u64 })
        }
        _ => Ok(()),
    }
}

/// The name of a part, taken apart: `NAME`, 2, 5 of `NAME-00002-of-00005.gguf`. Numbers have five digits or more.
fn parse_name(file_name: &str) -> Option<(&str, u64, u64)> {
    let rest = file_name.strip_suffix(".gguf")?;
    let (rest, count) = rest.rsplit_once("-of-")?;
    let (stem, no) = rest.rsplit_once('-')?;
    let number = |digits: &str| {
        let plain = digits.len() >= 5 && digits.bytes().all(|b| b.is_ascii_digit());
        plain.then(|| digits.parse().ok()).flatten()
    };
    Some((stem, number(no)?, number(count)?))
}

/// Where part `no` (from 1) of `count` lies, given any part's path and the stem of its name.
fn part_path(any: &Path, stem: &str, no: u64, count: u64) -> PathBuf {
    any.with_file_name(format!("{stem}-{no:05}-of-{count:05}.gguf"))
}

/// Opens the other parts of the split model that `opened`, the file at `path`, is part of; returns all, in order.
pub(crate) fn open_all(path: &Arc<Path>, opened: File) -> Result<Vec<(Arc<Path>, File)>, GgufError> {
    let fail = |kind| GgufError::new(path, kind);
    let Some(part) = opened.split else { return Ok(vec![(path.clone(), opened)]) };
    let (own_no, count) = (part.no + 1, part.count);
    let name = path.file_name().and_then(|name| name.to_str()).and_then(parse_name);
    let Some((stem, named_no, named_count)) = name else {
        return Err(fail(ErrorKind::SplitName { no: own_no, count }));
    };
    if named_count != count {
        return Err(fail(ErrorKind::SplitValue { key: COUNT, found: count, expected: named_count }));
    }
    if named_no != own_no {
        return Err(fail(ErrorKind::SplitValue { key: NO, found: part.no, expected: named_no.saturating_sub(1) }));
    }

    let mut opened = Some(opened);
    let mut files = Vec::new();
    for no in 1..=count {
        let (path, file) = match opened.take_if(|_| no == own_no) {
            Some(file) => (path.clone(), file),
            None => open_part(part_path(path, stem, no, count).into(), no, &part)?,
        };
        files.push((path, file));
    }
    let counted = files.iter().map(|(_, file)| file.tensor_count()).sum();
    check_tensors(part.tensors, counted).map_err(fail)?;
    Ok(files)
}

/// Opens part `no` (from 1) and checks that it belongs to the same model as `first`, the part opened first.
fn open_part(path: Arc<Path>, no: u64, first: &Part) -> Result<(Arc<Path>, File), GgufError> {
    let fail = |kind| GgufError::new(&path, kind);
    if !path.exists() {
        return Err(fail(ErrorKind::SplitMissing { no, count: first.count }));
    }
    let file = TensorBytes::map(&path).and_then(|bytes| File::parse(bytes, &path)).map_err(fail)?;
    // A file without the keys counts as the only part.
    let found = file.split.unwrap_or(Part { no: 0, count: 1, tensors: Some(file.tensor_count() as u64) });
    let same = |key, found, expected| match found == expected {
        true => Ok(()),
        false => Err(fail(ErrorKind::SplitValue { key, found, expected })),
    };
    same(COUNT, found.count, first.count)?;
    same(NO, found.no, no - 1)?;
    if let (Some(found), Some(expected)) = (found.tensors, first.tensors) {
        same(TENSORS, found, expected)?;
    }
    Ok((path, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_name_is_a_stem_and_two_numbers_of_five_digits() {
        assert_eq!(parse_name("m-00002-of-00005.gguf"), Some(("m", 2, 5)));
        assert_eq!(parse_name("a-of-b-00001-of-00002-00003-of-00004.gguf"), Some(("a-of-b-00001-of-00002", 3, 4)));
        assert_eq!(parse_name("-100000-of-100001.gguf"), Some(("", 100_000, 100_001)));
        for other in [
            "m.gguf",
            "m-00002-of-00005.bin",
            "m-0002-of-0005.gguf",
            "m-00002-00005.gguf",
            "m-+0002-of-00005.gguf",
            "m-00002-of-99999999999999999999.gguf",
            "00002-of-00005.gguf",
        ] {
            assert_eq!(parse_name(other), None, "{other}");
        }
    }

    #[test]
    fn the_path_of_a_part_is_that_of_its_neighbour_with_another_number() {
        let path = part_path(Path::new("models/m-00002-of-00012.gguf"), "m", 11, 12);
        assert_eq!(path, Path::new("models/m-00011-of-00012.gguf"));
    }
}
