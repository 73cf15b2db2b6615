//! Who computes what where every multiprocessor has its weights as one tape: blocks of threads in clusters, rows by kind of
//! stage, units and pieces, bytes. Pure numbers, as `kernels/tape` reads them.

use crate::fast::planes::slot_bytes;

use fornax_gguf::TensorType;

/// Blocks of a cluster: those of the attention of one key/value head.
pub(crate) const CLUSTER: u32 = 8;
/// Outputs that a block of threads rounds together.
const BLOCK: u32 = 32;
/// Rows of O and of down that a block of threads may have, and its blocks of gated outputs.
const ROWS_MAX: u32 = 256;
const GATES_MAX: u32 = 8;
/// Width of the models whose output is multiplied near attention; twice as wide ones are slower with it.
const NEAR_WIDTH: u32 = 1024;
/// KV heads of such a model: as many parts as they add up at once.
const NEAR_HEADS: u32 = 8;
/// Blocks of a row of the output in a unit, and rows, where a cluster multiplies its own head's result.
pub(crate) const SPAN: u32 = 8;
pub(crate) const UNIT_ROWS: u32 = 32 / SPAN;
/// Tapes begin at multiples of so many bytes.
const ALIGNED: u64 = 128;

/// The stages of a layer, and the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Qkv,
    Out,
    Gated,
    Down,
    Head,
}

impl Part {
    pub(crate) const LAYER: [Part; 4] = [Part::Qkv, Part::Out, Part::Gated, Part::Down];
    pub(crate) const ALL: [Part; 5] = [Part::Qkv, Part::Out, Part::Gated, Part::Down, Part::Head];
}

/// The shape of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Geometry {
    pub(crate) layers: u32,
    pub(crate) width: u32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) dim: u32,
    pub(crate) ff: u32,
    pub(crate) vocab: u32,
    /// By [`Part`].
    pub(crate) types: [TensorType; 5],
}

/// How a kernel goes through a tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pace {
    pub(crate) clusters: u32,
    /// Warps that compute.
    pub(crate) warps: u32,
    /// Groups of that many rows in a piece.
    pub(crate) groups: u32,
}

/// What a block of threads has of 32 gated outputs that several ranks share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shared {
    /// The number of the block of outputs, and the first of them that is here.
    pub(crate) block: u32,
    pub(crate) first: u32,
    /// Rows of gate and up.
    pub(crate) rows: u32,
    /// The rank that rounds the block, and whether that is this one.
    pub(crate) rank: u32,
    pub(crate) own: bool,
}

/// One block of threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Share {
    /// Where its tape begins.
    pub(crate) at: u64,
    /// Rows of O and of down: the first, and how many.
    pub(crate) rows: [u32; 2],
    /// Blocks of 32 gated outputs.
    pub(crate) gates: [u32; 2],
    /// Of a block of gated outputs, beside the whole ones.
    pub(crate) shared: Shared,
    /// Rows of the head.
    pub(crate) head: [u32; 2],
}

impl Geometry {
    /// Query heads of a key/value head.
    pub(crate) fn share(&self) -> u32 {
        self.heads / self.kv_heads
    }

    /// Rows of Q, K and V that a block of threads has whose cluster has a head.
    fn qkv_rows(&self) -> u32 {
        (self.share() + 2) * self.dim / CLUSTER
    }

    fn ty(&self, part: Part) -> TensorType {
        self.types[part as usize]
    }

    /// Whether a cluster multiplies its head's result by its columns of the output, and all add up what the clusters have:
    /// one exchange less for all, and more of the output for few blocks of threads. A unit has four rows of a head's blocks,
    /// and no block that has its scales with another head's.
    pub(crate) fn near(&self) -> bool {
        let fits = match self.ty(Part::Out) {
            TensorType::Q8_0 => self.mix_blocks() <= SPAN,
            TensorType::Q6_K => false,
            _ => self.mix_blocks() == SPAN,
        };
        self.width <= NEAR_WIDTH && self.kv_heads <= NEAR_HEADS && fits
    }

