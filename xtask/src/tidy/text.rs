//! Rules about one file's path and text. Each is a plain function; none knows other files.

use super::Complaint;
use super::files::File;
use super::source::{self, Line};

/// Longer than this is worth a look, and longer than the second number is too long to read.
const LINES_WARN: usize = 600;
const LINES_MAX: usize = 1_000;

/// Tables, which are not read from top to bottom: exempt from the limits on length.
const TABLES: [&str; 0] = [];

/// Names that say nothing about what is inside.
const VAGUE: [&str; 9] =
    ["util", "utils", "helper", "helpers", "common", "types", "manager", "managers", "misc"];

/// Where a machine keeps what is its own; put together so that this file does not hold them itself.
const PLACES: [&str; 4] =
    [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/Us", "ers/")];

/// The roots of the crates that stay free of unsafe code.
const SAFE: [&str; 5] = [
    "crates/fornax/src/main.rs",
    "crates/fornax-engine/src/lib.rs",
    "crates/fornax-server/src/lib.rs",
    "crates/fornax-text/src/lib.rs",
    "xtask/src/main.rs",
];

/// Every rule that a file can break.
pub(super) fn check(file: &File) -> Vec<Complaint> {
    let lines =
        if file.is_rust() || file.is_kernel() { source::lines(&file.text) } else { plain(file) };
    let mut found = Vec::new();
    found.extend(opening(file));
    found.extend(length(file, LINES_MAX));
    found.extend(vague_name(file, &lines));
    found.extend(unfinished(file, &lines));
    found.extend(places(file));
    found.extend(forbids_unsafe(file));
    if file.is_rust() {
        found.extend(unsafe_without_reason(file, &lines));
    }
    found
}

/// What is not wrong yet.
pub(super) fn warn(file: &File) -> Option<Complaint> {
    length(file, LINES_WARN).filter(|_| length(file, LINES_MAX).is_none())
}

/// Text that is no code counts as comment all over.
fn plain(file: &File) -> Vec<Line> {
    file.text.lines().map(|line| Line { code: String::new(), comment: line.to_owned() }).collect()
}

fn complain(file: &File, line: usize, message: impl Into<String>) -> Complaint {
    Complaint::new(&file.path, line, message)
}

/// A source file says first what it is for.
fn opening(file: &File) -> Option<Complaint> {
    let first = file.text.lines().next().unwrap_or_default();
    if file.is_rust() && !first.starts_with("//!") {
        return Some(complain(
            file,
            1,
            "opens without `//!`: what is it for, and what must it not know?",
        ));
    }
    if file.is_kernel() && !first.starts_with("//") && !first.starts_with("/*") {
        return Some(complain(
            file,
            1,
            "opens without a comment: layout, thread mapping, accumulator?",
        ));
    }
    None
}

fn length(file: &File, limit: usize) -> Option<Complaint> {
    let lines = file.text.lines().count();
    let counts = file.is_code() && !TABLES.contains(&file.path.as_str());
    (counts && lines > limit)
        .then(|| complain(file, 0, format!("{lines} lines, more than {limit}")))
}

/// Modules have names that say what is in them, as files, folders and in place.
fn vague_name(file: &File, lines: &[Line]) -> Vec<Complaint> {
    if !file.is_rust() {
        return Vec::new();
    }
    let mut found = Vec::new();
    for part in file.path.trim_end_matches(".rs").split('/') {
        if VAGUE.contains(&part) {
            found.push(complain(file, 0, format!("{part:?} says nothing about what is inside")));
        }
    }
    for (number, line) in numbered(lines) {
        let mut words =
            line.code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty());
        while let Some(word) = words.next() {
            if word != "mod" {
                continue;
            }
            if let Some(name) = words.next()
                && VAGUE.contains(&name)
                && line.code.trim_end().ends_with('{')
            {
                found.push(complain(
                    file,
                    number,
                    format!("module {name:?} says nothing about what is inside"),
                ));
            }
        }
    }
    found
}

/// What is committed is finished.
fn unfinished(file: &File, lines: &[Line]) -> Vec<Complaint> {
    let mut found = Vec::new();
    for (number, line) in numbered(lines) {
        for sign in ["todo!", "unimplemented!"] {
            if has_word(&line.code, sign) {
                found.push(complain(file, number, format!("`{sign}` is not finished code")));
            }
        }
        // With a reason it is one of the complete tests, which `cargo xtask deep` runs.
        if line.code.contains("#[ignore]")
            || line.code.contains(", ignore") && line.code.contains("cfg_attr")
        {
            found.push(complain(file, number, "a test that is not run tests nothing"));
        }
        for sign in ["FIXME", "XXX", "TODO"] {
            if has_word(&line.comment, sign) {
                found.push(complain(
                    file,
                    number,
                    format!("{sign}: finish it, or say it in an issue"),
                ));
            }
        }
    }
    found
}

