//! The pass that turns preprocessed kernel source into C++: it takes the source apart into top-level statements, notes kernels,
//! function constants and barriers, and leaves every line where it was. It knows no compiler.

use std::collections::{HashMap, HashSet};

use crate::Error;
use crate::lex::{self, Kind, Token};
use crate::rewrite::{Rewriter, Target};
use crate::signature::{self, Attribute, Parameter, attribute_end, close, close_angle, solid};

/// A kernel function, or one instantiation of a kernel template.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    /// The name that the host asks for.
    pub(crate) host_name: String,
    /// The C++ expression that names the function.
    pub(crate) function: String,
    pub(crate) parameters: Vec<Parameter>,
    /// C++ expression; threads that a threadgroup may have at most, or 0.
    pub(crate) max_threads: String,
}

/// A constant that the host sets when it makes a pipeline.
#[derive(Clone, Debug)]
pub(crate) struct Specialised {
    pub(crate) name: String,
    pub(crate) type_text: String,
    pub(crate) id: String,
}

/// A barrier in the source.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BarrierSite {
    /// `threadgroup_barrier` or `simdgroup_barrier`.
    pub kind: String,
    /// The function that it stands in.
    pub function: String,
    /// The name of the source part.
    pub file: String,
    /// The line in that part, from 1.
    pub line: u32,
}

/// What the pass found, and the C++ that it wrote.
#[derive(Debug, Default)]
pub(crate) struct Prepared {
    pub(crate) code: String,
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) constants: Vec<Specialised>,
    /// Assignments to program-scope constants whose values depend on function constants.
    pub(crate) derived: String,
    pub(crate) barriers: Vec<BarrierSite>,
    /// The words in each function, struct or computed constant, by its name.
    pub(crate) words: HashMap<String, HashSet<String>>,
    /// Function constants of which the source asks whether they are defined.
    pub(crate) questioned: HashSet<String>,
}

/// Prepares preprocessed source.
///
/// # Errors
/// A rule of the language that C++ would not hold the source to, or a form that the pass does not know; with file and line.
pub(crate) fn prepare(source: &str, target: Target) -> Result<Prepared, Error> {
    let tokens = lex::tokens(source)?;
    let rewriter = Rewriter::new(&tokens, target);
    let mut pass = Pass { rewriter, templates: Vec::new(), scopes: 0 };
    pass.statements()?;
    let mut out = pass.rewriter.out;
    let names: Vec<&String> = out.kernels.iter().map(|k| &k.host_name).collect();
    if let Some(twice) = names.iter().enumerate().find(|(i, n)| names[..*i].contains(n)) {
        return Err(Error::compile(format!("there are two kernels with the name '{}'", twice.1)));
    }
    out.constants.dedup_by(|a, b| a.name == b.name);
    Ok(out)
}

struct Template {
    name: String,
    parameters: Vec<Parameter>,
    max_threads: String,
}

struct Pass<'t, 'a> {
    rewriter: Rewriter<'t, 'a>,
    templates: Vec<Template>,
    /// Namespaces open at this point.
    scopes: usize,
}

/// A statement's head, up to the `;` or the `{` of its block.
struct Head {
    end: usize,
    block: bool,
}

