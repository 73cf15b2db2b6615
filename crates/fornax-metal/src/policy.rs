//! Which variant of a kernel a shape gets: pure functions of the shape and the GPU's family, and of what was measured
//! if somebody measured; tested on any host. They know no plan and no device.

use fornax_gguf::TensorType;

use crate::profile::Profile;

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
/// Rows of a threadgroup of the product of many.
pub(crate) const MANY_ROWS: u32 = 32;
/// Rows of a threadgroup of the small product.
pub(crate) const FEW_ROWS: u32 = 16;
/// Rows of a threadgroup of the attention of many.
pub(crate) const TILE_ROWS: u32 = 8;
/// Rows up to which the columns are split over simdgroups.
const SMALL_ROWS: u32 = 16;

/// Whether the small product may be taken up to so many rows.
pub(crate) fn small_rows_fit(rows: u32) -> bool {
    (MATVEC_ROWS..=1024).contains(&rows)
}
/// Rows up to which attention goes in shares of the keys.
pub(crate) const SPLIT_ROWS: u32 = 16;

/// Shares of the keys where every row is attended to alike; few, because prompts have them too.
pub(crate) const SPLITS_FIXED: u32 = 8;

/// Outputs and simdgroups of a threadgroup of the matvec family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tile {
    /// Outputs, with all columns.
    pub(crate) outs: u32,
    /// Simdgroups, which share the columns.
    pub(crate) simds: u32,
}

/// Heads of attention: how many, and how wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Heads {
    /// Of queries.
    pub(crate) heads: u32,
    /// Of keys and of values.
    pub(crate) kv_heads: u32,
    /// Elements of a query and a key.
    pub(crate) k_width: u32,
    /// Elements of a value.
    pub(crate) v_width: u32,
}

/// How attention of few rows is spread over threadgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    /// Query heads of one key head that a threadgroup takes.
    pub(crate) together: u32,
    /// Shares of the keys.
    pub(crate) splits: u32,
}

impl std::fmt::Display for Heads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {} {}", self.heads, self.kv_heads, self.k_width, self.v_width)
    }
}

/// Shares that one lane each joins.
const SPLITS_MAX: u32 = 32;
/// Shares that every threadgroup of the product behind attention reads again.
const JOINED_MAX: u32 = 16;
/// Query heads that a threadgroup can hold.
const TOGETHER_MAX: u32 = 8;
/// Elements of a head that it can hold.
const WIDTH_MAX: u32 = 256;

impl Heads {
    fn width(self) -> u32 {
        self.k_width.max(self.v_width)
    }

    /// Query heads of one key head.
    pub(crate) fn group(self) -> u32 {
        self.heads / self.kv_heads.max(1)
    }

    /// Whether the kernels take so many query heads of one key head together.
    pub(crate) fn takes(self, together: u32) -> bool {
        let whole = self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads);
        let held =
            (1..=TOGETHER_MAX).contains(&together) && (1..=WIDTH_MAX).contains(&self.width());
        whole && held && self.group().is_multiple_of(together)
    }

    /// Whether attention of few rows has this variant.
    pub(crate) fn splits(self, shares: Shares) -> bool {
        self.takes(shares.together) && (1..=SPLITS_MAX).contains(&shares.splits)
    }

    /// Whether the append has it.
    pub(crate) fn appends(self, shares: Shares) -> bool {
        self.takes(shares.together) && (1..=JOINED_MAX).contains(&shares.splits)
    }

    /// Every number of query heads that the kernels take together, to be measured.
    pub(crate) fn together(self) -> impl Iterator<Item = u32> {
        (1..=TOGETHER_MAX).filter(move |n| self.takes(*n))
    }

    /// Every variant with so many shares at most, in powers of two, to be measured.
    pub(crate) fn shares(self, most: u32) -> impl Iterator<Item = Shares> {
        let splits =
            move |together| (0..=most.ilog2()).map(move |n| Shares { together, splits: 1 << n });
        self.together().flat_map(splits)
    }

    /// Those of the append.
    pub(crate) fn appended(self) -> impl Iterator<Item = Shares> {
        self.shares(JOINED_MAX)
    }

    /// Those of attention of few rows.
    pub(crate) fn split(self) -> impl Iterator<Item = Shares> {
        self.shares(SPLITS_MAX)
    }
}