/// The project knows no machine's folders.
fn places(file: &File) -> Vec<Complaint> {
    let mut found = Vec::new();
    for (number, line) in file.text.lines().enumerate() {
        for place in PLACES {
            // Inside a longer path, such as docs/work/, it is nobody's folder.
            let absolute = |at: usize| {
                !line[..at].ends_with(|c: char| c.is_alphanumeric() || "._-~*}/".contains(c))
            };
            if line.match_indices(place).any(|(at, _)| absolute(at)) {
                found.push(complain(
                    file,
                    number + 1,
                    format!("{place} is a folder of one machine"),
                ));
            }
        }
    }
    found
}

/// Crates that have no need of unsafe code say so to the compiler.
fn forbids_unsafe(file: &File) -> Option<Complaint> {
    let must = SAFE.contains(&file.path.as_str());
    (must && !file.text.contains("#![forbid(unsafe_code)]"))
        .then(|| complain(file, 0, "lacks `#![forbid(unsafe_code)]`"))
}

/// Every unsafe block and implementation says why it is sound, right above or on the line.
fn unsafe_without_reason(file: &File, lines: &[Line]) -> Vec<Complaint> {
    let opens = |code: &str| {
        code.match_indices("unsafe").any(|(at, word)| {
            let rest = code[at + word.len()..].trim_start();
            let before = code[..at].chars().next_back();
            let whole = !before.is_some_and(|c| c.is_alphanumeric() || c == '_');
            whole && (rest.starts_with('{') || rest.starts_with("impl"))
        })
    };
    let covered = covered_by_one_reason(lines);
    let mut found = Vec::new();
    for (number, line) in numbered(lines) {
        if opens(&line.code) && !covered[number - 1] && !has_reason(&lines[..number]) {
            found.push(complain(file, number, "unsafe without `// SAFETY:` above it"));
        }
    }
    found
}

/// Which lines are inside an item whose unsafe blocks all have one reason: it stands above the item, as
/// `// SAFETY of every ...: ...`, with the lint about single blocks allowed there.
fn covered_by_one_reason(lines: &[Line]) -> Vec<bool> {
    let mut covered = vec![false; lines.len()];
    for (number, line) in numbered(lines) {
        let one_reason = lines[..number - 1]
            .iter()
            .rev()
            .take_while(|above| above.code.trim().is_empty() && !above.comment.is_empty())
            .any(|above| above.comment.contains("SAFETY of every"));
        if !one_reason || !line.code.contains("allow(clippy::undocumented_unsafe_blocks") {
            continue;
        }
        let mut depth = 0_usize;
        for (inside, cover) in lines[number..].iter().zip(&mut covered[number..]) {
            *cover = true;
            let opened = depth + inside.code.matches('{').count();
            depth = opened - inside.code.matches('}').count().min(opened);
            if opened > 0 && depth == 0 {
                break;
            }
        }
    }
    covered
}

/// Whether the statement that ends these lines, or the comment above it, has a reason.
fn has_reason(lines: &[Line]) -> bool {
    let mut above = lines.iter().rev();
    let is_reason = |line: &Line| line.comment.contains("SAFETY:");
    let Some(last) = above.next() else {
        return false;
    };
    if is_reason(last) {
        return true;
    }
    let mut below = last;
    for line in above {
        let code = line.code.trim();
        if is_reason(line) {
            return true;
        }
        let blank = code.is_empty() && line.comment.is_empty();
        let attribute = code.starts_with("#[");
        // A chain of calls goes on with a dot, whatever the line before it ends with.
        let goes_on = below.code.trim_start().starts_with('.');
        if blank || !attribute && !goes_on && code.ends_with([';', '{', '}', ',']) {
            return false;
        }
        below = line;
    }
    false
}

fn numbered(lines: &[Line]) -> impl Iterator<Item = (usize, &Line)> {
    lines.iter().enumerate().map(|(i, line)| (i + 1, line))
}

/// Whether `text` has `word` with no letter, digit or underscore on either side.
fn has_word(text: &str, word: &str) -> bool {
    let joins = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !(before.is_some_and(joins) || after.is_some_and(joins) && word.ends_with(joins))
    })
}

#[cfg(test)]
mod tests;
