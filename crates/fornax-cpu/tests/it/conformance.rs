//! The conformance cases on every tier and several numbers of threads.

use fornax_cpu::{CpuDevice, CpuOptions, Isa};
use fornax_plan::{Device, conformance};

fn device(isa: Isa, threads: usize) -> CpuDevice {
    let options = CpuOptions { threads: Some(threads), isa: Some(isa), pin: Some(false) };
    CpuDevice::new(options).unwrap()
}

fn check_all(isa: Isa, threads: usize) {
    check_on(&device(isa, threads));
}

fn check_on(device: &CpuDevice) {
    let failed: Vec<String> = conformance::cases()
        .iter()
        .filter_map(|case| conformance::check(device, case).err())
        .collect();
    let info = device.info();
    let what = format!("{}, {} threads, blocks of {}", info.tier, info.threads, info.kv_block);
    assert!(failed.is_empty(), "{what}:\n{}", failed.join("\n"));
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

#[test]
fn every_case_with_longer_blocks() {
    let long = device(Isa::best(), 2).with_kv_block(70);
    assert_eq!(long.info().kv_block, 96);
    check_on(&long);
}
