//! Commands that run a model, on tiny ones: what they print, that stdout is the product alone, and that the numbers are
//! those of the independent implementation that made the test data.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use fornax_gguf::{Gguf, GgufWriter, Value as Meta};
use serde_json::Value;

use crate::program::{Folder, Ran, fornax, model, ran, ran_with};

fn expected(name: &str) -> Value {
    let path = model(name).with_file_name("expected.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

fn list(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// One JSON object and nothing else.
#[track_caller]
fn object(ran: Ran, fields: &[&str]) -> Value {
    let ran = ran.ok();
    assert_eq!(ran.stdout.matches('\n').count(), 1, "one line");
    let value: Value = serde_json::from_str(&ran.stdout).unwrap();
    let found: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    let sorted = |names: &[&str]| {
        let mut names: Vec<String> = names.iter().map(|&n| n.to_owned()).collect();
        names.sort();
        names
    };
    assert_eq!(sorted(&found), sorted(fields));
    value
}

/// The tiny llama with a chat template of its own; its tokenizer knows no marks, so turns are plain text.
pub(crate) fn with_template(home: &Folder) -> PathBuf {
    let gguf = Gguf::open(&model("llama3-q8_0")).unwrap();
    let mut metadata = gguf.metadata().clone();
    let template = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}\
        {% if add_generation_prompt %}[assistant:{% endif %}";
    metadata.set("tokenizer.chat_template", Meta::from(template));
    let mut writer = GgufWriter::new(&metadata).unwrap();
    for t in gguf.tensors() {
        writer.tensor(&t.name, t.ty, &t.dims).unwrap();
    }
    let mut data = writer.begin(Vec::new()).unwrap();
    for t in gguf.tensors() {
        data.write(gguf.data(t)).unwrap();
    }
    let file = home.join("chat.gguf");
    fs::write(&file, data.finish().unwrap()).unwrap();
    file
}

/// `run` on the tiny llama, greedy, as plain text.
fn raw(home: &Folder, more: &[&str]) -> Ran {
    let mut command = fornax(home);
    command
        .args(["run", "--device", "cpu", "--raw", "--temp", "0", "-n", "12", "-m"])
        .arg(model("llama3-q8_0"))
        .args(more);
    ran(&mut command)
}

#[test]
fn logits_are_those_of_the_independent_implementation() {
    let home = Folder::new();
    let expected = expected("llama3");
    for prompt in expected["prompts"].as_array().unwrap() {
        let tokens = list(&ids(&prompt["tokens"]));
        let mut command = fornax(&home);
        command.args([
            "logits",
            "--device",
            "reference",
            "--all",
            "--json",
            "--tokens",
            &tokens,
            "-m",
        ]);
        let value = object(ran(command.arg(model("llama3"))), &["positions", "logits"]);
        let positions = ids(&value["positions"]);
        assert_eq!(positions, (0..positions.len() as u32).collect::<Vec<_>>());
        let rows = value["logits"].as_array().unwrap();
        for (position, row) in
            ids(&prompt["logits_positions"]).iter().zip(prompt["logits"].as_array().unwrap())
        {
            let found = rows[*position as usize].as_array().unwrap();
            for (a, b) in found.iter().zip(row.as_array().unwrap()) {
                let d = (a.as_f64().unwrap() - b.as_f64().unwrap()).abs();
                assert!(d < 1e-4, "position {position}: {a} against {b}");
            }
            assert_eq!(found.len(), row.as_array().unwrap().len());
        }
    }
}

#[test]
fn logits_without_all_are_the_last_row_alone() {
    let home = Folder::new();
    let one = |args: &[&str]| {
        let mut command = fornax(&home);
        command.args(["logits", "--tokens", "5,6,7", "-m"]).arg(model("llama3")).args(args);
        ran(&mut command).ok().stdout
    };
    let (last, all) = (one(&[]), one(&["--all"]));
    assert_eq!(all.lines().count(), 3);
    assert_eq!(last.trim_end(), all.lines().last().unwrap());
    assert!(last.starts_with("2\t"));
}

#[test]
fn run_streams_what_json_reports() {
    let home = Folder::new();
    let fields = [
        "text",
        "ids",
        "prompt_tokens",
        "finish",
        "ttft_ms",
        "pp_tok_s",
        "tg_tok_s",
        "limit_percent",
        "step_ms",
    ];
    let value = object(raw(&home, &["Hello there", "--json"]), &fields);
    let text = value["text"].as_str().unwrap();
    assert_eq!(raw(&home, &["Hello there"]).ok().stdout, text);
    assert_eq!(value["finish"], "length");
    assert_eq!(value["ids"].as_array().unwrap().len(), 12);
    for key in ["min", "mean", "max"] {
        assert!(value["step_ms"][key].as_f64().unwrap() > 0.0);
    }
    let mut command = fornax(&home);
    command.args(["detokenize", "-m"]).arg(model("llama3-q8_0")).arg(list(&ids(&value["ids"])));
    // Bytes that are no text come out as they are here and as U+FFFD in a text.
    assert_eq!(String::from_utf8_lossy(&command.output().unwrap().stdout), text);
}

#[test]
fn the_prompt_comes_from_anywhere() {
    let home = Folder::new();
    let typed = raw(&home, &["Hello there"]).ok().stdout;
    assert!(!typed.is_empty());
    assert_eq!(raw(&home, &["--", "Hello there"]).ok().stdout, typed);
    let mut command = fornax(&home);
    command.args(["run", "--raw", "--temp", "0", "-n", "12", "-m"]).arg(model("llama3-q8_0"));
    assert_eq!(ran_with(&mut command, b"Hello there\n").ok().stdout, typed);
    // Bytes that are no text, a NUL among them, are no reason to fail.
    ran_with(&mut command, b"\xff\x00\xed\xa0\x80").ok();
    let dashes = raw(&home, &["--", "--temp 0,7"]).ok();
    assert!(!dashes.stdout.is_empty());
}

#[test]
fn an_empty_prompt_and_a_long_one_are_refused() {
    let home = Folder::new();
    let run = |input: &[u8]| {
        let mut command = fornax(&home);
        command.args(["run", "--raw", "--ctx", "8", "-m"]).arg(model("llama3-q8_0"));
        ran_with(&mut command, input)
    };
    let long = run("word ".repeat(100).as_bytes()).fails(1);
    assert!(long.stderr.contains("--ctx"), "{}", long.stderr);
    let empty = run(b"\n").fails(2);
    assert!(empty.stderr.contains("prompt"), "{}", empty.stderr);
    assert!(long.stdout.is_empty() && empty.stdout.is_empty());
}

#[test]
fn tiers_and_threads_do_not_change_the_answer() {
    let home = Folder::new();
    let plain = raw(&home, &["Hello there"]).ok().stdout;
    for flags in [["--threads", "1"], ["--threads", "3"], ["--cpu-isa", "scalar"]] {
        assert_eq!(
            raw(&home, &["Hello there", flags[0], flags[1]]).ok().stdout,
            plain,
            "{flags:?}"
        );
    }
    let mut command = fornax(&home);
    command.env("FORNAX_CPU_ISA", "scalar").args(["run", "--raw", "--temp", "0", "-n", "12", "-m"]);
    let forced = ran(command.arg(model("llama3-q8_0")).arg("Hello there")).ok();
    assert_eq!(forced.stdout, plain);
    assert!(forced.stderr.contains("cpu scalar"), "{}", forced.stderr);
    let unknown = raw(&home, &["hi", "--cpu-isa", "mmx"]).fails(2);
    assert!(unknown.stderr.contains("scalar"), "{}", unknown.stderr);
}

#[test]
fn what_a_device_does_not_do_is_told_at_load() {
    let home = Folder::new();
    // Heads of 16 elements have no blocks of 32.
    let ran = raw(&home, &["hi", "--kv-type", "q8_0"]).fails(1);
    assert!(ran.stderr.contains("q8_0") && ran.stderr.contains("--kv-type f16"), "{}", ran.stderr);
    assert!(ran.stdout.is_empty());
}

#[test]
fn a_shape_needs_no_file() {
    let home = Folder::new();
    let mut command = fornax(&home);
    command.args([
        "bench",
        "--synthetic",
        "smollm2-135m:q4_0",
        "-p",
        "4",
        "-n",
        "2",
        "-r",
        "1",
        "--json",
    ]);
    let value: Value = serde_json::from_str(&ran(&mut command).ok().stdout).unwrap();
    assert_eq!(value["model"], "smollm2-135m:q4_0");
    assert!(!home.join("models").exists());
}

#[test]
fn a_full_context_ends_an_answer() {
    let home = Folder::new();
    let mut command = fornax(&home);
    command.args(["run", "--raw", "--temp", "0", "--ctx", "20", "--json", "hello", "-m"]);
    let ran = ran(command.arg(model("llama3-q8_0"))).ok();
    let value: Value = serde_json::from_str(&ran.stdout).unwrap();
    let tokens =
        value["prompt_tokens"].as_u64().unwrap() + value["ids"].as_array().unwrap().len() as u64;
    assert!(value["finish"] == "stop" || tokens == 21, "{value}");
}

#[test]
fn stderr_has_the_model_and_the_speed_and_quiet_has_nothing() {
    let home = Folder::new();
    let loud = raw(&home, &["hi"]).ok();
    let lines: Vec<&str> = loud.stderr.lines().collect();
    assert_eq!(lines.len(), 2, "{lines:#?}");
    for word in ["model.gguf", "llama", "bits per weight", "read per token", "GB/s"] {
        assert!(lines[0].contains(word), "no {word:?} in {}", lines[0]);
    }
    for word in ["tokens/s", "first token after", "% of the read rate", "min", "mean", "max"] {
        assert!(lines[1].contains(word), "no {word:?} in {}", lines[1]);
    }
    let quiet = raw(&home, &["hi", "--quiet"]).ok();
    assert_eq!(quiet.stdout, loud.stdout);
    assert!(quiet.stderr.is_empty(), "{}", quiet.stderr);
}

#[test]
fn verbose_and_profile_speak_on_stderr() {
    let home = Folder::new();
    let plain = raw(&home, &["hi"]).ok().stdout;
    let verbose = raw(&home, &["hi", "--verbose"]).ok();
    assert_eq!(verbose.stdout, plain);
    assert_eq!(verbose.stderr.matches("decode ").count(), 11, "{}", verbose.stderr);
    assert_eq!(verbose.stderr.matches("prefill ").count(), 1);
    let profile = raw(&home, &["hi", "--profile"]).ok();
    assert_eq!(profile.stdout, plain);
    for word in ["calls", "GB/s", "share", "attention"] {
        assert!(profile.stderr.to_lowercase().contains(&word.to_lowercase()), "{}", profile.stderr);
    }
}

#[test]
fn a_stop_string_neither_leaks_nor_takes_more_than_itself() {
    let home = Folder::new();
    let whole = raw(&home, &["hi"]).ok().stdout;
    let chars: Vec<(usize, char)> = whole.char_indices().collect();
    // Every pair of neighbouring characters, most of which lie across token borders.
    for pair in chars.windows(3).step_by(2) {
        let stop = &whole[pair[0].0..pair[2].0];
        if stop.contains(char::REPLACEMENT_CHARACTER) || stop.starts_with('-') {
            continue;
        }
        let cut = raw(&home, &["hi", &format!("--stop={stop}")]).ok().stdout;
        assert_eq!(cut, whole[..whole.find(stop).unwrap()], "stop {stop:?}");
    }
}

#[test]
fn a_seed_decides_the_answer() {
    let home = Folder::new();
    let hot = |seed: &str| {
        let mut command = fornax(&home);
        command.args(["run", "--raw", "--temp", "1.5", "-n", "16", "--seed", seed, "hi", "-m"]);
        ran(command.arg(model("llama3-q8_0"))).ok().stdout
    };
    assert_eq!(hot("1"), hot("1"));
    assert!((2..6).any(|seed| hot(&seed.to_string()) != hot("1")));
}

#[test]
fn locale_and_terminal_change_no_byte_of_the_answer() {
    let home = Folder::new();
    let with = |name: &str, value: &str| {
        let mut command = fornax(&home);
        command.env(name, value).args(["run", "--raw", "--temp", "0.7", "--seed", "4", "-n", "12"]);
        ran(command.args(["ı İ ß 3.5", "-m"]).arg(model("llama3-q8_0"))).ok().stdout
    };
    let plain = with("LC_ALL", "C");
    assert!(!plain.is_empty());
    for (name, value) in [
        ("LC_ALL", "de_DE.UTF-8"),
        ("LC_ALL", "tr_TR.UTF-8"),
        ("LC_ALL", "no_such_locale"),
        ("TERM", "dumb"),
        ("NO_COLOR", "1"),
    ] {
        assert_eq!(with(name, value), plain, "{name}={value}");
    }
}

#[test]
fn a_reader_that_leaves_ends_the_answer_quietly() {
    let home = Folder::new();
    let mut command = fornax(&home);
    command.args(["run", "--raw", "-n", "400", "hi", "-m"]).arg(model("llama3-q8_0"));
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{stderr}");
    assert!(!stderr.contains("panic"), "{stderr}");
}

#[test]
fn a_missing_stderr_does_not_touch_the_answer() {
    let home = Folder::new();
    let plain = raw(&home, &["hi"]).ok().stdout;
    let mut command = fornax(&home);
    command.args(["run", "--raw", "--temp", "0", "-n", "12", "hi", "-m"]).arg(model("llama3-q8_0"));
    let mut child = command.spawn().unwrap();
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(output.stdout, plain.as_bytes());
}

#[test]
fn a_model_without_a_template_says_how_to_go_on() {
    let home = Folder::new();
    let mut command = fornax(&home);
    let ran = ran(command.args(["run", "hi", "-m"]).arg(model("llama3-q8_0"))).fails(1);
    assert!(ran.stderr.contains("--raw"), "{}", ran.stderr);
    assert!(ran.stdout.is_empty());
}

#[test]
fn a_template_lays_out_system_and_prompt() {
    let home = Folder::new();
    let file = with_template(&home);
    let mut command = fornax(&home);
    command.args(["run", "--temp", "0", "-n", "4", "--json", "--system", "Be brief.", "hi", "-m"]);
    let value: Value = serde_json::from_str(&ran(command.arg(&file)).ok().stdout).unwrap();
    let mut command = fornax(&home);
    command
        .args(["tokenize", "--json", "[system: Be brief.][user: hi][assistant:", "-m"])
        .arg(&file);
    let tokens = object(ran(&mut command), &["ids", "pieces"]);
    assert_eq!(value["prompt_tokens"], tokens["ids"].as_array().unwrap().len());
}

#[test]
fn chat_goes_on_where_it_was_and_keeps_to_stdout() {
    let home = Folder::new();
    let file = with_template(&home);
    let saved = home.join("talk.json");
    let script = format!(
        "/system Be brief.\nhello\nand then?\n/save {0}\n/nonsense\n/reset\n/load {0}\n/exit\nnever read\n",
        saved.display()
    );
    let mut command = fornax(&home);
    // A short context, so that both answers are short: chat has no flag for it and needs none.
    let ran = ran_with(command.args(["chat", "-m"]).arg(&file), script.as_bytes()).ok();
    assert!(!ran.stdout.contains('>') || !ran.stdout.starts_with('>'), "{}", ran.stdout);
    assert!(ran.stderr.contains("/nonsense"), "{}", ran.stderr);
    let talk: Value = serde_json::from_slice(&fs::read(saved).unwrap()).unwrap();
    let roles: Vec<&str> =
        talk.as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles[..3], ["system", "user", "assistant"]);
    let answer = talk[2]["content"].as_str().unwrap();
    assert!(ran.stdout.starts_with(&format!("{answer}\n")), "{}", ran.stdout);
}

#[test]
fn tokenize_and_detokenize_are_inverse() {
    let home = Folder::new();
    let file = model("llama3-q8_0");
    let text = "Hello, wörld! ıİ\n\t 123 \u{1f600}";
    let mut command = fornax(&home);
    let plain = ran(command.args(["tokenize", "-m"]).arg(&file).args(["--", text])).ok().stdout;
    let mut command = fornax(&home);
    let value = object(
        ran(command.args(["tokenize", "--json", "-m"]).arg(&file).args(["--", text])),
        &["ids", "pieces"],
    );
    assert_eq!(plain.trim_end(), list(&ids(&value["ids"])));
    assert_eq!(value["ids"].as_array().unwrap().len(), value["pieces"].as_array().unwrap().len());
    let mut command = fornax(&home);
    assert_eq!(
        ran(command.args(["detokenize", "-m"]).arg(&file).arg(plain.trim_end())).ok().stdout,
        text
    );
    let mut command = fornax(&home);
    assert_eq!(
        ran_with(command.args(["detokenize", "-m"]).arg(&file), plain.as_bytes()).ok().stdout,
        text
    );
    let mut command = fornax(&home);
    let whole = ran(command.args(["detokenize", "--json", "-m"]).arg(&file).arg(plain.trim_end()));
    assert_eq!(object(whole, &["text"])["text"], text);
    let mut command = fornax(&home);
    ran_with(command.args(["detokenize", "-m"]).arg(&file), b"1 two 3").fails(2);
    let mut command = fornax(&home);
    ran(command.args(["detokenize", "-m"]).arg(&file).arg("999999")).fails(1);
}

#[test]
fn special_tokens_are_parsed_unless_told_otherwise() {
    let home = Folder::new();
    let file = model("llama3-q8_0");
    let gguf = Gguf::open(&file).unwrap();
    let eos = gguf.metadata().require_u32("tokenizer.ggml.eos_token_id").unwrap();
    let bos = gguf.metadata().require_u32("tokenizer.ggml.bos_token_id").unwrap();
    let tokens = gguf.metadata().require_str_array("tokenizer.ggml.tokens").unwrap();
    let text = tokens.get(eos as usize).unwrap();
    let run = |more: &[&str]| {
        let mut command = fornax(&home);
        ran(command.args(["tokenize", "-m"]).arg(&file).args(more).arg("--").arg(text)).ok().stdout
    };
    assert_eq!(run(&[]).trim_end(), eos.to_string());
    assert!(run(&["--no-special"]).contains(','));
    assert_eq!(run(&["--bos"]).trim_end(), format!("{bos},{eos}"));
}

#[test]
fn bench_reports_medians_and_one_checksum() {
    let home = Folder::new();
    let bench = |more: &[&str]| {
        let mut command = fornax(&home);
        command
            .args(["bench", "--device", "cpu", "-p", "24", "-r", "3", "-m"])
            .arg(model("llama3-q8_0"))
            .args(more);
        ran(&mut command)
    };
    let fields = ["model", "device", "tier", "threads", "pp", "tg", "checksum", "peak_bytes"];
    let value = object(bench(&["--json", "-n", "6", "-d", "10"]), &fields);
    for (part, tokens) in [("pp", 24), ("tg", 6)] {
        let part = &value[part];
        assert_eq!((&part["tokens"], &part["depth"]), (&Value::from(tokens), &Value::from(10)));
        let mut all: Vec<f64> =
            part["all"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
        all.sort_by(f64::total_cmp);
        assert_eq!(all.len(), 3);
        assert_eq!(part["median"].as_f64(), Some(all[1]));
        assert!(part["limit_percent"].as_f64().unwrap() > 0.0);
    }
    let again = object(bench(&["--json", "-n", "6", "-d", "10"]), &fields);
    assert_eq!(value["checksum"], again["checksum"]);
    let table = bench(&["-n", "6"]).ok().stdout;
    assert!(
        table.contains("prompt") && table.contains("generation") && table.contains("checksum"),
        "{table}"
    );
    let only = object(bench(&["--json", "-n", "0"]), &fields);
    assert!(only["tg"].is_null() && !only["pp"].is_null());
}

#[test]
fn verify_finds_the_reference_equal_to_itself() {
    let home = Folder::new();
    let mut command = fornax(&home);
    let ran =
        ran(command.args(["verify", "--device", "reference", "-m"]).arg(model("llama3-q8_0"))).ok();
    for word in ["matmul", "attention", "logits against", "transcript of 32 tokens: the same"] {
        assert!(ran.stdout.contains(word), "no {word:?} in {}", ran.stdout);
    }
}

#[test]
fn verify_climbs_the_ladder_on_the_cpu() {
    let home = Folder::new();
    let mut command = fornax(&home);
    let ran = ran(command.args(["verify", "--device", "cpu", "-m"]).arg(model("llama3-q8_0"))).ok();
    assert!(ran.stdout.starts_with("cpu ") && !ran.stdout.contains("FAILED"), "{}", ran.stdout);
    for word in ["matmul", "against F32", "against Q8", "transcript"] {
        assert!(ran.stdout.contains(word), "no {word:?} in {}", ran.stdout);
    }
}

#[test]
fn devices_always_has_the_reference() {
    let home = Folder::new();
    let value = object(
        ran(fornax(&home).args(["devices", "--json"])),
        &["devices", "last_level_cache_bytes"],
    );
    let kinds: Vec<&str> =
        value["devices"].as_array().unwrap().iter().map(|d| d["kind"].as_str().unwrap()).collect();
    assert!(kinds.contains(&"reference"), "{kinds:?}");
    let text = ran(fornax(&home).arg("devices")).ok().stdout;
    assert_eq!(text.lines().count(), kinds.len());
}

#[test]
fn a_device_that_is_not_there_is_told_before_anything_is_brought() {
    let home = Folder::new();
    let device = if cfg!(target_os = "macos") { "cuda" } else { "metal" };
    let ran = ran(fornax(&home).args(["run", "--device", device, "hi"])).fails(1);
    assert!(ran.stderr.to_lowercase().contains(device), "{}", ran.stderr);
    assert!(!home.join("models").exists(), "a download was begun");
    assert!(!Path::new("models").exists());
}
