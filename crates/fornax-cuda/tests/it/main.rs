//! The GPU against the reference. Where there is no GPU the cases are passed over and the report
//! says so; what needs none is in the unit tests and in `scripts/check-cuda.sh`.

#![allow(clippy::print_stderr, reason = "a case that is passed over says so")]

use fornax_cuda::CudaDevice;
use fornax_gguf::TensorType;
use fornax_plan::{Device, conformance};

/// The GPU, or the reason why there is none, which must be a named one.
fn gpu() -> Option<CudaDevice> {
    match CudaDevice::open(0) {
        Ok(device) => Some(device),
        Err(e) => {
            assert!(e.is_unsupported(), "a GPU that is there must open: {e}");
            assert!(e.to_string().contains("--device cpu"), "{e}");
            eprintln!("passed over: {e}");
            None
        }
    }
}

#[test]
fn the_proof_gives_the_ids_of_the_reference() {
    let Some(device) = gpu() else { return };
    for ty in [TensorType::F32, TensorType::F16, TensorType::Q8_0] {
        conformance::check(&device, &conformance::proof(ty)).unwrap();
    }
}

#[test]
fn every_case_that_is_not_refused_passes() {
    let Some(device) = gpu() else { return };
    let mut passed = 0;
    for case in conformance::cases() {
        let limits = conformance::limits_for(&case, &device);
        if device.supports(&case.plan, &limits).is_empty() {
            conformance::check(&device, &case).unwrap();
            passed += 1;
        }
    }
    assert!(passed > 90, "only {passed} cases ran");
}
