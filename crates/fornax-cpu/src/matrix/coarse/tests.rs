//! Each kernel against a plain computation of the same rounding, to the bit: weights and activations quantised element
//! by element, sums of integers, one fused step for each span.

use fornax_gguf::TensorType;

use super::super::amx_tests::emulated;
use super::super::tests::{Dice, bits, rows_of, weight};
use super::super::{Matrix, TILE};
use super::*;
use crate::isa::Isa;

/// A row's spans: integers and scale.
fn spans_of(x: &[f32]) -> Vec<(Vec<i32>, f32)> {
    let span = |x: &[f32]| {
        let a = x.iter().fold(0.0f32, |a, v| a.max(v.abs()));
        if x.iter().any(|v| !v.is_finite()) {
            return (vec![0; x.len()], f32::NAN);
        }
        let inverse = 127.0 / a;
        if !inverse.is_finite() {
            return (vec![0; x.len()], 0.0);
        }
        (x.iter().map(|v| (v * inverse).round_ties_even() as i32).collect(), a / 127.0)
    };
    x.chunks(256).map(span).collect()
}

/// Rows times rows, by definition.
fn plain(w: &[f32], x: &[f32], cols: usize) -> Vec<f32> {
    let w: Vec<_> = w.chunks(cols).map(spans_of).collect();
    let mut out = Vec::new();
    for x in x.chunks(cols).map(spans_of) {
        for w in &w {
            let mut sum = 0.0f32;
            for ((q, d), (p, e)) in w.iter().zip(&x) {
                let whole: i64 = q.iter().zip(p).map(|(q, p)| i64::from(q * p)).sum();
                sum = (whole as f32).mul_add(d * e, sum);
            }
            out.push(sum);
        }
    }
    out
}

fn coarse_of(matrix: &Matrix) -> CoarseMatrix {
    let form = CoarseMatrix::place(matrix, &mut arena(&[matrix]).unwrap());
    fill(&[(&form, matrix)], &vnni::KERNELS, 2);
    form
}

type Multiply = unsafe fn(&Job<'_>);

/// Every kernel that there is, the tiles on an emulation.
fn kernels() -> Vec<(&'static str, Multiply)> {
    unsafe fn tiles(job: &Job<'_>) {
        // SAFETY: the caller's word; an emulation needs no configuration.
        unsafe { amx::multiply_with(job, &mut emulated()) }
    }
    let mut all: Vec<(_, Multiply)> = vec![("vectors", vnni::KERNELS.multiply), ("tiles", tiles)];
    if Isa::Amx.is_available() {
        all.push(("amx", amx::KERNELS.multiply));
    }
    all
}

#[test]
#[allow(clippy::print_stderr, reason = "a tier that is not there is not passed over in silence")]
fn every_kernel_gives_the_bits_of_the_plain_computation() {
    if !Isa::Avx512Vnni.is_available() {
        eprintln!("avx512vnni: not available on this machine; both kernels are built on it");
        return;
    }
    let dice = &mut Dice(90);
    let shapes = [(1, 256), (7, 512), (16, 256), (33, 768), (50, 1280)];
    let odd = [(5, 32), (16, 64), (40, 96), (33, 576), (64, 352), (17, 1120)];
    for ty in
        [TensorType::Q8_0, TensorType::Q5_0, TensorType::Q4_1, TensorType::Q4_K, TensorType::Q6_K]
    {
        let odd = odd.iter().filter(|_| ty.block_len() == 32);
        for &(rows, cols) in shapes.iter().chain(odd) {
            let exact = Matrix::alone(&weight(ty, 1, rows, cols, dice), 1).unwrap();
            let form = coarse_of(&exact);
            let (rows, cols) = (rows as usize, cols as usize);
            let mut w = vec![0.0; rows * cols];
            w.chunks_mut(cols).enumerate().for_each(|(row, out)| exact.row_to_f32(row, out));
            for count in [1, 16, 19, 83, 128, 150] {
                let x = rows_of(count, cols, dice);
                let want = plain(&w, &x, cols);
                let store = CoarseRows::new(count, cols).unwrap();
                let view = store.shaped(count, cols);
                for (row, x) in x.chunks(cols).enumerate() {
                    // SAFETY: one thread, and the rows are alive; the tier was asked for.
                    unsafe { view.fill(&vnni::KERNELS, row, x, 0) };
                }
                for (name, multiply) in kernels() {
                    let kernels = CoarseKernels { multiply, ..vnni::KERNELS };
                    // Within a block of rows, from its start and from within a group; some of the tiles.
                    for act_rows in
                        [0..count.min(ROWS), 3.min(count - 1)..count.min(ROWS), ROWS..count]
                    {
                        for tiles in [0..form.tiles(), form.tiles() / 2..form.tiles()] {
                            let n = act_rows.len();
                            let mut out = vec![f32::NAN; n * rows];
                            // SAFETY: `out` has a place for every output, and the tier is there.
                            unsafe {
                                let (t, to) = (tiles.clone(), out.as_mut_ptr());
                                form.multiply(&kernels, view, act_rows.clone(), t, to, rows);
                            }
                            let mut expected = vec![f32::NAN; n * rows];
                            for i in 0..n {
                                for o in tiles.start * TILE..(tiles.end * TILE).min(rows) {
                                    expected[i * rows + o] = want[(act_rows.start + i) * rows + o];
                                }
                            }
                            let same = bits(&out) == bits(&expected);
                            assert!(
                                same,
                                "{name}, {ty} {rows}x{cols}, rows {act_rows:?} of {count}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_shows_and_what_is_nothing_stays_so() {
    if !Isa::Avx512Vnni.is_available() {
        return;
    }
    let mut x = vec![1.0f32; 3 * 300];
    x[10] = f32::NAN;
    x[300..600].fill(1e-44);
    x[600 + 299] = f32::NEG_INFINITY;
    let store = CoarseRows::new(3, 300).unwrap();
    let view = store.shaped(3, 300);
    for (row, x) in x.chunks(300).enumerate() {
        // SAFETY: one thread, and the rows are alive; the tier was asked for.
        unsafe { view.fill(&vnni::KERNELS, row, x, 0) };
        for (span, (_, scale)) in spans_of(x).into_iter().enumerate() {
            // SAFETY: the row and the span exist.
            let found = unsafe { *view.scale(0, span).add(row) };
            assert!(found.to_bits() == scale.to_bits() || found.is_nan() && scale.is_nan());
        }
    }
}

#[test]
fn parts_of_a_row_give_the_row() {
    if !Isa::Avx512Vnni.is_available() {
        return;
    }
    let dice = &mut Dice(91);
    let x = rows_of(2, 600, dice);
    let stores = [(); 2].map(|()| CoarseRows::new(2, 600).unwrap());
    let [whole, parts] = [0, 1].map(|ix: usize| stores[ix].shaped(2, 600));
    for (row, x) in x.chunks(600).enumerate() {
        // SAFETY: one thread, and the rows are alive; the tier was asked for.
        unsafe {
            whole.fill(&vnni::KERNELS, row, x, 0);
            parts.fill(&vnni::KERNELS, row, &x[512..], 2);
            parts.fill(&vnni::KERNELS, row, &x[..512], 0);
        }
    }
    // SAFETY: as many bytes as were set aside.
    let [a, b] = [whole, parts]
        .map(|v| unsafe { std::slice::from_raw_parts(v.group(0).cast_const(), stores[0].bytes()) });
    assert!(a == b && a.iter().any(|byte| *byte != 0));
}
