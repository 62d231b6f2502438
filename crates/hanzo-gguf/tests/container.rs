//! Files written by the writer and read back, whole and split, from memory and from disk.

use std::path::PathBuf;

use hanzo_gguf::{Array, ErrorKind, Format, Gguf, GgufWriter, Metadata, Value, ValueType};

/// A folder of its own for a test, removed afterwards.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("hanzo-gguf-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// One key of every type, extremes included.
fn every_type() -> Metadata {
    let mut m = Metadata::new();
    m.set("u8", u8::MAX);
    m.set("i8", i8::MIN);
    m.set("u16", u16::MAX);
    m.set("i16", i16::MIN);
    m.set("u32", u32::MAX);
    m.set("i32", i32::MIN);
    m.set("u64", u64::MAX);
    m.set("i64", i64::MIN);
    m.set("f32", f32::MIN_POSITIVE / 2.0);
    m.set("f64", std::f64::consts::PI);
    m.set("true", true);
    m.set("false", false);
    m.set("string", "na\u{ef}ve \u{1f600}\0\n");
    m.set("empty string", "");
    m.set("bytes", Value::Bytes(vec![0xff, 0xfe, b'a']));
    m.set("", "an empty key");
    m.set("array.u8", vec![1_u8, 2]);
    m.set("array.i8", vec![-1_i8, 2]);
    m.set("array.u16", vec![1_u16, 2]);
    m.set("array.i16", vec![-1_i16, 2]);
    m.set("array.u32", vec![1_u32, 2]);
    m.set("array.i32", vec![-1_i32, 2]);
    m.set("array.u64", vec![1_u64, u64::MAX]);
    m.set("array.i64", vec![i64::MIN, 2]);
    m.set("array.f32", vec![1.5_f32, -0.0]);
    m.set("array.f64", vec![1.5_f64, f64::INFINITY]);
    m.set("array.bool", vec![true, false, true]);
    m.set("array.string", vec!["a", "", "\u{e4}"]);
    m.set("array.bytes", Array::strings([&b"\xff"[..], b"ok"]));
    m.set("array.empty", Vec::<f32>::new());
    m.set(
        "array.nested",
        vec![
            Array::from(vec![1_i32, 2]),
            Array::from(vec!["x", "yz"]),
            Array::nested([Array::from(vec![true]), Array::from(Vec::<u8>::new())]),
        ],
    );
    m
}

/// Tensors of several formats and shapes with recognisable data.
fn tensors() -> Vec<(&'static str, Vec<u64>, Format, Vec<u8>)> {
    let data = |n: usize, seed: u8| (0..n).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
    vec![
        ("token_embd.weight", vec![32, 3], Format::Q8_0, data(102, 1)),
        ("scalar", vec![1], Format::F32, data(4, 2)),
        ("four.dims", vec![2, 3, 4, 5], Format::F16, data(240, 3)),
        ("blk.0.ffn_up.weight", vec![256, 2], Format::Q4_K, data(288, 4)),
        ("ids", vec![5], Format::I64, data(40, 5)),
    ]
}

fn write(metadata: &Metadata, tensors: &[(&str, Vec<u64>, Format, Vec<u8>)]) -> Vec<u8> {
    let mut writer = GgufWriter::new(Vec::new());
    writer.metadata_mut().copy_from(metadata);
    for (name, dims, format, _) in tensors {
        writer.declare(name, dims, *format).unwrap();
    }
    let mut data = writer.begin().unwrap();
    for (name, _, _, bytes) in tensors {
        data.tensor(name, bytes).unwrap();
    }
    data.finish().unwrap()
}

fn assert_holds(gguf: &Gguf, tensors: &[(&str, Vec<u64>, Format, Vec<u8>)]) {
    assert_eq!(gguf.tensors().len(), tensors.len());
    for (info, (name, dims, format, bytes)) in gguf.tensors().iter().zip(tensors) {
        assert_eq!((info.name.as_str(), &info.dims, info.format), (*name, dims, *format));
        assert_eq!(gguf.tensor(name), Some(info));
        assert_eq!(gguf.data(info), bytes);
        assert_eq!(&*gguf.bytes(info), &bytes[..]);
        assert_eq!(info.size(), bytes.len() as u64);
        assert_eq!(info.rows() * info.row_len(), info.elements());
    }
}

#[test]
fn every_value_type_and_tensor_survives_writing_and_reading() {
    let gguf = Gguf::from_bytes(write(&every_type(), &tensors())).unwrap();
    assert_eq!(gguf.version(), 3);
    assert_eq!(gguf.metadata(), &every_type());
    assert_holds(&gguf, &tensors());
    assert_eq!(gguf.tensor("none"), None);
}

