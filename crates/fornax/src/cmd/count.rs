//! `--step-report`: what the last decoded token cost a device that counts. Knows no command.

use std::fmt::Write;

use anyhow::{Context, Result};
use fornax_engine::Session;
use fornax_plan::{KernelCount, StepReport};
use serde_json::{Value, json};

/// The last token's counts.
///
/// # Errors
/// When the device does not count.
pub(super) fn of(session: &Session) -> Result<StepReport> {
    session.step_report().context(
        "--step-report: this device does not count what a token costs; use --device metal-emulated",
    )
}

/// As an object.
pub(super) fn json(report: &StepReport) -> Value {
    let kernel = |k: &KernelCount| {
        json!({
            "op": k.op,
            "kernel": k.kernel,
            "dispatches": k.dispatches,
            "barriers": k.barriers,
            "threadgroups": k.threadgroups,
            "threads": k.threads,
            "bytes_read": k.bytes_read,
            "bytes_loaded": k.bytes_loaded,
            "bytes_written": k.bytes_written,
            "bytes_weights": k.bytes_weights,
            "bytes_kv": k.bytes_kv,
        })
    };
    json!({
        "layers": report.layers,
        "command_buffers": report.command_buffers,
        "encoders": report.encoders,
        "waits": report.waits,
        "dispatches": report.dispatches,
        "barriers": report.barriers,
        "layer_dispatches": report.layer_dispatches,
        "layer_barriers": report.layer_barriers,
        "threadgroups": report.threadgroups,
        "bytes_read": report.bytes_read,
        "bytes_loaded": report.bytes_loaded,
        "bytes_written": report.bytes_written,
        "bytes_weights": report.bytes_weights,
        "bytes_kv": report.bytes_kv,
        "bytes_needed": report.bytes_needed,
        "read_ratio": report.read_ratio(),
        "readback_bytes": report.readback_bytes,
        "allocations": report.allocations,
        "kernels": report.kernels.iter().map(kernel).collect::<Vec<Value>>(),
    })
}

/// As lines to read.
pub(super) fn text(report: &StepReport) -> String {
    let r = report;
    let each = |n: u64| n as f64 / f64::from(r.layers.max(1));
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let mut text = format!(
        "the last token: {} command buffer(s), {} encoder(s), {} wait(s); {} dispatches and {} barriers, in each of {} \
         layers {:.2} and {:.2}\n",
        r.command_buffers,
        r.encoders,
        r.waits,
        r.dispatches,
        r.barriers,
        r.layers,
        each(r.layer_dispatches),
        each(r.layer_barriers)
    );
    let _ = writeln!(
        text,
        "read {:.3} MB ({:.4} of what must be; weights {:.3}, keys and values {:.3}), loaded {:.3}, wrote {:.3}; {} bytes \
         back; {} allocations",
        mb(r.bytes_read),
        r.read_ratio(),
        mb(r.bytes_weights),
        mb(r.bytes_kv),
        mb(r.bytes_loaded),
        mb(r.bytes_written),
        r.readback_bytes,
        r.allocations
    );
    let _ = writeln!(
        text,
        "{:<14} {:<22} {:>5} {:>8} {:>7} {:>7} {:>10} {:>10} {:>10}",
        "op", "kernel", "times", "barriers", "groups", "threads", "MB read", "loaded", "written"
    );
    for k in &r.kernels {
        let _ = writeln!(
            text,
            "{:<14} {:<22} {:>5} {:>8} {:>7} {:>7} {:>10.3} {:>10.3} {:>10.3}",
            k.op,
            k.kernel,
            k.dispatches,
            k.barriers,
            k.threadgroups,
            k.threads,
            mb(k.bytes_read),
            mb(k.bytes_loaded),
            mb(k.bytes_written)
        );
    }
    text
}
