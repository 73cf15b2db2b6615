//! Scalar kernels that stand in for the `.metal` files: one function per entry name, each seeing
//! its declared arguments and nothing else. They know no plan and no encoder.

mod attention;
mod choose;
mod linear;
mod rows;

use std::ops::Range;

use fornax_gguf::{TensorType, blocks};

use crate::api::View;

/// A kernel: reads and writes through its [`Call`], or says what was out of range.
pub(crate) type Kernel = fn(&mut Call<'_>) -> Result<(), String>;

/// What a kernel sees: its arguments by slot and its constants.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    args: Vec<Option<View>>,
    constants: &'a [u32],
}

macro_rules! library {
    ($($ty:ident $suffix:literal,)*) => {
        /// Every kernel by its entry name.
        pub(crate) static LIBRARY: &[(&str, Kernel)] = &[
            $(
                (concat!("embed_", $suffix), linear::embed::<{ TensorType::$ty as u32 }>),
                (concat!("matmul_", $suffix), linear::matmul::<{ TensorType::$ty as u32 }>),
                (concat!("gated_mlp_", $suffix), linear::gated_mlp::<{ TensorType::$ty as u32 }>),
            )*
            ("rms_norm", rows::rms_norm),
            ("norm_rope", rows::norm_rope),
            ("select_rows", rows::select_rows),
            ("copy", rows::copy),
            ("kv_write", attention::kv_write),
            ("attention", attention::attention),
            ("argmax", choose::argmax),
        ];

        /// The weight types that those kernels read.
        pub(crate) const WEIGHT_TYPES: &[TensorType] = &[$(TensorType::$ty,)*];
    };
}

library! {
    F32 "f32",
    F16 "f16",
    BF16 "bf16",
    Q8_0 "q8_0",
    Q4_0 "q4_0",
    Q4_1 "q4_1",
    Q5_0 "q5_0",
    Q5_1 "q5_1",
}

/// The entry name of a kernel that reads weights: the family, then the type in lower case.
pub(crate) fn entry(family: &str, ty: TensorType) -> String {
    format!("{family}_{}", ty.name().to_ascii_lowercase())
}

impl<'a> Call<'a> {
    pub(crate) fn new(args: Vec<Option<View>>, constants: &'a [u32]) -> Call<'a> {
        Call { args, constants }
    }

    /// The arguments after the kernel has run.
    pub(crate) fn views(&self) -> &[Option<View>] {
        &self.args
    }

    fn constants(&self) -> &'a [u32] {
        self.constants
    }

    fn words(&self, slot: usize) -> Result<&[u32], String> {
        match self.args.get(slot) {
            Some(Some(View::Words(words))) => Ok(words),
            Some(Some(View::Mapped(..))) => Err(format!("argument {slot} is bytes, not words")),
            _ => Err(format!("argument {slot} is not bound")),
        }
    }

    /// `len` words of an argument from `at` on.
    fn get(&self, slot: usize, at: usize, len: usize) -> Result<&[u32], String> {
        let words = self.words(slot)?;
        words.get(at..at + len).ok_or_else(|| beyond(slot, at..at + len, words.len()))
    }

    /// The same as floats.
    fn floats(&self, slot: usize, at: usize, len: usize) -> Result<Vec<f32>, String> {
        match self.args.get(slot) {
            Some(Some(View::Mapped(map, range))) => {
                let bytes = at * 4..(at + len) * 4;
                let all = &map.bytes()[range.clone()];
                let have = all.len() / 4;
                let bytes = all.get(bytes).ok_or_else(|| beyond(slot, at..at + len, have))?;
                let word = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                Ok(bytes.chunks_exact(4).map(word).collect())
            }
            _ => Ok(self.get(slot, at, len)?.iter().map(|w| f32::from_bits(*w)).collect()),
        }
    }

    /// One decoded row of a weight.
    fn weights<const TY: u32>(
        &self,
        slot: usize,
        row: usize,
        cols: usize,
    ) -> Result<Vec<f32>, String> {
        let Some(Some(View::Mapped(map, range))) = self.args.get(slot) else {
            return Err(format!("argument {slot} is no weight"));
        };
        let ty = TensorType::from_id(TY).ok_or("unknown weight type")?;
        let row_bytes = cols / ty.block_len() * ty.block_bytes();
        let bytes = row * row_bytes..(row + 1) * row_bytes;
        let all = &map.bytes()[range.clone()];
        let bytes = all.get(bytes.clone()).ok_or_else(|| beyond(slot, bytes, all.len()))?;
        let mut out = vec![0.0; cols];
        blocks::dequantize(ty, bytes, &mut out).map_err(|e| e.to_string())?;
        Ok(out)
    }

    fn set(&mut self, slot: usize, at: usize, words: &[u32]) -> Result<(), String> {
        let Some(Some(View::Words(to))) = self.args.get_mut(slot) else {
            return Err(format!("argument {slot} cannot be written"));
        };
        let (range, have) = (at..at + words.len(), to.len());
        let to = to.get_mut(range.clone()).ok_or_else(|| beyond(slot, range, have))?;
        to.copy_from_slice(words);
        Ok(())
    }

    fn set_floats(&mut self, slot: usize, at: usize, floats: &[f32]) -> Result<(), String> {
        let words: Vec<u32> = floats.iter().map(|v| v.to_bits()).collect();
        self.set(slot, at, &words)
    }
}

fn beyond(slot: usize, range: Range<usize>, have: usize) -> String {
    format!("argument {slot}: elements {range:?} of {have}")
}

/// A kernel's constants as its structure.
fn constants<T>(call: &Call<'_>, read: impl Fn(&[u32]) -> Option<T>) -> Result<T, String> {
    let words = call.constants();
    read(words).ok_or_else(|| format!("{} words of constants are not what it takes", words.len()))
}

/// Sum of products, 32 lanes side by side and then together, as a simdgroup adds.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 32];
    for (a, b) in a.chunks(32).zip(b.chunks(32)) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_cannot_reach_beyond_its_arguments() {
        let args = vec![Some(View::Words(vec![0; 4])), Some(View::Words(vec![0; 3]))];
        let words = [1, 4];
        let mut call = Call::new(args, &words);
        let e = rows::copy(&mut call).unwrap_err();
        assert_eq!(e, "argument 1: elements 0..4 of 3");
        let mut call = Call::new(vec![None], &words);
        assert_eq!(rows::copy(&mut call).unwrap_err(), "argument 0 is not bound");
    }

    #[test]
    fn entry_names_are_those_of_the_library() {
        for ty in WEIGHT_TYPES {
            for family in ["embed", "matmul", "gated_mlp"] {
                let name = entry(family, *ty);
                assert!(LIBRARY.iter().any(|(n, _)| *n == name), "{name}");
            }
        }
    }
}
