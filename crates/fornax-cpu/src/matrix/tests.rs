//! Every type on every tier: against the decoded weights within rounding, and against the scalar
//! tier to the bit, whatever the shape and however rows and tiles are cut.

use std::sync::Arc;

use fornax_gguf::{Mapping, TensorType, blocks};
use fornax_plan::{WeightRef, q8};

use super::{Acts, Dest, Matrix, Q8Rows, TILE};
use crate::isa::Isa;

pub(super) const TILED: &[TensorType] = &[
    TensorType::Q8_0,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::MXFP4,
    TensorType::IQ4_NL,
    TensorType::IQ4_XS,
    TensorType::Q4_K,
    TensorType::Q5_K,
    TensorType::Q2_K,
    TensorType::Q3_K,
    TensorType::Q6_K,
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
];

/// Numbers that are the same on every run (xorshift64*).
pub(super) struct Dice(pub(super) u64);

impl Dice {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    /// −1 to 1.
    fn unit(&mut self) -> f32 {
        self.next() as f32 / 2f32.powi(31) - 1.0
    }

    fn scale(&mut self) -> [u8; 2] {
        blocks::f32_to_f16(self.unit() / 16.0).to_le_bytes()
    }
}

fn is_moderate(ty: TensorType, block: &[u8]) -> bool {
    let mut w = vec![0.0f32; ty.block_len()];
    blocks::dequantize(ty, block, &mut w).unwrap();
    w.iter().all(|w| w.abs() < 100.0)
}

/// Blocks with arbitrary integers, the extremes among them, and scales of a usual size.
fn bytes_of(ty: TensorType, elements: usize, dice: &mut Dice) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..elements / ty.block_len() {
        let mut block: Vec<u8> = (0..ty.block_bytes()).map(|_| dice.next() as u8).collect();
        match ty {
            TensorType::F32 => block.copy_from_slice(&dice.unit().to_le_bytes()),
            TensorType::F16 => block.copy_from_slice(&dice.scale()),
            TensorType::BF16 => {
                block.copy_from_slice(&blocks::f32_to_bf16(dice.unit()).to_le_bytes());
            }
            TensorType::MXFP4 => block[0] = 120 + block[0] % 8,
            TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4_K | TensorType::Q5_K => {
                block[..2].copy_from_slice(&dice.scale());
                block[2..4].copy_from_slice(&dice.scale());
            }
            TensorType::Q6_K => block[208..].copy_from_slice(&dice.scale()),
            TensorType::Q8_0 | TensorType::Q4_0 | TensorType::Q5_0 | TensorType::IQ4_NL => {
                block[..2].copy_from_slice(&dice.scale());
            }
            _ => {
                while !is_moderate(ty, &block) {
                    block.fill_with(|| dice.next() as u8);
                }
            }
        }
        if ty == TensorType::Q8_0 && dice.next().is_multiple_of(4) {
            block[2 + dice.next() as usize % 32] = 0x80;
        }
        bytes.extend(block);
    }
    bytes
}

pub(super) fn weight(
    ty: TensorType,
    experts: u32,
    rows: u32,
    cols: u32,
    dice: &mut Dice,
) -> WeightRef {
    let bytes = bytes_of(ty, (experts * rows * cols) as usize, dice);
    let data = Arc::new(Mapping::from_vec(bytes));
    WeightRef { name: format!("{ty}"), ty, cols, rows, experts, data, offset: 0 }
}

pub(super) fn rows_of(count: usize, cols: usize, dice: &mut Dice) -> Vec<f32> {
    let mut x: Vec<f32> = (0..count * cols).map(|_| dice.unit()).collect();
    // A zero block, and one of a single large value.
    x[..cols.min(32)].fill(0.0);
    if count > 1 {
        x[cols] = 1000.0;
    }
    x
}

/// What a caller does: quantise where the matrix wants it, then multiply everything at once.
pub(super) fn product(matrix: &Matrix, isa: Isa, expert: usize, x: &[f32]) -> Vec<f32> {
    product_with(matrix, isa, expert, x, [None, None])
}

