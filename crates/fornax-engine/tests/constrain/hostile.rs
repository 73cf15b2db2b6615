//! Grammars made to cost: each is refused, or works, in bounded time and memory, and without the stack running out.

use std::time::{Duration, Instant};

use fornax_engine::constrain::Grammar;
use fornax_engine::serve::BitSet;
use serde_json::{Value, json};

use crate::walk::models;

/// Far above what any of them takes on a machine that is busy with other things; what is meant is no explosion.
const BOUND: Duration = Duration::from_secs(20);

type Wrap = fn(Value) -> Value;

/// Compiles, and where that works writes a few tokens.
fn run(name: &str, grammar: &Grammar) -> bool {
    let begun = Instant::now();
    let model = &models()[0];
    let compiled = model.constrainer.compile(grammar);
    let works = compiled.is_ok();
    if let Ok(compiled) = &compiled {
        let mut constraint = compiled.start();
        let mut allowed = BitSet::new(model.tokenizer.vocab_len());
        for _ in 0..30 {
            if constraint.is_done() || constraint.mask(&mut allowed).is_err() {
                break;
            }
            let Some(id) = crate::walk::tokens(&allowed).last() else { break };
            if constraint.accept(id).is_err() {
                break;
            }
        }
    }
    let took = begun.elapsed();
    assert!(took < BOUND, "{name}: {took:?}, {:?}", compiled.err());
    works
}

fn nested(depth: usize, wrap: impl Fn(Value) -> Value) -> Value {
    (0..depth).fold(json!({"type": "null"}), |inner, _| wrap(inner))
}

/// Takes a deep value apart without recursion; dropping it as it is would end the process.
fn dismantle(value: Value) {
    let mut open = vec![value];
    while let Some(value) = open.pop() {
        match value {
            Value::Array(items) => open.extend(items),
            Value::Object(map) => open.extend(map.into_iter().map(|(_, v)| v)),
            _ => {}
        }
    }
}

/// A value under the keys, the innermost last.
fn under(keys: &[&str], value: Value) -> Value {
    keys.iter().rev().fold(value, |inner, key| {
        let mut map = serde_json::Map::new();
        // Moved, not serialised: that would copy all below, each time.
        map.insert((*key).into(), inner);
        Value::Object(map)
    })
}

#[test]
fn schemas_nested_without_end_are_refused() {
    let wraps: [(&str, Wrap); 5] = [
        ("properties", |v| under(&["properties", "a"], v)),
        ("items", |v| under(&["items"], v)),
        ("anyOf", |v| under(&["anyOf"], Value::Array(vec![v]))),
        ("not", |v| under(&["not"], v)),
        ("default", |v| under(&["default"], v)),
    ];
    for (name, wrap) in wraps {
        let grammar = Grammar::JsonSchema(nested(10_000, wrap));
        assert!(!run(name, &grammar));
        if let Grammar::JsonSchema(value) = grammar {
            dismantle(value);
        }
    }
    let deep = nested(30, |v| json!({"type": "object", "properties": {"a": v}}));
    assert!(run("properties, 30 deep", &Grammar::JsonSchema(deep)));
}

