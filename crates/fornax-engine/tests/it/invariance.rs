//! A sequence's numbers depend on that sequence alone: not on its batch mates, its slot, its
//! physical blocks, how its prompt is cut, how many tokens a ticket yields, or the threads.

use std::ops::Range;

use fornax_cpu::{CpuDevice, CpuOptions, Isa};
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::sample::uniform;
use fornax_plan::{
    ActMode, BlockId, Device, KvType, Limits, Plan, SampleParams, SeqStep, SlotId, StepOutput,
    TokenId, Tokens, Want,
};

use crate::fixture::Fixture;

/// Models that between them have every kind of op, state and weight mix.
const MODELS: [&str; 7] = [
    "llama3-q8_0",
    "llama-kq-q4_k_m",
    "gemma3-q8_0",
    "lfm2",
    "mixtral",
    "qwen3moe",
    "gptoss-mxfp4",
];

/// Tokens that each sequence generates.
const NEW: usize = 6;

/// A repeatable stream of numbers.
struct Rng(u64, u32);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        ((uniform(self.0, self.1) * n as f32) as usize).min(n - 1)
    }
}

/// One sequence under way.
struct Seq {
    id: usize,
    slot: u32,
    tokens: Vec<TokenId>,
    prompt: usize,
    done: usize,
    /// Bits of the logits after each token that was run.
    rows: Vec<Vec<u32>>,
    blocks: Vec<BlockId>,
}

fn sample(id: usize) -> SampleParams {
    SampleParams {
        temperature: 0.8,
        top_p: 0.95,
        repeat_penalty: 1.1,
        seed: id as u64,
        ..SampleParams::default()
    }
}

fn prompts(plan: &Plan, seed: u64) -> Vec<Vec<TokenId>> {
    let mut rng = Rng(seed, 0);
    let lengths = [1, 5, 17, 33, 40];
    let token = |rng: &mut Rng| rng.below(plan.hyper.vocab as usize) as TokenId;
    lengths.map(|n| (0..n).map(|_| token(&mut rng)).collect()).to_vec()
}

/// Runs every prompt with its continuation under a schedule drawn from `seed`; `alone` runs them
/// one after the other, whole. Returns tokens and logits by sequence.
fn run(
    device: &dyn Device,
    plan: &Plan,
    kv_type: KvType,
    seed: u64,
    alone: bool,
) -> Vec<(Vec<TokenId>, Vec<Vec<u32>>)> {
    let prompts = prompts(plan, 11);
    let n = prompts.len() as u32;
    let block = device.info().kv_block;
    let each = 64u32.div_ceil(block);
    let kv_blocks = n * each;
    let act = Some(device.info().act);
    let limits =
        Limits { slots: n, rows: 128, wanted: 128, kv_blocks, kv_type, act, ..Limits::default() };
    let mut program = device.prepare(plan, &limits).unwrap();
    let mut rng = Rng(seed, 0);
    let shift = rng.below(n as usize) as u32;
    let mut seqs: Vec<Seq> = prompts
        .into_iter()
        .enumerate()
        .map(|(id, tokens)| {
            let slot = (id as u32 + shift) % n;
            let blocks = (0..each).map(|i| BlockId((slot + i * n + shift) % kv_blocks)).collect();
            Seq { id, slot, prompt: tokens.len(), tokens, done: 0, rows: vec![], blocks }
        })
        .collect();
    let mut out = StepOutput::default();
    while seqs.iter().any(|s| s.tokens.len() < s.prompt + NEW) {
        // Who takes part, and with how many tokens.
        let mut picks: Vec<(usize, usize)> = Vec::new();
        for (ix, s) in seqs.iter().enumerate() {
            let waiting = s.tokens.len() - s.done;
            if s.tokens.len() >= s.prompt + NEW || (alone && !picks.is_empty()) {
                continue;
            }
            if alone || rng.below(3) > 0 {
                picks.push((ix, if alone { waiting } else { 1 + rng.below(waiting) }));
            }
        }
        if !alone && picks.len() > 1 {
            let at = rng.below(picks.len());
            picks.rotate_left(at);
        }
        step(program.as_mut(), plan, &mut seqs, &picks, &mut out);
    }
    seqs.into_iter().map(|s| (s.tokens, s.rows)).collect()
}