/// The same with a bias and with a number for every output added to it.
fn product_with(
    matrix: &Matrix,
    isa: Isa,
    expert: usize,
    x: &[f32],
    [bias, plus]: [Option<&[f32]>; 2],
) -> Vec<f32> {
    let at = |of: Option<&[f32]>| of.map_or(std::ptr::null(), <[f32]>::as_ptr);
    let cols = matrix.cols();
    let count = x.len() / cols;
    let rows = Q8Rows::new(count, cols).unwrap();
    let mut out = vec![f32::NAN; count * matrix.rows()];
    let acts = if matrix.takes_q8() {
        let view = rows.shaped(count, cols);
        for (row, x) in x.chunks(cols).enumerate() {
            // SAFETY: one thread, and the rows are alive.
            unsafe { view.fill(isa.kernels(), row, x, 0..view.blocks()) };
        }
        Acts::Q8(view)
    } else {
        Acts::F32 { x, cols }
    };
    let (tiles, to) = (0..matrix.tiles(), out.as_mut_ptr());
    // SAFETY: `out` has a place for every output.
    unsafe {
        matrix.multiply(
            isa.kernels(),
            expert,
            &acts,
            0..count,
            tiles,
            Dest { at: to, stride: matrix.rows(), bias: at(bias), plus: at(plus) },
            std::ptr::null(),
        )
    };
    out
}

pub(super) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

pub(super) fn shapes(ty: TensorType) -> Vec<(u32, u32)> {
    match ty.block_len() {
        1 => vec![(1, 7), (7, 1), (16, 64), (33, 33), (130, 256)],
        32 => vec![(1, 32), (7, 64), (16, 96), (33, 256), (130, 352)],
        _ => vec![(1, 256), (7, 512), (16, 256), (33, 768)],
    }
}

fn decoded(w: &WeightRef) -> Vec<f32> {
    w.to_f32()
}

/// The sum of the products and of their magnitudes, in f64.
fn dot(w: &[f32], x: &[f32]) -> (f64, f64) {
    w.iter().zip(x).fold((0.0, 0.0), |(sum, size), (w, x)| {
        let p = f64::from(*w) * f64::from(*x);
        (sum + p, size + p.abs())
    })
}

fn check_against_decoded(ty: TensorType) {
    let dice = &mut Dice(7 + u64::from(ty.id()));
    for (rows, cols) in shapes(ty) {
        let w = weight(ty, 2, rows, cols, dice);
        let matrix = Matrix::alone(&w, 2).unwrap();
        let all = decoded(&w);
        let mut x = rows_of(3, cols as usize, dice);
        let experts: Vec<Vec<f32>> =
            (0..2).map(|expert| product(&matrix, Isa::Scalar, expert, &x)).collect();
        if matrix.takes_q8() {
            x.chunks_mut(cols as usize).for_each(q8::round_row);
        }
        for (ix, w) in all.chunks(cols as usize).enumerate() {
            let (expert, row) = (ix / rows as usize, ix % rows as usize);
            for (at, x) in x.chunks(cols as usize).enumerate() {
                let have = f64::from(experts[expert][at * rows as usize + row]);
                let (want, size) = dot(w, x);
                // Each of the sums of a row rounds once per block, and minima may cancel.
                assert!(
                    (have - want).abs() <= 4e-6 * size + 1e-9,
                    "{ty} {rows}x{cols} expert {expert} output {row} of row {at}: {have} for {want} of {size}"
                );
            }
        }
    }
}

#[test]
fn scalar_products_are_those_of_the_decoded_weights() {
    TILED.iter().for_each(|&ty| check_against_decoded(ty));
}

