//! From the rows of a file to tiles: the same bits in the order of [`super::format`]. It must not
//! know instruction sets.

use super::simd::TILE;

/// What packing one block of one row needs to know about its place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// First byte of the unit's head.
    pub(super) unit: *mut u8,
    /// Bytes of the head.
    pub(super) head: usize,
    /// Bytes of the planes of one block.
    pub(super) planes: usize,
    /// Row within the tile.
    pub(super) row: usize,
}

impl Place {
    /// Writes four bytes of the row at `offset` of the planes of block `at`.
    #[inline]
    unsafe fn quad(&self, at: usize, vector: usize, bytes: [u8; 4]) {
        let to = self.head + at * self.planes + vector * 64 + self.row * 4;
        // SAFETY: within the unit by the caller's word; arrays of bytes have no alignment.
        unsafe { *self.unit.add(to).cast::<[u8; 4]>() = bytes };
    }

    /// Writes an element of `N` bytes of the row into the head's array at `offset`.
    #[inline]
    unsafe fn head<const N: usize>(&self, offset: usize, bytes: [u8; N]) {
        // SAFETY: within the unit by the caller's word.
        unsafe { *self.unit.add(offset + self.row * N).cast::<[u8; N]>() = bytes };
    }

    /// Writes the nibbles of a block whose sixteen bytes hold weights `i` and `i + 16`.
    #[inline]
    unsafe fn nibbles(&self, at: usize, bytes: &[u8; 16]) {
        for (vector, &quad) in bytes.as_chunks::<4>().0.iter().enumerate() {
            // SAFETY: the caller's word.
            unsafe { self.quad(at, vector, quad) };
        }
    }

    /// Writes two bits of each weight, those from `shift` on of its byte in `from`, as vectors
    /// `vector` and `vector + 1` of the planes.
    #[inline]
    unsafe fn pairs(&self, at: usize, vector: usize, from: &[u8], shift: usize) {
        for (half, bytes) in from.as_chunks::<16>().0.iter().enumerate() {
            let mut quad = 0u32;
            for (t, &four) in bytes.as_chunks::<4>().0.iter().enumerate() {
                quad |= (u32::from_le_bytes(four) >> shift & 0x0303_0303) << (2 * t);
            }
            // SAFETY: the caller's word.
            unsafe { self.quad(at, vector + half, quad.to_le_bytes()) };
        }
    }

    /// Writes bit `shift` of each weight's byte in `from` as vector `vector` of the planes.
    #[inline]
    unsafe fn singles(&self, at: usize, vector: usize, from: &[u8], shift: usize) {
        let mut quad = 0u32;
        for (t, &four) in from.as_chunks::<4>().0.iter().enumerate() {
            quad |= (u32::from_le_bytes(four) >> shift & 0x0101_0101) << t;
        }
        // SAFETY: the caller's word.
        unsafe { self.quad(at, vector, quad.to_le_bytes()) };
    }

    /// Writes the fifth bits, bit `i` for weight `i`, as vector 4 of the planes.
    #[inline]
    unsafe fn fifths(&self, at: usize, bits: u32) {
        let mut quad = [0u8; 4];
        for (k, byte) in quad.iter_mut().enumerate() {
            // Every fourth bit, brought together.
            let mut every = bits >> k & 0x1111_1111;
            every = (every | every >> 3) & 0x0303_0303;
            every = (every | every >> 6) & 0x000F_000F;
            *byte = (every | every >> 12) as u8;
        }
        // SAFETY: the caller's word.
        unsafe { self.quad(at, 4, quad) };
    }
}

/// Bytes of a block as an array.
#[inline]
fn part<const N: usize>(block: &[u8], at: usize) -> [u8; N] {
    block[at..at + N].try_into().expect("invariant: the slice has the array's length")
}

/// Packs the blocks of a unit: `bytes` are the row's, in file order, for these blocks.
pub(super) type PackUnit = unsafe fn(&Place, &[u8]);

/// # Safety
/// For every function below: the place is a unit of the format, with as many blocks as `bytes` has.
pub(super) unsafe fn q8_0(to: &Place, bytes: &[u8]) {
    for (at, block) in bytes.as_chunks::<34>().0.iter().enumerate() {
        // SAFETY: the caller's word.
        unsafe {
            to.head(at * TILE * 2, part::<2>(block, 0));
            for (vector, &quad) in block[2..].as_chunks::<4>().0.iter().enumerate() {
                to.quad(at, vector, quad);
            }
        }
    }
}

