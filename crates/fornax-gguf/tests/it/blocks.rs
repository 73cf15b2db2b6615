//! Block formats against the fixtures of an independent implementation. It must not know how blocks are laid out.

use std::path::{Path, PathBuf};

use fornax_gguf::{TensorType, blocks};
use serde_json::Value;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/quant-blocks")
}

fn read(name: &str) -> Vec<u8> {
    let path = fixtures().join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

fn index() -> Vec<Value> {
    serde_json::from_slice(&read("index.json")).unwrap()
}

/// Distance in representable values; 0 for two NaNs.
fn ulps(a: f32, b: f32) -> u64 {
    let order = |v: f32| {
        let bits = i64::from(v.to_bits());
        if bits & 0x8000_0000 != 0 { 0x8000_0000 - bits } else { bits }
    };
    if a.is_nan() && b.is_nan() { 0 } else { order(a).abs_diff(order(b)) }
}

#[test]
fn every_type_decodes_as_the_fixtures_say() {
    let index = index();
    assert_eq!(index.len(), 26);
    for entry in &index {
        let name = entry["type"].as_str().unwrap();
        let ty = TensorType::parse(name).unwrap();
        assert_eq!(u64::from(ty.id()), entry["ggml_type_id"].as_u64().unwrap(), "{name}");
        assert_eq!(ty.block_len() as u64, entry["block_elements"].as_u64().unwrap(), "{name}");
        assert_eq!(ty.block_bytes() as u64, entry["block_bytes"].as_u64().unwrap(), "{name}");
        let src = read(&format!("{name}.blocks.bin"));
        let expected = floats(&read(&format!("{name}.f32.bin")));
        let mut found = vec![f32::NAN; expected.len()];
        blocks::dequantize(ty, &src, &mut found).unwrap();
        for (i, (&a, &b)) in found.iter().zip(&expected).enumerate() {
            assert!(ulps(a, b) <= 1, "{name} weight {i}: {a:e}, expected {b:e}");
        }
        let exact = found.iter().zip(&expected).filter(|(a, b)| a.to_bits() == b.to_bits()).count();
        println!("{name}: {exact} of {} equal to the bit", found.len());
    }
}

#[test]
fn quantisers_give_the_bytes_of_the_fixtures() {
    let mut seen = Vec::new();
    for entry in index().iter().filter(|e| e.get("quantize_rows").is_some()) {
        let name = entry["type"].as_str().unwrap();
        let ty = TensorType::parse(name).unwrap();
        let src = floats(&read(&format!("{name}.quantize.in.f32.bin")));
        let expected = read(&format!("{name}.quantize.out.bin"));
        let mut found = vec![0; expected.len()];
        blocks::quantize(ty, &src, &mut found).unwrap();
        if let Some(at) = (0..found.len()).find(|&i| found[i] != expected[i]) {
            panic!("{name}: byte {at} (block {}) differs", at / ty.block_bytes());
        }
        seen.push(name.to_owned());
    }
    assert_eq!(seen, ["BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0"]);
}

/// Numbers of a bell curve, the same on every run.
fn weights(n: usize) -> Vec<f32> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u32 << 24) as f32
    };
    (0..n).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).map(|v| v * 0.02).collect()
}

/// Error of a type on `weights`, relative to the weights, both as root mean squares.
fn relative_error(ty: TensorType, weights: &[f32]) -> f64 {
    let bytes = ty.row_bytes(weights.len() as u64).unwrap() as usize;
    let mut packed = vec![0; bytes];
    blocks::quantize(ty, weights, &mut packed).unwrap();
    let mut found = vec![0.0; weights.len()];
    blocks::dequantize(ty, &packed, &mut found).unwrap();
    let square = |v: f64| v * v;
    let error: f64 = found.iter().zip(weights).map(|(a, b)| square(f64::from(a - b))).sum();
    (error / weights.iter().map(|&w| square(f64::from(w))).sum::<f64>()).sqrt()
}

#[test]
fn quantisers_keep_what_their_bits_allow() {
    let weights = weights(64 * 256);
    // A little above what was measured; a wrong scale or a swapped half byte is far above.
    let bounds = [
        (TensorType::F32, 0.0),
        (TensorType::F64, 0.0),
        (TensorType::F16, 0.0003),
        (TensorType::BF16, 0.002),
        (TensorType::Q8_0, 0.01),
        (TensorType::Q6_K, 0.02),
        (TensorType::Q5_K, 0.04),
        (TensorType::Q5_1, 0.05),
        (TensorType::Q5_0, 0.05),
        (TensorType::Q4_K, 0.08),
        (TensorType::Q4_1, 0.1),
        (TensorType::Q4_0, 0.1),
        (TensorType::MXFP4, 0.15),
        (TensorType::TQ2_0, 1.0),
        (TensorType::TQ1_0, 1.0),
    ];
    for (ty, bound) in bounds {
        let error = relative_error(ty, &weights);
        println!("{ty}: {error:.5}");
        assert!(error <= bound, "{ty}: {error} above {bound}");
    }
}
