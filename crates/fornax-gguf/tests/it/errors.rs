//! What messages say, word for word: what was being done, on what, found against expected, what to do. It must
//! not test what is refused; other tests do.

use fornax_gguf::{Gguf, Metadata, TensorType, blocks};

use crate::bytes::{header, kv, kv_array, kv_u32, t, tensor, valid, with_data};

fn opening(bytes: &[u8]) -> String {
    Gguf::from_bytes(bytes.to_vec()).unwrap_err().to_string()
}

fn one_tensor(dims: &[u64], type_id: u32, offset: u64) -> String {
    opening(&with_data(
        [header(3, 1, 0), tensor("blk.0.w", dims, type_id, offset)].concat(),
        32,
        &[0; 64],
    ))
}

fn one_key(kv: &[u8]) -> String {
    opening(&[&header(3, 0, 1), kv].concat())
}

#[test]
fn of_the_header() {
    assert_eq!(
        opening(b""),
        "reading the magic: the file is empty, expected a GGUF file; fetch it again"
    );
    assert_eq!(
        opening(b"<!DOCTYPE html>"),
        "reading the magic: found \"<!DO\", expected \"GGUF\"; this is a web page, the download went wrong"
    );
    assert_eq!(
        opening(&valid(0x0300_0000)),
        "reading the version: found 0x03000000, which is version 3 of a big-endian file; expected a \
         little-endian one, convert the model again"
    );
    assert_eq!(opening(&valid(4)), "reading the version: unsupported version 4, expected 2 or 3");
    assert_eq!(
        opening(&valid(3)[..20]),
        "reading the number of metadata keys at byte 16: 8 bytes needed, 4 left; the file is cut or damaged, \
         fetch it again"
    );
    assert_eq!(
        opening(&header(3, 1 << 56, 0)),
        "reading 0 metadata keys and 72057594037927936 tensors at byte 24: 1729382256910270464 bytes needed, 0 \
         left; the file is cut or damaged, fetch it again"
    );
}

#[test]
fn of_metadata() {
    assert_eq!(
        one_key(&kv_array("tokens", t::STRING, 1 << 40, &[])),
        "reading 1099511627776 elements of the value of metadata key \"tokens\" at byte 54: 8796093022208 \
         bytes needed, 0 left; the file is cut or damaged, fetch it again"
    );
    assert_eq!(
        one_key(&kv("k", t::BOOL, &[2])),
        "reading the value of metadata key \"k\": found 2 for a bool, expected 0 or 1"
    );
    assert_eq!(
        one_key(&kv("k", 13, &[0])),
        "reading the value of metadata key \"k\": unknown value type 13, expected 0 to 12; the file is damaged \
         or newer than this program"
    );
    assert_eq!(
        one_key(&kv_u32("general.alignment", 24)),
        "reading metadata key \"general.alignment\": found 24, expected a power of two from 8 to 65536"
    );
    assert_eq!(
        one_key(&kv("", t::U8, &[0])),
        "reading the name of metadata key 0 at byte 24: it is empty"
    );
    let mut m = Metadata::new();
    m.set("x.heads", vec![1i32, 2]);
    m.set("x.\u{7}", -1i32);
    assert_eq!(
        m.per_layer_u32("x.heads", 3).unwrap_err().to_string(),
        "reading metadata key \"x.heads\": an array of 2 values for a model of 3 layers; expected one value for \
         all layers or one for each"
    );
    assert_eq!(
        m.f32_array("x.heads").unwrap_err().to_string(),
        "reading metadata key \"x.heads\": found array of i32, expected array of f32"
    );
    // Names from files are escaped and cut.
    assert_eq!(
        m.u32("x.\u{7}").unwrap_err().to_string(),
        "reading metadata key \"x.\\u{7}\": found -1, expected an integer that fits u32"
    );
    assert_eq!(
        m.require_str(&"k".repeat(100)).unwrap_err().to_string(),
        format!(
            "reading metadata: key \"{}\"… (100 bytes) is absent, expected a string; convert the model again \
             with a current converter",
            "k".repeat(80)
        )
    );
}

#[test]
fn of_tensors() {
    assert_eq!(
        one_tensor(&[4, 0], 0, 0),
        "reading the shape of tensor \"blk.0.w\": a dimension of 0 in [4, 0]"
    );
    assert_eq!(
        one_tensor(&[1 << 31, 1 << 31, 4], 0, 0),
        "reading tensor \"blk.0.w\": F32 of shape [2147483648, 2147483648, 4] has more bytes than 64 bits can \
         count"
    );
    assert_eq!(
        one_tensor(&[33], 2, 0),
        "reading tensor \"blk.0.w\": rows of 33 weights are not whole Q4_0 blocks of 32"
    );
    assert_eq!(
        one_tensor(&[32], 4, 0),
        "reading tensor \"blk.0.w\": its type 4 is a retired type of earlier GGUF writers; convert the model \
         again"
    );
    assert_eq!(
        one_tensor(&[8], 0, 33),
        "reading tensor \"blk.0.w\": its offset 33 is not a multiple of the alignment 32"
    );
    assert_eq!(
        one_tensor(&[8], 0, 64),
        "reading tensor \"blk.0.w\": 32 bytes at offset 64 of the data, which starts at byte 64, end past the \
         file of 128 bytes; the file is cut or damaged, fetch it again"
    );
}

#[test]
fn of_blocks() {
    let error = blocks::dequantize(TensorType::Q4_0, &[0; 17], &mut [0.0; 32]).unwrap_err();
    assert!(error.is_argument());
    assert_eq!(
        error.to_string(),
        "dequantising Q4_0: 17 bytes against 32 weights; expected 18 bytes for every 32"
    );
    let error = blocks::quantize(TensorType::IQ4_NL, &[0.0; 32], &mut [0; 18]).unwrap_err();
    assert!(error.is_unsupported());
    assert_eq!(
        error.to_string(),
        "quantising to IQ4_NL: there is no quantiser for it; there are for [F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, \
         Q8_0, Q4_K, Q5_K, Q6_K, F64, BF16, TQ1_0, TQ2_0, MXFP4]"
    );
}
