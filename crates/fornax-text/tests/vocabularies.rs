//! Hand-made vocabularies: what may be wrong with them, bytes that are no text, spaces that are not in the
//! text, BOS. It must not need any file.

use std::sync::Arc;

use fornax_text::{EncodeOptions, ModelKind, StreamDecoder, TokenKind, Tokenizer, VocabSpec};

const PLAIN: EncodeOptions = EncodeOptions { special: false, bos: false };
const SPECIAL: EncodeOptions = EncodeOptions { special: true, bos: false };

/// The byte-level alphabet: the character for each byte.
fn alphabet() -> Vec<String> {
    let mut next = 0x100;
    (0..=255u32)
        .map(|b| {
            if matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) {
                char::from_u32(b)
            } else {
                next += 1;
                char::from_u32(next - 1)
            }
        })
        .map(|c| c.expect("a character").to_string())
        .collect()
}

/// All bytes (ids 0 to 255), merges for `the` with a space, and three control tokens.
fn bpe() -> VocabSpec {
    let mut tokens = alphabet();
    tokens.extend(["Ġt", "he", "Ġthe"].map(str::to_owned));
    tokens.extend(["<|im_start|>", "<|im_end|>", "<think>"].map(str::to_owned));
    let mut spec = VocabSpec::new(ModelKind::Bpe, "gpt-2", tokens);
    spec.merges = ["Ġ t", "h e", "Ġt he"].map(str::to_owned).to_vec();
    spec.kinds = vec![TokenKind::Normal; 259];
    spec.kinds.extend([TokenKind::Control, TokenKind::Control, TokenKind::UserDefined]);
    spec.eos = Some(260);
    spec
}

/// `<pad>`, `<|x|>`, the bytes, and a few words.
fn spm() -> VocabSpec {
    let mut tokens: Vec<String> =
        ["<unk>", "<s>", "</s>", "<pad>", "<|x|>"].map(str::to_owned).to_vec();
    let mut kinds = vec![
        TokenKind::Unknown,
        TokenKind::Control,
        TokenKind::Control,
        TokenKind::Control,
        TokenKind::UserDefined,
    ];
    tokens.extend((0..256).map(|b| format!("<0x{b:02X}>")));
    kinds.extend([TokenKind::Byte; 256]);
    let words = ["▁text", "text", "▁", "▁▁", "te", "xt", "▁t", "t", "e", "x"];
    tokens.extend(words.map(str::to_owned));
    kinds.extend([TokenKind::Normal; 10]);
    let mut spec = VocabSpec::new(ModelKind::Spm, "default", tokens);
    spec.scores = vec![0.0; 261];
    spec.scores.extend((0..10).map(|i| -(i as f32)));
    spec.kinds = kinds;
    spec.bos = Some(1);
    spec.eos = Some(2);
    spec.unknown = Some(0);
    spec
}

fn build(spec: &VocabSpec) -> Tokenizer {
    Tokenizer::new(spec).expect("a sound vocabulary")
}

fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    ids.iter().map(|&id| tokenizer.piece(id)).collect::<Vec<_>>().join("|")
}

#[test]
fn merges_apply_in_order_of_rank() {
    let t = build(&bpe());
    assert_eq!(pieces(&t, &t.encode("the the", PLAIN)), "t|he|Ġthe");
    assert!(t.encode("", PLAIN).is_empty());
}

#[test]
fn bytes_that_are_no_text_come_back_exactly() {
    let t = build(&bpe());
    for bytes in [
        &b"\xe6\xad"[..],
        b"\xe2\x80",
        b"\xf0\x9f\x98",
        b"\xed\xa0\x80",
        b"\xc0\x80",
        b"\xff",
        b"a\0b",
        b" \xff the\xe2\x82 <|im_end",
    ] {
        let ids = t.encode_bytes(bytes, PLAIN);
        assert_eq!(t.decode_bytes(&ids, false), bytes);
    }
    assert_eq!(t.encode("a\0b", PLAIN), [97, 0, 98]);
    // SentencePiece has byte tokens for them.
    let t = build(&spm());
    for bytes in [&b"\xe6\xad"[..], b"\xff", b"te\xc0\x80xt", b"a\0b"] {
        let ids = t.encode_bytes(bytes, PLAIN);
        assert_eq!(t.decode_bytes(&ids, false), bytes);
    }
}

#[test]
fn decoding_replaces_maximal_subparts() {
    let t = Arc::new(build(&bpe()));
    for (bytes, expected) in [
        (&b"\xe6\xad"[..], "\u{fffd}"),
        (b"\xe2\x80A", "\u{fffd}A"),
        (b"\xf0\x9f\x98", "\u{fffd}"),
        (b"\xf0\x9f\x98\xf0\x9f\x98\x80", "\u{fffd}😀"),
        (b"\xed\xa0\x80", "\u{fffd}\u{fffd}\u{fffd}"),
        (b"\xc0\x80", "\u{fffd}\u{fffd}"),
        (b"\xff", "\u{fffd}"),
        (b"a\0b", "a\0b"),
        (b"\xe2\x82\xac\xe2\x82", "€\u{fffd}"),
    ] {
        let ids: Vec<u32> = bytes.iter().map(|&b| b.into()).collect();
        assert_eq!(t.decode(&ids, false), expected, "{bytes:x?}");
        let mut stream = StreamDecoder::new(Arc::clone(&t), false);
        let mut text = String::new();
        for id in ids {
            text.push_str(stream.push(id));
        }
        text.push_str(stream.finish());
        assert_eq!(text, expected, "{bytes:x?} streamed");
    }
}

