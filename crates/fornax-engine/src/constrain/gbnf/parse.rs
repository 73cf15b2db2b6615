//! GBNF as a tree. It knows the notation alone.

use std::collections::HashMap;

use super::super::limits;
use crate::{Error, Result};

/// A rule: what its name stands for.
pub(super) struct Rule {
    pub(super) name: String,
    pub(super) body: Node,
}

/// A part of a rule.
pub(super) enum Node {
    Text(String),
    /// One character of these ranges, or none of them.
    Class {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
    /// A token by its text, `<|name|>`.
    Token(String),
    /// A rule by its number.
    Rule(usize),
    Sequence(Vec<Node>),
    Alternatives(Vec<Node>),
    Repeat {
        node: Box<Node>,
        least: u32,
        most: Option<u32>,
    },
}

/// Times that something may be repeated when it is counted.
const REPEATS: u32 = 100_000;

/// All rules, in the order in which they are named first.
///
/// # Errors
/// `is_request` with the line, `is_unsupported` for what is not read.
pub(super) fn rules(text: &str) -> Result<Vec<Rule>> {
    let mut parser = Parser { text, at: 0, depth: 0, numbers: HashMap::new(), names: Vec::new() };
    let mut bodies: Vec<Option<Node>> = Vec::new();
    parser.space(true);
    while parser.at < text.len() {
        let name = parser.name()?.to_owned();
        let number = parser.number(&name);
        parser.space(false);
        if !parser.take("::=") {
            return Err(parser.wrong("expected `::=` after the name of a rule"));
        }
        parser.space(true);
        let body = parser.alternatives(false)?;
        bodies.resize_with(parser.names.len(), || None);
        if bodies[number].replace(body).is_some() {
            return Err(parser.wrong(&format!("the rule `{name}` is given twice")));
        }
        parser.space(true);
    }
    let both = parser.names.iter().zip(bodies);
    both.map(|(name, body)| match body {
        Some(body) => Ok(Rule { name: name.clone(), body }),
        None => Err(Error::request(format!(
            "reading the GBNF grammar: the rule `{name}` is used and not given"
        ))),
    })
    .collect()
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    numbers: HashMap<String, usize>,
    names: Vec<String>,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn take(&mut self, what: &str) -> bool {
        let there = self.rest().starts_with(what);
        self.at += if there { what.len() } else { 0 };
        there
    }

    fn wrong(&self, what: &str) -> Error {
        let line = self.text[..self.at].matches('\n').count() + 1;
        Error::request(format!("reading the GBNF grammar, line {line}: {what}"))
    }

    /// Skips white space and comments; ends of lines only where they mean nothing.
    fn space(&mut self, lines: bool) {
        loop {
            match self.peek() {
                Some(' ' | '\t') => self.at += 1,
                Some('\n' | '\r') if lines => self.at += 1,
                Some('#') => self.at += self.rest().find('\n').unwrap_or(self.rest().len()),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Result<&'a str> {
        let rest = self.rest();
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_');
        let name = &rest[..end.unwrap_or(rest.len())];
        if name.is_empty() {
            return Err(self.wrong("expected the name of a rule"));
        }
        self.at += name.len();
        Ok(name)
    }

    fn number(&mut self, name: &str) -> usize {
        if let Some(&number) = self.numbers.get(name) {
            return number;
        }
        self.names.push(name.to_owned());
        self.numbers.insert(name.to_owned(), self.names.len() - 1);
        self.names.len() - 1
    }

    fn alternatives(&mut self, grouped: bool) -> Result<Node> {
        let mut all = vec![self.sequence(grouped)?];
        while self.take("|") {
            self.space(true);
            all.push(self.sequence(grouped)?);
        }
        Ok(if all.len() == 1 { all.swap_remove(0) } else { Node::Alternatives(all) })
    }

    /// Elements up to what cannot be one. Inside brackets an end of line means nothing.
    fn sequence(&mut self, grouped: bool) -> Result<Node> {
        let mut nodes = Vec::new();
        while let Some(c) = self.peek() {
            let node = match c {
                '"' => self.text()?,
                '[' => self.class()?,
                '.' => {
                    self.at += 1;
                    Node::Class { negated: false, ranges: vec![('\0', char::MAX)] }
                }
                '(' => self.group()?,
                '<' => self.token()?,
                '!' => {
                    return Err(Error::unsupported(
                        "the GBNF grammar cannot be enforced: `!` before a token",
                    ));
                }
                _ if c.is_ascii_alphanumeric() => {
                    let name = self.name()?;
                    Node::Rule(self.number(name))
                }
                _ => break,
            };
            let node = self.repeated(node)?;
            nodes.push(node);
            self.space(grouped);
        }
        // A line that begins with `|` goes on with the rule.
        if !grouped {
            let before = self.at;
            self.space(true);
            if self.peek() != Some('|') {
                self.at = before;
                self.line_ends()?;
            }
        }
        Ok(Node::Sequence(nodes))
    }

    fn line_ends(&self) -> Result<()> {
        match self.peek() {
            None | Some('\n' | '\r') => Ok(()),
            Some(c) => Err(self.wrong(&format!("{c:?} has no meaning here"))),
        }
    }

    fn group(&mut self) -> Result<Node> {
        self.at += 1;
        self.depth += 1;
        if self.depth > limits::NESTING {
            return Err(self.wrong(&format!("brackets nested deeper than {}", limits::NESTING)));
        }
        self.space(true);
        let node = self.alternatives(true)?;
        self.space(true);
        if !self.take(")") {
            return Err(self.wrong("expected `)`"));
        }
        self.depth -= 1;
        Ok(node)
    }

    fn repeated(&mut self, mut node: Node) -> Result<Node> {
        loop {
            let (least, most) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.counts()?,
                _ => return Ok(node),
            };
            self.at += 1;
            node = Node::Repeat { node: Box::new(node), least, most };
            self.depth += 1;
            if self.depth > limits::NESTING * 5 {
                return Err(self.wrong("too many repetitions"));
            }
        }
    }

    /// `{3}`, `{3,}`, `{3,5}`; stops before the closing brace.
    fn counts(&mut self) -> Result<(u32, Option<u32>)> {
        self.at += 1;
        let end = self.rest().find('}').ok_or_else(|| self.wrong("expected `}`"))?;
        let inner = &self.rest()[..end];
        let number = |text: &str| text.trim().parse::<u32>().ok().filter(|&n| n <= REPEATS);
        let counts = match inner.split_once(',') {
            None => number(inner).map(|n| (n, Some(n))),
            Some((least, "")) => number(least).map(|n| (n, None)),
            Some((least, most)) => number(least).zip(number(most)).map(|(l, m)| (l, Some(m))),
        };
        let counts = counts.filter(|(least, most)| most.is_none_or(|most| most >= *least));
        let counts = counts.ok_or_else(|| {
            self.wrong(&format!("`{{{inner}}}` is no number of times, expected at most {REPEATS}"))
        })?;
        self.at += end;
        Ok(counts)
    }

    fn text(&mut self) -> Result<Node> {
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.peek() {
                None | Some('\n') => return Err(self.wrong("expected `\"` at the end of a text")),
                Some('"') => {
                    self.at += 1;
                    return Ok(Node::Text(text));
                }
                Some(_) => text.push(self.character()?),
            }
        }
    }

    fn class(&mut self) -> Result<Node> {
        self.at += 1;
        let negated = self.take("^");
        let mut ranges = Vec::new();
        loop {
            match self.peek() {
                None | Some('\n') => {
                    return Err(self.wrong("expected `]` at the end of a set of characters"));
                }
                Some(']') => {
                    self.at += 1;
                    break;
                }
                Some(_) => {
                    let from = self.character()?;
                    let range = self.rest().starts_with('-') && !self.rest().starts_with("-]");
                    let to = if range {
                        self.at += 1;
                        self.character()?
                    } else {
                        from
                    };
                    if from > to {
                        return Err(self.wrong(&format!("the range {from:?}-{to:?} is empty")));
                    }
                    ranges.push((from, to));
                }
            }
        }
        match (ranges.is_empty(), negated) {
            (true, false) => Err(self.wrong("a set without characters can never match")),
            (true, true) => Ok(Node::Class { negated: false, ranges: vec![('\0', char::MAX)] }),
            _ => Ok(Node::Class { negated, ranges }),
        }
    }

    fn token(&mut self) -> Result<Node> {
        let end = self.rest().find('>').ok_or_else(|| self.wrong("expected `>`"))?;
        let text = &self.rest()[..=end];
        if text.starts_with("<[") {
            return Err(Error::unsupported(format!(
                "the GBNF grammar cannot be enforced: a token by number, {text}; write its text"
            )));
        }
        self.at += text.len();
        Ok(Node::Token(text.to_owned()))
    }

    /// One character of a text or set, with its escapes.
    fn character(&mut self) -> Result<char> {
        let Some(c) = self.next() else { return Err(self.wrong("the grammar ends in a text")) };
        if c != '\\' {
            return Ok(c);
        }
        match self.next() {
            Some('n') => Ok('\n'),
            Some('r') => Ok('\r'),
            Some('t') => Ok('\t'),
            Some('x') => self.hex(2),
            Some('u') => self.hex(4),
            Some('U') => self.hex(8),
            Some(c @ ('"' | '[' | ']' | '\\' | '-' | '^')) => Ok(c),
            Some(c) => Err(self.wrong(&format!("unknown escape `\\{c}`"))),
            None => Err(self.wrong("the grammar ends in an escape")),
        }
    }

    fn hex(&mut self, digits: usize) -> Result<char> {
        let code = self.rest().get(..digits).and_then(|hex| u32::from_str_radix(hex, 16).ok());
        let c = code.and_then(char::from_u32);
        let c =
            c.ok_or_else(|| self.wrong(&format!("expected a character in {digits} hex digits")))?;
        self.at += digits;
        Ok(c)
    }
}
