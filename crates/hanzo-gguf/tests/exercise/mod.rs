//! Good files to damage, and the use of everything that an accepted file offers: shared by the mutation run and the
//! fuzz target.

use std::hint::black_box;

use hanzo_gguf::{Array, Format, Gguf, GgufWriter, Metadata, Value};

/// Small good files that between them use every feature.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut typical = Metadata::new();
    typical.set("general.architecture", "llama");
    typical.set("general.alignment", 32_u32);
    typical.set("llama.rope.freq_base", 10000.0_f32);
    typical.set("tokenizer.ggml.tokens", vec!["<s>", "</s>", "a", "b", "ab"]);
    typical.set("tokenizer.ggml.token_type", vec![3_i32, 3, 1, 1, 1]);
    typical.set("tokenizer.ggml.add_bos_token", true);

    let mut every = Metadata::new();
    every.set("a", 1_u8);
    every.set("b", -1_i8);
    every.set("c", 2_u16);
    every.set("d", -2_i16);
    every.set("e", 3_u32);
    every.set("f", -3_i32);
    every.set("g", 4_u64);
    every.set("h", -4_i64);
    every.set("i", 0.5_f32);
    every.set("j", 0.25_f64);
    every.set("k", false);
    every.set("l", Value::Bytes(vec![0xff]));
    every.set("m", vec![true, false, true, true]);
    every.set("n", Array::nested([Array::nested([Array::from(vec!["x"]), Array::from(vec![1_u8])])]));
    every.set("o", vec![1.0_f64]);

    let mut part = Metadata::new();
    part.set("split.no", 0_u16);
    part.set("split.count", 1_u16);
    part.set("split.tensors.count", 3_i32);

    let none: &[(&str, &[u64], Format)] = &[];
    let some: &[(&str, &[u64], Format)] =
        &[("a", &[32, 2], Format::Q8_0), ("b", &[4], Format::F32), ("c", &[2, 2, 2, 2], Format::F16)];
    let mut all = vec![write(&typical, some), write(&every, none), write(&part, some), write(&Metadata::new(), some)];
    let mut version_2 = all[0].clone();
    version_2[4] = 2;
    all.push(version_2);
    all
}

/// A file with these tensors, all bytes of whose data are 0xa5.
pub fn write(metadata: &Metadata, tensors: &[(&str, &[u64], Format)]) -> Vec<u8> {
    let mut writer = GgufWriter::new(Vec::new());
    writer.metadata_mut().copy_from(metadata);
    for (name, dims, format) in tensors {
        writer.declare(name, dims, *format).unwrap();
    }
    let mut data = writer.begin().unwrap();
    while let Some((_, left)) = data.expected() {
        data.append(&vec![0xa5; left as usize]).unwrap();
    }
    data.finish().unwrap()
}

/// Reads every key by every getter, every element, every byte of every tensor.
pub fn touch(gguf: &Gguf) {
    touch_metadata(gguf.metadata());
    let mut end = 0;
    for info in gguf.tensors() {
        assert_eq!(gguf.tensor(&info.name), Some(info));
        assert_eq!(info.row_len() * info.rows(), info.elements());
        let row = info.format.row_bytes(info.row_len() as usize).expect("whole blocks");
        assert_eq!(info.size(), row as u64 * info.rows());
        let data = gguf.data(info);
        assert_eq!(data.len() as u64, info.size());
        assert_eq!(&*gguf.bytes(info), data);
        black_box(data.iter().fold(0_u8, |sum, b| sum.wrapping_add(*b)));
        end = end.max(info.offset() + info.size());
        assert!(info.offset() + info.size() <= gguf.parts()[info.part()].len() as u64);
    }
    black_box(end);
}

fn touch_metadata(m: &Metadata) {
    for (key, value) in m.iter() {
        assert_eq!(m.get(key).map(encoded_size), Some(encoded_size(value)));
        black_box((m.u32(key).ok(), m.i32(key).ok(), m.u64(key).ok(), m.i64(key).ok(), m.usize(key).ok()));
        black_box((m.f32(key).ok(), m.f64(key).ok(), m.bool(key).ok(), m.str(key).ok()));
        black_box((m.u32s(key).ok(), m.i64s(key).ok(), m.f32s(key).ok(), m.bools(key).ok()));
        black_box((m.u32_per_layer(key, 3).ok(), value.to_string(), format!("{value:?}")));
        if let Ok(strings) = m.strs(key) {
            assert_eq!(strings.iter().count(), strings.len());
            assert!(strings.iter().enumerate().all(|(i, s)| strings.get(i) == Some(s)));
            black_box(strings.iter_lossy().map(|s| s.len()).sum::<usize>());
        }
    }
}

/// Decodes a value to the last nested element, and counts the bytes it stands for.
fn encoded_size(value: &Value) -> usize {
    match value {
        Value::Array(array) => {
            assert_eq!(array.iter().len(), array.len());
            12 + array.iter().map(|element| encoded_size(&element)).sum::<usize>()
        }
        Value::String(_) | Value::Bytes(_) => 8 + value.as_bytes().map_or(0, <[u8]>::len),
        scalar => scalar.value_type().size().expect("a scalar"),
    }
}

/// Writes the model anew. Names longer than the writer's limit are left out.
pub fn rewrite(gguf: &Gguf) -> Vec<u8> {
    let mut writer = GgufWriter::new(Vec::new());
    writer.metadata_mut().copy_from(gguf.metadata());
    let kept: Vec<_> = gguf.tensors().iter().filter(|t| writer.declare(&t.name, &t.dims, t.format).is_ok()).collect();
    let mut data = writer.begin().expect("what was read can be written");
    for info in kept {
        data.tensor(&info.name, gguf.data(info)).expect("sizes agree");
    }
    data.finish().expect("memory takes everything")
}

/// All of it, and what was written reads back the same, byte for byte when written again.
pub fn exercise(gguf: &Gguf) {
    touch(gguf);
    let once = rewrite(gguf);
    // Keys that count tensors are wrong in a copy that left some out; everything else must read.
    if let Ok(again) = Gguf::from_bytes(once.clone()) {
        assert_eq!(rewrite(&again), once);
        assert!(
            again.tensors().iter().all(|t| again.data(t) == gguf.data(gguf.tensor(&t.name).expect("the same names")))
        );
    } else {
        assert!(gguf.metadata().contains("split.tensors.count") || gguf.parts().len() > 1);
    }
}
