//! The splitting rules themselves: for text at a place, how many characters belong together. It must not
//! know which model uses which rule.
//!
//! Each rule is a hand-written reading of one regular expression, quoted above it. Every rule looks at
//! each character a bounded number of times, so that splitting is linear whatever the text.

use super::class::{CASELESS, Ch, L, LOWER, M, N, NEWLINE, P, S, SPACE, UPPER};

/// Length of the run at the start of `t` for which `f` holds.
pub(super) fn run(t: &[Ch], f: impl Fn(Ch) -> bool) -> usize {
    t.iter().position(|&c| !f(c)).unwrap_or(t.len())
}

fn first(t: &[Ch], f: impl Fn(Ch) -> bool) -> bool {
    t.first().is_some_and(|&c| f(c))
}

/// `(?:head)?body+`, where the head is one character for which `head` holds.
fn optional_head(t: &[Ch], head: impl Fn(Ch) -> bool, body: impl Fn(Ch) -> bool) -> usize {
    if first(t, head) {
        let n = run(&t[1..], &body);
        if n > 0 {
            return n + 1;
        }
    }
    run(t, body)
}

/// `\s+(?!\S)|\s+`
fn spaces(t: &[Ch]) -> usize {
    let n = run(t, |c| c.is(SPACE));
    // Not followed by text means: the run gives its last space to what follows.
    if n > 1 && n < t.len() { n - 1 } else { n }
}

/// `\s*[\r\n]+|\s+(?!\S)|\s+`
fn spaces_and_newlines(t: &[Ch]) -> usize {
    let n = run(t, |c| c.is(SPACE));
    match t[..n].iter().rposition(|c| c.is(NEWLINE)) {
        Some(last) => last + 1,
        None => spaces(t),
    }
}

/// `'s|'t|'re|'ve|'m|'ll|'d`, in either case where `fold`.
fn contraction(t: &[Ch], fold: bool) -> usize {
    if !first(t, |c| c.c == '\'') {
        return 0;
    }
    let letter = |i: usize| -> Option<char> {
        let c = t.get(i)?.c;
        // U+017F, the long s, folds to s as well.
        Some(if !fold {
            c
        } else if c == '\u{17f}' {
            's'
        } else {
            c.to_ascii_lowercase()
        })
    };
    match (letter(1), letter(2)) {
        (Some('s' | 't' | 'm' | 'd'), _) => 2,
        (Some('r' | 'v'), Some('e')) | (Some('l'), Some('l')) => 3,
        _ => 0,
    }
}

fn neither_space_letter_nor_number(c: Ch) -> bool {
    !c.is(SPACE | L | N)
}

/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
pub(super) fn gpt2(t: &[Ch]) -> usize {
    let space = |c: Ch| c.c == ' ';
    let steps = [
        contraction(t, false),
        optional_head(t, space, |c| c.is(L)),
        optional_head(t, space, |c| c.is(N)),
        optional_head(t, space, neither_space_letter_nor_number),
    ];
    steps.into_iter().find(|&n| n > 0).unwrap_or_else(|| spaces(t))
}

/// What words are made of, in the rules that descend from tiktoken's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// `[^\r\n\p{L}\p{N}]?\p{L}+`
    Letters,
    /// `[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+`
    LettersAndMarks,
    /// `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+`, else the same with
    /// `+` and `*` the other way round
    Cased,
}

/// Where contractions (`'s`, `'LL`) are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contractions {
    /// Nowhere.
    None,
    /// As pieces of their own.
    Apart,
    /// At the end of words.
    Suffix,
}

/// What a run of punctuation takes along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tail {
    /// Nothing.
    None,
    /// `[\r\n]*`
    Newlines,
    /// `[\r\n/]*`
    NewlinesAndSlashes,
}

/// The rules that descend from tiktoken's `cl100k` and `o200k`, by the points in which they differ.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiktoken {
    pub(super) contractions: Contractions,
    pub(super) word: Word,
    /// Longest run of digits in one piece.
    pub(super) digits: usize,
    pub(super) tail: Tail,
}

impl Tiktoken {
    /// `contractions|word|\p{N}{1,digits}| ?[^\s\p{L}\p{N}]+tail|\s*[\r\n]+|\s+(?!\S)|\s+`
    pub(super) fn next(self, t: &[Ch]) -> usize {
        if self.contractions == Contractions::Apart {
            let n = contraction(t, true);
            if n > 0 {
                return n;
            }
        }
        let word = self.word(t);
        if word > 0 {
            return word;
        }
        let digits = run(&t[..t.len().min(self.digits)], |c| c.is(N));
        if digits > 0 {
            return digits;
        }
        let punctuation = self.punctuation(t);
        if punctuation > 0 { punctuation } else { spaces_and_newlines(t) }
    }

    fn word(self, t: &[Ch]) -> usize {
        let head = |c: Ch| !c.is(NEWLINE | L | N);
        match self.word {
            Word::Letters => optional_head(t, head, |c| c.is(L)),
            Word::LettersAndMarks => optional_head(t, head, |c| c.is(L | M)),
            Word::Cased => {
                let n = cased_with_head(t, ends_lower);
                let n = if n > 0 { n } else { cased_with_head(t, starts_upper) };
                if n > 0 && self.contractions == Contractions::Suffix {
                    n + contraction(&t[n..], true)
                } else {
                    n
                }
            }
        }
    }

