//! The tile layouts of the AMX tier on an emulation of its four instructions, so that they are
//! tried on every machine with AVX-512; whether the instructions themselves are there is reported.

use super::activations::{Acts, Q8Rows};
use super::amx::{self, Config, Unit, WHOLE};
use super::drive::Job;
use super::tests::{Dice, TILED, bits, product, rows_of, shapes, weight};
use super::{Dest, Layout, Matrix};
use crate::isa::Isa;

/// Eight registers of at most sixteen rows of 64 bytes, and their shapes.
pub(crate) struct Emulated([[[u8; 64]; 16]; 8], &'static Config);

impl Emulated {
    /// Rows of a register and the bytes of each.
    fn shape_of(&self, t: u8) -> (usize, usize) {
        let (rows, row_bytes) = self.1.shape(t);
        assert!(rows <= 16 && row_bytes <= 64 && row_bytes % 4 == 0);
        (rows, row_bytes)
    }
}

impl Unit for Emulated {
    unsafe fn shape(&mut self, config: &'static Config) {
        *self = Emulated([[[0; 64]; 16]; 8], config);
    }

    unsafe fn load<const T: u8>(&mut self, at: *const u8, step: usize) {
        let (rows, row_bytes) = self.shape_of(T);
        self.0[usize::from(T)] = [[0; 64]; 16];
        for (row, to) in self.0[usize::from(T)].iter_mut().enumerate().take(rows) {
            // SAFETY: the trait's condition.
            let from = unsafe { std::slice::from_raw_parts(at.add(row * step), row_bytes) };
            to[..row_bytes].copy_from_slice(from);
        }
    }

    unsafe fn zero<const T: u8>(&mut self) {
        self.0[usize::from(T)] = [[0; 64]; 16];
    }

    unsafe fn dot<const C: u8, const A: u8, const B: u8>(&mut self) {
        let ((rows, c_bytes), (a_rows, a_bytes), (b_rows, b_bytes)) =
            (self.shape_of(C), self.shape_of(A), self.shape_of(B));
        assert!(rows == a_rows && c_bytes == b_bytes && a_bytes == 4 * b_rows, "shapes disagree");
        for row in 0..rows {
            for col in 0..c_bytes / 4 {
                let (quads, _) = self.0[usize::from(C)][row].as_chunks::<4>();
                let mut sum = i32::from_le_bytes(quads[col]);
                for k in 0..a_bytes {
                    let a = self.0[usize::from(A)][row][k] as i8;
                    let b = self.0[usize::from(B)][k / 4][col * 4 + k % 4] as i8;
                    sum += i32::from(a) * i32::from(b);
                }
                let at = col * 4..col * 4 + 4;
                self.0[usize::from(C)][row][at].copy_from_slice(&sum.to_le_bytes());
            }
        }
    }

    /// Products of pairs in f32, even and odd ones summed apart, subnormals as zeros.
    unsafe fn dot_halves<const C: u8, const A: u8, const B: u8>(&mut self) {
        let ((rows, c_bytes), (a_rows, a_bytes), (b_rows, b_bytes)) =
            (self.shape_of(C), self.shape_of(A), self.shape_of(B));
        assert!(rows == a_rows && c_bytes == b_bytes && a_bytes == 4 * b_rows, "shapes disagree");
        let half = |t: u8, row: usize, at: usize, of: &Self| {
            let (pairs, _) = of.0[usize::from(t)][row].as_chunks::<2>();
            let v = f32::from_bits(u32::from(u16::from_le_bytes(pairs[at])) << 16);
            if v.is_subnormal() { 0.0 } else { v }
        };
        for row in 0..rows {
            for col in 0..c_bytes / 4 {
                let mut sums = [0.0f32; 2];
                for k in 0..a_bytes / 2 {
                    let (a, b) = (half(A, row, k, self), half(B, k / 2, col * 2 + k % 2, self));
                    sums[k % 2] = a.mul_add(b, sums[k % 2]);
                }
                let (quads, _) = self.0[usize::from(C)][row].as_chunks_mut::<4>();
                let sum = f32::from_le_bytes(quads[col]) + (sums[0] + sums[1]);
                quads[col] = sum.to_le_bytes();
            }
        }
    }

    unsafe fn store<const T: u8>(&mut self, to: *mut u8) {
        // SAFETY: the trait's condition.
        unsafe { self.store_apart::<T>(to, 64) };
    }

    unsafe fn store_apart<const T: u8>(&mut self, to: *mut u8, step: usize) {
        let (rows, row_bytes) = self.shape_of(T);
        for (row, from) in self.0[usize::from(T)].iter().enumerate().take(rows) {
            // SAFETY: the trait's condition.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.add(row * step), row_bytes) };
        }
    }
}

pub(crate) fn emulated() -> Emulated {
    Emulated([[[0; 64]; 16]; 8], &WHOLE)
}

#[test]
#[allow(clippy::print_stderr, reason = "a tier that is not there is not passed over in silence")]
fn the_trial_is_right_where_the_instructions_are() {
    // SAFETY: an emulation needs no configuration.
    assert!(unsafe { amx::right_sums(&mut emulated()) });
    // SAFETY: as above.
    assert!(unsafe { amx::right_halves(&mut emulated()) });
    if !Isa::Amx.is_available() {
        eprintln!("amx: not available on this machine; its layouts are tried on an emulation");
        assert!(!Isa::available().contains(&Isa::Amx));
    }
}

/// A unit whose sums are off by one somewhere must not pass the trial.
#[test]
fn a_broken_unit_fails_the_trial() {
    struct Broken(Emulated);
    impl Unit for Broken {
        unsafe fn shape(&mut self, config: &'static Config) {
            // SAFETY: the caller's word.
            unsafe { self.0.shape(config) }
        }
        unsafe fn load<const T: u8>(&mut self, at: *const u8, step: usize) {
            // SAFETY: the caller's word.
            unsafe { self.0.load::<T>(at, step) }
        }
        unsafe fn zero<const T: u8>(&mut self) {
            // SAFETY: the caller's word.
            unsafe { self.0.zero::<T>() }
        }
        unsafe fn dot<const C: u8, const A: u8, const B: u8>(&mut self) {
            // SAFETY: the caller's word.
            unsafe { self.0.dot::<C, A, B>() }
            self.0.0[usize::from(C)][15][60] ^= 1;
        }
        unsafe fn dot_halves<const C: u8, const A: u8, const B: u8>(&mut self) {
            // SAFETY: the caller's word.
            unsafe { self.0.dot_halves::<C, A, B>() }
            self.0.0[usize::from(C)][15][60] ^= 1;
        }
        unsafe fn store<const T: u8>(&mut self, to: *mut u8) {
            // SAFETY: the caller's word.
            unsafe { self.0.store::<T>(to) }
        }
        unsafe fn store_apart<const T: u8>(&mut self, to: *mut u8, step: usize) {
            // SAFETY: the caller's word.
            unsafe { self.0.store_apart::<T>(to, step) }
        }
    }
    // SAFETY: an emulation needs no configuration.
    assert!(!unsafe { amx::right_sums(&mut Broken(emulated())) });
    // SAFETY: as above.
    assert!(!unsafe { amx::right_halves(&mut Broken(emulated())) });
}

#[test]
#[allow(clippy::print_stderr, reason = "a tier that is not there is not passed over in silence")]
fn tiles_give_the_bits_of_the_scalar_tier() {
    if !Isa::Avx512Vnni.is_available() {
        eprintln!("avx512vnni: not available on this machine; the amx tier is built on it");
        return;
    }
    let dice = &mut Dice(41);
    for &ty in TILED.iter().filter(|ty| ty.block_len() > 1) {
        for (rows, cols) in shapes(ty)
            .into_iter()
            .chain([(20, 32 * 40 / ty.block_len() as u32 * ty.block_len() as u32)])
        {
            if cols == 0 || !(cols as usize).is_multiple_of(ty.block_len()) {
                continue;
            }
            let matrix = Matrix::alone(&weight(ty, 1, rows, cols, dice), 1).unwrap();
            assert!(matrix.layout != Layout::Foreign);
            let (cols, rows) = (cols as usize, rows as usize);
            for count in [8, 9, 16, 19, 40, 83, 139] {
                let x = rows_of(count, cols, dice);
                let want = product(&matrix, Isa::Scalar, 0, &x);
                let store = Q8Rows::new(count, cols).unwrap();
                let view = store.shaped(count, cols);
                for (row, x) in x.chunks(cols).enumerate() {
                    // SAFETY: one thread, and the rows are alive.
                    unsafe { view.fill(Isa::Scalar.kernels(), row, x, 0..view.blocks()) };
                }
                // From the start of a group and from within one.
                for from in [0, 3] {
                    let mut out = vec![f32::NAN; (count - from) * rows];
                    let job = Job {
                        matrix: &matrix,
                        expert: 0,
                        acts: Acts::Q8(view),
                        act_rows: from..count,
                        tiles: 0..matrix.tiles(),
                        out: Dest::plain(out.as_mut_ptr(), rows),
                        then: std::ptr::null(),
                    };
                    // SAFETY: `out` has a place for every output, and AVX-512 is there.
                    unsafe { amx::multiply_with(&job, &mut emulated()) };
                    let same = bits(&out) == bits(&want[from * rows..]);
                    assert!(same, "{ty} {rows}x{cols} times {count} rows from {from}");
                }
            }
        }
    }
}