/// The choices for one device.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    pub(crate) family: Family,
    pub(crate) profile: Profile,
}

impl Policy {
    /// The tile for a matrix of `outs` × `cols`: as measured on this device, or by rule.
    pub(crate) fn matvec_tile(&self, ty: TensorType, outs: u32, cols: u32) -> Tile {
        self.profile.tile(ty, outs, cols).unwrap_or_else(|| matvec_tile(ty, outs, cols))
    }

    /// Rows up to which the small product is taken for a matrix.
    pub(crate) fn small_rows(&self, ty: TensorType, outs: u32, cols: u32) -> u32 {
        self.profile.small_rows(ty, outs, cols).unwrap_or(SMALL_ROWS)
    }

    /// How decode attention that appends is spread.
    pub(crate) fn append(&self, kv: TensorType, heads: Heads) -> Shares {
        self.profile.append(kv, heads).unwrap_or_else(|| {
            let together = self.heads_together(heads.group(), heads.width());
            Shares { together, splits: joined_splits(heads.heads / together) }
        })
    }

    /// How attention of few rows is spread, for a table of so many blocks.
    pub(crate) fn split(&self, kv: TensorType, heads: Heads, blocks: u32) -> Shares {
        self.profile.split(kv, heads).unwrap_or_else(|| {
            let together = self.heads_together(heads.group(), heads.width());
            Shares { together, splits: splits(blocks) }
        })
    }

    /// Query heads that a threadgroup takes together where there are many rows.
    pub(crate) fn tiled(&self, kv: TensorType, heads: Heads) -> u32 {
        let rule = || heads_tiled(heads.group(), heads.width());
        self.profile.tiled(kv, heads).unwrap_or_else(rule)
    }

    /// Query heads of one key head that one threadgroup takes together, `width` wide: all of them
    /// up to eight, or the largest number that leaves no rest and no register over.
    fn heads_together(&self, group: u32, width: u32) -> u32 {
        // A lane's floats: query and mix of each head, and four scores, besides some 40 others.
        // Apple9 gives registers out as they are used, Apple7 and 8 for a whole kernel.
        let room = if self.family >= Family::Apple9 { 200 } else { 120 };
        let most = (room / (2 * width.div_ceil(32) + 4)).clamp(1, 8);
        (1..=most).rev().find(|n| group.is_multiple_of(*n)).unwrap_or(1)
    }

    /// Every tile that the matvec family has a variant for, to be measured.
    pub(crate) fn tiles() -> impl Iterator<Item = Tile> {
        let simds = |outs| [1, 2, 4, 8].map(|simds| Tile { outs, simds });
        [1, 2, 4].into_iter().flat_map(simds).filter(|t| t.fits())
    }
}

impl Tile {
    /// Whether the kernels have this variant: sums for all outputs of four rows, and a thread for
    /// each in the end.
    pub(crate) fn fits(self) -> bool {
        let sums = self.outs * MATVEC_ROWS;
        (1..=16).contains(&sums) && (1..=8).contains(&self.simds) && 32 * self.simds >= sums
    }
}

/// A kernel in half as many threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Narrower {
    pub(crate) constants: Vec<u32>,
    pub(crate) threads: u32,
    /// Threadgroups along x for each of before.
    pub(crate) groups: u32,
}