    /// Blocks of 32 of what the query heads of a key/value head give.
    pub(crate) fn mix_blocks(&self) -> u32 {
        self.share() * self.dim / BLOCK
    }

    /// Where the output is near: units of a block of threads.
    fn near_units(&self) -> u32 {
        self.width / CLUSTER / UNIT_ROWS
    }

    /// Units of a row: 32 blocks of 32 weights each, the last of them with zeroes behind the row's end.
    pub(crate) fn units(&self, part: Part) -> u32 {
        let cols = match part {
            Part::Qkv | Part::Gated | Part::Head => self.width,
            Part::Out if self.near() => 1024,
            Part::Out => self.heads * self.dim,
            Part::Down => self.ff,
        };
        cols.div_ceil(1024)
    }

    fn row_bytes(&self, part: Part) -> u64 {
        u64::from(self.units(part)) * u64::from(unit_bytes(self.ty(part)))
    }

    /// Bytes of a unit of the largest format.
    pub(crate) fn unit_max(&self) -> u32 {
        self.types.iter().map(|ty| unit_bytes(*ty)).max().unwrap_or(0)
    }
}

/// Bytes of a unit on a tape, as `kernels/tape/forms.cuh` has it.
pub(crate) fn unit_bytes(ty: TensorType) -> u32 {
    if ty == TensorType::Q4_K { 592 } else { slot_bytes(ty) }
}

impl Pace {
    pub(crate) fn blocks(&self) -> u32 {
        self.clusters * CLUSTER
    }

    /// Ranks that share a block of gated outputs which is left where all blocks of threads have as many; 1 where none is
    /// shared.
    fn sharers(&self, g: &Geometry) -> u32 {
        match g.ff / BLOCK % self.blocks() {
            left if left == 0 || left > 4 * self.clusters => 1,
            left if left > 2 * self.clusters => 2,
            _ => 4,
        }
    }

    /// Rows of a piece of a stage of `rows` rows: as many as there may be, but of O and of down as few and as equal pieces as
    /// can be.
    pub(crate) fn batch(&self, part: Part, rows: u32) -> u32 {
        let most = self.warps * self.groups;
        match part {
            Part::Out | Part::Down if rows > 0 => rows.div_ceil(rows.div_ceil(most)),
            _ => most,
        }
    }

    /// Where a unit of a stage of `rows` rows lies, in units from the stage's beginning: the rows of a piece one after the
    /// other, column by column.
    #[cfg(test)]
    pub(crate) fn place(&self, part: Part, rows: u32, units: u32, [row, unit]: [u32; 2]) -> u32 {
        let all = self.batch(part, rows);
        let batch = row / all;
        let there = all.min(rows - batch * all);
        batch * all * units + unit * there + (row - batch * all)
    }
}