    fn punctuation(self, t: &[Ch]) -> usize {
        let marks = if self.word == Word::LettersAndMarks { M } else { 0 };
        let newlines = if self.tail == Tail::None { NEWLINE } else { 0 };
        let n = optional_head(t, |c| c.c == ' ', |c| !c.is(SPACE | L | N | marks | newlines));
        if n == 0 {
            return 0;
        }
        n + match self.tail {
            Tail::None => 0,
            Tail::Newlines => run(&t[n..], |c| c.is(NEWLINE)),
            Tail::NewlinesAndSlashes => run(&t[n..], |c| c.is(NEWLINE) || c.c == '/'),
        }
    }
}

/// `[^\r\n\p{L}\p{N}]?` before what `body` matches; marks may be either, so that both ways are tried.
fn cased_with_head(t: &[Ch], body: fn(&[Ch]) -> usize) -> usize {
    if first(t, |c| !c.is(NEWLINE | L | N)) {
        let n = body(&t[1..]);
        if n > 0 {
            return n + 1;
        }
    }
    body(t)
}

/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+`
fn ends_lower(t: &[Ch]) -> usize {
    let upper = run(t, |c| c.is(UPPER | CASELESS | M));
    let lower = run(&t[upper..], |c| c.is(LOWER | CASELESS | M));
    if lower > 0 {
        return upper + lower;
    }
    // The first run gives back up to its last character that may stand in the second.
    t[..upper].iter().rposition(|c| c.is(CASELESS | M)).map_or(0, |last| last + 1)
}

/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*`
fn starts_upper(t: &[Ch]) -> usize {
    let upper = run(t, |c| c.is(UPPER | CASELESS | M));
    if upper == 0 { 0 } else { upper + run(&t[upper..], |c| c.is(LOWER | CASELESS | M)) }
}

/// `[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
pub(super) fn deepseek_v3(t: &[Ch]) -> usize {
    if first(t, |c| c.c.is_ascii_punctuation()) {
        let n = run(&t[1..], |c| c.c.is_ascii_alphabetic());
        if n > 0 {
            return n + 1;
        }
    }
    let word = optional_head(t, |c| !c.is(NEWLINE | L | P | S), |c| c.is(L | M));
    if word > 0 {
        return word;
    }
    let n = optional_head(t, |c| c.c == ' ', |c| c.is(P | S));
    if n > 0 { n + run(&t[n..], |c| c.is(NEWLINE)) } else { spaces_and_newlines(t) }
}

/// `[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+`
pub(super) fn deepseek_v3_cjk(t: &[Ch]) -> usize {
    run(t, |c| matches!(c.c, '\u{4e00}'..='\u{9fa5}' | '\u{3040}'..='\u{30ff}'))
}

/// `[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+`
pub(super) fn deepseek_llm_cjk(t: &[Ch]) -> usize {
    run(t, |c| matches!(c.c, '\u{800}'..='\u{9fa5}' | '\u{ac00}'..='\u{d7ff}'))
}

/// `\s?[letters]+`, the letters being those with case as of an older Unicode; see [`DEEPSEEK_LETTERS`].
pub(super) fn deepseek_llm_words(t: &[Ch]) -> usize {
    optional_head(t, |c| c.is(SPACE), |c| is_deepseek_letter(c.c))
}

/// ``\s?[!-/:-~！-／：-～‘-‟　-。]+``
pub(super) fn deepseek_llm_punctuation(t: &[Ch]) -> usize {
    optional_head(
        t,
        |c| c.is(SPACE),
        |c| {
            matches!(c.c, '!'..='/' | ':'..='~' | '\u{ff01}'..='\u{ff0f}' | '\u{ff1a}'..='\u{ff5e}'
                | '\u{2018}'..='\u{201f}' | '\u{3000}'..='\u{3002}')
        },
    )
}

/// `\s?\p{L}+`
pub(super) fn space_letters(t: &[Ch]) -> usize {
    optional_head(t, |c| c.is(SPACE), |c| c.is(L))
}

/// `\s?\p{P}+`
pub(super) fn space_punctuation(t: &[Ch]) -> usize {
    optional_head(t, |c| c.is(SPACE), |c| c.is(P))
}

/// `[\r\n]`
pub(super) fn newline(t: &[Ch]) -> usize {
    usize::from(first(t, |c| c.is(NEWLINE)))
}

/// `[^\n]+|[\n]+`
pub(super) fn line_feeds_or_others(t: &[Ch]) -> usize {
    let feed = first(t, |c| c.c == '\n');
    run(t, |c| (c.c == '\n') == feed)
}

/// `\p{N}`
pub(super) fn digit(t: &[Ch]) -> usize {
    usize::from(first(t, |c| c.is(N)))
}

