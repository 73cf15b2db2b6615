//! The ways to run one model that must not change what it says: devices, layouts, hand-over; and how a device is chosen.

use std::fs;

use serde_json::Value;

use crate::hub::{Hub, Reply};
use crate::program::{Folder, Ran, fornax, model, ran};

const TEXT: &str = "The furnace was lit before dawn, and by noon its heat had reached every room of the old house, so \
    that nobody spoke of the winter outside any more. In the kitchen a kettle sang; in the hall the clock had stopped \
    at four.";

/// Everything rounded in the same places on every device.
const SAME: [&str; 4] = ["--act", "q8", "--kv-type", "f16"];

fn run(home: &Folder, name: &str, prompt: &str, flags: &[&str]) -> Ran {
    let mut command = fornax(home);
    command.args(["run", "--raw", "--temp", "0", "-n", "12", "--json", "-m"]).arg(model(name));
    ran(command.args(flags).args(["--", prompt]))
}

#[track_caller]
fn object(ran: Ran) -> Value {
    serde_json::from_str(&ran.ok().stdout).unwrap()
}

#[test]
fn a_prompt_of_another_device_leads_to_the_same_answer() {
    let home = Folder::new();
    // A window, states, and 8-bit weights among them.
    for name in ["llama3", "llama3-q8_0", "lfm2", "gemma2", "mistral-swa"] {
        let alone = |device: &str| {
            object(run(&home, name, TEXT, &[&["--device", device][..], &SAME].concat()))
        };
        let (cpu, reference) = (alone("cpu"), alone("reference"));
        for (flags, expected) in [
            (&["--prefill-device", "reference", "--decode-device", "cpu"][..], &cpu),
            (&["--prefill-device", "cpu", "--decode-device", "reference"], &reference),
            (&["--prefill-device", "reference", "--device", "cpu"], &cpu),
            (&["--device", "cpu", "--decode-device", "reference"], &reference),
        ] {
            let split = object(run(&home, name, TEXT, &[flags, &SAME].concat()));
            for key in ["ids", "text", "prompt_tokens", "finish"] {
                assert_eq!(split[key], expected[key], "{key} of {name} with {flags:?}");
            }
        }
    }
}

#[test]
fn a_split_run_says_where_each_part_runs() {
    let home = Folder::new();
    let flags = ["--prefill-device", "reference", "--decode-device", "cpu"];
    let loud = run(&home, "llama3", TEXT, &flags).ok().stderr;
    assert!(loud.contains("the prompt runs on reference") && loud.contains("; cpu "), "{loud}");
    // There is nothing to hand over.
    object(run(&home, "llama-bias", "a", &flags));
    let nowhere = run(&home, "llama3", TEXT, &["--prefill-device", "metal"]).fails(1);
    assert!(nowhere.stderr.contains("metal"), "{}", nowhere.stderr);
    let long = run(&home, "llama3", TEXT, &[&flags[..], &["--ctx", "8"]].concat()).fails(1);
    assert!(long.stderr.contains("--ctx"), "{}", long.stderr);
}

#[test]
fn the_layout_of_keys_and_values_changes_no_token() {
    let home = Folder::new();
    for name in ["llama3-q8_0", "lfm2", "mistral-swa"] {
        for device in ["cpu", "reference"] {
            let with = |layout: &str| {
                object(run(&home, name, TEXT, &["--device", device, "--kv", layout]))["ids"].clone()
            };
            let plain = object(run(&home, name, TEXT, &["--device", device]))["ids"].clone();
            assert_eq!(with("paged"), plain, "{name} on {device}");
            assert_eq!(with("contiguous"), plain, "{name} on {device}");
        }
        let flags = ["--prefill-device", "reference", "--decode-device", "cpu"];
        let split = |layout: &str| {
            object(run(&home, name, TEXT, &[&flags[..], &["--kv", layout]].concat()))["ids"].clone()
        };
        assert_eq!(split("contiguous"), split("paged"), "{name}");
    }
}

#[test]
fn a_gpu_is_there_or_missed_by_name() {
    let home = Folder::new();
    let devices = object(ran(fornax(&home).args(["devices", "--json"])));
    let gpu = devices["devices"].as_array().unwrap().iter().any(|d| d["kind"] == "cuda");
    let named = run(&home, "llama3", TEXT, &["--device", "cuda"]);
    let auto = run(&home, "llama3", TEXT, &["--device", "auto"]).ok();
    if gpu {
        let named = named.ok().stderr;
        assert!(named.contains("; cuda ") || named.contains("the CPU runs"), "{named}");
    } else {
        let error = named.fails(1).stderr;
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.contains("cuda") && error.contains("--device cpu"), "{error}");
    }
    assert!(auto.stderr.contains("; cpu "), "{auto:?}");
    // A tier is the CPU's, whatever else there is.
    let tier = run(&home, "llama3", TEXT, &["--cpu-isa", "scalar"]).ok();
    assert!(tier.stderr.contains("; cpu scalar"), "{}", tier.stderr);
}