/// Why a model cannot be shared out, or how it is.
pub(crate) fn shares(g: &Geometry, pace: &Pace) -> Result<Vec<Share>, String> {
    let n = pace.blocks() as usize;
    if n == 0 || g.kv_heads > pace.clusters {
        return Err(format!("{} key/value heads on {} clusters", g.kv_heads, pace.clusters));
    }
    // What a block of threads has to read in a layer: first what it must, then as many blocks of gated outputs as others,
    // the rest of them and rows to whoever has the least.
    let mut qkv = u64::from(g.qkv_rows()) * g.row_bytes(Part::Qkv);
    let mut row = g.row_bytes(Part::Down);
    if g.near() {
        qkv += u64::from(g.near_units()) * g.row_bytes(Part::Out);
    } else {
        row += g.row_bytes(Part::Out);
    }
    let has_head = |ix: usize| (ix as u32 / CLUSTER) < g.kv_heads;
    let mut load: Vec<u64> = (0..n).map(|ix| if has_head(ix) { qkv } else { 0 }).collect();
    let gate = u64::from(2 * BLOCK) * g.row_bytes(Part::Gated);
    // Gated blocks are long: one more than another has is one after the other, so that few which are left are shared.
    let each = g.ff / BLOCK / n as u32;
    load.iter_mut().for_each(|l| *l += u64::from(each) * gate);
    let shared = shared(g, pace, &mut load, gate);
    let left = if pace.sharers(g) > 1 { 0 } else { g.ff / BLOCK % n as u32 };
    let gates = dealt(&mut load, left, gate, 1)
        .filter(|_| each < GATES_MAX)
        .ok_or_else(|| format!("{} gated outputs on {n} blocks", g.ff))?;
    let gates: Vec<u32> = gates.iter().map(|more| each + more).collect();
    let rows = dealt(&mut load, g.width, row, ROWS_MAX)
        .ok_or_else(|| format!("rows of {} on {n} blocks", g.width))?;
    let mut all = Vec::with_capacity(n);
    let mut next = Share::default();
    for ix in 0..n {
        let head = [ix, ix + 1].map(|i| (u64::from(g.vocab) * i as u64 / n as u64) as u32);
        let share = Share {
            at: next.at,
            rows: [next.rows[0], rows[ix]],
            gates: [next.gates[0], gates[ix]],
            shared: shared[ix],
            head: [head[0], head[1] - head[0]],
        };
        next.rows[0] += rows[ix];
        next.gates[0] += gates[ix];
        next.at = (next.at + tape_bytes(g, ix as u32, &share)).next_multiple_of(ALIGNED);
        all.push(share);
    }
    Ok(all)
}

/// Deals what is left of the blocks of gated outputs to those ranks side by side that have the least, where they are shared.
fn shared(g: &Geometry, pace: &Pace, load: &mut [u64], gate: u64) -> Vec<Shared> {
    let (ranks, n) = (pace.sharers(g), load.len());
    let mut all = vec![Shared::default(); n];
    if ranks == 1 {
        return all;
    }
    let (left, outputs) = (g.ff / BLOCK % n as u32, BLOCK / ranks);
    for block in g.ff / BLOCK - left..g.ff / BLOCK {
        let free = (0..n).step_by(ranks as usize).filter(|ix| all[*ix].rows == 0);
        let Some(first) = free.min_by_key(|ix| load[*ix]) else { break };
        for (k, ix) in (first..first + ranks as usize).enumerate() {
            let (first, rank) = (k as u32 * outputs, first as u32 % CLUSTER);
            all[ix] = Shared { block, first, rows: 2 * outputs, rank, own: k == 0 };
            load[ix] += gate / u64::from(ranks);
        }
    }
    all
}

/// Deals so many things of `bytes` each to whoever has the least, `most` to one at most.
fn dealt(load: &mut [u64], things: u32, bytes: u64, most: u32) -> Option<Vec<u32>> {
    let mut counts = vec![0u32; load.len()];
    for _ in 0..things {
        let free = (0..load.len()).filter(|ix| counts[*ix] < most);
        let ix = free.min_by_key(|ix| load[*ix])?;
        load[ix] += bytes;
        counts[ix] += 1;
    }
    Some(counts)
}

/// Rows of a stage that block `ix` has.
fn count(g: &Geometry, part: Part, ix: u32, share: &Share) -> u32 {
    match part {
        Part::Qkv if ix / CLUSTER < g.kv_heads => g.qkv_rows(),
        Part::Out if g.near() && ix / CLUSTER < g.kv_heads => g.near_units(),
        Part::Qkv => 0,
        Part::Out if g.near() => 0,
        Part::Out | Part::Down => share.rows[1],
        Part::Gated => share.shared.rows + 2 * BLOCK * share.gates[1],
        Part::Head => share.head[1],
    }
}

