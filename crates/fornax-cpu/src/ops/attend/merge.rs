//! What becomes of a query's splits: each is merged into the ones before it, in order, and the head is written out. It
//! knows no keys and no values.

use super::{Attend, Lanes, Scratch, math};

/// What remains of what came before, whose largest score is `old`, and of a split whose largest is `new`, below the
/// larger of both; NaN where both are −∞.
#[inline(always)]
pub(super) unsafe fn exponentials<L: Lanes>(old: L, new: L) -> [L; 2] {
    // SAFETY: the caller's word.
    unsafe {
        let largest = old.max(new);
        [math::exp(old.sub(largest)), math::exp(new.sub(largest))]
    }
}

/// Adds one split of a query, its largest score and its sum of exponentials, to what came before it; the weights are
/// those of [`exponentials`].
#[inline(always)]
pub(super) unsafe fn merge<L: Lanes>(
    s: &mut Scratch,
    m: usize,
    width: usize,
    part: *const f32,
    (max, total): (f32, f32),
    [old, new]: [f32; 2],
) {
    let sum = s.sum[m * width..][..width].as_mut_ptr();
    s.max[m] = if s.max[m] > max { s.max[m] } else { max };
    s.total[m] = s.total[m] * old + total * new;
    // SAFETY: the caller's word; `width` is a multiple of sixteen.
    unsafe {
        for i in (0..width).step_by(16) {
            let before = L::load(sum.add(i)).mul(L::splat(old));
            before.add(L::load(part.add(i)).mul(L::splat(new))).store(sum.add(i));
        }
    }
}

/// Adds the sink, divides, and writes the head out.
#[inline(always)]
pub(super) unsafe fn finish<L: Lanes>(a: &Attend<'_>, s: &mut Scratch, m: usize) {
    let (row, head) = (m / a.heads, m % a.heads);
    let (mut factor, mut total) = (1.0, s.total[m]);
    // SAFETY: the caller's word.
    unsafe {
        if let Some(&sink) = a.sinks.get(head) {
            let largest = if s.max[m] > sink { s.max[m] } else { sink };
            factor = math::exp_one::<L>(s.max[m] - largest);
            total = total * factor + math::exp_one::<L>(sink - largest);
        }
        let sum = s.sum[m * a.v_stride..][..a.v_stride].as_ptr();
        let out = a.out.add(row * a.out_stride + head * a.v_width);
        let by = L::splat(factor / total);
        let mut i = 0;
        while i + 16 <= a.v_width {
            L::load(sum.add(i)).mul(by).store(out.add(i));
            i += 16;
        }
        if i < a.v_width {
            L::load(sum.add(i)).mul(by).store_part(out.add(i), a.v_width - i);
        }
    }
}
