//! Every way of choosing a token that fornax knows, over a row of logits on the host. What the
//! common parameters ask for is done by the device ([`fornax_plan::sample`]) with the same
//! result; this file adds what needs more memory than a device keeps: logit bias, DRY, typical,
//! XTC, mirostat. It knows no model.
//!
//! Order: bias, penalties, DRY, top-k, typical, top-p, min-p, XTC, temperature, draw. Mirostat
//! replaces everything between DRY and the draw but the temperature.

use fornax_plan::sample::{Scratch, argmax, penalise, uniform};
use fornax_plan::{SampleParams, TokenId};

use crate::error::{Error, Result};

/// DRY ("don't repeat yourself", p-e-w 2024): a token that would continue a repetition of the
/// context's end is lowered by `multiplier · base^(length − allowed_length)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Dry {
    /// Strength; 0 for none.
    pub multiplier: f32,
    /// Growth per token of the repetition.
    pub base: f32,
    /// Longest repetition that costs nothing.
    pub allowed_length: u32,
    /// How many recent tokens are searched; `u32::MAX` for all.
    pub window: u32,
    /// Tokens that no repetition reaches across.
    pub breakers: Vec<TokenId>,
}

impl Default for Dry {
    fn default() -> Dry {
        Dry {
            multiplier: 0.0,
            base: 1.75,
            allowed_length: 2,
            window: u32::MAX,
            breakers: Vec::new(),
        }
    }
}

/// XTC (exclude top choices, p-e-w 2024): with this probability, of all tokens at least as
/// likely as the threshold only the least likely stays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Xtc {
    /// Chance per token that it happens; 0 for never.
    pub probability: f32,
    /// Probability that makes a token a top choice; above 0.5 nothing happens.
    pub threshold: f32,
}

/// Mirostat 2 (Basu et al. 2021): holds the surprise of the chosen tokens near a target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mirostat {
    /// Target surprise, bits.
    pub tau: f32,
    /// Learning rate.
    pub eta: f32,
}

/// Everything that a request may set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplerParams {
    /// What devices do themselves.
    pub base: SampleParams,
    /// Added to logits; −∞ forbids a token.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Locally typical sampling (Meister et al. 2022): mass kept; 1 or more for off.
    pub typical_p: Option<f32>,
    /// Repetition of sequences.
    pub dry: Dry,
    /// Exclusion of top choices.
    pub xtc: Option<Xtc>,
    /// Controlled surprise.
    pub mirostat: Option<Mirostat>,
}

impl SamplerParams {
    /// Whether a device can choose by itself.
    pub fn on_device(&self) -> bool {
        self.logit_bias.is_empty()
            && self.typical_p.is_none_or(|p| p >= 1.0)
            && self.dry.multiplier == 0.0
            && self.xtc.is_none_or(|x| x.probability == 0.0)
            && self.mirostat.is_none()
    }

    /// Checks every parameter against its range.
    ///
    /// # Errors
    /// `is_request`, naming the first parameter out of range, its value and the range.
    pub fn validate(&self) -> Result<()> {
        self.base.validate().map_err(|e| Error::request(e.to_string()))?;
        let check = |ok: bool, name: &str, value: f32, range: &str| {
            if ok {
                return Ok(());
            }
            Err(Error::request(format!("sampling: {name} is {value}, expected {range}")))
        };
        if let Some(p) = self.typical_p {
            check(p > 0.0, "typical_p", p, "above 0")?;
        }
        if let Some((_, b)) =
            self.logit_bias.iter().find(|(_, b)| b.is_nan() || *b == f32::INFINITY)
        {
            check(false, "logit_bias", *b, "a number or -inf")?;
        }
        let Dry { multiplier, base, .. } = self.dry;
        check(
            multiplier >= 0.0 && multiplier.is_finite(),
            "dry_multiplier",
            multiplier,
            "0 or more",
        )?;
        check(base >= 1.0 && base.is_finite(), "dry_base", base, "1 or more")?;
        if let Some(x) = self.xtc {
            check(
                (0.0..=1.0).contains(&x.probability),
                "xtc_probability",
                x.probability,
                "0 to 1",
            )?;
            check((0.0..=1.0).contains(&x.threshold), "xtc_threshold", x.threshold, "0 to 1")?;
        }
        if let Some(m) = self.mirostat {
            check(m.tau > 0.0 && m.tau.is_finite(), "mirostat_tau", m.tau, "above 0")?;
            check(m.eta >= 0.0 && m.eta.is_finite(), "mirostat_eta", m.eta, "0 or more")?;
        }
        Ok(())
    }
}