/// Logits after every token of a long prompt.
fn all_logits(home: &Folder, flags: &[&str]) -> Vec<f32> {
    let ids: Vec<String> = (0..60).map(|i| (3 * i + 1).to_string()).collect();
    let mut command = fornax(home);
    command.args(["logits", "--all", "--device", "cpu", "--tokens", &ids.join(",")]).args(flags);
    let stdout = ran(command.arg("-m").arg(model("qwen3-q8_0"))).ok().stdout;
    // A line is a position, then its logits.
    let logits = stdout.lines().flat_map(|l| l.split_once('\t').unwrap().1.split(' '));
    logits.map(|v| v.parse().unwrap()).collect()
}

#[test]
fn a_fast_prompt_is_near_the_exact_one_or_refused_by_name() {
    let home = Folder::new();
    let refused = |flags: &[&str], code| {
        let flags: Vec<&str> = ["--fast-prompt"].iter().chain(flags).copied().collect();
        run(&home, "llama3", TEXT, &flags).fails(code).stderr
    };
    let both = refused(&["--deterministic"], 2);
    assert!(both.contains("--deterministic") && both.contains("--fast-prompt"), "{both}");
    let reference = refused(&["--device", "reference"], 1);
    assert!(
        reference.contains("--fast-prompt") && reference.contains("--device cpu"),
        "{reference}"
    );
    let scalar = refused(&["--cpu-isa", "scalar"], 1);
    assert!(scalar.contains("the tier scalar has no fast form"), "{scalar}");
    let devices = object(ran(fornax(&home).args(["devices", "--json"])));
    let cpu = devices["devices"].as_array().unwrap().iter().find(|d| d["kind"] == "cpu").unwrap();
    let best = cpu["tier"].as_str().unwrap();
    if !["avx512vnni", "amx"].contains(&best) {
        let why = refused(&[], 1);
        assert!(why.contains(best) && why.contains("this processor has none"), "{why}");
        return;
    }
    let (exact, fast) = (all_logits(&home, &[]), all_logits(&home, &["--fast-prompt"]));
    assert_eq!(exact.len(), fast.len());
    let largest = exact.iter().fold(0.0f32, |a, v| a.max(v.abs()));
    let apart = exact.iter().zip(&fast).fold(0.0f32, |a, (x, y)| a.max((x - y).abs()));
    assert!(apart > 0.0 && apart < 0.2 * largest, "{apart} of {largest}");
}

#[test]
fn a_raw_answer_goes_on_in_the_middle_of_the_text() {
    let home = Folder::new();
    let mut spaced = 0;
    for name in ["llama-headdim", "mistral-swa", "mixtral"] {
        for prompt in ["Hello", "We", "coal", "under", "twelve sacks"] {
            let value = object(run(&home, name, prompt, &["--device", "cpu"]));
            let text = value["text"].as_str().unwrap();
            let mut command = fornax(&home);
            command.args(["tokenize", "--bos", "-m"]).arg(model(name)).args(["--", prompt]);
            let before = ran(&mut command).ok().stdout.trim_end().to_owned();
            let ids: Vec<String> =
                value["ids"].as_array().unwrap().iter().map(ToString::to_string).collect();
            let mut command = fornax(&home);
            command.args(["detokenize", "--no-special", "-m"]).arg(model(name));
            let whole = command.arg(format!("{before},{}", ids.join(","))).output().unwrap();
            assert!(whole.status.success(), "{whole:?}");
            assert_eq!(String::from_utf8_lossy(&whole.stdout), format!("{prompt}{text}"), "{name}");
            spaced += usize::from(text.starts_with(' '));
        }
    }
    assert!(spaced > 0, "no answer began with a space, so nothing was tested");
}

