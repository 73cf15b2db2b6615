//! Finds added tokens in text, leftmost and longest, before anything else is split. It must not know what
//! the tokens mean.

/// A set of texts to find.
#[derive(Debug)]
pub(crate) struct Added {
    /// Sorted by text.
    patterns: Vec<(Box<[u8]>, u32)>,
    /// The range of `patterns` that starts with each byte.
    by_first: Vec<(u32, u32)>,
}

/// A token found at `start..end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) id: u32,
}

impl Added {
    /// Of equal texts the lowest id is kept; empty texts are left out.
    pub(crate) fn new(items: impl Iterator<Item = (Vec<u8>, u32)>) -> Added {
        let mut patterns: Vec<(Box<[u8]>, u32)> = items
            .filter(|(text, _)| !text.is_empty())
            .map(|(text, id)| (text.into(), id))
            .collect();
        patterns.sort_unstable();
        patterns.dedup_by(|b, a| a.0 == b.0);
        let mut by_first = vec![(0, 0); 256];
        for (i, (text, _)) in patterns.iter().enumerate() {
            let range = &mut by_first[text[0] as usize];
            if range.1 == 0 {
                range.0 = i as u32;
            }
            range.1 = i as u32 + 1;
        }
        Added { patterns, by_first }
    }

    /// True if some pattern starts with `text` and goes on after it.
    pub(crate) fn starts_longer(&self, text: &[u8]) -> bool {
        let first = self.patterns.partition_point(|(p, _)| &**p <= text);
        self.patterns.get(first).is_some_and(|(p, _)| p.starts_with(text))
    }

    /// The first token at or after `from` that does not reach across any of the sorted offsets `guards`.
    ///
    /// Each position costs at most the longest pattern, whatever the text.
    pub(crate) fn find(&self, text: &[u8], from: usize, guards: &[usize]) -> Option<Found> {
        if self.patterns.is_empty() {
            return None;
        }
        let mut guard = guards.partition_point(|&g| g <= from);
        for start in from..text.len() {
            let (lo, hi) = self.by_first[text[start] as usize];
            if lo == hi {
                continue;
            }
            while guard < guards.len() && guards[guard] <= start {
                guard += 1;
            }
            let limit = guards.get(guard).copied().unwrap_or(text.len()).min(text.len());
            if let Some((len, id)) = self.longest(&text[start..limit], lo as usize, hi as usize) {
                return Some(Found { start, end: start + len, id });
            }
        }
        None
    }

    /// The longest pattern of `lo..hi` that `text` starts with; they share its first byte.
    fn longest(&self, text: &[u8], mut lo: usize, mut hi: usize) -> Option<(usize, u32)> {
        let mut best = None;
        for depth in 1.. {
            // Of the patterns that share `depth` bytes with the text, one of just that length sorts first.
            if self.patterns[lo].0.len() == depth {
                best = Some((depth, self.patterns[lo].1));
                lo += 1;
            }
            let Some(&byte) = text.get(depth) else { break };
            let range = &self.patterns[lo..hi];
            let first = range.partition_point(|(p, _)| p[depth] < byte);
            let count = range[first..].partition_point(|(p, _)| p[depth] == byte);
            if count == 0 {
                break;
            }
            (lo, hi) = (lo + first, lo + first + count);
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added(texts: &[&str]) -> Added {
        Added::new(texts.iter().enumerate().map(|(i, t)| (t.as_bytes().to_vec(), i as u32)))
    }

    fn all(set: &Added, text: &str, guards: &[usize]) -> Vec<(usize, usize, u32)> {
        let mut at = 0;
        let mut out = Vec::new();
        while let Some(f) = set.find(text.as_bytes(), at, guards) {
            out.push((f.start, f.end, f.id));
            at = f.end;
        }
        out
    }

    #[test]
    fn leftmost_then_longest() {
        let set = added(&["<a>", "<a>b", "a>bc", "<", "zz"]);
        assert_eq!(all(&set, "x<a>bc<a<a>", &[]), [(1, 5, 1), (6, 7, 3), (8, 11, 0)]);
        assert_eq!(all(&set, "zzz", &[]), [(0, 2, 4)]);
        assert_eq!(all(&added(&[]), "zzz", &[]), []);
    }

    #[test]
    fn nothing_reaches_across_a_guard() {
        let set = added(&["<a>", "<a>b"]);
        assert_eq!(all(&set, "<a>b<a>", &[3]), [(0, 3, 0), (4, 7, 0)]);
        assert_eq!(all(&set, "<a>b<a>", &[1, 5]), []);
        assert_eq!(all(&set, "<a>b<a>", &[0, 4, 7]), [(0, 4, 1), (4, 7, 0)]);
    }
}