impl<'a> Pass<'_, 'a> {
    fn tokens(&self) -> &[Token<'a>] {
        self.rewriter.tokens
    }

    fn error(&self, at: usize, what: &str) -> Error {
        Error::compile(format!("{}: {what}", self.rewriter.place(&self.tokens()[at])))
    }

    fn statements(&mut self) -> Result<(), Error> {
        let mut i = 0;
        while i < self.tokens().len() {
            let t = self.tokens()[i];
            if t.kind == Kind::Blank || t.is(";") || t.is("}") {
                self.scopes = self.scopes.saturating_sub(usize::from(t.is("}")));
                self.rewriter.push(t.text);
                i += 1;
                continue;
            }
            i = self.statement(i)?;
        }
        Ok(())
    }

    /// Handles the statement that starts at `start` and gives the index one past it.
    fn statement(&mut self, start: usize) -> Result<usize, Error> {
        let head = self.head(start)?;
        let has = |word: &str| self.tokens()[start..head.end].iter().any(|t| t.is(word));
        let body = self.after_template(start);
        let first = solid(self.tokens(), body).map_or("", |i| self.tokens()[i].text);
        let aggregate = ["struct", "class", "union", "enum"].contains(&first);
        if head.block && ["namespace", "extern"].contains(&first) {
            self.rewriter.code(start..head.end + 1, "")?;
            self.scopes += 1;
            return Ok(head.end + 1);
        }
        let end = if head.block {
            let last = close(self.tokens(), head.end);
            last.ok_or_else(|| self.error(head.end, "this block has no end"))? + 1
        } else {
            head.end + 1
        };
        if head.block && !aggregate && has("(") {
            self.function(start, body, head.end, end)?;
        } else if head.block {
            let name = self.tokens()[body..head.end].iter().rfind(|t| t.kind == Kind::Word);
            let name = name.map_or(String::new(), |t| t.text.to_owned());
            self.note_words(&name, start, end);
            self.rewriter.code(start..end, "")?;
        } else {
            self.declaration(start, body, head.end)?;
        }
        Ok(end)
    }

    fn after_template(&self, start: usize) -> usize {
        let tokens = self.tokens();
        let open = tokens[start].is("template").then(|| solid(tokens, start + 1)).flatten();
        open.filter(|&o| tokens[o].is("<"))
            .and_then(|o| close_angle(tokens, o))
            .map_or(start, |c| c + 1)
    }

    fn head(&self, start: usize) -> Result<Head, Error> {
        let tokens = self.tokens();
        let (mut i, mut value) = (self.after_template(start), false);
        while i < tokens.len() {
            match tokens[i].text {
                _ if matches!(tokens[i].kind, Kind::Blank | Kind::Text) => {}
                "(" | "[" => {
                    let c = close(tokens, i);
                    i = c.ok_or_else(|| self.error(i, "this bracket has no end"))?;
                }
                "=" => value = true,
                ";" => return Ok(Head { end: i, block: false }),
                "{" if value => {
                    let c = close(tokens, i);
                    i = c.ok_or_else(|| self.error(i, "this brace has no end"))?;
                }
                "{" => return Ok(Head { end: i, block: true }),
                _ => {}
            }
            i += 1;
        }
        Err(self.error(start, "this statement has no end"))
    }

    fn function(
        &mut self,
        start: usize,
        body: usize,
        open: usize,
        end: usize,
    ) -> Result<(), Error> {
        let (attributes, plain) = signature::take_attributes(&self.tokens()[body..open]);
        let Some(paren) = plain.iter().position(|t| t.is("(")) else {
            return Err(self.error(start, "this function has no parameter list"));
        };
        let name = plain[..paren].iter().rfind(|t| t.kind == Kind::Word);
        let name = name.map_or(String::new(), |t| t.text.to_owned());
        let kernel =
            plain.iter().any(|t| t.is("kernel")) || attributes.iter().any(|a| a.name == "kernel");
        self.check_spaces(body, open)?;
        self.note_words(&name, start, end);
        if kernel {
            self.kernel(start, body, open, &name)?;
        }
        self.rewriter.kernel = kernel;
        self.rewriter.code(start..open, &name)?;
        self.rewriter.code(open..end, &name)?;
        self.rewriter.kernel = false;
        Ok(())
    }

    fn note_words(&mut self, name: &str, start: usize, end: usize) {
        let tokens = self.rewriter.tokens;
        let words = tokens[start..end].iter().filter(|t| t.kind == Kind::Word);
        let into = self.rewriter.out.words.entry(name.to_owned()).or_default();
        into.extend(words.map(|t| t.text.to_owned()));
    }

    fn kernel(&mut self, start: usize, body: usize, open: usize, name: &str) -> Result<(), Error> {
        if self.scopes != 0 {
            let what =
                format!("kernel {name} is in a namespace, where the host cannot name it plainly");
            return Err(self.error(start, &what));
        }
        let tokens = self.rewriter.tokens;
        let mut i = body;
        while !tokens[i].is("(") {
            i = attribute_end(tokens, i).unwrap_or(i + 1);
        }
        let last = close(tokens, i).unwrap_or(open);
        let place = |t: &Token<'_>| self.rewriter.place(t);
        let parameters = signature::parameters(&tokens[i + 1..last], &place)?;
        for p in &parameters {
            let known = p.attributes.iter().any(|a| {
                ["buffer", "threadgroup"].contains(&a.name.as_str())
                    || signature::built_in(&a.name).is_some()
            });
            if !known {
                let what = format!(
                    "parameter '{}' of kernel {name} says by no attribute that this emulator knows where it comes from",
                    p.name
                );
                return Err(self.error(start, &what));
            }
        }
        if let Some(what) = signature::wrong_built_in(&parameters) {
            return Err(self.error(start, &format!("kernel {name}: {what}")));
        }
        let (attributes, _) = signature::take_attributes(&tokens[body..i]);
        let value = |wanted: &str| attribute(&attributes, wanted);
        let max_threads = value("max_total_threads_per_threadgroup").unwrap_or("0".to_owned());
        if tokens[start].is("template") {
            self.templates.push(Template { name: name.to_owned(), parameters, max_threads });
        } else {
            let host_name = value("host_name").map_or(name.to_owned(), |h| h.replace('"', ""));
            let function = name.to_owned();
            self.rewriter.out.kernels.push(Kernel { host_name, function, parameters, max_threads });
        }
        Ok(())
    }

    /// Every pointer and reference in a parameter list needs an address space.
    fn check_spaces(&self, body: usize, open: usize) -> Result<(), Error> {
        let tokens = self.tokens();
        let mut i = body;
        while i < open && !tokens[i].is("(") {
            i = attribute_end(tokens, i).unwrap_or(i + 1);
        }
        let Some(last) = (i < open).then(|| close(tokens, i)).flatten() else { return Ok(()) };
        for part in signature::split(&tokens[i + 1..last]) {
            let (_, plain) = signature::take_attributes(part);
            let star = plain.iter().any(|t| t.is("*") || t.is("&"));
            if star && !plain.iter().any(|t| signature::SPACES.contains(&t.text)) {
                let what = format!(
                    "parameter '{}' is a pointer or reference without an address space; write device, constant, threadgroup or thread",
                    signature::text(&plain)
                );
                return Err(self.error(i, &what));
            }
        }
        Ok(())
    }

    fn declaration(&mut self, start: usize, body: usize, end: usize) -> Result<(), Error> {
        let tokens = self.rewriter.tokens;
        let (attributes, plain) = signature::take_attributes(&tokens[start..end]);
        let word = |w: &str| plain.iter().any(|t| t.is(w));
        let kernel = word("kernel") || attributes.iter().any(|a| a.name == "kernel");
        if tokens[start].is("template") && body == start && kernel {
            self.instantiation(start, &attributes, &plain)?;
        }
        let (_, value) = split_value(&plain);
        let call = plain.iter().position(|t| t.is("(")).is_some_and(|p| p < value);
        if word("constant") && !call && !word("using") && !word("typedef") {
            return self.constant(start, end, &attributes, &plain, value);
        }
        self.rewriter.code(start..end + 1, "")
    }

    /// `template [[host_name("x")]] kernel T name<A>...;`
    fn instantiation(
        &mut self,
        start: usize,
        attributes: &[Attribute],
        plain: &[Token<'_>],
    ) -> Result<(), Error> {
        let mut found: Option<(usize, usize)> = None;
        let mut i = 1;
        while i < plain.len() && !plain[i].is("(") {
            if plain[i].is("decltype") {
                let open = solid(plain, i + 1).unwrap_or(i);
                i = close(plain, open).unwrap_or(i);
            } else if plain[i].kind == Kind::Word {
                let next = solid(plain, i + 1).filter(|&n| plain[n].is("<"));
                let last = next.and_then(|n| close_angle(plain, n));
                found = Some((i, last.unwrap_or(i)));
                i = last.unwrap_or(i);
            }
            i += 1;
        }
        let Some((from, to)) = found else {
            return Err(self.error(start, "this instantiation names no kernel"));
        };
        let name = plain[from].text;
        let Some(t) = self.templates.iter().rfind(|t| t.name == name) else {
            let what = format!("there is no kernel template '{name}' before this instantiation");
            return Err(self.error(start, &what));
        };
        let Some(host) = attribute(attributes, "host_name") else {
            let what = format!("this instantiation of {name} has no host_name attribute");
            return Err(self.error(start, &what));
        };
        let kernel = Kernel {
            host_name: host.replace('"', ""),
            function: signature::text(&plain[from..=to]),
            parameters: t.parameters.clone(),
            max_threads: t.max_threads.clone(),
        };
        self.rewriter.out.kernels.push(kernel);
        Ok(())
    }

    /// A program-scope constant: set by the host, computed from such a one, or plain.
    fn constant(
        &mut self,
        start: usize,
        end: usize,
        attributes: &[Attribute],
        plain: &[Token<'_>],
        value: usize,
    ) -> Result<(), Error> {
        let Some(at) = plain[..value].iter().rposition(|t| t.kind == Kind::Word) else {
            return Err(self.error(start, "this constant has no name"));
        };
        let (name, qualified) = (plain[at].text.to_owned(), |w| plain.iter().any(|t| t.is(w)));
        let drop = ["constant", "const", "static"];
        let kept: Vec<Token<'_>> =
            plain[..at].iter().filter(|t| !drop.contains(&t.text)).copied().collect();
        let type_text = signature::text(&kept).trim().to_owned();
        let newlines = newlines(&self.rewriter.tokens[start..end]);
        if let Some(id) = attribute(attributes, "function_constant") {
            self.rewriter.push(&match self.rewriter.target {
                Target::Emulator => {
                    format!("static {type_text} {name}; static bool msl_set_{name};")
                }
                Target::Lint => format!("extern constant {type_text} {name};"),
            });
            self.rewriter.push(&newlines);
            self.rewriter.specialised.push(name.clone());
            self.rewriter.out.constants.push(Specialised { name, type_text, id });
            return Ok(());
        }
        let depends = plain[value..].iter().any(|t| {
            t.kind == Kind::Word
                && (t.text == "is_function_constant_defined"
                    || self.rewriter.specialised.iter().any(|n| n == t.text))
        });
        if depends {
            let written = self.rewriter.apart(start..end)?;
            let right = written.split_once('=').map_or("", |(_, r)| r).to_owned();
            self.rewriter.push(&match self.rewriter.target {
                Target::Emulator => format!("static {type_text} {name};{newlines}"),
                Target::Lint => format!(
                    "extern constant {type_text} {name}; inline {type_text} msl_value_of_{name}() {{ return {right}; }}"
                ),
            });
            self.rewriter.out.derived.push_str(&format!("{name} = {right};\n"));
            self.note_words(&name, start, end);
            self.rewriter.specialised.push(name);
            return Ok(());
        }
        let fixed = qualified("const") || qualified("constexpr");
        if self.rewriter.target == Target::Emulator {
            self.rewriter.push(if fixed { "static " } else { "static const " });
        }
        self.rewriter.code(start..end + 1, "")
    }
}

fn attribute(attributes: &[Attribute], name: &str) -> Option<String> {
    attributes.iter().find(|a| a.name == name).and_then(|a| a.value.clone())
}

/// Where the `=` of a declaration is, or its end.
fn split_value(plain: &[Token<'_>]) -> (usize, usize) {
    let at = plain.iter().position(|t| t.is("="));
    (0, at.unwrap_or(plain.len()))
}

fn newlines(tokens: &[Token<'_>]) -> String {
    "\n".repeat(tokens.iter().flat_map(|t| t.text.bytes()).filter(|&b| b == b'\n').count())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCES: [&str; 4] = [
        include_str!("../tests/it/kernels/norm.metal"),
        include_str!("../tests/it/kernels/matvec.metal"),
        include_str!("../tests/it/kernels/matmul.metal"),
        include_str!("../tests/it/kernels/language.metal"),
    ];

    #[test]
    fn damaged_sources_are_errors_or_pass_but_never_panic() {
        for source in SOURCES {
            let places: Vec<usize> = source.char_indices().map(|(i, _)| i).collect();
            for target in [Target::Emulator, Target::Lint] {
                for &cut in places.iter().step_by(11) {
                    // The start, the end, and all without a piece in the middle.
                    let gap = places[(cut + 40).min(places.len() - 1)];
                    let without = format!("{}{}", &source[..cut], &source[gap.max(cut)..]);
                    for text in [&source[..cut], &source[cut..], &without] {
                        if let Ok(done) = prepare(text, target) {
                            let lines = |s: &str| s.matches('\n').count();
                            assert!(lines(&done.code) <= lines(text));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn lines_stay_and_everything_is_noted() {
        let source = SOURCES[2];
        let done = prepare(source, Target::Emulator).expect("a sound source");
        assert_eq!(done.code.matches('\n').count(), source.matches('\n').count());
        let names: Vec<&str> = done.kernels.iter().map(|k| k.host_name.as_str()).collect();
        assert_eq!(names, ["matmul_f32", "matmul_f16"]);
        assert_eq!(done.kernels[1].function, "matmul<half>");
        let lines: Vec<u32> = done.barriers.iter().map(|b| b.line).collect();
        assert_eq!(lines, [25, 32]);
        assert!(done.barriers.iter().all(|b| b.function == "matmul"));
    }
}
