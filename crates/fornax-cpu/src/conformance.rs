//! The conformance cases on every tier and several numbers of threads.

use fornax_plan::{Device, conformance};

use crate::{CpuDevice, CpuOptions, Isa};

fn device(isa: Isa, threads: usize) -> CpuDevice {
    let options = CpuOptions {
        threads: Some(threads),
        isa: Some(isa),
        pin: Some(false),
        ..CpuOptions::default()
    };
    CpuDevice::new(options).unwrap()
}

/// Holds devices to every case; those that keep blocks alike share what the reference says.
fn check_all(devices: &[CpuDevice]) {
    let all: Vec<&dyn Device> = devices.iter().map(|d| d as &dyn Device).collect();
    let named = |(at, what): (usize, String)| {
        let info = devices[at].info();
        format!("{}, {} threads, blocks of {}: {what}", info.tier, info.threads, info.kv_block)
    };
    let failed = |case| conformance::check_each(&all, case).into_iter().map(named);
    let failed: Vec<String> = conformance::cases().iter().flat_map(failed).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn every_case_on_every_tier() {
    let tiers: Vec<CpuDevice> = Isa::available().into_iter().map(|isa| device(isa, 2)).collect();
    assert!(!tiers.is_empty());
    check_all(&tiers);
}

#[test]
fn every_case_on_one_and_on_many_threads() {
    check_all(&[device(Isa::best(), 1), device(Isa::best(), 5)]);
}

#[test]
fn every_case_with_longer_blocks() {
    let long = device(Isa::best(), 2).with_kv_block(70);
    assert_eq!(long.info().kv_block, 96);
    check_all(&[long]);
}
