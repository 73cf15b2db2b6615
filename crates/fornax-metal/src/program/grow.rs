//! More KV blocks for a program at work: every pool gets a further piece, and what is in the others stays where it is.
//! It knows no kernel.

use fornax_plan::{Error, Result};

use super::MetalProgram;
use crate::api::{Buffer, Pipeline};
use crate::encode::Place;
use crate::feed::Feed;
use crate::hazard::Access;
use crate::pieces::Pieces;
use crate::prepare::{Pool, pool_words};
use crate::report;

/// What a further piece needs, before anything of the program is changed.
struct Further {
    pieces: Pieces,
    /// By group, then by layer: keys and values.
    buffers: Vec<Vec<[Buffer; 2]>>,
    /// By command, where it has to do with a pool.
    pipelines: Vec<Option<Pipeline>>,
}

impl MetalProgram {
    /// Adds blocks to every pool; what is there stays where it is. Where there is room left by an earlier growth, no
    /// memory is taken; else at least half as much as there is, because there are few pieces, or as much as is asked
    /// for where that is all that can be had.
    ///
    /// # Errors
    /// `is_unsupported` for more pieces or blocks than there may be, `is_out_of_memory`; nothing has changed then.
    pub(super) fn grow(&mut self, blocks: u32) -> Result<()> {
        let old = self.limits.kv_blocks;
        let now = old.checked_add(blocks).ok_or_else(|| {
            Error::unsupported(format!("metal: {blocks} KV blocks besides {old} are too many"))
        })?;
        // Steps under way see tables of the old length.
        self.drain()?;
        let room = self.shape.pieces.room();
        if let Some(short) = now.checked_sub(room).filter(|short| *short > 0) {
            let further = match self.further(short.max(room / 2)) {
                Err(e) if e.is_out_of_memory() && short < room / 2 => self.further(short)?,
                other => other?,
            };
            self.join(further);
        }
        self.lengthen(now)
    }

    /// Makes a piece of so many blocks for every pool.
    fn further(&self, blocks: u32) -> Result<Further> {
        let mut pieces = self.shape.pieces.clone();
        pieces.push(blocks)?;
        let mut made = Vec::new();
        let mut further = |label, width| {
            let words = pool_words(self.prepared.kv_type, blocks, width);
            let buffer = self.device.buffer(label, words)?;
            made.push(buffer);
            Ok(buffer)
        };
        let groups = self.plan.kv.iter().map(|g| {
            let pair = |_: &u32| {
                let keys = further(report::KEYS, g.heads * g.k_width)?;
                Ok([keys, further(report::VALUES, g.heads * g.v_width)?])
            };
            g.layers.iter().map(pair).collect()
        });
        let buffers = groups.collect::<Result<Vec<Vec<_>>>>();
        let ready = buffers.and_then(|buffers| {
            let pipelines = self.prepared.commands.iter().map(|c| {
                let built = c
                    .pools
                    .map(|_| self.device.in_pieces(&c.pipeline, pieces.count(), c.span.threads));
                built.transpose()
            });
            Ok(Further { pipelines: pipelines.collect::<Result<_>>()?, buffers, pieces })
        });
        if ready.is_err() {
            made.into_iter().for_each(|buffer| self.device.release(buffer));
        }
        ready
    }

    fn join(&mut self, further: Further) {
        let piece = self.shape.pieces.count();
        self.shape.pieces = further.pieces;
        for (pools, more) in self.prepared.pools.iter_mut().zip(&further.buffers) {
            for (pair, more) in pools.iter_mut().zip(more) {
                pair.iter_mut().zip(more).for_each(|(Pool { pieces }, more)| pieces.push(*more));
            }
        }
        for (command, pipeline) in self.prepared.commands.iter_mut().zip(further.pipelines) {
            let (Some(at), Some(pipeline)) = (command.pools, pipeline) else { continue };
            command.pipeline = pipeline;
            let more = further.buffers[at.group as usize][at.layer as usize];
            for (slot, more) in [at.keys, at.values].into_iter().zip(more) {
                let access = command.args[slot].as_ref().map_or(Access::Read, |(_, a)| *a);
                command.args[slot + piece] = Some((Place::Fixed(more.all()), access));
            }
        }
    }

    /// Makes the block tables of every step long enough for so many blocks.
    fn lengthen(&mut self, blocks: u32) -> Result<()> {
        let mut shape = self.shape.clone();
        shape.stride = blocks as usize;
        let mut uploads = Vec::new();
        for _ in &self.frames {
            match self.device.buffer("step", shape.len()) {
                Ok(buffer) => uploads.push(buffer),
                Err(e) => {
                    uploads.into_iter().for_each(|buffer| self.device.release(buffer));
                    return Err(e);
                }
            }
        }
        self.shape = shape;
        self.limits.kv_blocks = blocks;
        for (frame, upload) in self.frames.iter_mut().zip(uploads) {
            self.device.release(std::mem::replace(&mut frame.upload, upload));
        }
        for ix in &self.free {
            self.frames[*ix].feed = Feed::new(&self.shape, &self.limits);
        }
        // What is done and not yet collected keeps what its results are told by.
        for flight in &self.flights {
            self.frames[flight.frame].feed.words.resize(self.shape.len(), 0);
        }
        Ok(())
    }
}
