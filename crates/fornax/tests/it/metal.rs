//! The Metal kernels under the emulator, through the program: the same ids as the CPU's, in halves too, and what a token costs.

use serde_json::Value;

use crate::program::{Folder, Ran, fornax, model, ran};

const TEXT: &str = "The furnace was lit before dawn, and by noon its heat had reached every room of the old house.";

fn run(home: &Folder, name: &str, flags: &[&str]) -> Ran {
    let mut command = fornax(home);
    command.args(["run", "--raw", "--temp", "0", "-n", "10", "--json", "-m"]).arg(model(name));
    // The compiled kernels are kept where the user's are.
    if let Some(home) = std::env::var_os("HOME") {
        command.env("HOME", home);
    }
    ran(command.args(flags).args(["--", TEXT]))
}

fn object(ran: Ran) -> Value {
    serde_json::from_str(&ran.ok().stdout).unwrap()
}

/// Files without block-quantised matrices, where every device computes in the same mode.
#[test]
fn a_prompt_handed_between_metal_and_the_cpu_leads_to_the_same_answer() {
    let home = Folder::new();
    for name in ["llama3", "qwen3", "mistral-swa"] {
        let cpu = object(run(&home, name, &["--device", "cpu"]));
        for flags in [
            &["--device", "metal-emulated"][..],
            &["--prefill-device", "metal-emulated", "--decode-device", "cpu"],
            &["--prefill-device", "cpu", "--decode-device", "metal-emulated"],
        ] {
            assert_eq!(object(run(&home, name, flags))["ids"], cpu["ids"], "{name} with {flags:?}");
        }
    }
}

#[test]
fn a_token_is_counted_where_the_device_counts() {
    let home = Folder::new();
    let flags = ["--device", "metal-emulated", "--step-report"];
    let report = &object(run(&home, "qwen3-q8_0", &flags))["step_report"];
    let of = |key: &str| report[key].as_u64().unwrap();
    assert_eq!([of("command_buffers"), of("encoders"), of("waits")], [1, 1, 1]);
    assert_eq!([of("layers"), of("layer_dispatches"), of("layer_barriers")], [3, 15, 15]);
    assert_eq!([of("readback_bytes"), of("allocations")], [4, 0]);
    assert!(report["kernels"].as_array().unwrap().len() > 5);
    let cpu = run(&home, "qwen3-q8_0", &["--device", "cpu", "--step-report"]).fails(1);
    assert!(cpu.stderr.contains("metal-emulated"), "{}", cpu.stderr);
}

#[test]
fn kernels_are_timed_one_by_one_and_steps_by_who_works() {
    let home = Folder::new();
    let flags = ["--device", "metal-emulated", "--profile", "--timing"];
    let ran = run(&home, "qwen3-q8_0", &flags).ok();
    let told = ran.stderr.clone();
    let ids = object(ran)["ids"].as_array().unwrap().len();
    let table = |head: &str| {
        let lines = told.lines().skip_while(|l| !l.starts_with(head)).skip(1);
        let rows = lines.map_while(|l| l.strip_suffix('%')).map(|l| {
            let words: Vec<&str> = l.split_whitespace().collect();
            (
                words[0].to_string(),
                words[1].parse::<u32>().unwrap(),
                words[4].parse::<f64>().unwrap(),
            )
        });
        rows.collect::<Vec<_>>()
    };
    for (head, one) in [("decode ", "gated_mlp"), ("decode kernels", "gated_mlp_q8_0")] {
        let rows = table(head);
        // Three layers of all tokens but the last, which is not fed again.
        assert!(
            rows.iter().any(|r| r.0 == one && r.1 as usize == 3 * (ids - 1)),
            "{one} in {told}"
        );
        let all: f64 = rows.iter().map(|r| r.2).sum();
        assert!((99.0..101.0).contains(&all), "{all} % in {told}");
    }
    let steps = told.lines().filter(|l| l.contains("recorded in") && l.contains("ran in"));
    // A token that ends the answer is a step too.
    assert!(ids > 2 && (ids..=ids + 1).contains(&steps.count()), "{ids} ids: {told}");
}

/// A model of real size: nothing is read twice, and 40 cores have something to do.
#[test]
fn a_token_of_a_real_shape_reads_nothing_twice() {
    let home = Folder::new();
    let mut command = fornax(&home);
    if let Some(home) = std::env::var_os("HOME") {
        command.env("HOME", home);
    }
    command.args(["bench", "--synthetic", "smollm2-135m:q8_0", "--device", "metal-emulated"]);
    let bench = object(ran(command.args(["-d", "1024", "--step-report", "--json"])));
    assert!(bench["pp"].is_null() && bench["tg"].is_null());
    let report = &bench["step_report"];
    let of = |key: &str| report[key].as_u64().unwrap();
    assert_eq!([of("layers"), of("layer_dispatches"), of("layer_barriers")], [30, 150, 150]);
    assert!(report["read_ratio"].as_f64().unwrap() <= 1.05, "{report}");
    let kernels = report["kernels"].as_array().unwrap();
    for kernel in kernels {
        let name = kernel["kernel"].as_str().unwrap();
        let matrix = ["matvec", "qkv", "gated", "attention"].iter().any(|k| name.starts_with(k));
        let groups = kernel["threadgroups"].as_u64().unwrap();
        assert!(!matrix || groups >= 40, "{name} has {groups} threadgroups");
    }
}

#[test]
fn without_a_compiler_the_emulator_says_what_is_missing() {
    let home = Folder::new();
    let mut command = fornax(&home);
    command.env("FORNAX_MSL_CXX", "/nonexistent/compiler").args(["run", "--raw", "-n", "1", "-m"]);
    let why = ran(command.arg(model("llama3")).args(["--device", "metal-emulated", "hi"])).fails(1);
    assert!(why.stderr.contains("C++ compiler"), "{}", why.stderr);
    // Nobody who did not name it meets it.
    let mut command = fornax(&home);
    command.env("FORNAX_MSL_CXX", "/nonexistent/compiler").args(["run", "--raw", "-n", "1", "-m"]);
    ran(command.arg(model("llama3")).args(["--temp", "0", "hi"])).ok();
    let devices = ran(fornax(&home).arg("devices")).ok().stdout;
    assert!(!devices.contains("emulated"), "{devices}");
}

#[test]
fn a_deterministic_gpu_gives_a_request_the_same_ids_beside_any_number_of_others() {
    let home = Folder::new();
    let mut command = fornax(&home);
    if let Some(home) = std::env::var_os("HOME") {
        command.env("HOME", home);
    }
    command
        .args(["bench", "--batch", "1,3", "-p", "24", "-n", "5", "-r", "1", "--no-speculation"])
        .args(["--json", "--device", "metal-emulated", "--deterministic", "-m"]);
    let report = object(ran(command.arg(model("qwen3-q8_0"))));
    assert_eq!((&report["device"], &report["same"]), (&"metal".into(), &true.into()), "{report}");
}
