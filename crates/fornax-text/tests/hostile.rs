//! Templates made to exhaust the stack, the memory or patience: each is an error, and the process lives. It
//! must not know how rendering is bounded.

use std::time::{Duration, Instant};

use fornax_text::ChatTemplate;
use serde_json::json;

fn refused(source: &str) {
    let start = Instant::now();
    let shown: String = source.chars().take(40).collect();
    let error = ChatTemplate::new(source, "", "")
        .and_then(|t| t.render(&json!([]), &json!({"a": "x"})))
        .expect_err(&shown);
    assert!(error.is_template(), "{shown}: {error}");
    assert!(start.elapsed() < Duration::from_secs(60), "{shown}: {:?}", start.elapsed());
}

#[test]
fn deep_or_long_expressions() {
    const N: usize = 50_000;
    for (open, close) in [("(", ")"), ("[", "]"), ("{'a':", "}"), ("f(", ")")] {
        refused(&format!("{{{{ {}1{} }}}}", open.repeat(N), close.repeat(N)));
    }
    for (before, after) in [
        ("not ", ""),
        ("-", ""),
        ("", ".b"),
        ("", "|upper"),
        ("", "~a"),
        ("", "+1"),
        ("", " if 1 else 1"),
        ("", "**1"),
        ("", "[0]"),
        ("", " and 1"),
        ("", " or 1"),
        ("", "%1"),
        ("", " is defined"),
    ] {
        refused(&format!("{{{{ {}a{} }}}}", before.repeat(N), after.repeat(N)));
    }
    refused(&format!("{}x{}", "{% if 1 %}".repeat(N), "{% endif %}".repeat(N)));
    refused(&format!("{{% if b %}}{}{{% endif %}}", "{% elif b %}".repeat(N)));
    refused(&"x".repeat(2 << 20));
}

#[test]
fn values_nested_without_end() {
    let grow = |step: &str, end: &str| {
        format!(
            "{{% set ns = namespace(x=[]) %}}{{% for i in range(99999) %}}{{% for j in range(99999) %}}\
             {{% set ns.x = {step} %}}{{% endfor %}}{{% endfor %}}{end}"
        )
    };
    refused(&grow("[ns.x]", ""));
    refused(&grow("{'a': ns.x}", ""));
    refused(&grow("[ns.x, ns.x]", ""));
    refused(&grow(
        "ns.x ~ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'",
        "",
    ));
    // Stopped before the steps are used up, and then walked through.
    let deep = "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}";
    refused(&format!("{deep}{{{{ ns.x|tojson }}}}"));
    for end in ["x", "{{ ns.x }}", "{{ ns.x == [ns.x] }}", "{{ ns.x|string|length }}"] {
        let template = ChatTemplate::new(&format!("{deep}{end}"), "", "").expect("it parses");
        // Either is sound, as long as it comes back.
        if let Err(error) = template.render(&json!([]), &json!({})) {
            assert!(error.is_template(), "{end}: {error}");
        }
    }
}

#[test]
fn doubling() {
    for step in ["ns.x ~ ns.x", "ns.x * 2", "ns.x|replace('a', 'aa')"] {
        refused(&format!(
            "{{% set ns = namespace(x='a') %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}\
             {{{{ ns.x }}}}"
        ));
    }
}

/// Adding a list to itself copies nothing, so that few steps make one of any length.
fn doubled(times: u32, end: &str) -> String {
    format!(
        "{{% set ns = namespace(x=[1]) %}}{{% for i in range({times}) %}}{{% set ns.x = ns.x + ns.x %}}\
         {{% endfor %}}{end}"
    )
}

#[test]
fn lists_that_are_long_only_when_written() {
    for end in ["{{ ns.x }}", "{{ ns.x|tojson }}", "{{ [[ns.x]]|tojson }}", "{{ ns.x|trim }}"] {
        refused(&doubled(30, end));
    }
}

#[test]
fn opening_renders_nothing() {
    let start = Instant::now();
    ChatTemplate::new(&doubled(60, ""), "", "").expect("it parses");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}
