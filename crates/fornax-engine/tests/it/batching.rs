//! The same request gives the same ids and probabilities alone, in any batch, chunked, preempted,
//! from a warm cache and with guesses: on the CPU and on the reference, for families with every
//! kind of state.

use std::sync::Arc;
use std::time::Duration;

use fornax_engine::Model;
use fornax_engine::SampleParams;
use fornax_engine::serve::{Engine, Generation, ServeOptions};
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::sample::uniform;
use fornax_plan::{ActMode, Device, KvType, TokenId};

use crate::fixture::{Fixture, Runner};
use crate::serve::{Answer, ask, channel_of, collect, cpu, model};

/// A repeatable stream of numbers.
struct Rng(u64, u32);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        ((uniform(self.0, self.1) * n as f32) as usize).min(n - 1)
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// Prompts at the edges of chunks and blocks; most begin alike, some repeat themselves.
fn prompts(vocab: u32) -> Vec<Vec<TokenId>> {
    let shared = |n: usize| (0..n as u32).map(|i| (i * 37 + 11) % vocab);
    let mut all: Vec<Vec<TokenId>> =
        [1, 15, 16, 31, 32, 33, 64, 70].iter().map(|n| shared(*n).collect()).collect();
    all.push(shared(40).chain([1, 2, 3, 4]).collect());
    all.push((0..45).map(|i| i % 5 + 3).collect());
    all
}

fn generation(i: usize, prompt: &[TokenId]) -> Generation {
    let mut g = Generation::new(prompt, 10 + 3 * (i as u32 % 5));
    if i % 2 == 1 {
        g.sample = SampleParams {
            temperature: 0.8,
            top_p: 0.95,
            top_k: if i % 4 == 1 { 20 } else { 0 },
            seed: i as u64,
            repeat_penalty: if i.is_multiple_of(3) { 1.2 } else { 1.0 },
            ..SampleParams::default()
        };
    }
    g.logprobs = [Some(0), Some(2), None][i % 3];
    g.priority = (i % 3) as i32 / 2;
    g
}

/// Ids and the bits of their log-probabilities.
type Said = Vec<(TokenId, Option<u32>, Vec<(TokenId, u32)>)>;

fn said(answer: &Answer) -> Said {
    assert!(answer.failed.is_none(), "{:?}", answer.failed);
    let bits = |t: &(TokenId, f32)| (t.0, t.1.to_bits());
    let of = |t: &fornax_engine::serve::TokenUpdate| {
        (t.id, t.logprob.map(f32::to_bits), t.top.iter().map(bits).collect())
    };
    answer.tokens.iter().map(of).collect()
}

/// What is run alone and then in company.
struct Race<'a> {
    name: &'a str,
    kv_type: KvType,
    /// Random schedules.
    schedules: u64,
    /// Which of the prompts.
    prompts: &'a [usize],
    /// Ask the device for the same numbers in any company.
    deterministic: bool,
}

