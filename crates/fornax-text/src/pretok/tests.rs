//! Splits worked out by hand or with an independent regex engine, rule by rule.

use super::*;

/// The pieces of `text` with `|` between them.
fn split(rule: &str, text: &str) -> String {
    let pre = Pretokenizer::named(rule).expect("a known rule");
    let (mut chars, mut pieces, mut spare) = (Vec::new(), Vec::new(), Vec::new());
    classify(text.as_bytes(), &mut chars);
    pre.split(&chars, &mut pieces, &mut spare);
    let mut rest = text;
    let mut at = 0;
    let mut out = Vec::new();
    for &count in &pieces {
        let len = byte_len(&chars[at..at + count as usize]);
        out.push(&rest[..len]);
        rest = &rest[len..];
        at += count as usize;
    }
    assert!(rest.is_empty(), "{rule}: {rest:?} of {text:?} is in no piece");
    out.join("|")
}

#[track_caller]
fn check(rules: &[&str], text: &str, expected: &str) {
    for rule in rules {
        assert_eq!(split(rule, text), expected, "{rule} on {text:?}");
    }
}

#[test]
fn digits() {
    check(&["gpt-2"], "12345 67", "12345| 67");
    check(&["llama-bpe"], "12345 67", "123|45| |67");
    check(&["qwen2"], "12345 67", "1|2|3|4|5| |6|7");
    check(&["smollm", "refact"], "12345 67", "1|2|3|4|5| |6|7");
    check(&["deepseek-v3"], "12345 67", "123|45| |67");
    // Numbers are more than ASCII digits.
    check(&["llama-bpe"], "½Ⅷ٣٤", "½Ⅷ٣|٤");
    check(&["qwen2"], "½Ⅷ٣", "½|Ⅷ|٣");
}

#[test]
fn contractions_punctuation_and_line_breaks() {
    let text = "I'LL x->y (z):\n\n  end";
    check(&["gpt-2"], text, "I|'|LL| x|->|y| (|z|):|\n\n | end");
    check(&["llama-bpe", "qwen2"], text, "I|'LL| x|->|y| (|z|):\n\n| | end");
    check(&["gpt-4o"], text, "I'LL| x|->|y| (|z|):\n\n| | end");
    check(&["tekken"], text, "I|'LL| x|->|y| (|z|):\n\n| | end");
    check(&["llama-bpe"], "don't we'\u{17f}", "don|'t| we|'\u{17f}");
    check(&["gpt-2"], "don't DON'T", "don|'t| DON|'|T");
}

#[test]
fn marks() {
    let text = "e\u{301}a \u{e01}\u{e31}";
    check(&["llama-bpe", "qwen2"], text, "e|\u{301}a| \u{e01}|\u{e31}");
    check(&["gpt-2"], text, "e|\u{301}|a| \u{e01}|\u{e31}");
    check(&["qwen35"], text, "e\u{301}a| \u{e01}\u{e31}");
    check(&["gpt-4o", "tekken"], text, "e\u{301}a| \u{e01}\u{e31}");
}

#[test]
fn white_space() {
    check(&["gpt-2", "llama-bpe", "qwen2"], "a  b\n \n c", "a| | b|\n \n| c");
    check(&["gpt-2", "llama-bpe", "qwen2"], "a   ", "a|   ");
    check(&["llama-bpe"], "a \n \n  b", "a| \n \n| | b");
    check(&["deepseek-llm"], "a  \n  b  1", "a|  |\n| | b|  |1");
    check(&["smollm"], "a  1", "a|  |1");
}

#[test]
fn case_decides_where_words_end() {
    check(&["gpt-4o", "tekken"], "CamelCaseHTTPServer2Go", "Camel|Case|HTTPServer|2|Go");
    check(&["gpt-4o", "tekken"], "漢字ABC def", "漢字|ABC| def");
    check(&["tekken"], "a/b //\n/x", "a|/b| //\n/|x");
    check(&["gpt-4o"], "a/b //\n/x", "a|/b| //\n/|x");
}

#[test]
fn the_other_rules() {
    check(&["deepseek-v3"], "a.foo 漢字かな x", "a|.foo| |漢字かな| x");
    check(&["deepseek-llm"], "Привет, x=1 漢字", "Привет|,| x|=|1| |漢字");
    check(&["falcon"], "a+b 12345 12", "a|+|b| |123|45| |12");
    check(&["bloom"], "hello, world (x)", "hello|,| world| (|x|)");
    check(&["viking"], "a 12", "a| |1|2");
    check(&["seed-coder"], "a!\n\nb", "a|!|\n\n|b");
    check(&["dbrx", "glm4", "lfm2"], "12345 67", "123|45| |67");
}

#[test]
fn unknown_names_are_errors_that_say_so() {
    let error = Pretokenizer::named("no-such-rule").expect_err("unknown");
    assert!(error.is_unsupported());
    assert!(error.to_string().contains("\"no-such-rule\""), "{error}");
    let error = Pretokenizer::named("").expect_err("absent");
    assert!(error.is_missing());
    assert!(error.to_string().contains("tokenizer.ggml.pre"), "{error}");
}
