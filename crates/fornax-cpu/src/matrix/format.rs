//! The tile forms of the block formats: where their planes lie and how a block of 32 becomes
//! integers with scales. It must not know instruction sets.
//!
//! A tile holds sixteen weight rows, cut along the row into units of one or more blocks. A unit
//! begins with the scales of all its rows and blocks and goes on with the planes of bits, so that
//! planes start on cache lines. Within a plane the rows are interleaved by quads: four neighbouring
//! weights of row 0, of row 1, … of row 15, 64 bytes where a weight is a byte.
//!
//! ```text
//! format  unit    head                                        planes of a block
//! Q8_0    2       d:f16[2][16]                                8 × 64 B, quad j in vector j
//! Q4_0    2       d:f16[2][16]                                4 × 64 B, quad j low, quad j + 4 high
//! Q4_1    2       d:f16[2][16] m:f16[2][16]                   as Q4_0
//! Q5_0    2       d:f16[2][16]                                as Q4_0, then 64 B: bit j of a byte for quad j
//! Q5_1    2       d:f16[2][16] m:f16[2][16]                   as Q5_0
//! MXFP4   4       e:u8[4][16]                                 as Q4_0, through a table
//! IQ4_NL  2       d:f16[2][16]                                as Q4_0, through a table
//! IQ4_XS  8       d:f16[16] pad[32] sc:i8[8][16]              as Q4_0, through a table
//! Q4_K    8       d:f16[16] dmin:f16[16] sc:u8[8][16] m:u8[8][16]   as Q4_0
//! Q5_K    8       as Q4_K                                     as Q5_0
//! Q2_K    8       d:f16[16] dmin:f16[16] sm:u8[16][16]        2 × 64 B as the last two of Q6_K; sm: scale low, minimum high
//! Q3_K    8       d:f16[16] pad[32] sh sl:u8[64] sl:u8[64]    as Q2_K, then 64 B as the last of Q5_0
//! Q6_K    8       d:f16[16] pad[32] sc:i8[16][16]             as Q4_0, then 2 × 64 B: bits 2t of vector j/4, t = j % 4
//! ```

use super::simd::{QUADS, Range, Simd, TILE};

/// A block of 32 columns of a tile, decoded.
#[derive(Clone, Copy)]
pub(super) struct Decoded<S: Simd> {
    /// Quad `j` of the sixteen rows, in the tier's own form.
    pub(super) w: [S::Bytes; QUADS],
    pub(super) scales: Scales<S>,
}

/// What the integers of a block stand for.
#[derive(Clone, Copy)]
pub(super) struct Scales<S: Simd> {
    /// Per row, the scale; the second is that of the last sixteen weights where the format has
    /// one for each half.
    pub(super) scale: [S::Floats; 2],
    /// Per row and in the same way, what is added to every weight; used where the format has
    /// minima.
    pub(super) min: [S::Floats; 2],
}

/// A block format in tile form.
pub(super) trait Format: Range + 'static {
    /// Blocks of a unit.
    const UNIT: usize;
    /// Bytes before the planes.
    const HEAD: usize;
    /// Bytes of the planes of one block.
    const PLANES: usize;
    /// Whether weights have an additive part.
    const MINIMA: bool = false;
    /// Whether each half of a block has a scale of its own.
    const HALVES: bool = false;

    /// The integers of a block as stored.
    ///
    /// # Safety
    /// `planes` points at the planes of a block of this format, and the tier is available.
    unsafe fn stored<S: Simd>(planes: *const u8) -> [S::Bytes; QUADS];

    /// The scales and the minimum of block `at` of the unit that starts at `head`.
    ///
    /// # Safety
    /// As for [`Format::stored`].
    unsafe fn scales<S: Simd>(head: *const u8, at: usize) -> ([S::Floats; 2], [S::Floats; 2]);

    /// Block `at` of the unit at `unit`.
    ///
    /// # Safety
    /// As for [`Format::stored`].
    #[inline(always)]
    unsafe fn decode<S: Simd>(unit: *const u8, at: usize) -> Decoded<S> {
        // SAFETY: the caller's word.
        unsafe {
            let mut w = Self::stored::<S>(unit.add(Self::HEAD + at * Self::PLANES));
            for v in &mut w {
                *v = S::ready::<Self>(*v);
            }
            let (scale, min) = Self::scales::<S>(unit, at);
            Decoded { w, scales: Scales { scale, min } }
        }
    }

    /// Bytes of a tile of `blocks` blocks, whole cache lines.
    #[inline(always)]
    fn tile_bytes(blocks: usize) -> usize {
        let rest = blocks % Self::UNIT;
        let whole = blocks / Self::UNIT * (Self::HEAD + Self::UNIT * Self::PLANES);
        let last = if rest == 0 { 0 } else { Self::HEAD + rest * Self::PLANES };
        (whole + last).next_multiple_of(64)
    }
}