#[test]
fn large_schemas_work_or_are_refused() {
    let many: Vec<String> = (0..100_000).map(|i| format!("item number {i}")).collect();
    run("enum of 100,000", &Grammar::JsonSchema(json!({"enum": many})));
    let some: Vec<String> = (0..2_000).map(|i| format!("item number {i}")).collect();
    assert!(run("enum of 2,000", &Grammar::JsonSchema(json!({"enum": some}))));
    assert!(run(
        "maxLength 100,000",
        &Grammar::JsonSchema(json!({"type": "string", "maxLength": 100_000}))
    ));
    assert!(!run(
        "maxLength 10^12",
        &Grammar::JsonSchema(json!({"type": "string", "maxLength": 1_000_000_000_000_u64}))
    ));
    run(
        "minItems 100,000",
        &Grammar::JsonSchema(
            json!({"type": "array", "items": {"type": "null"}, "minItems": 100_000}),
        ),
    );
    let properties: serde_json::Map<String, Value> =
        (0..3_000).map(|i| (format!("p{i}"), json!({"type": "string"}))).collect();
    run(
        "3,000 properties",
        &Grammar::JsonSchema(
            json!({"type": "object", "properties": properties, "additionalProperties": false}),
        ),
    );
    let alternatives: Vec<Value> = (0..400)
        .map(|i| json!({"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]}))
        .collect();
    run("oneOf of 400", &Grammar::JsonSchema(json!({"oneOf": alternatives})));
}

#[test]
fn references_that_multiply_or_circle_are_bounded() {
    // Each definition is all of the next one twice: 2^40 when written out.
    let mut definitions = serde_json::Map::new();
    for i in 0..40 {
        let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
        definitions.insert(
            format!("d{i}"),
            json!({"type": "object", "properties": {"a": next, "b": next}}),
        );
    }
    definitions.insert("d40".into(), json!({"type": "null"}));
    assert!(run(
        "doubling",
        &Grammar::JsonSchema(json!({"$ref": "#/$defs/d0", "$defs": definitions}))
    ));
    let mut all = serde_json::Map::new();
    for i in 0..30 {
        let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
        all.insert(format!("d{i}"), json!({"allOf": [next, next]}));
    }
    all.insert("d30".into(), json!({"type": "object", "properties": {"x": {"type": "integer"}}}));
    run("doubling allOf", &Grammar::JsonSchema(json!({"$ref": "#/$defs/d0", "$defs": all})));
    let siblings = json!({"$ref": "#/$defs/a", "$defs": {
        "a": {"type": "object", "properties": {"n": {"$ref": "#/$defs/a", "type": "object", "minProperties": 1}}},
    }});
    run("a circle with siblings", &Grammar::JsonSchema(siblings));
    let one_of = json!({"$ref": "#/$defs/a", "$defs": {
        "a": {"type": "object", "properties": {"n": {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}},
    }});
    assert!(run("a circle through oneOf", &Grammar::JsonSchema(one_of)));
}

#[test]
fn one_part_named_in_many_ways_is_read_once_and_parts_of_parts_are_counted() {
    // "abcdefghijklmno" with every letter as it is or by its number.
    let name = "abcdefghijklmno";
    let spelled =
        |bits: usize| -> String {
            name.bytes()
                .enumerate()
                .map(|(i, b)| {
                    if bits >> i & 1 == 1 { format!("%{b:02x}") } else { char::from(b).to_string() }
                })
                .collect()
        };
    let refs: Vec<Value> =
        (0..20_000).map(|bits| json!({"$ref": format!("#/$defs/{}", spelled(bits))})).collect();
    let many: Vec<Value> = (0..20_000).map(Value::from).collect();
    let schema = json!({"type": "array", "prefixItems": refs, "$defs": {name: {"enum": many}}});
    run("20,000 spellings", &Grammar::JsonSchema(schema));

    // A large list under 40 levels, and a reference to every level.
    let mut deep = json!({"enum": (0..20_000).collect::<Vec<_>>()});
    let mut refs = Vec::new();
    for level in 0..40 {
        deep = under(&["items"], deep);
        refs.push(json!({"$ref": format!("#/$defs/deep{}", "/items".repeat(level))}));
    }
    let schema = json!({"type": "array", "prefixItems": refs, "$defs": {"deep": deep}});
    let e = models()[0].constrainer.compile(&Grammar::JsonSchema(schema)).unwrap_err();
    assert!(e.to_string().contains("too often"), "{e}");

    let long = |first: usize| -> Vec<String> {
        (first..first + 20_000).map(|i| format!("n{i}")).collect()
    };
    let both: Vec<Value> = (0..4).map(|i| json!({"type": "object", "required": long(i)})).collect();
    assert!(!run("long lists of required ones", &Grammar::JsonSchema(json!({"oneOf": both}))));
}

#[test]
fn regular_expressions_cannot_explode() {
    for (name, pattern) in [
        ("60,000 brackets", "(".repeat(60_000)),
        ("30,000 pairs", format!("{}a{}", "(".repeat(30_000), ")".repeat(30_000))),
        ("150 pairs", format!("{}a{}", "(".repeat(150), ")".repeat(150))),
        ("a million times", "a{1000000}".into()),
        ("times of times", "((a{1000}){1000}){1000}".into()),
        ("stars in stars", "(a*)*b".into()),
        ("exponential states", "(a|b)*a(a|b){200}".into()),
        ("long alternation", (0..8000).map(|i| format!("w{i}")).collect::<Vec<_>>().join("|")),
        ("any of Unicode, 500 times", "\\p{L}{500}\\w{500}".into()),
        ("negated classes", "([^a][^b][^c]?){300}".into()),
    ] {
        run(name, &Grammar::Regex(pattern.clone()));
        run(name, &Grammar::JsonSchema(json!({"type": "string", "pattern": pattern})));
    }
}

#[test]
fn grammars_cannot_explode() {
    let doubling: String = (0..60).map(|i| format!("a{i} ::= a{} a{}\n", i + 1, i + 1)).collect();
    let optional: String =
        (0..60).map(|i| format!("a{i} ::= a{} a{} | \"\"\n", i + 1, i + 1)).collect();
    for (name, text) in [
        ("60,000 brackets", format!("root ::= {}", "(".repeat(60_000))),
        ("30,000 pairs", format!("root ::= {}\"a\"{}", "(".repeat(30_000), ")".repeat(30_000))),
        ("many stars", format!("root ::= \"a\"{}", "*".repeat(5_000))),
        ("left recursion without end", "root ::= a\na ::= a \"x\"".into()),
        ("left recursion", "root ::= a\na ::= a \"x\" | \"y\"".into()),
        ("doubling", format!("root ::= a0\n{doubling}a60 ::= \"x\"\n")),
        ("doubling or nothing", format!("root ::= a0\n{optional}a60 ::= \"x\"\n")),
        ("ambiguous", "root ::= e\ne ::= e e | \"(\" e \")\" | \"a\"".into()),
        ("empty circle", "root ::= a\na ::= b\nb ::= a | \"\"".into()),
        (
            "long rule",
            format!("root ::= r\nr ::= \"(\" r \")\" | {}", "\"ab\" [c-d] ".repeat(20_000)),
        ),
        (
            "many rules",
            (0..20_000).map(|i| format!("r{i} ::= \"x{i}\"\n")).collect::<String>() + "root ::= r7",
        ),
    ] {
        run(name, &Grammar::Gbnf(text));
    }
    let deep = format!("start: {}\"a\"{}", "(".repeat(30_000), ")".repeat(30_000));
    assert!(!run("Lark, 30,000 pairs", &Grammar::Lark(deep)));
    run(
        "Lark, 150 pairs",
        &Grammar::Lark(format!("start: {}\"a\"{}", "(".repeat(150), ")".repeat(150))),
    );
    run("Lark, circle of terminals", &Grammar::Lark("start: A\nA: B\nB: A\n".into()));
    run("Lark, JSON 10,000 deep", &Grammar::Lark(format!("start: %json {}", "[".repeat(10_000))));
    run("Lark, many times", &Grammar::Lark("start: (\"a\"{1000}){1000}".into()));
}
