//! Cuts preprocessed kernel source into tokens that add up to the text again. It knows no grammar.

use crate::Error;

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// White space, a comment or a whole directive line.
    Blank,
    /// An identifier or keyword.
    Word,
    /// A number.
    Number,
    /// A string or character.
    Text,
    /// One character of punctuation.
    Mark,
}

/// A token and the line it begins on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token<'a> {
    pub(crate) kind: Kind,
    pub(crate) text: &'a str,
    /// Index in [`Tokens::files`].
    pub(crate) file: usize,
    pub(crate) line: u32,
}

impl Token<'_> {
    pub(crate) fn is(&self, text: &str) -> bool {
        self.kind != Kind::Blank && self.text == text
    }
}

/// The tokens of a source and the names of the files that its line markers mention.
#[derive(Debug)]
pub(crate) struct Tokens<'a> {
    pub(crate) list: Vec<Token<'a>>,
    pub(crate) files: Vec<String>,
}

/// Cuts `text`.
///
/// # Errors
/// A string or comment without an end.
pub(crate) fn tokens(text: &str) -> Result<Tokens<'_>, Error> {
    let mut out = Tokens { list: Vec::new(), files: vec![String::new()] };
    let (mut at, mut file, mut line) = (0, 0, 1);
    let bytes = text.as_bytes();
    while at < bytes.len() {
        let line_start = at == 0 || bytes[at - 1] == b'\n';
        let rest = &text[at..];
        let (kind, len) = one(rest, line_start).ok_or_else(|| {
            Error::compile(format!(
                "{}:{line}: a string or comment that starts here has no end",
                out.files[file]
            ))
        })?;
        let piece = &rest[..len];
        out.list.push(Token { kind, text: piece, file, line });
        at += len;
        if let Some((name, number)) = marker(piece).filter(|_| line_start) {
            file = out.files.iter().position(|f| f == name).unwrap_or_else(|| {
                out.files.push(name.to_owned());
                out.files.len() - 1
            });
            // The marker speaks of the line after its own.
            line = number.saturating_sub(1);
        }
        line += piece.bytes().filter(|&b| b == b'\n').count() as u32;
    }
    Ok(out)
}

/// The name and number of a line marker: `# 12 "name" ...` or `#line 12 "name"`.
fn marker(piece: &str) -> Option<(&str, u32)> {
    let rest = piece.strip_prefix('#')?.trim_start();
    let rest = rest.strip_prefix("line").unwrap_or(rest).trim_start();
    let (number, rest) = rest.split_once(' ')?;
    let name = rest.trim_start().strip_prefix('"')?;
    Some((name.split('"').next()?, number.parse().ok()?))
}

fn one(rest: &str, line_start: bool) -> Option<(Kind, usize)> {
    let b = rest.as_bytes();
    let first = b[0];
    let run = |ok: fn(u8) -> bool| b.iter().position(|&c| !ok(c)).unwrap_or(b.len());
    if line_start && first == b'#' {
        return Some((Kind::Blank, rest.find('\n').map_or(b.len(), |n| n + 1)));
    }
    // A blank ends with its line, so that a directive after it is seen to start one.
    if first == b'\n' {
        return Some((Kind::Blank, 1));
    }
    if first.is_ascii_whitespace() {
        return Some((Kind::Blank, run(|c| c.is_ascii_whitespace() && c != b'\n')));
    }
    if rest.starts_with("//") {
        return Some((Kind::Blank, rest.find('\n').unwrap_or(b.len())));
    }
    if rest.starts_with("/*") {
        return Some((Kind::Blank, rest.find("*/")? + 2));
    }
    if first == b'"' || first == b'\'' {
        let mut i = 1;
        while *b.get(i)? != first {
            i += if b[i] == b'\\' { 2 } else { 1 };
        }
        return Some((Kind::Text, i + 1));
    }
    if first.is_ascii_digit() || (first == b'.' && b.get(1).is_some_and(u8::is_ascii_digit)) {
        return Some((Kind::Number, number(b)));
    }
    if first == b'_' || first.is_ascii_alphabetic() {
        return Some((Kind::Word, run(|c| c == b'_' || c.is_ascii_alphanumeric())));
    }
    Some((Kind::Mark, rest.chars().next().map_or(1, char::len_utf8)))
}

fn number(b: &[u8]) -> usize {
    let hex = b.len() > 1 && b[0] == b'0' && matches!(b[1], b'x' | b'X');
    let mut i = 1;
    while i < b.len() {
        let sign = matches!(b[i], b'+' | b'-');
        let after_exponent = match b[i - 1] {
            b'p' | b'P' => hex,
            b'e' | b'E' => !hex,
            _ => false,
        };
        if !(b[i].is_ascii_alphanumeric() || b[i] == b'.' || (sign && after_exponent)) {
            break;
        }
        i += 1;
    }
    i
}

/// A number as C++ spells it: MSL's plain `1.0` is a float, `1.0h` a half and `1.0bf` a bfloat.
pub(crate) fn literal(text: &str) -> String {
    let hex = text.starts_with("0x") || text.starts_with("0X");
    let float = if hex {
        text.contains(['p', 'P'])
    } else {
        text.contains(['.', 'e', 'E']) || text.ends_with(['f', 'F', 'h', 'H'])
    };
    if !float {
        return text.to_owned();
    }
    if let Some(value) = text.strip_suffix("bf").or_else(|| text.strip_suffix("BF")) {
        return format!("bfloat({}f)", dotted(value));
    }
    match text.as_bytes()[text.len() - 1] {
        b'h' | b'H' => format!("half({}f)", dotted(&text[..text.len() - 1])),
        b'f' | b'F' if !hex => format!("{}f", dotted(&text[..text.len() - 1])),
        b'f' | b'F' => text.to_owned(),
        _ => format!("{text}f"),
    }
}

/// `1f` and `1h` are literals on the device; C++ wants `1.0f`.
fn dotted(value: &str) -> String {
    if value.contains(['.', 'e', 'E', 'p', 'P']) { value.to_owned() } else { format!("{value}.0") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_add_up_and_lines_follow_the_markers() {
        let text = "# 7 \"k.metal\"\na = 1.5e-3f;\n/* x\n */ b[[0]]\n# 1 \"other\" 2\n'\\'' c";
        let tokens = tokens(text).expect("sound text");
        let all: String = tokens.list.iter().map(|t| t.text).collect();
        assert_eq!(all, text);
        let find = |s: &str| {
            let t = tokens.list.iter().find(|t| t.text == s).expect("a token");
            (tokens.files[t.file].as_str(), t.line)
        };
        assert_eq!(find("1.5e-3f"), ("k.metal", 7));
        assert_eq!(find("b"), ("k.metal", 9));
        assert_eq!(find("c"), ("other", 1));
    }

    #[test]
    fn literals_become_floats() {
        let cases = [
            ("1.0", "1.0f"),
            ("1e3", "1e3f"),
            ("0x1p-3", "0x1p-3f"),
            ("2.5h", "half(2.5f)"),
            ("1h", "half(1.0f)"),
            ("1.5bf", "bfloat(1.5f)"),
            ("0xff", "0xff"),
            ("0xFu", "0xFu"),
            ("12u", "12u"),
            (".5f", ".5f"),
        ];
        for (from, to) in cases {
            assert_eq!(literal(from), to, "{from}");
        }
    }

    #[test]
    fn a_string_without_an_end_is_an_error() {
        assert!(tokens("\"abc").expect_err("no end").is_compile());
    }
}
