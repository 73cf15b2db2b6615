//! Byte-level byte-pair encoding: pieces of text become tokens by merging neighbours, best rank first.
//! It must not know added tokens or templates.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use unicode_normalization::{UnicodeNormalization, is_nfc};

use crate::pretok::{self, Pretokenizer};
use crate::vocab::{Vocab, VocabSpec};
use crate::{Error, TokenKind};

/// Pieces up to this many bytes are merged by scanning, longer ones with a heap.
const SCAN_MAX: usize = 48;
const NONE: u32 = u32::MAX;

/// Spreads the 64 bits of a pair by one multiplication; the keys come from the model alone.
#[derive(Default)]
pub(crate) struct PairHasher(u64);

impl Hasher for PairHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u64(u64::from(b));
        }
    }

    fn write_u64(&mut self, v: u64) {
        let h = (self.0 ^ v).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = h ^ (h >> 29);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// What a pair becomes.
#[derive(Clone, Copy, Debug)]
struct Merge {
    rank: u32,
    token: u32,
}

#[derive(Debug)]
pub(crate) struct Bpe {
    pre: Pretokenizer,
    merges: HashMap<u64, Merge, BuildHasherDefault<PairHasher>>,
    /// The token of each single byte, or `NONE`.
    byte_tokens: Box<[u32; 256]>,
    /// What stands for a byte without a token, if anything does.
    unknown: Option<u32>,
}

/// Buffers for one call of `encode`.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    chars: Vec<pretok::Ch>,
    pieces: Vec<u32>,
    spare: Vec<u32>,
    symbols: Vec<Symbol>,
    /// Rank and place of each pair that could merge, in one word: the best rank first, then the leftmost.
    queue: BinaryHeap<Reverse<u64>>,
}