/// Q4_0 and IQ4_NL.
pub(super) unsafe fn q4_0(to: &Place, bytes: &[u8]) {
    for (at, block) in bytes.as_chunks::<18>().0.iter().enumerate() {
        // SAFETY: the caller's word.
        unsafe {
            to.head(at * TILE * 2, part::<2>(block, 0));
            to.nibbles(at, &part(block, 2));
        }
    }
}

pub(super) unsafe fn q4_1(to: &Place, bytes: &[u8]) {
    for (at, block) in bytes.as_chunks::<20>().0.iter().enumerate() {
        // SAFETY: the caller's word.
        unsafe {
            to.head(at * TILE * 2, part::<2>(block, 0));
            to.head(64 + at * TILE * 2, part::<2>(block, 2));
            to.nibbles(at, &part(block, 4));
        }
    }
}

pub(super) unsafe fn q5_0(to: &Place, bytes: &[u8]) {
    for (at, block) in bytes.as_chunks::<22>().0.iter().enumerate() {
        // SAFETY: the caller's word.
        unsafe {
            to.head(at * TILE * 2, part::<2>(block, 0));
            to.fifths(at, u32::from_le_bytes(part(block, 2)));
            to.nibbles(at, &part(block, 6));
        }
    }
}

pub(super) unsafe fn q5_1(to: &Place, bytes: &[u8]) {
    for (at, block) in bytes.as_chunks::<24>().0.iter().enumerate() {
        // SAFETY: the caller's word.
        unsafe {
            to.head(at * TILE * 2, part::<2>(block, 0));
            to.head(64 + at * TILE * 2, part::<2>(block, 2));
            to.fifths(at, u32::from_le_bytes(part(block, 4)));
            to.nibbles(at, &part(block, 8));
        }
    }
}

pub(super) unsafe fn mxfp4(to: &Place, bytes: &[u8]) {
    for (at, block) in bytes.as_chunks::<17>().0.iter().enumerate() {
        // SAFETY: the caller's word.
        unsafe {
            to.head(at * TILE, part::<1>(block, 0));
            to.nibbles(at, &part(block, 1));
        }
    }
}

pub(super) unsafe fn iq4_xs(to: &Place, bytes: &[u8]) {
    // SAFETY: the caller's word.
    unsafe {
        to.head(0, part::<2>(bytes, 0));
        let high = u16::from_le_bytes(part(bytes, 2));
        for at in 0..8 {
            let low = bytes[4 + at / 2] >> (at % 2 * 4) & 15;
            let scale = low | ((high >> (2 * at) & 3) as u8) << 4;
            to.head(64 + at * TILE, [scale.wrapping_sub(32)]);
            to.nibbles(at, &part(bytes, 8 + 16 * at));
        }
    }
}

/// The sixteen bytes of sub-block `at` of the nibbles of Q4_K and Q5_K, weights `i` and `i + 16`
/// in one byte; the file keeps sub-blocks 2c and 2c + 1 in the two halves of 32 bytes.
#[inline]
fn k_nibbles(qs: &[u8], at: usize) -> [u8; 16] {
    let qs = &qs[at / 2 * 32..][..32];
    let shift = at % 2 * 4;
    let mut out = [0; 16];
    for (i, out) in out.iter_mut().enumerate() {
        *out = (qs[i] >> shift & 15) | (qs[i + 16] >> shift & 15) << 4;
    }
    out
}

/// The 6-bit scale and minimum of sub-block `at`, from twelve packed bytes.
#[inline]
fn k_scale(packed: &[u8], at: usize) -> (u8, u8) {
    if at < 4 {
        (packed[at] & 63, packed[at + 4] & 63)
    } else {
        let low = packed[at + 4];
        (low & 15 | packed[at - 4] >> 6 << 4, low >> 4 | packed[at] >> 6 << 4)
    }
}

