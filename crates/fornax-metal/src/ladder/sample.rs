//! Penalties and draws against the host's own sampler, over its parameters.

use fornax_plan::SampleParams;
use fornax_plan::sample::{self, Scratch};

use super::{Run, close, floats, noise, read_floats, read_words, room, words};

/// What a sum of exponentials in single precision may be off by, a share of it.
const SUM_OFF: f64 = 1e-6;
/// Positions that the histories hold.
const STRIDE: usize = 40;

/// A wanted row: its logits, how its token is chosen, the tokens before it.
struct Row {
    logits: Vec<f32>,
    params: SampleParams,
    history: Vec<u32>,
}

impl Row {
    fn ways(&self) -> u32 {
        let drawn = if self.params.temperature > 0.0 { 8 } else { 0 };
        drawn | if self.params.penalises() { 16 } else { 0 }
    }

    fn draw(&self) -> [u32; 12] {
        let p = &self.params;
        let floor = if p.min_p > 0.0 { p.min_p.ln() } else { f32::NEG_INFINITY };
        let [t, top_p, floor] = [p.temperature, p.top_p, floor].map(f32::to_bits);
        let [r, f, c] =
            [p.repeat_penalty, p.frequency_penalty, p.presence_penalty].map(f32::to_bits);
        let (low, high) = (p.seed as u32, (p.seed >> 32) as u32);
        [t, p.top_k, top_p, floor, low, high, p.penalty_window, r, f, c, 0, 0]
    }

    /// Logits after penalties, by the host.
    fn penalised(&self) -> Vec<f32> {
        let mut logits = self.logits.clone();
        sample::penalise(&mut logits, &self.params, &self.history, &mut Scratch::default());
        logits
    }

    /// The kept tokens from the first to be drawn on, with their weights, in double precision: once for every place where sums
    /// in single precision may cut. At a high temperature the last of them weigh more than they do in the sum that cuts.
    fn kept(&self) -> impl Iterator<Item = Vec<(usize, f64)>> {
        let (p, logits) = (self.params, self.penalised());
        let usable = |v: f32| v > f32::NEG_INFINITY;
        let mut ids: Vec<usize> = (0..logits.len()).filter(|i| usable(logits[*i])).collect();
        let max = ids.iter().map(|i| logits[*i]).fold(f32::NEG_INFINITY, f32::max);
        if p.top_k > 0 || p.top_p < 1.0 {
            ids.sort_by(|a, b| (logits[*b] + 0.0).total_cmp(&(logits[*a] + 0.0)).then(a.cmp(b)));
        }
        if p.top_k > 0 {
            ids.truncate(p.top_k as usize);
        }
        let mut cuts = ids.len()..=ids.len();
        if p.top_p < 1.0 {
            let mass = |i: &usize| f64::from(logits[*i] - max).exp();
            let total: f64 = ids.iter().map(mass).sum();
            let reached = |share: f64| {
                let mut sum = 0.0;
                let found = ids.iter().position(|i| {
                    sum += mass(i);
                    sum >= share * total
                });
                found.map_or(ids.len(), |n| n + 1)
            };
            let share = f64::from(p.top_p);
            cuts = reached(share - SUM_OFF)..=reached(share + SUM_OFF);
        }
        let floor = if p.min_p > 0.0 { max + p.min_p.ln() } else { f32::NEG_INFINITY };
        cuts.map(move |n| {
            let weight = |i: usize| (f64::from(logits[i] - max) / f64::from(p.temperature)).exp();
            let high = ids[..n].iter().filter(|i| logits[**i] >= floor);
            high.map(|i| (*i, weight(*i))).collect()
        })
    }

    /// Whether rounding alone could have drawn the token.
    fn nearly_draws(&self, token: u32, pos: u32) -> bool {
        let at = f64::from(sample::uniform(self.params.seed, pos));
        self.kept().any(|kept| {
            let total: f64 = kept.iter().map(|k| k.1).sum();
            let (target, off, mut sum) = (at * total, 1e-4 * total, 0.0);
            kept.iter().any(|(i, w)| {
                sum += w;
                *i == token as usize && target <= sum + off && target >= sum - w - off
            })
        })
    }
}

