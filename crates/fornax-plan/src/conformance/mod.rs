//! One list of cases that every provider must pass on every tier, and the one function that
//! holds a device to the reference in its own activation mode. It knows no provider.

mod batches;
mod build;
mod cases;
mod proof;

use std::ops::Range;

use crate::device::{ActMode, Device, KvType, Limits, Program};
use crate::error::Result;
use crate::ids::{BlockId, SlotId, TokenId};
use crate::plan::Plan;
use crate::reference::ReferenceDevice;
use crate::step::{SeqStep, StepOutput, Tokens, Want};

pub use build::weight;
pub use cases::cases;
pub use proof::{proof, proof_plan};

/// A plan, the steps to run on it, and how far a device may be from the reference.
#[derive(Clone, Debug)]
pub struct Case {
    /// `op/variant/shape`.
    pub name: String,
    /// The plan; it ends in hidden rows, logits or tokens.
    pub plan: Plan,
    /// Steps, run in order.
    pub steps: Vec<Vec<Seq>>,
    /// How keys and values are stored on both sides.
    pub kv_type: KvType,
    /// Largest difference of any element, as a share of one plus the largest reference element.
    pub tolerance: f32,
}

/// One sequence's part of a step, owned.
#[derive(Clone, Debug)]
pub struct Seq {
    /// Slot; also names the sequence.
    pub slot: u32,
    /// Position of the first token.
    pub pos: u32,
    /// Host tokens; the slot's last token where empty.
    pub tokens: Vec<TokenId>,
    /// What is wanted.
    pub wants: Vec<(Range<u32>, Want)>,
    /// Tokens of the chain.
    pub max_new: u32,
}

/// Runs every step of a case on a program prepared for it and collects the results.
/// `salt` varies which physical blocks a sequence gets: results must not depend on it.
///
/// # Errors
/// Whatever the program reports.
pub fn run(
    device: &dyn Device,
    case: &Case,
    limits: &Limits,
    salt: u32,
) -> Result<Vec<StepOutput>> {
    let mut program = device.prepare(&case.plan, limits)?;
    let block = device.info().kv_block;
    let tables = Tables::new(case, limits, block, salt);
    let mut outs = Vec::new();
    for step in &case.steps {
        let mut out = StepOutput::default();
        tables.step(program.as_mut(), step, &mut out)?;
        outs.push(out);
    }
    Ok(outs)
}

/// Limits that fit the case on a device with this KV block size.
pub fn limits_for(case: &Case, device: &dyn Device) -> Limits {
    let info = device.info();
    let seqs = || case.steps.iter().flatten();
    let rows = |s: &Seq| s.tokens.len().max(1) as u32;
    let longest = seqs().map(|s| s.pos + rows(s) + s.max_new).max().unwrap_or(1);
    let slots = seqs().map(|s| s.slot + 1).max().unwrap_or(1);
    let total = |step: &Vec<Seq>| step.iter().map(rows).sum::<u32>();
    let most = case.steps.iter().map(total).max().unwrap_or(1);
    Limits {
        slots,
        rows: most,
        wanted: most,
        kv_blocks: slots * longest.div_ceil(info.kv_block) + 3,
        kv_type: case.kv_type,
        act: Some(info.act),
        ..Limits::default()
    }
}

/// Compares a device with the reference in the device's own activation mode; returns the largest
/// relative difference found.
///
/// # Errors
/// A sentence naming the case, the step and the first element or token that is off.
pub fn check(device: &dyn Device, case: &Case) -> std::result::Result<f32, String> {
    check_as(device, case, device.info().act, case.tolerance)
}

/// Compares a device in its own activation mode with the reference in another: for a device that rounds less than its
/// mode allows.
///
/// # Errors
/// As [`check`].
pub fn check_as(
    device: &dyn Device,
    case: &Case,
    act: ActMode,
    tolerance: f32,
) -> std::result::Result<f32, String> {
    held(device, case, &expected(device, case, act)?, tolerance)
}

/// Compares several devices with the reference, each in its own activation mode; what the reference says is computed once
/// for all that are alike in that.
///
/// # Errors
/// As [`check`], by device: its place in the list, and the sentence.
pub fn check_each(devices: &[&dyn Device], case: &Case) -> Vec<(usize, String)> {
    let mut known: Vec<(ActMode, u32, Vec<StepOutput>)> = Vec::new();
    let mut check = |device: &dyn Device| {
        let info = device.info();
        let alike = |k: &&(ActMode, u32, _)| (k.0, k.1) == (info.act, info.kv_block);
        if !known.iter().any(|k| alike(&k)) {
            known.push((info.act, info.kv_block, expected(device, case, info.act)?));
        }
        let want = known.iter().find(alike).map(|k| &k.2[..]).unwrap_or_default();
        held(device, case, want, case.tolerance)
    };
    let failed = |(at, device): (usize, &&dyn Device)| Some((at, check(*device).err()?));
    devices.iter().enumerate().filter_map(failed).collect()
}

/// What the reference says to a case with this device's blocks.
fn expected(
    device: &dyn Device,
    case: &Case,
    act: ActMode,
) -> std::result::Result<Vec<StepOutput>, String> {
    let reference = ReferenceDevice { kv_block: device.info().kv_block, ..Default::default() };
    let limits = Limits { act: Some(act), ..limits_for(case, device) };
    run(&reference, case, &limits, 0).map_err(|e| format!("{}: {e}", case.name))
}

