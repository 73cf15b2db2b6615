//! SentencePiece with byte fallback: characters are merged by the score of what they become. It must not
//! know control tokens or templates.
//!
//! Source: Sennrich et al. 2016 as SentencePiece applies it: of all neighbours whose joined text is a
//! piece, those with the greatest score are joined first, and what is no piece in the end becomes bytes.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use crate::vocab::{Vocab, VocabSpec};
use crate::{Error, TokenKind};

const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Spm {
    scores: Vec<f32>,
    byte_tokens: Box<[u32; 256]>,
    unknown: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Symbol {
    start: u32,
    /// Bytes; 0 once merged into the symbol before.
    len: u32,
    /// `NONE` for a character that is no piece.
    token: u32,
    prev: u32,
    next: u32,
}

/// Two neighbours that could become `token`: the greatest score first, then the leftmost.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    score: f32,
    left: u32,
    right: u32,
    /// Bytes of both, to tell whether the pair is still what it was.
    len: u32,
    token: u32,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Candidate) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Candidate) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Candidate) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Candidate {}

/// Buffers for one call of `encode`.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Candidate>,
}

impl Spm {
    /// # Errors
    /// `is_malformed` unless there is one score for each token.
    pub(crate) fn new(spec: &VocabSpec, vocab: &Vocab) -> Result<Spm, Error> {
        if spec.scores.len() != vocab.len() {
            return Err(Error::malformed(format!(
                "reading the vocabulary: {} scores for {} tokens, expected one each",
                spec.scores.len(),
                vocab.len()
            )));
        }
        let mut byte_tokens = Box::new([NONE; 256]);
        for id in (0..vocab.len() as u32).rev() {
            if vocab.kind(id) == Some(TokenKind::Byte)
                && let [byte] = vocab.bytes(id)
            {
                byte_tokens[*byte as usize] = id;
            }
        }
        let unknown = spec.unknown.or_else(|| {
            (0..vocab.len() as u32).find(|&id| vocab.kind(id) == Some(TokenKind::Unknown))
        });
        Ok(Spm { scores: spec.scores.clone(), byte_tokens, unknown })
    }

    /// Appends the tokens of `text`: plain spaces (the vocabulary's U+2581 is one), no added tokens.
    pub(crate) fn encode(&self, vocab: &Vocab, text: &[u8], s: &mut Scratch, out: &mut Vec<u32>) {
        // Offsets are 32 bits wide; a cut every gigabyte costs at most one merge.
        for chunk in text.chunks(1 << 30) {
            self.encode_chunk(vocab, chunk, s, out);
        }
    }

    fn encode_chunk(&self, vocab: &Vocab, text: &[u8], s: &mut Scratch, out: &mut Vec<u32>) {
        s.symbols.clear();
        s.queue.clear();
        let mut at = 0;
        for chunk in text.utf8_chunks() {
            for c in chunk.valid().chars() {
                let bytes = &text[at..at + c.len_utf8()];
                push(&mut s.symbols, at, bytes.len(), vocab.id_of_bytes(bytes));
                at += bytes.len();
            }
            for _ in chunk.invalid() {
                push(&mut s.symbols, at, 1, None);
                at += 1;
            }
        }
        for right in 1..s.symbols.len() as u32 {
            self.offer(vocab, text, s, right - 1, right);
        }
        while let Some(best) = s.queue.pop() {
            self.apply(vocab, text, s, best);
        }
        let mut at = if s.symbols.is_empty() { NONE } else { 0 };
        while at != NONE {
            let symbol = s.symbols[at as usize];
            let start = symbol.start as usize;
            self.emit(symbol.token, &text[start..start + symbol.len as usize], out);
            at = symbol.next;
        }
    }

    fn apply(&self, vocab: &Vocab, text: &[u8], s: &mut Scratch, best: Candidate) {
        let (left, right) = (s.symbols[best.left as usize], s.symbols[best.right as usize]);
        // Entries outlive their pair: either half may have been merged with its other neighbour.
        if left.len == 0 || right.len == 0 || left.len + right.len != best.len {
            return;
        }
        s.symbols[best.left as usize] =
            Symbol { len: best.len, token: best.token, next: right.next, ..left };
        s.symbols[best.right as usize].len = 0;
        if right.next != NONE {
            s.symbols[right.next as usize].prev = best.left;
            self.offer(vocab, text, s, best.left, right.next);
        }
        if left.prev != NONE {
            self.offer(vocab, text, s, left.prev, best.left);
        }
    }

    fn offer(&self, vocab: &Vocab, text: &[u8], s: &mut Scratch, left: u32, right: u32) {
        let (l, r) = (s.symbols[left as usize], s.symbols[right as usize]);
        let len = l.len + r.len;
        let start = l.start as usize;
        if let Some(token) = vocab.id_of_bytes(&text[start..start + len as usize]) {
            let score = self.scores[token as usize];
            s.queue.push(Candidate { score, left, right, len, token });
        }
    }

    fn emit(&self, token: u32, bytes: &[u8], out: &mut Vec<u32>) {
        if token != NONE {
            out.push(token);
            return;
        }
        let fallback = |b: &u8| self.byte_tokens[*b as usize];
        if bytes.iter().map(fallback).all(|id| id != NONE) {
            out.extend(bytes.iter().map(fallback));
        } else if let Some(unknown) = self.unknown
            && out.last() != Some(&unknown)
        {
            // A run of the inexpressible is one unknown.
            out.push(unknown);
        }
    }
}

fn push(symbols: &mut Vec<Symbol>, start: usize, len: usize, token: Option<u32>) {
    let i = symbols.len() as u32;
    if let Some(last) = symbols.last_mut() {
        last.next = i;
    }
    symbols.push(Symbol {
        start: start as u32,
        len: len as u32,
        token: token.unwrap_or(NONE),
        prev: i.wrapping_sub(1),
        next: NONE,
    });
}
