//! What the host remembers of every slot: whether it has chosen a token, the tokens by position, and how far the device has
//! them too, which only penalties ask for. It knows no driver.

use fornax_plan::{Limits, SlotId, TokenId};

/// The slots of a program.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
}

#[derive(Debug, Default)]
struct Slot {
    /// Tokens from position `start` on, as far as the host has seen them.
    history: Vec<TokenId>,
    start: u32,
    /// The device's history has the tokens from `start` up to this position, once the steps submitted have run.
    there: u32,
    /// A step that was submitted chooses a token.
    known: bool,
}

impl Slot {
    fn end(&self) -> u32 {
        self.start + self.history.len() as u32
    }

    fn begin_at(&mut self, pos: u32) {
        self.history.clear();
        self.start = pos;
    }
}

impl Slots {
    pub(crate) fn new(limits: &Limits, context: u32) -> Slots {
        let room = context.min(1 << 16) as usize + 1;
        let slot = || Slot { history: Vec::with_capacity(room), ..Slot::default() };
        Slots { slots: (0..limits.slots).map(|_| slot()).collect() }
    }

    /// Whether the slot has chosen a token, or will have.
    pub(crate) fn known(&self, slot: SlotId) -> bool {
        self.slots.get(slot.ix()).is_some_and(|s| s.known)
    }

    /// A step that was submitted chooses a token for the slot.
    pub(crate) fn chooses(&mut self, slot: SlotId) {
        self.slots[slot.ix()].known = true;
    }

    /// The first position whose token is known.
    pub(crate) fn start(&self, slot: SlotId) -> u32 {
        self.slots.get(slot.ix()).map_or(0, |s| s.start)
    }

    /// Notes the token at a position; whatever was behind it is gone.
    pub(crate) fn note(&mut self, slot: SlotId, pos: u32, token: TokenId) {
        let s = &mut self.slots[slot.ix()];
        if pos < s.start || pos > s.end() {
            s.begin_at(pos);
        }
        s.history.truncate((pos - s.start) as usize);
        s.history.push(token);
    }

    /// Whether the device lacks tokens before a position that penalties are to look at.
    pub(crate) fn behind(&self, slot: SlotId, pos: u32) -> bool {
        self.slots.get(slot.ix()).is_some_and(|s| pos < s.start || s.there.max(s.start) < pos)
    }

    /// The tokens that the device lacks before a position, and where they begin. What the host has not seen either is unknown
    /// from then on.
    pub(crate) fn missing(&mut self, slot: SlotId, pos: u32) -> (u32, &[TokenId]) {
        let s = &mut self.slots[slot.ix()];
        if pos < s.start || pos > s.end() {
            s.begin_at(pos);
        }
        let from = s.there.clamp(s.start, pos.max(s.start));
        (from, &s.history[(from - s.start) as usize..(pos - s.start) as usize])
    }

    /// A step was submitted that has `rows` tokens from a position on, and chooses `more` of which it runs all but one.
    pub(crate) fn submitted(&mut self, slot: SlotId, pos: u32, rows: u32, more: u32, noted: bool) {
        let s = &mut self.slots[slot.ix()];
        if pos < s.start {
            s.begin_at(pos);
        }
        s.there = if noted { pos + rows + more - 1 } else { s.there.min(pos) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots() -> Slots {
        Slots::new(&Limits { slots: 2, ..Limits::default() }, 100)
    }

    #[test]
    fn only_what_the_device_lacks_is_missing() {
        let mut s = slots();
        let slot = SlotId(1);
        s.submitted(slot, 0, 3, 1, false);
        (0..3).for_each(|pos| s.note(slot, pos, 10 + pos));
        assert!(s.behind(slot, 3));
        assert_eq!(s.missing(slot, 3), (0, &[10, 11, 12][..]));
        s.submitted(slot, 3, 1, 4, true);
        assert!(!s.behind(slot, 7), "the device noted what it chose and ran");
        s.submitted(slot, 4, 2, 1, false);
        [(3, 20), (4, 21), (5, 22)].into_iter().for_each(|(pos, token)| s.note(slot, pos, token));
        assert_eq!(s.missing(slot, 6), (4, &[21, 22][..]), "what was rolled back is not there");
    }

    #[test]
    fn a_history_begins_where_the_device_first_saw_a_token() {
        let mut s = slots();
        let slot = SlotId(0);
        assert!(!s.known(slot) && !s.known(SlotId(9)));
        s.chooses(slot);
        assert!(s.known(slot));
        assert_eq!(s.missing(slot, 40), (40, &[][..]), "a prompt found in the cache");
        s.submitted(slot, 40, 1, 1, true);
        s.note(slot, 40, 7);
        assert_eq!((s.start(slot), s.behind(slot, 41)), (40, false));
        s.submitted(slot, 0, 2, 1, true);
        assert_eq!(s.start(slot), 0, "another sequence");
        s.note(slot, 0, 1);
        s.note(slot, 5, 2);
        assert_eq!(s.start(slot), 5);
    }
}
