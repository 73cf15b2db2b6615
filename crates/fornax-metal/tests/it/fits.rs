//! What a device's pipelines do not take: narrower variants, then other kernels, then a refusal by name at load.

use fornax_gguf::TensorType;
use fornax_metal::Family;
#[cfg(not(target_os = "macos"))]
use fornax_metal::MetalDevice;
#[cfg(not(target_os = "macos"))]
use fornax_plan::Device;
use fornax_plan::conformance;

#[cfg(not(target_os = "macos"))]
fn held(device: &MetalDevice, families: &[&str]) -> usize {
    let cases = conformance::cases();
    let of = |name: &str| families.iter().any(|f| name.starts_with(f));
    let runs = cases.iter().filter(|c| of(&c.name)).filter(|c| {
        let limits = conformance::limits_for(c, device);
        device.supports(&c.plan, &limits).is_empty()
    });
    runs.fold(0, |n, c| {
        conformance::check(device, c).unwrap_or_else(|e| panic!("{e}"));
        n + 1
    })
}

#[cfg(not(target_os = "macos"))]
#[test]
fn products_norms_and_embeddings_run_in_few_threads() {
    // Sixty-four threads: no kernel for matrices fits, vectors take their rows by four.
    let device = MetalDevice::emulated(3).narrowed(64);
    assert!(held(&device, &["matmul/", "rms_norm/", "embed/"]) > 60);
}

#[cfg(not(target_os = "macos"))]
#[test]
fn what_has_no_narrower_variant_is_refused_by_name_at_load() {
    let device = MetalDevice::emulated(3).narrowed(128);
    let case = conformance::proof(TensorType::Q8_0);
    let limits = conformance::limits_for(&case, &device);
    let e = device.prepare(&case.plan, &limits).err().expect("attention needs 256");
    let text = e.to_string();
    assert!(
        e.is_unsupported() && text.contains("needs 256 threads") && text.contains("--device cpu"),
        "{text}"
    );
}

#[test]
fn every_kernel_can_be_built() {
    assert!(crate::kernels(1).build_all().unwrap() > 90);
}

#[test]
fn every_family_gives_the_reference_its_tokens() {
    for family in [Family::Apple7, Family::Apple8, Family::Apple9, Family::Apple10] {
        let device = crate::kernels(4).as_family(family);
        conformance::check(&device, &conformance::proof(TensorType::Q8_0)).unwrap();
    }
}

#[cfg(not(target_os = "macos"))]
#[test]
fn a_profile_is_taken_from_its_own_gpu_alone() {
    let device = MetalDevice::emulated(5);
    let case = conformance::proof(TensorType::Q8_0);
    let lines: Vec<String> = MetalDevice::tunable(&case.plan);
    let gpu = device.info().name;
    let mut profile = format!("fornax metal profile 2\ngpu {gpu}\n");
    for line in lines.iter().filter(|l| l.starts_with("matvec_")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ty = words[0].trim_start_matches("matvec_");
        profile += &format!("matvec {ty} {} {} 1 8\n", words[1], words[3]);
    }
    assert!(profile.lines().count() > 4, "{lines:?}");
    let tuned = device.clone().with_profile(&profile).unwrap();
    conformance::check(&tuned, &case).unwrap();
    let e = device.clone().with_profile(&profile.replace(&gpu, "Apple M9")).unwrap_err();
    assert!(e.is_unsupported() && e.to_string().contains("Apple M9"), "{e}");
    let e = device.tune(&case.plan, |_| panic!("nothing is timed")).unwrap_err();
    assert!(e.is_unsupported() && e.to_string().contains("--dry-run"), "{e}");
}
