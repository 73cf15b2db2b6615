//! Schemas made by chance: what compiles is obeyed, and most of what is made compiles.

use fornax_engine::constrain::Grammar;
use serde_json::{Map, Value, json};

use crate::walk::{Random, models};

const PATTERNS: &[&str] =
    &["^[a-z]+$", "^\\d{2}-\\w$", "x|y", "^(?:ab)*$", "[A-F]{2}", "^\\S.*$", "^.{0,3}é$"];
const FORMATS: &[&str] =
    &["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];
const NAMES: &[&str] = &["a", "b", "long name", "é", "q\"uote", "back\\slash", ""];

fn texts(random: &mut Random) -> Value {
    match random.below(5) {
        0 => json!({"type": "string", "pattern": PATTERNS[random.below(PATTERNS.len())]}),
        1 => {
            let least = random.below(3);
            json!({"type": "string", "minLength": least, "maxLength": least + random.below(4)})
        }
        2 => {
            json!({"type": "string", "format": (FORMATS[random.below(FORMATS.len())])})
        }
        3 => {
            json!({"type": "string", "pattern": PATTERNS[random.below(PATTERNS.len())], "maxLength": 6})
        }
        _ => json!({"type": "string"}),
    }
}

fn numbers(random: &mut Random) -> Value {
    let (a, b) = (random.below(400) as i64 - 200, random.below(300) as i64);
    match random.below(6) {
        0 => json!({"type": "integer", "minimum": a, "maximum": a + b}),
        1 => json!({"type": "integer", "exclusiveMinimum": a, "exclusiveMaximum": a + b + 2}),
        2 => json!({"type": "number", "minimum": a as f64 / 8.0, "maximum": (a + b) as f64 / 8.0}),
        3 => {
            json!({"type": "integer", "multipleOf": 1 + random.below(20), "minimum": a, "maximum": a + 100})
        }
        4 => json!({"type": "number", "exclusiveMinimum": a, "maximum": a + b + 1}),
        _ => json!({"type": "integer", "maximum": a}),
    }
}

fn constants(random: &mut Random) -> Value {
    let all = [
        json!(null),
        json!(true),
        json!(-3),
        json!(2.5),
        json!("x\n\"é🙂"),
        json!([1, "a"]),
        json!({"k": [null]}),
        json!(""),
    ];
    let from = random.below(all.len());
    if random.below(2) == 0 {
        return json!({"const": all[from]});
    }
    let to = (from + 1 + random.below(4)).min(all.len());
    json!({"enum": all[from..to]})
}

fn schema(random: &mut Random, depth: usize) -> Value {
    let simple = depth == 0 || random.below(3) == 0;
    match random.below(if simple { 4 } else { 10 }) {
        0 => texts(random),
        1 => numbers(random),
        2 => constants(random),
        3 => {
            json!({"type": ([["null", "boolean"], ["integer", "null"], ["boolean", "string"]][random.below(3)])})
        }
        4 | 5 => object(random, depth),
        6 => {
            let least = random.below(3);
            let mut array = json!({"type": "array", "items": schema(random, depth - 1), "minItems": least, "maxItems": least + random.below(3)});
            if random.below(3) == 0 {
                array["prefixItems"] =
                    json!([schema(random, depth - 1), schema(random, depth - 1)]);
            }
            array
        }
        7 => json!({"anyOf": [schema(random, depth - 1), schema(random, depth - 1)]}),
        8 => json!({"oneOf": [{"type": "null"}, numbers(random), texts(random)]}),
        _ => json!({"$ref": format!("#/$defs/r{}", random.below(3))}),
    }
}

fn object(random: &mut Random, depth: usize) -> Value {
    let mut properties = Map::new();
    let mut required = Vec::new();
    for _ in 0..random.below(5) {
        let name = NAMES[random.below(NAMES.len())];
        properties.insert(name.into(), schema(random, depth - 1));
        if random.below(2) == 0 && !required.contains(&name) {
            required.push(name);
        }
    }
    let mut object = json!({"type": "object", "properties": properties, "required": required});
    match random.below(5) {
        0 => {}
        1 => object["additionalProperties"] = schema(random, depth - 1),
        2 => object["patternProperties"] = json!({"^z": numbers(random)}),
        _ => object["additionalProperties"] = json!(false),
    }
    if random.below(6) == 0 {
        let other = json!({"properties": {"a": schema(random, depth - 1)}, "required": ["a"]});
        object = json!({"allOf": [object, other]});
    }
    if random.below(6) == 0 {
        object["maxProperties"] = json!(random.below(3) + 1);
    }
    object
}

#[test]
fn schemas_made_by_chance_are_obeyed() {
    let mut random = Random(11);
    let (mut compiled, mut ended) = (0, 0);
    let total = 250;
    for round in 0..total {
        let mut root = schema(&mut random, 3);
        let defs: Map<String, Value> =
            (0..3).map(|i| (format!("r{i}"), schema(&mut random, 1 + i))).collect();
        root["$defs"] = defs.into();
        let validator = jsonschema::options().should_validate_formats(true).build(&root).unwrap();
        let grammar = Grammar::JsonSchema(root.clone());
        // All families in turn: what is tested here is the schema.
        let model = &models()[round % models().len()];
        if model.constrainer.compile(&grammar).is_err() {
            continue;
        }
        compiled += 1;
        for _ in 0..3 {
            let text =
                model.write(&grammar, &mut random, &mut |text| match serde_json::from_str(text) {
                    Ok(value) => {
                        assert!(validator.is_valid(&value), "{}: {root}: {text}", model.name)
                    }
                    Err(e) => {
                        assert!(e.to_string().contains("out of range"), "{root}: {text}: {e}")
                    }
                });
            ended += usize::from(text.is_some());
        }
    }
    assert!(compiled * 10 > total * 6, "{compiled} of {total} compiled");
    assert!(ended * 2 > compiled * 3, "{ended} answers of {compiled} schemas came to an end");
}