#[test]
fn types_without_tiles_are_decoded_as_they_are_multiplied() {
    let foreign: Vec<TensorType> = TensorType::ALL
        .iter()
        .copied()
        .filter(|&ty| super::supports(ty) && !super::is_tiled(ty) && ty.block_len() > 1)
        .collect();
    assert!(!foreign.is_empty());
    for ty in foreign {
        check_against_decoded(ty);
        let dice = &mut Dice(23);
        let matrix = Matrix::alone(&weight(ty, 1, 17, 512, dice), 1).unwrap();
        let x = rows_of(11, 512, dice);
        let want = bits(&product(&matrix, Isa::Scalar, 0, &x));
        for isa in Isa::available() {
            assert!(bits(&product(&matrix, isa, 0, &x)) == want, "{ty} on {isa}");
        }
    }
}

#[test]
fn rows_come_back_to_the_bit() {
    let dice = &mut Dice(3);
    for &ty in TILED {
        for (rows, cols) in shapes(ty) {
            let w = weight(ty, 1, rows, cols, dice);
            let matrix = Matrix::alone(&w, 1).unwrap();
            let all = decoded(&w);
            let mut out = vec![0.0; cols as usize];
            for (row, want) in all.chunks(cols as usize).enumerate() {
                matrix.row_to_f32(row, &mut out);
                for (have, want) in out.iter().zip(want) {
                    assert!(have == want, "{ty} row {row}: {have} for {want}");
                }
            }
        }
    }
}

#[test]
fn every_tier_gives_the_bits_of_the_scalar_tier() {
    let dice = &mut Dice(11);
    for &ty in TILED {
        for (rows, cols) in shapes(ty) {
            let w = weight(ty, 1, rows, cols, dice);
            let matrix = Matrix::alone(&w, 1).unwrap();
            for count in [1, 2, 3, 4, 7, 8, 19] {
                let x = rows_of(count, cols as usize, dice);
                let want = bits(&product(&matrix, Isa::Scalar, 0, &x));
                for isa in Isa::available() {
                    let have = bits(&product(&matrix, isa, 0, &x));
                    assert!(have == want, "{ty} {rows}x{cols} times {count} rows on {isa}");
                }
            }
        }
    }
}

/// Enough rows that weights are spelled out for them, and more than one chunk of blocks.
#[test]
fn many_rows_give_the_bits_of_few() {
    let dice = &mut Dice(29);
    for &ty in TILED.iter().filter(|ty| ty.block_len() > 1) {
        let (rows, cols) = (35, if ty.block_len() == 32 { 704 } else { 768 });
        let matrix = Matrix::alone(&weight(ty, 1, rows, cols, dice), 1).unwrap();
        for count in [32, 45, 300] {
            let x = rows_of(count, cols as usize, dice);
            let want = bits(&product(&matrix, Isa::Scalar, 0, &x));
            for isa in Isa::available() {
                let have = bits(&product(&matrix, isa, 0, &x));
                assert!(have == want, "{ty} times {count} rows on {isa}");
            }
        }
    }
}

#[test]
fn what_is_added_comes_after_the_product_in_its_order() {
    let dice = &mut Dice(19);
    // A type that is read where it lies in the file, too.
    for &ty in TILED.iter().chain(&[TensorType::TQ1_0]) {
        let cols = ty.block_len().max(32);
        let matrix = Matrix::alone(&weight(ty, 1, 39, cols as u32, dice), 1).unwrap();
        for count in [1, 5, 40] {
            let x = rows_of(count, cols, dice);
            let bias: Vec<f32> = (0..39).map(|_| dice.unit()).collect();
            let plus: Vec<f32> = (0..39 * count).map(|_| dice.unit()).collect();
            for isa in Isa::available() {
                let plain = product(&matrix, isa, 0, &x);
                let all = plain.iter().zip(&plus).enumerate();
                let want: Vec<f32> = all.map(|(ix, (y, p))| y + bias[ix % 39] + p).collect();
                let have = product_with(&matrix, isa, 0, &x, [Some(&bias), Some(&plus)]);
                assert_eq!(bits(&have), bits(&want), "{ty} times {count} rows on {isa}");
            }
        }
    }
}

