//! Guessing how a sequence goes on from what it said before: the tokens that followed the last
//! occurrence of its end. It knows tokens alone; the step that verifies a guess is the engine's.

use fornax_plan::TokenId;

/// Tokens of one guess at most; with the token before them they fill a kernel of eight rows.
pub(crate) const DRAFT_MAX: usize = 7;
/// How far back an occurrence is looked for.
const REACH: usize = 4096;
/// Tokens that must agree before a guess is made.
const AGREE: usize = 3;
/// Agreement beyond which a longer one is no better.
const ENOUGH: usize = 8;

/// What guessing has been worth to one sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    /// Share of guessed tokens that were right, newer ones counting more.
    rate: f32,
    /// Guesses in a row of which nothing was right.
    misses: u32,
    /// Steps to wait before the next guess.
    pause: u32,
}

impl Default for Record {
    fn default() -> Record {
        Record { rate: 0.5, misses: 0, pause: 0 }
    }
}

impl Record {
    /// Right tokens to expect of one guessed token; 0 while it waits.
    pub(crate) fn worth(&mut self) -> f32 {
        if self.pause > 0 {
            self.pause -= 1;
            return 0.0;
        }
        self.rate
    }

    /// Notes how a guess fared.
    pub(crate) fn note(&mut self, drafted: usize, accepted: usize) {
        self.rate = 0.8 * self.rate + 0.2 * accepted as f32 / drafted.max(1) as f32;
        if accepted > 0 {
            self.misses = 0;
        } else {
            self.misses = (self.misses + 1).min(6);
            self.pause = 1 << self.misses;
            self.rate = self.rate.max(0.1);
        }
    }
}

/// Replaces `guess` by up to `most` tokens that followed the longest and latest earlier
/// occurrence of the end of `tokens`.
pub(crate) fn look_up(tokens: &[TokenId], most: usize, guess: &mut Vec<TokenId>) {
    guess.clear();
    let n = tokens.len();
    let Some(last) = tokens.last() else { return };
    let (mut best, mut best_at) = (AGREE - 1, 0);
    for at in (n.saturating_sub(REACH)..n - 1).rev() {
        if tokens[at] != *last {
            continue;
        }
        let back = tokens[..=at].iter().rev().zip(tokens.iter().rev());
        let same = back.take(ENOUGH).take_while(|(a, b)| a == b).count();
        if same > best {
            (best, best_at) = (same, at);
            if same == ENOUGH {
                break;
            }
        }
    }
    if best >= AGREE {
        // What follows may run into the end itself: then it repeats.
        guess.extend((0..most).map(|i| tokens[best_at + 1 + i % (n - 1 - best_at)]));
    }
}

#[cfg(test)]
mod tests {
    use super::{Record, look_up};

    fn guess(tokens: &[u32], most: usize) -> Vec<u32> {
        let mut out = vec![9];
        look_up(tokens, most, &mut out);
        out
    }

    #[test]
    fn the_longest_and_latest_occurrence_goes_on() {
        assert!(guess(&[], 4).is_empty());
        assert!(guess(&[1, 2, 3], 4).is_empty());
        assert_eq!(guess(&[1, 2, 3, 4, 5, 1, 2, 3], 3), [4, 5, 1]);
        // The later one of equals.
        assert_eq!(guess(&[1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1), [8]);
        // The longer one, though earlier.
        assert_eq!(guess(&[6, 1, 2, 3, 7, 1, 2, 3, 8, 6, 1, 2, 3], 1), [7]);
        assert!(guess(&[2, 3, 4, 2, 3], 4).is_empty(), "two tokens are too few");
    }

    #[test]
    fn a_loop_goes_round() {
        assert_eq!(guess(&[5, 5, 5, 5], 3), [5, 5, 5]);
        assert_eq!(guess(&[1, 2, 1, 2, 1, 2], 5), [1, 2, 1, 2, 1]);
    }

    #[test]
    fn misses_make_it_wait_longer_each_time() {
        let mut r = Record::default();
        let mut waits = Vec::new();
        for _ in 0..4 {
            r.note(7, 0);
            waits.push((0..).take_while(|_| r.worth() == 0.0).count());
        }
        assert_eq!(waits, [2, 4, 8, 16]);
        r.note(7, 7);
        assert!(r.worth() > 0.2);
    }
}
