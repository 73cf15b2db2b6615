//! The commands that read, write and copy keys, values and states, in their place behind the
//! steps. It knows no step and no kernel.

use std::ops::Range;

use fornax_gguf::blocks::{f16_to_f32, f32_to_f16};
use fornax_plan::{BlockId, Cmd, Error, KvType, Result, SlotId};

use super::CudaProgram;
use crate::prepare::KV_BLOCK;

/// One token's keys or values of one layer.
struct Place {
    at: u64,
    /// Of 8-bit blocks.
    scales: Option<u64>,
    /// Elements.
    width: usize,
}

impl CudaProgram {
    /// Runs a command behind every step submitted before it.
    pub(super) fn cache_command(&mut self, command: Cmd<'_>) -> Result<()> {
        self.gpu.enter()?;
        match command {
            Cmd::CopyBlock { group, from, to } => {
                self.check_blocks(group, &[from, to], 0)?;
                let ranges =
                    |block: BlockId| self.block_ranges(group as usize, block.0..block.0 + 1);
                for ((from, bytes), (to, _)) in ranges(from).into_iter().zip(ranges(to)) {
                    self.gpu.copy_queued(from, to, bytes)?;
                }
            }
            Cmd::ReadKv { group, table, tokens, out } => {
                self.check_blocks(group, table, tokens.end)?;
                out.clear();
                for place in self.kv_places(group, table, tokens) {
                    self.read_kv(&place, out)?;
                }
            }
            Cmd::WriteKv { group, table, tokens, data } => {
                self.check_blocks(group, table, tokens.end)?;
                let places = self.kv_places(group, table, tokens);
                let need: usize = places.iter().map(|p| p.width).sum();
                if data.len() != need {
                    let found = data.len();
                    let what = format!("write kv: {found} elements, expected {need}");
                    return Err(Error::malformed(what));
                }
                let mut data = data;
                for place in places {
                    self.write_kv(&place, &data[..place.width])?;
                    data = &data[place.width..];
                }
            }
            Cmd::ReadState { slot, out } => {
                self.check_slot(slot)?;
                out.clear();
                for (at, len) in self.state_places(slot) {
                    let mut bytes = vec![0; 4 * len];
                    self.gpu.read(at, &mut bytes)?;
                    out.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
                }
            }
            Cmd::WriteState { slot, data } => {
                self.check_slot(slot)?;
                let places = self.state_places(slot);
                let need: usize = places.iter().map(|p| p.1).sum();
                if data.len() != need {
                    let found = data.len();
                    let what = format!("write state: {found} elements, expected {need}");
                    return Err(Error::malformed(what));
                }
                let mut data = data;
                for (at, len) in places {
                    let bytes: Vec<u8> = data[..len].iter().flat_map(|v| v.to_le_bytes()).collect();
                    self.gpu.write(at, &bytes)?;
                    data = &data[len..];
                }
            }
        }
        Ok(())
    }

    fn check_slot(&self, slot: SlotId) -> Result<()> {
        if slot.0 < self.limits.slots {
            return Ok(());
        }
        let have = self.limits.slots;
        Err(Error::malformed(format!("slot {}, the program has {have}", slot.0)))
    }

