//! How long a command will run, and where a command buffer is to end so that the display and the watchdog do not
//! wait for it. It knows rows and bytes; what it predicts it corrects by what was measured.

/// A command buffer may run so long, seconds. Longer ones make the display stutter and are killed in the end.
const BUDGET_S: f64 = 0.1;
/// Bytes that the slowest chip (M1) reads in a second.
const BYTES_PER_S: f64 = 60e9;
/// Weight bytes times rows that it multiplies in a second, as matrices of 8-bit blocks.
const ROW_BYTES_PER_S: f64 = 600e9;

/// Predicts and learns.
#[derive(Debug)]
pub(super) struct Pace {
    /// Bytes that one row of a command reads, by label.
    bytes: Vec<u64>,
    /// Measured over predicted.
    factor: f64,
    budget_s: f64,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { bytes: Vec::new(), factor: 1.0, budget_s: BUDGET_S }
    }
}

impl Pace {
    /// Says how many bytes a row of each label's commands reads, and the budget where it is not the usual one.
    pub(super) fn set(&mut self, bytes: Vec<u64>, budget_s: Option<f64>) {
        self.bytes = bytes;
        self.budget_s = budget_s.unwrap_or(BUDGET_S);
    }

    /// Seconds that a command of so many rows takes on the slowest chip.
    pub(super) fn plain(&self, label: u32, rows: u32) -> f64 {
        let bytes = self.bytes.get(label as usize).copied().unwrap_or(0) as f64;
        bytes * (1.0 / BYTES_PER_S + f64::from(rows.saturating_sub(1)) / ROW_BYTES_PER_S)
    }

    /// Takes note of seconds measured for what [`Pace::plain`] gave, all of a command buffer.
    pub(super) fn learn(&mut self, plain_s: f64, measured_s: f64) {
        // Short ones measure the overhead, not the pace.
        if plain_s > 1e-3 && measured_s > 1e-3 && measured_s.is_finite() {
            let seen = (measured_s / plain_s).clamp(0.01, 100.0);
            self.factor = 0.75 * self.factor + 0.25 * seen;
        }
    }

    /// Writes before which of the commands a new command buffer begins.
    pub(super) fn cuts(
        &self,
        commands: impl Iterator<Item = (usize, u32, u32)>,
        cuts: &mut Vec<usize>,
    ) {
        cuts.clear();
        let mut sum = 0.0;
        for (at, label, rows) in commands {
            let s = self.factor * self.plain(label, rows);
            if sum > 0.0 && sum + s > self.budget_s {
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

    fn cuts(pace: &Pace, rows: u32) -> Vec<usize> {
        let mut cuts = Vec::new();
        pace.cuts((0..32).map(|at| (at, 0, rows)), &mut cuts);
        cuts
    }

    #[test]
    fn a_token_is_one_command_buffer_and_a_long_prompt_is_not() {
        let mut pace = Pace::default();
        // 32 layers of Llama-8B in 4-bit blocks.
        pace.set(vec![140_000_000], None);
        assert!(cuts(&pace, 1).is_empty(), "4.5 GB at 60 GB/s");
        let many = cuts(&pace, 512);
        assert!(many.len() > 20, "{many:?}");
        // A chip eight times as fast is cut less often once it has shown that.
        for _ in 0..40 {
            let plain = pace.plain(0, 512);
            pace.learn(plain, plain / 8.0);
        }
        assert!(cuts(&pace, 512).len() < many.len() / 4, "{:?}", cuts(&pace, 512));
    }

    #[test]
    fn a_budget_of_nothing_cuts_before_every_command_that_reads() {
        let mut pace = Pace::default();
        pace.set(vec![100], Some(0.0));
        assert_eq!(cuts(&pace, 1), (1..32).collect::<Vec<_>>());
        pace.set(vec![0], Some(0.0));
        assert!(cuts(&pace, 1).is_empty(), "nothing is predicted of it");
    }

    #[test]
    fn times_too_short_to_tell_teach_nothing() {
        let mut pace = Pace::default();
        pace.learn(1e-6, 1.0);
        pace.learn(1.0, f64::NAN);
        assert!((pace.factor - 1.0).abs() < 1e-12);
    }
}
