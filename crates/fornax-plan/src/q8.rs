//! The 8-bit activations that fast kernels use, defined once so that every device and the
//! reference round alike. It knows no kernel.
//!
//! A row is cut into blocks of 32. With `a` the largest magnitude of a block, `d = a / 127` and
//! `q = round_half_even(x · (127 / a))`, both divisions and the product in f32; an all-zero block
//! has `d = 0`. A block that holds a value that is not finite keeps it in `d` (NaN), so that the
//! damage shows instead of being rounded away.

use fornax_gguf::TensorType;

/// Whether a matrix of this type sees 8-bit activations in [`crate::ActMode::Q8`]: every block
/// format does, plain numbers (F32, F16, BF16, …) do not.
pub fn applies_to(ty: TensorType) -> bool {
    ty.block_len() > 1
}

/// Elements of one block.
pub const BLOCK: usize = 32;

/// Quantises one block; returns its scale `d`.
#[inline]
pub fn quantize_block(x: &[f32], q: &mut [i8]) -> f32 {
    assert_eq!(x.len(), q.len());
    let mut a = 0.0f32;
    for v in x {
        a = if v.is_finite() { a.max(v.abs()) } else { f32::NAN };
        if a.is_nan() {
            q.fill(0);
            return f32::NAN;
        }
    }
    // The reciprocal of the smallest magnitudes overflows; such a block counts as zero.
    let inverse = 127.0 / a;
    if a == 0.0 || !inverse.is_finite() {
        q.fill(0);
        return 0.0;
    }
    for (q, v) in q.iter_mut().zip(x) {
        *q = (v * inverse).round_ties_even() as i8;
    }
    a / 127.0
}

/// Replaces a row by what its 8-bit form stands for; a last block may be shorter than 32.
pub fn round_row(x: &mut [f32]) {
    let mut q = [0i8; BLOCK];
    for block in x.chunks_mut(BLOCK) {
        let q = &mut q[..block.len()];
        let d = quantize_block(block, q);
        for (v, q) in block.iter_mut().zip(q) {
            *v = d * f32::from(*q);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_half_to_even_and_keeps_the_extremes() {
        let mut x = [0.0f32; 32];
        (x[0], x[1], x[2], x[3]) = (127.0, 0.5, 1.5, -127.0);
        let mut q = [0i8; 32];
        assert_eq!(quantize_block(&x, &mut q), 1.0);
        assert_eq!(&q[..4], &[127, 0, 2, -127]);
    }

    #[test]
    fn zero_tiny_and_broken_blocks_are_defined() {
        let mut q = [1i8; 32];
        assert_eq!(quantize_block(&[0.0; 32], &mut q), 0.0);
        assert_eq!(q, [0; 32]);
        assert_eq!(quantize_block(&[1e-40; 32], &mut q), 0.0);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = [1.0; 32];
            x[31] = bad;
            assert!(quantize_block(&x, &mut q).is_nan());
        }
    }
}
