//! The rungs of the ladder that need no GPU: the whole provider on its plain kernels, compiled as C++ and run on the CPU,
//! against the reference, and what it does when memory or the GPU fails. Tests alone.

mod deep;
mod draws;
mod faults;
mod fits;
mod formats;
mod graphs;
mod models;
mod polls;
mod states;
mod tapes;

use fornax_plan::{Device, Limits, conformance};

use crate::CudaDevice;

/// Cases of one op after the other; the tests run side by side.
fn pass(part: impl Fn(&str) -> bool) -> usize {
    let (device, control) = CudaDevice::on_the_cpu();
    let mut passed = 0;
    for case in conformance::cases().iter().filter(|c| part(&c.name)) {
        let limits = conformance::limits_for(case, &device);
        assert_eq!(device.supports(&case.plan, &limits), [], "{}", case.name);
        conformance::check(&device, case).unwrap();
        passed += 1;
    }
    assert!(control.launches() >= passed as u64);
    assert_eq!(control.used(), 0, "programs give their memory back");
    passed
}

#[test]
fn every_product_of_the_list_passes() {
    assert!(pass(|name| name.starts_with("matmul/")) > 60);
}

#[test]
fn every_other_case_of_the_list_passes() {
    assert!(pass(|name| !name.starts_with("matmul/")) > 30);
}

#[test]
fn deterministic_steps_are_taken() {
    let (device, _) = CudaDevice::on_the_cpu();
    let case = conformance::proof(fornax_gguf::TensorType::Q8_0);
    let limits = Limits { deterministic: true, ..conformance::limits_for(&case, &device) };
    assert_eq!(device.supports(&case.plan, &limits), []);
    let alike = conformance::run(&device, &case, &limits, 2).unwrap();
    let limits = conformance::limits_for(&case, &device);
    let other = conformance::run(&device, &case, &limits, 1).unwrap();
    for (a, b) in alike.iter().zip(&other) {
        let ids = |o: &fornax_plan::StepOutput| {
            o.tokens.iter().map(|t| (t.seq, t.pos, t.token)).collect::<Vec<_>>()
        };
        assert!(!a.tokens.is_empty());
        assert_eq!(ids(a), ids(b), "plain kernels are deterministic anyway");
    }
}
