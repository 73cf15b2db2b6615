//! The reference KV cache: paged like every device's, stored as f32 that went through the
//! chosen KV type. It knows no attention.

use fornax_gguf::{TensorType, blocks};

use crate::device::{Cmd, KvType};
use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::op::KvRef;
use crate::plan::KvGroup;

/// The pools of all groups.
pub(super) struct Cache {
    /// Tokens of one block.
    pub(super) block: u32,
    groups: Vec<KvGroup>,
    ty: KvType,
    blocks: u32,
    /// By group: `[block][layer][token][heads · (k_width + v_width)]`, keys before values.
    pools: Vec<Vec<f32>>,
}

impl Cache {
    pub(super) fn new(groups: &[KvGroup], blocks: u32, block: u32, ty: KvType) -> Result<Cache> {
        let mut cache = Cache {
            block,
            groups: groups.to_vec(),
            ty,
            blocks: 0,
            pools: vec![Vec::new(); groups.len()],
        };
        cache.grow(blocks)?;
        Ok(cache)
    }

    pub(super) fn grow(&mut self, blocks: u32) -> Result<()> {
        let all = self.blocks.checked_add(blocks);
        let lens = (0..self.groups.len())
            .map(|g| all.and_then(|n| self.block_len(g).checked_mul(n as usize)))
            .collect::<Option<Vec<usize>>>();
        let room = |pools: &mut Vec<Vec<f32>>, lens: &[usize]| {
            let mut each = pools.iter_mut().zip(lens);
            each.all(|(pool, len)| pool.try_reserve_exact(len - pool.len()).is_ok())
        };
        let (Some(all), Some(lens)) = (all, lens.filter(|lens| room(&mut self.pools, lens))) else {
            return Err(Error::out_of_memory(format!(
                "reference: {blocks} more kv blocks of {} tokens could not be had; a smaller \
                 context needs less",
                self.block
            )));
        };
        self.blocks = all;
        for (pool, len) in self.pools.iter_mut().zip(lens) {
            pool.resize(len, 0.0);
        }
        Ok(())
    }

    pub(super) fn bytes(&self) -> u64 {
        self.pools.iter().map(|p| 4 * p.len() as u64).sum()
    }

    fn token_len(&self, group: usize) -> usize {
        let g = &self.groups[group];
        (g.heads * (g.k_width + g.v_width)) as usize
    }

    fn block_len(&self, group: usize) -> usize {
        self.token_len(group) * self.groups[group].layers.len() * self.block as usize
    }

    fn at(&self, kv: KvRef, table: &[BlockId], pos: u32) -> usize {
        let group = kv.group as usize;
        let block = table[(pos / self.block) as usize].ix();
        let token = kv.layer as usize * self.block as usize + (pos % self.block) as usize;
        block * self.block_len(group) + token * self.token_len(group)
    }

    pub(super) fn write(&mut self, kv: KvRef, table: &[BlockId], pos: u32, k: &[f32], v: &[f32]) {
        let at = self.at(kv, table, pos);
        let (ty, len) = (self.ty, self.token_len(kv.group as usize));
        let token = &mut self.pools[kv.group as usize][at..at + len];
        token[..k.len()].copy_from_slice(k);
        token[k.len()..].copy_from_slice(v);
        round(token, ty);
    }

    /// The key and the value of one key head at one position.
    pub(super) fn read(
        &self,
        kv: KvRef,
        table: &[BlockId],
        pos: u32,
        head: u32,
    ) -> (&[f32], &[f32]) {
        let g = &self.groups[kv.group as usize];
        let (kw, vw) = (g.k_width as usize, g.v_width as usize);
        let at = self.at(kv, table, pos);
        let token = &self.pools[kv.group as usize][at..at + self.token_len(kv.group as usize)];
        let values = g.heads as usize * kw;
        let head = head as usize;
        (&token[head * kw..][..kw], &token[values + head * vw..][..vw])
    }

    pub(super) fn command(&mut self, command: Cmd<'_>) -> Result<()> {
        match command {
            Cmd::CopyBlock { group, from, to } => {
                self.known(group, &[from, to])?;
                let len = self.block_len(group as usize);
                let from = from.ix() * len;
                self.pools[group as usize].copy_within(from..from + len, to.ix() * len);
            }
            Cmd::ReadKv { group, table, tokens, out } => {
                self.known(group, table)?;
                self.covered(table, tokens.end)?;
                out.clear();
                for layer in 0..self.groups[group as usize].layers.len() as u32 {
                    for pos in tokens.clone() {
                        let at = self.at(KvRef { group, layer }, table, pos);
                        let len = self.token_len(group as usize);
                        out.extend_from_slice(&self.pools[group as usize][at..at + len]);
                    }
                }
            }
            Cmd::WriteKv { group, table, tokens, data } => {
                self.known(group, table)?;
                self.covered(table, tokens.end)?;
                let layers = self.groups[group as usize].layers.len();
                let len = self.token_len(group as usize);
                if data.len() != layers * tokens.len() * len {
                    let want = layers * tokens.len() * len;
                    return Err(Error::malformed(format!(
                        "write kv: {} elements, expected {want}",
                        data.len()
                    )));
                }
                let mut data = data.chunks_exact(len);
                for layer in 0..layers as u32 {
                    for pos in tokens.clone() {
                        let at = self.at(KvRef { group, layer }, table, pos);
                        let token = &mut self.pools[group as usize][at..at + len];
                        token.copy_from_slice(data.next().expect("invariant: length checked"));
                        round(token, self.ty);
                    }
                }
            }
            Cmd::ReadState { .. } | Cmd::WriteState { .. } => {
                unreachable!("states are the program's")
            }
        }
        Ok(())
    }

    fn known(&self, group: u32, blocks: &[BlockId]) -> Result<()> {
        if group as usize >= self.groups.len() {
            let have = self.groups.len();
            return Err(Error::malformed(format!("kv group {group}, expected less than {have}")));
        }
        match blocks.iter().find(|b| b.0 >= self.blocks) {
            Some(b) => {
                Err(Error::malformed(format!("kv block {}, the pool has {}", b.0, self.blocks)))
            }
            None => Ok(()),
        }
    }

    fn covered(&self, table: &[BlockId], end: u32) -> Result<()> {
        let need = end.div_ceil(self.block) as usize;
        if table.len() < need {
            let have = table.len();
            return Err(Error::malformed(format!("kv table of {have} blocks, {need} are needed")));
        }
        Ok(())
    }
}

/// Rounds a token's keys and values the way the KV type stores them.
fn round(token: &mut [f32], ty: KvType) {
    match ty {
        KvType::F32 => {}
        KvType::F16 => {
            for v in token {
                *v = half::f16::from_f32(*v).to_f32();
            }
        }
        KvType::Q8_0 => {
            let mut bytes = vec![0u8; token.len() / 32 * TensorType::Q8_0.block_bytes()];
            blocks::quantize(TensorType::Q8_0, token, &mut bytes)
                .and_then(|()| blocks::dequantize(TensorType::Q8_0, &bytes, token))
                .expect("invariant: widths are multiples of 32, checked by supports");
        }
    }
}
