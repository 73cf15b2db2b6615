//! What a counted token should take on each of Apple's chips. Predicted, never run: the model is three terms that were
//! measured by others, and its only inputs are a step's counts. It knows no kernel and no device.
//!
//! - Bytes: different bytes read and written, at the share of the data sheet's bandwidth that well-tuned kernels reach.
//! - Barriers: what one dependent dispatch costs, however small.
//! - Occupancy: a core that has less than [`SIMDS_PER_CORE`] simdgroups under way does not draw its share of the bandwidth.

use std::fmt::Write as _;

use fornax_plan::{KernelCount, StepReport};

/// A chip with a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chip {
    /// Its name.
    pub name: &'static str,
    /// Memory bandwidth of the data sheet, bytes a second.
    pub bandwidth: f64,
    /// GPU cores of its largest variant.
    pub cores: u32,
}

const fn chip(name: &'static str, gb_per_s: u32, cores: u32) -> Chip {
    Chip { name, bandwidth: gb_per_s as f64 * 1e9, cores }
}

/// Apple's chips, by generation.
pub static CHIPS: &[Chip] = &[
    chip("M1", 68, 8),
    chip("M1 Pro", 200, 16),
    chip("M1 Max", 400, 32),
    chip("M1 Ultra", 800, 64),
    chip("M2", 100, 10),
    chip("M2 Pro", 200, 19),
    chip("M2 Max", 400, 38),
    chip("M2 Ultra", 800, 76),
    chip("M3", 100, 10),
    chip("M3 Pro", 150, 18),
    chip("M3 Max", 400, 40),
    chip("M4", 120, 10),
    chip("M4 Pro", 273, 20),
    chip("M4 Max", 546, 40),
    chip("M5", 153, 10),
];

/// The share of the data sheet's bandwidth that tuned matrix-vector kernels were seen to reach: 84 to 90 percent on M1 Max,
/// M2, M2 Pro and M4.
pub const ATTAINABLE: f64 = 0.86;

/// Seconds of one dispatch behind a barrier, beyond its bytes: measured on an M2 Pro by adding empty ones to a token.
pub const BARRIER_S: f64 = 5.16e-6;

/// Simdgroups that a core needs under way to draw its share of the bandwidth: some 5 KB in flight, at a latency of half a
/// microsecond and 10 GB/s a core, from simdgroups that wait for half a kilobyte or more each.
pub const SIMDS_PER_CORE: u64 = 8;

/// Where a token's time goes, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Predicted {
    /// Moving bytes with every core at work.
    pub bytes: f64,
    /// Waiting at barriers.
    pub barriers: f64,
    /// Moving the same bytes with too few threadgroups.
    pub idle: f64,
}

impl Predicted {
    /// The whole token.
    pub fn seconds(self) -> f64 {
        self.bytes + self.barriers + self.idle
    }

    /// Tokens a second.
    pub fn rate(self) -> f64 {
        1.0 / self.seconds()
    }
}

/// The time of a counted token on a chip.
pub fn predict(report: &StepReport, chip: &Chip) -> Predicted {
    let rate = ATTAINABLE * chip.bandwidth;
    let mut all =
        Predicted { barriers: report.barriers as f64 * BARRIER_S, ..Predicted::default() };
    for kernel in &report.kernels {
        let full = (kernel.bytes_read + kernel.bytes_written) as f64 / rate;
        all.bytes += full;
        all.idle += full * (1.0 / occupancy(kernel, chip) - 1.0);
    }
    all
}

/// The share of the chip's bandwidth that one dispatch can draw.
fn occupancy(kernel: &KernelCount, chip: &Chip) -> f64 {
    let simds = kernel.threadgroups * u64::from(kernel.threads.div_ceil(32));
    let cores = u64::from(chip.cores);
    // A threadgroup runs on one core.
    let spread = kernel.threadgroups as f64 / cores as f64;
    let deep = simds as f64 / (cores * SIMDS_PER_CORE) as f64;
    spread.min(deep).clamp(1e-3, 1.0)
}

/// What others reported: model, chip, tokens a second.
static REPORTED: &[(&str, &str, f64)] =
    &[("Qwen3-0.6B Q8_0", "M2 Pro", 108.0), ("SmolLM2-360M Q8_0", "M5", 91.0)];

