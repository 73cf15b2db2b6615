//! Figures of the server for Prometheus: counted where things happen, printed as text on demand. Knows what is
//! counted, not why.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::backend::Served;
use crate::live::Usage;

/// Upper edges, seconds.
const FIRST: [f64; 14] =
    [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0];
const BETWEEN: [f64; 13] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0];
const WHOLE: [f64; 14] =
    [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 1800.0];

/// Counts of a time by size.
#[derive(Debug)]
struct Histogram<const N: usize> {
    edges: [f64; N],
    /// Not cumulative; the last is for what is above every edge.
    counts: Vec<AtomicU64>,
    sum_us: AtomicU64,
}

impl<const N: usize> Histogram<N> {
    fn new(edges: [f64; N]) -> Histogram<N> {
        let counts = (0..=N).map(|_| AtomicU64::new(0)).collect();
        Histogram { edges, counts, sum_us: AtomicU64::new(0) }
    }

    fn add(&self, time: Duration, times: u64) {
        let s = time.as_secs_f64();
        let at = self.edges.iter().position(|e| s <= *e).unwrap_or(N);
        self.counts[at].fetch_add(times, Relaxed);
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX).saturating_mul(times);
        self.sum_us.fetch_add(us, Relaxed);
    }

    fn print(&self, name: &str, help: &str, out: &mut String) {
        head(name, help, "histogram", out);
        let mut sum = 0;
        for (edge, count) in self.edges.iter().zip(&self.counts) {
            sum += count.load(Relaxed);
            let _ = writeln!(out, "{name}_bucket{{le=\"{edge}\"}} {sum}");
        }
        sum += self.counts[N].load(Relaxed);
        let _ = writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {sum}");
        let _ = writeln!(out, "{name}_sum {}", self.sum_us.load(Relaxed) as f64 / 1e6);
        let _ = writeln!(out, "{name}_count {sum}");
    }
}

fn head(name: &str, help: &str, kind: &str, out: &mut String) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// Everything that the server counts itself.
#[derive(Debug)]
pub(crate) struct Metrics {
    first: Histogram<14>,
    between: Histogram<13>,
    whole: Histogram<14>,
    generated: AtomicU64,
    prompt: AtomicU64,
    cached: AtomicU64,
    /// By endpoint and status.
    answers: Mutex<BTreeMap<(String, u16), u64>>,
    connections: AtomicU64,
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        Metrics {
            first: Histogram::new(FIRST),
            between: Histogram::new(BETWEEN),
            whole: Histogram::new(WHOLE),
            generated: AtomicU64::new(0),
            prompt: AtomicU64::new(0),
            cached: AtomicU64::new(0),
            answers: Mutex::default(),
            connections: AtomicU64::new(0),
        }
    }

    /// From the request to its first token.
    pub(crate) fn first_token(&self, time: Duration) {
        self.first.add(time, 1);
    }

    /// Some tokens came together, so long after those before them.
    pub(crate) fn tokens_after(&self, time: Duration, tokens: usize) {
        self.between.add(time, 1);
        // The others of the same step came at once.
        self.between.add(Duration::ZERO, tokens.saturating_sub(1) as u64);
    }

    /// A choice ended.
    pub(crate) fn ended(&self, time: Duration, usage: Usage) {
        self.whole.add(time, 1);
        self.generated.fetch_add(usage.generated.into(), Relaxed);
        self.prompt.fetch_add(usage.prompt.into(), Relaxed);
        self.cached.fetch_add(usage.cached.into(), Relaxed);
    }

    /// An answer went out.
    pub(crate) fn answered(&self, endpoint: &str, status: u16) {
        let mut answers = self.answers.lock().unwrap_or_else(|e| e.into_inner());
        *answers.entry((endpoint.to_owned(), status)).or_default() += 1;
    }

    pub(crate) fn connected(&self) {
        self.connections.fetch_add(1, Relaxed);
    }

    pub(crate) fn disconnected(&self) {
        self.connections.fetch_sub(1, Relaxed);
    }

    /// The page of `/metrics`.
    pub(crate) fn page(&self, models: &[std::sync::Arc<Served>]) -> String {
        let mut out = String::new();
        self.first.print(
            "fornax_time_to_first_token_seconds",
            "From the request to its first token.",
            &mut out,
        );
        self.between.print(
            "fornax_inter_token_seconds",
            "Between two tokens of a choice.",
            &mut out,
        );
        self.whole.print("fornax_request_seconds", "From the request to its end.", &mut out);
        let counters = [
            ("fornax_generated_tokens_total", "Tokens of finished answers.", &self.generated),
            ("fornax_prompt_tokens_total", "Prompt tokens of finished requests.", &self.prompt),
            ("fornax_cached_prompt_tokens_total", "Of those, found in the cache.", &self.cached),
        ];
        for (name, help, value) in counters {
            head(name, help, "counter", &mut out);
            let _ = writeln!(out, "{name} {}", value.load(Relaxed));
        }
        head("fornax_connections", "Open connections.", "gauge", &mut out);
        let _ = writeln!(out, "fornax_connections {}", self.connections.load(Relaxed));
        head("fornax_http_answers_total", "Answers by endpoint and status.", "counter", &mut out);
        for ((endpoint, status), n) in self.answers.lock().unwrap_or_else(|e| e.into_inner()).iter()
        {
            let _ = writeln!(
                out,
                "fornax_http_answers_total{{endpoint=\"{endpoint}\",status=\"{status}\"}} {n}"
            );
        }
        engines(models, &mut out);
        out
    }
}

