//! `fornax verify`: a device against the reference, in three rungs. Each op on small shapes, whole steps of the model,
//! and a transcript up to the first token that differs. Prints what it finds; fails where a difference needs an explanation.

use std::fmt::Write;
use std::ops::ControlFlow;

use anyhow::{Result, bail};
use fornax_engine::{Event, Request, SampleParams, Session, SessionOptions};
use fornax_plan::{ActMode, Device, conformance};

use super::start::{self, Started};
use crate::devices::Opened;
use crate::flags::high::Config;
use crate::flags::low::Verify;
use crate::output;

/// Tokens of the whole-step comparison and of the transcript.
const PROMPT: usize = 32;
const TRANSCRIPT: usize = 32;

/// Climbs the ladder; every rung prints as it is reached.
///
/// # Errors
/// When the model cannot run, an op is out of its tolerance, or a token differs without a narrow choice.
pub(crate) fn verify(config: &Config, flags: &Verify) -> Result<()> {
    let started = Started::open(config, Some(&flags.model.model))?;
    let device = started.device();
    let info = device.info();
    output::product(
        format!("{} {} against {:?}\n", info.kind, info.tier, flags.against)
            .to_lowercase()
            .as_bytes(),
    )?;
    let failed = ops(device)?;
    let tokens = prompt(&started);
    let rung = Rung { config, started: &started, context: PROMPT + TRANSCRIPT };
    let loose = rung.steps(&tokens, ActMode::F32)?;
    let strict = if info.act == ActMode::F32 { loose } else { rung.steps(&tokens, info.act)? };
    let parted = rung.transcript(&tokens, info.act)?;
    if failed > 0 {
        bail!("{failed} op cases are out of tolerance on {} {}", info.kind, info.tier);
    }
    // Two rows that differ by d can only swap tokens whose logits are within 2 d.
    if let Some(gap) = parted.filter(|gap| *gap > 2.0 * strict) {
        bail!(
            "the transcript parts where the reference's choice is clear: its gap is {gap}, logits differ by {strict}"
        );
    }
    Ok(())
}

/// The first rung: every case of the conformance list. Says how many fail.
fn ops(device: &dyn Device) -> Result<usize> {
    let mut failed = 0;
    let mut kinds: Vec<(String, usize, f32)> = Vec::new();
    for case in conformance::cases() {
        let kind = case.name.split('/').next().unwrap_or(&case.name).to_owned();
        // A refusal by name, at load, is how a device says what it lacks; it is told, and is no failure.
        let limits = conformance::limits_for(&case, device);
        if let Some(refused) = device.supports(&case.plan, &limits).first() {
            let line = format!("  refused {}: {}: {}\n", case.name, refused.what, refused.why);
            output::product(line.as_bytes())?;
            continue;
        }
        let worst = match conformance::check(device, &case) {
            Ok(worst) => worst,
            Err(what) => {
                failed += 1;
                output::product(format!("  FAILED {what}\n").as_bytes())?;
                continue;
            }
        };
        match kinds.iter_mut().find(|(name, ..)| *name == kind) {
            Some((_, count, most)) => (*count, *most) = (*count + 1, most.max(worst)),
            None => kinds.push((kind, 1, worst)),
        }
    }
    let mut text = String::from("ops, largest difference of each kind\n");
    for (kind, count, worst) in kinds {
        let _ = writeln!(text, "  {kind:<12} {count:>4} cases {worst:.2e}");
    }
    output::product(text.as_bytes())?;
    Ok(failed)
}

/// Ordinary text, made up to length with ids of no meaning.
fn prompt(started: &Started) -> Vec<u32> {
    const TEXT: &str = "The furnace was lit before dawn, and by noon its heat had reached every room of the old \
        house, so that nobody spoke of the winter outside any more.";
    let vocab = started.model.plan().hyper.vocab;
    let mut tokens = started.model.encode(TEXT);
    tokens.truncate(PROMPT);
    tokens.extend((tokens.len()..PROMPT).map(|i| (i as u32).wrapping_mul(2_654_435_761) % vocab));
    tokens
}

