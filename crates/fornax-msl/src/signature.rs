//! What the attributes of a kernel source say: parameters, their address spaces and where each comes from. It knows tokens
//! and no C++ output.

use crate::Error;
use crate::lex::{Kind, Token};

/// An attribute such as `buffer(3)`: its name and the text between its parentheses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attribute {
    pub(crate) name: String,
    pub(crate) value: Option<String>,
}

/// A parameter of a kernel.
#[derive(Clone, Debug)]
pub(crate) struct Parameter {
    pub(crate) name: String,
    /// The type as the source spells it, address space and attributes left out.
    pub(crate) type_text: String,
    /// `device`, `constant`, `threadgroup`, `thread`, or nothing.
    pub(crate) space: Option<&'static str>,
    pub(crate) read_only: bool,
    pub(crate) attributes: Vec<Attribute>,
}

/// The address-space words of the language.
pub(crate) const SPACES: [&str; 4] = ["device", "constant", "threadgroup", "thread"];

/// The index of the token that closes the bracket at `open`.
pub(crate) fn close(tokens: &[Token<'_>], open: usize) -> Option<usize> {
    let mut depth = 0usize;
    for (i, t) in tokens.iter().enumerate().skip(open) {
        if t.kind != Kind::Mark {
            continue;
        }
        match t.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(i);
                }
            }
            _ => {}
        }
    }
    None
}

/// The index of the `>` that closes the `<` at `open`.
pub(crate) fn close_angle(tokens: &[Token<'_>], open: usize) -> Option<usize> {
    let mut depth = 0usize;
    let mut i = open;
    while i < tokens.len() {
        match tokens[i].text {
            "(" | "[" | "{" => i = close(tokens, i)?,
            "<" => depth += 1,
            ">" => {
                depth -= 1;
                if depth == 0 {
                    return Some(i);
                }
            }
            ";" => return None,
            _ => {}
        }
        i += 1;
    }
    None
}

/// The first token at or after `from` that is no blank.
pub(crate) fn solid(tokens: &[Token<'_>], from: usize) -> Option<usize> {
    (from..tokens.len()).find(|&i| tokens[i].kind != Kind::Blank)
}

/// The index one past an attribute `[[...]]` that starts at `at`, if one does.
pub(crate) fn attribute_end(tokens: &[Token<'_>], at: usize) -> Option<usize> {
    (tokens[at].is("[") && tokens.get(at + 1).is_some_and(|t| t.is("[")))
        .then(|| close(tokens, at).map(|c| c + 1))
        .flatten()
}

/// Splits at commas outside of every bracket.
pub(crate) fn split<'t, 'a>(tokens: &'t [Token<'a>]) -> Vec<&'t [Token<'a>]> {
    let (mut parts, mut start, mut i) = (Vec::new(), 0, 0);
    while i < tokens.len() {
        match tokens[i].text {
            "(" | "[" | "{" => i = close(tokens, i).unwrap_or(i),
            // An angle bracket that nothing closes is a comparison.
            "<" => i = close_angle(tokens, i).unwrap_or(i),
            "," => {
                parts.push(&tokens[start..i]);
                start = i + 1;
            }
            _ => {}
        }
        i += 1;
    }
    if tokens[start..].iter().any(|t| t.kind != Kind::Blank) {
        parts.push(&tokens[start..]);
    }
    parts
}

/// The text of tokens, each run of white space as one blank.
pub(crate) fn text(tokens: &[Token<'_>]) -> String {
    let mut out = String::new();
    for t in tokens {
        if t.kind != Kind::Blank {
            out.push_str(t.text);
        } else if !out.ends_with(' ') && !out.is_empty() {
            out.push(' ');
        }
    }
    out.trim_end().to_owned()
}

/// The attributes among `tokens`, and the tokens that are none.
pub(crate) fn take_attributes<'a>(tokens: &[Token<'a>]) -> (Vec<Attribute>, Vec<Token<'a>>) {
    let (mut attributes, mut rest, mut i) = (Vec::new(), Vec::new(), 0);
    while i < tokens.len() {
        let Some(end) = attribute_end(tokens, i) else {
            rest.push(tokens[i]);
            i += 1;
            continue;
        };
        for part in split(&tokens[i + 2..end - 2]) {
            let open = part.iter().position(|t| t.is("("));
            let name = text(&part[..open.unwrap_or(part.len())]);
            let value = open.and_then(|o| Some(text(&part[o + 1..close(part, o)?])));
            attributes.push(Attribute { name, value });
        }
        i = end;
    }
    (attributes, rest)
}

