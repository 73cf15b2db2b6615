//! Matrices taken apart into planes at load (`kernels/planes.cuh`): which formats, how many bytes, and the work itself,
//! which the GPU does. Matrices that are read together become one. It knows no op.

use std::collections::HashMap;
use std::sync::Arc;

use fornax_gguf::TensorType;
use fornax_plan::{Result, WeightRef};

use crate::args::RetileArgs;
use crate::driver::{Gpu, Memory, Module};
use crate::kernels::entry;

/// The formats that have planes, by their number in the kernels.
pub(crate) const PLANED: &[TensorType] = &[
    TensorType::Q8_0,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q4_K,
    TensorType::Q5_K,
    TensorType::Q6_K,
    TensorType::MXFP4,
];

/// The kernels' number of a format; none where it has no planes.
pub(crate) fn number(ty: TensorType) -> Option<u32> {
    PLANED.iter().position(|t| *t == ty).map(|n| n as u32)
}

/// Bytes of a chunk of 32 blocks in a ring.
pub(crate) fn slot_bytes(ty: TensorType) -> u32 {
    match ty {
        TensorType::Q8_0 => 1088,
        TensorType::Q4_1 => 640,
        TensorType::Q5_0 | TensorType::Q5_K => 704,
        TensorType::Q5_1 => 768,
        TensorType::Q6_K => 848,
        TensorType::MXFP4 => 544,
        _ => 576,
    }
}

/// Bytes of a matrix of `rows` rows of `nb` blocks; the rest behind it lets the last copy of a row be 4 bytes wide.
fn bytes(ty: TensorType, rows: u64, nb: u64) -> u64 {
    let (n, odd) = (rows * nb, rows * (nb & 1));
    let whole = match ty {
        TensorType::Q8_0 => 34 * n + 2 * odd,
        TensorType::Q4_0 => 18 * n + 2 * odd,
        TensorType::Q4_1 => 20 * n,
        TensorType::Q5_0 => 22 * n + 2 * odd,
        TensorType::Q5_1 => 24 * n,
        TensorType::Q5_K => 22 * n,
        TensorType::Q6_K => 26 * n + 2 * (n / 8 + rows * ((nb / 8) & 1)),
        TensorType::MXFP4 => 17 * n + rows * (nb.wrapping_neg() & 3),
        _ => 18 * n,
    };
    whole + 16
}

/// Bytes that go to the GPU at once.
const STAGING: usize = 64 << 20;

type Key = (Vec<usize>, bool);

/// The planes made so far.
#[derive(Debug)]
pub(crate) struct Planes {
    gpu: Arc<Gpu>,
    module: Arc<Module>,
    staging: Memory,
    made: HashMap<Key, u64>,
    memory: Vec<Memory>,
    pub(crate) bytes: u64,
}

impl Planes {
    pub(crate) fn new(gpu: &Arc<Gpu>, module: Arc<Module>) -> Result<Planes> {
        let staging = gpu.alloc(STAGING)?;
        let made = HashMap::new();
        Ok(Planes { gpu: Arc::clone(gpu), module, staging, made, memory: Vec::new(), bytes: 0 })
    }

    /// The address of matrices of one format and width as one: row by row in turn, or one after the other.
    pub(crate) fn of(&mut self, parts: &[&WeightRef], in_turn: bool) -> Result<u64> {
        let key = (parts.iter().map(|w| w.bytes().as_ptr() as usize).collect(), in_turn);
        if let Some(at) = self.made.get(&key) {
            return Ok(*at);
        }
        let (ty, nb) = (parts[0].ty, parts[0].cols / 32);
        let rows = |w: &WeightRef| w.rows * w.experts;
        let all: u32 = parts.iter().map(|w| rows(w)).sum();
        let len = bytes(ty, all.into(), nb.into());
        let to = self.gpu.alloc(len as usize)?;
        let function = self.module.function(&entry("retile", ty))?;
        let mut before = 0;
        for (ix, w) in parts.iter().enumerate() {
            let step = if in_turn { parts.len() as u32 } else { 1 };
            let base = if in_turn { ix as u32 } else { before };
            before += rows(w);
            let at_once = (STAGING / w.row_bytes()).max(1) * w.row_bytes();
            for (piece, data) in w.bytes().chunks(at_once).enumerate() {
                let done = (piece * at_once / w.row_bytes()) as u32;
                let n = (data.len() / w.row_bytes()) as u32;
                let (staging, fits) = (self.staging.ptr, data.len() <= self.staging.len);
                assert!(fits, "invariant: a row is smaller than the staging memory");
                self.gpu.write(staging, data)?;
                let base = base + done * step;
                let constants = RetileArgs { rows: n, nb, base, step, all }.words();
                let grid = ((u64::from(n) * u64::from(nb)).div_ceil(256) as u32, 1);
                let pointers = [staging, to.ptr, w.row_bytes() as u64];
                self.gpu.launch(&function, grid, 256, 0, &constants, &pointers)?;
            }
        }
        self.bytes += len;
        let at = to.ptr;
        self.memory.push(to);
        self.made.insert(key, at);
        Ok(at)
    }

    /// Gives up what is needed at load alone; returns the matrices' memory.
    pub(crate) fn finish(self) -> Result<Vec<Memory>> {
        self.gpu.finish()?;
        Ok(self.memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_are_as_large_as_blocks_but_for_the_padding_of_odd_rows() {
        for ty in PLANED {
            let unit = (ty.block_len() / 32) as u64;
            for blocks in [4, 8, 3 * unit * 4] {
                let nb = blocks * unit;
                let raw = nb * 32 / ty.block_len() as u64 * ty.block_bytes() as u64;
                assert_eq!(bytes(*ty, 10, nb), 10 * raw + 16, "{ty} {nb}");
            }
            let raw = 3 * unit * 32 / ty.block_len() as u64 * ty.block_bytes() as u64;
            assert!(bytes(*ty, 10, 3 * unit) <= 10 * (raw + 3) + 16, "{ty}");
        }
    }
}
