//! `fornax bench --serve`: how an OpenAI-compatible server feels to its clients. Requests begin when they are due,
//! whether or not earlier ones have ended. Knows the protocol from the client's side alone.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::{Value, json};

use crate::flags::low::Bench;
use crate::output;

/// No answer is worth waiting longer for.
const PATIENCE: Duration = Duration::from_secs(1800);
/// A client's thread does little.
const STACK: usize = 512 << 10;

/// The one object of `--json`.
#[derive(Serialize)]
struct Report {
    server: String,
    model: String,
    requests: usize,
    answered: usize,
    /// How often each thing went wrong.
    errors: BTreeMap<String, usize>,
    seconds: f64,
    prompt_tokens: u64,
    generated_tokens: u64,
    /// Generated, by all clients together.
    tokens_per_s: f64,
    /// From a request to its first text, seconds.
    ttft_s: Spread,
    /// Between two tokens of a request, on its average, milliseconds.
    tpot_ms: Spread,
    /// From a request to its end, seconds.
    whole_s: Spread,
    /// Between two pieces that a client got one after the other, milliseconds.
    gap_ms: Spread,
    /// The longest of those.
    worst_gap_ms: f64,
    /// With `--mixed`: the long prompt that came while the others got tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    long: Option<Long>,
}

/// What became of the long prompt.
#[derive(Debug, Serialize)]
struct Long {
    prompt_tokens: u64,
    ttft_s: f64,
    /// Gaps of the other clients from its start to its end, milliseconds.
    gap_ms: Spread,
    /// The longest of those.
    worst_gap_ms: f64,
    /// Pieces that the others got in that time.
    pieces: usize,
    /// How many of them were still getting tokens at its end.
    outlasted_by: usize,
}

/// Where the values of a figure lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Spread {
    p50: f64,
    p95: f64,
    p99: f64,
    max: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        // The smallest value that so many percent do not exceed.
        let at = |percent: usize| {
            let rank = (values.len() * percent).div_ceil(100).max(1) - 1;
            values.get(rank).copied().unwrap_or(0.0)
        };
        Spread { p50: at(50), p95: at(95), p99: at(99), max: at(100) }
    }
}

/// What one client saw.
#[derive(Debug, Default)]
struct Seen {
    first: Option<Duration>,
    last: Duration,
    /// When each piece came, since the request began.
    at: Vec<Duration>,
    /// When that was.
    began: Option<Instant>,
    prompt: u64,
    generated: u64,
    /// It left before its end: what it was there for was over.
    left: bool,
}

/// What the threads of a load tell each other.
#[derive(Debug, Default)]
struct Crowd {
    /// Clients that have had their first text, or have failed.
    getting: AtomicUsize,
    /// The long prompt has its answer.
    over: AtomicBool,
}

/// Prints a table or one JSON object.
///
/// # Errors
/// When the server cannot be reached at all, or answered nothing.
pub(crate) fn bench(flags: &Bench, url: &str) -> Result<()> {
    let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
    let key = match &flags.server.api_key_file {
        None => None,
        Some(file) => {
            let text = fs::read_to_string(file)
                .with_context(|| format!("could not read the key in {}", file.display()))?;
            text.lines()
                .map(str::trim)
                .find(|l| !l.is_empty() && !l.starts_with('#'))
                .map(str::to_owned)
        }
    };
    let client = Client { agent: agent(), base, key };
    let model = match &flags.model.model {
        Some(model) => model.clone(),
        None => client.model()?,
    };
    let due = arrivals(flags.server.requests as usize, flags.server.rate, flags.server.seed);
    let (send, receive) = mpsc::channel();
    let began = Instant::now();
    let (n, crowd) = (due.len(), Arc::new(Crowd::default()));
    for (i, at) in due.into_iter().enumerate() {
        let body = request(&model, flags, i as u64, flags.p);
        let (client, send, crowd) = (client.clone(), send.clone(), Arc::clone(&crowd));
        thread::sleep((began + at).saturating_duration_since(Instant::now()));
        let spawned = thread::Builder::new().stack_size(STACK).spawn(move || {
            let seen = client.run(&body, &crowd);
            // One that failed holds nobody up.
            let silent = seen.as_ref().map_or(true, |s| s.at.is_empty());
            crowd.getting.fetch_add(usize::from(silent), Ordering::Relaxed);
            let _ = send.send(seen);
        });
        spawned.context("could not start a thread for another client")?;
    }
    drop(send);
    let long = match flags.server.mixed {
        None => None,
        Some(tokens) => {
            while crowd.getting.load(Ordering::Relaxed) < n {
                thread::sleep(Duration::from_millis(1));
            }
            let mut body = request(&model, flags, n as u64, tokens as usize);
            body["max_tokens"] = 4.into();
            let seen = client.run(&body, &Crowd::default()).context("the long prompt")?;
            let ended = Instant::now();
            crowd.over.store(true, Ordering::Relaxed);
            Some((seen, ended))
        }
    };
    let mut seen = Vec::new();
    let mut errors = BTreeMap::new();
    for result in receive {
        match result {
            Ok(one) => seen.push(one),
            Err(e) => *errors.entry(format!("{e:#}")).or_insert(0) += 1,
        }
    }
    let took = began.elapsed();
    let long = long.map(|(long, ended)| Long::new(&long, ended, &seen));
    let report = Report { long, ..report(client.base, model, &seen, errors, took) };
    if report.answered == 0 {
        bail!("no request was answered: {:?}", report.errors);
    }
    if flags.json { output::json(&report) } else { output::product(table(&report).as_bytes()) }
}

