//! How long a step will take, learnt from those that ran: so much for a step, so much for a row,
//! and so much for a row and a position that it looks at. It reads no clock.

/// Where a step's time goes, milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Work {
    /// Token rows.
    pub(crate) rows: f64,
    /// Positions that they look at, summed over the rows.
    pub(crate) seen: f64,
}

/// Positions are counted in thousands, so that the three sizes are alike.
const SEEN: f64 = 1e-3;
/// Share of what was known that is kept when one more step of the same kind has run.
const KEPT: f64 = 0.95;
/// How strongly the last estimate holds where no step tells otherwise.
const TIE: f64 = 1e-4;

/// Sums over the steps of one kind, newer ones counting more.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    a: [[f64; 3]; 3],
    b: [f64; 3],
}

/// The estimate.
#[derive(Clone, Debug)]
pub(crate) struct Cost {
    /// Steps that decode only, and steps with prompts; each kind forgets by itself, so that an
    /// hour of decoding does not wipe out what is known of prompts.
    kinds: [Sums; 2],
    /// Milliseconds for a step, a row, and a row and a thousand positions.
    each: [f64; 3],
    seen_steps: u32,
}

impl Cost {
    /// Before anything ran: a millisecond for a row.
    pub(crate) fn new() -> Cost {
        Cost { kinds: [Sums::default(); 2], each: [1.0, 1.0, 0.0], seen_steps: 0 }
    }

    /// Milliseconds that a step would take.
    pub(crate) fn predict(&self, work: Work) -> f64 {
        self.each[0] + self.each[1] * work.rows + self.each[2] * SEEN * work.seen
    }

    /// Milliseconds that one more row costs, looking at `context` positions.
    pub(crate) fn row(&self, context: f64) -> f64 {
        self.each[1] + self.each[2] * SEEN * context
    }

    /// How many rows of a prompt that is computed up to `context` fit beside `work` into `budget`
    /// milliseconds.
    pub(crate) fn rows_within(&self, budget: f64, work: Work, context: f64) -> u32 {
        let left = budget - self.predict(work);
        if left <= 0.0 {
            return 0;
        }
        // n rows look at n · context + n² / 2 positions.
        let (square, linear) = (self.each[2] * SEEN / 2.0, self.row(context));
        let n = if square * left > 1e-12 {
            ((linear * linear + 4.0 * square * left).sqrt() - linear) / (2.0 * square)
        } else if linear > 0.0 {
            left / linear
        } else {
            f64::from(u32::MAX)
        };
        n.min(f64::from(u32::MAX)) as u32
    }

    /// Learns from a step that took `ms`.
    pub(crate) fn observe(&mut self, work: Work, with_prompt: bool, ms: f64) {
        // One stall must not pass for the rule.
        let expected = self.predict(work);
        let ms = if self.seen_steps > 16 { ms.min(4.0 * expected) } else { ms }.max(1e-3);
        self.seen_steps = self.seen_steps.saturating_add(1);
        // Errors count relative to the step, so that long ones do not drown short ones.
        let x = [1.0 / ms, work.rows / ms, SEEN * work.seen / ms];
        let sums = &mut self.kinds[usize::from(with_prompt)];
        for i in 0..3 {
            for j in 0..3 {
                sums.a[i][j] = KEPT * sums.a[i][j] + x[i] * x[j];
            }
            sums.b[i] = KEPT * sums.b[i] + x[i];
        }
        self.solve();
    }

    /// Least squares over both kinds with no negative cost, by coordinates, from the last
    /// estimate on.
    fn solve(&mut self) {
        let [d, p] = &self.kinds;
        let before = self.each;
        for _ in 0..12 {
            for (i, before) in before.iter().enumerate() {
                let tie = TIE * (d.a[i][i] + p.a[i][i]) + 1e-12;
                let mut rest = d.b[i] + p.b[i] + tie * before;
                for j in (0..3).filter(|j| *j != i) {
                    rest -= (d.a[i][j] + p.a[i][j]) * self.each[j];
                }
                self.each[i] = (rest / (d.a[i][i] + p.a[i][i] + tie)).max(0.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Cost, Work};

    fn truth(w: Work) -> f64 {
        4.0 + 0.5 * w.rows + 0.002 * w.seen
    }

    #[test]
    fn it_learns_a_line_and_keeps_a_budget() {
        let mut cost = Cost::new();
        for i in 0..400u32 {
            let rows = f64::from(1 + i % 7 * 9);
            let work = Work { rows, seen: rows * f64::from(i * 37 % 900) };
            cost.observe(work, i % 3 == 0, truth(work));
        }
        for (context, budget) in [(0.0, 30.0), (1000.0, 30.0), (4000.0, 250.0)] {
            let beside = Work { rows: 8.0, seen: 8.0 * 300.0 };
            let n = f64::from(cost.rows_within(budget, beside, context));
            let all = Work { rows: 8.0 + n, seen: beside.seen + n * context + n * n / 2.0 };
            let ms = truth(all);
            assert!((0.8 * budget..1.1 * budget).contains(&ms), "{n} rows: {ms} of {budget} ms");
        }
    }

    #[test]
    fn decoding_for_long_keeps_what_is_known_of_prompts() {
        let mut cost = Cost::new();
        for rows in [64.0, 128.0, 256.0, 32.0].repeat(10) {
            let work = Work { rows, seen: rows * 100.0 };
            cost.observe(work, true, truth(work));
        }
        for i in 0..5000 {
            let work = Work { rows: 4.0, seen: 4.0 * (200.0 + f64::from(i) / 10.0) };
            cost.observe(work, false, truth(work));
        }
        let work = Work { rows: 200.0, seen: 200.0 * 300.0 };
        let share = cost.predict(work) / truth(work);
        assert!((0.7..1.4).contains(&share), "{share}");
    }

    #[test]
    fn a_stall_is_not_the_rule_and_nothing_is_negative() {
        let mut cost = Cost::new();
        let work = Work { rows: 4.0, seen: 400.0 };
        for _ in 0..50 {
            cost.observe(work, false, 5.0);
        }
        cost.observe(work, false, 5000.0);
        assert!(cost.predict(work) < 12.0, "{cost:?}");
        assert!(cost.each.iter().all(|c| *c >= 0.0));
        assert_eq!(cost.rows_within(0.0, work, 0.0), 0);
    }
}
