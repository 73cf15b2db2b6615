//! Regular expressions, choices, Lark, GBNF, and tokens that are no text.

use fornax_engine::constrain::{Grammar, lark};
use fornax_engine::serve::BitSet;
use serde_json::json;

use crate::walk::{Random, models, tokens};

fn accepts(grammar: &Grammar, valid: &[&str], invalid: &[&str]) {
    for model in models() {
        for text in valid {
            assert!(model.accepts(grammar, text), "{}: {grammar:?} refuses {text:?}", model.name);
        }
        for text in invalid {
            assert!(!model.accepts(grammar, text), "{}: {grammar:?} takes {text:?}", model.name);
        }
    }
}

#[test]
fn a_regular_expression_is_met_from_end_to_end() {
    let cases: &[(&str, &[&str], &[&str])] = &[
        (r"[a-c]+b", &["ab", "aab", "cbb"], &["a", "b", "abx"]),
        (r"^\d{3}-\d{2}$", &["123-45"], &["12-45", "123-456"]),
        ("(ja|nein|vielleicht)", &["ja", "vielleicht"], &["j", "jaja"]),
        ("a*", &["", "aaa"], &["b"]),
        (r"https?://[a-z/.]+", &["http://a.b/c"], &["ftp://a"]),
        ("[äöü]漢?🙂", &["ä🙂", "ü漢🙂"], &["漢🙂"]),
        ("(?i)ab", &["AB", "aB"], &["ac"]),
        ("^a|b$", &["a", "b"], &["ab", "^a"]),
        ("a/b", &["a/b"], &["a\\/b"]),
    ];
    for (pattern, valid, invalid) in cases {
        accepts(&Grammar::Regex((*pattern).into()), valid, invalid);
    }
    let model = &models()[0];
    for pattern in ["*", "(?<=x)a", "(a)\\1", "(", "[", "a{2,1}", "a^b", "a$b", "\\bx"] {
        let e = model.constrainer.compile(&Grammar::Regex(pattern.into()));
        assert!(e.is_err(), "{pattern}");
    }
}

#[test]
fn a_choice_is_one_of_its_texts() {
    let texts = ["a", "ab", "a.b", "grün\n", "\"}", "/x/"];
    let grammar = Grammar::Choice(texts.iter().map(|&t| t.into()).collect());
    accepts(&grammar, &texts, &["", "aab", "axb", "b", "abab"]);
    assert!(models()[0].constrainer.compile(&Grammar::Choice(Vec::new())).is_err());
}

#[test]
fn lark_holds_rules_terminals_and_schemas() {
    let schema = json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": false});
    let grammar = format!(
        "start: \"call \" NAME \"(\" args \")\"\nNAME: /[a-z]+/\nargs: {} | {}\n",
        lark::json(&schema),
        lark::quote("none \"\\\n")
    );
    let grammar = Grammar::Lark(grammar);
    accepts(
        &grammar,
        &["call f({\"x\":3})", "call abc(none \"\\\n)"],
        &["call f({})", "call F({\"x\":3})", "f({\"x\":3})", "call f({\"x\":3}"],
    );
    for text in ["", "start: missing", "x: \"a\"", "start: \"a", "start: %json {\"not\": {}}"] {
        assert!(models()[0].constrainer.compile(&Grammar::Lark(text.into())).is_err(), "{text}");
    }
}

const GBNF_JSON: &str = r##"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"##;

#[test]
fn gbnf_allows_what_it_says() {
    let grammar = Grammar::Gbnf(GBNF_JSON.into());
    let valid = ["{}", "{ \"a\": [1, -2.5e3, {\"b\":null}], \"\\u00e9\": \"x\\n漢\" }"];
    accepts(&grammar, &valid, &["{\"a\"}", "[1]", "{\"a\":01}", "{  }"]);
    let mut random = Random(5);
    for model in models() {
        let mut ended = 0;
        for _ in 0..8 {
            let written = model.write(&grammar, &mut random, &mut |text| {
                if let Err(e) = serde_json::from_str::<serde_json::Value>(text) {
                    // A number of free length may be more than a reader holds.
                    let large = e.to_string().contains("number out of range");
                    assert!(large, "{}: {text:?}: {e}", model.name);
                }
            });
            ended += usize::from(written.is_some());
        }
        assert!(ended >= 4, "{}: {ended} of 8", model.name);
    }
    let cases: &[(&str, &[&str], &[&str])] = &[
        // One regular expression, so that the greedy first part gives characters back.
        ("root ::= [a-z]+ \"b\"", &["ab", "bbb"], &["a", "b"]),
        ("root ::= (\"x\" | \"xy\") \"yz\"? \"é\"", &["xé", "xyé", "xyyzé", "xyzé"], &["xy"]),
        (
            "root ::= a\na ::= \"(\" a \")\" | [^\\]()]{2,3}",
            &["ab", "((abc))"],
            &["(a)", "((ab)", "]]"],
        ),
        ("root ::= list\nlist ::= list \",\" [0-9] | [0-9]", &["1", "1,2,3"], &["", "1,", ",1"]),
        ("root ::= . .?", &["a", "\n漢"], &["", "abc"]),
        ("a-b ::= \"1\"\nroot ::= a-b{2,} # twice\n", &["11", "111"], &["1"]),
        ("root ::= \"a\"\n  | \"b\"\n\n\n", &["a", "b"], &["ab"]),
    ];
    for (text, valid, invalid) in cases {
        accepts(&Grammar::Gbnf((*text).into()), valid, invalid);
    }
}

