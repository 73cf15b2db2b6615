//! Block formats: a scalar, readable (de)quantiser for every tensor type. This is the truth that fast
//! kernels are compared with; it must not know instruction sets or devices.

mod float;
mod simple;

pub use float::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

use crate::{Error, TensorType};

/// Decodes whole blocks: `src` holds `dst.len() / block_len` of them.
///
/// # Errors
/// `is_argument` where the lengths do not fit each other.
pub fn dequantize(ty: TensorType, src: &[u8], dst: &mut [f32]) -> Result<(), Error> {
    check_lengths("dequantising", ty, src.len(), dst.len())?;
    use TensorType::*;
    match ty {
        F32 => float::decode(src, dst, f32::from_le_bytes),
        F16 => float::decode(src, dst, |b| f16_to_f32(u16::from_le_bytes(b))),
        BF16 => float::decode(src, dst, |b| bf16_to_f32(u16::from_le_bytes(b))),
        F64 => float::decode(src, dst, |b| f64::from_le_bytes(b) as f32),
        I8 => float::decode(src, dst, |b| i8::from_le_bytes(b).into()),
        I16 => float::decode(src, dst, |b| i16::from_le_bytes(b).into()),
        I32 => float::decode(src, dst, |b| i32::from_le_bytes(b) as f32),
        I64 => float::decode(src, dst, |b| i64::from_le_bytes(b) as f32),
        Q4_0 => simple::dequantize_q4_0(src, dst),
        Q4_1 => simple::dequantize_q4_1(src, dst),
        Q5_0 => simple::dequantize_q5_0(src, dst),
        Q5_1 => simple::dequantize_q5_1(src, dst),
        Q8_0 => simple::dequantize_q8_0(src, dst),
        Q8_1 => simple::dequantize_q8_1(src, dst),
        _ => return Err(Error::unsupported(format!("dequantising {ty}: not supported"))),
    }
    Ok(())
}

/// Encodes whole blocks: `dst` has room for `src.len() / block_len` of them, exactly.
///
/// # Errors
/// `is_argument` where the lengths do not fit each other; `is_unsupported` where `ty` has no quantiser.
pub fn quantize(ty: TensorType, src: &[f32], dst: &mut [u8]) -> Result<(), Error> {
    check_lengths("quantising", ty, dst.len(), src.len())?;
    use TensorType::*;
    match ty {
        F32 => float::encode(src, dst, f32::to_le_bytes),
        F16 => float::encode(src, dst, |v| f32_to_f16(v).to_le_bytes()),
        BF16 => float::encode(src, dst, |v| f32_to_bf16(v).to_le_bytes()),
        F64 => float::encode(src, dst, |v| f64::from(v).to_le_bytes()),
        Q4_0 => simple::quantize_q4_0(src, dst),
        Q4_1 => simple::quantize_q4_1(src, dst),
        Q5_0 => simple::quantize_q5_0(src, dst),
        Q5_1 => simple::quantize_q5_1(src, dst),
        Q8_0 => simple::quantize_q8_0(src, dst),
        _ => return Err(Error::unsupported(format!("quantising to {ty}: not supported"))),
    }
    Ok(())
}

fn check_lengths(doing: &str, ty: TensorType, bytes: usize, weights: usize) -> Result<(), Error> {
    if ty.row_bytes(weights as u64) == Some(bytes as u64) {
        return Ok(());
    }
    Err(Error::argument(format!(
        "{doing} {ty}: {bytes} bytes against {weights} weights; expected {} bytes for every {}",
        ty.block_bytes(),
        ty.block_len()
    )))
}
