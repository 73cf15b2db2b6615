//! `run` held to a schema, a regular expression, a grammar: a model of random weights writes what it must.

use std::fs;

use serde_json::Value;

use crate::program::{Folder, Ran, fornax, model, ran};

fn run(home: &Folder, more: &[&str]) -> Ran {
    let mut command = fornax(home);
    command.args(["run", "--device", "cpu", "--raw", "-n", "80", "--seed", "3", "-m"]);
    command.arg(model("llama3-q8_0")).args(more).arg("Once upon a time");
    ran(&mut command)
}

fn file(home: &Folder, name: &str, text: &str) -> String {
    let path = home.join(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn an_answer_is_held_to_what_was_asked_for() {
    let home = Folder::new();
    let schema = file(
        &home,
        "s.json",
        r#"{"type": "object", "properties": {"colour": {"enum": ["red", "grün"]}, "n": {"type": "integer", "minimum": 1, "maximum": 20}},
            "required": ["colour", "n"], "additionalProperties": false}"#,
    );
    for temp in ["0", "1.5"] {
        let text = run(&home, &["--temp", temp, "--json-schema", &schema]).ok().stdout;
        let value: Value = serde_json::from_str(&text).unwrap();
        assert!(["red", "grün"].contains(&value["colour"].as_str().unwrap()), "{text}");
        assert!((1..=20).contains(&value["n"].as_i64().unwrap()), "{text}");
        assert_eq!(value.as_object().unwrap().len(), 2);

        let text = run(&home, &["--temp", temp, "--regex", "[a-c]{3}-(7|8) ende"]).ok().stdout;
        assert!(text.len() == 10 && text[..3].bytes().all(|b| b"abc".contains(&b)), "{text:?}");
        assert!(text.ends_with("-7 ende") || text.ends_with("-8 ende"), "{text:?}");
    }
    let gbnf = file(&home, "g.gbnf", "root ::= \"(\" root \")\" | \"x\"{2}\n");
    let lark = file(&home, "g", "start: \"(\" start \")\" | XX\nXX: \"xx\"\n");
    for grammar in [gbnf, lark] {
        let ran = run(&home, &["--temp", "0", "--json", "--grammar", &grammar]).ok();
        let report: Value = serde_json::from_str(&ran.stdout).unwrap();
        let text = report["text"].as_str().unwrap();
        if report["finish"] == "stop" {
            let depth = text.matches('(').count();
            let want = format!("{}xx{}", "(".repeat(depth), ")".repeat(depth));
            assert_eq!(text, want);
        } else {
            assert!(text.bytes().all(|b| b"(x)".contains(&b)), "{text}");
        }
    }
}

#[test]
fn what_cannot_be_enforced_ends_before_anything_is_printed() {
    let home = Folder::new();
    let schema = file(&home, "s.json", r#"{"type": "array", "uniqueItems": true}"#);
    let broken = file(&home, "b.json", "{");
    let gbnf = file(&home, "g.gbnf", "root ::= other\n");
    for (flags, says) in [
        (["--json-schema", schema.as_str()], "`uniqueItems`"),
        (["--json-schema", broken.as_str()], "b.json"),
        (["--json-schema", "nowhere.json"], "nowhere.json"),
        (["--regex", "(?<=a)b"], "look-around"),
        (["--grammar", gbnf.as_str()], "`other`"),
    ] {
        let ran = run(&home, &flags);
        assert!(
            ran.code != Some(0) && ran.stdout.is_empty() && ran.stderr.contains(says),
            "{flags:?}: {}",
            ran.stderr
        );
    }
    let ran = run(&home, &["--regex", "a", "--grammar", &gbnf]);
    assert!(ran.code != Some(0) && ran.stderr.contains("cannot be used with"), "{}", ran.stderr);
}