/// Reads the parameters between a kernel's parentheses.
///
/// # Errors
/// A parameter without a name.
pub(crate) fn parameters(
    tokens: &[Token<'_>],
    place: &dyn Fn(&Token<'_>) -> String,
) -> Result<Vec<Parameter>, Error> {
    let mut out = Vec::new();
    for part in split(tokens) {
        let (attributes, rest) = take_attributes(part);
        let last = rest.iter().rposition(|t| t.kind == Kind::Word);
        let at = last.filter(|&l| rest[..l].iter().any(|t| t.kind == Kind::Word));
        let Some(at) = at else {
            let first = solid(part, 0).unwrap_or(0);
            let what = text(part);
            return Err(Error::compile(format!(
                "{}: the kernel parameter '{what}' has no name",
                place(&part[first])
            )));
        };
        let space = SPACES.into_iter().find(|s| rest.iter().any(|t| t.is(s)));
        let kept: Vec<Token<'_>> = rest[..at]
            .iter()
            .filter(|t| t.kind == Kind::Blank || !SPACES.contains(&t.text))
            .copied()
            .collect();
        let pointer = kept.iter().position(|t| t.is("*") || t.is("&")).unwrap_or(kept.len());
        out.push(Parameter {
            name: rest[at].text.to_owned(),
            type_text: text(&kept).trim().to_owned(),
            space,
            read_only: kept[..pointer].iter().any(|t| t.is("const")),
            attributes,
        });
    }
    Ok(out)
}

/// The name in the run-time header of where a built-in value comes from.
pub(crate) fn built_in(attribute: &str) -> Option<&'static str> {
    Some(match attribute {
        "thread_position_in_grid" => "POSITION_IN_GRID",
        "threadgroup_position_in_grid" => "GROUP_IN_GRID",
        "thread_position_in_threadgroup" => "POSITION_IN_GROUP",
        "thread_index_in_threadgroup" => "INDEX_IN_GROUP",
        "thread_index_in_simdgroup" => "LANE",
        "simdgroup_index_in_threadgroup" => "SIMDGROUP",
        "threads_per_threadgroup" | "dispatch_threads_per_threadgroup" => "THREADS_PER_GROUP",
        "threadgroups_per_grid" => "GROUPS_PER_GRID",
        "threads_per_grid" => "THREADS_PER_GRID",
        "threads_per_simdgroup" | "thread_execution_width" => "SIMD_WIDTH",
        "simdgroups_per_threadgroup" | "dispatch_simdgroups_per_threadgroup" => {
            "SIMDGROUPS_PER_GROUP"
        }
        "grid_origin" => "GRID_ORIGIN",
        _ => return None,
    })
}

/// What is wrong with the type of a built-in parameter: these are `ushort` or `uint`, an index has one component, and a position
/// and its size are of one type.
pub(crate) fn wrong_built_in(parameters: &[Parameter]) -> Option<String> {
    let of = |p: &Parameter| p.attributes.iter().find_map(|a| built_in(&a.name));
    let plain = |p: &Parameter| p.type_text.replace("const ", "").replace(" const", "");
    let mut found: Vec<(&str, String, &str)> = Vec::new();
    for p in parameters {
        let Some(source) = of(p) else { continue };
        let kind = plain(p);
        let scalar = kind.trim_end_matches(['2', '3']);
        if !["uint", "ushort", "uint32_t", "uint16_t"].contains(&scalar) {
            return Some(format!("parameter '{}' is {kind} and has to be uint or ushort", p.name));
        }
        let index = !matches!(
            source,
            "POSITION_IN_GRID"
                | "GROUP_IN_GRID"
                | "POSITION_IN_GROUP"
                | "THREADS_PER_GROUP"
                | "GROUPS_PER_GRID"
                | "THREADS_PER_GRID"
        );
        if index && scalar != kind {
            return Some(format!("parameter '{}' is {kind} and has one component", p.name));
        }
        found.push((source, kind, &p.name));
    }
    let pairs = [
        ("POSITION_IN_GRID", "THREADS_PER_GRID"),
        ("POSITION_IN_GROUP", "THREADS_PER_GROUP"),
        ("GROUP_IN_GRID", "GROUPS_PER_GRID"),
    ];
    for (a, b) in pairs {
        let one = |s: &str| found.iter().find(|(source, ..)| *source == s);
        if let (Some(a), Some(b)) = (one(a), one(b))
            && a.1 != b.1
        {
            return Some(format!(
                "'{}' is {} and '{}' is {}: a position and its size are of one type",
                a.2, a.1, b.2, b.1
            ));
        }
    }
    None
}
