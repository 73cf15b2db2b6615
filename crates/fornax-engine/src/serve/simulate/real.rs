//! Guessing ahead on real plans: the reference runs them, and a clock that stands still makes every
//! guess worth its time.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use fornax_gguf::Gguf;
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::{Device, KvType, Limits, SampleParams, TokenId};

use super::super::api::{Generation, RequestId, Update};
use super::super::core::{Clock, Core, Rules};
use super::super::request::{Reply, Seq};
use crate::kv::KvRules;

/// Answers to `prompts` all at once, and how many tokens were guessed and how many right.
fn answers(name: &str, prompts: &[Vec<TokenId>], speculate: bool) -> (Vec<Vec<TokenId>>, [u64; 2]) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models").join(name);
    let plan = crate::arch::plan(&Gguf::open(&file.join("model.gguf")).unwrap()).unwrap();
    let device = ReferenceDevice { kv_block: 16, ..ReferenceDevice::default() };
    let (slots, rows, blocks) = (4, 64, 64);
    let limits = Limits {
        slots: slots as u32,
        rows: rows as u32,
        wanted: rows as u32,
        kv_blocks: blocks,
        kv_type: KvType::F32,
        ..Limits::default()
    };
    let rules = Rules {
        slots,
        context: 256,
        rows,
        wanted: rows,
        kv: KvRules {
            block: 16,
            blocks,
            rows,
            cache: true,
            states: (!plan.states.is_empty()).then_some(64),
        },
        busy_ms: 30.0,
        idle_ms: 250.0,
        speculate,
        ahead: false,
    };
    let program = device.prepare(&plan, &limits).unwrap();
    let clock = Clock::Told(Instant::now(), Arc::new(AtomicU64::new(0)));
    let mut core = Core::new(program, &plan, rules, clock);
    let told: Vec<Arc<Mutex<Vec<TokenId>>>> = prompts.iter().map(|_| Arc::default()).collect();
    for (i, prompt) in prompts.iter().enumerate() {
        let mut g = Generation::new(&prompt[..], 60);
        if i % 2 == 1 {
            let seed = i as u64;
            g.sample = SampleParams { temperature: 0.3, seed, ..SampleParams::default() };
        }
        let into = Arc::clone(&told[i]);
        let reply = Reply::new(Box::new(move |update| {
            match update {
                Update::Tokens(t) => into.lock().unwrap().extend(t.iter().map(|t| t.id)),
                Update::Failed(e) => panic!("{e}"),
                _ => {}
            }
            ControlFlow::Continue(())
        }));
        let id = RequestId(i as u64 + 1);
        core.enqueue(Box::new(Seq::new(id, g, reply, plan.kv.len(), 257)));
    }
    while !core.is_idle() {
        core.turn().unwrap();
        core.check().unwrap();
        core.tell_over();
    }
    let ids = told.iter().map(|t| t.lock().unwrap().clone()).collect();
    let stats = core.stats();
    (ids, [stats.drafted, stats.accepted])
}

#[test]
fn guesses_change_no_answer_and_leave_no_state() {
    let (mut guessed, mut right) = (0, 0);
    for name in ["llama3-q8_0", "lfm2", "gemma3-q8_0", "mistral-swa", "mixtral"] {
        let begin: Vec<Vec<TokenId>> =
            (4..8).map(|n| (0..40).map(|i| i % n + 3).collect()).collect();
        let (said, _) = answers(name, &begin, false);
        // What was said once stands in the prompt, and may be said again.
        let prompts: Vec<Vec<TokenId>> =
            begin.iter().zip(&said).map(|(p, a)| [&p[..], a, p].concat()).collect();
        let (want, _) = answers(name, &prompts, false);
        let (have, [drafted, accepted]) = answers(name, &prompts, true);
        assert_eq!(have, want, "{name}");
        assert!(want.iter().all(|ids| ids.len() == 60), "{name}");
        println!("{name}: {accepted} of {drafted} guesses right");
        (guessed, right) = (guessed + drafted, right + accepted);
    }
    assert!(guessed > right && right > 0, "{right} of {guessed}");
}
