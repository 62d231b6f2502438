//! Files made by hand, each wrong in one way: every one is a typed error that names the field.

use hanzo_gguf::{ErrorKind, Format, Gguf, GgufError};

/// A GGUF file put together byte by byte, right or wrong.
#[derive(Clone)]
struct Raw(Vec<u8>);

impl Raw {
    /// A header that claims so many tensors and keys.
    fn claiming(tensors: u64, keys: u64) -> Raw {
        Raw(b"GGUF".to_vec()).u32(3).u64(tensors).u64(keys)
    }

    fn u32(mut self, v: u32) -> Raw {
        self.0.extend(v.to_le_bytes());
        self
    }

    fn u64(mut self, v: u64) -> Raw {
        self.0.extend(v.to_le_bytes());
        self
    }

    fn raw(mut self, bytes: &[u8]) -> Raw {
        self.0.extend(bytes);
        self
    }

    fn string(self, text: &[u8]) -> Raw {
        self.u64(text.len() as u64).raw(text)
    }

    /// A key and its type; the value follows.
    fn key(self, name: &str, ty: u32) -> Raw {
        self.string(name.as_bytes()).u32(ty)
    }

    fn tensor(self, name: &str, dims: &[u64], format: u32, offset: u64) -> Raw {
        let header = self.string(name.as_bytes()).u32(dims.len() as u32);
        dims.iter().fold(header, |raw, &d| raw.u64(d)).u32(format).u64(offset)
    }

    /// Pads to the data section and appends `n` bytes of data.
    fn data(mut self, n: usize) -> Raw {
        self.0.resize(self.0.len().next_multiple_of(32) + n, 0);
        self
    }

    #[track_caller]
    fn error(self) -> GgufError {
        let error = Gguf::from_bytes(self.0).expect_err("the file is wrong");
        assert_eq!(error.file().to_str(), Some("<memory>"));
        assert!(error.to_string().starts_with("<memory>: "));
        error
    }

    #[track_caller]
    fn says(self, expected: &str) {
        let text = self.error().to_string();
        assert!(text.contains(expected), "{text:?} does not contain {expected:?}");
    }

    #[track_caller]
    fn reads(self) -> Gguf {
        Gguf::from_bytes(self.0).expect("the file is right")
    }
}

// ---- the file as such ----

#[test]
fn an_empty_file_is_refused() {
    assert!(matches!(Raw(Vec::new()).error().kind(), ErrorKind::Empty));
}

#[test]
fn another_magic_is_refused_with_what_the_file_looks_like() {
    let magic = |start: &[u8]| Raw(start.to_vec()).raw(&[0; 64]);
    magic(b"GGUX").says("starts with \"GGUX\", not \"GGUF\": give the path of a GGUF model");
    magic(b"tjgg\x03").says("a ggml model of before GGUF");
    magic(b"version https://git-lfs.github.com/spec/v1").says("git lfs pull");
    magic(b"<!DOCTYPE html>").says("a web page");
    magic(b"PK\x03\x04").says("an archive");
    magic(b"\x10\0\0\0\0\0\0\0{\"a\"").says("safetensors");
    Raw(b"GG".to_vec()).says("starts with \"GG\"");
}

#[test]
fn big_endian_files_are_refused_by_name() {
    for version in [2_u32, 3] {
        let error = Raw(b"GGUF".to_vec()).raw(&version.to_be_bytes()).raw(&[0; 64]).error();
        assert!(matches!(*error.kind(), ErrorKind::BigEndian { version: v } if v == version));
        assert!(error.to_string().contains("big-endian"));
    }
}

#[test]
fn other_versions_are_refused_by_number() {
    for version in [0_u32, 1, 4, u32::MAX] {
        let error = Raw(b"GGUF".to_vec()).u32(version).raw(&[0; 64]).error();
        assert!(matches!(*error.kind(), ErrorKind::Version { version: v } if v == version));
    }
}

#[test]
fn a_folder_and_a_missing_file_are_refused_by_path() {
    let folder = std::env::temp_dir();
    let error = Gguf::open(&folder).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NotAFile { what: "a directory" }));
    assert_eq!(error.file(), folder);
    let error = Gguf::open(folder.join("no such file.gguf")).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Io { .. }));
    assert!(error.to_string().contains("no such file.gguf: cannot open the file"));
    assert!(std::error::Error::source(&error).is_some());
}