#[test]
fn rows_and_tiles_may_be_cut_anywhere() {
    let dice = &mut Dice(5);
    for &ty in TILED {
        let cols = ty.block_len().max(32) * 2;
        let w = weight(ty, 1, 70, cols as u32, dice);
        let matrix = Matrix::alone(&w, 1).unwrap();
        let x = rows_of(21, cols, dice);
        for isa in Isa::available() {
            let whole = product(&matrix, isa, 0, &x);
            for (row, x) in x.chunks(cols).enumerate() {
                let alone = product(&matrix, isa, 0, x);
                let want = &whole[row * 70..][..70];
                assert_eq!(bits(&alone), bits(want), "{ty} row {row} alone on {isa}");
            }
            let mut cut = vec![f32::NAN; 21 * 70];
            let rows = Q8Rows::new(21, cols).unwrap();
            let view = rows.shaped(21, cols);
            for (row, x) in x.chunks(cols).enumerate() {
                // SAFETY: one thread, and the rows are alive.
                unsafe {
                    view.fill(isa.kernels(), row, x, 1..2);
                    view.fill(isa.kernels(), row, x, 0..1);
                    view.fill(isa.kernels(), row, x, 2..view.blocks());
                }
            }
            let acts = if matrix.takes_q8() { Acts::Q8(view) } else { Acts::F32 { x: &x, cols } };
            for part in [0..1, 1..6, 6..13, 13..21] {
                for tiles in [3..5, 0..1, 1..3] {
                    let at = cut[part.start * 70..].as_mut_ptr();
                    // SAFETY: `cut` has a place for every output.
                    unsafe {
                        matrix.multiply(
                            isa.kernels(),
                            0,
                            &acts,
                            part.clone(),
                            tiles,
                            Dest::plain(at, 70),
                            std::ptr::null(),
                        );
                    }
                }
            }
            assert_eq!(bits(&cut), bits(&whole), "{ty} cut on {isa}");
        }
    }
}

#[test]
fn only_the_outputs_asked_for_are_written() {
    let dice = &mut Dice(9);
    for &ty in TILED {
        let cols = ty.block_len().max(32);
        let matrix = Matrix::alone(&weight(ty, 1, 39, cols as u32, dice), 1).unwrap();
        let x = rows_of(1, cols, dice);
        for isa in Isa::available() {
            let want = product(&matrix, isa, 0, &x);
            let rows = Q8Rows::new(1, cols).unwrap();
            let view = rows.shaped(1, cols);
            // SAFETY: one thread, and the rows are alive.
            unsafe { view.fill(isa.kernels(), 0, &x, 0..view.blocks()) };
            let acts = if matrix.takes_q8() { Acts::Q8(view) } else { Acts::F32 { x: &x, cols } };
            let mut out = [-7.0f32; 3 * TILE];
            // SAFETY: `out` has a place for every output.
            unsafe {
                matrix.multiply(
                    isa.kernels(),
                    0,
                    &acts,
                    0..1,
                    1..3,
                    Dest::plain(out.as_mut_ptr(), 39),
                    std::ptr::null(),
                )
            };
            assert!(out[..16].iter().chain(&out[39..]).all(|&v| v == -7.0), "{ty} on {isa}");
            assert_eq!(bits(&out[16..39]), bits(&want[16..]), "{ty} on {isa}");
        }
    }
}

