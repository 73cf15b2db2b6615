//! A stage of a decode step as the kernels read it, word for word `Stage` of `kernels/fast/stage.cuh`, and how much
//! shared memory stages need. It knows no plan.

/// Threads of a block of whole steps: few, because what all warps do alike is what takes long.
pub(crate) const THREADS: u32 = 256;
/// Threads of a block of products of any number of rows.
pub(crate) const ROWS_THREADS: u32 = 512;
/// Parts of a context that scratch has room for.
pub(crate) const PARTS: u32 = 16;

pub(crate) const ROUND: u32 = 0;
pub(crate) const NORM: u32 = 1;
pub(crate) const MERGE: u32 = 2;
pub(crate) const ROWS: u32 = 0;
pub(crate) const GATED: u32 = 1;
pub(crate) const HEAD: u32 = 2;
pub(crate) const DENSE: u32 = 0;
pub(crate) const ATTEND: u32 = 1;
pub(crate) const NORM_ROWS: u32 = 2;

/// One stage; the fields are explained where the kernels use them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Stage {
    pub(crate) w: [u64; 2],
    pub(crate) x: [u64; 3],
    pub(crate) norm: [u64; 2],
    pub(crate) bias: u64,
    pub(crate) residual: u64,
    pub(crate) y: [u64; 3],
    pub(crate) kind: u32,
    pub(crate) pro: u32,
    pub(crate) epi: u32,
    pub(crate) types: [u32; 2],
    pub(crate) nb: u32,
    pub(crate) outs: [u32; 2],
    /// Blocks of the grid that take the first matrix.
    pub(crate) blocks0: u32,
    /// Outputs below go to the first and second place.
    pub(crate) cuts: [u32; 2],
    pub(crate) act: u32,
    pub(crate) widths: [u32; 3],
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) dim: u32,
    pub(crate) window: u32,
    pub(crate) group: u32,
    pub(crate) rope: u32,
    pub(crate) pairs: u32,
    pub(crate) halves: u32,
    pub(crate) alpha: f32,
    pub(crate) limit: f32,
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    pub(crate) eps: f32,
    /// Outputs (pairs of them where gated) of a block, times 2^20.
    pub(crate) steps: [u32; 2],
    pub(crate) spare: [u32; 2],
}

/// Bytes of a stage on both sides.
pub(crate) const STAGE_BYTES: usize = 224;
const _: () = assert!(size_of::<Stage>() == STAGE_BYTES, "as stage.cuh asserts");

impl Stage {
    /// The words that are uploaded.
    pub(crate) fn bytes(&self) -> [u8; STAGE_BYTES] {
        // SAFETY: the type is plain numbers without padding, as the assertion on its size says.
        unsafe { std::mem::transmute::<Stage, [u8; STAGE_BYTES]>(*self) }
    }

    /// Notes how the outputs are shared out to a grid of `blocks`.
    pub(crate) fn shared_out(mut self, blocks: u32) -> Stage {
        let unit = if self.epi == GATED { 2 } else { 1 };
        for (ix, count) in [self.blocks0, blocks - self.blocks0].into_iter().enumerate() {
            if let Some(step) = (u64::from(self.outs[ix] / unit) << 20).checked_div(count.into()) {
                self.steps[ix] = step as u32 + 1;
            }
        }
        self
    }

    /// Sums that a block keeps for each row of the input at most: one for each chunk of its outputs.
    fn sums(&self) -> u32 {
        let unit = if self.epi == GATED { 2 } else { 1 };
        let outputs =
            self.steps.iter().map(|s| (s.div_ceil(1 << 20) + 1) * unit).max().unwrap_or(0);
        (outputs * self.nb.div_ceil(32)).max(1)
    }
}

/// Where everything lies in a block's shared memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Room {
    pub(crate) stages: u32,
    pub(crate) norms: u32,
    pub(crate) part: u32,
    pub(crate) x: u32,
    pub(crate) ring: u32,
    pub(crate) slots: u32,
    /// Chunks of a warp's ring.
    pub(crate) depth: u32,
    /// All of it.
    pub(crate) bytes: u32,
}

/// What a kernel needs room for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need<'a> {
    pub(crate) stages: &'a [Stage],
    /// Of them, how many are kept in shared memory.
    pub(crate) kept: u32,
    pub(crate) rows: u32,
    pub(crate) threads: u32,
    /// Bytes of a chunk.
    pub(crate) slot: u32,
    /// Bytes that attention needs in the place of the activations.
    pub(crate) attention: u32,
}

impl Room {
    /// Lays out `limit` bytes; none where the least does not fit. The ring takes what is left, `most` chunks a warp
    /// at most.
    pub(crate) fn new(need: &Need<'_>, limit: u32, most: u32) -> Option<Room> {
        let up = |v: u32| v.next_multiple_of(128);
        let slots = need.stages.iter().map(Stage::sums).max().unwrap_or(1);
        let warps = need.threads / 32;
        let nb = need.stages.iter().filter(|s| s.kind == DENSE).map(|s| s.nb).max().unwrap_or(1);
        let norms = up(need.kept * STAGE_BYTES as u32);
        let part = norms + up(need.rows * warps * 4);
        let x = part + up(slots * need.rows * 4);
        let ring = x + up((need.rows * nb * 40).max(need.attention).max(warps * 16));
        // Few different depths, so that few kernels are compiled.
        let fits = (limit.checked_sub(ring)? / (warps * need.slot)).min(most);
        let depth = if fits > 4 { fits / 4 * 4 } else { fits };
        let bytes = ring + depth * warps * need.slot;
        (depth >= 2).then_some(Room { stages: 0, norms, part, x, ring, slots, depth, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_lie_where_the_kernels_look() {
        let s =
            Stage { w: [1, 2], y: [3, 4, 5], kind: 6, eps: 7.0, spare: [0, 8], ..Stage::default() };
        let b = s.bytes();
        let word = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        assert_eq!((word(0), word(8), word(72), word(88), word(96)), (1, 2, 3, 5, 6));
        assert_eq!((word(204), word(220)), (7.0f32.to_bits(), 8));
    }

    #[test]
    fn the_ring_takes_what_is_left_and_a_warp_has_room_for_its_rows() {
        let head = Stage { nb: 32, outs: [151_936, 0], blocks0: 132, ..Stage::default() };
        let down = Stage { nb: 448, outs: [4096, 0], blocks0: 132, ..Stage::default() };
        let [head, down] = [head, down].map(|s| s.shared_out(132));
        for s in [head, down] {
            let first = |ix: u64| (ix * u64::from(s.steps[0])) >> 20;
            assert_eq!((first(0), first(132)), (0, u64::from(s.outs[0])));
            assert!((0..132).all(
                |ix| (first(ix + 1) - first(ix)) * u64::from(s.nb / 32) <= u64::from(s.sums())
            ));
        }
        let need = Need {
            stages: &[head, down],
            kept: 2,
            rows: 1,
            threads: 512,
            slot: 1088,
            attention: 0,
        };
        let room = Room::new(&need, 200_000, 8).unwrap();
        assert_eq!((room.depth, room.slots), (8, 1153));
        assert!(room.x + 448 * 40 <= room.ring && room.bytes <= 200_000);
        assert_eq!(Room::new(&need, 50_000, 8), None);
    }
}
