//! Which variant of a kernel a shape gets: pure functions of the shape, tested on any host. They
//! know no plan and no device.

use fornax_gguf::TensorType;

/// GPU families of Apple silicon, by `MTLGPUFamily`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// M1, A14.
    Apple7,
    /// M2, A15, A16.
    Apple8,
    /// M3, M4, A17 Pro, A18.
    Apple9,
    /// M5, A19.
    Apple10,
}

/// Rows up to which matrices are read as vectors are multiplied: once for all of them.
pub(crate) const MATVEC_ROWS: u32 = 4;
/// Rows up to which the columns are split over simdgroups.
pub(crate) const SMALL_ROWS: u32 = 16;
/// Rows up to which attention goes in shares of the keys.
pub(crate) const SPLIT_ROWS: u32 = 16;

/// Outputs and simdgroups of a threadgroup of the matvec family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tile {
    /// Outputs, with all columns.
    pub(crate) outs: u32,
    /// Simdgroups, which share the columns.
    pub(crate) simds: u32,
}

/// The tile for a matrix of `outs` × `cols`. Not yet measured on a GPU: the figures are those
/// that others found to be best on Apple7 to Apple9.
pub(crate) fn matvec_tile(ty: TensorType, outs: u32, cols: u32) -> Tile {
    let (outs_each, simds) = match ty {
        TensorType::Q4_0 | TensorType::Q4_1 | TensorType::MXFP4 => (4, 2),
        TensorType::Q4_K | TensorType::Q5_K | TensorType::Q6_K => (2, 2),
        _ => (2, 4),
    };
    // A lane takes 16 columns at a time: a simdgroup with nothing to do is not started.
    let busy = cols.div_ceil(16 * 32).next_power_of_two().min(8);
    // Few outputs or long rows: more of the cores by splitting the columns further.
    let simds = if cols >= 4096 || outs < 512 { 8 } else { simds };
    Tile { outs: outs_each, simds: simds.min(busy) }
}

/// Query heads of one key head that one threadgroup takes together: all of them up to eight, or
/// the largest number that leaves no rest.
pub(crate) fn heads_together(group: u32) -> u32 {
    (1..=8).rev().find(|n| group.is_multiple_of(*n)).unwrap_or(1)
}

/// The same for prefill, where a simdgroup holds a query and a mix of every head in registers:
/// no more of them than leave room for the rest.
pub(crate) fn heads_tiled(group: u32, width: u32) -> u32 {
    let most = (512 / width.max(1)).clamp(1, 4);
    (1..=most).rev().find(|n| group.is_multiple_of(*n)).unwrap_or(1)
}

/// Shares of the keys of one sequence at most, for a table of so many blocks.
pub(crate) fn splits(blocks: u32) -> u32 {
    blocks.clamp(1, 32)
}

/// Parts of a row of logits.
pub(crate) fn argmax_parts(vocab: u32) -> u32 {
    vocab.div_ceil(4096).clamp(1, 64)
}

/// Threads for a row of so many elements, `each` for a thread: whole simdgroups, within the
/// limit of a threadgroup.
pub(crate) fn threads(elements: u32, each: u32) -> u32 {
    elements.div_ceil(each).next_multiple_of(32).clamp(32, 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_the_kernels() {
        for ty in crate::library::WEIGHT_TYPES {
            for outs in [1, 7, 512, 150_000] {
                for cols in [7, 256, 512, 1024, 4096, 14_336] {
                    let t = matvec_tile(*ty, outs, cols);
                    assert!(
                        t.outs * MATVEC_ROWS <= 16 && t.simds <= 8,
                        "{ty} {outs} {cols}: {t:?}"
                    );
                    assert!(32 * t.simds >= t.outs * MATVEC_ROWS, "every output has a thread");
                }
            }
        }
        assert_eq!(matvec_tile(TensorType::Q8_0, 3072, 1024), Tile { outs: 2, simds: 2 });
        assert_eq!(matvec_tile(TensorType::Q8_0, 1024, 3072), Tile { outs: 2, simds: 4 });
        assert_eq!(matvec_tile(TensorType::Q4_0, 1024, 4096), Tile { outs: 4, simds: 8 });
    }

    #[test]
    fn heads_leave_no_rest() {
        let all = [(1, 1), (2, 2), (7, 7), (8, 8), (9, 3), (11, 1), (12, 6), (16, 8)];
        assert_eq!(all.map(|(n, _)| heads_together(n)), all.map(|(_, m)| m));
        let tiled = [(1, 64, 1), (2, 128, 2), (7, 64, 1), (8, 128, 4), (6, 64, 3), (4, 256, 2)];
        assert_eq!(tiled.map(|(n, w, _)| heads_tiled(n, w)), tiled.map(|(_, _, m)| m));
    }

    #[test]
    fn a_decoding_gpu_is_filled() {
        // 40 cores: Qwen3-0.6B has 8 key heads, and a table of a thousand keys 32 blocks.
        assert!(8 * splits(32) >= 40);
        assert!(1024 / matvec_tile(TensorType::Q8_0, 1024, 1024).outs >= 40);
        assert_eq!((argmax_parts(64), argmax_parts(151_936)), (1, 38));
        assert_eq!((threads(7, 4), threads(1024, 4), threads(100_000, 4)), (32, 256, 1024));
    }
}
