//! Plain element types: floats of every width and integers. It must not know blocks.

/// Widens IEEE half precision; exact, subnormals included.
#[inline]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7FFF);
    // Conversion by integers and selects, so that it vectorises and does not depend on how the host treats
    // subnormals: a half subnormal is its integer value times 2^-24.
    let normal = (magnitude << 13) + (112 << 23);
    let subnormal = (magnitude as f32 * f32::from_bits(0x3380_0000)).to_bits();
    let special = (magnitude << 13) | 0x7F80_0000;
    let widened = if magnitude >= 0x7C00 {
        special
    } else if magnitude < 0x0400 {
        subnormal
    } else {
        normal
    };
    f32::from_bits(sign | widened)
}

/// Narrows to IEEE half precision, to nearest, ties to even; overflow becomes infinity, NaN stays NaN.
#[inline]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7FFF_FFFF;
    let narrowed = if magnitude > 0x7F80_0000 {
        0x7E00 | ((magnitude >> 13) & 0x03FF) as u16
    } else if magnitude >= 0x4780_0000 {
        0x7C00
    } else if magnitude < 0x3880_0000 {
        // Below 2^-14: adding 0.5 puts the unit of the half subnormals, 2^-24, at the last bit of the sum,
        // and the addition rounds to even.
        ((f32::from_bits(magnitude) + 0.5).to_bits() - 0.5f32.to_bits()) as u16
    } else {
        // A carry out of the significand moves on to the exponent, up to infinity, as it should.
        let rounded = magnitude - (112 << 23) + 0x0FFF + ((magnitude >> 13) & 1);
        (rounded >> 13) as u16
    };
    sign | narrowed
}

/// Widens the upper half of single precision; exact.
#[inline]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Narrows to the upper half of single precision, to nearest, ties to even; NaN becomes quiet.
#[inline]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if bits & 0x7FFF_FFFF > 0x7F80_0000 {
        return (bits >> 16) as u16 | 0x0040;
    }
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// Decodes elements of `N` little-endian bytes each.
pub(super) fn decode<const N: usize>(src: &[u8], dst: &mut [f32], from: impl Fn([u8; N]) -> f32) {
    for (out, &chunk) in dst.iter_mut().zip(src.as_chunks::<N>().0) {
        *out = from(chunk);
    }
}

/// Encodes elements to `N` little-endian bytes each.
pub(super) fn encode<const N: usize>(src: &[f32], dst: &mut [u8], to: impl Fn(f32) -> [u8; N]) {
    for (chunk, &value) in dst.as_chunks_mut::<N>().0.iter_mut().zip(src) {
        *chunk = to(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of an IEEE half by its definition.
    fn by_definition(bits: u16) -> f64 {
        let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
        let (exponent, significand) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3FF));
        match exponent {
            0 => sign * significand * 2f64.powi(-24),
            31 if significand == 0.0 => sign * f64::INFINITY,
            31 => f64::NAN,
            _ => sign * (1024.0 + significand) * 2f64.powi(exponent - 25),
        }
    }

    #[test]
    fn every_half_widens_exactly_and_comes_back() {
        for bits in 0..=u16::MAX {
            let (found, expected) = (f16_to_f32(bits), by_definition(bits));
            if expected.is_nan() {
                assert!(found.is_nan() && f16_to_f32(f32_to_f16(found)).is_nan(), "{bits:#06x}");
            } else {
                assert_eq!(f64::from(found).to_bits(), expected.to_bits(), "{bits:#06x}");
                assert_eq!(f32_to_f16(found), bits, "{bits:#06x}");
            }
        }
    }

    #[test]
    fn narrowing_rounds_to_nearest_and_ties_to_even() {
        // Between every two neighbours: the middle goes to the even one, its neighbours to theirs.
        for bits in 0..0x7BFF {
            let (low, high) = (by_definition(bits), by_definition(bits + 1));
            let middle = ((low + high) / 2.0) as f32;
            let even = bits + (bits & 1);
            for sign in [1.0, -1.0] {
                let signed = |bits: u16| if sign < 0.0 { bits | 0x8000 } else { bits };
                assert_eq!(f32_to_f16(sign * middle), signed(even), "{bits:#06x}");
                assert_eq!(f32_to_f16(sign * middle.next_down()), signed(bits), "{bits:#06x}");
                assert_eq!(f32_to_f16(sign * middle.next_up()), signed(bits + 1), "{bits:#06x}");
            }
        }
        assert_eq!(f32_to_f16(65519.996), 0x7BFF);
        assert_eq!(f32_to_f16(65520.0), 0x7C00);
        assert_eq!(f32_to_f16(f32::MAX), 0x7C00);
        assert_eq!(f32_to_f16(f32::MIN_POSITIVE), 0);
    }

    #[test]
    fn the_upper_half_rounds_to_nearest_and_ties_to_even() {
        for bits in (0..0x7F7F).step_by(7) {
            let at = |low: u32| f32_to_bf16(f32::from_bits(u32::from(bits) << 16 | low));
            assert_eq!((at(0), at(0x7FFF), at(0x8001)), (bits, bits, bits + 1));
            assert_eq!(at(0x8000), bits + (bits & 1));
            assert_eq!(bf16_to_f32(bits).to_bits(), u32::from(bits) << 16);
        }
        assert!(bf16_to_f32(f32_to_bf16(f32::from_bits(0x7F80_0001))).is_nan());
        assert_eq!(f32_to_bf16(f32::INFINITY), 0x7F80);
        assert_eq!(f32_to_bf16(f32::MAX), 0x7F80);
    }
}
