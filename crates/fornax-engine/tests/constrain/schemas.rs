//! JSON schemas: an independent validator judges what comes out, texts made by hand what can.

use fornax_engine::constrain::Grammar;
use serde_json::{Value, json};

use crate::walk::{Random, models};

/// A schema, texts that it has to let through, and texts that it must not.
struct Case {
    schema: Value,
    valid: &'static [&'static str],
    invalid: &'static [&'static str],
}

fn case(schema: Value, valid: &'static [&'static str], invalid: &'static [&'static str]) -> Case {
    Case { schema, valid, invalid }
}

fn scalars() -> Vec<Case> {
    vec![
        case(json!({"enum": [1, 2, 3]}), &["1", "3"], &["4", "12", "\"1\""]),
        case(json!({"enum": [true, null]}), &["true", "null"], &["false", "nul"]),
        case(json!({"const": "a\"b"}), &[r#""a\"b""#], &["\"ab\"", r#""a\"""#]),
        case(
            json!({"enum": ["grün", "漢字", "🙂", "a\nb\\"]}),
            &["\"漢字\"", "\"🙂\"", r#""a\nb\\""#],
            &["\"gr\""],
        ),
        case(
            json!({"type": "integer", "minimum": -5, "maximum": 12}),
            &["-5", "0", "12"],
            &["-6", "13", "1.5", "-0x"],
        ),
        case(
            json!({"type": "integer", "exclusiveMinimum": 3, "maximum": 10}),
            &["4", "10"],
            &["3", "11"],
        ),
        case(
            json!({"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 0, "exclusiveMinimum": true}),
            &["1"],
            &["-1"],
        ),
        case(
            json!({"type": "integer", "minimum": i64::MIN, "maximum": u64::MAX}),
            &["0", "-17", "9007199254740993"],
            &["1e3"],
        ),
        case(
            json!({"type": "number", "minimum": 0.5, "maximum": 2.25}),
            &["0.5", "1", "2.25"],
            &["0.4", "2.26", "3"],
        ),
        case(
            json!({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
            &["0.25"],
            &["0", "1", "1.5"],
        ),
        case(
            json!({"type": "integer", "multipleOf": 7, "minimum": -700, "maximum": 700}),
            &["14", "0", "-7"],
            &["15"],
        ),
        case(
            json!({"type": ["string", "null"], "maxLength": 3}),
            &["null", "\"abc\"", "\"äöü\""],
            &["\"abcd\"", "1"],
        ),
        case(
            json!({"type": "string", "minLength": 2, "maxLength": 2}),
            &["\"ab\"", "\"漢字\"", r#""\n\"""#],
            &["\"a\"", "\"abc\""],
        ),
        case(
            json!({"type": "string", "pattern": "^[a-z]{2,4}-\\d+$"}),
            &["\"ab-7\""],
            &["\"a-7\"", "\"ab-\""],
        ),
        case(
            json!({"type": "string", "pattern": "x", "maxLength": 4}),
            &["\"x\"", "\"axb\""],
            &["\"ab\""],
        ),
        case(
            json!({"type": "string", "format": "date"}),
            &["\"2024-02-29\""],
            &["\"2024-13-01\"", "\"x\""],
        ),
        case(
            json!({"type": "string", "format": "uuid"}),
            &["\"123e4567-e89b-12d3-a456-426614174000\""],
            &["\"123\""],
        ),
        case(json!({"type": "boolean"}), &["true", "false"], &["True", "0"]),
        case(json!({"type": "null"}), &["null"], &["none"]),
    ]
}

fn objects() -> Vec<Case> {
    let person = json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Person", "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20, "description": "as in a passport"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "pets": {"type": "array", "items": {"$ref": "#/definitions/pet"}, "maxItems": 2},
        },
        "required": ["name"], "additionalProperties": false,
        "definitions": {"pet": {"enum": ["cat", "dog"]}},
    });
    vec![
        case(
            person,
            &[
                r#"{"name":"A"}"#,
                r#"{ "name": "B", "age": 3 }"#,
                "{\n  \"name\": \"C\",\n  \"pets\": [\"cat\"]\n}",
            ],
            &[
                "{}",
                r#"{"age":3}"#,
                r#"{"name":"A","x":1}"#,
                r#"{"name":"A","pets":["cow"]}"#,
                r#"{"name":"A","pets":["cat","cat","dog"]}"#,
            ],
        ),
        case(
            json!({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}, "required": ["b"]}),
            &[r#"{"b":null}"#, r#"{"a":null,"b":null,"c":null}"#, r#"{"b":null,"other":[1]}"#],
            &[r#"{"a":null}"#, r#"{"b":1}"#],
        ),
        case(
            json!({"type": "object", "additionalProperties": {"type": "integer"}}),
            &["{}", r#"{"x":1,"é":-2}"#],
            &[r#"{"x":"y"}"#],
        ),
        case(
            json!({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}),
            &[r#"{"a":1,"b":"x"}"#, r#"{"aa":"x"}"#],
            &[r#"{"a":"x"}"#, r#"{"b":1}"#, r#"{"\u0061":"x"}"#],
        ),
        case(
            json!({"type": "object", "patternProperties": {"^n_": {"type": "integer"}, "^s_": {"type": "string"}}, "additionalProperties": false}),
            &[r#"{"n_a":1,"s_b":"x"}"#],
            &[r#"{"n_a":"x"}"#, r#"{"z":1}"#],
        ),
        case(
            json!({"type": "object", "minProperties": 1, "additionalProperties": {"type": "null"}}),
            &[r#"{"a":null}"#],
            &["{}"],
        ),
        case(
            json!({"type": "object", "properties": {"ключ": {"const": "знач"}, "a\"b": {"type": "boolean"}}, "required": ["ключ", "a\"b"], "additionalProperties": false}),
            &[r#"{"ключ":"знач","a\"b":true}"#],
            &[r#"{"ключ":"x","a\"b":true}"#],
        ),
        case(
            json!({"const": {"a": [1, {"b": null}], "c": 1.5}}),
            &[r#"{"a":[1,{"b":null}],"c":1.5}"#],
            &[r#"{"a":[1,{"b":null}]}"#],
        ),
    ]
}

fn arrays() -> Vec<Case> {
    vec![
        case(
            json!({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 3, "maxItems": 3}),
            &["[1,2,3]", "[ 1, 2, 3 ]"],
            &["[1,2]", "[1,2,3,4]"],
        ),
        case(
            json!({"type": "array", "items": {"type": "boolean"}, "minItems": 2}),
            &["[true,false]", "[true,true,true]"],
            &["[]", "[true]"],
        ),
        case(
            json!({"type": "array", "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "integer"}], "items": false, "minItems": 2}),
            &["[\"a\",1]"],
            &["[\"a\"]", "[1,\"a\"]", "[\"a\",1,2]"],
        ),
        case(
            json!({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "boolean"}}),
            &["[]", "[null,true]"],
            &["[true]", "[null,null]"],
        ),
        case(
            json!({"type": "array", "items": {"type": "array", "items": {"type": "array", "items": {"enum": ["x"]}, "maxItems": 2}, "maxItems": 2}, "maxItems": 2}),
            &["[[[\"x\"]],[]]"],
            &["[[\"x\"]]"],
        ),
    ]
}

fn combined() -> Vec<Case> {
    let tree = json!({
        "$defs": {"node": {"type": "object", "properties": {
            "value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        }, "required": ["value"], "additionalProperties": false}},
        "$ref": "#/$defs/node",
    });
    let union = json!({
        "$defs": {
            "circle": {"type": "object", "properties": {"kind": {"const": "circle"}, "r": {"type": "number", "minimum": 0, "maximum": 9}}, "required": ["kind", "r"], "additionalProperties": false},
            "box": {"type": "object", "properties": {"kind": {"const": "box"}, "w": {"type": "integer"}}, "required": ["kind", "w"], "additionalProperties": false},
        },
        "type": "array", "maxItems": 2, "items": {
            "oneOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/box"}],
            "discriminator": {"propertyName": "kind", "mapping": {"circle": "#/$defs/circle"}},
        },
    });
    vec![
        case(
            tree,
            &[r#"{"value":1,"children":[{"value":2,"children":[]}]}"#],
            &[r#"{"children":[]}"#, r#"{"value":1,"children":[1]}"#],
        ),
        case(
            union,
            &[r#"[{"kind":"box","w":3},{"kind":"circle","r":1.5}]"#],
            &[r#"[{"kind":"box","r":3}]"#, r#"[{"kind":"x"}]"#],
        ),
        case(
            json!({"anyOf": [{"type": "integer", "minimum": 100}, {"type": "string", "maxLength": 1}, {"type": "null"}]}),
            &["100", "\"a\"", "null"],
            &["99", "\"ab\""],
        ),
        case(
            json!({"oneOf": [{"type": "null"}, {"type": "integer"}], "anyOf": [{"type": "integer"}, {"type": "string"}]}),
            &["5"],
            &["null", "\"a\""],
        ),
        case(
            json!({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]}),
            &["3", "7"],
            &["2", "8"],
        ),
        case(
            json!({"$ref": "#/$defs/a", "required": ["y"], "$defs": {"a": {"type": "object", "properties": {"x": {"type": "null"}, "y": {"type": "null"}}, "required": ["x"]}}}),
            &[r#"{"x":null,"y":null}"#],
            &[r#"{"x":null}"#, r#"{"y":null}"#],
        ),
        case(
            json!({"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "maxItems": 2}),
            &["[[null],[]]"],
            &["[1]", "null"],
        ),
        case(
            json!({"properties": {"e": {"$ref": "#/$defs/e~1%20x"}}, "required": ["e"], "type": "object", "additionalProperties": false, "$defs": {"e/ x": {"enum": ["p", "q"]}}}),
            &[r#"{"e":"q"}"#],
            &[r#"{"e":"r"}"#],
        ),
        case(json!(true), &["1", "{}", "[\"a\",{\"b\":null}]"], &["x", "{"]),
        case(json!({}), &["\"\"", "-0.5e7"], &["'a'"]),
    ]
}

fn parsed(text: &str) -> Option<Value> {
    match serde_json::from_str(text) {
        Ok(value) => Some(value),
        // A number of free length may be more than a reader holds; as JSON it is sound.
        Err(e) if e.to_string().contains("number out of range") => None,
        Err(e) => panic!("{text:?} is no JSON: {e}"),
    }
}

fn check(cases: &[Case], seed: u64) {
    let mut random = Random(seed);
    for case in cases {
        let validator =
            jsonschema::options().should_validate_formats(true).build(&case.schema).unwrap();
        let grammar = Grammar::JsonSchema(case.schema.clone());
        for model in models() {
            let mut ended = 0;
            for _ in 0..12 {
                let text = model.write(&grammar, &mut random, &mut |text| {
                    if let Some(value) = parsed(text) {
                        assert!(
                            validator.is_valid(&value),
                            "{}: {}: {text}",
                            model.name,
                            case.schema
                        );
                    }
                });
                ended += usize::from(text.is_some());
            }
            assert!(ended >= 2, "{}: {}: {ended} of 12 came to an end", model.name, case.schema);
            for text in case.valid {
                assert!(
                    model.accepts(&grammar, text),
                    "{}: {} refuses {text}",
                    model.name,
                    case.schema
                );
            }
            for text in case.invalid {
                assert!(
                    !model.accepts(&grammar, text),
                    "{}: {} takes {text}",
                    model.name,
                    case.schema
                );
            }
        }
    }
}

#[test]
fn scalars_are_valid_and_complete() {
    check(&scalars(), 1);
}

#[test]
fn objects_are_valid_and_complete() {
    check(&objects(), 2);
}

#[test]
fn arrays_are_valid_and_complete() {
    check(&arrays(), 3);
}

#[test]
fn combinations_are_valid_and_complete() {
    check(&combined(), 4);
}

#[test]
fn white_space_is_bounded_everywhere() {
    for model in models() {
        for text in [
            "{  \"a\":1}",
            "{\n\n\"a\":1}",
            &format!("{{\n{}\"a\":1}}", " ".repeat(40)),
            " {}",
            "{}\n\n",
        ] {
            assert!(!model.accepts(&Grammar::JsonObject, text), "{}: {text:?}", model.name);
        }
        for text in ["{}", "{ \"a\" : 1 }", "{\n  \"a\": [\n    1\n  ]\n}", "{\n\t\"a\":{}}"] {
            assert!(model.accepts(&Grammar::JsonObject, text), "{}: {text:?}", model.name);
        }
    }
}

#[test]
fn what_cannot_be_enforced_is_refused_by_name() {
    let model = &models()[0];
    for (schema, says) in [
        (json!({"type": "array", "uniqueItems": true}), "`uniqueItems`"),
        (json!({"properties": {"a": {"not": {}}}}), "/properties/a: the keyword `not`"),
        (json!({"if": {}, "then": {}}), "`if`"),
        (json!({"contains": {"type": "null"}}), "`contains`"),
        (json!({"propertyNames": {"pattern": "a"}}), "`propertyNames`"),
        (json!({"dependentRequired": {"a": ["b"]}}), "`dependentRequired`"),
        (json!({"unevaluatedProperties": false}), "`unevaluatedProperties`"),
        (json!({"$dynamicRef": "#a"}), "`$dynamicRef`"),
        (json!({"type": "string", "nullable": true}), "`nullable`"),
        (json!({"type": "string", "minlength": 3}), "`minlength`"),
        (json!({"type": "string", "format": "phone"}), "\"phone\""),
        (json!({"type": "integer", "format": "int32"}), "\"int32\""),
        (json!({"type": "string", "pattern": "(?<=a)b"}), "look"),
        (json!({"type": "string", "pattern": "(a)\\1"}), "backref"),
        (json!({"$ref": "https://example.org/x.json"}), "another document"),
        (json!({"oneOf": [{"minimum": 1}, {"minimum": 2}]}), "`oneOf`"),
        (json!({"const": 9_007_199_254_740_993_u64}), "below 2^53"),
        (json!({"const": "\u{1}"}), "U+0001"),
        (json!({"type": "number", "multipleOf": 0.000_01}), "after the point"),
        (json!({"type": "object", "minProperties": 2}), "`minProperties`"),
        (json!({"x-guidance": {"lenient": true}, "properties": {"a": {"not": {}}}}), "`not`"),
        (json!({"properties": {"a": {"$id": "b"}}}), "`$id`"),
        (
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "b", "items": {"$ref": "#"}}}}),
            "at #/$defs/a/$id",
        ),
    ] {
        let compiled = model.constrainer.compile(&Grammar::JsonSchema(schema.clone()));
        let e = compiled.map(|_| ()).expect_err(&schema.to_string());
        assert!(e.is_unsupported() && e.to_string().contains(says), "{schema}: {e}");
    }
}

#[test]
fn what_is_no_schema_or_allows_nothing_is_an_error() {
    let model = &models()[0];
    for schema in [
        json!(1),
        json!(false),
        json!({"type": "text"}),
        json!({"type": []}),
        json!({"enum": []}),
        json!({"anyOf": []}),
        json!({"properties": []}),
        json!({"properties": {"a": 1}}),
        json!({"required": "a"}),
        json!({"minItems": -1}),
        json!({"minItems": 1.5}),
        json!({"maximum": "3"}),
        json!({"multipleOf": 0}),
        json!({"pattern": 1}),
        json!({"$ref": "#/$defs/none"}),
        json!({"$ref": "#"}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}),
        json!({"type": "integer", "minimum": 3, "maximum": 2}),
        json!({"type": "object", "required": ["a"], "additionalProperties": false}),
        json!({"type": "string", "minLength": 3, "maxLength": 2}),
        json!({"type": "string", "pattern": "("}),
    ] {
        let e = model.constrainer.compile(&Grammar::JsonSchema(schema.clone()));
        assert!(e.is_err(), "{schema}");
    }
}

#[test]
fn properties_come_in_the_order_of_the_schema() {
    let model = &models()[0];
    let of = |text: &str| Grammar::JsonSchema(serde_json::from_str(text).unwrap());
    let (a, b) = (r#""a": {"type": "null"}"#, r#""b": {"type": "null"}"#);
    let rest = r#""type": "object", "required": ["a", "b"]"#;
    let ab = of(&format!("{{\"properties\": {{{a}, {b}}}, {rest}}}"));
    let ba = of(&format!("{{\"properties\": {{{b}, {a}}}, {rest}}}"));
    for _ in 0..2 {
        assert!(
            model.accepts(&ab, r#"{"a":null,"b":null}"#) && !model.accepts(&ab, r#"{"b":null"#)
        );
        assert!(model.accepts(&ba, r#"{"b":null,"a":null}"#));
        assert!(!model.accepts(&ba, r#"{"a":null,"b":null}"#));
    }
}
