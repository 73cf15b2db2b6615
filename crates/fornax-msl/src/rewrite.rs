//! Rewrites code token by token: attributes and address spaces go, threadgroup variables become shared, barriers get numbers,
//! swizzles become calls, literals become floats. Lines stay. It knows no statement outside of functions.

use std::collections::HashSet;
use std::ops::Range;

use crate::Error;
use crate::lex::{self, Kind, Token, Tokens};
use crate::prepare::{BarrierSite, Prepared};
use crate::signature::{self, SPACES, attribute_end, close, solid};

/// Words that are C++ and not MSL.
const FORBIDDEN: [&str; 13] = [
    "double",
    "goto",
    "new",
    "delete",
    "throw",
    "try",
    "catch",
    "virtual",
    "dynamic_cast",
    "typeid",
    "thread_local",
    "asm",
    "std",
];

/// Who reads the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// A C++ compiler, and then the emulator.
    Emulator,
    /// A compiler that knows address spaces and only checks.
    Lint,
}

pub(crate) struct Rewriter<'t, 'a> {
    pub(crate) tokens: &'t [Token<'a>],
    files: &'t [String],
    /// Names of struct fields: these are never swizzles.
    fields: HashSet<&'a str>,
    pub(crate) out: Prepared,
    /// Names of function constants and of what is computed from them.
    pub(crate) specialised: Vec<String>,
    /// Whether the code is a kernel's own.
    pub(crate) kernel: bool,
    arrays: u32,
    pub(crate) target: Target,
}

impl<'t, 'a> Rewriter<'t, 'a> {
    pub(crate) fn new(tokens: &'t Tokens<'a>, target: Target) -> Rewriter<'t, 'a> {
        Rewriter {
            tokens: &tokens.list,
            files: &tokens.files,
            fields: fields(&tokens.list),
            out: Prepared::default(),
            specialised: Vec::new(),
            kernel: false,
            arrays: 0,
            target,
        }
    }

    pub(crate) fn push(&mut self, text: &str) {
        self.out.code.push_str(text);
    }

    pub(crate) fn place(&self, t: &Token<'_>) -> String {
        format!("{}:{}", self.files[t.file], t.line)
    }

    fn error(&self, at: usize, what: &str) -> Error {
        Error::compile(format!("{}: {what}", self.place(&self.tokens[at])))
    }

    /// Rewrites a range into a text of its own.
    pub(crate) fn apart(&mut self, range: Range<usize>) -> Result<String, Error> {
        let before = std::mem::take(&mut self.out.code);
        let done = self.code(range, "");
        let text = std::mem::replace(&mut self.out.code, before);
        done.map(|()| text)
    }

    /// Rewrites a range; `function` is the name of the function that it belongs to.
    pub(crate) fn code(&mut self, range: Range<usize>, function: &str) -> Result<(), Error> {
        let mut i = range.start;
        let mut before = ";";
        while i < range.end {
            let t = self.tokens[i];
            if let Some(end) = attribute_end(self.tokens, i) {
                // Lines must stay, so the attribute's own are kept.
                let lines: String =
                    self.tokens[i..end].iter().flat_map(|t| t.text.matches('\n')).collect();
                self.push(&lines);
                i = end;
                continue;
            }
            i = match t.kind {
                Kind::Number => {
                    self.push(&lex::literal(t.text));
                    i + 1
                }
                Kind::Word => self.word(i, before, function)?,
                Kind::Blank if t.text.starts_with("# ") => {
                    // The compiler's own form of a line marker; it takes it back as it is.
                    self.push(t.text);
                    i + 1
                }
                _ => {
                    self.push(t.text);
                    i + 1
                }
            };
            if t.kind != Kind::Blank {
                // A rewrite may have taken several tokens.
                before = self.tokens[i - 1].text;
            }
        }
        Ok(())
    }