#[inline]
unsafe fn k_head(to: &Place, block: &[u8]) {
    // SAFETY: the caller's word.
    unsafe {
        to.head(0, part::<2>(block, 0));
        to.head(TILE * 2, part::<2>(block, 2));
        for at in 0..8 {
            let (scale, min) = k_scale(&block[4..16], at);
            to.head(64 + at * TILE, [scale]);
            to.head(192 + at * TILE, [min]);
        }
    }
}

pub(super) unsafe fn q4_k(to: &Place, bytes: &[u8]) {
    // SAFETY: the caller's word.
    unsafe {
        k_head(to, bytes);
        for at in 0..8 {
            to.nibbles(at, &k_nibbles(&bytes[16..144], at));
        }
    }
}

pub(super) unsafe fn q5_k(to: &Place, bytes: &[u8]) {
    // SAFETY: the caller's word.
    unsafe {
        k_head(to, bytes);
        for at in 0..8 {
            to.nibbles(at, &k_nibbles(&bytes[48..176], at));
            to.singles(at, 4, &bytes[16..48], at);
        }
    }
}

pub(super) unsafe fn q6_k(to: &Place, bytes: &[u8]) {
    // SAFETY: the caller's word.
    unsafe {
        to.head(0, part::<2>(bytes, 208));
        for half in 0..16 {
            to.head(64 + half * TILE, [bytes[192 + half]]);
        }
        for at in 0..8 {
            let (n, t) = (at / 4, at % 4);
            let low = &bytes[n * 64 + t % 2 * 32..][..32];
            let high = &bytes[128 + n * 32..][..32];
            let shift = t / 2 * 4;
            let mut packed = [0u8; 16];
            for (i, packed) in packed.iter_mut().enumerate() {
                *packed = (low[i] >> shift & 15) | (low[i + 16] >> shift & 15) << 4;
            }
            to.nibbles(at, &packed);
            to.pairs(at, 4, high, 2 * t);
        }
    }
}

/// The 32 bytes that hold the two bits of block `at` of Q2_K and Q3_K, and where in them.
#[inline]
fn k_twos(qs: &[u8], at: usize) -> (&[u8], usize) {
    (&qs[at / 4 * 32..][..32], at % 4 * 2)
}

pub(super) unsafe fn q2_k(to: &Place, bytes: &[u8]) {
    // SAFETY: the caller's word.
    unsafe {
        to.head(0, part::<2>(bytes, 80));
        to.head(TILE * 2, part::<2>(bytes, 82));
        for (half, &scale) in bytes[..16].iter().enumerate() {
            to.head(64 + half * TILE, [scale]);
        }
        for at in 0..8 {
            let (twos, shift) = k_twos(&bytes[16..80], at);
            to.pairs(at, 0, twos, shift);
        }
    }
}

pub(super) unsafe fn q3_k(to: &Place, bytes: &[u8]) {
    // SAFETY: the caller's word.
    unsafe {
        to.head(0, part::<2>(bytes, 108));
        // In the file too: 16 scales of 4 + 2 bits. Here the high bits of scales 4t + i are bits
        // 2t of byte i, the low ones of scales 8n + i and 8n + 4 + i the halves of byte i of n.
        let packed = &bytes[96..108];
        let low = |scale: usize| packed[scale % 8] >> (scale / 8 * 4) & 15;
        for i in 0..4 {
            to.head(64 + i * TILE, [packed[8 + i]]);
            for n in 0..2 {
                let both = low(8 * n + i) | low(8 * n + 4 + i) << 4;
                to.head(128 + n * 64 + i * TILE, [both]);
            }
        }
        for at in 0..8 {
            let (twos, shift) = k_twos(&bytes[32..96], at);
            to.pairs(at, 0, twos, shift);
            to.singles(at, 2, &bytes[..32], at);
        }
    }
}

/// Packs columns of plain elements of `N` bytes of a row: column after column, the rows side by
/// side.
///
/// # Safety
/// `columns` has room for these columns of sixteen rows.
pub(super) unsafe fn plain<const N: usize>(columns: *mut u8, row: usize, bytes: &[u8]) {
    for (col, &element) in bytes.as_chunks::<N>().0.iter().enumerate() {
        // SAFETY: the caller's word.
        unsafe { *columns.add((col * TILE + row) * N).cast::<[u8; N]>() = element };
    }
}