/// What the engines say of themselves.
fn engines(models: &[std::sync::Arc<Served>], out: &mut String) {
    type Row = (&'static str, &'static str, &'static str, f64);
    let mut rows: Vec<(String, Vec<Row>)> = Vec::new();
    for served in models {
        let s = served.engine.stats();
        let label = served.alias.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        rows.push((
            label,
            vec![
                ("fornax_running_requests", "Requests that run.", "gauge", s.running as f64),
                ("fornax_waiting_requests", "Requests that wait.", "gauge", s.waiting as f64),
                (
                    "fornax_kv_blocks_used",
                    "Blocks that sequences hold.",
                    "gauge",
                    f64::from(s.kv_blocks_used),
                ),
                (
                    "fornax_kv_blocks_cached",
                    "Blocks kept to be found again.",
                    "gauge",
                    f64::from(s.kv_blocks_cached),
                ),
                (
                    "fornax_kv_blocks_total",
                    "Blocks of the pool.",
                    "gauge",
                    f64::from(s.kv_blocks_total),
                ),
                (
                    "fornax_admitted_prompt_tokens_total",
                    "Prompt tokens that were let in.",
                    "counter",
                    s.prompt_tokens as f64,
                ),
                (
                    "fornax_prefix_hit_tokens_total",
                    "Of those, found in the cache.",
                    "counter",
                    s.prefix_hits as f64,
                ),
                (
                    "fornax_preemptions_total",
                    "Times that a request lost its place.",
                    "counter",
                    s.preemptions as f64,
                ),
                (
                    "fornax_engine_tokens_total",
                    "Tokens that the engine generated.",
                    "counter",
                    s.tokens as f64,
                ),
                (
                    "fornax_drafted_tokens_total",
                    "Guessed tokens that were verified.",
                    "counter",
                    s.drafted as f64,
                ),
                (
                    "fornax_accepted_tokens_total",
                    "Of those, right ones.",
                    "counter",
                    s.accepted as f64,
                ),
                ("fornax_steps_total", "Steps of the engine.", "counter", s.steps as f64),
                (
                    "fornax_steps_ahead_total",
                    "Of those, handed over while another ran.",
                    "counter",
                    s.steps_ahead as f64,
                ),
                (
                    "fornax_last_step_seconds",
                    "How long the last step took.",
                    "gauge",
                    f64::from(s.last_step_ms) / 1e3,
                ),
                (
                    "fornax_healthy",
                    "1 while the engine works.",
                    "gauge",
                    f64::from(u8::from(s.healthy)),
                ),
            ],
        ));
    }
    let Some((_, first)) = rows.first() else { return };
    for (i, (name, help, kind, _)) in first.iter().enumerate() {
        head(name, help, kind, out);
        for (label, values) in &rows {
            let _ = writeln!(out, "{name}{{model=\"{label}\"}} {}", values[i].3);
        }
    }
}
