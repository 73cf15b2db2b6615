//! The command line as such: help, usage errors, the two streams. Needs no model.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;

use crate::program::{Folder, fornax, ran};

const COMMANDS: &[&str] = &[
    "run",
    "chat",
    "serve",
    "bench",
    "perplexity",
    "logits",
    "tokenize",
    "detokenize",
    "verify",
    "inspect",
    "quantize",
    "synth",
    "pull",
    "list",
    "devices",
    "tune",
    "completions",
];

/// `tests/it/help.txt` is the text of `--help` of the program and of each command. Where a change is meant, run this
/// test with `FORNAX_BLESS=1` and look at the difference.
#[test]
fn help_reads_as_committed() {
    let home = Folder::new();
    let mut text = String::new();
    for command in std::iter::once(None).chain(COMMANDS.iter().map(Some)) {
        let ran = ran(fornax(&home).args(command).arg("--help")).ok();
        assert!(ran.stderr.is_empty(), "help belongs on stdout");
        text += &format!(
            "$ fornax {}--help\n{}\n",
            command.map_or(String::new(), |c| format!("{c} ")),
            ran.stdout
        );
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/help.txt");
    if std::env::var_os("FORNAX_BLESS").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let committed = fs::read_to_string(path).unwrap().replace("\r\n", "\n");
    let differs = text.lines().zip(committed.lines()).find(|(now, then)| now != then);
    assert_eq!(differs, None, "first difference (now, committed)");
    assert_eq!(text, committed);
}

#[test]
fn the_help_lists_every_command_once() {
    let home = Folder::new();
    let help = ran(fornax(&home).arg("--help")).ok().stdout;
    for command in COMMANDS {
        let lines = help.lines().filter(|l| l.trim_start().starts_with(&format!("{command} ")));
        assert_eq!(lines.count(), 1, "{command}");
    }
}

#[test]
fn usage_errors_are_told_from_failures() {
    let home = Folder::new();
    for (args, word) in [
        (&["run", "hi", "--temp", "0,7"][..], "0,7"),
        (&["run", "hi", "there"], "there"),
        (&["bench", "-m", "x", "--synthetic", "llama-1b:q8_0"], "--synthetic"),
        (&["logits", "-m", "x"], "--tokens"),
        (&["logits", "--tokens", "1"], "--model"),
        (&["logits", "-m", "x", "--tokens", "1,-2"], "-2"),
        (&["nonsense"], "nonsense"),
        (&["list", "--quiet", "--verbose"], "--verbose"),
    ] {
        for locale in ["de_DE.UTF-8", "tr_TR.UTF-8", "C"] {
            let ran = ran(fornax(&home).env("LC_ALL", locale).args(args)).fails(2);
            assert!(ran.stderr.contains(word), "{args:?}: {}", ran.stderr);
            assert!(ran.stdout.is_empty());
        }
    }
}

#[test]
fn nothing_is_coloured_where_nobody_sees_it() {
    let home = Folder::new();
    for args in [&["--help"][..], &["nonsense"], &["list"], &["run", "-m", "/no/such/file", "hi"]] {
        let ran = ran(fornax(&home).args(args));
        assert!(!ran.stdout.contains('\x1b') && !ran.stderr.contains('\x1b'), "{args:?}: {ran:?}");
    }
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let home = Folder::new();
    for args in [&["completions", "zsh"][..], &["list"], &["man"]] {
        let mut child = fornax(&home).args(args).spawn().unwrap();
        // Nobody reads from here on.
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0), "{args:?}: {stderr}");
        assert!(!stderr.contains("panic"), "{stderr}");
    }
}

#[test]
fn a_closed_stderr_changes_nothing() {
    let home = Folder::new();
    let open = ran(fornax(&home).arg("list")).ok();
    let mut child = fornax(&home).arg("list").spawn().unwrap();
    drop(child.stderr.take());
    let closed = child.wait_with_output().unwrap();
    assert_eq!(closed.status.code(), Some(0));
    assert_eq!(closed.stdout, open.stdout.as_bytes());
}

#[test]
fn quiet_silences_stderr_and_not_the_product() {
    let home = Folder::new();
    let loud = ran(fornax(&home).arg("list")).ok();
    let quiet = ran(fornax(&home).args(["list", "--quiet"])).ok();
    assert_eq!(loud.stdout, quiet.stdout);
    assert!(!loud.stderr.is_empty() && quiet.stderr.is_empty());
}

#[test]
fn a_model_that_is_not_there_is_named_with_what_could_be_meant() {
    let home = Folder::new();
    for args in [
        &["run", "-m", "nope.gguf", "hi"][..],
        &["inspect", "nope.gguf"],
        &["tokenize", "-m", "nope.gguf", "x"],
        &["logits", "-m", "nope.gguf", "--tokens", "1"],
    ] {
        let ran = ran(fornax(&home).args(args)).fails(1);
        assert!(ran.stderr.contains("nope.gguf"), "{}", ran.stderr);
        assert!(ran.stderr.contains("smollm2-135m-instruct"), "{}", ran.stderr);
    }
}

#[test]
fn completions_and_man_page_come_from_the_same_tree() {
    let home = Folder::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = ran(fornax(&home).args(["completions", shell])).ok().stdout;
        for word in ["detokenize", "cpu-isa", "synthetic"] {
            assert!(script.contains(word), "{shell} knows no {word}");
        }
    }
    let page = ran(fornax(&home).arg("man").stdin(Stdio::null())).ok().stdout;
    assert!(page.starts_with(".ie") || page.contains(".TH fornax"), "{page:.80}");
}
