//! Templates of every construction that real ones use, against what Python's jinja2 makes of them
//! (`testdata/templates`, written by `generate.py` there). It must not need Python.

use std::path::PathBuf;

use fornax_text::ChatTemplate;
use serde_json::Value;

fn read(name: &str) -> String {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/templates");
    std::fs::read_to_string(folder.join(name)).expect("the file is there")
}

fn read_json(name: &str) -> Value {
    serde_json::from_str(&read(name)).expect("the file is JSON")
}

#[test]
fn as_python_renders_them() {
    let cases = read_json("cases.json");
    let expected = read_json("expected.json");
    let time = cases["time"].as_i64().expect("a time");
    let mut wrong = Vec::new();
    let list = cases["cases"].as_array().expect("cases");
    assert_eq!(list.len(), expected.as_object().expect("results").len());
    for case in list {
        let name = case["name"].as_str().expect("a name");
        let text = |key: &str| case[key].as_str().unwrap_or_default();
        let source = read(&format!("{}.jinja", text("template")));
        let template = match ChatTemplate::new(&source, text("bos"), text("eos")) {
            Ok(template) => template.with_time(time),
            Err(error) => {
                wrong.push(format!("== {name}: {error}"));
                continue;
            }
        };
        let got = template.render(&case["messages"], &case["extra"]);
        let want = &expected[name];
        match (&got, want["text"].as_str(), want["raised"].as_str()) {
            (Ok(got), Some(want), _) if got == want => {}
            (Err(error), _, Some(message)) if error.is_raised() && error.to_string() == message => {
            }
            (Ok(got), Some(want), _) => {
                for (g, w) in got.lines().zip(want.lines()).filter(|(g, w)| g != w) {
                    wrong.push(format!("== {name}\n got  {g}\n want {w}"));
                }
                if got.lines().count() != want.lines().count() || got.lines().eq(want.lines()) {
                    wrong.push(format!("== {name}\n got  {got:?}\n want {want:?}"));
                }
            }
            _ => wrong.push(format!("== {name}: got {got:?}, want {want}")),
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
