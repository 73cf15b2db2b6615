//! Reading the test models and running them on any device. It knows no device by name.

use std::ops::Range;
use std::path::PathBuf;

use fornax_engine::arch;
use fornax_gguf::Gguf;
use fornax_plan::{
    ActMode, BlockId, Device, KvType, Limits, Plan, Program, SeqStep, SlotId, StepOutput, TokenId,
    Tokens, Want,
};
use serde_json::Value;

/// The folder of test data.
pub(crate) fn testdata() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata")
}

/// Names of all test models, sorted.
pub(crate) fn models() -> Vec<String> {
    let dir = testdata().join("models");
    let entries = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut names: Vec<String> = entries
        .map(|e| e.unwrap())
        .filter(|e| e.path().join("model.gguf").exists())
        .map(|e| e.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// One prompt of a fixture and what must follow.
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<TokenId>,
    /// Positions with expected logits.
    pub(crate) positions: Vec<u32>,
    pub(crate) logits: Vec<Vec<f32>>,
    pub(crate) greedy: Vec<TokenId>,
    /// Distance of the two best logits at every greedy step.
    pub(crate) gaps: Vec<f32>,
}

/// A model and its expectations.
pub(crate) struct Fixture {
    pub(crate) plan: Plan,
    pub(crate) prompts: Vec<Prompt>,
}

impl Fixture {
    pub(crate) fn load(name: &str) -> Fixture {
        let dir = testdata().join("models").join(name);
        let gguf = Gguf::open(&dir.join("model.gguf")).unwrap_or_else(|e| panic!("{name}: {e}"));
        let plan = arch::plan(&gguf).unwrap_or_else(|e| panic!("{name}: {e}"));
        let text = std::fs::read_to_string(dir.join("expected.json")).unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        let prompts = json["prompts"].as_array().unwrap().iter().map(prompt).collect();
        Fixture { plan, prompts }
    }
}

fn prompt(p: &Value) -> Prompt {
    let ints =
        |v: &Value| v.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect();
    let floats = |v: &Value| -> Vec<f32> {
        v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
    };
    Prompt {
        tokens: ints(&p["tokens"]),
        positions: ints(&p["logits_positions"]),
        logits: p["logits"].as_array().unwrap().iter().map(floats).collect(),
        greedy: ints(&p["greedy"]["tokens"]),
        gaps: floats(&p["greedy"]["top2_gap"]),
    }
}

/// A program with one block table per slot, all blocks spread over the pool.
pub(crate) struct Runner {
    pub(crate) program: Box<dyn Program>,
    groups: usize,
    per_seq: u32,
    blocks: u32,
    pub(crate) out: StepOutput,
}

impl Runner {
    /// A runner for `slots` sequences of up to `context` positions.
    pub(crate) fn new(
        device: &dyn Device,
        plan: &Plan,
        act: ActMode,
        kv_type: KvType,
        slots: u32,
        context: u32,
    ) -> Runner {
        let per_seq = context.div_ceil(device.info().kv_block);
        let blocks = per_seq * slots + 1;
        let limits = Limits {
            slots,
            rows: 256,
            wanted: 256,
            kv_blocks: blocks,
            kv_type,
            act: Some(act),
            ..Limits::default()
        };
        let program = device.prepare(plan, &limits).unwrap_or_else(|e| panic!("prepare: {e}"));
        Runner { program, groups: plan.kv.len(), per_seq, blocks, out: StepOutput::default() }
    }

    /// The scattered blocks of a slot.
    pub(crate) fn table(&self, slot: u32) -> Vec<BlockId> {
        // Reversed, so that neighbours in a sequence are never neighbours in memory.
        let of = |i| BlockId(self.blocks - 1 - (slot * self.per_seq + i));
        (0..self.per_seq).map(of).collect()
    }

    /// Runs one sequence's tokens from `pos` on; results are in `self.out`.
    pub(crate) fn step(
        &mut self,
        slot: u32,
        tokens: &[TokenId],
        pos: u32,
        wants: &[(Range<u32>, Want)],
        max_new: u32,
    ) {
        let table = self.table(slot);
        let tables = vec![&table[..]; self.groups];
        let step = SeqStep {
            slot: SlotId(slot),
            tokens: if tokens.is_empty() {
                Tokens::Last { draft: &[] }
            } else {
                Tokens::Host(tokens)
            },
            pos,
            tables: &tables,
            wants,
            sample: None,
            max_new,
            stop: &[],
        };
        let ticket = self.program.submit(&[step]).unwrap_or_else(|e| panic!("submit: {e}"));
        self.program.wait(ticket, &mut self.out).unwrap_or_else(|e| panic!("wait: {e}"));
    }

    /// Logits after every token of a prompt, run in chunks of at most `chunk`.
    pub(crate) fn logits(
        &mut self,
        tokens: &[TokenId],
        chunk: usize,
        vocab: usize,
    ) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        let mut pos = 0;
        for part in tokens.chunks(chunk) {
            self.step(0, part, pos, &[(0..part.len() as u32, Want::Logits)], 1);
            rows.extend(self.out.logits.chunks(vocab).map(<[f32]>::to_vec));
            pos += part.len() as u32;
        }
        rows
    }

    /// Greedy continuation of a prompt, fed back on the device `chain` tokens per ticket.
    pub(crate) fn greedy(&mut self, tokens: &[TokenId], n: u32, chain: u32) -> Vec<TokenId> {
        let mut ids = Vec::new();
        let last = tokens.len() as u32 - 1;
        self.step(0, tokens, 0, &[(last..last + 1, Want::Token { logprob: false })], chain.min(n));
        ids.extend(self.out.tokens.iter().map(|t| t.token));
        while (ids.len() as u32) < n {
            let pos = last + ids.len() as u32;
            let left = chain.min(n - ids.len() as u32);
            self.step(0, &[], pos, &[(0..1, Want::Token { logprob: false })], left);
            ids.extend(self.out.tokens.iter().map(|t| t.token));
        }
        ids
    }
}

/// Largest and mean absolute difference of the logits at a prompt's expected positions.
pub(crate) fn distance(have: &[Vec<f32>], prompt: &Prompt) -> (f32, f64) {
    let (mut max, mut sum, mut n) = (0.0f32, 0.0f64, 0u64);
    for (position, want) in prompt.positions.iter().zip(&prompt.logits) {
        for (h, w) in have[*position as usize].iter().zip(want) {
            let gap = (h - w).abs();
            assert!(!gap.is_nan(), "NaN among the logits at position {position}");
            max = max.max(gap);
            sum += f64::from(gap);
            n += 1;
        }
    }
    (max, sum / n as f64)
}
