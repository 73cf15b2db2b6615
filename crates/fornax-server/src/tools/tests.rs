//! Calls of every family, cut in many ways; grammars whose answers the readers take back.

use std::path::PathBuf;
use std::sync::Arc;

use fornax_engine::constrain::{Constrainer, Grammar};
use fornax_engine::serve::BitSet;
use fornax_gguf::Gguf;
use fornax_text::{ModelKind, TokenKind, Tokenizer, VocabSpec};
use serde_json::{Value, json};

use crate::turn::{Choice, TurnFormat, TurnPiece};

const HERMES: &str = "<tool_call>";
const QWEN3: &str = "<think></think><tool_call>";
const LLAMA: &str = "<|python_tag|>";
const MISTRAL: &str = "[TOOL_CALLS]";
const MISTRAL_ARGS: &str = "[TOOL_CALLS][ARGS]";
const LFM2: &str = "<|tool_call_start|>";
const GEMMA: &str = "<start_of_turn>";
const HARMONY: &str = "<|channel|>";
const ALL: &[&str] = &[HERMES, QWEN3, LLAMA, MISTRAL, MISTRAL_ARGS, LFM2, GEMMA, HARMONY];

fn tokenizer() -> Arc<Tokenizer> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tokenizers");
    let gguf = Gguf::open(&folder.join("llama3/vocab.gguf")).expect("the fixture opens");
    Arc::new(Tokenizer::from_gguf(gguf.metadata()).expect("the tokenizer is known"))
}

/// Bytes, and every mark as a control token.
fn marked() -> Arc<Tokenizer> {
    let mut tokens: Vec<String> = (0..256).map(|b| format!("<0x{b:02X}>")).collect();
    let mut kinds = vec![TokenKind::Byte; 256];
    for mark in [
        "<unk>",
        "<eos>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ] {
        tokens.push(mark.to_owned());
        kinds.push(TokenKind::Control);
    }
    let scores = vec![0.0; tokens.len()];
    let spec = VocabSpec {
        scores,
        kinds,
        unknown: Some(256),
        eos: Some(257),
        add_space_prefix: Some(false),
        ..VocabSpec::new(ModelKind::Spm, "", tokens)
    };
    Arc::new(Tokenizer::new(&spec).expect("the vocabulary is sound"))
}

fn tools(strict: bool) -> Vec<Value> {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "dry": {"type": "boolean"},
    }, "required": ["city"], "additionalProperties": false});
    vec![
        json!({"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": strict}}),
        json!({"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}),
    ]
}

/// A turn as a client puts it together.
#[derive(Debug, Default, PartialEq)]
struct Whole {
    text: String,
    thought: String,
    calls: Vec<(String, String)>,
}

fn gather(format: &TurnFormat, pieces: &[String]) -> Whole {
    let mut turn = format.start();
    let mut whole = Whole::default();
    let mut ids = Vec::new();
    let mut all: Vec<Vec<TurnPiece>> = pieces.iter().map(|piece| turn.push(piece)).collect();
    all.push(turn.finish());
    for piece in all.into_iter().flatten() {
        match piece {
            TurnPiece::Text(text) => whole.text += &text,
            TurnPiece::Reasoning(text) => whole.thought += &text,
            TurnPiece::Call { index, id, name } => {
                assert_eq!(index, whole.calls.len());
                assert!(!ids.contains(&id) && id.len() >= 9);
                ids.push(id);
                whole.calls.push((name, String::new()));
            }
            TurnPiece::Arguments { index, fragment } => {
                assert_eq!(index + 1, whole.calls.len(), "arguments of the last call");
                whole.calls[index].1 += &fragment;
            }
        }
    }
    whole
}

/// Cuts a text at characters by the bits of `cuts`.
fn cut(text: &str, mut cuts: u64) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for c in text.chars() {
        pieces.last_mut().expect("a piece").push(c);
        cuts = cuts.rotate_left(1);
        if cuts & 1 == 1 {
            pieces.push(String::new());
        }
    }
    pieces
}

const CUTS: &[u64] = &[
    0,
    u64::MAX,
    0x5555_5555_5555_5555,
    0x9249_2492_4924_9249,
    0x8421_0842_1084_2108,
    0x1234_5678_9abc_def1,
];

