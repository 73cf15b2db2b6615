//! Tensor types as GGUF numbers and names them, with the size of their blocks. It must not know how a
//! block is decoded.

use std::fmt;

macro_rules! tensor_types {
    ($($(#[$doc:meta])* $name:ident = $id:literal, $block_len:literal, $block_bytes:literal;)*) => {
        /// The type of a tensor's elements; the names are those of GGUF.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum TensorType { $($(#[$doc])* $name = $id,)* }

        impl TensorType {
            /// Every type, in the order of their numbers.
            pub const ALL: &'static [TensorType] = &[$(TensorType::$name,)*];

            /// The type with GGUF number `id`, or `None` where the number is unknown or retired.
            pub const fn from_id(id: u32) -> Option<TensorType> {
                match id { $($id => Some(TensorType::$name),)* _ => None }
            }

            /// The name as GGUF tools write it, such as `Q4_K`.
            pub const fn name(self) -> &'static str {
                match self { $(TensorType::$name => stringify!($name),)* }
            }

            /// Weights in one block; 1 for plain element types.
            pub const fn block_len(self) -> usize {
                match self { $(TensorType::$name => $block_len,)* }
            }

            /// Bytes of one block.
            pub const fn block_bytes(self) -> usize {
                match self { $(TensorType::$name => $block_bytes,)* }
            }
        }
    };
}

tensor_types! {
    /// IEEE 754 single precision.
    F32 = 0, 1, 4;
    /// IEEE 754 half precision.
    F16 = 1, 1, 2;
    /// 4 bits and an f16 scale.
    Q4_0 = 2, 32, 18;
    /// 4 bits, f16 scale and minimum.
    Q4_1 = 3, 32, 20;
    /// 5 bits and an f16 scale.
    Q5_0 = 6, 32, 22;
    /// 5 bits, f16 scale and minimum.
    Q5_1 = 7, 32, 24;
    /// 8 bits and an f16 scale.
    Q8_0 = 8, 32, 34;
    /// 8 bits, f16 scale and f16 scaled sum: an activation format of other engines, seldom in files.
    Q8_1 = 9, 32, 36;
    /// 2 bits, 4-bit scales and minima of 16 weights.
    Q2_K = 10, 256, 84;
    /// 3 bits, 6-bit scales of 16 weights.
    Q3_K = 11, 256, 110;
    /// 4 bits, 6-bit scales and minima of 32 weights.
    Q4_K = 12, 256, 144;
    /// 5 bits, 6-bit scales and minima of 32 weights.
    Q5_K = 13, 256, 176;
    /// 6 bits, 8-bit scales of 16 weights.
    Q6_K = 14, 256, 210;
    /// 8 bits, f32 scale and sums of 16: an activation format of other engines, seldom in files.
    Q8_K = 15, 256, 292;
    /// 2.06 bits: a codebook of 256 octets.
    IQ2_XXS = 16, 256, 66;
    /// 2.31 bits: a codebook of 512 octets.
    IQ2_XS = 17, 256, 74;
    /// 3.06 bits: a codebook of 256 quartets.
    IQ3_XXS = 18, 256, 98;
    /// 1.56 bits: a codebook of 2048 ternary octets.
    IQ1_S = 19, 256, 50;
    /// 4 bits into a fixed non-linear table, f16 scale.
    IQ4_NL = 20, 32, 18;
    /// 3.44 bits: a codebook of 512 quartets.
    IQ3_S = 21, 256, 110;
    /// 2.56 bits: a codebook of 1024 octets.
    IQ2_S = 22, 256, 82;
    /// 4 bits into a fixed non-linear table, 6-bit scales of 32 weights.
    IQ4_XS = 23, 256, 136;
    /// Signed 8-bit integers.
    I8 = 24, 1, 1;
    /// Signed 16-bit integers.
    I16 = 25, 1, 2;
    /// Signed 32-bit integers.
    I32 = 26, 1, 4;
    /// Signed 64-bit integers.
    I64 = 27, 1, 8;
    /// IEEE 754 double precision.
    F64 = 28, 1, 8;
    /// 1.75 bits: the codebook of `IQ1_S` with scales of 16 weights.
    IQ1_M = 29, 256, 56;
    /// The upper half of single precision.
    BF16 = 30, 1, 2;
    /// Ternary, five to a byte.
    TQ1_0 = 34, 256, 54;
    /// Ternary, four to a byte.
    TQ2_0 = 35, 256, 66;
    /// OCP microscaling: E2M1 elements, one E8M0 scale.
    MXFP4 = 39, 32, 17;
    /// E2M1 elements, a UE4M3 scale for each 16.
    NVFP4 = 40, 64, 36;
}

impl TensorType {
    /// The number that stands for the type in a file.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// Bytes of a row of `cols` weights: `None` where `cols` is not whole blocks, or on overflow.
    pub const fn row_bytes(self, cols: u64) -> Option<u64> {
        let block_len = self.block_len() as u64;
        if !cols.is_multiple_of(block_len) {
            return None;
        }
        (cols / block_len).checked_mul(self.block_bytes() as u64)
    }

    /// The type called `name`, in upper or lower case (`Q4_K`, `q4_k`).
    pub fn parse(name: &str) -> Option<TensorType> {
        TensorType::ALL.iter().copied().find(|ty| ty.name().eq_ignore_ascii_case(name))
    }

    /// Storage per weight, in bits.
    pub fn bits_per_weight(self) -> f64 {
        self.block_bytes() as f64 * 8.0 / self.block_len() as f64
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
