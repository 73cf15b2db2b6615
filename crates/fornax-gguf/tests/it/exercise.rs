//! Everything that a caller may do with bytes of unknown origin. Shared with the fuzz targets; it must not
//! assume that the bytes are sound.

use fornax_gguf::{Gguf, TensorType, blocks};

/// Most weights of a tensor that are decoded.
const WEIGHTS_MAX: u64 = 1 << 16;

/// Opens `bytes`; where that succeeds, reads every key by every getter and decodes every small tensor.
/// Gives whether they opened.
pub(crate) fn open(bytes: &[u8]) -> bool {
    let Ok(gguf) = Gguf::from_bytes(bytes.to_vec()) else { return false };
    let m = gguf.metadata();
    for (key, value) in m.iter() {
        assert_eq!(m.get(key).map(|v| v.type_name()), Some(value.type_name()));
        let _ = (m.u32(key), m.u64(key), m.i32(key), m.f32(key), m.bool(key), m.str(key));
        let _ = (m.u32_array(key), m.i32_array(key), m.f32_array(key), m.bool_array(key));
        let _ = (m.per_layer_u32(key, 3), m.per_layer_f32(key, 3), m.per_layer_bool(key, 3));
        if let Ok(Some(strings)) = m.str_array(key) {
            assert_eq!(strings.iter().count(), strings.len());
        }
    }
    for tensor in gguf.tensors() {
        assert_eq!(gguf.tensor(&tensor.name), Some(tensor));
        let data = gguf.data(tensor);
        assert_eq!(data.len() as u64, tensor.row_bytes() * tensor.rows());
        if tensor.n_elements() <= WEIGHTS_MAX {
            let mut weights = vec![0.0; tensor.n_elements() as usize];
            blocks::dequantize(tensor.ty, data, &mut weights).expect("lengths fit");
        }
    }
    true
}

/// Decodes `bytes` after the first as blocks of the type that the first names, and encodes the result again.
pub(crate) fn blocks(bytes: &[u8]) {
    let Some((&first, bytes)) = bytes.split_first() else { return };
    let ty = TensorType::ALL[usize::from(first) % TensorType::ALL.len()];
    let n = bytes.len() / ty.block_bytes();
    let src = &bytes[..n * ty.block_bytes()];
    let mut weights = vec![0.0; n * ty.block_len()];
    blocks::dequantize(ty, src, &mut weights).expect("lengths fit");
    for ty in TensorType::ALL.iter().copied().filter(|&ty| blocks::can_quantize(ty)) {
        let whole = weights.len() / ty.block_len() * ty.block_len();
        let mut packed = vec![0; whole / ty.block_len() * ty.block_bytes()];
        blocks::quantize(ty, &weights[..whole], &mut packed).expect("lengths fit");
        let mut again = vec![0.0; whole];
        blocks::dequantize(ty, &packed, &mut again).expect("lengths fit");
    }
}
