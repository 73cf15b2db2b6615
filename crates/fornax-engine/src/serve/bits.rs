//! A set of tokens, one bit each. It knows no grammar and no sampler.

use fornax_plan::TokenId;

/// A set of the tokens of a vocabulary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BitSet {
    /// Bit `t % 32` of word `t / 32`; bits past the vocabulary are zero.
    words: Vec<u32>,
    len: usize,
}

impl BitSet {
    /// The empty set over a vocabulary of `len` tokens.
    pub fn new(len: usize) -> BitSet {
        BitSet { words: vec![0; len.div_ceil(32)], len }
    }

    /// Tokens of the vocabulary, in the set or not.
    pub fn vocab(&self) -> usize {
        self.len
    }

    /// Tokens in the set.
    pub fn count(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// Whether no token is in the set.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|w| *w == 0)
    }

    /// Takes every token out.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Puts every token in.
    pub fn fill(&mut self) {
        self.words.fill(u32::MAX);
        self.trim();
    }

    /// Puts a token in; one past the vocabulary is ignored.
    pub fn insert(&mut self, token: TokenId) {
        self.set(token, true);
    }

    /// Takes a token out.
    pub fn remove(&mut self, token: TokenId) {
        self.set(token, false);
    }

    /// Puts a token in or takes it out; one past the vocabulary is ignored.
    pub fn set(&mut self, token: TokenId, within: bool) {
        let at = token as usize;
        if at < self.len {
            let bit = 1u32 << (at % 32);
            let word = &mut self.words[at / 32];
            *word = if within { *word | bit } else { *word & !bit };
        }
    }

    /// Whether a token is in the set.
    pub fn contains(&self, token: TokenId) -> bool {
        let at = token as usize;
        at < self.len && self.words[at / 32] >> (at % 32) & 1 == 1
    }

    /// The bits, 32 tokens a word, lowest bit first.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Replaces the set by other bits of the same form; words that are missing count as empty,
    /// bits past the vocabulary are dropped.
    pub fn copy_from_words(&mut self, words: &[u32]) {
        let n = words.len().min(self.words.len());
        self.words[..n].copy_from_slice(&words[..n]);
        self.words[n..].fill(0);
        self.trim();
    }

    fn trim(&mut self) {
        let rest = self.len % 32;
        if let (Some(last), true) = (self.words.last_mut(), rest > 0) {
            *last &= (1u32 << rest) - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::BitSet;

    #[test]
    fn bits_past_the_vocabulary_never_count() {
        for len in [0, 1, 31, 32, 33, 64, 100] {
            let mut set = BitSet::new(len);
            assert!(set.is_empty());
            set.fill();
            assert_eq!(set.count(), len);
            set.insert(len as u32);
            assert!(!set.contains(len as u32));
            set.copy_from_words(&[u32::MAX; 9]);
            assert_eq!(set.count(), len);
            set.copy_from_words(&[1]);
            assert_eq!(set.count(), len.min(1));
            set.remove(0);
            assert!(set.is_empty());
        }
    }
}