/// A sequence's sampler: its parameters and what it remembers between tokens.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplerParams,
    /// Mirostat's current bound, bits.
    mu: f32,
    room: Room,
}

/// Memory that one choice needs and the next does not look at: some 12 bytes for a token of the vocabulary.
#[derive(Clone, Debug, Default)]
pub(crate) struct Room {
    kept: Vec<Candidate>,
    matches: Vec<u32>,
    repeats: Vec<(TokenId, u32)>,
    plain: Scratch,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: TokenId,
    logit: f32,
    /// Share of the candidates' mass at temperature 1.
    p: f32,
}

/// Separates XTC's chance from the draw of the same position.
const XTC_STREAM: u64 = 0x5851_f42d_4c95_7f2d;

impl Sampler {
    /// A sampler at the start of a sequence.
    ///
    /// # Errors
    /// As [`SamplerParams::validate`].
    pub fn new(params: SamplerParams) -> Result<Sampler> {
        params.validate()?;
        let mu = params.mirostat.map_or(0.0, |m| 2.0 * m.tau);
        Ok(Sampler { params, mu, room: Room::default() })
    }

    /// As [`Sampler::choose`], in memory that many samplers take in turn.
    pub(crate) fn choose_in(
        &mut self,
        room: &mut Room,
        logits: &mut [f32],
        history: &[TokenId],
        pos: u32,
    ) -> Result<TokenId> {
        std::mem::swap(&mut self.room, room);
        let chosen = self.choose(logits, history, pos);
        std::mem::swap(&mut self.room, room);
        chosen
    }