fn agent() -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(PATIENCE))
        .http_status_as_error(false)
        .max_idle_connections(4096)
        .max_idle_connections_per_host(4096)
        .build();
    ureq::Agent::new_with_config(config)
}

/// When each request begins: all at once, or by a Poisson process of this rate.
fn arrivals(n: usize, rate: Option<f64>, seed: u64) -> Vec<Duration> {
    let Some(rate) = rate else { return vec![Duration::ZERO; n] };
    let mut at = 0.0;
    let gap = |i: usize| {
        let u = f64::from(fornax_plan::sample::uniform(seed, i as u32));
        -(1.0 - u).ln() / rate
    };
    let mut all = Vec::with_capacity(n);
    for i in 0..n {
        all.push(Duration::from_secs_f64(at));
        at += gap(i);
    }
    all
}

/// A request whose prompt has about so many tokens and begins like no other's.
fn request(model: &str, flags: &Bench, index: u64, tokens: usize) -> Value {
    const WORDS: [&str; 32] = [
        "river", "stone", "light", "paper", "green", "north", "table", "music", "horse", "cloud",
        "bread", "glass", "sound", "metal", "sugar", "plant", "chair", "ocean", "field", "story",
        "image", "tower", "watch", "train", "honey", "winter", "garden", "silver", "market",
        "letter", "window", "summer",
    ];
    let seed = flags.server.seed.wrapping_mul(1_000_003).wrapping_add(index);
    let word = |i: usize| {
        let u = fornax_plan::sample::uniform(seed, i as u32);
        WORDS[(u * WORDS.len() as f32) as usize % WORDS.len()]
    };
    // The template's own tokens and the instruction are about twenty.
    let words: Vec<&str> = (0..tokens.saturating_sub(20).max(1)).map(word).collect();
    let text = format!("{index}: tell a long story with these words: {}", words.join(" "));
    json!({
        "model": model,
        "messages": [{ "role": "user", "content": text }],
        "max_tokens": flags.n.max(1),
        "temperature": 0,
        "stream": true,
        "stream_options": { "include_usage": true },
    })
}

#[derive(Clone)]
struct Client {
    agent: ureq::Agent,
    base: String,
    key: Option<String>,
}

impl Client {
    fn model(&self) -> Result<String> {
        let url = format!("{}/v1/models", self.base);
        let mut get = self.agent.get(&url);
        if let Some(key) = &self.key {
            get = get.header("authorization", format!("Bearer {key}"));
        }
        let mut response = get.call().with_context(|| format!("could not reach {url}"))?;
        let text = response
            .body_mut()
            .read_to_string()
            .with_context(|| format!("could not read {url}"))?;
        let list: Value =
            serde_json::from_str(&text).with_context(|| format!("{url} gave no JSON"))?;
        let name = list["data"][0]["id"].as_str();
        Ok(name.with_context(|| format!("{url} lists no model: {text}"))?.to_owned())
    }

    /// One request.
    fn run(&self, body: &Value, crowd: &Crowd) -> Result<Seen> {
        let began = Instant::now();
        let url = format!("{}/v1/chat/completions", self.base);
        let mut post = self.agent.post(&url).header("content-type", "application/json");
        if let Some(key) = &self.key {
            post = post.header("authorization", format!("Bearer {key}"));
        }
        let mut response = post.send(body.to_string().as_bytes()).context("no connection")?;
        let status = response.status().as_u16();
        if status != 200 {
            bail!("status {status}");
        }
        let mut seen = Seen { began: Some(began), ..Seen::default() };
        for line in BufReader::new(response.body_mut().as_reader()).lines() {
            let line = line.context("the stream broke off")?;
            let Some(data) = line.strip_prefix("data: ") else { continue };
            if data == "[DONE]" {
                return Ok(seen);
            }
            let chunk: Value = serde_json::from_str(data).context("a chunk is no JSON")?;
            let first = seen.at.is_empty();
            seen.take(&chunk, began.elapsed())?;
            crowd.getting.fetch_add(usize::from(first && !seen.at.is_empty()), Ordering::Relaxed);
            if crowd.over.load(Ordering::Relaxed) {
                seen.left = true;
                return Ok(seen);
            }
        }
        bail!("the stream ended without [DONE]")
    }
}