/// Runs a case on a device and holds it to what is wanted.
fn held(
    device: &dyn Device,
    case: &Case,
    want: &[StepOutput],
    tolerance: f32,
) -> std::result::Result<f32, String> {
    let have = run(device, case, &limits_for(case, device), 1)
        .map_err(|e| format!("{}: {e}", case.name))?;
    if want.len() != have.len() {
        return Err(format!("{}: {} steps, expected {}", case.name, have.len(), want.len()));
    }
    let mut worst = 0.0f32;
    for (step, (want, have)) in want.iter().zip(&have).enumerate() {
        let off = |what: String| Err(format!("{}, step {step}: {what}", case.name));
        let ids =
            |o: &StepOutput| o.tokens.iter().map(|t| (t.seq, t.pos, t.token)).collect::<Vec<_>>();
        if ids(want) != ids(have) {
            return off(format!("tokens (seq, pos, id) {:?}, expected {:?}", ids(have), ids(want)));
        }
        if want.logit_rows != have.logit_rows || want.hidden_rows != have.hidden_rows {
            return off("other rows than the reference's".into());
        }
        for (name, want, have) in
            [("logits", &want.logits, &have.logits), ("hidden", &want.hidden, &have.hidden)]
        {
            if want.len() != have.len() {
                return off(format!("{} {name}, expected {}", have.len(), want.len()));
            }
            let scale = 1.0 + want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            for (at, (w, h)) in want.iter().zip(have).enumerate() {
                let gap = (w - h).abs() / scale;
                if gap.is_nan() || gap > tolerance {
                    return off(format!("{name}[{at}] is {h}, expected {w} within {tolerance}"));
                }
                worst = worst.max(gap);
            }
        }
    }
    Ok(worst)
}

/// Block tables for every sequence of a case: blocks handed out in a scattered order.
struct Tables {
    by_slot: Vec<Vec<Vec<BlockId>>>,
}

impl Tables {
    fn new(case: &Case, limits: &Limits, block: u32, salt: u32) -> Tables {
        let n = limits.kv_blocks;
        let longest = (n - 3) / limits.slots;
        debug_assert!(longest * block >= 1);
        // A step coprime to n visits every block once.
        let mut stride = 2 * salt + 1;
        while gcd(stride, n) != 1 {
            stride += 1;
        }
        let table = |slot: u32| {
            (0..longest)
                .map(|i| BlockId(((slot * longest + i) * stride + salt) % n))
                .collect::<Vec<_>>()
        };
        let tables = |slot| case.plan.kv.iter().map(|_| table(slot)).collect();
        Tables { by_slot: (0..limits.slots).map(tables).collect() }
    }

    fn step(&self, program: &mut dyn Program, step: &[Seq], out: &mut StepOutput) -> Result<()> {
        let tables: Vec<Vec<&[BlockId]>> = step
            .iter()
            .map(|s| self.by_slot[s.slot as usize].iter().map(Vec::as_slice).collect())
            .collect();
        let seqs: Vec<SeqStep<'_>> = step
            .iter()
            .zip(&tables)
            .map(|(s, tables)| SeqStep {
                slot: SlotId(s.slot),
                tokens: if s.tokens.is_empty() {
                    Tokens::Last { draft: &[] }
                } else {
                    Tokens::Host(&s.tokens)
                },
                pos: s.pos,
                tables,
                wants: &s.wants,
                sample: None,
                max_new: s.max_new,
                stop: &[],
            })
            .collect();
        let ticket = program.submit(&seqs)?;
        program.wait(ticket, out)
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_passes_its_own_cases_and_blocks_do_not_matter() {
        for case in cases() {
            check(&ReferenceDevice { kv_block: 8, ..Default::default() }, &case).unwrap();
        }
    }

    #[test]
    fn a_wrong_device_fails() {
        // The comparison must be able to fail: the reference in the other activation mode is off
        // by more than the tolerance of a quantised matmul.
        let all = cases();
        let case = all.iter().find(|c| c.name.starts_with("matmul/Q8_0")).unwrap();
        let device = ReferenceDevice { kv_block: 8, ..Default::default() };
        let mut limits = limits_for(case, &device);
        let exact = run(&device, case, &limits, 0).unwrap();
        limits.act = Some(ActMode::Q8);
        let rounded = run(&device, case, &limits, 0).unwrap();
        let gap = exact[0]
            .hidden
            .iter()
            .zip(&rounded[0].hidden)
            .fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(gap > case.tolerance, "{gap}");
    }

    #[test]
    fn each_device_is_held_and_the_failed_are_numbered() {
        let all = cases();
        let mut case = all.iter().find(|c| c.name.starts_with("attention")).unwrap().clone();
        let block = |kv_block| ReferenceDevice { kv_block, ..Default::default() };
        let [a, b, c] = [8, 32, 8].map(block);
        let devices: [&dyn Device; 3] = [&a, &b, &c];
        assert!(check_each(&devices, &case).is_empty());
        // No difference is small enough.
        case.tolerance = -1.0;
        let failed = check_each(&devices, &case);
        assert!(failed.iter().map(|f| f.0).eq(0..3) && failed[2].1.contains("within -1"));
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<String> = cases().into_iter().map(|c| c.name).collect();
        let n = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), n);
    }
}