#[cfg(unix)]
#[test]
fn a_device_is_refused_without_being_opened() {
    assert!(matches!(Gguf::open("/dev/null").unwrap_err().kind(), ErrorKind::NotAFile { what: "a pipe or device" }));
}

#[test]
fn every_prefix_of_a_file_is_refused() {
    let whole = Raw::claiming(1, 3)
        .key("a", 4)
        .u32(7)
        .key("b", 9)
        .u32(8)
        .u64(2)
        .string(b"x")
        .string(b"yz")
        .key("c", 8)
        .string(b"text")
        .tensor("t", &[4], 0, 0)
        .data(16);
    whole.clone().reads();
    for len in 0..whole.0.len() {
        let error = Raw(whole.0[..len].to_vec()).error();
        let expected = matches!(
            error.kind(),
            ErrorKind::Empty
                | ErrorKind::Magic { .. }
                | ErrorKind::Truncated { .. }
                | ErrorKind::Count { .. }
                | ErrorKind::TensorRange { .. }
        );
        assert!(expected, "{len}: {error}");
    }
}

// ---- counts and lengths ----

#[test]
fn counts_beyond_the_file_are_refused_before_anything_is_allocated() {
    for count in [1, 1 << 20, u64::from(u32::MAX), i64::MAX as u64, u64::MAX] {
        Raw::claiming(count, 0)
            .says(&format!("tensor_count at byte 8 is {count}, at 32 bytes or more each, but only 0"));
        Raw::claiming(0, count).says(&format!("metadata_kv_count at byte 16 is {count}, at 13 bytes or more each"));
        let array = |element| Raw::claiming(0, 1).key("k", 9).u32(element).u64(count);
        for element in 0..=12 {
            let error = array(element).error();
            assert!(matches!(*error.kind(), ErrorKind::Count { count: c, at: 41, .. } if c == count), "{error}");
            assert!(error.to_string().contains("the length of metadata key \"k\" at byte 41"), "{error}");
        }
    }
}

#[test]
fn string_lengths_beyond_the_file_are_refused() {
    for len in [9, 1 << 40, u64::MAX] {
        let key = Raw::claiming(0, 1).u64(len).raw(b"12345678").error();
        let long = len > 65535;
        assert!(matches!(key.kind(), ErrorKind::NameLength { .. }) == long, "{key}");
        Raw::claiming(0, 1)
            .key("k", 8)
            .u64(len)
            .raw(b"12345678")
            .says(&format!("metadata key \"k\" at byte 45 needs {len}"));
        let string = Raw::claiming(0, 1).key("k", 9).u32(8).u64(2).string(b"ok").u64(len).raw(b"12345678");
        string.says(&format!("string 1 of metadata key \"k\" at byte 67 needs {len} bytes, but only 8 remain"));
        let name = Raw::claiming(1, 0).u64(len).raw(&[b'n'; 8]).raw(&[0; 24]).error();
        assert!(name.to_string().contains("the name of tensor 0") || !long, "{name}");
    }
}

#[test]
fn keys_and_tensor_names_have_a_longest_length() {
    let key = |len: usize| Raw::claiming(0, 1).key(&"k".repeat(len), 0).raw(&[1]);
    assert_eq!(key(65535).reads().metadata().len(), 1);
    key(65536).says("metadata key 0 at byte 32 is 65536 bytes, over the limit of 65535");
    let tensor = |len: usize| Raw::claiming(1, 0).tensor(&"n".repeat(len), &[4], 0, 0).data(16);
    assert_eq!(tensor(65535).reads().tensors().len(), 1);
    tensor(65536).says("the name of tensor 0 at byte 32 is 65536 bytes");
}

// ---- metadata ----

#[test]
fn unknown_value_types_are_refused() {
    for ty in [13, 255, u32::MAX] {
        let error = Raw::claiming(0, 1).key("k", ty).raw(&[0; 32]).error();
        assert!(matches!(*error.kind(), ErrorKind::ValueType { id, at: 33, .. } if id == ty), "{error}");
        let array = Raw::claiming(0, 1).key("k", 9).u32(ty).u64(1).raw(&[0; 32]);
        array.says(&format!("the element type of metadata key \"k\" at byte 37 is {ty}"));
    }
}