#[test]
fn a_stream_holds_back_only_what_is_open() {
    let t = Arc::new(build(&bpe()));
    let mut stream = StreamDecoder::new(t, true);
    let mut push = |id| stream.push(id).to_owned();
    assert_eq!(push(0xf0), "");
    assert_eq!(push(0x9f), "");
    assert_eq!(push(0x98), "");
    assert_eq!(push(0x80), "😀");
    // A byte that breaks an open character shows at once what it was.
    assert_eq!(push(0xe2), "");
    assert_eq!(push(u32::from(b'A')), "\u{fffd}A");
    assert_eq!(push(0xff), "\u{fffd}");
    // Control tokens and ids past the end leave nothing.
    assert_eq!(push(260), "");
    assert_eq!(push(9999), "");
    assert_eq!(push(258), " the");
    assert_eq!(push(0xe2), "");
    assert_eq!(stream.finish(), "\u{fffd}");
    assert_eq!(stream.finish(), "");
}

#[test]
fn the_space_prefix() {
    let texts = ["text", " text", "<pad>text", "<|x|>text", "", " ", "🦙", "te  xt"];
    // Absent and false: the text comes back from every one of them.
    for flag in [None, Some(false)] {
        let t = build(&VocabSpec { add_space_prefix: flag, ..spm() });
        for text in texts {
            let ids = t.encode(text, SPECIAL);
            assert_eq!(t.decode(&ids, false), text, "{flag:?}: {}", pieces(&t, &ids));
        }
    }
    let absent = build(&spm());
    let show = |t: &Tokenizer, text: &str| pieces(t, &t.encode(text, SPECIAL));
    assert_eq!(show(&absent, "text"), "▁text");
    assert_eq!(show(&absent, " text"), "▁▁|text");
    assert_eq!(show(&absent, "<pad>text"), "<pad>|text");
    assert_eq!(show(&absent, "text<pad>text"), "▁text|<pad>|text");
    assert_eq!(show(&absent, "<|x|>text"), "▁|<|x|>|text");
    assert_eq!(show(&absent, ""), "");
    assert_eq!(show(&absent, " "), "▁▁");
    assert_eq!(show(&absent, "🦙"), "▁|<0xF0>|<0x9F>|<0xA6>|<0x99>");
    let off = build(&VocabSpec { add_space_prefix: Some(false), ..spm() });
    assert_eq!(show(&off, "text"), "text");
    assert_eq!(show(&off, "🦙"), "<0xF0>|<0x9F>|<0xA6>|<0x99>");
    // Written out, the flag means what Hugging Face's conversion of such a vocabulary does: a space
    // before the text and after each control token.
    let on = build(&VocabSpec { add_space_prefix: Some(true), ..spm() });
    assert_eq!(show(&on, "text"), "▁text");
    assert_eq!(show(&on, "<pad>text"), "<pad>|▁text");
    assert_eq!(on.decode(&on.encode("text", SPECIAL), false), "text");
    // The space belongs to the text only where the text starts.
    let bos_text = absent.encode("text", EncodeOptions { special: true, bos: true });
    assert_eq!(pieces(&absent, &bos_text), "<s>|▁text");
    assert_eq!(absent.decode(&bos_text, true), "text");
    assert_eq!(absent.decode(&bos_text, false), "<s> text");
}

#[test]
fn a_continued_stream_keeps_its_first_space() {
    let t = Arc::new(build(&spm()));
    let id = t.token_id("▁text").expect("a token");
    assert_eq!(StreamDecoder::new(Arc::clone(&t), true).push(id), "text");
    assert_eq!(StreamDecoder::continuing(t, true).push(id), " text");
}

#[test]
fn without_byte_tokens_a_run_is_one_unknown() {
    let tokens = ["<unk>", "▁", "a"].map(str::to_owned).to_vec();
    let mut spec = VocabSpec::new(ModelKind::Spm, "", tokens);
    spec.scores = vec![0.0; 3];
    spec.kinds = vec![TokenKind::Unknown, TokenKind::Normal, TokenKind::Normal];
    let t = build(&spec);
    assert_eq!(t.encode("aéüa漢", PLAIN), [1, 2, 0, 2, 0]);
}

#[test]
fn control_tokens_are_parsed_only_on_request() {
    let t = build(&bpe());
    let text = "a<|im_end|><think>";
    assert_eq!(t.encode(text, SPECIAL), [97, 260, 261]);
    let plain = t.encode(text, PLAIN);
    assert!(plain.iter().all(|&id| id < 259), "{plain:?}");
    assert_eq!(t.decode(&plain, false), text);
}