    fn word(&mut self, i: usize, before: &str, function: &str) -> Result<usize, Error> {
        let t = self.tokens[i];
        let start = matches!(before, ";" | "{" | "}");
        let lint = self.target == Target::Lint;
        match t.text {
            "threadgroup" if start && !function.is_empty() => {
                if let Some(next) = self.threadgroup(i)? {
                    return Ok(next);
                }
                if !lint {
                    return Ok(i + 1);
                }
            }
            "threadgroup_barrier" | "simdgroup_barrier"
                if !lint && self.follows(i, "(").is_some() =>
            {
                let open = self.follows(i, "(").unwrap_or(i);
                let site = self.out.barriers.len();
                let file = self.files[t.file].clone();
                let (kind, function) = (t.text.to_owned(), function.to_owned());
                self.out.barriers.push(BarrierSite { kind, function, file, line: t.line });
                self.push(&format!("{}_at({site}u, ", t.text));
                return Ok(open + 1);
            }
            "is_function_constant_defined" => {
                let open = self.follows(i, "(");
                let last = open.and_then(|o| close(self.tokens, o));
                let (Some(open), Some(last)) = (open, last) else {
                    return Err(self.error(i, "is_function_constant_defined needs a name"));
                };
                let name = signature::text(&self.tokens[open + 1..last]);
                let name_of = if lint { "msl_defined(" } else { "msl_set_" };
                self.push(&format!("{name_of}{}{}", name.trim(), if lint { ")" } else { "" }));
                self.out.questioned.insert(name.trim().to_owned());
                return Ok(last + 1);
            }
            "kernel" => return Ok(i + 1),
            _ if !lint && SPACES.contains(&t.text) => return Ok(i + 1),
            _ if FORBIDDEN.contains(&t.text) => {
                return Err(self.error(i, &format!("'{}' is not in the language", t.text)));
            }
            "static" if !function.is_empty() && start => {
                let next = solid(self.tokens, i + 1).map_or("", |n| self.tokens[n].text);
                if !["inline", "constexpr", "constant"].contains(&next) && self.inside(i) {
                    return Err(self.error(i, "a function has no static variables"));
                }
            }
            "long" | "int" => {
                let next = solid(self.tokens, i + 1).map_or("", |n| self.tokens[n].text);
                if t.text == "long" && (next == "long" || next == "double") {
                    return Err(self.error(i, &format!("'long {next}' is not in the language")));
                }
            }
            _ if !lint && before == "." && self.is_swizzle(t.text) => {
                self.swizzle(i);
                return Ok(i + 1);
            }
            _ => {}
        }
        self.push(t.text);
        Ok(i + 1)
    }

    fn follows(&self, i: usize, text: &str) -> Option<usize> {
        solid(self.tokens, i + 1).filter(|&n| self.tokens[n].is(text))
    }

    /// Whether token `i` stands between braces.
    fn inside(&self, i: usize) -> bool {
        let depth = self.tokens[..i].iter().fold(0i32, |d, t| match (t.kind, t.text) {
            (Kind::Mark, "{") => d + 1,
            (Kind::Mark, "}") => d - 1,
            _ => d,
        });
        depth > 0
    }

    fn is_swizzle(&self, word: &str) -> bool {
        let of = |set: &str| (2..=4).contains(&word.len()) && word.chars().all(|c| set.contains(c));
        let halves = ["lo", "hi", "even", "odd"].contains(&word);
        (of("xyzw") || of("rgba") || halves) && !self.fields.contains(word)
    }

    fn swizzle(&mut self, i: usize) {
        let word = self.tokens[i].text;
        if matches!(word, "lo" | "hi" | "even" | "odd") {
            let how = if self.assigned(i + 1) { "set_" } else { "" };
            self.push(&format!("msl_{how}{word}()"));
            return;
        }
        let at = |c: char| "xyzw".find(c).or_else(|| "rgba".find(c)).unwrap_or(0);
        let indices: Vec<String> = word.chars().map(|c| at(c).to_string()).collect();
        let how = if self.assigned(i + 1) { "set" } else { "get" };
        self.push(&format!("template msl_{how}<{}>()", indices.join(", ")));
    }