fn read(template: &str, answer: &str, one_call: bool) -> Whole {
    let format = TurnFormat::of(&tokenizer(), template, "", &tools(false), &Choice::Auto, one_call);
    let whole = gather(&format, &[answer.to_owned()]);
    for &cuts in CUTS {
        assert_eq!(gather(&format, &cut(answer, cuts)), whole, "{answer:?} cut by {cuts:x}");
    }
    whole
}

fn check(template: &str, answer: &str, text: &str, calls: &[(&str, &str)]) {
    let whole = read(template, answer, false);
    let calls: Vec<_> = calls.iter().map(|(n, a)| ((*n).to_owned(), (*a).to_owned())).collect();
    assert_eq!((&*whole.text, &whole.calls), (text, &calls), "{answer:?}");
}

#[test]
fn calls_of_hermes_and_qwen() {
    check(
        HERMES,
        "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
        "",
        &[("now", "{}")],
    );
    check(
        HERMES,
        "Let me see.\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"A\\\"}{🙂\", \"days\": 2}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\"}\n</tool_call>\n",
        "Let me see.",
        &[("weather", "{\"city\": \"A\\\"}{🙂\", \"days\": 2}"), ("now", "{}")],
    );
    // Arguments first, as a text, under another name, in another object; two calls in one pair of marks.
    check(
        HERMES,
        "<tool_call>{\"arguments\": {\"a\":1}, \"name\": \"f\"}</tool_call>",
        "",
        &[("f", "{\"a\":1}")],
    );
    check(
        HERMES,
        "<tool_call>{\"name\":\"f\",\"arguments\":\"{\\\"a\\\":1}\"}</tool_call>x",
        "x",
        &[("f", "{\"a\":1}")],
    );
    check(
        HERMES,
        "<tool_call>{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{}},\"id\":7}",
        "",
        &[("f", "{}")],
    );
    check(
        HERMES,
        "<tool_call>{\"name\":\"f\"}\n{\"name\":\"g\"}</tool_call>",
        "",
        &[("f", "{}"), ("g", "{}")],
    );
    check(
        HERMES,
        "<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "",
        &[("weather", "{\"city\":\"New\\nYork\",\"days\":3}")],
    );
    // A call that was cut: what was announced stays, the rest was no call.
    check(
        HERMES,
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [1, ",
        "",
        &[("f", "{\"a\": [1, ")],
    );
    check(HERMES, "a <tool_call>{\"nam", "a <tool_call>{\"nam", &[]);
}

#[test]
fn what_is_no_call_stays_text() {
    for answer in [
        "",
        " ",
        "plain\n",
        "a < b <tool",
        "<tool_call>",
        "<tool_call>nonsense</tool_call>",
        "<tool_call>{\"name\": 3}</tool_call>",
        "<tool_call>{\"name\": \"\"}</tool_call>",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>{\"arguments\": [1], \"name\": \"f\"}</tool_call>",
        "<tool_call>[]</tool_call>",
        "<tool_call><function=f></tool_call>",
        "</tool_call> <tool_calls>",
        "漢字 <tool_cal 🙂",
    ] {
        check(HERMES, answer, answer, &[]);
    }
    check(LLAMA, "{\"title\": \"x\", \"n\": [1]}", "{\"title\": \"x\", \"n\": [1]}", &[]);
    check(
        LLAMA,
        "{\"name\": \"unknown\", \"parameters\": {}}",
        "{\"name\": \"unknown\", \"parameters\": {}}",
        &[],
    );
    check(GEMMA, "```json\n{\"a\": 1}\n```\nSo.", "```json\n{\"a\": 1}\n```\nSo.", &[]);
    check(GEMMA, "[1, 2]", "[1, 2]", &[]);
    check(
        LFM2,
        "<|tool_call_start|>[f(<|tool_call_end|>",
        "<|tool_call_start|>[f(<|tool_call_end|>",
        &[],
    );
    check(MISTRAL, "[TOOL_CALLS]!", "[TOOL_CALLS]!", &[]);
}

#[test]
fn calls_of_llama() {
    check(
        LLAMA,
        "{\"name\": \"weather\", \"parameters\": {\"city\": \"X\"}}",
        "",
        &[("weather", "{\"city\": \"X\"}")],
    );
    check(
        LLAMA,
        "<|python_tag|>{\"type\": \"function\", \"name\": \"now\", \"parameters\": {}}; {\"name\": \"weather\", \"parameters\": {\"city\": \"Y\"}}",
        "",
        &[("now", "{}"), ("weather", "{\"city\": \"Y\"}")],
    );
    check(LLAMA, "Here: {\"name\": \"now\"}", "Here: {\"name\": \"now\"}", &[]);
}

#[test]
fn calls_of_mistral() {
    check(
        MISTRAL,
        "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"X\"}, \"id\": \"abcdefghi\"}, {\"name\": \"now\", \"arguments\": {}}]",
        "",
        &[("weather", "{\"city\": \"X\"}"), ("now", "{}")],
    );
    check(
        MISTRAL_ARGS,
        "Well. [TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{\"city\": \"]\"}[TOOL_CALLS]now[ARGS]{}",
        "Well.",
        &[("weather", "{\"city\": \"]\"}"), ("now", "{}")],
    );
    let format = TurnFormat::of(&tokenizer(), MISTRAL, "", &tools(false), &Choice::Auto, false);
    let pieces = format.start().push("[TOOL_CALLS][{\"name\": \"now\"}]");
    assert!(matches!(&pieces[0], TurnPiece::Call { id, .. } if id.len() == 9), "{pieces:?}");
}

#[test]
fn calls_in_python() {
    check(
        LFM2,
        "<|tool_call_start|>[weather(city=\"A\\u00e9\\n\", days=2, dry=True), now()]<|tool_call_end|>Done",
        "Done",
        &[("weather", "{\"city\":\"Aé\\n\",\"days\":2,\"dry\":true}"), ("now", "{}")],
    );
    check(
        LFM2,
        "<|tool_call_start|>[weather('X', 3)]",
        "",
        &[("weather", "{\"city\":\"X\",\"days\":3}")],
    );
    check(
        GEMMA,
        "Sure.\n```tool_code\nprint(weather(city='it\\'s', dry=None))\n```",
        "Sure.",
        &[("weather", "{\"city\":\"it's\",\"dry\":null}")],
    );
    check(GEMMA, "```json\n[{\"name\": \"now\", \"arguments\": {}}]\n```", "", &[("now", "{}")]);
    check(
        GEMMA,
        "[weather(city=\"X\", days=-1.5, x={'a': [1, (2,)]})]",
        "",
        &[("weather", "{\"city\":\"X\",\"days\":-1.5,\"x\":{\"a\":[1,[2]]}}")],
    );
    let deep = format!("[f(x={}1{})]", "[".repeat(5000), "]".repeat(5000));
    check(GEMMA, &deep, &deep, &[]);
}

#[test]
fn channels_of_harmony() {
    let answer = "<|channel|>analysis<|message|>Hm <|x|>.<|end|><|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>\
                  <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\":\"X\"}<|call|>\
                  <|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}";
    let whole = read(HARMONY, answer, false);
    assert_eq!((&*whole.thought, &*whole.text), ("Hm <|x|>.", "Looking."));
    assert_eq!(
        whole.calls,
        [("weather".into(), "{\"city\":\"X\"}".into()), ("now".into(), "{}".into())]
    );
    assert_eq!(read(HARMONY, answer, true).calls.len(), 1);
    let whole = read(HARMONY, "<|channel|>final<|message|>Yes <|en", false);
    assert_eq!((&*whole.thought, &*whole.text), ("", "Yes <|en"));
    assert_eq!(read(HARMONY, "no marks at all", false).text, "no marks at all");
}

#[test]
fn thoughts_come_before_calls_and_one_call_is_one() {
    let answer = "<think>\nI could <tool_call> now.\n</think>\n\nOk <tool_call>{\"name\":\"f\"}</tool_call> <tool_call>{\"name\":\"g\"}</tool_call>";
    let whole = read(QWEN3, answer, false);
    assert_eq!(
        (&*whole.thought, &*whole.text, whole.calls.len()),
        ("I could <tool_call> now.", "Ok", 2)
    );
    let whole = read(QWEN3, answer, true);
    assert_eq!(whole.calls, [("f".to_owned(), "{}".to_owned())]);
}

#[test]
fn without_tools_marks_are_text() {
    let tokenizer = tokenizer();
    for choice in [Choice::Auto, Choice::None] {
        let given = if choice == Choice::None { tools(false) } else { Vec::new() };
        let format = TurnFormat::of(&tokenizer, HERMES, "", &given, &choice, false);
        let answer = "<tool_call>{\"name\":\"f\"}</tool_call>";
        let whole = gather(&format, &[answer.to_owned()]);
        assert_eq!((&*whole.text, whole.calls.len()), (answer, 0));
        assert_eq!(format.held_to(&tokenizer, None).expect("no conflict"), None);
    }
}

/// Strings of marks and pieces of calls in no order: nothing panics, and cuts change nothing.
#[test]
fn any_text_is_read_alike_however_it_is_cut() {
    const WORDS: &[&str] = &[
        "<tool_call>",
        "</tool_call>",
        "{\"name\": \"now\"",
        ", \"arguments\": {\"a\": \"}\\\"\"}",
        "}",
        "[",
        "]",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "now",
        "(x=1)",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "```tool_code\n",
        "```",
        "<think>",
        "</think>",
        "<|channel|>",
        "final",
        "analysis",
        "<|message|>",
        "<|end|>",
        " ",
        "\n",
        "<",
        "漢🙂",
        ",",
        ";",
        "\"",
        "\\",
        "to=functions.now ",
        "{",
        "```json",
    ];
    let tokenizer = tokenizer();
    let mut state = 7u64;
    let mut random = |n: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    for template in ALL {
        let format = TurnFormat::of(&tokenizer, template, "", &tools(false), &Choice::Auto, false);
        for _ in 0..1500 {
            let answer: String = (0..1 + random(12)).map(|_| WORDS[random(WORDS.len())]).collect();
            let whole = gather(&format, std::slice::from_ref(&answer));
            for cuts in [u64::MAX, random(usize::MAX) as u64] {
                assert_eq!(
                    gather(&format, &cut(&answer, cuts)),
                    whole,
                    "{template}: {answer:?} cut by {cuts:x}"
                );
            }
            if !format.start().is_reasoning()
                && whole.calls.is_empty()
                && whole.thought.is_empty()
                && *template != HARMONY
                && !answer.contains("think>")
            {
                assert_eq!(whole.text, answer, "{template}: nothing is lost");
            }
        }
    }
}

/// Writes an answer by chance under a grammar, then ends it as soon as it may.
fn write(tokenizer: &Arc<Tokenizer>, grammar: &Grammar, seed: u64) -> Option<String> {
    let constrainer = Constrainer::new(tokenizer);
    let compiled = constrainer.compile(grammar).unwrap_or_else(|e| panic!("{grammar:?}: {e}"));
    let mut constraint = compiled.start();
    let mut allowed = BitSet::new(tokenizer.vocab_len());
    let mut state = seed;
    let mut ids = Vec::new();
    for step in 0..500 {
        if constraint.is_done() || step > 40 && constraint.may_end() {
            return Some(tokenizer.decode(&ids, false));
        }
        constraint.mask(&mut allowed).expect("a token can follow");
        let all: Vec<u32> = (0..tokenizer.vocab_len() as u32)
            .filter(|&id| allowed.contains(id) && !tokenizer.is_end_of_generation(id))
            .collect();
        if all.is_empty() {
            return Some(tokenizer.decode(&ids, false));
        }
        let closing = |c: &u8| all.iter().copied().find(|&id| tokenizer.token_bytes(id) == [*c]);
        let mark = all.iter().copied().find(|&id| tokenizer.is_control(id));
        let close =
            (step > 30).then(|| mark.or_else(|| b"\"}])".iter().find_map(closing))).flatten();
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let id = close.unwrap_or(all[(state >> 33) as usize % all.len()]);
        constraint.accept(id).expect("it was allowed");
        ids.push(id);
    }
    None
}

#[test]
fn what_a_grammar_makes_is_read_as_the_call_that_was_asked_for() {
    for template in ALL {
        // Marks as text, and as control tokens; channels are never text.
        if *template != HARMONY {
            grammars_make_calls(&tokenizer(), template);
        }
        grammars_make_calls(&marked(), template);
    }
}

fn grammars_make_calls(tokenizer: &Arc<Tokenizer>, template: &str) {
    let named = Choice::Named("weather".into());
    for (choice, one_call) in [(Choice::Required, true), (named, true), (Choice::Required, false)] {
        let format = TurnFormat::of(tokenizer, template, "", &tools(true), &choice, one_call);
        let grammar = format.held_to(tokenizer, None).expect("it can be").expect("it is held");
        let mut ended = 0;
        for seed in 0..4 {
            let Some(answer) = write(tokenizer, &grammar, seed) else { continue };
            ended += 1;
            let whole = gather(&format, &cut(&answer, 0x5555_5555_5555_5555));
            let only_calls = whole.text.trim().is_empty() && !whole.calls.is_empty();
            assert!(only_calls, "{template}: {answer:?}: {whole:?}");
            assert!(!one_call || whole.calls.len() == 1);
            for (name, arguments) in &whole.calls {
                let may = name == "weather" || name == "now" && choice == Choice::Required;
                assert!(may && is_meant(name, arguments), "{answer:?}");
            }
        }
        assert!(ended > 0, "{template}: {choice:?}");
    }
}

fn is_meant(name: &str, arguments: &str) -> bool {
    let Ok(Value::Object(map)) = serde_json::from_str(arguments) else { return false };
    let days = map.get("days").is_none_or(|d| (1..=9).contains(&d.as_i64().unwrap_or(0)));
    let dry = map.get("dry").is_none_or(Value::is_boolean);
    name == "now" || map["city"].is_string() && days && dry && map.len() <= 3
}

#[test]
fn strict_tools_leave_text_free_and_hold_calls() {
    let tokenizer = tokenizer();
    for template in [HERMES, QWEN3, LLAMA, MISTRAL, MISTRAL_ARGS, LFM2] {
        let format = TurnFormat::of(&tokenizer, template, "", &tools(true), &Choice::Auto, false);
        let grammar = format.held_to(&tokenizer, None).expect("it can be").expect("it is held");
        let compiled = Constrainer::new(&tokenizer)
            .compile(&grammar)
            .unwrap_or_else(|e| panic!("{template}: {e}"));
        let mut constraint = compiled.start();
        let mut allowed = BitSet::new(tokenizer.vocab_len());
        for id in tokenizer.encode("Fine, then.", fornax_text::EncodeOptions::default()) {
            constraint.mask(&mut allowed).expect("a token can follow");
            assert!(allowed.contains(id), "{template}");
            constraint.accept(id).expect("it was allowed");
        }
        assert!(constraint.may_end(), "{template}");
    }
    let format = TurnFormat::of(&tokenizer, GEMMA, "", &tools(true), &Choice::Auto, false);
    assert!(format.held_to(&tokenizer, None).is_err());
    let mut odd = tools(true);
    odd[0]["function"]["parameters"]["properties"]["city"] = json!({"not": {}});
    let format = TurnFormat::of(&tokenizer, HERMES, "", &odd, &Choice::Required, false);
    let refused = format!("{:?}", format.held_to(&tokenizer, None).expect_err("`not` cannot be"));
    assert!(refused.contains("`not`"), "{refused}");
}

#[test]
fn a_schema_for_the_answer_comes_after_thoughts_and_beside_calls() {
    let tokenizer = tokenizer();
    let schema = Grammar::JsonSchema(
        json!({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}),
    );
    let format = TurnFormat::of(&tokenizer, QWEN3, "<think>\n", &[], &Choice::Auto, false);
    let grammar =
        format.held_to(&tokenizer, Some(&schema)).expect("it can be").expect("it is held");
    let mut constraint =
        Constrainer::new(&tokenizer).compile(&grammar).expect("it compiles").start();
    let mut allowed = BitSet::new(tokenizer.vocab_len());
    let answer = "I think {so}.</think>\n\n{\"a\":1}";
    for id in tokenizer.encode(answer, fornax_text::EncodeOptions::default()) {
        assert!(!constraint.may_end());
        constraint.mask(&mut allowed).expect("a token can follow");
        assert!(allowed.contains(id), "{:?}", tokenizer.piece(id));
        constraint.accept(id).expect("it was allowed");
    }
    assert!(constraint.may_end());
    let whole = gather(&format, &[answer.to_owned()]);
    assert_eq!((&*whole.thought, &*whole.text), ("I think {so}.", "{\"a\":1}"));

    let format = TurnFormat::of(&tokenizer, HERMES, "", &tools(false), &Choice::Auto, false);
    let grammar =
        format.held_to(&tokenizer, Some(&schema)).expect("it can be").expect("it is held");
    for answer in ["{\"a\":2}", "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>"]
    {
        let mut constraint =
            Constrainer::new(&tokenizer).compile(&grammar).expect("it compiles").start();
        for id in tokenizer.encode(answer, fornax_text::EncodeOptions::default()) {
            constraint.accept(id).unwrap_or_else(|e| panic!("{answer}: {e}"));
        }
        assert!(constraint.may_end(), "{answer}");
    }
    let own = Grammar::Lark("start: \"x\"".into());
    assert!(format.held_to(&tokenizer, Some(&own)).is_err());
}