#[test]
fn a_bool_other_than_0_and_1_is_refused() {
    Raw::claiming(0, 1).key("k", 7).raw(&[2]).says("metadata key \"k\" at byte 37 is 2, and a bool must be 0 or 1");
    let array = Raw::claiming(0, 1).key("k", 9).u32(7).u64(3).raw(&[0, 1, 255]);
    array.says("element 2 of metadata key \"k\" at byte 51 is 255");
}

#[test]
fn a_key_that_occurs_twice_is_refused() {
    let file = Raw::claiming(0, 3).key("a", 0).raw(&[1]).key("b", 0).raw(&[1]).key("a", 0).raw(&[1]);
    file.says("metadata key \"a\" occurs twice");
}

#[test]
fn keys_and_names_must_be_utf8_and_values_need_not() {
    Raw::claiming(0, 1).string(b"k\xff").u32(0).raw(&[1]).says("metadata key 0 at byte 32 is not UTF-8");
    let tensor = Raw::claiming(1, 0).string(b"\xc3").u32(1).u64(4).u32(0).u64(0).data(16);
    tensor.says("the name of tensor 0 at byte 32 is not UTF-8");
    let gguf = Raw::claiming(0, 1).key("k", 8).string(b"\xff").reads();
    assert_eq!(gguf.metadata().get("k").unwrap().as_bytes(), Some(&b"\xff"[..]));
    assert!(gguf.metadata().str("k").unwrap_err().to_string().contains("not UTF-8"));
}

#[test]
fn arrays_nest_16_deep_and_no_deeper() {
    let nested = |depth: usize| {
        let open = (1..depth).fold(Raw::claiming(0, 1).key("k", 9), |raw, _| raw.u32(9).u64(1));
        open.u32(0).u64(1).raw(&[7])
    };
    let array = nested(16).reads().metadata().array("k").unwrap().clone();
    assert_eq!(array.depth(), 16);
    assert!(array.to_string().ends_with("[[u8; 1] [7]]]]]]]]]]]]]]]]"), "{array}");
    nested(17).says("nests arrays more than 16 deep");
    // A megabyte of openings must not exhaust the stack.
    nested(90_000).says("nests arrays more than 16 deep");
}

#[test]
fn an_unusable_alignment_is_refused() {
    for alignment in [0_u32, 1, 4, 24, 33, 1 << 25, 1 << 31, u32::MAX] {
        let error = Raw::claiming(0, 1).key("general.alignment", 4).u32(alignment).error();
        assert!(matches!(*error.kind(), ErrorKind::Alignment { found } if found == i128::from(alignment)), "{error}");
    }
    Raw::claiming(0, 1).key("general.alignment", 10).u64(u64::MAX).says("is 18446744073709551615; it must be");
    Raw::claiming(0, 1).key("general.alignment", 11).u64(u64::MAX).says("general.alignment is -1; it must be");
    Raw::claiming(0, 1)
        .key("general.alignment", 8)
        .string(b"32")
        .says("\"general.alignment\" is a string, expected an integer");
    // Usable, but its padding alone is longer than the file.
    let huge = Raw::claiming(1, 1).key("general.alignment", 4).u32(1 << 24).tensor("t", &[1], 0, 0).data(64);
    huge.says("lies at bytes 16777216 to 16777220");
}

// ---- tensors ----

#[test]
fn unknown_tensor_types_are_refused_with_what_they_were() {
    let of_type = |id| Raw::claiming(1, 0).tensor("t", &[256], id, 0).data(4096);
    of_type(4).says("tensor \"t\" has type 4 (Q4_2 or Q4_3), which was withdrawn");
    of_type(15).says("for activations only");
    of_type(31).says("quantize the model again to Q4_0");
    of_type(38).says("quantize the model again to IQ4_NL");
    of_type(99).says("type 99, which this program does not know");
    of_type(u32::MAX).says("type 4294967295, which");
    for format in Format::ALL {
        assert_eq!(of_type(format.id()).reads().tensors()[0].format, *format);
    }
}

