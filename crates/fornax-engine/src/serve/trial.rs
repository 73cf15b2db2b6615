//! Whether guessing ahead pays where a device runs one step behind another: a step with guesses has to know its tokens
//! first, so it waits for the one before, and no estimate from single steps shows what that costs. So both ways are tried
//! now and then, and the one that gave more tokens a millisecond is kept. It reads no clock.

/// Decoding steps of each try, and those of them that do not count: what was handed over before a change runs after it.
const TRY: u32 = 16;
const WARM: u32 = 3;
/// Decoding steps for which the better way is kept.
const KEEP: u32 = 480;

/// The tries, and what came of the last ones.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Trial {
    /// Decoding steps since the tries began.
    steps: u32,
    /// Sequences that decoded when they began.
    rows: usize,
    /// Tokens and milliseconds, with guesses and without.
    sums: [(f64, f64); 2],
}

impl Trial {
    /// Whether the next step may guess.
    pub(crate) fn guesses(&self) -> bool {
        if self.steps < 2 * TRY {
            return self.steps < TRY;
        }
        let rate = |(tokens, ms): (f64, f64)| tokens / ms.max(1e-6);
        rate(self.sums[0]) >= rate(self.sums[1])
    }

    /// Notes a step that decoded only, of so many sequences.
    pub(crate) fn note(&mut self, rows: usize, tokens: u64, ms: f64) {
        // Half or twice as many sequences are another matter.
        if self.steps >= 2 * TRY + KEEP || rows > 2 * self.rows || 2 * rows < self.rows {
            *self = Trial { rows, ..Trial::default() };
        }
        let (at, sum) = (self.steps % TRY, self.sums.get_mut((self.steps / TRY) as usize));
        if let (WARM.., Some(sum)) = (at, sum) {
            *sum = (sum.0 + tokens as f64, sum.1 + ms);
        }
        self.steps += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::{KEEP, TRY, Trial};

    /// Steps of eight sequences: with guesses, and without.
    fn run(trial: &mut Trial, steps: u32, [with, without]: [(u64, f64); 2]) -> u32 {
        (0..steps)
            .filter(|_| {
                let guesses = trial.guesses();
                let (tokens, ms) = if guesses { with } else { without };
                trial.note(8, tokens, ms);
                guesses
            })
            .count() as u32
    }

    #[test]
    fn the_way_that_gives_more_is_kept_and_tried_anew() {
        let mut trial = Trial::default();
        let (good, bad) = ([(24, 2.0), (8, 1.0)], [(10, 4.0), (8, 1.5)]);
        assert_eq!(run(&mut trial, 2 * TRY, good), TRY, "each is tried");
        assert_eq!(run(&mut trial, KEEP, good), KEEP);
        // The load changes: the next tries find it out.
        assert_eq!(run(&mut trial, 2 * TRY, bad), TRY);
        assert_eq!(run(&mut trial, KEEP, bad), 0);
        // The first step of a try is still of the old way.
        assert_eq!(run(&mut trial, 2 * TRY + KEEP, good), TRY - 1 + KEEP);
    }

    #[test]
    fn many_more_sequences_are_another_matter() {
        let mut trial = Trial::default();
        run(&mut trial, 2 * TRY + 20, [(10, 4.0), (8, 1.5)]);
        assert!(!trial.guesses());
        trial.note(9, 9, 1.5);
        assert!(!trial.guesses(), "one more is not");
        trial.note(30, 30, 2.0);
        assert!(trial.guesses(), "tried anew");
    }
}
