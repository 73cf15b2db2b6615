//! The KV pools' pieces: a pool grows by a further buffer, so that what is in it stays where it is. Which piece a
//! block is in, and how a table's entry says so. It knows no buffer.

use fornax_plan::{Error, Result};

/// Pieces that the kernels tell apart.
pub(crate) const PIECES_MAX: usize = 4;
/// Bits of an entry that say the block within its piece; those above say the piece. As in pool.metal.
const BLOCK_BITS: u32 = 28;

/// The blocks of every pool of a program, piece after piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pieces {
    /// Behind the last block of each.
    ends: Vec<u32>,
}

impl Pieces {
    /// One piece of so many blocks.
    ///
    /// # Errors
    /// As [`Pieces::push`].
    pub(crate) fn new(blocks: u32) -> Result<Pieces> {
        let mut pieces = Pieces { ends: Vec::new() };
        pieces.push(blocks)?;
        Ok(pieces)
    }

    pub(crate) fn count(&self) -> usize {
        self.ends.len()
    }

    /// Blocks that there is room for.
    pub(crate) fn room(&self) -> u32 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Blocks of each.
    #[cfg(test)]
    pub(crate) fn lens(&self) -> impl Iterator<Item = u32> {
        let starts = [0].into_iter().chain(self.ends.iter().copied());
        self.ends.iter().zip(starts).map(|(end, start)| end - start)
    }

    /// Adds a piece of so many blocks.
    ///
    /// # Errors
    /// `is_unsupported` for more pieces than there may be, or more blocks than can be told.
    pub(crate) fn push(&mut self, blocks: u32) -> Result<()> {
        if self.count() == PIECES_MAX {
            return Err(Error::unsupported(format!(
                "metal: the KV pools are in {PIECES_MAX} pieces and cannot have another; ask for a larger --ctx at the \
                 start"
            )));
        }
        let end = self.room().checked_add(blocks).filter(|_| blocks < 1 << BLOCK_BITS);
        let have = self.room();
        self.ends.push(end.ok_or_else(|| {
            Error::unsupported(format!("metal: {blocks} KV blocks besides {have} are too many"))
        })?);
        Ok(())
    }

    /// A block's piece, and its place there.
    pub(crate) fn place(&self, block: u32) -> (usize, u32) {
        let piece = self.ends.iter().take_while(|end| block >= **end).count();
        (piece, block - piece.checked_sub(1).map_or(0, |before| self.ends[before]))
    }

    /// What a block table says of a block.
    pub(crate) fn entry(&self, block: u32) -> u32 {
        let (piece, within) = self.place(block);
        (piece as u32) << BLOCK_BITS | within
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_found_in_its_piece() {
        let mut pieces = Pieces::new(10).unwrap();
        pieces.push(3).unwrap();
        pieces.push(7).unwrap();
        assert_eq!((pieces.count(), pieces.room()), (3, 20));
        assert!(pieces.lens().eq([10, 3, 7]));
        let places: Vec<_> = [0, 9, 10, 12, 13, 19].map(|b| pieces.place(b)).into();
        assert_eq!(places, [(0, 0), (0, 9), (1, 0), (1, 2), (2, 0), (2, 6)]);
        assert_eq!([9, 11, 19].map(|b| pieces.entry(b)), [9, 0x1000_0001, 0x2000_0006]);
    }

    #[test]
    fn too_many_pieces_or_blocks_are_refused_by_name() {
        let mut pieces = Pieces::new(1).unwrap();
        let e = pieces.push(1 << BLOCK_BITS).unwrap_err();
        assert!(e.is_unsupported() && e.to_string().contains("besides 1 are too many"), "{e}");
        (1..PIECES_MAX).for_each(|_| pieces.push(5).unwrap());
        let e = pieces.push(1).unwrap_err();
        assert!(e.is_unsupported() && e.to_string().contains("--ctx"), "{e}");
        assert!(Pieces::new(u32::MAX).unwrap_err().is_unsupported());
    }
}
