//! A row's splits one by one, for several threads: each is stored and all are merged in their order, so that the bits
//! are those of one call. It knows not who takes which split.

use super::{
    AsF16, AsF32, AsQ8, Attend, Cell, Lanes, QUERIES, SPLIT, Scratch, exponentials, finish, merge,
    one_split,
};

/// Elements before the values of a stored part: its maximum, its sum, and room to stay aligned.
const HEAD: usize = 16;

/// How many elements [`attend_part`] stores for one query.
pub(crate) fn part_len(v_stride: usize) -> usize {
    HEAD + v_stride
}

/// The splits that a row at `pos` looks at.
pub(crate) fn splits(pos: usize, window: usize) -> std::ops::Range<usize> {
    (pos + 1).saturating_sub(window) / SPLIT..pos / SPLIT + 1
}

/// Split `split` of a call of one row, stored: `part_len` elements for each head, `stride` apart.
///
/// # Safety
/// As [`attend`](super::attend); `parts` is good for that.
#[inline(always)]
pub(in crate::ops) unsafe fn attend_part<L: Lanes>(
    a: &Attend<'_>,
    s: &mut Scratch,
    split: usize,
    parts: *mut f32,
    stride: usize,
) {
    assert!(a.rows == 1 && a.heads <= QUERIES && splits(a.pos, a.window).contains(&split));
    let base = split * SPLIT;
    let from = (a.pos + 1).saturating_sub(a.window).max(base) - base;
    let keys = from..(a.pos + 1 - base).min(SPLIT);
    // SAFETY: the caller's word.
    unsafe {
        let softmax = match a.cell {
            Cell::F32 => one_split::<L, AsF32>(a, s, base, keys),
            Cell::F16 => one_split::<L, AsF16>(a, s, base, keys),
            Cell::Q8 => one_split::<L, AsQ8>(a, s, base, keys),
        };
        for m in 0..a.heads {
            let to = parts.add(m * stride);
            let (max, total) = softmax[m].unwrap_or((f32::NEG_INFINITY, 0.0));
            *to = max;
            *to.add(1) = total;
            let part = s.part[m * a.v_stride..].as_ptr();
            std::ptr::copy_nonoverlapping(part, to.add(HEAD), a.v_stride);
        }
    }
}

/// Merges what [`attend_part`] stored for every split of a row, in order, into its heads: the
/// same bits as [`attend`](super::attend). Parts of a head's splits lie `part_len` apart.
///
/// # Safety
/// As [`attend_part`], and all parts are complete.
#[inline(always)]
pub(in crate::ops) unsafe fn attend_merge<L: Lanes>(
    a: &Attend<'_>,
    s: &mut Scratch,
    parts: *const f32,
    stride: usize,
) {
    s.clear(a.heads, a.v_stride);
    let splits = splits(a.pos, a.window);
    for m in 0..a.heads {
        for split in 0..splits.len() {
            // SAFETY: the caller's word.
            unsafe {
                let part = parts.add(m * stride + split * part_len(a.v_stride));
                let softmax = (*part, *part.add(1));
                let both = exponentials::<L>(L::splat(s.max[m]), L::splat(softmax.0));
                let weights = [both[0].first(), both[1].first()];
                merge::<L>(s, m, a.v_stride, part.add(HEAD), softmax, weights);
            }
        }
        // SAFETY: the caller's word.
        unsafe { finish::<L>(a, s, m) }
    }
}
