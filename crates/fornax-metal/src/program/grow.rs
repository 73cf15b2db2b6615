//! More KV blocks for a program at work: pools and block tables become longer where they are, and commands learn of it. It
//! knows no kernel.

use fornax_plan::{Error, Result};

use super::MetalProgram;
use crate::api::Buffer;
use crate::encode::Place;
use crate::feed::Feed;

impl MetalProgram {
    /// Adds blocks to every pool; what is there stays where it is.
    ///
    /// # Errors
    /// `is_unsupported` where the form cannot, or more blocks than numbers; `is_out_of_memory`.
    pub(super) fn grow(&mut self, blocks: u32) -> Result<()> {
        let old = self.limits.kv_blocks;
        let now = old.checked_add(blocks).ok_or_else(|| {
            Error::unsupported(format!("metal: {blocks} KV blocks besides {old} are too many"))
        })?;
        // Steps under way see tables and pools of the old length.
        self.drain()?;
        let words = |b: &Buffer| b.len_bytes / old.max(1) as usize * now as usize / 4;
        let mut grown = Vec::new();
        for (keys, values) in self.prepared.pools.iter_mut().flatten() {
            for pool in [keys, values] {
                *pool = self.device.grow(*pool, words(pool))?;
                grown.push(*pool);
            }
        }
        self.shape.stride = now as usize;
        for frame in &mut self.frames {
            frame.upload = self.device.grow(frame.upload, self.shape.len())?;
        }
        self.limits.kv_blocks = now;
        for ix in &self.free {
            self.frames[*ix].feed = Feed::new(&self.shape, &self.limits);
        }
        // What is done and not yet collected keeps what its results are told by.
        for flight in &self.flights {
            self.frames[flight.frame].feed.words.resize(self.shape.len(), 0);
        }
        for command in &mut self.prepared.commands {
            for (place, _) in command.args.iter_mut().flatten() {
                if let Place::Fixed(slice) = place
                    && let Some(pool) = grown.iter().find(|b| b.id == slice.buffer.id)
                {
                    *slice = pool.all();
                }
            }
        }
        Ok(())
    }
}
