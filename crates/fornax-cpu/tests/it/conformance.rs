//! The conformance cases on every tier and several numbers of threads.

use fornax_cpu::{CpuDevice, CpuOptions, Isa};
use fornax_plan::conformance;

fn device(isa: Isa, threads: usize) -> CpuDevice {
    let options = CpuOptions { threads: Some(threads), isa: Some(isa), pin: Some(false) };
    CpuDevice::new(options).unwrap()
}

fn check_all(isa: Isa, threads: usize) {
    let device = device(isa, threads);
    let failed: Vec<String> = conformance::cases()
        .iter()
        .filter_map(|case| conformance::check(&device, case).err())
        .collect();
    assert!(failed.is_empty(), "{isa}, {threads} threads:\n{}", failed.join("\n"));
}

#[test]
fn every_case_on_every_tier() {
    for isa in Isa::available() {
        check_all(isa, 2);
    }
}

#[test]
fn every_case_on_one_and_on_many_threads() {
    check_all(Isa::best(), 1);
    check_all(Isa::best(), 5);
}