fn step(
    program: &mut dyn fornax_plan::Program,
    plan: &Plan,
    seqs: &mut [Seq],
    picks: &[(usize, usize)],
    out: &mut StepOutput,
) {
    if picks.is_empty() {
        return;
    }
    let wants: Vec<Vec<(Range<u32>, Want)>> = picks
        .iter()
        .map(|(ix, take)| {
            let (s, take) = (&seqs[*ix], *take as u32);
            // Logits of all rows but the last of a whole prompt, which wants a token.
            let ends = s.done + take as usize == s.tokens.len();
            let mut w = Vec::new();
            if take > u32::from(ends) {
                w.push((0..take - u32::from(ends), Want::Logits));
            }
            if ends {
                w.push((take - 1..take, Want::Token { logprob: true }));
            }
            w
        })
        .collect();
    let tables: Vec<Vec<&[BlockId]>> =
        picks.iter().map(|(ix, _)| vec![&seqs[*ix].blocks[..]; plan.kv.len()]).collect();
    let steps: Vec<SeqStep<'_>> = picks
        .iter()
        .enumerate()
        .map(|(i, (ix, take))| {
            let s = &seqs[*ix];
            SeqStep {
                slot: SlotId(s.slot),
                tokens: Tokens::Host(&s.tokens[s.done..s.done + take]),
                pos: s.done as u32,
                tables: &tables[i],
                wants: &wants[i],
                sample: Some(sample(s.id)),
                max_new: 1,
                stop: &[],
            }
        })
        .collect();
    let ticket = program.submit(&steps).unwrap();
    program.wait(ticket, out).unwrap();
    let vocab = plan.hyper.vocab as usize;
    for (row, at) in out.logits.chunks(vocab).zip(&out.logit_rows) {
        let s = &mut seqs[picks[at.seq as usize].0];
        s.rows.push(row.iter().map(|v| v.to_bits()).collect());
    }
    for (i, (ix, take)) in picks.iter().enumerate() {
        let s = &mut seqs[*ix];
        s.done += take;
        if let Some(t) = out.tokens.iter().find(|t| t.seq == i as u32) {
            s.tokens.push(t.token);
            s.rows.push(vec![t.logprob.to_bits()]);
        }
    }
}

fn check(make: &dyn Fn(usize) -> Box<dyn Device>, name: &str, kv_type: KvType, schedules: u64) {
    for model in MODELS {
        let f = Fixture::load(model);
        let want = run(make(1).as_ref(), &f.plan, kv_type, 0, true);
        for seed in 1..=schedules {
            let threads = 1 + (seed % 3) as usize;
            let have = run(make(threads).as_ref(), &f.plan, kv_type, seed, false);
            for (id, (h, w)) in have.iter().zip(&want).enumerate() {
                assert_eq!(h.0, w.0, "{name}, {model}, schedule {seed}: tokens of sequence {id}");
                assert!(h.1 == w.1, "{name}, {model}, schedule {seed}: logits of sequence {id}");
            }
        }
    }
}

#[test]
fn on_the_reference() {
    check(
        &|_| Box::new(ReferenceDevice { kv_block: 8, ..Default::default() }),
        "reference",
        KvType::F32,
        2,
    );
}

#[test]
fn on_every_cpu_tier() {
    for isa in Isa::available() {
        let make = |threads| -> Box<dyn Device> {
            let options =
                CpuOptions { threads: Some(threads), isa: Some(isa), ..CpuOptions::default() };
            Box::new(CpuDevice::new(options).unwrap())
        };
        check(&make, isa.name(), KvType::F16, 3);
    }
}

#[test]
fn a_cut_prompt_and_a_chain_give_the_same_ids_on_every_tier() {
    use crate::fixture::Runner;
    for isa in Isa::available() {
        let options = CpuOptions { threads: Some(2), isa: Some(isa), ..CpuOptions::default() };
        let device = CpuDevice::new(options).unwrap();
        for model in MODELS {
            let f = Fixture::load(model);
            let prompt = &f.prompts[2].tokens;
            let vocab = f.plan.hyper.vocab as usize;
            let runner = || Runner::new(&device, &f.plan, ActMode::Q8, KvType::F16, 1, 128);
            let whole = runner().logits(prompt, prompt.len(), vocab);
            for chunk in [1, 2, 7] {
                assert!(
                    whole == runner().logits(prompt, chunk, vocab),
                    "{model}, {}, chunk {chunk}",
                    isa.name()
                );
            }
            let one = runner().greedy(prompt, 12, 1);
            for chain in [2, 5, 12] {
                assert_eq!(
                    one,
                    runner().greedy(prompt, 12, chain),
                    "{model}, {}, chain {chain}",
                    isa.name()
                );
            }
        }
    }
}