/// What the rungs that run the model share.
struct Rung<'a> {
    config: &'a Config,
    started: &'a Started,
    context: usize,
}

impl Rung<'_> {
    fn mine(&self) -> Result<Session> {
        self.started.session(self.config, self.context)
    }

    fn theirs(&self, act: ActMode) -> Result<Session> {
        let mine = self.started.opened();
        let options =
            SessionOptions { act: Some(act), ..start::options(self.config, mine, self.context) };
        self.started.session_on(&Opened::Reference(mine.reference()), self.config, &options)
    }

    /// The second rung: logits after every token of the prompt. Gives the largest difference.
    fn steps(&self, tokens: &[u32], act: ActMode) -> Result<f32> {
        let vocab = self.started.model.plan().hyper.vocab as usize;
        let mine = self.mine()?.logits(tokens, true)?;
        let theirs = self.theirs(act)?.logits(tokens, true)?;
        let (mut most, mut sum) = (0.0_f32, 0.0_f64);
        for (a, b) in mine.iter().zip(&theirs) {
            let d = (a - b).abs();
            // NaN must not hide behind max.
            most = if d.is_nan() { f32::INFINITY } else { most.max(d) };
            sum += f64::from(d);
        }
        let rows = mine.chunks_exact(vocab).zip(theirs.chunks_exact(vocab));
        let same = rows.filter(|(a, b)| top(a).0 == top(b).0).count();
        let line = format!(
            "logits against {act:?} activations: max {most:.2e} mean {:.2e}, same first choice {same} of {}\n",
            sum / mine.len() as f64,
            tokens.len()
        );
        output::product(line.as_bytes())?;
        if !most.is_finite() || mine.len() != theirs.len() {
            bail!("the device gave logits that are not finite");
        }
        Ok(most)
    }

    /// The third rung: greedy tokens side by side. Gives the lead of the reference's choice where the two part.
    fn transcript(&self, tokens: &[u32], act: ActMode) -> Result<Option<f32>> {
        let mut oracle = self.theirs(act)?;
        let (mine, theirs) = (greedy(&mut self.mine()?, tokens)?, greedy(&mut oracle, tokens)?);
        let Some(at) = mine.iter().zip(&theirs).position(|(a, b)| a != b) else {
            output::product(format!("transcript of {TRANSCRIPT} tokens: the same\n").as_bytes())?;
            return Ok(None);
        };
        let row = oracle.logits(&[tokens, &theirs[..at]].concat(), false)?;
        let (best, lead) = top(&row);
        let line = format!(
            "transcript parts at token {at}: {} against {best}, whose lead is {lead:.3}\n",
            mine[at]
        );
        output::product(line.as_bytes())?;
        Ok(Some(lead))
    }
}

fn greedy(session: &mut Session, prompt: &[u32]) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    let request = Request {
        prompt,
        sample: SampleParams::default(),
        max_new: TRANSCRIPT as u32,
        stop: &[],
        sampler: None,
        logprobs: false,
    };
    session.generate(&request, |event| {
        if let Event::Token { token, .. } = event {
            ids.push(token);
        }
        ControlFlow::Continue(())
    })?;
    Ok(ids)
}

/// The likeliest token, the lowest id among equals, and its lead on the second.
fn top(row: &[f32]) -> (u32, f32) {
    let (mut id, mut best, mut second) = (0, f32::NEG_INFINITY, f32::NEG_INFINITY);
    for (i, &logit) in row.iter().enumerate() {
        if logit > best {
            (id, second, best) = (i as u32, best, logit);
        } else if logit > second {
            second = logit;
        }
    }
    (id, best - second)
}

#[cfg(test)]
mod tests {
    use super::top;

    #[test]
    fn the_first_choice_and_its_lead() {
        assert_eq!(top(&[1.0, 3.0, 2.5]), (1, 0.5));
        assert_eq!(top(&[3.0, 3.0, f32::NAN]), (0, 0.0));
        assert_eq!(top(&[-2.0, -1.0]), (1, 1.0));
    }
}