    /// A slot's states: where each begins, and its elements.
    fn state_places(&self, slot: SlotId) -> Vec<(u64, usize)> {
        let specs = self.plan.states.iter().zip(&self.prepared.states);
        specs.map(|(s, m)| (m.ptr + 4 * u64::from(slot.0 * s.len), s.len as usize)).collect()
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

    /// Every token of a range: layer by layer, keys before values.
    fn kv_places(&self, group: u32, table: &[BlockId], tokens: Range<u32>) -> Vec<Place> {
        let g = &self.plan.kv[group as usize];
        let widths = [g.heads * g.k_width, g.heads * g.v_width].map(|w| w as usize);
        let all = self.limits.kv_blocks as usize * KV_BLOCK as usize;
        let mut places = Vec::new();
        for pool in &self.prepared.pools[group as usize] {
            for pos in tokens.clone() {
                let block = table[(pos / KV_BLOCK) as usize].ix();
                let at = block * KV_BLOCK as usize + (pos % KV_BLOCK) as usize;
                for (memory, width) in [(&pool.keys, widths[0]), (&pool.values, widths[1])] {
                    let bytes = |n| self.kv_bytes(n) as u64;
                    let scales = memory.ptr + (all * width + at * width / 32 * 2) as u64;
                    places.push(match self.limits.kv_type {
                        KvType::Q8_0 => Place {
                            at: memory.ptr + (at * width) as u64,
                            scales: Some(scales),
                            width,
                        },
                        _ => Place { at: memory.ptr + bytes(at * width), scales: None, width },
                    });
                }
            }
        }
        places
    }

    /// Where the keys and values of a run of a group's blocks are, and how many bytes: they lie side by side.
    pub(super) fn block_ranges(&self, group: usize, blocks: Range<u32>) -> Vec<(u64, usize)> {
        let g = &self.plan.kv[group];
        let [first, tokens] =
            [blocks.start, blocks.len() as u32].map(|n| n as usize * KV_BLOCK as usize);
        let all = self.limits.kv_blocks as usize * KV_BLOCK as usize;
        let mut ranges = Vec::new();
        for pool in &self.prepared.pools[group] {
            for (memory, width) in [(&pool.keys, g.k_width), (&pool.values, g.v_width)] {
                let width = (g.heads * width) as usize;
                let at = memory.ptr + self.kv_bytes(first * width) as u64;
                ranges.push((at, self.kv_bytes(tokens * width)));
                if self.limits.kv_type == KvType::Q8_0 {
                    let scales = memory.ptr + (all * width + first * width / 32 * 2) as u64;
                    ranges.push((scales, tokens * width / 32 * 2));
                }
            }
        }
        ranges
    }

    /// Bytes of so many elements, their scales apart.
    fn kv_bytes(&self, elements: usize) -> usize {
        match self.limits.kv_type {
            KvType::F32 => 4 * elements,
            KvType::F16 => 2 * elements,
            KvType::Q8_0 => elements,
        }
    }

    fn read_kv(&self, place: &Place, out: &mut Vec<f32>) -> Result<()> {
        let mut bytes = vec![0; self.kv_bytes(place.width)];
        self.gpu.read(place.at, &mut bytes)?;
        let half = |b: &[u8]| f16_to_f32(u16::from_le_bytes([b[0], b[1]]));
        match (self.limits.kv_type, place.scales) {
            (KvType::F32, _) => {
                let word = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                out.extend(bytes.chunks_exact(4).map(word));
            }
            (KvType::Q8_0, Some(at)) => {
                let mut scales = vec![0; place.width / 32 * 2];
                self.gpu.read(at, &mut scales)?;
                for (q, d) in bytes.chunks_exact(32).zip(scales.chunks_exact(2)) {
                    out.extend(q.iter().map(|q| half(d) * f32::from(*q as i8)));
                }
            }
            _ => out.extend(bytes.chunks_exact(2).map(half)),
        }
        Ok(())
    }

    fn write_kv(&self, place: &Place, data: &[f32]) -> Result<()> {
        let mut scales: Vec<u8> = Vec::new();
        let bytes: Vec<u8> = match self.limits.kv_type {
            KvType::F32 => data.iter().flat_map(|v| v.to_le_bytes()).collect(),
            KvType::F16 => data.iter().flat_map(|v| f32_to_f16(*v).to_le_bytes()).collect(),
            KvType::Q8_0 => {
                let mut all = Vec::with_capacity(data.len());
                for block in data.chunks(32) {
                    let d = block.iter().fold(0.0f32, |m, v| m.max(v.abs())) / 127.0;
                    scales.extend(f32_to_f16(d).to_le_bytes());
                    let q = |v: &f32| if d > 0.0 { (v / d).round() as i8 as u8 } else { 0 };
                    all.extend(block.iter().map(q));
                }
                all
            }
        };
        if let Some(at) = place.scales {
            self.gpu.write(at, &scales)?;
        }
        self.gpu.write(place.at, &bytes)
    }
}

#[cfg(test)]
mod tests {
    use fornax_gguf::TensorType;
    use fornax_plan::{Device, Limits, Program, conformance};

    use super::*;
    use crate::CudaDevice;

    fn read(program: &mut dyn Program, block: u32) -> Vec<f32> {
        let (table, mut out) = ([BlockId(block)], Vec::new());
        let read = Cmd::ReadKv { group: 0, table: &table, tokens: 0..KV_BLOCK, out: &mut out };
        program.command(read).unwrap();
        out
    }

    #[test]
    fn a_copied_block_is_what_was_written_and_no_other_changes() {
        let (device, _) = CudaDevice::on_the_cpu();
        let plan = conformance::proof(TensorType::F32).plan;
        let each: u32 = plan.kv[0].layers.len() as u32
            * plan.kv[0].heads
            * (plan.kv[0].k_width + plan.kv[0].v_width);
        for kv_type in [KvType::F32, KvType::F16, KvType::Q8_0] {
            let limits = Limits { kv_blocks: 4, kv_type, ..Limits::default() };
            let mut program = device.prepare(&plan, &limits).unwrap();
            let data = |seed: u32| -> Vec<f32> {
                (0..KV_BLOCK * each).map(|i| ((i * 31 + seed) % 253) as f32 / 64.0 - 1.5).collect()
            };
            for (block, seed) in [(0, 0), (1, 1), (2, 77), (3, 3)] {
                let (table, data) = ([BlockId(block)], data(seed));
                let write =
                    Cmd::WriteKv { group: 0, table: &table, tokens: 0..KV_BLOCK, data: &data };
                program.command(write).unwrap();
            }
            let before = [0, 1, 2, 3].map(|block| read(&mut *program, block));
            let copy = Cmd::CopyBlock { group: 0, from: BlockId(2), to: BlockId(1) };
            program.command(copy).unwrap();
            assert_ne!(before[2], before[1], "{kv_type:?}");
            let after = [0, 1, 2, 3].map(|block| read(&mut *program, block));
            assert_eq!(after[1], before[2], "{kv_type:?}");
            for kept in [0, 2, 3] {
                assert_eq!(after[kept], before[kept], "{kv_type:?}, block {kept}");
            }
        }
    }
}
