//! Block formats: a scalar, readable (de)quantiser for every tensor type. This is the truth that fast
//! kernels are compared with; it must not know instruction sets or devices.

pub mod codebooks;
mod float;
mod fp4;
mod iq;
mod k;
mod k_quantize;
mod simple;
mod ternary;

pub use float::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
pub use fp4::{e8m0_half, ue4m3_half};

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
        Q2_K => k::dequantize_q2_k(src, dst),
        Q3_K => k::dequantize_q3_k(src, dst),
        Q4_K => k::dequantize_q4_k(src, dst),
        Q5_K => k::dequantize_q5_k(src, dst),
        Q6_K => k::dequantize_q6_k(src, dst),
        Q8_K => k::dequantize_q8_k(src, dst),
        IQ1_S => iq::dequantize_iq1_s(src, dst),
        IQ1_M => iq::dequantize_iq1_m(src, dst),
        IQ2_XXS => iq::dequantize_iq2_xxs(src, dst),
        IQ2_XS => iq::dequantize_iq2_xs(src, dst),
        IQ2_S => iq::dequantize_iq2_s(src, dst),
        IQ3_XXS => iq::dequantize_iq3_xxs(src, dst),
        IQ3_S => iq::dequantize_iq3_s(src, dst),
        IQ4_NL => iq::dequantize_iq4_nl(src, dst),
        IQ4_XS => iq::dequantize_iq4_xs(src, dst),
        TQ1_0 => ternary::dequantize_tq1_0(src, dst),
        TQ2_0 => ternary::dequantize_tq2_0(src, dst),
        MXFP4 => fp4::dequantize_mxfp4(src, dst),
        NVFP4 => fp4::dequantize_nvfp4(src, dst),
    }
    Ok(())
}

/// Encodes whole blocks: `dst` has room for `src.len() / block_len` of them, exactly.
///
/// Weights that are not finite give blocks without meaning, but no error.
///
/// # Errors
/// `is_argument` where the lengths do not fit each other; `is_unsupported` where `ty` has no quantiser.
pub fn quantize(ty: TensorType, src: &[f32], dst: &mut [u8]) -> Result<(), Error> {
    check_lengths("quantising", ty, dst.len(), src.len())?;
    let Some(encode) = quantizer(ty) else {
        let can: Vec<_> = TensorType::ALL.iter().filter(|&&ty| can_quantize(ty)).collect();
        return Err(Error::unsupported(format!(
            "quantising to {ty}: there is no quantiser for it; there are for {can:?}"
        )));
    };
    encode(src, dst);
    Ok(())
}

/// Whether [`quantize`] knows the type.
pub fn can_quantize(ty: TensorType) -> bool {
    quantizer(ty).is_some()
}

/// Encodes whole blocks; the lengths fit.
type Encoder = fn(&[f32], &mut [u8]);

fn quantizer(ty: TensorType) -> Option<Encoder> {
    use TensorType::*;
    Some(match ty {
        F32 => |src, dst| float::encode(src, dst, f32::to_le_bytes),
        F16 => |src, dst| float::encode(src, dst, |v| f32_to_f16(v).to_le_bytes()),
        BF16 => |src, dst| float::encode(src, dst, |v| f32_to_bf16(v).to_le_bytes()),
        F64 => |src, dst| float::encode(src, dst, |v| f64::from(v).to_le_bytes()),
        Q4_0 => simple::quantize_q4_0,
        Q4_1 => simple::quantize_q4_1,
        Q5_0 => simple::quantize_q5_0,
        Q5_1 => simple::quantize_q5_1,
        Q8_0 => simple::quantize_q8_0,
        Q4_K => k_quantize::quantize_q4_k,
        Q5_K => k_quantize::quantize_q5_k,
        Q6_K => k_quantize::quantize_q6_k,
        TQ1_0 => ternary::quantize_tq1_0,
        TQ2_0 => ternary::quantize_tq2_0,
        MXFP4 => fp4::quantize_mxfp4,
        _ => return None,
    })
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
