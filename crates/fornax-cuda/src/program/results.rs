//! What a ticket gave: waited for in order, taken out of the words that the device wrote, and noted in the slots' memories;
//! what is there of it before its end; and what the device must be told of before a step that looks at them. It launches nothing.

use fornax_plan::{Error, Result, RowOut, SeqStep, StepOutput, TokenOut, Want, sample};

use super::{CudaProgram, Frame};
use crate::driver::Pinned;
use crate::feed::{self, CHOSEN, NONE, OUT, ROW, Shape, UNUSABLE};

impl Frame {
    /// Adds the tokens among the outputs that are `whole`.
    fn tokens(
        &self,
        words: &[u32],
        shape: &Shape,
        whole: impl Fn(usize) -> bool,
        tokens: &mut Vec<TokenOut>,
    ) -> Result<()> {
        let batch = &self.feed.batch;
        let (first, next) = shape.out_counts();
        let mut token = |seq: u32, at: usize| {
            let [token, logprob, state, pos] = [0, 1, 2, 3].map(|i| words[at * OUT + i]);
            let outcome = feed::outcome(state, self.ticket);
            match if outcome != 0 && whole(at) { outcome } else { 0 } {
                UNUSABLE => {
                    return Err(Error::malformed(format!(
                        "sampling: no usable logit at position {pos} (all NaN or -inf)"
                    )));
                }
                CHOSEN => {
                    tokens.push(TokenOut { seq, pos, token, logprob: f32::from_bits(logprob) });
                }
                _ => {}
            }
            Ok(())
        };
        for (ix, wanted) in batch.wanted.iter().enumerate() {
            if matches!(wanted.want, Want::Token { .. }) {
                token(batch.rows[wanted.row as usize].seq, ix)?;
            }
        }
        for round in 1..self.feed.rounds as usize {
            for (ix, seq) in self.feed.chain.iter().enumerate() {
                token(*seq, first + (round - 1) * next + ix)?;
            }
        }
        Ok(())
    }
}

impl CudaProgram {
    /// Waits for the flights up to number `at` and takes their results in, in order.
    pub(super) fn see(&mut self, at: usize) -> Result<()> {
        for ix in 0..=at {
            let flight = self.flights[ix];
            if flight.seen {
                continue;
            }
            self.frames[flight.frame].done.wait()?;
            self.flights[ix].seen = true;
            self.frames[flight.frame].result.clear();
            self.frames[flight.frame].failed = self.take_in(flight.frame).err();
        }
        Ok(())
    }

    /// All flights: what a step needs whose penalties look at tokens that the host has still to see.
    fn see_all(&mut self) -> Result<()> {
        if self.flights.is_empty() { Ok(()) } else { self.see(self.flights.len() - 1) }
    }

    /// Takes in what a flight gave: the frame's results, and the slots' memories.
    fn take_in(&mut self, frame: usize) -> Result<()> {
        let CudaProgram { frames, slots, .. } = self;
        let f = &mut frames[frame];
        let batch = &f.feed.batch;
        for span in &batch.spans {
            for row in span.start..span.start + span.rows {
                let token = f.feed.words[row as usize * ROW];
                // What the device chose is noted already, when it was chosen.
                if token != NONE {
                    slots.note(span.slot, batch.rows[row as usize].pos, token);
                }
            }
        }
        self.collect(frame)?;
        let CudaProgram { frames, slots, .. } = self;
        let f = &mut frames[frame];
        for span in &f.feed.batch.spans {
            for t in f.result.tokens.iter().filter(|t| t.seq == span.seq) {
                slots.note(span.slot, t.pos, t.token);
            }
        }
        Ok(())
    }

    /// Gives the device the tokens that penalties are to look at and that it does not have.
    pub(super) fn remember(&mut self, step: &[SeqStep<'_>]) -> Result<()> {
        let penalised = |s: &&SeqStep<'_>| s.sample.is_some_and(|p| p.penalises());
        let behind = |p: &CudaProgram, s: &SeqStep<'_>| p.slots.behind(s.slot, s.pos);
        for seq in step.iter().filter(penalised) {
            if !behind(self, seq) {
                continue;
            }
            self.see_all()?;
            let (from, tokens) = self.slots.missing(seq.slot, seq.pos);
            let room = self.shape.remembered.saturating_sub(from as usize).min(tokens.len());
            let bytes: Vec<u8> = tokens[..room].iter().flat_map(|t| t.to_le_bytes()).collect();
            if !bytes.is_empty() {
                let at = seq.slot.ix() * self.shape.remembered + from as usize;
                self.gpu.write(self.prepared.history + 4 * at as u64, &bytes)?;
            }
        }
        Ok(())
    }

    /// The tokens of a ticket that the device has chosen up to now, while it runs. Nothing else of it is there yet.
    ///
    /// An output that was being written while it was copied is not believed: only what the look before this one saw, too.
    pub(super) fn so_far(&mut self, frame: usize, out: &mut StepOutput) -> Result<()> {
        let CudaProgram { frames, glances, prepared, gpu, shape, .. } = self;
        let f = &frames[frame];
        glances.swap(0, 1);
        let [now, before] = glances;
        let words = f.feed.out_len(shape);
        gpu.peek(prepared.out.ptr, now, words)?;
        let (now, before) = (&now.words()[..words], &before.words()[..words]);
        let same = |at: usize| now[at * OUT..][..OUT] == before[at * OUT..][..OUT];
        // What cannot be used is told at the end.
        let _ = f.tokens(now, shape, same, &mut out.tokens);
        out.tokens.sort_by_key(|t| (t.seq, t.pos));
        Ok(())
    }

    /// What the device chose, and the rows that the host wants.
    fn collect(&mut self, frame: usize) -> Result<()> {
        let f = &mut self.frames[frame];
        let mut tokens = std::mem::take(&mut f.result.tokens);
        let chosen = f.tokens(f.out.words(), &self.shape, |_| true, &mut tokens);
        f.result.tokens = tokens;
        chosen?;
        let out = &mut f.result;
        out.tokens.sort_by_key(|t| (t.seq, t.pos));
        let batch = &f.feed.batch;
        for (ix, wanted) in batch.wanted.iter().enumerate() {
            let at = batch.rows[wanted.row as usize];
            let at = RowOut { seq: at.seq, pos: at.pos };
            let row = |rows: &Option<(usize, Pinned)>, width: usize, what: &str| match rows {
                Some((_, p)) if width > 0 => {
                    let words = &p.words()[ix * width..][..width];
                    Ok(words.iter().map(|w| f32::from_bits(*w)).collect::<Vec<_>>())
                }
                _ => Err(Error::malformed(format!("step: the plan computes no {what}"))),
            };
            match wanted.want {
                Want::Token { .. } => {}
                Want::Logits => {
                    out.logits.extend(row(&f.logits, self.vocab, "logits")?);
                    out.logit_rows.push(at);
                }
                Want::LogprobOf(id) => {
                    let logits = row(&f.logits, self.vocab, "logits")?;
                    out.logprobs.push((at, sample::logprob_of(&logits, id)));
                }
                Want::Hidden => {
                    out.hidden.extend(row(&f.hidden, self.width, "hidden rows")?);
                    out.hidden_rows.push(at);
                }
            }
        }
        Ok(())
    }
}
