//! Choosing from a row of logits on the host: constraints, the samplers that a device lacks, and
//! the likeliest tokens beside the chosen one. It knows one sequence at a time and no device.

use fornax_plan::TokenId;
use fornax_plan::sample::{self, Scratch, log_sum_exp};

use super::api::TokenUpdate;
use super::bits::BitSet;
use super::request::Seq;
use crate::error::{Error, Result};
use crate::sampler::Room;

/// What a row came to.
pub(super) enum Chosen {
    Token(TokenUpdate),
    /// The constraint is complete and nothing may follow.
    End,
}

/// Memory that choosing reuses.
pub(super) struct Chooser {
    allowed: BitSet,
    scratch: Scratch,
    room: Room,
    raw: Vec<f32>,
}

impl Chooser {
    pub(super) fn new(vocab: usize) -> Chooser {
        Chooser {
            allowed: BitSet::new(vocab),
            scratch: Scratch::with_capacity(vocab, 64),
            room: Room::default(),
            raw: Vec::new(),
        }
    }

    /// Chooses the token after the last one of a sequence. The row is changed.
    ///
    /// # Errors
    /// `is_request` where no token is usable or allowed.
    pub(super) fn choose(&mut self, seq: &mut Seq, row: &mut [f32]) -> Result<Chosen> {
        let sum = seq.logprobs.map(|_| log_sum_exp(row));
        let top = match (sum, seq.logprobs) {
            (Some(sum), Some(n)) => likeliest(row, usize::from(n), sum),
            _ => Vec::new(),
        };
        if sum.is_some() {
            self.raw.clear();
            self.raw.extend_from_slice(row);
        }
        if !self.restrict(seq, row)? {
            return Ok(Chosen::End);
        }
        let pos = seq.tokens.len() as u32;
        let id = match &mut seq.sampler {
            Some(sampler) => sampler.choose_in(&mut self.room, row, &seq.tokens, pos)?,
            None => sample::choose(row, &seq.sample, &seq.tokens, pos, &mut self.scratch)
                .map_err(|e| Error::request(e.to_string()))?,
        };
        let logprob = sum.map(|sum| (f64::from(self.raw[id as usize]) - sum) as f32);
        Ok(Chosen::Token(TokenUpdate { id, logprob, top }))
    }

    /// Forbids what the constraint does not allow; false where nothing is left because it is
    /// complete.
    fn restrict(&mut self, seq: &mut Seq, row: &mut [f32]) -> Result<bool> {
        let Some(constraint) = &mut seq.constraint else { return Ok(true) };
        self.allowed.clear();
        constraint.mask(&mut self.allowed)?;
        let may_end = constraint.may_end();
        for stop in &seq.stop {
            self.allowed.set(*stop, may_end);
        }
        if self.allowed.is_empty() {
            if may_end {
                return Ok(false);
            }
            return Err(Error::request(format!(
                "constrained output: after {} tokens no token is allowed, and the output is not \
                 complete",
                seq.generated()
            )));
        }
        for (logits, bits) in row.chunks_mut(32).zip(self.allowed.words()) {
            if *bits == u32::MAX {
                continue;
            }
            for (i, logit) in logits.iter_mut().enumerate() {
                if bits >> i & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        Ok(true)
    }
}

/// The `n` likeliest tokens of a row with their log-probabilities, best first, ties to the lowest
/// id. `sum` is the row's log of summed exponentials.
pub(super) fn likeliest(row: &[f32], n: usize, sum: f64) -> Vec<(TokenId, f32)> {
    let mut best: Vec<(TokenId, f32)> = Vec::with_capacity(n + 1);
    if n == 0 {
        return best;
    }
    for (id, v) in row.iter().enumerate().filter(|(_, v)| !v.is_nan()) {
        if best.len() == n && best.last().is_some_and(|(_, least)| v <= least) {
            continue;
        }
        let at = best.partition_point(|(_, b)| b >= v);
        best.insert(at, (id as TokenId, *v));
        best.truncate(n);
    }
    for (_, v) in &mut best {
        *v = (f64::from(*v) - sum) as f32;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::likeliest;

    #[test]
    fn the_likeliest_come_best_first_and_ties_by_id() {
        let row = [1.0, f32::NAN, 3.0, 3.0, 2.0, f32::NEG_INFINITY];
        let ids = |n| likeliest(&row, n, 0.0).iter().map(|t| t.0).collect::<Vec<_>>();
        assert!(ids(0).is_empty());
        assert_eq!(ids(1), [2]);
        assert_eq!(ids(3), [2, 3, 4]);
        assert_eq!(ids(99), [2, 3, 4, 0, 5]);
    }
}