/// `\p{N}{1,3}`
pub(super) fn three_digits(t: &[Ch]) -> usize {
    run(&t[..t.len().min(3)], |c| c.is(N))
}

/// `\p{N}+`
pub(super) fn digits(t: &[Ch]) -> usize {
    run(t, |c| c.is(N))
}

/// `[0-9][0-9][0-9]`
pub(super) fn exactly_three_ascii_digits(t: &[Ch]) -> usize {
    let n = run(&t[..t.len().min(3)], |c| c.c.is_ascii_digit());
    if n == 3 { 3 } else { 0 }
}

/// `[\p{P}\$\+<=>\^~\|]+`
pub(super) fn punctuation_and_signs(t: &[Ch]) -> usize {
    run(t, |c| c.is(P) || matches!(c.c, '$' | '+' | '<' | '=' | '>' | '^' | '~' | '|'))
}

/// The same, and the backtick.
pub(super) fn punctuation_signs_and_backtick(t: &[Ch]) -> usize {
    run(t, |c| c.is(P) || matches!(c.c, '$' | '+' | '<' | '=' | '>' | '^' | '~' | '|' | '`'))
}

/// ` ?[^(\s|.,!?…。，、।۔،)]+`
pub(super) fn bloom(t: &[Ch]) -> usize {
    let other = |c: Ch| {
        let stop = matches!(
            c.c,
            '(' | '|' | '.' | ',' | '!' | '?' | '…' | '。' | '，' | '、' | '।' | '۔' | '،' | ')'
        );
        !c.is(SPACE) && !stop
    };
    optional_head(t, |c| c.c == ' ', other)
}

fn is_deepseek_letter(c: char) -> bool {
    let c = c as u32;
    let i = DEEPSEEK_LETTERS.partition_point(|&(_, last)| last < c);
    DEEPSEEK_LETTERS.get(i).is_some_and(|&(first, _)| first <= c)
}

/// First and last of the ranges of letters that deepseek-llm's rule lists, sorted.
#[rustfmt::skip]
const DEEPSEEK_LETTERS: &[(u32, u32)] = &[
    (0x41, 0x5a), (0x61, 0x7a), (0xb5, 0xb5), (0xc0, 0xd6), (0xd8, 0xf6), (0xf8, 0x1ba),
    (0x1bc, 0x1bf), (0x1c4, 0x293), (0x295, 0x2af), (0x370, 0x373), (0x376, 0x376),
    (0x377, 0x377), (0x37b, 0x37d), (0x37f, 0x37f), (0x386, 0x386), (0x388, 0x38a),
    (0x38c, 0x38c), (0x38e, 0x3a1), (0x3a3, 0x3f5), (0x3f7, 0x481), (0x48a, 0x52f),
    (0x531, 0x556), (0x10a0, 0x10c5), (0x13a0, 0x13f5), (0x13f8, 0x13fd), (0x1c90, 0x1cba),
    (0x1cbd, 0x1cbf), (0x1d00, 0x1d2b), (0x1d6b, 0x1d77), (0x1d79, 0x1d9a), (0x1e00, 0x1f15),
    (0x1f18, 0x1f1d), (0x1f20, 0x1f45), (0x1f48, 0x1f4d), (0x1f50, 0x1f57), (0x1f59, 0x1f59),
    (0x1f5b, 0x1f5b), (0x1f5d, 0x1f5d), (0x1f5f, 0x1f7d), (0x1f80, 0x1fb4), (0x1fb6, 0x1fbc),
    (0x1fbe, 0x1fbe), (0x1fc2, 0x1fc4), (0x1fc6, 0x1fcc), (0x1fd0, 0x1fd3), (0x1fd6, 0x1fdb),
    (0x1fe0, 0x1fec), (0x1ff2, 0x1ff4), (0x1ff6, 0x1ffc), (0x2102, 0x2102), (0x2107, 0x2107),
    (0x210a, 0x2113), (0x2115, 0x2115), (0x2119, 0x211d), (0x2124, 0x2124), (0x2126, 0x2126),
    (0x2128, 0x2128), (0x212a, 0x212d), (0x212f, 0x2134), (0x2139, 0x2139), (0x213c, 0x213f),
    (0x2145, 0x2149), (0x214e, 0x214e), (0x2183, 0x2183), (0x2184, 0x2184), (0x2c00, 0x2c7b),
    (0x2c7e, 0x2ce4), (0x2ceb, 0x2cee), (0x2cf2, 0x2cf2), (0x2cf3, 0x2cf3), (0xa640, 0xa66d),
    (0xa680, 0xa69b), (0xa722, 0xa76f), (0xa771, 0xa787), (0xa78b, 0xa78e), (0xab70, 0xabbf),
    (0xfb00, 0xfb06), (0xfb13, 0xfb17), (0xff21, 0xff3a), (0xff41, 0xff5a), (0x10400, 0x1044f),
    (0x104b0, 0x104d3), (0x104d8, 0x104fb), (0x10c80, 0x10cb2), (0x10cc0, 0x10cf2),
    (0x118a0, 0x118df), (0x1e900, 0x1e943),
];