#[test]
fn perplexity_is_that_of_the_reference_in_the_same_mode() {
    let home = Folder::new();
    let file = home.join("text.txt");
    fs::write(&file, TEXT).unwrap();
    let measure = |flags: &[&str]| {
        let mut command = fornax(&home);
        command.args(["perplexity", "--window", "32", "--json", "-m"]).arg(model("llama3-q8_0"));
        object(ran(command.arg(&file).args(flags)))
    };
    let number = |value: &Value, key: &str| value[key].as_f64().unwrap();
    let exact = measure(&["--device", "reference"]);
    let rounded = measure(&[&["--device", "reference"][..], &SAME].concat());
    assert_eq!((&exact["act"], &rounded["act"]), (&"f32".into(), &"q8".into()));
    assert_ne!(number(&exact, "perplexity"), number(&rounded, "perplexity"));
    let devices = object(ran(fornax(&home).args(["devices", "--json"])));
    let all = devices["devices"].as_array().unwrap();
    let cpu = all.iter().find(|d| d["kind"] == "cpu").unwrap();
    for tier in cpu["tiers"].as_array().unwrap() {
        let found = measure(&["--device", "cpu", "--cpu-isa", tier.as_str().unwrap()]);
        assert_eq!((&found["device"], &found["tier"]), (&"cpu".into(), tier));
        assert_eq!((&found["act"], &found["window"]), (&"q8".into(), &32.into()));
        assert_eq!(found["tokens"], rounded["tokens"]);
        for key in ["perplexity", "standard_error"] {
            let share = (number(&found, key) / number(&rounded, key) - 1.0).abs();
            assert!(share < 1e-3, "{key} of {tier}: {found} against {rounded}");
        }
    }
    let mut command = fornax(&home);
    command.args(["perplexity", "--device", "cpu", "-m"]).arg(model("llama3-q8_0")).arg(&file);
    let line = ran(&mut command).ok().stdout;
    assert!(line.starts_with("perplexity ") && line.contains(" windows of 511 on cpu"), "{line}");
}

#[test]
fn perplexity_says_what_it_cannot_measure() {
    let home = Folder::new();
    let short = home.join("short.txt");
    fs::write(&short, "a").unwrap();
    let measure = |file: &std::path::Path, flags: &[&str]| {
        let mut command = fornax(&home);
        command.args(["perplexity", "-m"]).arg(model("llama3-q8_0")).arg(file).args(flags);
        ran(&mut command)
    };
    let few = measure(&short, &[]).fails(1).stderr;
    assert!(few.contains("at least 2 tokens"), "{few}");
    let wide = measure(&short, &["--window", "4096"]).fails(2).stderr;
    assert!(wide.contains("511"), "{wide}");
    let absent = measure(&home.join("none.txt"), &[]).fails(1).stderr;
    assert!(absent.contains("none.txt"), "{absent}");
    fs::write(&short, TEXT).unwrap();
    let form = measure(&short, &["--device", "cpu", "--act", "f32"]).fails(1).stderr;
    assert!(form.contains("f32 activations"), "{form}");
}

#[test]
fn a_model_of_a_hub_is_brought_once_and_answers() {
    let home = Folder::new();
    let body = fs::read(model("llama3-q8_0")).unwrap();
    let hub = Hub::start(move |request, _| match request.path.as_str() {
        "/o/r/resolve/main/m.gguf" => Reply::file(request, &body, "\"a\""),
        _ => Reply::status(404),
    });
    let answer = |endpoint: &str| {
        let mut command = fornax(&home);
        command.env("HF_ENDPOINT", endpoint).args(["run", "--raw", "--temp", "0", "-n", "8"]);
        ran(command.args(["-m", "hf:o/r:m.gguf", TEXT])).ok().stdout
    };
    let brought = answer(&hub.url());
    let requests = hub.requests().len();
    assert!(!brought.is_empty() && requests > 0);
    assert_eq!(answer("http://127.0.0.1:1"), brought, "the cache alone must do");
    assert_eq!(hub.requests().len(), requests);
}

#[test]
fn no_model_given_is_the_cached_default() {
    let home = Folder::new();
    let hub = Hub::start(|_, _| Reply::status(404));
    let answer = |more: &[&std::ffi::OsStr]| {
        let mut command = fornax(&home);
        command.env("HF_ENDPOINT", hub.url());
        ran(command.args(["run", "--raw", "--temp", "0", "-n", "8", TEXT]).args(more))
    };
    // The alias stands for one file of one digest; a receipt says that this is it.
    let file = home.join("models/SmolLM2-135M-Instruct.Q4_1.gguf");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::copy(model("llama3-q8_0"), &file).unwrap();
    let stamp = fs::metadata(&file).unwrap();
    let age = stamp.modified().unwrap().duration_since(std::time::UNIX_EPOCH).unwrap();
    let receipt = serde_json::json!({
        "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "bytes": stamp.len(),
        "mtime_ns": age.as_nanos() as u64,
        "source": "a test",
    });
    fs::write(home.join("models/SmolLM2-135M-Instruct.Q4_1.gguf.receipt"), receipt.to_string())
        .unwrap();
    let found = answer(&[]).ok();
    let path = model("llama3-q8_0");
    assert_eq!(found.stdout, answer(&["-m".as_ref(), path.as_os_str()]).ok().stdout);
    assert!(found.stderr.contains("SmolLM2-135M-Instruct.Q4_1.gguf: llama"), "{}", found.stderr);
    assert!(hub.requests().is_empty(), "nothing was to be brought");
}
