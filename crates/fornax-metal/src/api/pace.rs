//! Where a command buffer is to end so that the display and the watchdog do not wait for it. It knows predicted seconds, and
//! corrects them by what was measured.

/// A command buffer may run so long, seconds. Longer ones make the display stutter and are killed in the end.
const BUDGET_S: f64 = 0.1;

/// Learns how far predictions are off.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Measured over predicted.
    factor: f64,
    budget_s: f64,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { factor: 1.0, budget_s: BUDGET_S }
    }
}

impl Pace {
    /// Sets the budget where it is not the usual one.
    pub(super) fn set(&mut self, budget_s: Option<f64>) {
        self.budget_s = budget_s.unwrap_or(BUDGET_S);
    }

    /// Predicted seconds that fill a command buffer.
    pub(crate) fn most(&self) -> f64 {
        self.budget_s / self.factor
    }

    /// Takes note of seconds measured for those predicted, all of a command buffer.
    pub(super) fn learn(&mut self, plain_s: f64, measured_s: f64) {
        // Short ones measure the overhead, not the pace.
        if plain_s > 1e-3 && measured_s > 1e-3 && measured_s.is_finite() {
            let seen = (measured_s / plain_s).clamp(0.01, 100.0);
            self.factor = 0.75 * self.factor + 0.25 * seen;
        }
    }

    /// Writes before which of the commands, given by place and predicted seconds, a new command buffer begins.
    pub(super) fn cuts(&self, commands: impl Iterator<Item = (usize, f64)>, cuts: &mut Vec<usize>) {
        cuts.clear();
        let (mut sum, most) = (0.0, self.most());
        for (at, s) in commands {
            if sum > 0.0 && sum + s > most {
                cuts.push(at);
                sum = 0.0;
            }
            sum += s;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::Work;

    fn cuts(pace: &Pace, seconds: f64) -> Vec<usize> {
        let mut cuts = Vec::new();
        pace.cuts((0..32).map(|at| (at, seconds)), &mut cuts);
        cuts
    }

    #[test]
    fn a_token_is_one_command_buffer_and_a_long_prompt_is_not() {
        let mut pace = Pace::default();
        // 32 layers of Llama-8B in 4-bit blocks.
        let layer = Work::product(140_000_000);
        assert!(cuts(&pace, layer.seconds(1, 0)).is_empty(), "4.5 GB at 60 GB/s");
        let plain = layer.seconds(512, 0);
        let many = cuts(&pace, plain);
        assert!(many.len() > 20, "{many:?}");
        // A chip eight times as fast is cut less often once it has shown that.
        (0..40).for_each(|_| pace.learn(plain, plain / 8.0));
        assert!(cuts(&pace, plain).len() < many.len() / 4, "{:?}", cuts(&pace, plain));
    }

    #[test]
    fn a_budget_of_nothing_cuts_before_every_command_that_reads() {
        let mut pace = Pace::default();
        pace.set(Some(0.0));
        assert_eq!(cuts(&pace, 1e-9), (1..32).collect::<Vec<_>>());
        assert!(cuts(&pace, 0.0).is_empty(), "nothing is predicted of it");
    }

    #[test]
    fn times_too_short_to_tell_teach_nothing() {
        let mut pace = Pace::default();
        pace.learn(1e-6, 1.0);
        pace.learn(1.0, f64::NAN);
        assert!((pace.factor - 1.0).abs() < 1e-12);
    }
}