#[test]
fn version_2_reads_like_version_3() {
    let mut bytes = write(&every_type(), &tensors());
    bytes[4] = 2;
    let gguf = Gguf::from_bytes(bytes).unwrap();
    assert_eq!(gguf.version(), 2);
    assert_eq!(gguf.metadata(), &every_type());
    assert_holds(&gguf, &tensors());
}

#[test]
fn a_file_without_keys_and_tensors_is_a_model_of_nothing() {
    let gguf = Gguf::from_bytes(write(&Metadata::new(), &[])).unwrap();
    assert!(gguf.metadata().is_empty() && gguf.tensors().is_empty());
}

#[test]
fn nested_arrays_decode_level_by_level() {
    let gguf = Gguf::from_bytes(write(&every_type(), &[])).unwrap();
    let nested = gguf.metadata().array("array.nested").unwrap();
    assert_eq!((nested.element_type(), nested.len(), nested.depth()), (ValueType::Array, 3, 3));
    assert_eq!(nested.get(0), Some(Value::from(vec![1_i32, 2])));
    assert_eq!(nested.get(1), Some(Value::from(vec!["x", "yz"])));
    let Some(Value::Array(inner)) = nested.get(2) else { panic!("an array") };
    assert_eq!(inner.iter().collect::<Vec<_>>(), [Value::from(vec![true]), Value::from(Vec::<u8>::new())]);
    assert_eq!(nested.get(3), None);
}

#[test]
fn general_alignment_places_and_aligns_the_data() {
    for alignment in [8_u32, 16, 64, 4096] {
        let mut metadata = Metadata::new();
        metadata.set("general.alignment", alignment);
        let gguf = Gguf::from_bytes(write(&metadata, &tensors())).unwrap();
        assert_holds(&gguf, &tensors());
        for info in gguf.tensors() {
            assert_eq!(info.offset() % u64::from(alignment), 0);
            assert_eq!(gguf.data(info).as_ptr() as usize % alignment.min(64) as usize, 0);
        }
    }
}

#[test]
fn tensor_bytes_outlive_the_model() {
    let folder = Folder::new("outlive");
    let path = folder.file("m.gguf");
    std::fs::write(&path, write(&every_type(), &tensors())).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    let bytes = gguf.bytes(gguf.tensor("ids").unwrap());
    let clone = bytes.clone();
    drop((gguf, bytes));
    assert_eq!(*clone, tensors()[4].3);
}

/// Writes the parts of a split model; part `k` holds tensors `[2k, 2k + 2)`.
fn write_split(folder: &Folder, change: impl Fn(usize, &mut Metadata)) -> Vec<PathBuf> {
    let all = tensors();
    let parts: Vec<_> = all.chunks(2).collect();
    let mut paths = Vec::new();
    for (no, part) in parts.iter().enumerate() {
        let mut metadata = if no == 0 { every_type() } else { Metadata::new() };
        metadata.set("split.no", no as u16);
        metadata.set("split.count", parts.len() as u16);
        metadata.set("split.tensors.count", all.len() as i32);
        change(no, &mut metadata);
        paths.push(folder.file(&format!("m-{:05}-of-{:05}.gguf", no + 1, parts.len())));
        std::fs::write(&paths[no], write(&metadata, part)).unwrap();
    }
    paths
}

#[test]
fn any_part_of_a_split_model_opens_all_of_it() {
    let folder = Folder::new("split");
    for path in write_split(&folder, |_, _| ()) {
        let gguf = Gguf::open(path).unwrap();
        assert_eq!(gguf.parts().len(), 3);
        assert_eq!(gguf.metadata().str("empty string").unwrap(), "");
        assert_eq!(gguf.file(), folder.file("m-00001-of-00003.gguf"));
        assert_holds(&gguf, &tensors());
        assert_eq!(gguf.tensors()[4].part(), 2);
    }
}