#[derive(Clone, Copy, Debug)]
struct Symbol {
    token: u32,
    prev: u32,
    next: u32,
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl Bpe {
    /// # Errors
    /// `is_malformed` for merges that are no pairs or whose result is not in the vocabulary, and the
    /// errors of [`Pretokenizer::named`].
    pub(crate) fn new(spec: &VocabSpec, vocab: &Vocab) -> Result<Bpe, Error> {
        let pre = Pretokenizer::named(&spec.pre)?;
        let mut merges = HashMap::with_capacity_and_hasher(spec.merges.len(), Default::default());
        let mut joined = Vec::new();
        for (rank, text) in spec.merges.iter().enumerate() {
            // A part is never empty, so that the space between them is not the first character.
            let cut = text.char_indices().skip(1).find(|&(_, c)| c == ' ').map(|(i, _)| i);
            let Some((left, right)) = cut.map(|i| (&text[..i], &text[i + 1..])) else {
                return Err(Error::malformed(format!(
                    "reading the vocabulary: merge {rank} is {text:?}, expected two parts with a space between"
                )));
            };
            let (Some(l), Some(r)) = (vocab.id_of_text(left), vocab.id_of_text(right)) else {
                // A pair with a part that is no token never occurs.
                continue;
            };
            joined.clear();
            joined.extend_from_slice(left.as_bytes());
            joined.extend_from_slice(right.as_bytes());
            let whole = std::str::from_utf8(&joined).ok().and_then(|t| vocab.id_of_text(t));
            let Some(token) = whole else {
                return Err(Error::malformed(format!(
                    "reading the vocabulary: merge {rank} ({text:?}) gives a token that is not in it"
                )));
            };
            merges.entry(key(l, r)).or_insert(Merge { rank: rank as u32, token });
        }
        let mut byte_tokens = Box::new([NONE; 256]);
        for byte in 0..=255u8 {
            byte_tokens[byte as usize] = vocab.id_of_bytes(&[byte]).unwrap_or(NONE);
        }
        let unknown =
            spec.unknown.filter(|&id| vocab.kind(id).is_some_and(|k| k != TokenKind::Unused));
        Ok(Bpe { pre, merges, byte_tokens, unknown })
    }

    pub(crate) fn adds_bos(&self) -> bool {
        self.pre.add_bos
    }

    /// Appends the tokens of `text`, which holds no added tokens.
    pub(crate) fn encode(&self, vocab: &Vocab, text: &[u8], s: &mut Scratch, out: &mut Vec<u32>) {
        if !self.pre.nfc || text.is_ascii() {
            return self.encode_normalised(vocab, text, s, out);
        }
        let mut normalised = Vec::with_capacity(text.len());
        for chunk in text.utf8_chunks() {
            if is_nfc(chunk.valid()) {
                normalised.extend_from_slice(chunk.valid().as_bytes());
            } else {
                let nfc: String = chunk.valid().nfc().collect();
                normalised.extend_from_slice(nfc.as_bytes());
            }
            normalised.extend_from_slice(chunk.invalid());
        }
        self.encode_normalised(vocab, &normalised, s, out);
    }

    fn encode_normalised(&self, vocab: &Vocab, text: &[u8], s: &mut Scratch, out: &mut Vec<u32>) {
        let mut chars = std::mem::take(&mut s.chars);
        let mut pieces = std::mem::take(&mut s.pieces);
        pretok::classify(text, &mut chars);
        self.pre.split(&chars, &mut pieces, &mut s.spare);
        let (mut char_at, mut byte_at) = (0, 0);
        for &count in &pieces {
            let piece_chars = &chars[char_at..char_at + count as usize];
            let bytes = pretok::byte_len(piece_chars);
            self.merge_piece(vocab, &text[byte_at..byte_at + bytes], s, out);
            char_at += count as usize;
            byte_at += bytes;
        }
        s.chars = chars;
        s.pieces = pieces;
    }

    fn merge_piece(&self, vocab: &Vocab, piece: &[u8], s: &mut Scratch, out: &mut Vec<u32>) {
        if self.pre.ignore_merges
            && let Some(id) = vocab.id_of_bytes(piece)
        {
            out.push(id);
            return;
        }
        if piece.len() <= SCAN_MAX {
            self.merge_by_scan(piece, out);
        } else {
            self.merge_by_heap(piece, s, out);
        }
    }

    fn byte_token(&self, byte: u8) -> Option<u32> {
        match self.byte_tokens[byte as usize] {
            NONE => self.unknown,
            id => Some(id),
        }
    }

    fn merge(&self, left: u32, right: u32) -> Option<Merge> {
        self.merges.get(&key(left, right)).copied()
    }

    /// Merges in `out` itself: finds the best pair, joins it, looks again.
    fn merge_by_scan(&self, piece: &[u8], out: &mut Vec<u32>) {
        let start = out.len();
        out.extend(piece.iter().filter_map(|&b| self.byte_token(b)));
        let mut ranks = [None::<Merge>; SCAN_MAX];
        let mut count = out.len() - start;
        for i in 1..count {
            ranks[i - 1] = self.merge(out[start + i - 1], out[start + i]);
        }
        while count > 1 {
            let best = (0..count - 1)
                .filter_map(|i| ranks[i].map(|m| (m.rank, i, m.token)))
                .min_by_key(|&(rank, i, _)| (rank, i));
            let Some((_, i, token)) = best else { break };
            out[start + i] = token;
            out.remove(start + i + 1);
            count -= 1;
            ranks.copy_within(i + 1..count, i);
            if i > 0 {
                ranks[i - 1] = self.merge(out[start + i - 1], token);
            }
            if i + 1 < count {
                ranks[i] = self.merge(token, out[start + i + 1]);
            }
        }
    }

    /// The same with a heap over a linked list: n log n.
    fn merge_by_heap(&self, piece: &[u8], s: &mut Scratch, out: &mut Vec<u32>) {
        s.symbols.clear();
        s.queue.clear();
        for token in piece.iter().filter_map(|&b| self.byte_token(b)) {
            let i = s.symbols.len() as u32;
            s.symbols.push(Symbol { token, prev: i.wrapping_sub(1), next: i + 1 });
        }
        if let Some(last) = s.symbols.last_mut() {
            last.next = NONE;
        }
        for i in 1..s.symbols.len() as u32 {
            self.offer(s, i - 1, i);
        }
        while let Some(Reverse(entry)) = s.queue.pop() {
            let (rank, at) = ((entry >> 32) as u32, entry as u32);
            let Symbol { token, prev, next } = s.symbols[at as usize];
            if next == NONE {
                continue;
            }
            // Entries outlive their pair; the rank says whether it is still the one that was meant.
            let merge = match self.merge(token, s.symbols[next as usize].token) {
                Some(merge) if merge.rank == rank => merge,
                _ => continue,
            };
            let after = s.symbols[next as usize].next;
            s.symbols[next as usize].token = NONE;
            s.symbols[at as usize] = Symbol { token: merge.token, prev, next: after };
            if after != NONE {
                s.symbols[after as usize].prev = at;
                self.offer(s, at, after);
            }
            if prev != NONE {
                self.offer(s, prev, at);
            }
        }
        let mut at = if s.symbols.is_empty() { NONE } else { 0 };
        while at != NONE {
            let symbol = s.symbols[at as usize];
            out.push(symbol.token);
            at = symbol.next;
        }
    }

    fn offer(&self, s: &mut Scratch, left: u32, right: u32) {
        let (l, r) = (s.symbols[left as usize].token, s.symbols[right as usize].token);
        if let Some(merge) = self.merge(l, r) {
            s.queue.push(Reverse(u64::from(merge.rank) << 32 | u64::from(left)));
        }
    }
}