#[test]
fn user_defined_text_is_found_even_in_plain_text() {
    let mut spec = bpe();
    spec.tokens.push("  ".to_owned());
    spec.kinds.push(TokenKind::UserDefined);
    let t = build(&spec);
    assert_eq!(t.encode("a   b", PLAIN), [97, 262, 32, 98]);
}

#[test]
fn bos_only_where_the_model_has_and_wants_it() {
    let with_bos = EncodeOptions { special: true, bos: true };
    for (kind, flag, id, expected) in [
        (ModelKind::Spm, None, Some(1), true),
        (ModelKind::Spm, Some(true), Some(1), true),
        (ModelKind::Spm, Some(false), Some(1), false),
        (ModelKind::Spm, None, None, false),
        (ModelKind::Spm, Some(true), None, false),
        (ModelKind::Bpe, None, Some(259), false),
        (ModelKind::Bpe, Some(true), Some(259), true),
        (ModelKind::Bpe, Some(true), None, false),
    ] {
        let spec = if kind == ModelKind::Spm { spm() } else { bpe() };
        let t = build(&VocabSpec { add_bos: flag, bos: id, ..spec });
        assert_eq!(t.adds_bos(), expected, "{kind:?} {flag:?} {id:?}");
        let ids = t.encode("x", with_bos);
        assert_eq!(ids.first() == id.as_ref() && id.is_some(), expected);
        assert!(t.encode("x", SPECIAL).first() != id.as_ref() || id.is_none());
    }
    let t = build(&VocabSpec { add_eos: Some(true), ..spm() });
    assert_eq!(t.encode("text", with_bos), [1, 261, 2]);
}

#[test]
fn what_ends_a_generation() {
    let t = build(&bpe());
    assert!(t.is_end_of_generation(260) && !t.is_end_of_generation(259));
    assert_eq!(t.ends_of_generation(), [260]);
    let t = build(&VocabSpec { eog: vec![4], ..spm() });
    assert_eq!(t.ends_of_generation(), [2, 4]);
}

#[test]
fn contradictions_are_errors() {
    let cases: Vec<(&str, VocabSpec, &str)> = vec![
        ("no tokens", VocabSpec::new(ModelKind::Bpe, "gpt-2", vec![]), "no tokens"),
        (
            "kinds",
            VocabSpec { kinds: vec![TokenKind::Normal; 3], ..bpe() },
            "3 token types for 262",
        ),
        ("scores", VocabSpec { scores: vec![0.0; 5], ..spm() }, "5 scores for 271"),
        ("bos", VocabSpec { bos: Some(262), ..bpe() }, "bos token is 262"),
        ("eos", VocabSpec { eos: Some(u32::MAX), ..bpe() }, "eos token is 4294967295"),
        ("unknown", VocabSpec { unknown: Some(271), ..spm() }, "unknown token is 271"),
        ("eog", VocabSpec { eog: vec![1000], ..spm() }, "end-of-generation token is 1000"),
        ("merge", VocabSpec { merges: vec!["ab".into()], ..bpe() }, "merge 0 is \"ab\""),
        ("merge result", VocabSpec { merges: vec!["a b".into()], ..bpe() }, "\"a b\""),
    ];
    for (name, spec, needle) in cases {
        let error = Tokenizer::new(&spec).expect_err(name);
        assert!(error.is_malformed(), "{name}: {error:?}");
        assert!(error.to_string().contains(needle), "{name}: {error}");
    }
    let mut spec = spm();
    spec.tokens[10] = "<0xZZ>".to_owned();
    assert!(Tokenizer::new(&spec).expect_err("a byte").to_string().contains("<0xZZ>"));
    let error = Tokenizer::new(&VocabSpec { pre: "nope".into(), ..bpe() }).expect_err("a rule");
    assert!(error.is_unsupported() && error.to_string().contains("\"nope\""), "{error}");
    assert_eq!(TokenKind::from_number(7), None);
}

#[test]
fn a_scan_and_a_heap_agree() {
    // Pieces over 48 bytes are merged with a heap, shorter ones by scanning; cut so that both see the
    // same text, the tokens have to be the same.
    let mut tokens = alphabet();
    let mut merges = Vec::new();
    for (l, r) in [("a", "b"), ("b", "a"), ("ab", "ab"), ("a", "a"), ("ba", "ab"), ("aa", "b")] {
        tokens.push(format!("{l}{r}"));
        merges.push(format!("{l} {r}"));
    }
    let mut spec = VocabSpec::new(ModelKind::Bpe, "gpt-2", tokens);
    spec.merges = merges;
    let t = build(&spec);
    let mut state = 1u32;
    for _ in 0..200 {
        let short: String = (0..24)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                if state >> 31 == 0 { 'a' } else { 'b' }
            })
            .collect();
        // No merge crosses an x.
        let alone = t.encode(&format!("{short}x"), PLAIN);
        let long = t.encode(&format!("{short}x").repeat(3), PLAIN);
        assert_eq!(long, alone.repeat(3), "{short}");
    }
}