    /// Chooses the token at `pos` after `history`. `logits` is changed by bias and penalties.
    ///
    /// # Errors
    /// `is_request` when no logit is usable.
    pub fn choose(&mut self, logits: &mut [f32], history: &[TokenId], pos: u32) -> Result<TokenId> {
        for (id, bias) in &self.params.logit_bias {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit += bias;
            }
        }
        penalise(logits, &self.params.base, history, &mut self.room.plain);
        self.dry(logits, history);
        let none = || {
            Error::request(format!("sampling: no usable logit at position {pos} (all NaN or -inf)"))
        };
        let best = argmax(logits).ok_or_else(none)?;
        if self.params.base.temperature == 0.0 || logits[best as usize] == f32::INFINITY {
            return Ok(best);
        }
        self.fill(logits);
        match self.params.mirostat {
            Some(m) => Ok(self.mirostat(m, pos)),
            None => {
                self.truncate(pos);
                Ok(self.draw(pos))
            }
        }
    }

    /// Candidates best first, ties to the lowest id, with their probabilities.
    fn fill(&mut self, logits: &[f32]) {
        self.room.kept.clear();
        let usable =
            logits.iter().enumerate().filter(|(_, v)| !v.is_nan() && **v > f32::NEG_INFINITY);
        self.room.kept.extend(usable.map(|(i, v)| Candidate {
            id: i as TokenId,
            logit: *v + 0.0,
            p: 0.0,
        }));
        let order =
            |a: &Candidate, b: &Candidate| b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id));
        let k = self.params.base.top_k as usize;
        if self.params.mirostat.is_none() && k > 0 && k < self.room.kept.len() {
            self.room.kept.select_nth_unstable_by(k - 1, order);
            self.room.kept.truncate(k);
        }
        self.room.kept.sort_unstable_by(order);
        self.normalise();
    }

    fn normalise(&mut self) {
        let max = self.room.kept[0].logit;
        let sum: f32 = self.room.kept.iter().map(|c| (c.logit - max).exp()).sum();
        for c in &mut self.room.kept {
            c.p = (c.logit - max).exp() / sum;
        }
    }

    fn truncate(&mut self, pos: u32) {
        if let Some(p) = self.params.typical_p.filter(|p| *p < 1.0) {
            self.typical(p);
        }
        let SampleParams { top_p, min_p, seed, .. } = self.params.base;
        if top_p < 1.0 {
            let total: f32 = self.room.kept.iter().map(|c| c.p).sum();
            let mut sum = 0.0;
            let reached = self.room.kept.iter().position(|c| {
                sum += c.p;
                sum >= top_p * total
            });
            self.room.kept.truncate(reached.map_or(self.room.kept.len(), |at| at + 1));
        }
        if min_p > 0.0 {
            let best = self.room.kept[0];
            let floor = best.logit + min_p.ln();
            self.room.kept.retain(|c| c.logit >= floor || c.logit == best.logit);
        }
        if let Some(x) = self.params.xtc
            && uniform(seed ^ XTC_STREAM, pos) < x.probability
        {
            self.normalise();
            let top = self.room.kept.iter().take_while(|c| c.p >= x.threshold).count();
            if top >= 2 {
                self.room.kept.drain(..top - 1);
            }
        }
    }

    /// Keeps the tokens whose surprise is nearest the expected one, until their mass reaches `p`.
    fn typical(&mut self, p: f32) {
        let entropy: f32 =
            self.room.kept.iter().filter(|c| c.p > 0.0).map(|c| -c.p * c.p.ln()).sum();
        let strangeness = |c: &Candidate| (-c.p.ln() - entropy).abs();
        self.room.kept.sort_by(|a, b| strangeness(a).total_cmp(&strangeness(b)));
        let mut sum = 0.0;
        let reached = self.room.kept.iter().position(|c| {
            sum += c.p;
            sum >= p
        });
        self.room.kept.truncate(reached.map_or(self.room.kept.len(), |at| at + 1));
        self.room.kept.sort_unstable_by(|a, b| b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id)));
    }

    /// Draws among the candidates at the temperature; where no cut goes by rank, in the order of
    /// the ids, as devices do.
    fn draw(&mut self, pos: u32) -> TokenId {
        let SampleParams { temperature, seed, top_k, top_p, .. } = self.params.base;
        let max = self.room.kept[0].logit;
        if top_k == 0 && top_p >= 1.0 {
            self.room.kept.sort_unstable_by_key(|c| c.id);
        }
        let weight = |c: &Candidate| ((c.logit - max) / temperature).exp();
        let total: f32 = self.room.kept.iter().map(weight).sum();
        let mut left = uniform(seed, pos) * total;
        for c in &self.room.kept {
            let w = weight(c);
            if left < w {
                return c.id;
            }
            left -= w;
        }
        self.room.kept.iter().rev().find(|c| weight(c) > 0.0).map_or(self.room.kept[0].id, |c| c.id)
    }

    fn mirostat(&mut self, m: Mirostat, pos: u32) -> TokenId {
        let temperature = self.params.base.temperature;
        for c in &mut self.room.kept {
            c.logit /= temperature;
        }
        self.normalise();
        let within = self.room.kept.iter().take_while(|c| -c.p.log2() <= self.mu).count().max(1);
        self.room.kept.truncate(within);
        self.normalise();
        let mut left = uniform(self.params.base.seed, pos);
        let mut chosen = self.room.kept[self.room.kept.len() - 1];
        for c in &self.room.kept {
            if left < c.p {
                chosen = *c;
                break;
            }
            left -= c.p;
        }
        self.mu -= m.eta * (-chosen.p.log2() - m.tau);
        chosen.id
    }

    /// Lowers tokens that would continue a repetition of the end of the context.
    fn dry(&mut self, logits: &mut [f32], history: &[TokenId]) {
        let Dry { multiplier, base, allowed_length, window, breakers } = &self.params.dry;
        if *multiplier == 0.0 {
            return;
        }
        let recent = &history[history.len().saturating_sub(*window as usize)..];
        // Only what follows the last breaker can repeat.
        let tail = recent.iter().rev().take_while(|t| !breakers.contains(t)).count();
        suffix_matches(recent, tail, &mut self.room.matches);
        self.room.repeats.clear();
        for at in 0..recent.len().saturating_sub(1) {
            let (length, next) = (self.room.matches[at], recent[at + 1]);
            if length >= (*allowed_length).max(1) && !breakers.contains(&next) {
                self.room.repeats.push((next, length));
            }
        }
        // A token may continue several repetitions: the longest counts.
        self.room.repeats.sort_unstable();
        for same in self.room.repeats.chunk_by(|a, b| a.0 == b.0) {
            let (next, length) = same[same.len() - 1];
            let penalty = multiplier * base.powi((length - allowed_length).min(200) as i32);
            if let Some(logit) = logits.get_mut(next as usize) {
                *logit -= penalty;
            }
        }
    }
}