#[test]
fn a_missing_part_is_named() {
    let folder = Folder::new("missing");
    let paths = write_split(&folder, |_, _| ());
    std::fs::remove_file(&paths[1]).unwrap();
    let error = Gguf::open(&paths[2]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::SplitMissing { no: 2, count: 3 }), "{error}");
    assert_eq!(error.file(), paths[1]);
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let folder = Folder::new("mixed");
    let refuse = |key: &str, part: usize, value: u32| {
        let paths = write_split(&folder, |no, metadata| {
            if no == part {
                metadata.set(key, value);
            }
        });
        for path in &paths {
            let error = Gguf::open(path).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::SplitValue { key: k, .. } if *k == key), "{error}");
        }
    };
    refuse("split.no", 1, 0);
    refuse("split.count", 1, 4);
    refuse("split.tensors.count", 1, 6);
    // A count that all parts agree on, but that is wrong.
    let paths = write_split(&folder, |_, metadata| metadata.set("split.tensors.count", 6_i32));
    let error = Gguf::open(&paths[0]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::SplitValue { found: 6, expected: 5, .. }), "{error}");
    // A renamed part, parts out of order, and a part in memory.
    let paths = write_split(&folder, |_, _| ());
    let renamed = folder.file("renamed.gguf");
    std::fs::copy(&paths[0], &renamed).unwrap();
    assert!(matches!(Gguf::open(&renamed).unwrap_err().kind(), ErrorKind::SplitName { no: 1, count: 3 }));
    let bytes = std::fs::read(&paths[0]).unwrap();
    assert!(matches!(Gguf::from_bytes(bytes).unwrap_err().kind(), ErrorKind::SplitInMemory { count: 3 }));
    std::fs::copy(&paths[0], &paths[1]).unwrap();
    assert!(matches!(Gguf::open(&paths[0]).unwrap_err().kind(), ErrorKind::SplitValue { key: "split.no", .. }));
}

#[test]
fn a_tensor_in_two_parts_is_refused() {
    let folder = Folder::new("twice");
    for no in 0..2_u16 {
        let mut metadata = Metadata::new();
        metadata.set("split.no", no);
        metadata.set("split.count", 2_u16);
        let path = folder.file(&format!("m-0000{}-of-00002.gguf", no + 1));
        std::fs::write(path, write(&metadata, &tensors()[..1])).unwrap();
    }
    let error = Gguf::open(folder.file("m-00001-of-00002.gguf")).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::DuplicateTensor { .. }), "{error}");
}

#[test]
fn a_written_file_appears_only_when_it_lands() {
    let folder = Folder::new("landing");
    let path = folder.file("m.gguf");
    std::fs::write(&path, "old").unwrap();
    let begin = || {
        let mut writer = GgufWriter::create(&path).unwrap();
        writer.declare("a", &[4], Format::F32).unwrap();
        writer.begin().unwrap()
    };
    let mut data = begin();
    data.append(&[1; 7]).unwrap();
    assert_eq!(data.expected(), Some(("a", 9)));
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    let error = data.land().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::WriteSize { found: 7, expected: 16, .. }), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1, "no temporary file is left");

    let mut data = begin();
    data.tensor_from("a", &[9_u8; 16][..]).unwrap();
    data.land().unwrap();
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.data(gguf.tensor("a").unwrap()), [9; 16]);
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1);
}

#[test]
fn the_writer_refuses_data_that_was_not_declared() {
    let begin = || {
        let mut writer = GgufWriter::new(Vec::new());
        writer.declare("a", &[4], Format::F32).unwrap();
        writer.declare("b", &[32], Format::Q4_0).unwrap();
        writer.begin().unwrap()
    };
    let mut data = begin();
    assert!(matches!(data.tensor("b", &[0; 18]).unwrap_err().kind(), ErrorKind::WriteOrder { .. }));
    assert!(matches!(data.tensor("a", &[0; 15]).unwrap_err().kind(), ErrorKind::WriteSize { .. }));
    assert!(matches!(data.append(&[0; 17]).unwrap_err().kind(), ErrorKind::WriteSize { .. }));
    data.append(&[0; 3]).unwrap();
    assert!(matches!(data.tensor("a", &[0; 16]).unwrap_err().kind(), ErrorKind::WriteOrder { .. }));
    data.append(&[0; 13]).unwrap();
    let too_short = data.tensor_from("b", &[0_u8; 17][..]).unwrap_err();
    assert!(matches!(too_short.kind(), ErrorKind::WriteSize { found: 17, expected: 18, .. }));
    let mut data = begin();
    data.tensor("a", &[0; 16]).unwrap();
    let too_long = data.tensor_from("b", &[0_u8; 19][..]).unwrap_err();
    assert!(matches!(too_long.kind(), ErrorKind::WriteSize { found: 19, expected: 18, .. }));
    assert_eq!(data.expected(), None);
    assert!(matches!(data.append(&[0]).unwrap_err().kind(), ErrorKind::WriteSize { .. }));
    assert!(matches!(data.tensor("c", &[]).unwrap_err().kind(), ErrorKind::WriteOrder { .. }));
}