#[test]
fn gbnf_that_is_broken_is_an_error_with_its_place() {
    let model = &models()[0];
    for (text, says) in [
        ("", "`root`"),
        ("rout ::= \"x\"", "`root`"),
        ("root ::= other", "`other`"),
        ("root ::= \"x\"\nroot ::= \"y\"", "twice"),
        ("root ::= \"x\n", "line 1"),
        ("root ::= \"a\"\nb ::= [z-a]", "line 2"),
        ("root ::= (\"x\"", "`)`"),
        ("root ::= \"x\" )", "no meaning"),
        ("root ::= *", "no meaning"),
        ("root ::= \"a\"{3,2}", "times"),
        ("root ::= \"a\"{9999999}", "times"),
        ("root = \"a\"", "::="),
        ("root ::= <|nothing-like-it|>", "no token"),
        ("root ::= <[3]>", "by number"),
        ("root ::= []", "never match"),
        ("root ::= \"\\q\"", "escape"),
        ("root ::= root \"x\"", "allows no text"),
    ] {
        let e = model.constrainer.compile(&Grammar::Gbnf(text.into())).unwrap_err().to_string();
        assert!(e.contains(says), "{text:?}: {e}");
    }
}

#[test]
fn control_tokens_come_only_where_a_grammar_names_them() {
    for model in models() {
        let tokenizer = &model.tokenizer;
        let control = |id: u32| tokenizer.is_control(id) || tokenizer.is_end_of_generation(id);
        let anything = Grammar::Regex("(?s:.+)".into());
        let mut constraint = model.start(&anything);
        let mut allowed = BitSet::new(tokenizer.vocab_len());
        constraint.mask(&mut allowed).unwrap();
        assert!(tokens(&allowed).all(|id| !control(id)), "{}", model.name);
        let first = tokens(&allowed).find(|&id| tokenizer.token_bytes(id) == b"a").unwrap();
        constraint.accept(first).unwrap();
        constraint.mask(&mut allowed).unwrap();
        assert!(
            tokens(&allowed).filter(|&id| control(id)).all(|id| tokenizer.is_end_of_generation(id))
        );
        // Everything else of the vocabulary is reachable.
        let missing = (0..tokenizer.vocab_len() as u32).find(|&id| {
            let bytes = tokenizer.token_bytes(id);
            !allowed.contains(id)
                && !control(id)
                && std::str::from_utf8(bytes).is_ok_and(|t| !t.is_empty())
        });
        assert_eq!(missing.map(|id| tokenizer.piece(id)), None, "{}", model.name);

        let Some(special) = (0..tokenizer.vocab_len() as u32)
            .find(|&id| tokenizer.is_control(id) && !tokenizer.is_end_of_generation(id))
        else {
            continue;
        };
        let mut named = model.start(&Grammar::Lark(format!("start: <[{special}]> \"x\"\n")));
        named.mask(&mut allowed).unwrap();
        assert_eq!(tokens(&allowed).collect::<Vec<_>>(), [special], "{}", model.name);
        named.accept(special).unwrap();
        named.mask(&mut allowed).unwrap();
        assert!(!allowed.contains(special));
    }
}

#[test]
fn a_character_cut_into_tokens_is_held_to_the_grammar_byte_by_byte() {
    for model in models() {
        let mut constraint = model.start(&Grammar::Regex("🙂".into()));
        let mut allowed = BitSet::new(model.tokenizer.vocab_len());
        let mut bytes = Vec::new();
        while !constraint.is_done() {
            constraint.mask(&mut allowed).unwrap();
            let shortest =
                tokens(&allowed).min_by_key(|&id| model.tokenizer.token_bytes(id).len()).unwrap();
            bytes.extend_from_slice(model.tokenizer.token_bytes(shortest));
            constraint.accept(shortest).unwrap();
        }
        assert_eq!(String::from_utf8(bytes).unwrap(), "🙂", "{}", model.name);
    }
}

#[test]
fn a_token_that_is_not_allowed_is_an_error_and_stays_one() {
    let model = &models()[0];
    let mut constraint = model.start(&Grammar::Choice(vec!["yes".into()]));
    let no = model.tokenizer.token_id("n").unwrap();
    assert!(constraint.accept(no).unwrap_err().is_request());
    let mut allowed = BitSet::new(model.tokenizer.vocab_len());
    assert!(constraint.mask(&mut allowed).is_err());
    assert!(constraint.accept(u32::MAX).is_err());
    assert!(!constraint.may_end());
}

#[test]
fn masks_computed_ahead_are_the_same_masks() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "integer"}}}});
    for model in models() {
        let vocab = model.tokenizer.vocab_len();
        let grammar = Grammar::JsonSchema(schema.clone());
        let mut random = Random(9);
        let compiled = model.constrainer.compile(&grammar).unwrap();
        let mut pairs: Vec<_> = (0..4).map(|_| (compiled.start_here(), compiled.start())).collect();
        let (mut one, mut two) = (BitSet::new(vocab), BitSet::new(vocab));
        for _ in 0..30 {
            for (plain, ahead) in &mut pairs {
                assert_eq!((plain.may_end(), plain.is_done()), (ahead.may_end(), ahead.is_done()));
                if plain.is_done() {
                    continue;
                }
                plain.mask(&mut one).unwrap();
                ahead.mask(&mut two).unwrap();
                assert_eq!(one, two, "{}", model.name);
                let text = |id: &u32| !model.tokenizer.is_end_of_generation(*id);
                let ids: Vec<u32> = tokens(&one).filter(text).collect();
                if ids.is_empty() {
                    continue;
                }
                let id = ids[random.below(ids.len())];
                plain.accept(id).unwrap();
                ahead.accept(id).unwrap();
            }
        }
    }
}
