//! What the writer writes: read back equal, to the byte the same each time. It must not know the layout beyond
//! what the reader shows.

use fornax_gguf::{Array, Gguf, GgufWriter, Metadata, StrArray, TensorType, Value};

use crate::bytes;
use crate::oracle::accepted;

fn every_type() -> Metadata {
    let mut m = Metadata::new();
    m.set("u8", 1u8);
    m.set("i8", -1i8);
    m.set("u16", 2u16);
    m.set("i16", -2i16);
    m.set("u32", 3u32);
    m.set("i32", -3i32);
    m.set("u64", 4u64);
    m.set("i64", -4i64);
    m.set("f32", 0.1f32);
    m.set("f64", 0.1f64);
    m.set("bool", true);
    m.set("str", "é\0");
    m.set("bytes", Value::Bytes(b"\xFF".as_slice().into()));
    m.set("u8s", vec![1u8]);
    m.set("i8s", vec![1i8]);
    m.set("u16s", vec![1u16]);
    m.set("i16s", vec![1i16]);
    m.set("u32s", vec![1u32]);
    m.set("i32s", vec![1i32]);
    m.set("u64s", vec![1u64]);
    m.set("i64s", vec![1i64]);
    m.set("f32s", vec![1f32]);
    m.set("f64s", vec![1f64]);
    m.set("bools", vec![true, false]);
    m.set("strs", StrArray::from_iter(["a", "", "ü"]));
    m.set("nested", Value::Array(Array::Nested(vec![Array::U8(vec![1]), Array::Nested(vec![])])));
    m
}

fn written(m: &Metadata, chunk: usize) -> Vec<u8> {
    let mut writer = GgufWriter::new(m).unwrap();
    writer.tensor("one", TensorType::Q8_0, &[32, 3]).unwrap();
    writer.tensor("two", TensorType::F32, &[3]).unwrap();
    writer.tensor("three", TensorType::MXFP4, &[64, 1, 2]).unwrap();
    let mut data = writer.begin(Vec::new()).unwrap();
    for (len, fill) in [(102, 1), (12, 2), (68, 3)] {
        for part in vec![fill; len].chunks(chunk) {
            data.write(part).unwrap();
        }
    }
    data.finish().unwrap()
}

#[test]
fn what_is_written_is_read_back() {
    let m = every_type();
    let file = written(&m, 1000);
    let gguf = accepted(&file);
    assert_eq!(gguf.metadata(), &m);
    assert_eq!(gguf.metadata().iter().next_back().unwrap().0, "nested");
    assert_eq!(gguf.version(), 3);
    let three = gguf.tensor("three").unwrap();
    assert_eq!(
        (three.dims.as_slice(), three.ty, three.len),
        ([64, 1, 2].as_slice(), TensorType::MXFP4, 68)
    );
    assert_eq!(
        (three.cols(), three.rows(), three.row_bytes(), three.n_elements()),
        (64, 2, 34, 128)
    );
    for (name, fill) in [("one", 1), ("two", 2), ("three", 3)] {
        assert!(gguf.data(gguf.tensor(name).unwrap()).iter().all(|&b| b == fill), "{name}");
    }
    assert_eq!(gguf.tensor_bytes(), 102 + 12 + 68);
    assert_eq!(gguf.n_elements(), 96 + 3 + 128);
    assert_eq!(gguf.file_bytes(), file.len() as u64);
    assert_eq!(gguf.tensor("four"), None);
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let m = every_type();
    let file = written(&m, 1000);
    for chunk in [1, 7, 64] {
        assert_eq!(written(&m, chunk), file);
    }
    // Read and written again: equal, order and types included.
    let gguf = Gguf::from_bytes(file.clone()).unwrap();
    assert_eq!(written(gguf.metadata(), 50), file);
}

#[test]
fn the_layout_is_that_of_hand_made_bytes() {
    let by_hand = bytes::valid(3);
    let gguf = Gguf::from_bytes(by_hand.clone()).unwrap();
    let mut writer = GgufWriter::new(gguf.metadata()).unwrap();
    for t in gguf.tensors() {
        writer.tensor(&t.name, t.ty, &t.dims).unwrap();
    }
    let mut data = writer.begin(Vec::new()).unwrap();
    for t in gguf.tensors() {
        data.write(gguf.data(t)).unwrap();
    }
    let mut found = data.finish().unwrap();
    // The gap between the tensors is padding here and a count there.
    let (gap, n) = (found.len() - 64 - 28, found.len());
    found[gap..n - 64].copy_from_slice(&by_hand[gap..n - 64]);
    assert_eq!(found, by_hand);
}

#[test]
fn alignment_is_honoured() {
    let mut m = Metadata::new();
    m.set("general.alignment", 128u32);
    let gguf = accepted(&written(&m, 1000));
    assert_eq!(gguf.alignment(), 128);
    assert!(gguf.tensors().iter().all(|t| t.offset.is_multiple_of(128)));
    m.set("general.alignment", 48u32);
    assert!(GgufWriter::new(&m).unwrap_err().is_malformed());
}

#[test]
fn the_caller_is_told_what_cannot_be() {
    let m = Metadata::new();
    let mut writer = GgufWriter::new(&m).unwrap();
    for (name, dims) in [
        ("", [32].as_slice()),
        ("t", &[]),
        ("t", &[0]),
        ("t", &[1; 5]),
        ("t", &[33]),
        ("t", &[1 << 63, 32]),
    ] {
        let error = writer.tensor(name, TensorType::Q4_0, dims).unwrap_err();
        assert!(error.is_argument(), "{error:?}");
    }
    writer.tensor("t", TensorType::F32, &[1]).unwrap();
    assert_eq!(writer.data_len(), 32);
    let mut data = writer.begin(Vec::new()).unwrap();
    assert!(data.write(&[0; 5]).unwrap_err().is_argument());
    data.write(&[0; 4]).unwrap();
    assert!(data.write(&[0; 1]).unwrap_err().is_argument());
    data.finish().unwrap();

    let mut writer = GgufWriter::new(&m).unwrap();
    writer.tensor("t", TensorType::F32, &[1]).unwrap();
    assert!(writer.begin(Vec::new()).unwrap().finish().unwrap_err().to_string().contains("\"t\""));

    let mut writer = GgufWriter::new(&m).unwrap();
    writer.tensor("t", TensorType::F32, &[1]).unwrap();
    writer.tensor("t", TensorType::F32, &[1]).unwrap();
    assert!(writer.begin(Vec::new()).unwrap_err().is_argument());
}