impl<'a> Race<'a> {
    fn new(name: &'a str, kv_type: KvType, schedules: u64) -> Race<'a> {
        let prompts = &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
        Race { name, kv_type, schedules, prompts, deterministic: false }
    }

    /// The first request whose ids or bits of probabilities differ from those it gets alone; then how much was found in
    /// the cache.
    fn run(&self, model: &Arc<Model>, device: &dyn Device) -> (Option<String>, u64) {
        let all = prompts(model.plan().hyper.vocab);
        let prompts: Vec<&Vec<TokenId>> = self.prompts.iter().map(|i| &all[*i]).collect();
        let alone = ServeOptions {
            max_running: 1,
            prefix_cache: false,
            speculate: false,
            context: 128,
            kv_type: self.kv_type,
            deterministic: self.deterministic,
            ..ServeOptions::default()
        };
        let engine = Engine::start(model.clone(), device, alone.clone()).unwrap();
        let ask = |(i, p): (usize, &&Vec<TokenId>)| said(&ask(&engine, generation(i, p)));
        let want: Vec<Said> = prompts.iter().enumerate().map(ask).collect();
        let (mut hits, mut other) = (0, None);
        for seed in 0..self.schedules {
            let mut rng = Rng(seed, 0);
            let options = ServeOptions {
                max_running: rng.of(&[2, 3, 6, 10]),
                kv_tokens: Some(rng.of(&[128, 160, 224, 640])),
                step_rows: rng.of(&[8, 20, 64, 512]),
                step_ms_busy: rng.of(&[0.5, 5.0, 30.0]),
                prefix_cache: seed % 3 > 0,
                speculate: seed % 2 == 0,
                ..alone.clone()
            };
            let engine = Engine::start(model.clone(), device, options.clone()).unwrap();
            for round in ["cold", "warm"] {
                let mut order: Vec<usize> = (0..prompts.len()).collect();
                order.rotate_left(rng.below(prompts.len()));
                let mut open = Vec::new();
                for i in order {
                    let (publish, updates) = channel_of();
                    engine.submit(generation(i, prompts[i]), publish).unwrap();
                    open.push((i, updates));
                    if rng.below(3) == 0 {
                        std::thread::sleep(Duration::from_millis(rng.below(4) as u64));
                    }
                }
                for (i, updates) in open {
                    let have = said(&collect(&updates));
                    if have != want[i] && other.is_none() {
                        let name = self.name;
                        other = Some(format!(
                            "{name}, schedule {seed} ({options:?}), {round}, {i}: {have:?}, alone {:?}",
                            want[i]
                        ));
                    }
                }
            }
            let stats = engine.stats();
            assert!(stats.healthy, "{:?}", stats.fault);
            hits += stats.prefix_hits;
            engine.shutdown(Duration::ZERO);
            assert_eq!(engine.stats().kv_blocks_used, 0);
        }
        (other, hits)
    }

    /// Nothing may differ, and something must come from the cache.
    fn check(&self, model: &Arc<Model>, device: &dyn Device) {
        let (other, hits) = self.run(model, device);
        assert!(other.is_none(), "{}", other.unwrap_or_default());
        // How many were preempted hangs on the machine's speed; that some are is another test's.
        assert!(hits > 0, "{}: nothing found", self.name);
    }
}

#[test]
fn on_the_cpu_a_request_does_not_see_its_company() {
    for name in
        ["llama3-q8_0", "lfm2", "gemma3-q8_0", "mistral-swa", "qwen3moe", "mixtral", "gptoss-mxfp4"]
    {
        Race::new(name, KvType::F16, 6).check(&model(name), &cpu());
    }
}

#[test]
fn with_quantised_keys_and_long_blocks_too() {
    Race::new("quantised", KvType::Q8_0, 3).check(&model("llama-kq-q4_0"), &cpu());
    let long = cpu().with_kv_block(64);
    Race::new("blocks of 64", KvType::F16, 3).check(&model("llama3-q8_0"), &long);
}

#[test]
fn requests_that_come_together_and_begin_alike_are_computed_once() {
    let prompt: Vec<TokenId> = (0..200).map(|i| i * 7 % 90 + 1).collect();
    for name in ["llama3-q8_0", "lfm2", "gemma3-q8_0"] {
        let options = ServeOptions { step_rows: 64, ..ServeOptions::default() };
        let engine = Engine::start(model(name), &cpu(), options).unwrap();
        let open: Vec<_> = (0..6)
            .map(|i| {
                let mut g = Generation::new(&prompt[..], 8);
                g.sample = SampleParams { temperature: 1.0, seed: i, ..SampleParams::default() };
                let (publish, updates) = channel_of();
                engine.submit(g, publish).unwrap();
                updates
            })
            .collect();
        let cached: Vec<u32> = open.iter().map(|u| collect(u).started.unwrap()).collect();
        let found = cached.iter().filter(|c| **c >= 100).count();
        assert_eq!(found, 5, "{name}: {cached:?}");
    }
}

#[test]
fn on_the_reference_with_blocks_of_any_length() {
    for (name, kv_block) in [("llama3-q8_0", 16), ("lfm2", 8), ("mistral-swa", 64), ("lfm2", 96)] {
        let device = ReferenceDevice { kv_block, ..ReferenceDevice::default() };
        let what = format!("{name}, blocks of {kv_block}");
        Race::new(&what, KvType::F32, 3).check(&model(name), &device);
    }
}

/// The GPU of this Mac, elsewhere the emulator.
#[cfg(unix)]
fn metal() -> fornax_metal::MetalDevice {
    if cfg!(target_os = "macos") {
        fornax_metal::MetalDevice::system()
            .unwrap_or_else(|_| fornax_metal::MetalDevice::emulated(1))
    } else {
        fornax_metal::MetalDevice::emulated(1)
    }
}

#[cfg(unix)]
#[test]
fn metal_keeps_what_it_promises_and_without_a_promise_it_would_not() {
    for (name, kv_type, schedules) in
        [("llama3-q8_0", KvType::F16, 2), ("lfm2", KvType::F32, 1), ("mistral-swa", KvType::F16, 1)]
    {
        let race = Race {
            prompts: &[1, 4, 7],
            deterministic: true,
            ..Race::new(name, kv_type, schedules)
        };
        let (other, _) = race.run(&model(name), &metal());
        assert!(other.is_none(), "{}", other.unwrap_or_default());
    }
    let loose = Race { prompts: &[1, 4, 7], ..Race::new("loose", KvType::F16, 1) };
    let (other, _) = loose.run(&model("llama3-q8_0"), &metal());
    assert!(other.is_some(), "it keeps the numbers anyway: then nothing is to be asked for");
}

#[cfg(unix)]
#[test]
fn steps_are_handed_over_while_another_runs_and_change_nothing() {
    let options = ServeOptions { context: 128, speculate: false, ..ServeOptions::default() };
    let model = model("llama3-q8_0");
    let run = |max_new, stop: &[TokenId]| {
        let engine = Engine::start(model.clone(), &metal(), options.clone()).unwrap();
        let open: Vec<_> = (0..3)
            .map(|i| {
                let mut g = Generation::new(vec![7 + i, 30, 41], max_new);
                g.stop = stop.to_vec();
                let (publish, updates) = channel_of();
                engine.submit(g, publish).unwrap();
                updates
            })
            .collect();
        let ids: Vec<_> = open.iter().map(|u| collect(u).ids()).collect();
        (ids, engine.stats())
    };
    let (long, stats) = run(12, &[]);
    assert!(stats.steps_ahead > 0, "{stats:?}");
    assert!(long.iter().all(|ids| ids.len() == 12));
    // One of them meets its stop token while the next step is under way; nothing comes after it.
    let stop = long[0][5];
    let (cut, stats) = run(12, &[stop]);
    for (cut, long) in cut.iter().zip(&long) {
        let end = long.iter().position(|id| *id == stop).unwrap_or(12);
        assert_eq!(cut[..], long[..end]);
    }
    assert!(stats.steps_ahead > 0 && stats.kv_blocks_used == 0, "{stats:?}");
}

/// What a model says greedily to each prompt in turn on Metal, and how many guesses were made and right.
#[cfg(unix)]
fn on_metal(
    name: &str,
    prompts: &[Vec<TokenId>],
    speculate: bool,
) -> (Vec<Vec<TokenId>>, [u64; 2]) {
    let options = ServeOptions {
        max_running: 1,
        context: 256,
        kv_type: KvType::F32,
        prefix_cache: false,
        speculate,
        ..ServeOptions::default()
    };
    let engine = Engine::start(model(name), &metal(), options).unwrap();
    let said = |p: &Vec<TokenId>| {
        let answer = ask(&engine, Generation::new(&p[..], 40));
        assert!(answer.failed.is_none(), "{:?}", answer.failed);
        answer.ids()
    };
    let all = prompts.iter().map(said).collect();
    let stats = engine.stats();
    (all, [stats.drafted, stats.accepted])
}

/// Without a promise of the same numbers, a row among guesses takes another kernel than a row alone: so an answer may part from
/// what is said without guesses, but only where the reference hardly prefers either token.
#[cfg(unix)]
#[test]
fn guesses_without_a_promise_part_answers_at_near_ties_alone() {
    let (mut guessed, mut right) = (0, 0);
    for name in ["llama3-q8_0", "lfm2"] {
        let begin: Vec<Vec<TokenId>> =
            (4..6).map(|n| (0..24).map(|i| i % n + 3).collect()).collect();
        let (said, _) = on_metal(name, &begin, false);
        // What was said once stands in the prompt, and may be said again.
        let prompts: Vec<Vec<TokenId>> =
            begin.iter().zip(&said).map(|(p, a)| [&p[..], a, p].concat()).collect();
        let (want, none) = on_metal(name, &prompts, false);
        assert_eq!(none, [0, 0]);
        let (have, [drafted, accepted]) = on_metal(name, &prompts, true);
        (guessed, right) = (guessed + drafted, right + accepted);
        for ((prompt, want), have) in prompts.iter().zip(&want).zip(&have) {
            assert_eq!(want.len(), have.len(), "{name}");
            let Some(at) = (0..want.len()).find(|i| have[*i] != want[*i]) else { continue };
            let lead = lead(name, &[prompt, &want[..at]].concat(), [want[at], have[at]]);
            println!("{name}: parts at token {at}, whose logits are {lead:.1e} apart");
            assert!(lead <= 2e-3, "{name}: token {at} is {}, not {}: {lead}", have[at], want[at]);
        }
    }
    assert!(guessed > right && right > 0, "{right} of {guessed}");
}

/// By how much the reference's logits of two tokens differ after these.
#[cfg(unix)]
fn lead(name: &str, seen: &[TokenId], [a, b]: [TokenId; 2]) -> f32 {
    let f = Fixture::load(name);
    let mut runner =
        Runner::new(&ReferenceDevice::default(), &f.plan, ActMode::F32, KvType::F32, 1, 512);
    let rows = runner.logits(seen, 64, f.plan.hyper.vocab as usize);
    let row = &rows[rows.len() - 1];
    (row[a as usize] - row[b as usize]).abs()
}

#[test]
fn cuda_keeps_what_it_promises() {
    let device = match fornax_cuda::CudaDevice::open(0) {
        Ok(device) => device,
        Err(e) => {
            println!("not run, there is no device: {e}");
            return;
        }
    };
    for name in ["llama3-q8_0", "gemma3-q8_0", "mistral-swa"] {
        let race = Race { deterministic: true, ..Race::new(name, KvType::F16, 3) };
        race.check(&model(name), &device);
    }
}