impl Seen {
    fn take(&mut self, chunk: &Value, now: Duration) -> Result<()> {
        if !chunk["error"].is_null() {
            bail!("an error in the stream");
        }
        if let Some(usage) = chunk["usage"].as_object() {
            self.prompt = usage.get("prompt_tokens").and_then(Value::as_u64).unwrap_or(0);
            self.generated = usage.get("completion_tokens").and_then(Value::as_u64).unwrap_or(0);
        }
        let delta = &chunk["choices"][0]["delta"];
        let says = |field: &str| delta[field].as_str().is_some_and(|t| !t.is_empty());
        if says("content") || says("reasoning_content") || delta["tool_calls"].is_array() {
            self.first.get_or_insert(now);
            self.last = now;
            self.at.push(now);
        }
        Ok(())
    }

    fn tokens(&self) -> u64 {
        if self.generated > 0 { self.generated } else { self.at.len() as u64 }
    }

    fn gaps(&self) -> impl Iterator<Item = Duration> {
        self.at.windows(2).map(|w| w[1] - w[0])
    }

    fn worst_gap(&self) -> Duration {
        self.gaps().max().unwrap_or_default()
    }
}

impl Long {
    fn new(long: &Seen, ended: Instant, others: &[Seen]) -> Long {
        let began = long.began.unwrap_or(ended);
        let (mut worst, mut pieces, mut gaps) = (Duration::ZERO, 0, Vec::new());
        for other in others {
            let Some(start) = other.began else { continue };
            for w in other.at.windows(2).map(|w| [start + w[0], start + w[1]]) {
                // A gap counts as far as it lies in that time.
                let (from, to) = (w[0].max(began), w[1].min(ended));
                let gap = to.saturating_duration_since(from);
                worst = worst.max(gap);
                if w[1] >= began && w[1] <= ended {
                    pieces += 1;
                    gaps.push(gap.as_secs_f64() * 1e3);
                }
            }
        }
        Long {
            prompt_tokens: long.prompt,
            ttft_s: long.first.unwrap_or_default().as_secs_f64(),
            gap_ms: Spread::of(gaps),
            worst_gap_ms: worst.as_secs_f64() * 1e3,
            pieces,
            outlasted_by: others.iter().filter(|o| o.left).count(),
        }
    }
}

fn report(
    server: String,
    model: String,
    seen: &[Seen],
    errors: BTreeMap<String, usize>,
    took: Duration,
) -> Report {
    let seconds =
        |f: &dyn Fn(&Seen) -> Option<f64>| Spread::of(seen.iter().filter_map(f).collect());
    let generated: u64 = seen.iter().map(Seen::tokens).sum();
    let gaps = seen.iter().flat_map(Seen::gaps).map(|g| g.as_secs_f64() * 1e3);
    Report {
        server,
        model,
        requests: seen.len() + errors.values().sum::<usize>(),
        answered: seen.len(),
        errors,
        seconds: took.as_secs_f64(),
        prompt_tokens: seen.iter().map(|s| s.prompt).sum(),
        generated_tokens: generated,
        tokens_per_s: generated as f64 / took.as_secs_f64().max(1e-9),
        ttft_s: seconds(&|s| s.first.map(|f| f.as_secs_f64())),
        tpot_ms: seconds(&|s| {
            let after = s.tokens().checked_sub(1).filter(|n| *n > 0)?;
            Some((s.last - s.first?).as_secs_f64() * 1e3 / after as f64)
        }),
        whole_s: seconds(&|s| s.first.map(|_| s.last.as_secs_f64())),
        gap_ms: Spread::of(gaps.collect()),
        worst_gap_ms: seen.iter().map(|s| s.worst_gap().as_secs_f64() * 1e3).fold(0.0, f64::max),
        long: None,
    }
}