#[test]
fn quantising_is_that_of_the_plan_on_every_tier() {
    let dice = &mut Dice(13);
    let mut x: Vec<f32> =
        (0..32 * 40).map(|_| dice.unit() * 2f32.powi(dice.next() as i32 % 60)).collect();
    x[32..64].fill(0.0);
    x[64..96].fill(1e-40);
    x[100] = f32::NAN;
    x[130] = f32::INFINITY;
    (x[160], x[161], x[162], x[163]) = (127.0, 0.5, 1.5, -127.0);
    x[164..192].fill(2.5);
    for isa in Isa::available() {
        let rows = Q8Rows::new(1, x.len()).unwrap();
        let view = rows.shaped(1, x.len());
        // SAFETY: one thread, and the rows are alive.
        unsafe { view.fill(isa.kernels(), 0, &x, 0..view.blocks()) };
        for (ix, x) in x.chunks(32).enumerate() {
            let mut q = [0; 32];
            let d = q8::quantize_block(x, &mut q);
            let sum: i32 = q.iter().map(|&q| i32::from(q)).sum();
            let first: i32 = q[..16].iter().map(|&q| i32::from(q)).sum();
            // SAFETY: the block is within the view, which is alive.
            let have = unsafe { &*view.block(0, ix) };
            assert_eq!(have.q, q, "block {ix} on {isa}");
            assert!(have.d.to_bits() == d.to_bits() || (have.d.is_nan() && d.is_nan()));
            assert!(have.sx == d * sum as f32 || have.sx.is_nan() && d.is_nan());
            assert_eq!((have.lift, have.lift_first), (-128 * sum, -128 * first));
        }
    }
}

/// Sums of 16 bits must hold the largest weights times the largest activations.
#[test]
fn extreme_integers_do_not_overflow() {
    for &ty in TILED.iter().filter(|ty| ty.block_len() > 1) {
        let cols = ty.block_len().max(64);
        for fill in [0x00u8, 0x7F, 0x80, 0xFF, 0x0F, 0xF0] {
            let dice = &mut Dice(17);
            let mut bytes = bytes_of(ty, 16 * cols, dice);
            // The planes of integers alone: scales stay as they are.
            let planes = match ty {
                TensorType::Q4_K | TensorType::Q5_K => 16..ty.block_bytes(),
                TensorType::Q6_K => 0..192,
                TensorType::IQ4_XS => 8..136,
                TensorType::Q2_K => 16..80,
                TensorType::Q3_K => 0..96,
                TensorType::Q4_1 | TensorType::Q5_1 => 4..ty.block_bytes(),
                TensorType::MXFP4 => 1..17,
                _ => 2..ty.block_bytes(),
            };
            for block in bytes.chunks_mut(ty.block_bytes()) {
                block[planes.clone()].fill(fill);
            }
            let (name, data) = (ty.to_string(), Arc::new(Mapping::from_vec(bytes)));
            let cols = cols as u32;
            let w = WeightRef { name, ty, cols, rows: 16, experts: 1, data, offset: 0 };
            let matrix = Matrix::alone(&w, 1).unwrap();
            let rising = |ix: u32| if ix.is_multiple_of(3) { 1.0 } else { -1.0 };
            for sign in [1.0f32, -1.0] {
                let mut x: Vec<f32> = (0..2 * cols).map(|_| sign).collect();
                x.extend((0..cols).map(|ix| sign * rising(ix)));
                let want = bits(&product(&matrix, Isa::Scalar, 0, &x));
                for isa in Isa::available() {
                    let have = bits(&product(&matrix, isa, 0, &x));
                    assert!(have == want, "{ty} of {fill:02x} on {isa}");
                }
            }
        }
    }
}

#[test]
fn tiles_are_no_larger_than_the_file_by_more_than_three_per_cent() {
    for &ty in TILED {
        let w = weight(ty, 1, 64, 2048, &mut Dice(19));
        let matrix = Matrix::alone(&w, 1).unwrap();
        let (have, file) = (matrix.bytes(), w.len_bytes());
        assert!(have * 100 <= file * 103, "{ty}: {have} bytes for {file}");
    }
}

#[test]
fn bad_weights_are_refused_by_name() {
    let mut w = weight(TensorType::Q8_0, 1, 16, 64, &mut Dice(1));
    w.rows = 17;
    let error = Matrix::alone(&w, 1).unwrap_err();
    assert!(error.is_malformed() && error.to_string().contains("Q8_0"), "{error}");
    let mut w = weight(TensorType::Q8_0, 1, 16, 64, &mut Dice(1));
    w.cols = 48;
    assert!(Matrix::alone(&w, 1).unwrap_err().is_malformed());
}
