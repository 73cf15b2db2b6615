//! A source file taken apart into code and comments, line by line. Knows the outer grammar of Rust (and, near enough,
//! of the C family): comments, strings, characters. Knows no rules.

/// One line of a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Line {
    /// The code, with what is inside strings and characters left out.
    pub(crate) code: String,
    /// The text of its comments.
    pub(crate) comment: String,
}

/// What the scanner is inside of.
enum Inside {
    Code,
    LineComment,
    BlockComment { depth: usize },
    Str { escapes: bool, hashes: usize },
}

/// Takes `text` apart. Never fails: a file that does not parse is the compiler's to refuse.
pub(crate) fn lines(text: &str) -> Vec<Line> {
    let chars: Vec<char> = text.chars().collect();
    let mut lines = Vec::new();
    let mut line = Line::default();
    let mut inside = Inside::Code;
    let mut i = 0;
    while i < chars.len() {
        let rest = &chars[i..];
        if rest[0] == '\n' {
            if matches!(inside, Inside::LineComment) {
                inside = Inside::Code;
            }
            lines.push(std::mem::take(&mut line));
            i += 1;
            continue;
        }
        i += match &mut inside {
            Inside::Code => step_in_code(rest, chars[..i].last().copied(), &mut line, &mut inside),
            Inside::LineComment => {
                line.comment.push(rest[0]);
                1
            }
            Inside::BlockComment { depth } => {
                if starts_with(rest, "/*") {
                    *depth += 1;
                    2
                } else if starts_with(rest, "*/") {
                    *depth -= 1;
                    if *depth == 0 {
                        inside = Inside::Code;
                    }
                    2
                } else {
                    line.comment.push(rest[0]);
                    1
                }
            }
            Inside::Str { escapes: true, .. } if rest[0] == '\\' && rest.get(1) != Some(&'\n') => 2,
            Inside::Str { hashes, .. } => {
                let closing = 1 + *hashes;
                if rest[0] == '"' && count(&rest[1..], '#') >= *hashes {
                    line.code.push('"');
                    inside = Inside::Code;
                    closing
                } else {
                    1
                }
            }
        };
    }
    if !line.code.is_empty() || !line.comment.is_empty() {
        lines.push(line);
    }
    lines
}

/// Takes one step from inside code; how many characters it took.
fn step_in_code(
    rest: &[char],
    before: Option<char>,
    line: &mut Line,
    inside: &mut Inside,
) -> usize {
    if starts_with(rest, "//") {
        *inside = Inside::LineComment;
        return 2;
    }
    if starts_with(rest, "/*") {
        *inside = Inside::BlockComment { depth: 1 };
        return 2;
    }
    let continues_a_word = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    if rest[0] == 'r' && (!continues_a_word || matches!(before, Some('b' | 'c'))) {
        let hashes = count(&rest[1..], '#');
        if rest.get(1 + hashes) == Some(&'"') {
            *inside = Inside::Str { escapes: false, hashes };
            line.code.push('"');
            return 2 + hashes;
        }
    }
    match rest[0] {
        '"' => {
            *inside = Inside::Str { escapes: true, hashes: 0 };
            line.code.push('"');
            1
        }
        // A lifetime has no second quote; a character has it after one, or after an escape.
        '\'' if rest.get(1) == Some(&'\\') => {
            let end = rest[2..].iter().skip(1).position(|&c| c == '\'');
            end.map_or(1, |at| at + 4)
        }
        '\'' if rest.get(2) == Some(&'\'') => 3,
        c => {
            line.code.push(c);
            1
        }
    }
}

fn starts_with(chars: &[char], word: &str) -> bool {
    word.chars().enumerate().all(|(i, c)| chars.get(i) == Some(&c))
}

fn count(chars: &[char], c: char) -> usize {
    chars.iter().take_while(|&&x| x == c).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &str) -> Vec<(String, String)> {
        lines(text).into_iter().map(|l| (l.code, l.comment)).collect()
    }

    fn pair(code: &str, comment: &str) -> (String, String) {
        (code.to_owned(), comment.to_owned())
    }

    #[test]
    fn comments_and_strings_are_told_apart() {
        assert_eq!(split("let a = \"// no\"; // yes"), [pair("let a = \"\"; ", " yes")]);
        assert_eq!(split("a /* x /* y */ z */ b"), [pair("a  b", " x  y  z ")]);
        assert_eq!(split("a /* x\ny */ b\n"), [pair("a ", " x"), pair(" b", "y ")]);
    }

    #[test]
    fn raw_strings_end_at_their_own_hashes() {
        assert_eq!(split("r#\"a \" // \"# + x"), [pair("\"\" + x", "")]);
        assert_eq!(split("br\"\\\" + x"), [pair("b\"\" + x", "")]);
        assert_eq!(split("for r in x"), [pair("for r in x", "")]);
    }

    #[test]
    fn characters_are_no_strings_and_lifetimes_no_characters() {
        assert_eq!(split("f('\"', '\\'', '\\u{22}') // c"), [pair("f(, , ) ", " c")]);
        assert_eq!(
            split("fn f<'a>(x: &'a str) -> &'static str"),
            [pair("fn f<'a>(x: &'a str) -> &'static str", "")]
        );
    }

    #[test]
    fn strings_go_over_lines_and_keep_their_count() {
        assert_eq!(
            split("a(\"x\\\n // y\\\"\", b)\nc"),
            [pair("a(\"", ""), pair("\", b)", ""), pair("c", "")]
        );
    }
}