macro_rules! formats {
    ($($(#[$doc:meta])* $name:ident: signed $signed:literal, bias $bias:literal, max $max:literal;)*) => { $(
        $(#[$doc])*
        #[derive(Debug)]
        pub(super) enum $name {}
        impl Range for $name {
            const SIGNED: bool = $signed;
            const BIAS: i32 = $bias;
            const MAX: i32 = $max;
        }
    )* };
}

formats! {
    /// 8 bits and a scale.
    Q8_0: signed true, bias 0, max 127;
    /// 4 bits and a scale.
    Q4_0: signed false, bias 8, max 15;
    /// 4 bits, scale and minimum.
    Q4_1: signed false, bias 0, max 15;
    /// 5 bits and a scale.
    Q5_0: signed false, bias 16, max 31;
    /// 5 bits, scale and minimum.
    Q5_1: signed false, bias 0, max 31;
    /// E2M1 elements, one power of two.
    Mxfp4: signed false, bias 12, max 24;
    /// 4 bits into a table, and a scale.
    Iq4Nl: signed true, bias 0, max 127;
    /// 4 bits into a table, 6-bit scales of 32 weights.
    Iq4Xs: signed true, bias 0, max 127;
    /// 4 bits, 6-bit scales and minima.
    Q4K: signed false, bias 0, max 15;
    /// 5 bits, 6-bit scales and minima.
    Q5K: signed false, bias 0, max 31;
    /// 2 bits, 4-bit scales and minima of 16 weights.
    Q2K: signed false, bias 0, max 3;
    /// 3 bits, 6-bit scales of 16 weights.
    Q3K: signed false, bias 4, max 7;
    /// 6 bits, 8-bit scales of 16 weights.
    Q6K: signed false, bias 32, max 63;
}

/// Twice the values of E2M1, and 12 more, so that none is negative.
pub(super) const E2M1_LIFTED: [i8; 16] =
    [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// The non-linear table of IQ4_NL and IQ4_XS.
pub(super) const IQ4: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// # Safety
/// 256 bytes at `at`, and the tier is available.
#[inline(always)]
unsafe fn nibbles<S: Simd>(at: *const u8) -> [S::Bytes; QUADS] {
    // SAFETY: the caller's word.
    unsafe {
        let mut w = [S::bytes(at); QUADS];
        for j in 0..4 {
            let v = S::bytes(at.add(j * 64));
            w[j] = S::field(v, 0, 0, 0x0F);
            w[j + 4] = S::field(v, 4, 0, 0x0F);
        }
        w
    }
}

/// # Safety
/// 320 bytes at `at`, and the tier is available.
#[inline(always)]
unsafe fn fives<S: Simd>(at: *const u8) -> [S::Bytes; QUADS] {
    // SAFETY: the caller's word.
    unsafe {
        let mut w = nibbles::<S>(at);
        let high = S::bytes(at.add(256));
        for (j, w) in w.iter_mut().enumerate() {
            *w = S::or(*w, S::field(high, j as u32, 4, 0x10));
        }
        w
    }
}

/// # Safety
/// 384 bytes at `at`, and the tier is available.
#[inline(always)]
unsafe fn sixes<S: Simd>(at: *const u8) -> [S::Bytes; QUADS] {
    // SAFETY: the caller's word.
    unsafe {
        let mut w = nibbles::<S>(at);
        for half in 0..2 {
            let high = S::bytes(at.add(256 + half * 64));
            for t in 0..4 {
                let j = half * 4 + t;
                w[j] = S::or(w[j], S::field(high, 2 * t as u32, 4, 0x30));
            }
        }
        w
    }
}

/// # Safety
/// 128 bytes at `at`, and the tier is available.
#[inline(always)]
unsafe fn twos<S: Simd>(at: *const u8) -> [S::Bytes; QUADS] {
    // SAFETY: the caller's word.
    unsafe {
        let mut w = [S::bytes(at); QUADS];
        for (j, w) in w.iter_mut().enumerate() {
            *w = S::field(S::bytes(at.add(j / 4 * 64)), 2 * (j % 4) as u32, 0, 0x03);
        }
        w
    }
}

/// # Safety
/// 192 bytes at `at`, and the tier is available.
#[inline(always)]
unsafe fn threes<S: Simd>(at: *const u8) -> [S::Bytes; QUADS] {
    // SAFETY: the caller's word.
    unsafe {
        let mut w = twos::<S>(at);
        let high = S::bytes(at.add(128));
        for (j, w) in w.iter_mut().enumerate() {
            *w = S::or(*w, S::field(high, j as u32, 2, 0x04));
        }
        w
    }
}

/// The scales of the two halves of block `at`, small unsigned integers, from 64 bytes that hold
/// those of four halves.
///
/// # Safety
/// The tier is available.
#[inline(always)]
unsafe fn of_halves<S: Simd>(four: S::Bytes, at: usize) -> [S::Floats; 2] {
    let mut bytes = [0u8; 64];
    // SAFETY: the caller's word; the buffer has 64 bytes.
    unsafe {
        S::store_bytes(four, bytes.as_mut_ptr());
        let first = bytes.as_ptr().add(at % 2 * 32);
        [S::from_u8(first), S::from_u8(first.add(16))]
    }
}

/// # Safety
/// 256 bytes at `at`, and the tier is available.
#[inline(always)]
unsafe fn looked_up<S: Simd>(at: *const u8, table: &[i8; 16]) -> [S::Bytes; QUADS] {
    // SAFETY: the caller's word.
    unsafe {
        let mut w = nibbles::<S>(at);
        for w in &mut w {
            *w = S::lookup(table, *w);
        }
        w
    }
}

/// f16 scales of a unit of two blocks, and minima after them where `minima`.
///
/// # Safety
/// As for [`Format::scales`].
#[inline(always)]
unsafe fn halves<S: Simd>(
    head: *const u8,
    at: usize,
    minima: bool,
) -> ([S::Floats; 2], [S::Floats; 2]) {
    // SAFETY: the caller's word.
    unsafe {
        let d = S::from_f16(head.add(at * 32));
        let m = if minima { S::from_f16(head.add(64 + at * 32)) } else { S::zero() };
        ([d, d], [m, m])
    }
}

/// Scales and minima of 6 bits under a pair of f16.
///
/// # Safety
/// As for [`Format::scales`].
#[inline(always)]
unsafe fn k_scales<S: Simd>(head: *const u8, at: usize) -> ([S::Floats; 2], [S::Floats; 2]) {
    // SAFETY: the caller's word.
    unsafe {
        let d = S::mul(S::from_f16(head), S::from_u8(head.add(64 + at * 16)));
        let m = S::mul(S::from_f16(head.add(32)), S::from_u8(head.add(192 + at * 16)));
        ([d, d], [S::negate(m); 2])
    }
}

macro_rules! impl_format {
    ($name:ident { $($consts:tt)* } |$planes:ident, $head:ident, $at:ident, $s:ident| $stored:expr, $scales:expr) => {
        impl Format for $name {
            $($consts)*
            #[inline(always)]
            unsafe fn stored<$s: Simd>($planes: *const u8) -> [$s::Bytes; QUADS] {
                // SAFETY: the caller's word.
                unsafe { $stored }
            }
            #[inline(always)]
            unsafe fn scales<$s: Simd>($head: *const u8, $at: usize) -> ([$s::Floats; 2], [$s::Floats; 2]) {
                // SAFETY: the caller's word.
                unsafe { $scales }
            }
        }
    };
}

impl_format!(Q8_0 { const UNIT: usize = 2; const HEAD: usize = 64; const PLANES: usize = 512; }
|planes, head, at, S| {
    let mut w = [S::bytes(planes); QUADS];
    for (j, w) in w.iter_mut().enumerate() {
        *w = S::bytes(planes.add(j * 64));
    }
    w
}, halves::<S>(head, at, false));

impl_format!(Q4_0 { const UNIT: usize = 2; const HEAD: usize = 64; const PLANES: usize = 256; }
|planes, head, at, S| nibbles::<S>(planes), halves::<S>(head, at, false));

impl_format!(Q4_1 {
    const UNIT: usize = 2; const HEAD: usize = 128; const PLANES: usize = 256;
    const MINIMA: bool = true;
} |planes, head, at, S| nibbles::<S>(planes), halves::<S>(head, at, true));

impl_format!(Q5_0 { const UNIT: usize = 2; const HEAD: usize = 64; const PLANES: usize = 320; }
|planes, head, at, S| fives::<S>(planes), halves::<S>(head, at, false));

impl_format!(Q5_1 {
    const UNIT: usize = 2; const HEAD: usize = 128; const PLANES: usize = 320;
    const MINIMA: bool = true;
} |planes, head, at, S| fives::<S>(planes), halves::<S>(head, at, true));

impl_format!(Mxfp4 { const UNIT: usize = 4; const HEAD: usize = 64; const PLANES: usize = 256; }
|planes, head, at, S| looked_up::<S>(planes, &E2M1_LIFTED), {
    let d = S::from_exponents(head.add(at * 16));
    ([d, d], [S::zero(); 2])
});

impl_format!(Iq4Nl { const UNIT: usize = 2; const HEAD: usize = 64; const PLANES: usize = 256; }
|planes, head, at, S| looked_up::<S>(planes, &IQ4), halves::<S>(head, at, false));

impl_format!(Iq4Xs { const UNIT: usize = 8; const HEAD: usize = 192; const PLANES: usize = 256; }
|planes, head, at, S| looked_up::<S>(planes, &IQ4), {
    let d = S::mul(S::from_f16(head), S::from_i8(head.add(64 + at * 16)));
    ([d, d], [S::zero(); 2])
});

impl_format!(Q4K {
    const UNIT: usize = 8; const HEAD: usize = 320; const PLANES: usize = 256;
    const MINIMA: bool = true;
} |planes, head, at, S| nibbles::<S>(planes), k_scales::<S>(head, at));

impl_format!(Q5K {
    const UNIT: usize = 8; const HEAD: usize = 320; const PLANES: usize = 320;
    const MINIMA: bool = true;
} |planes, head, at, S| fives::<S>(planes), k_scales::<S>(head, at));

impl_format!(Q6K {
    const UNIT: usize = 8; const HEAD: usize = 320; const PLANES: usize = 384;
    const HALVES: bool = true;
} |planes, head, at, S| sixes::<S>(planes), {
    let d = S::from_f16(head);
    let first = S::mul(d, S::from_i8(head.add(64 + at * 32)));
    let second = S::mul(d, S::from_i8(head.add(64 + at * 32 + 16)));
    ([first, second], [S::zero(); 2])
});

impl_format!(Q2K {
    const UNIT: usize = 8; const HEAD: usize = 320; const PLANES: usize = 128;
    const MINIMA: bool = true; const HALVES: bool = true;
} |planes, head, at, S| twos::<S>(planes), {
    let four = S::bytes(head.add(64 + at / 2 * 64));
    let scale = of_halves::<S>(S::field(four, 0, 0, 0x0F), at);
    let min = of_halves::<S>(S::field(four, 4, 0, 0x0F), at);
    let (d, m) = (S::from_f16(head), S::from_f16(head.add(32)));
    (
        [S::mul(d, scale[0]), S::mul(d, scale[1])],
        [S::negate(S::mul(m, min[0])), S::negate(S::mul(m, min[1]))],
    )
});

impl_format!(Q3K {
    const UNIT: usize = 8; const HEAD: usize = 256; const PLANES: usize = 192;
    const HALVES: bool = true;
} |planes, head, at, S| threes::<S>(planes), {
    let (pair, d) = (at / 2, S::from_f16(head));
    let low = S::field(S::bytes(head.add(128 + pair / 2 * 64)), 4 * (pair % 2) as u32, 0, 0x0F);
    let high = S::field(S::bytes(head.add(64)), 2 * pair as u32, 4, 0x30);
    let scale = of_halves::<S>(S::or(low, high), at);
    let off = S::splat(-32.0);
    ([S::mul(d, S::add(scale[0], off)), S::mul(d, S::add(scale[1], off))], [S::zero(); 2])
});

/// A plain float format in tile form: column after column, the sixteen rows side by side.
pub(super) trait Float: 'static {
    /// Bytes of one element.
    const BYTES: usize;

    /// Bytes of a tile of `cols` columns, whole cache lines.
    #[inline(always)]
    fn tile_bytes(cols: usize) -> usize {
        (cols * TILE * Self::BYTES).next_multiple_of(64)
    }

    /// Loads sixteen of them.
    ///
    /// # Safety
    /// `16 · BYTES` bytes at `at`, and the tier is available.
    unsafe fn load<S: Simd>(at: *const u8) -> S::Floats;
}

macro_rules! floats {
    ($($name:ident, $bytes:literal, $load:ident;)*) => { $(
        #[doc = concat!("`", stringify!($name), "` elements.")]
        #[derive(Debug)]
        pub(super) enum $name {}
        impl Float for $name {
            const BYTES: usize = $bytes;
            #[inline(always)]
            unsafe fn load<S: Simd>(at: *const u8) -> S::Floats {
                // SAFETY: the caller's word.
                unsafe { S::$load(at) }
            }
        }
    )* };
}

floats! {
    F32, 4, from_f32;
    F16, 2, from_f16;
    Bf16, 2, from_bf16;
}
