//! `bench --against`, with a stand-in for the other engine: a script that answers as the driver would.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use crate::program::{Folder, fornax, model, ran};

/// Stands where Python would: `-c DRIVER MODEL ...` are its arguments.
fn stand_in(home: &Folder, script: &str) -> PathBuf {
    let path = home.join("python");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn a_race_prints_both_sides_and_keeps_every_round() {
    let home = Folder::new();
    let python = stand_in(
        &home,
        r#"echo '{"version":"9.9"}'
while read -r line; do echo '{"prompt_s":0.5,"generate_s":0.25}'; done"#,
    );
    let receipt = home.join("out/receipt.json");
    let mut command = fornax(&home);
    command.args(["bench", "--against", "llama.cpp", "-p", "8", "-n", "4", "-r", "2"]);
    command
        .arg("-m")
        .arg(model("llama3-q8_0"))
        .arg("--peer-python")
        .arg(&python)
        .arg("--receipt")
        .arg(&receipt);
    let told = ran(&mut command).ok();
    assert!(told.stdout.contains("llama.cpp of llama-cpp-python 9.9"), "{}", told.stdout);
    let kept: serde_json::Value = serde_json::from_slice(&fs::read(&receipt).unwrap()).unwrap();
    let tests = kept["tests"].as_array().unwrap();
    assert_eq!(tests.len(), 2);
    assert_eq!(
        tests[0]["peer"],
        serde_json::json!([16.0, 16.0]),
        "8 tokens in half a second, twice"
    );
    assert_eq!(tests[1]["peer"], serde_json::json!([16.0, 16.0]));
    let ours = tests[1]["fornax"].as_array().unwrap();
    assert!(ours.len() == 2 && ours.iter().all(|rate| rate.as_f64().unwrap() > 0.0), "{ours:?}");
}

#[test]
fn what_the_other_engine_says_of_itself_is_passed_on() {
    let home = Folder::new();
    let cases = [
        (r#"echo '{"error":"llama.cpp cannot load it"}'"#, "llama.cpp cannot load it"),
        ("exit 3", "ended without an answer"),
        ("echo nonsense", "not an answer: \"nonsense"),
    ];
    for (script, expected) in cases {
        let python = stand_in(&home, script);
        let mut command = fornax(&home);
        command.args(["bench", "--against", "llama.cpp", "-p", "8", "-n", "4"]);
        command.arg("-m").arg(model("llama3-q8_0")).arg("--peer-python").arg(&python);
        let told = ran(&mut command).fails(1);
        assert!(told.stderr.contains(expected), "{}", told.stderr);
    }
}

#[test]
fn without_the_other_engine_the_way_to_it_is_told() {
    let home = Folder::new();
    let mut command = fornax(&home);
    command.args(["bench", "--against", "llama.cpp", "-p", "8", "-n", "4"]);
    command.arg("-m").arg(model("llama3-q8_0"));
    let told = ran(&mut command).fails(1);
    assert!(told.stderr.contains("scripts/peer.sh"), "{}", told.stderr);
}