#[test]
fn the_writer_refuses_declarations_that_no_reader_would_accept() {
    let mut writer = GgufWriter::new(Vec::new());
    let kind = |result: Result<(), hanzo_gguf::GgufError>| result.unwrap_err().kind().clone();
    assert!(matches!(kind(writer.declare(&"n".repeat(64), &[1], Format::F32)), ErrorKind::NameLength { .. }));
    assert!(matches!(kind(writer.declare("a", &[], Format::F32)), ErrorKind::DimCount { found: 0, .. }));
    assert!(matches!(kind(writer.declare("a", &[1; 5], Format::F32)), ErrorKind::DimCount { found: 5, .. }));
    assert!(matches!(kind(writer.declare("a", &[2, 0], Format::F32)), ErrorKind::ZeroDim { .. }));
    assert!(matches!(kind(writer.declare("a", &[33], Format::Q8_0)), ErrorKind::RowLength { row: 33, .. }));
    assert!(matches!(kind(writer.declare("a", &[1 << 40, 1 << 40], Format::F32)), ErrorKind::DimOverflow { .. }));
    writer.declare("a", &[1], Format::F32).unwrap();
    writer.declare("a", &[2], Format::F32).unwrap();
    assert!(matches!(writer.begin().err().unwrap().kind(), ErrorKind::DuplicateTensor { .. }));
    let mut writer = GgufWriter::new(Vec::new());
    writer.metadata_mut().set("general.alignment", 24_u32);
    assert!(matches!(writer.begin().err().unwrap().kind(), ErrorKind::Alignment { found: 24 }));
    let mut writer = GgufWriter::new(Vec::new());
    writer.metadata_mut().set("k".repeat(65536), 1_u8);
    assert!(matches!(writer.begin().err().unwrap().kind(), ErrorKind::NameLength { .. }));
}

#[test]
fn getters_convert_what_fits_and_name_the_key_otherwise() {
    let m = every_type();
    assert_eq!(m.u32("u8").unwrap(), 255);
    assert_eq!(m.i64("i32").unwrap(), i64::from(i32::MIN));
    assert_eq!(m.usize("u16").unwrap(), 65535);
    assert_eq!(m.f32("u8").unwrap(), 255.0);
    assert_eq!(m.f32("f64").unwrap(), std::f32::consts::PI);
    assert!(m.bool("true").unwrap());
    assert_eq!(m.i32s("array.u8").unwrap(), [1, 2]);
    assert_eq!(m.f32s("array.i8").unwrap(), [-1.0, 2.0]);
    assert_eq!(m.bools("array.bool").unwrap(), [true, false, true]);
    assert_eq!(m.opt_u32("none").unwrap(), None);
    assert!(m.strs("array.empty").unwrap().is_empty());
    let strings = m.strs("array.bytes").unwrap();
    assert_eq!((strings.get(0), strings.get_str(0), strings.get_str(1)), (Some(&b"\xff"[..]), None, Some("ok")));
    assert_eq!(strings.iter_lossy().collect::<Vec<_>>(), ["\u{fffd}", "ok"]);
    assert_eq!(m.u32_per_layer("u8", 3).unwrap(), [255; 3]);
    assert_eq!(m.u32_per_layer("array.u8", 2).unwrap(), [1, 2]);

    let text = |error: hanzo_gguf::GgufError| error.to_string();
    assert!(text(m.u32("none").unwrap_err()).contains("metadata key \"none\" is missing"));
    assert!(text(m.u32("u64").unwrap_err()).contains("\"u64\" is 18446744073709551615, out of range for u32"));
    assert!(text(m.u64("i8").unwrap_err()).contains("\"i8\" is -128, out of range for u64"));
    assert!(text(m.u32("f32").unwrap_err()).contains("\"f32\" is an f32, expected an integer"));
    assert!(text(m.bool("u8").unwrap_err()).contains("\"u8\" is a u8, expected a bool"));
    assert!(text(m.str("bytes").unwrap_err()).contains("\"bytes\" is a string that is not UTF-8"));
    assert!(
        text(m.strs("array.u8").unwrap_err()).contains("\"array.u8\" is an array of u8, expected an array of strings")
    );
    assert!(text(m.u32s("array.i64").unwrap_err()).contains("is an array with -9223372036854775808, out of range"));
    assert!(text(m.u32s("array.string").unwrap_err()).contains("expected an array of integers"));
    assert!(text(m.u32_per_layer("array.u8", 3).unwrap_err()).contains("has 2 elements, expected 3"));
}

#[test]
fn keys_keep_their_order_through_set_and_remove() {
    let mut m = Metadata::new();
    for key in ["c", "a", "d", "b"] {
        m.set(key, key);
    }
    m.set("a", 1_u8);
    assert_eq!(m.remove("c"), Some(Value::from("c")));
    assert_eq!(m.remove("c"), None);
    assert_eq!(m.iter().map(|(key, _)| key).collect::<Vec<_>>(), ["a", "d", "b"]);
    assert_eq!(m.get("b"), Some(&Value::from("b")));
    assert_eq!(m.get("a"), Some(&Value::U8(1)));
    assert!(m.contains("d") && !m.contains("c") && m.len() == 3);
}