/// Chooses the rows' tokens with the kernels; returns tokens, log-probabilities, logits.
fn chosen(rows: &[Row], parts: u32) -> (Vec<u32>, Vec<f32>, Vec<f32>) {
    let (n, vocab) = (rows.len(), rows[0].logits.len());
    let logits = floats(&rows.iter().flat_map(|r| r.logits.clone()).collect::<Vec<f32>>());
    // Row i is of sequence i, in slot n − 1 − i, at the last position of its history.
    let at = |(i, r): (usize, &Row)| {
        [0, r.history.len() as u32 - 1, i as u32, (n - 1 - i) as u32, 1, 0, 0, 0]
    };
    let row_words = words(&rows.iter().enumerate().flat_map(at).collect::<Vec<u32>>());
    let want = |(i, r): (usize, &Row)| [i as u32, 1 | 2 | r.ways(), u32::MAX, 1];
    let wanted = words(&rows.iter().enumerate().flat_map(want).collect::<Vec<u32>>());
    let draws = words(&rows.iter().flat_map(Row::draw).collect::<Vec<u32>>());
    let mut history = vec![u32::MAX; n * STRIDE];
    for (i, r) in rows.iter().enumerate() {
        history[(n - 1 - i) * STRIDE..][..r.history.len()].copy_from_slice(&r.history);
    }
    let history = words(&history);
    let [best, changed] = [0; 2].map(|_| room(n * parts as usize * 4));
    let grid = [parts, n as u32, 1];
    let sizes = [n as u32, vocab as u32, parts];
    let part = |to| {
        Run::new("argmax_parts", &[], grid, [256, 1, 1]).buffer(&logits).buffer(to).go(&sizes);
    };
    part(&best);
    let one = [n as u32, 1, 1];
    Run::new("penalise", &[], one, [256, 1, 1])
        .buffer(&logits)
        .buffer(&wanted)
        .buffer(&row_words)
        .buffer(&history)
        .buffer(&draws)
        .go(&[n as u32, 0, vocab as u32, STRIDE as u32]);
    part(&changed);
    let (near, drawn) = (room(n * parts as usize * 130), room(n));
    let constants = [n as u32, 0, vocab as u32, parts];
    let common = |name, grid| {
        let run = Run::new(name, &[], grid, [256, 1, 1]).buffer(&logits).buffer(&best);
        run.buffer(&changed).buffer(&wanted).buffer(&row_words).buffer(&draws).buffer(&near)
    };
    common("gather", grid).go(&constants);
    common("draw_token", one).buffer(&drawn).go(&constants);
    let (last, out) = (room(n), room(2 * n));
    Run::new("argmax_pick", &[], one, [32, 1, 1])
        .buffer(&best)
        .buffer(&wanted)
        .buffer(&row_words)
        .buffer(&last)
        .words(&vec![0; 16 * n])
        .words(&vec![0; n])
        .buffer(&out)
        .buffer(&changed)
        .buffer(&drawn)
        .buffer(&logits)
        .buffer(&history)
        .buffer(&draws)
        .go(&[n as u32, 0, 0, 0, n as u32, parts, vocab as u32, STRIDE as u32]);
    let all = read_words(&out, 2 * n);
    let logprobs = all[n..].iter().map(|w| f32::from_bits(*w)).collect();
    (all[..n].to_vec(), logprobs, read_floats(&logits, n * vocab))
}

/// So many rows of a vocabulary, each by another rule, in so many parts.
pub(super) fn choices(rows: usize, vocab: usize, parts: u32) {
    let rules = every_rule(9);
    let row = |i: usize| {
        let all = noise(100 + i as u64, vocab);
        let history = (0..5 + 7 * i as u32 % 30).map(|j| (j * j + 50) % vocab as u32);
        Row {
            logits: all.iter().map(|v| v * 8.0).collect(),
            params: rules[i % rules.len()],
            history: history.collect(),
        }
    };
    held(&(0..rows).map(row).collect::<Vec<Row>>(), parts);
}

fn held(rows: &[Row], parts: u32) {
    let (tokens, logprobs, _) = chosen(rows, parts);
    for (i, row) in rows.iter().enumerate() {
        let pos = row.history.len() as u32;
        let mut logits = row.logits.clone();
        let scratch = &mut Scratch::default();
        let want = sample::choose(&mut logits, &row.params, &row.history, pos, scratch).unwrap();
        let near = || row.params.temperature > 0.0 && row.nearly_draws(tokens[i], pos);
        assert!(
            tokens[i] == want || near(),
            "row {i} of {} in {parts}: {} for {want} by {:?}",
            rows.len(),
            tokens[i],
            row.params
        );
        let exact = f64::from(sample::logprob_of(&row.logits, tokens[i]));
        let what = format!("log-probability of {} by {:?}", tokens[i], row.params);
        close(&what, &logprobs[i..=i], &[exact], 1e-4);
    }
}

