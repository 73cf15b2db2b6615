//! The short convolution: rows of several sequences, cut up in every way, and the state between.

use super::{Run, close, floats, noise, read_floats, room, words};

/// Rows of one step: slot, first position, rows, and whether they are alive.
type Part = (usize, usize, usize, bool);

/// The same sequences computed at once in double precision: B, C, X of `n` tokens.
fn whole(x: &[f32], taps: &[f32], width: usize, count: usize) -> Vec<f64> {
    let row = |r: usize, part: usize, c: usize| f64::from(x[(3 * r + part) * width + c]);
    let mut out = Vec::new();
    for r in 0..x.len() / (3 * width) {
        for c in 0..width {
            let sum: f64 = (0..count.min(r + 1))
                .map(|back| {
                    let tap = f64::from(taps[c * count + count - 1 - back]);
                    tap * row(r - back, 0, c) * row(r - back, 2, c)
                })
                .sum();
            out.push(row(r, 1, c) * sum);
        }
    }
    out
}

fn convolve(width: usize, count: usize, tile: u32, steps: &[&[Part]]) {
    const SLOTS: usize = 3;
    let taps = noise(1, width * count);
    let longest = |slot: usize| {
        let ends = steps.iter().flat_map(|s| s.iter()).filter(|p| p.0 == slot && p.3);
        ends.map(|p| p.1 + p.2).max().unwrap_or(0)
    };
    let all: Vec<Vec<f32>> =
        (0..SLOTS).map(|s| noise(10 + s as u64, 3 * width * longest(s))).collect();
    let want: Vec<Vec<f64>> = all.iter().map(|x| whole(x, &taps, width, count)).collect();
    // What an earlier sequence has left in the slots.
    let state = floats(&noise(2, (SLOTS * (count - 1) * width).max(1)));
    for step in steps {
        let (mut rows, mut x) = (Vec::new(), Vec::new());
        for &(slot, pos, n, alive) in *step {
            for i in 0..n {
                let place = [i as u32, (n - 1 - i) as u32];
                let head = [0, (pos + i) as u32, 0, slot as u32, u32::from(alive), 0];
                rows.extend(head.into_iter().chain(place));
            }
            let here = 3 * width * pos..3 * width * (pos + n);
            x.extend(all[slot].get(here).map_or_else(|| noise(3, 3 * width * n), <[f32]>::to_vec));
        }
        let n = rows.len() / 8;
        let out = room(n * width);
        Run::new("short_conv", &[], [(width as u32).div_ceil(64), n as u32, 1], [64, 1, 1])
            .floats(&x)
            .floats(&taps)
            .buffer(&words(&rows))
            .buffer(&state)
            .buffer(&out)
            .go(&[n as u32, width as u32, count as u32, tile]);
        let have = read_floats(&out, n * width);
        let mut row = 0;
        for &(slot, pos, n, alive) in *step {
            let have = &have[row * width..][..n * width];
            row += n;
            if alive {
                let what = format!("{count} taps, slot {slot} from {pos}");
                close(&what, have, &want[slot][pos * width..][..n * width], 1e-5);
            } else {
                assert!(have.iter().all(|v| *v == 0.0), "a row with nothing left");
            }
        }
    }
}

#[test]
fn a_sequence_may_be_cut_up_in_every_way() {
    for (width, count) in [(7, 3), (33, 4), (130, 2), (40, 1), (64, 9)] {
        cut_up(width, count);
    }
}

/// Channels and taps: single rows, pieces shorter and longer than the taps and the tile, several slots at once.
pub(super) fn cut_up(width: usize, count: usize) {
    let tile = 8.max(count as u32);
    convolve(
        width,
        count,
        tile,
        &[
            &[(0, 0, 1, true), (1, 0, 5, true)],
            &[(0, 1, 1, true), (1, 5, 2, true)],
            &[(1, 7, 19, true), (0, 2, 1, true)],
            &[(0, 3, 30, true), (1, 26, 1, true)],
            &[(1, 27, 16, true), (0, 33, 2, true), (2, 0, 3, true)],
            &[(2, 3, 64, true)],
        ],
    );
    // A slot begins anew, and what was behind a chain's end leaves no trace.
    convolve(
        width,
        count,
        tile,
        &[&[(0, 0, 4, true)], &[(0, 4, 1, false)], &[(0, 4, 2, true)], &[(0, 0, 3, true)]],
    );
}
