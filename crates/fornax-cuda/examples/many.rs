//! Steps of many rows against the reference: every conformance case with the products of batches, then with those of
//! long prompts, whose activations are halves, against the reference that rounds no activations. Prints `N passed, N
//! failed`. Arguments choose cases by parts of their names.

#![allow(clippy::print_stdout, reason = "the report is the output")]

use std::process::ExitCode;

use fornax_cuda::CudaDevice;
use fornax_plan::conformance::{self, Case};
use fornax_plan::{ActMode, Device};

/// How far logits and hidden rows with activations of halves may be from the unrounded ones, as a share of one plus the
/// largest.
const HALVES: f32 = 2e-2;

#[derive(Default)]
struct Count {
    passed: u32,
    failed: u32,
    worst: f32,
}

impl Count {
    fn note(&mut self, case: &Case, outcome: Result<f32, String>) {
        match outcome {
            Ok(worst) => {
                self.passed += 1;
                self.worst = self.worst.max(worst);
                println!("ok    {} within {worst:.1e}", case.name);
            }
            Err(why) => {
                self.failed += 1;
                println!("FAIL  {why}");
            }
        }
    }
}

fn main() -> ExitCode {
    let asked: Vec<String> = std::env::args().skip(1).collect();
    let mut count = Count::default();
    for long in [false, true] {
        let device = match CudaDevice::open(0) {
            Ok(device) if long => device.with_long_from(1),
            Ok(device) => device,
            Err(e) => {
                println!("{e}");
                return ExitCode::FAILURE;
            }
        };
        println!("{}", if long { "activations of halves" } else { "activations of 8 bits" });
        for case in conformance::cases() {
            let limits = conformance::limits_for(&case, &device);
            let chosen = asked.is_empty() || asked.iter().any(|a| case.name.contains(a.as_str()));
            // Cases of tokens have no tolerance: they are for equal arithmetic.
            if !chosen
                || !device.supports(&case.plan, &limits).is_empty()
                || long && case.tolerance == 0.0
            {
                continue;
            }
            let outcome = if long {
                conformance::check_as(&device, &case, ActMode::F32, HALVES)
            } else {
                conformance::check(&device, &case)
            };
            count.note(&case, outcome);
        }
        println!("worst {:.1e}", count.worst);
        count.worst = 0.0;
    }
    println!("{} passed, {} failed", count.passed, count.failed);
    if count.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