#[test]
fn shapes_that_are_none_are_refused() {
    let shape = |dims: &[u64]| Raw::claiming(1, 0).tensor("t", dims, 0, 0).data(64);
    shape(&[]).says("tensor \"t\" has 0 dimensions; 1 to 4 are possible");
    shape(&[1; 5]).says("tensor \"t\" has 5 dimensions");
    Raw::claiming(1, 0).string(b"t").u32(u32::MAX).raw(&[1; 64]).says("has 4294967295 dimensions");
    for at in 0..4 {
        let mut dims = [2; 4];
        dims[at] = 0;
        shape(&dims).says("none may be 0");
    }
    shape(&[1 << 32, 1 << 32]).says("overflows 63 bits");
    shape(&[u64::MAX]).says("overflows 63 bits");
    shape(&[u64::MAX, u64::MAX, u64::MAX, u64::MAX]).says("overflows 63 bits");
    shape(&[1 << 61]).says("overflows 63 bits");
    shape(&[(1 << 61) - 1]).says("tensor \"t\" lies at bytes 64 to 9223372036854775868, but the file has");
    // Fewer bytes than elements: the elements overflow first.
    let ternary = Raw::claiming(1, 0).tensor("t", &[1 << 63, 2], Format::TQ1_0.id(), 0).data(64);
    ternary.says("overflows 63 bits");
}

#[test]
fn a_row_that_is_not_whole_blocks_is_refused() {
    let file = Raw::claiming(1, 0).tensor("t", &[48, 32], Format::Q8_0.id(), 0).data(4096);
    file.says("tensor \"t\" has rows of 48 elements, but Q8_0 packs blocks of 32");
}

#[test]
fn an_offset_that_is_not_aligned_is_refused() {
    let file = |offset| Raw::claiming(1, 0).tensor("t", &[4], 0, offset).data(64);
    file(32).reads();
    file(8).says("tensor \"t\" has offset 8, not a multiple of the alignment 32");
    file(u64::MAX).says("has offset 18446744073709551615");
}

#[test]
fn data_outside_the_file_is_refused() {
    let file = |offset, data| Raw::claiming(1, 0).tensor("t", &[4], 0, offset).data(data);
    file(0, 16).reads();
    file(0, 15).says("tensor \"t\" lies at bytes 64 to 80, but the file has 79: the file is cut short");
    file(32, 47).says("lies at bytes 96 to 112, but the file has 111");
    file(1 << 40, 64).says("lies at bytes 1099511627840 to");
    file(u64::MAX - 31, 64).says("lies at bytes");
}

#[test]
fn tensors_that_overlap_are_refused_and_gaps_are_not() {
    let file = |second| Raw::claiming(2, 0).tensor("a", &[16], 0, 0).tensor("b", &[4], 0, second).data(512);
    file(64).reads();
    file(256).reads();
    file(32).says("tensors \"a\" and \"b\" overlap at byte 128");
    file(0).says("overlap at byte 96");
    // In another order than the directory's.
    let swapped = Raw::claiming(2, 0).tensor("b", &[4], 0, 64).tensor("a", &[16], 0, 0).data(512).reads();
    assert_eq!(swapped.tensors()[0].name, "b");
}

#[test]
fn a_tensor_name_that_occurs_twice_is_refused() {
    let file = Raw::claiming(2, 0).tensor("t", &[4], 0, 0).tensor("t", &[4], 0, 32).data(64);
    file.says("tensor \"t\" occurs twice");
}

// ---- split keys ----

#[test]
fn split_keys_that_make_no_sense_are_refused() {
    let file = |no: u32, count: u32, tensors: u32| {
        let keys = Raw::claiming(0, 3).key("split.no", 4).u32(no).key("split.count", 4).u32(count);
        keys.key("split.tensors.count", 4).u32(tensors)
    };
    file(0, 1, 0).reads();
    file(0, 0, 5).reads();
    file(1, 1, 0).says("split.no is 1, expected 0");
    file(7, 3, 0).says("split.no is 7, expected 2");
    file(0, 1, 2).says("split.tensors.count is 2, expected 0");
    file(0, u32::MAX, 0).says("one of 4294967295 parts");
    Raw::claiming(0, 1)
        .key("split.count", 5)
        .u32(u32::MAX)
        .says("\"split.count\" is an i32, expected an integer of 0 or more");
    Raw::claiming(0, 1).key("split.count", 8).string(b"2").says("\"split.count\" is a string");
}

// ---- the texts ----

#[test]
fn names_from_a_file_are_escaped_and_shortened_in_errors() {
    let file = Raw::claiming(0, 1).key("\x1b[31mred\n", 7).raw(&[9]);
    file.says(r#"metadata key "\u{1b}[31mred\n" at byte"#);
    let long = Raw::claiming(0, 1).key(&"\u{e4}".repeat(5000), 7).raw(&[9]).error().to_string();
    assert!(long.len() < 400 && long.contains("... (10000 bytes)"), "{long}");
}
