//! Random weights as fast as memory takes them: a pool of encoded blocks is made once per type and scale, and matrices
//! are filled with blocks drawn from it. Knows no model.

use anyhow::Result;
use fornax_gguf::{TensorType, blocks};

/// Weights in one piece of the pool; a whole number of blocks of every type.
const PIECE: usize = 256;
/// Pieces in the pool: enough that no row of a matrix repeats another.
const PIECES: usize = 4096;

/// SplitMix64 (Steele, Lea and Flood 2014).
#[derive(Clone, Debug)]
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Near enough to a unit normal: the sum of four uniform 16-bit numbers (Irwin-Hall), scaled.
    fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: u32 = (0..4).map(|i| (bits >> (16 * i)) as u32 & 0xffff).sum();
        // The sum has mean 2 and variance 4/12 in units of 2^16.
        (sum as f32 / 65_536.0 - 2.0) * 3.0_f32.sqrt()
    }
}

/// Encoded weights of one type and one standard deviation.
#[derive(Debug)]
pub(crate) struct Pool {
    bytes: Vec<u8>,
    piece_bytes: usize,
    ty: TensorType,
}

impl Pool {
    /// # Errors
    /// When the type has no quantiser.
    pub(crate) fn new(ty: TensorType, deviation: f32, rng: &mut Rng) -> Result<Pool> {
        let weights: Vec<f32> = (0..PIECE * PIECES).map(|_| rng.normal() * deviation).collect();
        let piece_bytes = PIECE / ty.block_len() * ty.block_bytes();
        let mut bytes = vec![0; piece_bytes * PIECES];
        blocks::quantize(ty, &weights, &mut bytes)?;
        Ok(Pool { bytes, piece_bytes, ty })
    }

    /// Hands out `len` bytes of random whole blocks in pieces of about a megabyte.
    pub(crate) fn pour(
        &self,
        len: u64,
        rng: &mut Rng,
        mut into: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        debug_assert!(len.is_multiple_of(self.ty.block_bytes() as u64));
        let mut chunk = Vec::with_capacity((1 << 20) + self.piece_bytes);
        let mut left = len;
        while left > 0 {
            chunk.clear();
            while chunk.len() < 1 << 20 && left > 0 {
                let at = (rng.next() % PIECES as u64) as usize * self.piece_bytes;
                let take = left.min(self.piece_bytes as u64);
                chunk.extend_from_slice(&self.bytes[at..at + take as usize]);
                left -= take;
            }
            into(&chunk)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_have_the_asked_spread_and_the_seed_decides_them() {
        for ty in [TensorType::F16, TensorType::Q8_0, TensorType::Q4_K] {
            let fill = |seed| {
                let mut rng = Rng(seed);
                let pool = Pool::new(ty, 0.05, &mut rng).unwrap();
                let len = 65_536 / ty.block_len() * ty.block_bytes();
                let mut bytes = Vec::new();
                pool.pour(len as u64, &mut rng, |b| {
                    bytes.extend_from_slice(b);
                    Ok(())
                })
                .unwrap();
                assert_eq!(bytes.len(), len);
                bytes
            };
            assert_eq!(fill(1), fill(1));
            assert_ne!(fill(1), fill(2));
            let mut weights = vec![0.0; 65_536];
            blocks::dequantize(ty, &fill(1), &mut weights).unwrap();
            let mean = weights.iter().sum::<f32>() / 65_536.0;
            let deviation = (weights.iter().map(|w| w * w).sum::<f32>() / 65_536.0).sqrt();
            assert!(
                mean.abs() < 0.002 && (deviation - 0.05).abs() < 0.002,
                "{ty} {mean} {deviation}"
            );
        }
    }
}
