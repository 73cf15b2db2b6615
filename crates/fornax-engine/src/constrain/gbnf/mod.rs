//! llama.cpp's GBNF, turned into Lark. It knows both notations and nothing of tokens but the numbers of named ones.
//!
//! GBNF has no lexer: its rules go down to characters. Here all that needs no recursion becomes terminals of a lexer,
//! which makes masks fast; where the whole grammar is such, it is one regular expression and exactly what was written.
//! Where a terminal could also be longer than the rest of a rule wants, the lexer takes the longest match, so that
//! fewer texts may be allowed than GBNF would allow, never more.

mod parse;

use std::fmt::Write;

use parse::{Node, Rule};

use super::lark;
use crate::{Error, Result};

/// The same grammar in Lark. `token` gives the number of a token by its text.
///
/// # Errors
/// `is_request` with the line, where the grammar is broken; `is_unsupported` for what has no counterpart.
pub(super) fn to_lark(text: &str, token: &dyn Fn(&str) -> Option<u32>) -> Result<String> {
    let rules = parse::rules(text)?;
    let root = rules.iter().position(|rule| rule.name == "root").ok_or_else(|| {
        Error::request(
            "reading the GBNF grammar: there is no rule `root`, with which every grammar starts",
        )
    })?;
    let writer = Writer { regular: regular(&rules), token };
    let mut out = format!("start: {}\n", writer.name(root));
    for (number, rule) in rules.iter().enumerate() {
        let body = if writer.regular[number] {
            writer.terminal(&rule.body)
        } else {
            writer.rule(&rule.body)?
        };
        let _ = writeln!(out, "{}: {body}", writer.name(number));
    }
    Ok(out)
}

/// Which rules need no recursion and no named token: all that they refer to needs none either.
fn regular(rules: &[Rule]) -> Vec<bool> {
    // A rule is settled once all that it refers to is; what never settles leads back to itself.
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); rules.len()];
    let mut unsettled: Vec<usize> = vec![0; rules.len()];
    let mut blocked = vec![false; rules.len()];
    for (number, rule) in rules.iter().enumerate() {
        let mut used = Vec::new();
        blocked[number] = refers(&rule.body, &mut used);
        used.sort_unstable();
        used.dedup();
        unsettled[number] = used.len();
        used.into_iter().for_each(|other| users[other].push(number));
    }
    let ready = |n: &usize| unsettled[*n] == 0 && !blocked[*n];
    let mut open: Vec<usize> = (0..rules.len()).filter(ready).collect();
    let mut regular = vec![false; rules.len()];
    while let Some(number) = open.pop() {
        regular[number] = true;
        for &user in &users[number] {
            unsettled[user] -= 1;
            if unsettled[user] == 0 && !blocked[user] {
                open.push(user);
            }
        }
    }
    regular
}

/// Collects the rules that a node refers to; true where it holds a named token.
fn refers(node: &Node, used: &mut Vec<usize>) -> bool {
    match node {
        Node::Rule(number) => {
            used.push(*number);
            false
        }
        Node::Token(_) => true,
        Node::Text(_) | Node::Class { .. } => false,
        Node::Sequence(nodes) | Node::Alternatives(nodes) => {
            nodes.iter().fold(false, |any, node| refers(node, used) | any)
        }
        Node::Repeat { node, .. } => refers(node, used),
    }
}

struct Writer<'a> {
    regular: Vec<bool>,
    token: &'a dyn Fn(&str) -> Option<u32>,
}

impl Writer<'_> {
    fn name(&self, number: usize) -> String {
        format!("{}{number}", if self.regular[number] { 'T' } else { 'r' })
    }

    fn is_regular(&self, node: &Node) -> bool {
        match node {
            Node::Rule(number) => self.regular[*number],
            Node::Token(_) => false,
            Node::Text(_) | Node::Class { .. } => true,
            Node::Sequence(nodes) | Node::Alternatives(nodes) => {
                nodes.iter().all(|node| self.is_regular(node))
            }
            Node::Repeat { node, .. } => self.is_regular(node),
        }
    }

    /// A node that has no recursion in it.
    fn terminal(&self, node: &Node) -> String {
        match node {
            Node::Rule(number) => self.name(*number),
            Node::Text(text) => lark::quote(text),
            Node::Class { negated, ranges } => class(*negated, ranges),
            Node::Token(_) => String::new(),
            Node::Sequence(nodes) if nodes.is_empty() => "\"\"".into(),
            Node::Sequence(nodes) => join(nodes.iter().map(|node| self.terminal(node)), " "),
            Node::Alternatives(nodes) => join(nodes.iter().map(|node| self.terminal(node)), " | "),
            Node::Repeat { node, least, most } => {
                format!("({}){}", self.terminal(node), times(*least, *most))
            }
        }
    }

    /// A node with recursion in it. Neighbours without become one terminal.
    fn rule(&self, node: &Node) -> Result<String> {
        Ok(match node {
            Node::Token(text) => match (self.token)(text) {
                Some(id) => format!("<[{id}]>"),
                None => {
                    return Err(Error::request(format!(
                        "reading the GBNF grammar: the model has no token {text:?}"
                    )));
                }
            },
            Node::Sequence(nodes) => {
                let mut parts = Vec::new();
                let mut at = 0;
                while at < nodes.len() {
                    let run = nodes[at..].iter().take_while(|node| self.is_regular(node)).count();
                    if run == 0 {
                        parts.push(self.rule(&nodes[at])?);
                        at += 1;
                    } else {
                        let run_nodes = &nodes[at..at + run];
                        parts.push(join(run_nodes.iter().map(|node| self.terminal(node)), " "));
                        at += run;
                    }
                }
                format!("({})", parts.join(" "))
            }
            Node::Alternatives(nodes) => {
                let nodes: Vec<String> =
                    nodes.iter().map(|n| self.rule(n)).collect::<Result<_>>()?;
                format!("({})", nodes.join(" | "))
            }
            Node::Repeat { node, least, most } => {
                format!("({}){}", self.rule(node)?, times(*least, *most))
            }
            Node::Rule(_) | Node::Text(_) | Node::Class { .. } => self.terminal(node),
        })
    }
}

fn join(parts: impl Iterator<Item = String>, between: &str) -> String {
    format!("({})", parts.collect::<Vec<_>>().join(between))
}

fn times(least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (0, None) => "*".into(),
        (1, None) => "+".into(),
        (0, Some(1)) => "?".into(),
        (least, None) => format!("{{{least},}}"),
        (least, Some(most)) => format!("{{{least},{most}}}"),
    }
}

fn class(negated: bool, ranges: &[(char, char)]) -> String {
    let mut out = String::from(if negated { "/[^" } else { "/[" });
    for &(from, to) in ranges {
        let _ = write!(out, "\\x{{{:x}}}-\\x{{{:x}}}", u32::from(from), u32::from(to));
    }
    out.push_str("]/");
    out
}