fn table(r: &Report) -> String {
    let row = |name: &str, s: Spread, digits: usize| {
        format!(
            "{name:<10} {:>9.digits$} {:>9.digits$} {:>9.digits$} {:>9.digits$}\n",
            s.p50, s.p95, s.p99, s.max
        )
    };
    let mut text = format!(
        "{} at {}: {} of {} requests answered in {:.2} s\n{} prompt tokens, {} generated, {:.1} tokens/s\n\n",
        r.model,
        r.server,
        r.answered,
        r.requests,
        r.seconds,
        r.prompt_tokens,
        r.generated_tokens,
        r.tokens_per_s
    );
    text += &format!("{:<10} {:>9} {:>9} {:>9} {:>9}\n", "", "p50", "p95", "p99", "max");
    text += &row("TTFT s", r.ttft_s, 3);
    text += &row("TPOT ms", r.tpot_ms, 2);
    text += &row("whole s", r.whole_s, 3);
    text += &row("gap ms", r.gap_ms, 2);
    text += &format!("worst gap  {:>9.1} ms\n", r.worst_gap_ms);
    if let Some(long) = &r.long {
        text += &format!(
            "{} tokens beside them: first text after {:.2} s, gaps of the others {:.1} ms at most, {:.1} p99, in {} pieces; \
             {} of them there to its end\n",
            long.prompt_tokens,
            long.ttft_s,
            long.worst_gap_ms,
            long.gap_ms.p99,
            long.pieces,
            long.outlasted_by
        );
    }
    for (error, n) in &r.errors {
        text += &format!("error      {n:>9}  {error}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let all = Spread::of((1..=200).map(f64::from).collect());
        assert_eq!(all, Spread { p50: 100.0, p95: 190.0, p99: 198.0, max: 200.0 });
        assert_eq!(Spread::of(vec![7.0]), Spread { p50: 7.0, p95: 7.0, p99: 7.0, max: 7.0 });
        assert_eq!(Spread::of(Vec::new()), Spread::default());
    }

    #[test]
    fn arrivals_have_their_rate_and_do_not_depend_on_the_server() {
        assert_eq!(arrivals(3, None, 1), [Duration::ZERO; 3]);
        let all = arrivals(4000, Some(100.0), 1);
        assert!(all.is_sorted());
        let seconds = all[3999].as_secs_f64();
        assert!((36.0..44.0).contains(&seconds), "{seconds}");
        assert_eq!(all, arrivals(4000, Some(100.0), 1));
        assert_ne!(all, arrivals(4000, Some(100.0), 2));
    }

    #[test]
    fn a_stream_is_measured_by_its_pieces() {
        let mut seen = Seen::default();
        let chunk =
            |text: &str| json!({ "choices": [{ "delta": { "content": text } }], "usage": null });
        let ms = Duration::from_millis;
        seen.take(&chunk(""), ms(5)).unwrap();
        seen.take(&chunk("a"), ms(100)).unwrap();
        seen.take(&chunk("b"), ms(130)).unwrap();
        seen.take(&chunk("c"), ms(250)).unwrap();
        let usage =
            json!({ "choices": [], "usage": { "prompt_tokens": 9, "completion_tokens": 4 } });
        seen.take(&usage, ms(251)).unwrap();
        assert_eq!(
            (seen.first, seen.worst_gap(), seen.tokens(), seen.prompt),
            (Some(ms(100)), ms(120), 4, 9)
        );
        let r = report(
            "s".into(),
            "m".into(),
            &[seen],
            BTreeMap::from([("status 429".into(), 2)]),
            ms(500),
        );
        assert_eq!((r.requests, r.answered, r.tokens_per_s), (3, 1, 8.0));
        assert_eq!(r.tpot_ms.p50, 50.0);
        assert_eq!((r.gap_ms.p50, r.gap_ms.p99), (30.0, 120.0));
        assert!(table(&r).contains("status 429"));
        assert!(Seen::default().take(&json!({ "error": {} }), ms(1)).is_err());
    }

    #[test]
    fn gaps_count_as_far_as_the_long_prompt_was_there() {
        let ms = Duration::from_millis;
        let start = Instant::now();
        let other = Seen {
            began: Some(start),
            at: [100, 130, 330, 340, 900].map(ms).to_vec(),
            ..Seen::default()
        };
        let long = Seen {
            began: Some(start + ms(200)),
            first: Some(ms(300)),
            prompt: 8000,
            ..Seen::default()
        };
        let long = Long::new(&long, start + ms(500), &[other]);
        assert_eq!((long.worst_gap_ms, long.pieces, long.ttft_s), (160.0, 2, 0.3));
        assert_eq!((long.gap_ms.p50, long.gap_ms.p99), (10.0, 130.0));
    }
}
