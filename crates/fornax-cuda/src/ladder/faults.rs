//! What the provider says and does when memory runs out or the GPU is lost.

use fornax_gguf::TensorType;
use fornax_plan::{
    BlockId, Device, Error, Limits, Program, SeqStep, SlotId, StepOutput, Tokens, Want, conformance,
};

use crate::CudaDevice;
use crate::driver::host::Control;

const WANTS: &[(std::ops::Range<u32>, Want)] = &[(0..1, Want::Token { logprob: false })];
/// The driver's number of an illegal address.
const ILLEGAL: u32 = 700;

const TABLES: &[&[BlockId]] = &[&[BlockId(0), BlockId(1)]];

fn step() -> SeqStep<'static> {
    SeqStep {
        slot: SlotId(0),
        tokens: Tokens::Host(&[3]),
        pos: 0,
        tables: TABLES,
        wants: WANTS,
        sample: None,
        max_new: 1,
        stop: &[],
    }
}

/// A program of the smallest model, on a GPU whose faults a test makes.
struct Ready {
    case: conformance::Case,
    limits: Limits,
    device: CudaDevice,
    control: Control,
    program: Box<dyn Program>,
}

impl Ready {
    fn new() -> Ready {
        let case = conformance::proof(TensorType::F32);
        let (device, control) = CudaDevice::on_the_cpu();
        let limits = conformance::limits_for(&case, &device);
        let program = device.prepare(&case.plan, &limits).unwrap();
        Ready { case, limits, device, control, program }
    }
}

/// A step that comes to one token.
fn works(program: &mut dyn Program) {
    let mut out = StepOutput::default();
    let ticket = program.submit(&[step()]).unwrap();
    program.wait(ticket, &mut out).unwrap();
    assert_eq!(out.tokens.len(), 1);
}

fn refused(device: &CudaDevice, case: &conformance::Case, limits: &Limits) -> Error {
    device.prepare(&case.plan, limits).map(|_| ()).unwrap_err()
}

#[test]
fn memory_that_runs_out_is_told_with_what_is_needed_what_is_free_and_what_helps() {
    let case = conformance::proof(TensorType::Q8_0);
    let (device, control) = CudaDevice::on_the_cpu();
    let limits = conformance::limits_for(&case, &device);
    control.room(10_000);
    assert_eq!(device.memory_free(), Some(10_000));
    let e = refused(&device, &case, &limits);
    let told = e.to_string();
    assert!(e.is_out_of_memory(), "{told}");
    for part in ["bytes are needed (weights ", "10000 are free on ", "a smaller model"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    control.room(1 << 24);
    let many = Limits { kv_blocks: 100_000, ..limits.clone() };
    let told = refused(&device, &case, &many).to_string();
    assert!(
        told.contains("smaller --kv-memory, --ctx or --max-running, or --kv-type q8_0"),
        "{told}"
    );
    assert_eq!(control.used(), 0);
    // Enough for what is counted, and not for all: the allocation itself is told.
    let most = device.prepare(&case.plan, &limits).unwrap();
    let used = control.used();
    drop(most);
    assert_eq!(control.used(), 0, "a program gives all its memory back");
    control.room(used - 1);
    let e = refused(&device, &case, &limits);
    assert!(e.is_out_of_memory() && e.to_string().contains("bytes are free"), "{e}");
    assert_eq!(control.used(), 0, "so does one that was not finished");
    control.room(used);
    device.prepare(&case.plan, &limits).unwrap();
}

#[test]
fn a_gpu_that_is_lost_ends_every_step_by_name_and_takes_no_more() {
    let Ready { case, limits, device, control, mut program } = Ready::new();
    works(program.as_mut());
    control.fail_after(2, ILLEGAL, "an illegal memory access was encountered");
    let e = program.submit(&[step()]).unwrap_err();
    assert!(e.is_lost() && e.to_string().contains("illegal memory access"), "{e}");
    assert!(e.to_string().contains("start the program anew"), "{e}");
    // From now on nothing reaches the GPU, and every call names the first fault.
    let before = control.launches();
    for e in [program.submit(&[step()]).unwrap_err(), refused(&device, &case, &limits)] {
        assert!(e.is_lost() && e.to_string().contains("lost before"), "{e}");
        assert!(e.to_string().contains("illegal memory access"), "{e}");
    }
    assert_eq!(control.launches(), before);
    assert_eq!(device.memory_free(), None);
    let health = device.lost().unwrap();
    assert!(health.contains("illegal memory access"), "{health}");
    drop(program);
    assert_eq!(control.used(), 0, "memory goes even so");
}

#[test]
fn a_step_that_fails_without_harm_leaves_the_gpu_healthy() {
    let Ready { device, control, mut program, .. } = Ready::new();
    control.fail_after(0, 701, "too many resources requested for launch");
    let e = program.submit(&[step()]).unwrap_err();
    assert!(e.is_failed() && e.to_string().contains("too many resources"), "{e}");
    assert_eq!(device.lost(), None);
    works(program.as_mut());
}

#[test]
fn generations_leak_nothing() {
    let Ready { device, control, mut program, .. } = Ready::new();
    let mut used = Vec::new();
    for _ in 0..40 {
        works(program.as_mut());
        used.push((control.used(), device.objects()));
    }
    assert!(used.iter().all(|u| *u == used[0]));
    assert!(used[0].1 > 10, "there are objects to count");
    drop(program);
    assert_eq!((control.used(), device.objects()), (0, 0));
}
