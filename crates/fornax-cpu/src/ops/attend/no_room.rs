//! The same where no tier has tiles: nothing is set aside.

use fornax_plan::Result;

/// Memory of one thread for attention with tiles.
pub(crate) struct TileScratch;

impl TileScratch {
    pub(crate) fn new(_: usize, _: usize) -> Result<TileScratch> {
        Ok(TileScratch)
    }
}