fn stage_bytes(g: &Geometry, part: Part, ix: u32, share: &Share) -> u64 {
    u64::from(count(g, part, ix, share)) * g.row_bytes(part)
}

/// Bytes of block `ix`'s tape within a layer.
pub(crate) fn layer_bytes(g: &Geometry, ix: u32, share: &Share) -> u64 {
    Part::LAYER.iter().map(|p| stage_bytes(g, *p, ix, share)).sum()
}

/// Bytes of block `ix`'s whole tape.
pub(crate) fn tape_bytes(g: &Geometry, ix: u32, share: &Share) -> u64 {
    u64::from(g.layers) * layer_bytes(g, ix, share) + stage_bytes(g, Part::Head, ix, share)
}

/// Where a stage of a layer (the head's is the number of layers) begins on block `ix`'s tape, from the tapes' beginning.
pub(crate) fn stage_at(g: &Geometry, part: Part, layer: u32, ix: u32, share: &Share) -> u64 {
    let before = Part::LAYER.iter().take_while(|p| part != Part::Head && **p != part);
    let within: u64 = before.map(|p| stage_bytes(g, *p, ix, share)).sum();
    share.at + u64::from(layer) * layer_bytes(g, ix, share) + within
}

/// The rows of a stage that block `ix` has, in the order in which it reads them, as rows of the matrix in planes: queries,
/// keys and values one after the other, gate and up in turns. Of the output that is near, the first row of every unit.
pub(crate) fn rows(g: &Geometry, pace: &Pace, part: Part, ix: u32, share: &Share) -> Vec<u32> {
    let n = count(g, part, ix, share);
    let row = |i: u32| match part {
        Part::Qkv => {
            let (head, rank, queries) = (ix / CLUSTER, ix % CLUSTER, g.share() * g.dim);
            let at = rank * n + i;
            if at < queries {
                head * queries + at
            } else {
                // Keys of all heads, then values.
                let values = (at - queries) / g.dim;
                (g.heads + values * g.kv_heads + head) * g.dim + (at - queries) % g.dim
            }
        }
        Part::Out if g.near() => (ix % CLUSTER * g.near_units() + i) * UNIT_ROWS,
        Part::Out | Part::Down => share.rows[0] + i,
        Part::Gated => {
            let (first, i) = match i.checked_sub(share.shared.rows) {
                Some(i) => (share.gates[0] * BLOCK, i),
                None => (share.shared.block * BLOCK + share.shared.first, i),
            };
            let (group, warp) = (i / pace.warps, i % pace.warps);
            2 * (first + group / 2 * pace.warps + warp) + group % 2
        }
        Part::Head => share.head[0] + i,
    };
    (0..n).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use TensorType::{Q4_K, Q8_0};

    const PACE: Pace = Pace { clusters: 15, warps: 8, groups: 2 };

    pub(crate) fn model(name: &str, ty: TensorType) -> Geometry {
        let [layers, width, ff, heads, kv_heads, dim, vocab] = match name {
            "360m" => [32, 960, 2560, 15, 5, 64, 49_152],
            "0.6b" => [28, 1024, 3072, 16, 8, 128, 151_936],
            "1b" => [16, 2048, 8192, 32, 8, 64, 128_256],
            _ => [32, 4096, 14_336, 32, 8, 128, 128_256],
        };
        Geometry { layers, width, heads, kv_heads, dim, ff, vocab, types: [ty; 5] }
    }

    fn models() -> impl Iterator<Item = Geometry> {
        let all = ["360m", "0.6b", "1b", "8b"];
        all.into_iter().flat_map(|name| [Q8_0, Q4_K].map(|ty| model(name, ty)))
    }

    fn outputs(g: &Geometry, part: Part) -> u32 {
        match part {
            Part::Qkv => (g.heads + 2 * g.kv_heads) * g.dim,
            Part::Out | Part::Down => g.width,
            Part::Gated => 2 * g.ff,
            Part::Head => g.vocab,
        }
    }

    #[test]
    fn every_row_of_every_matrix_is_read_once() {
        for g in models() {
            for clusters in [8, 15, 16] {
                let pace = Pace { clusters, ..PACE };
                let all = shares(&g, &pace).unwrap();
                for part in Part::ALL {
                    let near = part == Part::Out && g.near();
                    let (heads, lines) = if near { (g.kv_heads, UNIT_ROWS) } else { (1, 1) };
                    let mut seen = vec![0; (heads * outputs(&g, part)) as usize];
                    for (ix, share) in all.iter().enumerate() {
                        let head = if near { ix as u32 / CLUSTER } else { 0 };
                        for row in rows(&g, &pace, part, ix as u32, share) {
                            let first = (head * outputs(&g, part) + row) as usize;
                            seen[first..first + lines as usize].iter_mut().for_each(|n| *n += 1);
                        }
                    }
                    assert!(seen.iter().all(|n| *n == 1), "{part:?} {clusters} {g:?}");
                }
            }
        }
    }

    #[test]
    fn bytes_of_a_layer_are_balanced() {
        for g in models() {
            let all = shares(&g, &PACE).unwrap();
            let bytes: Vec<u64> =
                all.iter().enumerate().map(|(ix, s)| layer_bytes(&g, ix as u32, s)).collect();
            let mean = bytes.iter().sum::<u64>() / bytes.len() as u64;
            let most = *bytes.iter().max().unwrap();
            // A row of O and of down is what is left over at most; and where the output is near, a gated block of those who
            // have that, too: there the chain of products counts, and not what they read.
            let row = if g.near() {
                g.row_bytes(Part::Down) + 64 * g.row_bytes(Part::Gated)
            } else {
                g.row_bytes(Part::Out) + g.row_bytes(Part::Down)
            };
            assert!(most <= mean + row, "{most} {mean} {row} {g:?}");
        }
    }

    #[test]
    fn tapes_lie_behind_one_another_and_stages_fill_them() {
        for g in models() {
            let all = shares(&g, &PACE).unwrap();
            let mut end = 0;
            for (ix, share) in all.iter().enumerate() {
                let ix = ix as u32;
                assert!(share.at >= end && share.at < end + ALIGNED && share.at % ALIGNED == 0);
                let mut at = share.at;
                for layer in 0..g.layers {
                    for part in Part::LAYER {
                        assert_eq!(stage_at(&g, part, layer, ix, share), at);
                        at += stage_bytes(&g, part, ix, share);
                    }
                }
                assert_eq!(stage_at(&g, Part::Head, g.layers, ix, share), at);
                end = at + stage_bytes(&g, Part::Head, ix, share);
                assert_eq!(end, share.at + tape_bytes(&g, ix, share));
            }
        }
    }

    #[test]
    fn a_layer_of_a_known_model_is_shared_out_as_expected() {
        let g = model("0.6b", Q8_0);
        let all = shares(&g, &PACE).unwrap();
        // A block of threads with a head has 64 rows of Q, K and V, as many bytes as a block of gated outputs has; 56 have
        // neither head nor anything else, so that all of them get gates, and so do 40 of the 64 with a head.
        assert!(all[64..].iter().all(|s| s.gates[1] == 1));
        assert_eq!(all[..64].iter().filter(|s| s.gates[1] == 1).count(), 40);
        // The output is theirs as well: units of four rows of eight blocks, a head's.
        assert!(g.near() && g.mix_blocks() == 8);
        assert_eq!(rows(&g, &PACE, Part::Out, 9, &all[9])[..3], [128, 132, 136]);
        assert_eq!(rows(&g, &PACE, Part::Out, 9, &all[9]).len(), 32);
        assert!(rows(&g, &PACE, Part::Out, 64, &all[64]).is_empty());
        assert!(all.iter().all(|s| s.gates[1] <= 1 && s.rows[1] <= 16));
        assert_eq!(rows(&g, &PACE, Part::Qkv, 9, &all[9])[..2], [256 + 64, 256 + 65]);
        assert_eq!(rows(&g, &PACE, Part::Qkv, 12, &all[12])[0], 2048 + 128, "its key head");
        assert_eq!(rows(&g, &PACE, Part::Qkv, 15, &all[15])[63], 2048 + 1024 + 255);
        let gated = rows(&g, &PACE, Part::Gated, 64, &all[64]);
        let first = 2 * 32 * all[64].gates[0];
        assert_eq!(gated[..9], [0, 2, 4, 6, 8, 10, 12, 14, 1].map(|r| first + r));
        assert_eq!(gated[16], first + 16);
    }

    #[test]
    fn outputs_are_near_where_those_who_pass_rows_on_can_add_them_up() {
        let near: Vec<bool> = models().map(|g| g.near()).collect();
        assert_eq!(near, [true, false, true, true, false, false, false, false]);
        // Four query heads of 128 are sixteen blocks.
        let wide = Geometry { heads: 32, ..model("0.6b", Q8_0) };
        assert!(!wide.near());
    }

    #[test]
    fn few_gated_blocks_that_are_left_are_shared_by_four() {
        // Two for each of 120, and sixteen more.
        let g = model("1b", Q8_0);
        let all = shares(&g, &PACE).unwrap();
        assert!(all.iter().all(|s| s.gates[1] == 2));
        let parts: Vec<&Share> = all.iter().filter(|s| s.shared.rows > 0).collect();
        assert_eq!((parts.len(), parts.iter().filter(|s| s.shared.own).count()), (64, 16));
        // Clusters without a head have two, and four ranks side by side the same one.
        let shared: Vec<Shared> = all[64..72].iter().map(|s| s.shared).collect();
        assert_eq!(shared[0], Shared { block: 240, first: 0, rows: 16, rank: 0, own: true });
        assert_eq!(shared[3], Shared { block: 240, first: 24, rows: 16, rank: 0, own: false });
        assert_eq!(shared[4], Shared { block: 241, first: 0, rows: 16, rank: 4, own: true });
        let gated = rows(&g, &PACE, Part::Gated, 67, &all[67]);
        assert_eq!(
            (gated.len(), gated[1], gated[8]),
            (144, 2 * (240 * 32 + 24) + 2, 2 * (240 * 32 + 24) + 1)
        );
        assert_eq!(gated[16], 2 * 32 * all[67].gates[0]);
    }

    #[test]
    fn pieces_hold_the_units_of_a_column_side_by_side() {
        let places = |part, all: [[u32; 2]; 4]| all.map(|at| PACE.place(part, 20, 3, at));
        // 20 rows of 3 units: 16 and 4, or twice 10.
        let first = [[0, 0], [15, 0], [0, 1], [15, 2]];
        let second = [[16, 0], [19, 0], [16, 1], [19, 2]];
        assert_eq!(places(Part::Gated, first), [0, 15, 16, 47]);
        assert_eq!(places(Part::Gated, second), [48, 51, 52, 59]);
        let second = [[10, 0], [19, 0], [10, 1], [19, 2]];
        assert_eq!(places(Part::Down, second), [30, 39, 40, 59]);
        assert_eq!([13, 16, 17, 34].map(|n| PACE.batch(Part::Out, n)), [13, 16, 9, 12]);
    }

    #[test]
    fn what_cannot_be_shared_out_is_told() {
        let g = model("0.6b", Q8_0);
        let few = Pace { clusters: 7, ..PACE };
        assert_eq!(shares(&g, &few).unwrap_err(), "8 key/value heads on 7 clusters");
        let wide = Geometry { ff: 32 * 2000, ..g };
        assert_eq!(shares(&wide, &PACE).unwrap_err(), "64000 gated outputs on 120 blocks");
    }
}