/// A variant of the same kernel in fewer threads; none where there is none. The kernels named
/// here take as many threads as they are given, one for each element, or as a constant says.
pub(crate) fn narrower(name: &str, constants: &[u32], threads: u32) -> Option<Narrower> {
    let named = |kernels: &[&str]| kernels.iter().any(|k| name.starts_with(k));
    if threads < 64 {
        return None;
    }
    let (mut constants, threads) = (constants.to_vec(), (threads / 2).next_multiple_of(32));
    if named(&["matvec_", "qkv_", "gated_mlp_"]) {
        let [outs, rows, simds, ..] = constants[..] else { return None };
        let simds = simds / 2;
        constants[2] = simds;
        // A thread for every sum in the end.
        let fits = simds > 0 && 32 * simds >= outs * rows;
        return fits.then_some(Narrower { constants, threads, groups: 1 });
    }
    if named(&["rms_norm", "embed_"]) {
        return Some(Narrower { constants, threads, groups: 1 });
    }
    let elements = ["copy", "select_rows", "activate"].contains(&name);
    elements.then_some(Narrower { constants, threads, groups: 2 })
}

/// The tile for a matrix of `outs` × `cols`. Not yet measured on a GPU: the figures are those
/// that others found to be best on Apple7 to Apple9, which did not differ by family.
fn matvec_tile(ty: TensorType, outs: u32, cols: u32) -> Tile {
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

/// The same for prefill, where a simdgroup holds a query and a mix of every head in registers:
/// no more of them than leave room for the rest.
fn heads_tiled(group: u32, width: u32) -> u32 {
    let most = (512 / width.max(1)).clamp(1, 4);
    (1..=most).rev().find(|n| group.is_multiple_of(*n)).unwrap_or(1)
}

/// Shares of the keys of one sequence at most, for a table of so many blocks.
fn splits(blocks: u32) -> u32 {
    blocks.clamp(1, SPLITS_MAX)
}

/// The same where the product that follows attention joins them, for so many threadgroups along
/// the heads: enough for 40 cores and no more, since each is read by every threadgroup of that.
fn joined_splits(groups: u32) -> u32 {
    48_u32.div_ceil(groups.max(1)).next_power_of_two().min(JOINED_MAX)
}

/// Simdgroups that share the keys of a threadgroup there.
pub(crate) const APPEND_SIMDS: u32 = 4;

/// The tile of the product that joins shares: more outputs than elsewhere for each time that the
/// shares are read, as long as there are threadgroups for every core.
pub(crate) fn joined_tile(outs: u32, cols: u32, rows: u32) -> Tile {
    let most = if rows == 1 && outs >= 8 * 64 { 8 } else { 4 };
    let simds = cols.div_ceil(16 * 32).next_power_of_two().clamp(2, 8);
    Tile { outs: most, simds }
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
                        t.fits() && Policy::tiles().any(|m| m == t),
                        "{ty} {outs} {cols}: {t:?}"
                    );
                }
            }
        }
        assert_eq!(matvec_tile(TensorType::Q8_0, 3072, 1024), Tile { outs: 2, simds: 2 });
        assert_eq!(matvec_tile(TensorType::Q8_0, 1024, 3072), Tile { outs: 2, simds: 4 });
        assert_eq!(matvec_tile(TensorType::Q4_0, 1024, 4096), Tile { outs: 4, simds: 8 });
    }

    #[test]
    fn heads_leave_no_rest() {
        for family in [Family::Apple7, Family::Apple8, Family::Apple9, Family::Apple10] {
            let policy = Policy { family, profile: Profile::default() };
            let all = [(1, 1), (2, 2), (7, 7), (8, 8), (9, 3), (11, 1), (12, 6), (16, 8)];
            assert_eq!(all.map(|(n, _)| policy.heads_together(n, 64)), all.map(|(_, m)| m));
            // Wide heads fill the registers, of the older families sooner.
            let wide = if family >= Family::Apple9 { [8, 8] } else { [8, 4] };
            assert_eq!([128, 256].map(|w| policy.heads_together(8, w)), wide, "{family:?}");
        }
        let tiled = [(1, 64, 1), (2, 128, 2), (7, 64, 1), (8, 128, 4), (6, 64, 3), (4, 256, 2)];
        assert_eq!(tiled.map(|(n, w, _)| heads_tiled(n, w)), tiled.map(|(_, _, m)| m));
    }

    #[test]
    fn what_was_measured_goes_before_the_rule() {
        let text = "fornax metal profile 2\ngpu Apple M1\nmatvec q8_0 3072 1024 4 8\nsmall q8_0 3072 1024 32\n\
                    append f16 16 8 128 128 2 4\nsplit f16 16 8 128 128 1 8\ntiled f16 16 8 128 128 1\n";
        let profile = Profile::parse(text, "Apple M1").unwrap();
        let policy = Policy { family: Family::Apple7, profile };
        let measured = Tile { outs: 4, simds: 8 };
        assert_eq!(policy.matvec_tile(TensorType::Q8_0, 3072, 1024), measured);
        let rows = |cols| policy.small_rows(TensorType::Q8_0, 3072, cols);
        assert_eq!([rows(1024), rows(2048)], [32, SMALL_ROWS]);
        let heads = Heads { heads: 16, kv_heads: 8, k_width: 128, v_width: 128 };
        assert_eq!(policy.append(TensorType::F16, heads), Shares { together: 2, splits: 4 });
        assert_eq!(policy.split(TensorType::F16, heads, 99), Shares { together: 1, splits: 8 });
        assert_eq!(policy.split(TensorType::Q8_0, heads, 99), Shares { together: 2, splits: 32 });
        assert_eq!([TensorType::F16, TensorType::F32].map(|kv| policy.tiled(kv, heads)), [1, 2]);
        let rule = matvec_tile(TensorType::Q8_0, 3072, 2048);
        assert_eq!(policy.matvec_tile(TensorType::Q8_0, 3072, 2048), rule, "another shape");
    }

    /// What the rules choose is among what is measured, on every family.
    #[test]
    fn the_rules_choose_what_there_is() {
        for family in [Family::Apple7, Family::Apple8, Family::Apple9, Family::Apple10] {
            let policy = Policy { family, profile: Profile::default() };
            for (n, kv_heads) in [(1, 1), (16, 8), (32, 8), (9, 3), (14, 2), (24, 24), (64, 8)] {
                for width in [32, 64, 80, 96, 128, 256] {
                    let heads = Heads { heads: n, kv_heads, k_width: width, v_width: width };
                    let append = policy.append(TensorType::F16, heads);
                    assert!(heads.appended().any(|s| s == append), "{heads}: {append:?}");
                    let split = policy.split(TensorType::F16, heads, 1024);
                    assert!(heads.split().any(|s| s == split), "{heads}: {split:?}");
                    let tiled = policy.tiled(TensorType::F16, heads);
                    assert!(heads.together().any(|n| n == tiled), "{heads}: {tiled}");
                }
            }
        }
    }

    #[test]
    fn kernels_go_narrower_while_they_can() {
        let mut at = Narrower { constants: vec![2, 4, 8, 1], threads: 256, groups: 1 };
        let mut threads = vec![256];
        while let Some(next) = narrower("qkv_q8_0", &at.constants, at.threads) {
            assert_eq!(next.threads, 32 * next.constants[2], "a simdgroup is 32 threads");
            threads.push(next.threads);
            at = next;
        }
        assert_eq!(threads, [256, 128, 64, 32]);
        assert_eq!(narrower("embed_f16", &[], 96).map(|n| n.threads), Some(64));
        let norm = narrower("rms_norm", &[], 1024).map(|n| (n.threads, n.groups));
        let copy = narrower("copy", &[], 256).map(|n| (n.threads, n.groups));
        assert_eq!((norm, copy), (Some((512, 1)), Some((128, 2))));
        assert_eq!(narrower("matmul_tiled_q8_0", &[], 128), None);
        assert_eq!(narrower("attention_tiled_f16", &[1, 4, 4], 256), None);
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
