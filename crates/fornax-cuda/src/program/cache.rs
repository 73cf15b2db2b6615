//! The commands that read, write and copy keys, values and states, in their place behind the
//! steps. It knows no step and no kernel.

use std::ops::Range;

use fornax_gguf::blocks::{f16_to_f32, f32_to_f16};
use fornax_plan::{BlockId, Cmd, Error, KvType, Result};

use super::CudaProgram;
use crate::prepare::KV_BLOCK;

impl CudaProgram {
    /// Runs a command behind every step submitted before it.
    pub(super) fn cache_command(&mut self, command: Cmd<'_>) -> Result<()> {
        self.gpu.enter()?;
        match command {
            Cmd::CopyBlock { group, from, to } => {
                self.check_blocks(group, &[from, to], 0)?;
                let places = |block| self.kv_places(group, &[block], 0..KV_BLOCK);
                // A block's tokens lie one after the other: one copy a pool would do, and does
                // not matter yet.
                for ((from, width), (to, _)) in places(from).into_iter().zip(places(to)) {
                    self.gpu.copy_queued(from, to, width * self.element_bytes())?;
                }
            }
            Cmd::ReadKv { group, table, tokens, out } => {
                self.check_blocks(group, table, tokens.end)?;
                out.clear();
                for (at, width) in self.kv_places(group, table, tokens) {
                    self.read_kv(at, width, out)?;
                }
            }
            Cmd::WriteKv { group, table, tokens, data } => {
                self.check_blocks(group, table, tokens.end)?;
                let places = self.kv_places(group, table, tokens);
                let need: usize = places.iter().map(|(_, width)| width).sum();
                if data.len() != need {
                    let found = data.len();
                    let what = format!("write kv: {found} elements, expected {need}");
                    return Err(Error::malformed(what));
                }
                let mut data = data;
                for (at, width) in places {
                    self.write_kv(at, &data[..width])?;
                    data = &data[width..];
                }
            }
            // A plan with states is refused at prepare, so that there are none.
            Cmd::ReadState { out, .. } => out.clear(),
            Cmd::WriteState { data: [], .. } => {}
            Cmd::WriteState { data, .. } => {
                let found = data.len();
                return Err(Error::malformed(format!("write state: {found} elements, expected 0")));
            }
        }
        Ok(())
    }

    fn check_blocks(&self, group: u32, blocks: &[BlockId], tokens: u32) -> Result<()> {
        let groups = self.plan.kv.len();
        if group as usize >= groups {
            return Err(Error::malformed(format!("kv group {group}, expected less than {groups}")));
        }
        if let Some(b) = blocks.iter().find(|b| b.0 >= self.limits.kv_blocks) {
            let have = self.limits.kv_blocks;
            return Err(Error::malformed(format!("kv block {}, the pool has {have}", b.0)));
        }
        let (have, need) = (blocks.len(), tokens.div_ceil(KV_BLOCK) as usize);
        if have < need {
            return Err(Error::malformed(format!("kv table of {have} blocks, {need} are needed")));
        }
        Ok(())
    }

    /// Address and elements of every token of a range: layer by layer, keys before values.
    fn kv_places(&self, group: u32, table: &[BlockId], tokens: Range<u32>) -> Vec<(u64, usize)> {
        let g = &self.plan.kv[group as usize];
        let widths = [g.heads * g.k_width, g.heads * g.v_width].map(|w| w as usize);
        let bytes = self.element_bytes();
        let mut all = Vec::new();
        for pool in &self.prepared.pools[group as usize] {
            for pos in tokens.clone() {
                let block = table[(pos / KV_BLOCK) as usize].ix();
                let at = block * KV_BLOCK as usize + (pos % KV_BLOCK) as usize;
                for (memory, width) in [(&pool.keys, widths[0]), (&pool.values, widths[1])] {
                    all.push((memory.ptr + (at * width * bytes) as u64, width));
                }
            }
        }
        all
    }

    fn element_bytes(&self) -> usize {
        if self.limits.kv_type == KvType::F32 { 4 } else { 2 }
    }

    fn read_kv(&self, at: u64, elements: usize, out: &mut Vec<f32>) -> Result<()> {
        let mut bytes = vec![0; elements * self.element_bytes()];
        self.gpu.read(at, &mut bytes)?;
        if self.limits.kv_type == KvType::F32 {
            let word = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            out.extend(bytes.chunks_exact(4).map(word));
        } else {
            let half = |b: &[u8]| f16_to_f32(u16::from_le_bytes([b[0], b[1]]));
            out.extend(bytes.chunks_exact(2).map(half));
        }
        Ok(())
    }

    fn write_kv(&self, at: u64, data: &[f32]) -> Result<()> {
        let bytes: Vec<u8> = if self.limits.kv_type == KvType::F32 {
            data.iter().flat_map(|v| v.to_le_bytes()).collect()
        } else {
            data.iter().flat_map(|v| f32_to_f16(*v).to_le_bytes()).collect()
        };
        self.gpu.write(at, &bytes)
    }
}
