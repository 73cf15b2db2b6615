//! What the host remembers of every slot: the tokens by position and where the last chosen one
//! is. Draws are made here, from logits that the device handed over. It knows no driver.

use fornax_plan::{Limits, Result, SampleParams, SlotId, TokenId, TokenOut, sample};

use crate::feed::Last;

/// The slots of a program.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    scratch: sample::Scratch,
    /// A row of logits that penalties may change.
    row: Vec<f32>,
}

#[derive(Debug)]
struct Slot {
    /// Tokens at positions 0 .. as far as the host has seen them.
    history: Vec<TokenId>,
    last: Last,
}

impl Slots {
    pub(crate) fn new(limits: &Limits, vocab: usize, context: u32) -> Slots {
        let room = context.min(1 << 16) as usize + 1;
        let slot = || Slot { history: Vec::with_capacity(room), last: Last::Nowhere };
        Slots {
            slots: (0..limits.slots).map(|_| slot()).collect(),
            scratch: sample::Scratch::with_capacity(vocab, room),
            row: Vec::with_capacity(vocab),
        }
    }

    /// Where the slot's last chosen token is.
    pub(crate) fn last(&self, slot: SlotId) -> Last {
        self.slots.get(slot.ix()).map_or(Last::Nowhere, |s| s.last)
    }

    /// The slot's next token is the device's to choose.
    pub(crate) fn leave_to_device(&mut self, slot: SlotId) {
        self.slots[slot.ix()].last = Last::Device;
    }

    /// Notes the token at a position; whatever was behind it is gone.
    pub(crate) fn note(&mut self, slot: SlotId, pos: u32, token: TokenId) {
        let history = &mut self.slots[slot.ix()].history;
        history.truncate(pos as usize);
        history.push(token);
    }

    /// Notes a chosen token; `newest` where no step under way will choose another.
    pub(crate) fn chosen(&mut self, slot: SlotId, pos: u32, token: TokenId, newest: bool) {
        self.note(slot, pos, token);
        if newest {
            self.slots[slot.ix()].last = Last::Host(token);
        }
    }

    /// Chooses the token behind position `pos` from a row of logits.
    ///
    /// # Errors
    /// `is_malformed` when no logit is usable.
    pub(crate) fn choose(
        &mut self,
        slot: SlotId,
        pos: u32,
        logits: &[u32],
        params: Option<SampleParams>,
        logprob: bool,
    ) -> Result<TokenOut> {
        let Slots { slots, scratch, row } = self;
        row.clear();
        row.extend(logits.iter().map(|w| f32::from_bits(*w)));
        let history = &slots[slot.ix()].history;
        let known = &history[..history.len().min(pos as usize + 1)];
        let params = params.unwrap_or_default();
        // Of the row as it came: penalties change it.
        let lse = logprob.then(|| sample::log_sum_exp(row));
        let token = sample::choose(row, &params, known, pos + 1, scratch)?;
        let logit = f64::from(f32::from_bits(logits[token as usize]));
        let logprob = lse.map_or(f32::NAN, |lse| (logit - lse) as f32);
        Ok(TokenOut { seq: 0, pos: pos + 1, token, logprob })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fornax_plan::KvType;

    fn slots() -> Slots {
        let kv_type = KvType::F16;
        let limits = Limits {
            slots: 2,
            rows: 4,
            wanted: 4,
            kv_blocks: 4,
            kv_type,
            act: None,
            ..Limits::default()
        };
        Slots::new(&limits, 4, 100)
    }

    #[test]
    fn penalties_see_the_tokens_up_to_the_row_and_no_further() {
        let mut slots = slots();
        let slot = SlotId(1);
        for (pos, token) in [3, 2, 2].into_iter().enumerate() {
            slots.note(slot, pos as u32, token);
        }
        let row = [1.0f32, 0.5, 2.0, 1.5].map(f32::to_bits);
        let params = SampleParams { presence_penalty: 10.0, ..SampleParams::default() };
        let at =
            |slots: &mut Slots, pos| slots.choose(slot, pos, &row, Some(params), true).unwrap();
        assert_eq!(at(&mut slots, 0).token, 2, "token 3 alone was there");
        let chosen = at(&mut slots, 2);
        assert_eq!((chosen.token, chosen.pos), (0, 3), "2 and 3 were there");
        let z: f64 = [1.0f64, 0.5, 2.0, 1.5].iter().map(|v| v.exp()).sum();
        assert!((f64::from(chosen.logprob) - (1.0 - z.ln())).abs() < 1e-6, "of the row as it came");
        slots.note(slot, 1, 0);
        assert_eq!(at(&mut slots, 2).token, 2, "what was behind position 1 is gone");
    }

    #[test]
    fn a_token_is_here_only_when_no_step_under_way_chooses_another() {
        let mut slots = slots();
        let slot = SlotId(0);
        assert_eq!(slots.last(slot), Last::Nowhere);
        assert_eq!(slots.last(SlotId(9)), Last::Nowhere);
        slots.leave_to_device(slot);
        slots.chosen(slot, 0, 3, false);
        assert_eq!(slots.last(slot), Last::Device);
        slots.chosen(slot, 1, 2, true);
        assert_eq!(slots.last(slot), Last::Host(2));
    }
}
