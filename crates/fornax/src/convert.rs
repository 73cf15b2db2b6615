//! Which type each tensor of a model gets when the model as a whole is to be of one type. Pure; reads no weight.
//! Follows the habit of llama.cpp's quantiser where that is what readers of such files expect.

use fornax_gguf::TensorType;

/// Tensors whose values steer other tensors; they are small and lose too much in blocks.
const KEPT: &[&str] =
    &["ffn_gate_inp", "shortconv.conv", "ssm_", "time_mix", "position_embd", "rope_"];

/// The type to store a tensor in, or `None` to leave it as it is.
///
/// Vectors and steering tensors stay. The output matrix is where errors show at once: below six bits it
/// is Q6_K. Rows that are no whole blocks of a type get the nearest type of shorter blocks.
pub(crate) fn target(
    name: &str,
    dims: &[u64],
    is_output: bool,
    to: TensorType,
) -> Option<TensorType> {
    let matrix = dims.iter().filter(|&&d| d > 1).count() >= 2 && name.ends_with(".weight");
    if !matrix || name.contains("norm") || KEPT.iter().any(|k| name.contains(k)) {
        return None;
    }
    let to = if is_output && to.bits_per_weight() < 6.0 { TensorType::Q6_K } else { to };
    let fits = |ty: &TensorType| ty.row_bytes(dims[0]).is_some();
    [to, shorter(to), TensorType::F16].into_iter().find(fits)
}

/// The type of blocks of 32 that stands in for one of 256.
fn shorter(ty: TensorType) -> TensorType {
    match ty {
        TensorType::Q4_K => TensorType::Q5_0,
        TensorType::Q5_K => TensorType::Q5_1,
        _ => TensorType::Q8_0,
    }
}

/// Whether `name` is the matrix that makes the logits, in a model that has an `output.weight` or not.
pub(crate) fn is_output(name: &str, has_output: bool) -> bool {
    name == if has_output { "output.weight" } else { "token_embd.weight" }
}

/// `general.file_type` as llama.cpp numbers it, for the types that have a number.
pub(crate) fn file_type(ty: TensorType) -> Option<u32> {
    Some(match ty {
        TensorType::F32 => 0,
        TensorType::F16 => 1,
        TensorType::Q4_0 => 2,
        TensorType::Q4_1 => 3,
        TensorType::Q8_0 => 7,
        TensorType::Q5_0 => 8,
        TensorType::Q5_1 => 9,
        TensorType::Q4_K => 14,
        TensorType::Q5_K => 16,
        TensorType::Q6_K => 18,
        TensorType::BF16 => 32,
        TensorType::MXFP4 => 38,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use TensorType::{F16, Q4_K, Q5_0, Q6_K, Q8_0};

    #[test]
    fn tensors_get_the_type_that_fits_them() {
        for (name, dims, output, to, want) in [
            ("blk.0.attn_q.weight", &[2048, 2048][..], false, Q4_K, Some(Q4_K)),
            ("blk.0.attn_q.weight", &[576, 576], false, Q4_K, Some(Q5_0)),
            ("blk.0.attn_q.weight", &[80, 80], false, Q4_K, Some(F16)),
            ("blk.0.ffn_up_exps.weight", &[256, 64, 8], false, Q4_K, Some(Q4_K)),
            ("output.weight", &[2048, 32000], true, Q4_K, Some(Q6_K)),
            ("output.weight", &[576, 32000], true, Q4_K, Some(Q8_0)),
            ("output.weight", &[576, 32000], true, Q8_0, Some(Q8_0)),
            ("blk.0.attn_norm.weight", &[2048], false, Q4_K, None),
            ("blk.0.attn_q.bias", &[2048], false, Q4_K, None),
            ("blk.0.ffn_gate_inp.weight", &[2048, 64], false, Q4_K, None),
        ] {
            assert_eq!(target(name, dims, output, to), want, "{name} {dims:?} {to}");
        }
    }
}
