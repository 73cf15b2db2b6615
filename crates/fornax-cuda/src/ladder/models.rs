//! Test models of the families that plain kernels alone run, as the golden example runs all of them on a GPU: logits and
//! greedy tokens against those of an independent implementation, 8-bit activations against the reference, determinism.

#[allow(dead_code, reason = "the example is a program of its own, too")]
#[path = "../../examples/golden.rs"]
mod golden;

#[allow(dead_code, reason = "the example is a program of its own, too")]
#[path = "../../examples/pace.rs"]
mod pace;

use std::path::PathBuf;

use fornax_gguf::Gguf;
use fornax_plan::{ActMode, Device, KvType, Limits, conformance};

use crate::CudaDevice;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models")
}

/// Prompts of more tokens than `most` are the GPU's to run.
fn pass(part: impl Fn(&str) -> bool, at_least: usize, most: usize) {
    let (device, _) = CudaDevice::on_the_cpu();
    let mut passed = 0;
    for entry in std::fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !path.join("model.gguf").exists() || !part(&name) {
            continue;
        }
        match golden::model(&device, &path, most) {
            Ok(golden::Outcome::Agreed(_)) => passed += 1,
            Ok(golden::Outcome::Refused(why)) => panic!("{name} refused: {why}"),
            Err(why) => panic!("{name}: {why}"),
        }
    }
    assert!(passed >= at_least, "{passed} models");
}

#[test]
fn mixtures_agree() {
    pass(|name| ["mixtral", "qwen3moe", "gptoss-mxfp4"].contains(&name), 3, 8);
}

#[test]
fn short_convolutions_agree() {
    pass(|name| name == "lfm2", 1, 48);
}

/// Compiles what known shapes (those of the pace example that `FORNAX_SHAPES` names, with their formats) need on an H200, into
/// the folder that `FORNAX_CUBINS` names.
#[test]
#[ignore = "compiles for another machine"]
fn compile_for_shapes() {
    assert!(std::env::var_os("FORNAX_CUBINS").is_some(), "FORNAX_CUBINS names no folder");
    let device = CudaDevice::on_paper().unwrap();
    let shapes = std::env::var("FORNAX_SHAPES").expect("FORNAX_SHAPES names shapes");
    for text in shapes.split_whitespace() {
        let mut parts = text.split(':');
        let shape = pace::SHAPES.iter().find(|s| parts.clone().next() == Some(s.name)).unwrap();
        let ty = fornax_gguf::TensorType::parse(parts.nth(1).unwrap()).unwrap();
        let kv_type = match parts.next() {
            Some("q8_0") => KvType::Q8_0,
            Some("f32") => KvType::F32,
            _ => KvType::F16,
        };
        let plan = pace::plan(shape, &mut pace::Pool::new(ty).unwrap());
        for (slots, act) in [(1, None), (8, None)] {
            let limits = Limits {
                slots,
                rows: 256,
                wanted: slots,
                kv_blocks: 64,
                kv_type,
                act,
                ..Limits::default()
            };
            device.prepare(&plan, &limits).unwrap();
        }
    }
}

/// Compiles what the test models and the list of cases need on an H200, into the folder that `FORNAX_CUBINS` names: for a
/// machine whose time is dear. It needs NVIDIA's compiler.
#[test]
#[ignore = "compiles for another machine; see scripts/ladder-cuda.sh"]
fn compile_for_the_ladder() {
    assert!(std::env::var_os("FORNAX_CUBINS").is_some(), "FORNAX_CUBINS names no folder");
    let device = CudaDevice::on_paper().unwrap();
    for family in crate::families() {
        crate::Compiler::load().unwrap().compile(family, &[], 90).unwrap();
    }
    let mut kinds = vec![(ActMode::F32, KvType::F32)];
    kinds.extend([KvType::F32, KvType::F16].map(|kv| (ActMode::Q8, kv)));
    for entry in std::fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path().join("model.gguf");
        let plan = fornax_engine::arch::plan(&Gguf::open(&path).unwrap()).unwrap();
        for (act, kv_type) in &kinds {
            let (act, kv_type) = (Some(*act), *kv_type);
            let limits = Limits { rows: 64, wanted: 64, kv_type, act, ..Limits::default() };
            device.prepare(&plan, &limits).unwrap();
        }
    }
    for case in conformance::cases() {
        device.prepare(&case.plan, &conformance::limits_for(&case, &device)).unwrap();
    }
}