/// The predictions for several models as a page in Markdown: name, keys in the cache, and counts of each.
pub fn page(models: &[(String, u32, StepReport)]) -> String {
    let mut page = String::from(
        "# Metal: predicted, not run\n\nWritten by `cargo xtask docs` from the counts under `docs/metal-counts/`; edit \
         `cost.rs`, not this page.\n\n**Nothing on this page was run on a Mac.** The counts of a decoded token are exact: the \
         emulator took them from the kernels\nas they are. The times are a model of three terms: different bytes at ",
    );
    let _ = writeln!(
        page,
        "{:.0} % of the data sheet's bandwidth, {:.2} µs for each\nbarrier, and a core that draws its share of the bandwidth only \
         with {SIMDS_PER_CORE} simdgroups under way. What caches serve and\nwhat instructions take is not in it: it says what the memory allows, and a kernel may be slower. `fornax bench --json`\non a Mac prints what replaces a line. The models have the shapes of the named ones and random weights.\n\n## Counts\n",
        100.0 * ATTAINABLE,
        1e6 * BARRIER_S
    );
    page += "| model | keys | dispatches | barriers | in a layer | MB read | of what must be | loaded | bytes back |\n\
             | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
    for (name, keys, r) in models {
        let each = |n: u64| n as f64 / f64::from(r.layers.max(1));
        let _ = writeln!(
            page,
            "| {name} | {keys} | {} | {} | {:.0} and {:.0} | {:.1} | {:.3} | {:.1} | {} |",
            r.dispatches,
            r.barriers,
            each(r.layer_dispatches),
            each(r.layer_barriers),
            r.bytes_read as f64 / 1e6,
            r.read_ratio(),
            r.bytes_loaded as f64 / 1e6,
            r.readback_bytes
        );
    }
    page += "\n## Tokens a second, predicted\n\nA token's milliseconds in bytes + barriers + idle cores.\n";
    for (name, keys, r) in models {
        let _ = write!(
            page,
            "\n### {name} at {keys} keys\n\n| chip | tokens/s | ms | others report |\n| --- | ---: | --- | --- |\n"
        );
        for chip in CHIPS {
            let p = predict(r, chip);
            let ms = |s: f64| 1e3 * s;
            let said = REPORTED.iter().find(|(model, on, _)| model == name && *on == chip.name);
            let said = said.map_or(String::new(), |(.., rate)| format!("{rate} tokens/s"));
            let _ = writeln!(
                page,
                "| {} | {:.0} | {:.2} + {:.2} + {:.2} | {said} |",
                chip.name,
                p.rate(),
                ms(p.bytes),
                ms(p.barriers),
                ms(p.idle)
            );
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(name: &str) -> Chip {
        *CHIPS.iter().find(|c| c.name == name).unwrap()
    }

    /// A token of so many equal dispatches, each behind a barrier.
    fn token(bytes: u64, dispatches: u64, threadgroups: u64) -> StepReport {
        let kernel = KernelCount {
            dispatches,
            threadgroups,
            threads: 128,
            bytes_read: bytes,
            ..KernelCount::default()
        };
        StepReport { barriers: dispatches, kernels: vec![kernel], ..StepReport::default() }
    }

    #[test]
    fn the_terms_add_up() {
        let p = predict(&token(344_000_000, 100, 1000), &on("M1 Max"));
        assert!((p.bytes - 1e-3).abs() < 1e-9 && (p.barriers - 5.16e-4).abs() < 1e-9, "{p:?}");
        assert_eq!(p.idle, 0.0);
        assert!((p.rate() - 1.0 / (p.bytes + p.barriers)).abs() < 1e-6);
    }

    #[test]
    fn few_threadgroups_leave_cores_idle_on_large_chips_only() {
        let few = token(100_000_000, 1, 20);
        assert_eq!(predict(&few, &on("M4")).idle, 0.0, "twenty threadgroups fill ten cores");
        let p = predict(&few, &on("M2 Ultra"));
        // 80 simdgroups where 608 are needed.
        assert!((p.idle / p.bytes - (608.0 / 80.0 - 1.0)).abs() < 1e-9, "{p:?}");
        let more = token(100_000_000, 1, 40);
        assert!(predict(&more, &on("M2 Ultra")).seconds() < p.seconds());
    }

    /// The steps of two write-ups, as they describe them, land near the rates that they measured: 18 dispatches a layer with
    /// Q8_0 held as F16 on an M2 Pro, and some 28 on an M5.
    #[test]
    fn what_others_measured_is_near() {
        for (bytes, dispatches, chip, measured) in
            [(2 * 596_000_000, 28 * 18, "M2 Pro", 108.0), (2 * 362_000_000, 32 * 28, "M5", 91.0)]
        {
            let rate = predict(&token(bytes, dispatches, 1000), &on(chip)).rate();
            let off = (rate / measured - 1.0).abs();
            assert!(off < 0.15, "{chip}: {rate:.1} predicted, {measured} measured");
        }
    }

    #[test]
    fn the_page_says_that_nothing_was_run() {
        let models = [("Qwen3-0.6B Q8_0".to_string(), 1024, token(650_000_000, 150, 1000))];
        let page = page(&models);
        assert!(page.contains("predicted, not run") && page.contains("108 tokens/s"), "{page}");
        let lines = page.lines().filter(|l| l.starts_with("| M")).count();
        assert_eq!(lines, CHIPS.len(), "{page}");
    }
}
