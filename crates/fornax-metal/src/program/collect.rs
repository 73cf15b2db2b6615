//! What a step hands back: four bytes for a token, eight with its log-probability, and rows only where
//! somebody asked for them. It knows no command.

use fornax_plan::{Error, Op, Plan, Result, RowOut, StepOutput, TokenOut, Want, sample};

use super::{Frame, MetalProgram};
use crate::api::{Buffer, Device};
use crate::feed::{NONE, UNUSABLE};

impl MetalProgram {
    /// Reads what there is of a frame's results; returns the bytes that came back.
    ///
    /// # Errors
    /// `is_malformed` where a row had no usable logit or the plan computes no such rows.
    pub(super) fn collect(&mut self, frame: usize, out: &mut StepOutput) -> Result<u64> {
        out.clear();
        let MetalProgram { device, shape, frames, plan, words, floats, .. } = self;
        let Frame { feed, out: outs, .. } = &frames[frame];
        let mut choices = Choices { device, outs: *outs, all: shape.choices(), read: 0 };
        let (first, next) = shape.out_counts();
        for (ix, wanted) in feed.batch.wanted.iter().enumerate() {
            if let Want::Token { logprob } = wanted.want {
                let row = feed.batch.rows[wanted.row as usize];
                out.tokens.extend(choices.token(ix, row.seq, row.pos + 1, logprob)?);
            }
        }
        for round in 1..feed.rounds {
            for (ix, chain) in feed.chain.iter().enumerate() {
                let at = first + (round as usize - 1) * next + ix;
                let pos = chain.pos + round;
                out.tokens.extend(choices.token(at, chain.seq, pos, chain.logprob)?);
            }
        }
        let mut read = choices.read;
        out.tokens.sort_unstable_by_key(|t| (t.seq, t.pos));
        let Frame { feed, logits, hidden, .. } = &frames[frame];
        let (vocab, width) = widths(plan);
        for (ix, wanted) in feed.batch.wanted.iter().enumerate() {
            let at = feed.batch.rows[wanted.row as usize];
            let at = RowOut { seq: at.seq, pos: at.pos };
            let lacks = |what: &str| Error::malformed(format!("step: the plan computes no {what}"));
            let (buffer, len) = match wanted.want {
                Want::Token { .. } => continue,
                Want::Hidden if width == 0 => return Err(lacks("hidden rows")),
                Want::Hidden => (*hidden, width),
                _ if vocab == 0 => return Err(lacks("logits")),
                _ => (*logits, vocab),
            };
            words.resize(len, 0);
            device.read(buffer, ix * len, words);
            read += 4 * len as u64;
            let row = words.iter().map(|w| f32::from_bits(*w));
            match wanted.want {
                Want::Hidden => {
                    out.hidden.extend(row);
                    out.hidden_rows.push(at);
                }
                Want::LogprobOf(id) => {
                    floats.clear();
                    floats.extend(row);
                    out.logprobs.push((at, sample::logprob_of(floats, id)));
                }
                _ => {
                    out.logits.extend(row);
                    out.logit_rows.push(at);
                }
            }
        }
        Ok(read)
    }
}

/// A ticket's choices on the device.
struct Choices<'a> {
    device: &'a Device,
    outs: Buffer,
    all: usize,
    /// Bytes read so far.
    read: u64,
}

impl Choices<'_> {
    /// The token of choice `at`, if there is one by now.
    fn token(&mut self, at: usize, seq: u32, pos: u32, logprob: bool) -> Result<Option<TokenOut>> {
        let token = self.word(at);
        if token == NONE {
            return Ok(None);
        }
        if token == UNUSABLE {
            return Err(Error::malformed(format!(
                "sampling: no usable logit at position {pos} (all NaN or -inf)"
            )));
        }
        let logprob = if logprob { f32::from_bits(self.word(self.all + at)) } else { f32::NAN };
        Ok(Some(TokenOut { seq, pos, token, logprob }))
    }

    fn word(&mut self, at: usize) -> u32 {
        let mut word = [0];
        self.device.read(self.outs, at, &mut word);
        self.read += 4;
        word[0]
    }
}

/// Elements of a row of logits and of a hidden row; 0 where the plan hands none out.
pub(super) fn widths(plan: &Plan) -> (usize, usize) {
    let (mut vocab, mut width) = (0, 0);
    for op in &plan.ops {
        match op {
            Op::Logits { out, .. } => vocab = plan.width(*out) as usize,
            Op::HiddenOut { x } => width = plan.width(*x) as usize,
            _ => {}
        }
    }
    (vocab, width)
}
