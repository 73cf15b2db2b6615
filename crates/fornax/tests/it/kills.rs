//! Commands that write files, killed at any moment: what was there before is whole, or what is there now is. Pulls have
//! tests of their own.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use fornax_gguf::Gguf;
use serde_json::Value;

use crate::generate::with_template;
use crate::program::{Folder, fornax, model, ran};

fn wait_for(what: &str, done: impl Fn() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(120), "{what} did not come");
        thread::sleep(Duration::from_millis(1));
    }
}

/// SIGKILL, where there is one.
fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Bytes of files beside `path` that are being written in its place.
fn part_bytes(path: &Path) -> u64 {
    let entries = fs::read_dir(path.parent().unwrap()).unwrap().map(|e| e.unwrap());
    let parts = entries.filter(|e| e.path().extension().is_some_and(|x| x == "part"));
    parts.filter_map(|e| e.metadata().ok()).map(|m| m.len()).sum()
}

#[test]
fn a_conversation_that_was_saved_survives_the_next_save() {
    const LONG: usize = 1 << 20;
    let home = Folder::new();
    let (file, saved) = (with_template(&home), home.join("talk.json"));
    for round in 0..6 {
        fs::remove_file(&saved).ok();
        let mut command = fornax(&home);
        command.args(["chat", "-m"]).arg(&file).stdin(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let save = format!("/save {}\n", saved.display());
        // Ends when the program does.
        let feed = thread::spawn(move || {
            for letter in ["a", "b"].iter().cycle() {
                let line = format!("/system {}\n{save}", letter.repeat(LONG));
                if stdin.write_all(line.as_bytes()).is_err() {
                    return;
                }
            }
        });
        wait_for("the first save", || saved.exists());
        thread::sleep(Duration::from_millis(3 + 7 * round));
        kill(child);
        feed.join().unwrap();
        let talk: Value = serde_json::from_slice(&fs::read(&saved).unwrap()).unwrap();
        let said = talk[0]["content"].as_str().unwrap();
        let first = &said[..1];
        assert!(said.len() == LONG && said.matches(first).count() == LONG, "{}", said.len());
    }
}

#[test]
fn a_model_that_is_written_anew_is_the_old_one_until_it_is_whole() {
    let home = Folder::new();
    let (source, out) = (home.join("source.gguf"), home.join("out.gguf"));
    ran(fornax(&home).args(["synth", "smollm2-135m:q4_0"]).arg(&source)).ok();
    fs::copy(model("llama3"), &out).unwrap();
    let before = fs::read(&out).unwrap();
    let quantize = || {
        let mut command = fornax(&home);
        command.arg("quantize").args([&source, &out]).arg("q8_0");
        command
    };
    for least in [1, 20 << 20, 90 << 20] {
        let child = quantize().spawn().unwrap();
        wait_for("so much of the file", || part_bytes(&out) >= least);
        kill(child);
        assert!(fs::read(&out).unwrap() == before, "killed after {least} bytes");
        for entry in fs::read_dir(home.path()).unwrap().map(|e| e.unwrap().path()) {
            if entry.extension().is_some_and(|x| x == "part") {
                fs::remove_file(entry).unwrap();
            }
        }
    }
    // Killed as soon as it says that it is done.
    let mut child = quantize().spawn().unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|l| l.contains("bits per weight")));
    kill(child);
    let tensors = |file| Gguf::open(file).unwrap().tensors().len();
    assert_eq!(tensors(&out), tensors(&source));
    let again = home.join("again.gguf");
    ran(fornax(&home).arg("quantize").args([&source, &again]).arg("q8_0")).ok();
    assert!(fs::read(&out).unwrap() == fs::read(again).unwrap());
}