/// For every position of `tokens`, how many tokens ending there equal those that end the whole,
/// at most `most` (the Z function of the reversed sequence, linear time).
fn suffix_matches(tokens: &[TokenId], most: usize, out: &mut Vec<u32>) {
    let n = tokens.len();
    out.clear();
    out.resize(n, 0);
    let at = |i: usize| tokens[n - 1 - i];
    let (mut left, mut right) = (0, 0);
    for i in 1..n {
        let mut z = if i < right { (right - i).min(out[n - 1 - (i - left)] as usize) } else { 0 };
        while i + z < n && at(z) == at(i + z) {
            z += 1;
        }
        if i + z > right {
            (left, right) = (i, i + z);
        }
        out[n - 1 - i] = z as u32;
    }
    out.iter_mut().for_each(|z| *z = (*z).min(most as u32));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(seed: u64, n: u32) -> Vec<f32> {
        (0..n).map(|i| 10.0 * uniform(seed, i)).collect()
    }

    fn warm() -> SampleParams {
        SampleParams { temperature: 0.8, seed: 3, ..SampleParams::default() }
    }

    fn choose(params: SamplerParams, row: &[f32], history: &[TokenId], pos: u32) -> TokenId {
        Sampler::new(params).unwrap().choose(&mut row.to_vec(), history, pos).unwrap()
    }

    #[test]
    fn the_host_and_the_device_draw_alike() {
        for (top_k, top_p, min_p) in [
            (0, 1.0, 0.0),
            (0, 1.0, 0.1),
            (40, 1.0, 0.0),
            (40, 0.9, 0.0),
            (0, 0.8, 0.05),
            (40, 0.95, 0.02),
        ] {
            let base = SampleParams { top_k, top_p, min_p, repeat_penalty: 1.1, ..warm() };
            for pos in 0..300 {
                let row = logits(u64::from(pos), 500);
                let history = [3, 9, 27];
                let host =
                    choose(SamplerParams { base, ..Default::default() }, &row, &history, pos);
                let mut scratch = Scratch::default();
                let device = fornax_plan::sample::choose(
                    &mut row.clone(),
                    &base,
                    &history,
                    pos,
                    &mut scratch,
                )
                .unwrap();
                assert_eq!(host, device, "{base:?} at {pos}");
            }
        }
    }

    #[test]
    fn bias_forbids_and_forces() {
        let bias = |id, b| SamplerParams { logit_bias: vec![(id, b)], ..Default::default() };
        assert_eq!(choose(bias(1, f32::NEG_INFINITY), &[1.0, 3.0, 2.0], &[], 0), 2);
        assert_eq!(choose(bias(0, 100.0), &[1.0, 3.0, 2.0], &[], 0), 0);
        assert_eq!(choose(bias(77, 100.0), &[1.0, 3.0, 2.0], &[], 0), 1);
    }

    #[test]
    fn dry_lowers_the_longest_repetition_and_stops_at_breakers() {
        let dry = |breakers: Vec<TokenId>| {
            let dry =
                Dry { multiplier: 1.0, base: 2.0, allowed_length: 2, breakers, ..Dry::default() };
            Sampler::new(SamplerParams { dry, ..Default::default() }).unwrap()
        };
        // 1 2 3 4 … 1 2 3: the 4 would continue a repetition of three.
        let history = [1, 2, 3, 4, 5, 2, 3, 6, 1, 2, 3];
        let mut row = vec![0.0; 8];
        dry(vec![]).dry(&mut row, &history);
        assert_eq!(row, [0.0, 0.0, 0.0, 0.0, -2.0, 0.0, -1.0, 0.0]);
        let mut row = vec![0.0; 8];
        dry(vec![1]).dry(&mut row, &history);
        assert_eq!(row, [0.0, 0.0, 0.0, 0.0, -1.0, 0.0, -1.0, 0.0]);
        let mut row = vec![0.0; 8];
        dry(vec![3]).dry(&mut row, &history);
        assert_eq!(row, [0.0; 8]);
    }

    #[test]
    fn suffix_matches_agree_with_a_plain_count() {
        for seed in 0..50 {
            let tokens: Vec<u32> = (0..60).map(|i| (uniform(seed, i) * 3.0) as u32).collect();
            let mut fast = Vec::new();
            suffix_matches(&tokens, 60, &mut fast);
            for end in 0..59 {
                let same = (0..=end).take_while(|k| tokens[end - k] == tokens[59 - k]).count();
                assert_eq!(fast[end] as usize, same);
            }
        }
    }

    #[test]
    fn xtc_leaves_the_least_likely_of_the_top_choices() {
        let xtc = Some(Xtc { probability: 1.0, threshold: 0.2 });
        let row: Vec<f32> = [0.4f32, 0.3, 0.25, 0.05].iter().map(|p| p.ln()).collect();
        for pos in 0..200 {
            let id =
                choose(SamplerParams { base: warm(), xtc, ..Default::default() }, &row, &[], pos);
            assert!(id == 2 || id == 3, "{id}");
        }
        let never = Some(Xtc { probability: 1.0, threshold: 0.6 });
        let seen = |x| {
            (0..200).any(|pos| {
                choose(SamplerParams { base: warm(), xtc: x, ..Default::default() }, &row, &[], pos)
                    == 0
            })
        };
        assert!(seen(never) && seen(None) && !seen(xtc));
    }

    #[test]
    fn typical_prefers_the_expected_surprise() {
        // One certain-looking token and many equal ones: the entropy is near the many.
        let mut row = vec![0.02f32.ln(); 35];
        row[0] = 0.3f32.ln();
        let params = SamplerParams { base: warm(), typical_p: Some(0.5), ..Default::default() };
        assert!((0..300).all(|pos| choose(params.clone(), &row, &[], pos) != 0));
    }

    #[test]
    fn mirostat_holds_the_surprise_near_its_target() {
        let base = SampleParams { temperature: 1.0, ..warm() };
        let mirostat = Some(Mirostat { tau: 3.0, eta: 0.1 });
        let mut sampler =
            Sampler::new(SamplerParams { base, mirostat, ..Default::default() }).unwrap();
        let row: Vec<f32> = (0..1000).map(|i| -(1.0 + i as f32).ln()).collect();
        let z: f32 = row.iter().map(|v| v.exp()).sum();
        let n = 4000;
        let surprise: f32 = (0..n)
            .map(|pos| {
                -(row[sampler.choose(&mut row.clone(), &[], pos).unwrap() as usize].exp() / z)
                    .log2()
            })
            .sum();
        // The controlled surprise is of the truncated distribution, the sum here of the whole.
        assert!((2.0..4.5).contains(&(surprise / n as f32)), "{}", surprise / n as f32);
    }

    #[test]
    fn bad_rows_and_parameters_are_errors() {
        let params = SamplerParams { base: warm(), ..Default::default() };
        let e = Sampler::new(params).unwrap().choose(&mut [f32::NAN; 4], &[], 0).unwrap_err();
        assert!(e.is_request());
        for (params, name) in [
            (SamplerParams { typical_p: Some(0.0), ..Default::default() }, "typical_p"),
            (
                SamplerParams {
                    mirostat: Some(Mirostat { tau: -1.0, eta: 0.1 }),
                    ..Default::default()
                },
                "mirostat_tau",
            ),
            (
                SamplerParams {
                    xtc: Some(Xtc { probability: 2.0, threshold: 0.1 }),
                    ..Default::default()
                },
                "xtc_probability",
            ),
            (SamplerParams { logit_bias: vec![(0, f32::NAN)], ..Default::default() }, "logit_bias"),
        ] {
            assert!(Sampler::new(params).unwrap_err().to_string().contains(name), "{name}");
        }
    }
}
