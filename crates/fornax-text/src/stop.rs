//! Stop strings in a growing text, wherever the pieces it comes in are cut. It must not know tokens.

/// What [`StopMatcher::push`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopOutput<'a> {
    /// Text that belongs to no stop string and can be shown.
    pub text: &'a str,
    /// A stop string has come; it and what follows it are not part of any text.
    pub stopped: bool,
}

/// Watches a text for stop strings.
///
/// The string that is complete first wins, of several complete at one place the longest; so that the
/// outcome does not depend on how the text was cut. Text that may be the beginning of a stop string is
/// held back until that is decided.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<Pattern>,
    held: String,
    ready: String,
    matched: Option<usize>,
}

/// One stop string and how much of it the text ends with (Knuth, Morris and Pratt 1977).
#[derive(Clone, Debug)]
struct Pattern {
    index: usize,
    text: Box<[u8]>,
    /// For each length, the longest proper prefix that is also a suffix.
    fallback: Box<[usize]>,
    state: usize,
}

impl Pattern {
    fn new(index: usize, text: &str) -> Pattern {
        let text: Box<[u8]> = text.as_bytes().into();
        let mut fallback = vec![0; text.len() + 1].into_boxed_slice();
        let mut len = 0;
        for i in 1..text.len() {
            while len > 0 && text[i] != text[len] {
                len = fallback[len];
            }
            if text[i] == text[len] {
                len += 1;
            }
            fallback[i + 1] = len;
        }
        Pattern { index, text, fallback, state: 0 }
    }

    /// Takes a byte; true if the whole string has come.
    fn step(&mut self, byte: u8) -> bool {
        while self.state > 0 && self.text[self.state] != byte {
            self.state = self.fallback[self.state];
        }
        if self.text[self.state] == byte {
            self.state += 1;
        }
        self.state == self.text.len()
    }
}

impl StopMatcher {
    /// Watches for `stops`. Empty strings are left out.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> StopMatcher {
        let texts = stops.iter().map(AsRef::as_ref).enumerate();
        StopMatcher {
            stops: texts.filter(|(_, t)| !t.is_empty()).map(|(i, t)| Pattern::new(i, t)).collect(),
            held: String::new(),
            ready: String::new(),
            matched: None,
        }
    }

    /// Takes the next text. After a stop string has come, everything is swallowed.
    pub fn push(&mut self, text: &str) -> StopOutput<'_> {
        self.ready.clear();
        if self.matched.is_some() {
            return StopOutput { text: "", stopped: true };
        }
        self.held.push_str(text);
        let before = self.held.len() - text.len();
        for (i, byte) in text.bytes().enumerate() {
            let mut complete: Option<(usize, usize)> = None;
            for stop in &mut self.stops {
                if stop.step(byte) && complete.is_none_or(|(len, _)| len < stop.text.len()) {
                    complete = Some((stop.text.len(), stop.index));
                }
            }
            if let Some((len, index)) = complete {
                self.matched = Some(index);
                self.held.truncate(before + i + 1 - len);
                std::mem::swap(&mut self.held, &mut self.ready);
                return StopOutput { text: &self.ready, stopped: true };
            }
        }
        let open = self.stops.iter().map(|s| s.state).max().unwrap_or(0);
        let safe = self.held.len() - open;
        self.ready.push_str(&self.held[..safe]);
        self.held.drain(..safe);
        StopOutput { text: &self.ready, stopped: false }
    }

    /// Ends the text and gives what was held back; nothing after a stop string has come.
    pub fn finish(&mut self) -> &str {
        self.ready.clear();
        std::mem::swap(&mut self.held, &mut self.ready);
        for stop in &mut self.stops {
            stop.state = 0;
        }
        &self.ready
    }

    /// Which of the stop strings has come, by its place in the list.
    pub fn matched(&self) -> Option<usize> {
        self.matched
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is shown of `text`, cut into the characters' bytes groups of `step` characters.
    fn shown(stops: &[&str], text: &str, step: usize) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops);
        let chars: Vec<char> = text.chars().collect();
        let mut out = String::new();
        for chunk in chars.chunks(step) {
            out.push_str(matcher.push(&chunk.iter().collect::<String>()).text);
        }
        out.push_str(matcher.finish());
        (out, matcher.matched())
    }

    #[test]
    fn the_cuts_do_not_matter() {
        let cases: &[(&[&str], &str, &str, Option<usize>)] = &[
            (&["\nUser:"], "hi\nUser: x", "hi", Some(0)),
            (&["\nUser:"], "hi\nUse", "hi\nUse", None),
            (&["aab"], "aaaab!", "aa", Some(0)),
            (&["abcd", "c"], "abcd", "ab", Some(1)),
            (&["bc", "abc"], "xabc", "x", Some(1)),
            (&["", "é漢"], "aé漢b", "a", Some(1)),
            (&[], "plain", "plain", None),
            (&["plain"], "plain", "", Some(0)),
            (&["END", "\n\n"], "a\n", "a\n", None),
        ];
        for &(stops, text, expected, matched) in cases {
            for step in 1..=text.chars().count() {
                assert_eq!(
                    shown(stops, text, step),
                    (expected.to_owned(), matched),
                    "{stops:?} in {text:?} by {step}"
                );
            }
        }
    }

    #[test]
    fn a_stop_string_may_span_many_pieces() {
        let pieces = ["al", "pha be", "ta ga", "mma"];
        for (stops, expected) in [
            (&["beta gamma"][..], "alpha "),
            (&["ta g", "zzz"], "alpha be"),
            (&["beta gamma delta"], "alpha beta gamma"),
            (&[""], "alpha beta gamma"),
            (&[], "alpha beta gamma"),
            (&["x", "y", "z", "q", "pha"], "al"),
        ] {
            let mut matcher = StopMatcher::new(stops);
            let mut text: String = pieces.iter().map(|p| matcher.push(p).text.to_owned()).collect();
            text.push_str(matcher.finish());
            assert_eq!(text, expected, "{stops:?}");
        }
    }

    #[test]
    fn nothing_is_held_longer_than_needed() {
        let mut matcher = StopMatcher::new(&["<end>"]);
        assert_eq!(matcher.push("a<en"), StopOutput { text: "a", stopped: false });
        assert_eq!(matcher.push("x<"), StopOutput { text: "<enx", stopped: false });
        assert_eq!(matcher.push("end>tail"), StopOutput { text: "", stopped: true });
        assert_eq!(matcher.push("more"), StopOutput { text: "", stopped: true });
        assert_eq!(matcher.finish(), "");
    }
}
