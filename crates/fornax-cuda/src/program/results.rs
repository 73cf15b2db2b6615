//! What a ticket gave: waited for in order, taken out of the words that the device wrote, and noted in the slots' memories;
//! and what the device must be told of before a step that looks at them. It launches nothing.

use fornax_plan::{Error, Result, RowOut, SeqStep, TokenOut, Want, sample};

use super::CudaProgram;
use crate::driver::Pinned;
use crate::feed::{CHOSEN, NONE, OUT, ROW, UNUSABLE};

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

    /// What the device chose, and the rows that the host wants.
    fn collect(&mut self, frame: usize) -> Result<()> {
        let f = &mut self.frames[frame];
        let out = &mut f.result;
        let (batch, words) = (&f.feed.batch, f.out.words());
        let (first, next) = self.shape.out_counts();
        let mut token = |seq: u32, at: usize| {
            let [token, logprob, state, pos] = [0, 1, 2, 3].map(|i| words[at * OUT + i]);
            if state == UNUSABLE {
                return Err(Error::malformed(format!(
                    "sampling: no usable logit at position {pos} (all NaN or -inf)"
                )));
            }
            if state == CHOSEN {
                out.tokens.push(TokenOut { seq, pos, token, logprob: f32::from_bits(logprob) });
            }
            Ok(())
        };
        for (ix, wanted) in batch.wanted.iter().enumerate() {
            if matches!(wanted.want, Want::Token { .. }) {
                token(batch.rows[wanted.row as usize].seq, ix)?;
            }
        }
        for round in 1..f.feed.rounds as usize {
            for (ix, seq) in f.feed.chain.iter().enumerate() {
                token(*seq, first + (round - 1) * next + ix)?;
            }
        }
        out.tokens.sort_by_key(|t| (t.seq, t.pos));
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