/// Parameters of every kind of rule, alone and together.
fn every_rule(seed: u64) -> Vec<SampleParams> {
    let base = SampleParams { temperature: 0.8, seed, ..SampleParams::default() };
    vec![
        SampleParams::default(),
        base,
        SampleParams { temperature: 1.7, ..base },
        SampleParams { min_p: 0.1, ..base },
        SampleParams { top_k: 1, ..base },
        SampleParams { top_k: 5, ..base },
        SampleParams { top_k: 100_000, ..base },
        SampleParams { top_p: 0.9, ..base },
        SampleParams { top_p: 0.0, ..base },
        SampleParams { top_p: 0.999_999_9, temperature: 3.0, ..base },
        SampleParams { top_k: 40, top_p: 0.95, min_p: 0.05, ..base },
        SampleParams { top_k: 3, top_p: 0.5, repeat_penalty: 1.3, ..base },
        SampleParams { frequency_penalty: 0.7, presence_penalty: 0.3, ..base },
        SampleParams { repeat_penalty: 1.5, penalty_window: 3, ..SampleParams::default() },
        SampleParams { presence_penalty: 2.0, penalty_window: u32::MAX, top_k: 8, ..base },
    ]
}

#[test]
pub(super) fn draws_are_those_of_the_host() {
    for (n, parts, spread) in
        [(7usize, 1u32, 3.0f32), (300, 2, 8.0), (900, 3, 40.0), (2000, 4, 0.5)]
    {
        for seed in 0..3u64 {
            let row = |(i, params): (usize, SampleParams)| {
                let all = noise(100 * seed + i as u64, n);
                let mut logits: Vec<f32> = all.iter().map(|v| v * spread).collect();
                if n > 100 {
                    (logits[3], logits[n - 1], logits[50]) = (f32::NAN, f32::NEG_INFINITY, spread);
                }
                let history = (0..5 + 7 * i as u32 % 30).map(|j| (j * j + 50) % n as u32);
                Row { logits, params, history: history.collect() }
            };
            let rows: Vec<Row> = every_rule(seed + 7).into_iter().enumerate().map(row).collect();
            held(&rows, parts);
        }
    }
}

#[test]
fn ties_are_cut_and_drawn_by_their_ids() {
    for seed in 0..4u64 {
        // A few levels: nearly everything is a tie, of zeros of both signs too.
        let levels = [0.0, -0.0, 1.0, 1.0, 0.5];
        let logits: Vec<f32> = (0..400).map(|i| levels[(i * 7 + i / 11) % 5]).collect();
        let row = |(i, params)| Row {
            logits: logits.clone(),
            params: SampleParams { seed: seed * 50 + i as u64, ..params },
            history: vec![2, 9, 2, 11],
        };
        held(&every_rule(0).into_iter().enumerate().map(row).collect::<Vec<Row>>(), 3);
    }
}

#[test]
fn infinity_is_certain_and_nothing_usable_is_told() {
    let params = SampleParams { temperature: 1.0, top_k: 4, ..SampleParams::default() };
    let row = |logits: Vec<f32>| Row { logits, params, history: vec![0] };
    let mut certain = noise(1, 90);
    certain[77] = f32::INFINITY;
    let rows = [row(certain), row(vec![f32::NAN; 90]), row(vec![f32::NEG_INFINITY; 90])];
    assert_eq!(chosen(&rows, 2).0, [77, u32::MAX - 1, u32::MAX - 1]);
}

#[test]
fn penalties_are_those_of_the_host() {
    let params = SampleParams {
        repeat_penalty: 1.4,
        frequency_penalty: 0.2,
        presence_penalty: 0.1,
        penalty_window: 20,
        ..SampleParams::default()
    };
    let history: Vec<u32> = (0..33).map(|i| i * i % 23).chain([3, 3, 500_000]).collect();
    let rows = [Row { logits: noise(5, 64), params, history }];
    let want: Vec<f64> = rows[0].penalised().iter().map(|v| f64::from(*v)).collect();
    close("penalised", &chosen(&rows, 1).2, &want, 1e-6);
}
