//! Thoughts told apart from the answer, by the tags around them. It knows tags, no protocol and no calls.

/// Tags that models put around thoughts.
const TAGS: &[(&str, &str)] = &[("<think>", "</think>"), ("[THINK]", "[/THINK]")];

/// The tags of a model, and whether its prompt opened them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Thinking {
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
    /// The answer begins inside of them.
    pub(crate) begun: bool,
}

impl Thinking {
    /// By a model's template and the end of the prompt that it made.
    pub(crate) fn of(template: &str, prompt: &str) -> Option<Thinking> {
        let (open, close) = *TAGS
            .iter()
            .find(|(open, close)| template.contains(open) || template.contains(close))?;
        Some(Thinking { open, close, begun: prompt.trim_end().ends_with(open) })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before anything but white space.
    Before,
    Inside,
    /// After the closing tag, before anything but white space.
    Behind,
    Over,
}

/// Splits an answer, piece by piece; any cut into pieces gives the same.
#[derive(Debug)]
pub(crate) struct ThoughtReader {
    tags: Thinking,
    state: State,
    /// What may become a tag, or white space that may turn out to be at an end.
    held: String,
    spoke: bool,
}

/// A piece of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Split {
    pub(crate) thought: String,
    pub(crate) answer: String,
}

impl ThoughtReader {
    pub(crate) fn new(tags: Thinking) -> ThoughtReader {
        let state = if tags.begun { State::Inside } else { State::Before };
        ThoughtReader { tags, state, held: String::new(), spoke: false }
    }

    /// Whether what comes next is a thought.
    pub(crate) fn is_reasoning(&self) -> bool {
        self.state == State::Inside
    }

    /// Takes more of the answer.
    pub(crate) fn push(&mut self, text: &str) -> Split {
        let mut out = Split::default();
        for c in text.chars() {
            self.take(c, &mut out);
        }
        out
    }

    /// Takes the end.
    pub(crate) fn finish(&mut self) -> Split {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Inside => Split { thought: held.trim_end().to_owned(), ..Split::default() },
            _ => Split { answer: held, ..Split::default() },
        }
    }

    fn take(&mut self, c: char, out: &mut Split) {
        match self.state {
            State::Over => out.answer.push(c),
            State::Behind if c.is_whitespace() => {}
            State::Behind => {
                self.state = State::Over;
                out.answer.push(c);
            }
            State::Before => {
                self.held.push(c);
                let rest = self.held.trim_start();
                if rest == self.tags.open {
                    self.held.clear();
                    self.state = State::Inside;
                } else if !self.tags.open.starts_with(rest) {
                    self.state = State::Over;
                    out.answer.push_str(&std::mem::take(&mut self.held));
                }
            }
            State::Inside => {
                self.held.push(c);
                self.settle(out);
            }
        }
    }

    /// Passes on what can be neither the closing tag nor the white space before it.
    fn settle(&mut self, out: &mut Split) {
        while !self.held.is_empty() {
            let spaces = self.held.len() - self.held.trim_start().len();
            let rest = &self.held[spaces..];
            let Some(first) = rest.chars().next() else {
                if !self.spoke {
                    self.held.clear();
                }
                return;
            };
            if rest == self.tags.close {
                self.held.clear();
                self.state = State::Behind;
                return;
            }
            if self.tags.close.starts_with(rest) {
                return;
            }
            let certain: String = self.held.drain(..spaces + first.len_utf8()).collect();
            out.thought.push_str(if self.spoke { &certain } else { certain.trim_start() });
            self.spoke = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(template: &str, prompt: &str, answer: &str, cuts: u64) -> Split {
        let tags = Thinking::of(template, prompt).expect("the template thinks");
        let mut reader = ThoughtReader::new(tags);
        let mut all = Split::default();
        let mut add = |part: Split| {
            all.thought += &part.thought;
            all.answer += &part.answer;
        };
        let mut piece = String::new();
        for (i, c) in answer.chars().enumerate() {
            piece.push(c);
            if cuts >> (i % 64) & 1 == 1 {
                add(reader.push(&std::mem::take(&mut piece)));
            }
        }
        add(reader.push(&piece));
        add(reader.finish());
        all
    }

    #[test]
    fn thoughts_are_split_alike_however_the_text_is_cut() {
        let qwen = "{{ '<think>' }}";
        for (prompt, answer, thought, text) in [
            ("", "<think>\nhm, ok\n</think>\n\nYes.\n", "hm, ok", "Yes.\n"),
            ("", "\n<think>a</think>b", "a", "b"),
            ("x<think>\n", "so < it </thin is\n\n</think>\nNo", "so < it </thin is", "No"),
            ("x<think>\n", "never closed \n", "never closed", ""),
            ("x<think>\n", "cut </thi", "cut </thi", ""),
            ("<think>\n\n</think>\n\n", "No thoughts", "", "No thoughts"),
            ("", "Say <think>x</think>", "", "Say <think>x</think>"),
            ("", "  <thin", "", "  <thin"),
            ("", "<think></think>", "", ""),
            ("", "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
            ("", "", "", ""),
            ("", "<think>漢\u{3000}字</think> 🙂", "漢\u{3000}字", "🙂"),
        ] {
            for cuts in
                [0, u64::MAX, 0x5555_5555_5555_5555, 0x9249_2492_4924_9249, 0x1084_2108_4210_8421]
            {
                let got = split(qwen, prompt, answer, cuts);
                assert_eq!(
                    (&*got.thought, &*got.answer),
                    (thought, text),
                    "{answer:?} cut by {cuts:x}"
                );
            }
        }
        let got = split("[THINK]", "", "[THINK]a[/THINK]b", 0);
        assert_eq!((&*got.thought, &*got.answer), ("a", "b"));
        assert_eq!(Thinking::of("no tags", "<think>"), None);
    }
}