    /// Whether an assignment operator comes at or after `from`.
    fn assigned(&self, from: usize) -> bool {
        let Some(a) = solid(self.tokens, from) else { return false };
        let text = |k: usize| self.tokens.get(a + k).map_or("", |t| t.text);
        match text(0) {
            "=" => text(1) != "=",
            "+" | "-" | "*" | "/" | "&" | "|" | "^" => text(1) == "=",
            _ => false,
        }
    }

    /// A declaration of threadgroup variables, which all threads share; nothing if it declares a pointer or reference.
    fn threadgroup(&mut self, i: usize) -> Result<Option<usize>, Error> {
        let Some(end) = (i..self.tokens.len()).find(|&k| self.tokens[k].is(";")) else {
            return Err(self.error(i, "this declaration has no end"));
        };
        let whole = &self.tokens[i + 1..end];
        let parts = signature::split(whole);
        let Some(first) = parts.first() else { return Ok(None) };
        let stop = |p: &[Token<'_>]| {
            p.iter().position(|t| t.is("[") || t.is("=") || t.is("(")).unwrap_or(p.len())
        };
        if first[..stop(first)].iter().any(|t| t.is("*") || t.is("&")) {
            return Ok(None);
        }
        if !self.kernel {
            return Err(self.error(
                i,
                "threadgroup variables are declared in kernels only; pass a pointer here",
            ));
        }
        let (attributes, _) = signature::take_attributes(whole);
        if let Some(a) = attributes.first() {
            return Err(self.error(i, &format!("attribute {} on a threadgroup variable", a.name)));
        }
        let name_at = |p: &[Token<'_>]| p[..stop(p)].iter().rposition(|t| t.kind == Kind::Word);
        let Some(at) = name_at(first) else { return Ok(None) };
        let kind = signature::text(&first[..at]);
        let mut written = String::new();
        for (n, part) in parts.iter().enumerate() {
            if part.iter().any(|t| t.is("=")) {
                return Err(self.error(i, "a threadgroup variable has no initial value"));
            }
            let Some(at) = name_at(part) else {
                return Err(self.error(i, "a threadgroup variable without a name"));
            };
            let (name, size) = (part[at].text, signature::text(&part[at + 1..]));
            let slot = self.arrays + n as u32;
            let kept = format!("typedef {kind} msl_t{slot}{size}; ");
            written.push_str(&match self.target {
                Target::Emulator => format!(
                    "{kept}msl_t{slot} &{name} = msl::threadgroup_array<msl_t{slot}>({slot}u, \"{name}\"); "
                ),
                // Any address will do: nothing runs.
                Target::Lint => format!(
                    "{kept}threadgroup msl_t{slot} &{name} = *(threadgroup msl_t{slot} *)16; "
                ),
            });
        }
        self.arrays += parts.len() as u32;
        self.push(&written);
        let lines = whole.iter().flat_map(|t| t.text.bytes()).filter(|&b| b == b'\n').count();
        self.push(&"\n".repeat(lines));
        Ok(Some(end + 1))
    }
}

/// The names that struct bodies declare.
fn fields<'a>(tokens: &[Token<'a>]) -> HashSet<&'a str> {
    let mut out = HashSet::new();
    let solids: Vec<usize> = (0..tokens.len()).filter(|&i| tokens[i].kind != Kind::Blank).collect();
    let mut until = 0;
    for (n, &i) in solids.iter().enumerate() {
        let t = &tokens[i];
        if t.is("struct") || t.is("union") || t.is("class") {
            let open = solids[n..].iter().copied().find(|&k| {
                tokens[k].is("{") || tokens[k].is(";") || tokens[k].is("(") || tokens[k].is(">")
            });
            if let Some(open) = open.filter(|&k| tokens[k].is("{")) {
                until = until.max(close(tokens, open).unwrap_or(0));
            }
        }
        let next = solids.get(n + 1).map_or("", |&k| tokens[k].text);
        let before = n.checked_sub(1).map_or("", |p| tokens[solids[p]].text);
        if i < until
            && t.kind == Kind::Word
            && matches!(next, ";" | "," | "[" | "=" | "{" | ":")
            && before != "."
        {
            out.insert(t.text);
        }
    }
    out
}
