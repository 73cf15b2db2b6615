//! Rewrites what Hugging Face's Jinja has and minijinja has not. It must not know what templates mean.

use crate::Error;

/// Longest source that is parsed; the longest templates of released models have some 20 KiB.
const SOURCE_BYTES_MAX: usize = 1 << 20;
/// Operators in one tag, and alternatives (`elif`) in the whole source. Each is a level of recursion for the
/// parser and the compiler, which would exhaust the stack at some 4,000.
const CHAIN_MAX: usize = 1000;

/// Refuses sources that would exhaust the stack while they are parsed.
///
/// # Errors
/// `is_template` for a source that is too long or has a chain of operators that is.
pub(super) fn check_size(source: &str) -> Result<(), Error> {
    let too_long = |what: &str, found: usize, most: usize| {
        Err(Error::template(format!(
            "parsing the chat template: {what}: {found}, at most {most} are read; no sound template is like that"
        )))
    };
    if source.len() > SOURCE_BYTES_MAX {
        return too_long("its length in bytes", source.len(), SOURCE_BYTES_MAX);
    }
    let mut alternatives = 0;
    let mut rest = source;
    while let Some((at, tag)) = next_tag(rest) {
        rest = &rest[at..];
        let len = match tag {
            b'#' => rest.find("#}").map_or(rest.len(), |i| i + 2),
            _ => end_of_tag(rest, if tag == b'%' { "%}" } else { "}}" }),
        };
        if tag != b'#' {
            alternatives += usize::from(tag == b'%' && tag_name(rest).1 == "elif");
            let found = operators(&rest[..len]);
            if found > CHAIN_MAX {
                return too_long("operators in one tag", found, CHAIN_MAX);
            }
        }
        rest = &rest[len..];
    }
    if alternatives > CHAIN_MAX {
        return too_long("its elif tags", alternatives, CHAIN_MAX);
    }
    Ok(())
}

/// Signs and words in a tag, outside its strings, that may be a level of an expression. Commas and colons
/// are not counted: lists and mappings are as long as they like.
fn operators(tag: &str) -> usize {
    let bytes = tag.as_bytes();
    let mut count = 0;
    let mut i = 0;
    while i < bytes.len() {
        match bytes[i] {
            quote @ (b'\'' | b'"') => {
                i += 1;
                while i < bytes.len() && bytes[i] != quote {
                    i += if bytes[i] == b'\\' { 2 } else { 1 };
                }
            }
            b'a'..=b'z' => {
                let len = bytes[i..].iter().take_while(|b| b.is_ascii_lowercase()).count();
                let word = &bytes[i..i + len];
                let words: [&[u8]; 6] = [b"not", b"and", b"or", b"if", b"is", b"in"];
                count += usize::from(words.contains(&word));
                i += len - 1;
            }
            b'.' | b'|' | b'~' | b'+' | b'-' | b'*' | b'/' | b'%' | b'[' | b'(' | b'<' | b'>'
            | b'=' => count += 1,
            _ => {}
        }
        i += 1;
    }
    count
}

/// The source with `{% generation %}` and `{% endgeneration %}` made transparent.
///
/// The tags mark what an assistant wrote, for training; rendering ignores them. They become a condition
/// that always holds, so that white space is trimmed around them as around any tag.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((at, tag)) = next_tag(rest) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let len = match tag {
            b'#' => rest.find("#}").map_or(rest.len(), |i| i + 2),
            b'{' => end_of_tag(rest, "}}"),
            _ => {
                let (lead, name) = tag_name(rest);
                if name == "raw" {
                    end_of_raw(rest)
                } else {
                    let replaced = match name {
                        "generation" => Some("if true"),
                        "endgeneration" => Some("endif"),
                        _ => None,
                    };
                    if let Some(replaced) = replaced {
                        out.push_str(&rest[..lead]);
                        out.push_str(replaced);
                        rest = &rest[lead + name.len()..];
                        // What is left of the tag has no opening of its own any more.
                        let end = rest.find("%}").map_or(rest.len(), |i| i + 2);
                        out.push_str(&rest[..end]);
                        rest = &rest[end..];
                        continue;
                    }
                    end_of_tag(rest, "%}")
                }
            }
        };
        out.push_str(&rest[..len]);
        rest = &rest[len..];
    }
    out.push_str(rest);
    out
}

/// Where the next tag, expression or comment opens, and its second character.
fn next_tag(text: &str) -> Option<(usize, u8)> {
    let bytes = text.as_bytes();
    (0..bytes.len().saturating_sub(1))
        .find(|&i| bytes[i] == b'{' && matches!(bytes[i + 1], b'%' | b'{' | b'#'))
        .map(|i| (i, bytes[i + 1]))
}

/// The length of what precedes a tag's name, and the name.
fn tag_name(tag: &str) -> (usize, &str) {
    let inner = &tag[2..];
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner).trim_start();
    let lead = tag.len() - inner.len();
    let len = inner.bytes().take_while(|b| b.is_ascii_alphanumeric() || *b == b'_').count();
    (lead, &inner[..len])
}

/// The length of a tag up to and with its end, which a string in it may mention.
fn end_of_tag(tag: &str, end: &str) -> usize {
    let bytes = tag.as_bytes();
    let mut i = 2;
    while i < bytes.len() {
        match bytes[i] {
            quote @ (b'\'' | b'"') => {
                i += 1;
                while i < bytes.len() && bytes[i] != quote {
                    i += if bytes[i] == b'\\' { 2 } else { 1 };
                }
                i += 1;
            }
            _ if tag.as_bytes()[i..].starts_with(end.as_bytes()) => return i + end.len(),
            _ => i += 1,
        }
    }
    tag.len()
}

/// The length from a `{% raw %}` to the end of its `{% endraw %}`.
fn end_of_raw(text: &str) -> usize {
    let mut at = end_of_tag(text, "%}");
    while let Some(i) = text[at..].find("{%") {
        at += i;
        if tag_name(&text[at..]).1 == "endraw" {
            return at + end_of_tag(&text[at..], "%}");
        }
        at += 2;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::without_generation_tags as rewrite;

    #[test]
    fn only_tags_are_rewritten() {
        assert_eq!(
            rewrite("a{%- generation -%}b{% endgeneration%}"),
            "a{%- if true -%}b{% endif%}"
        );
        for same in [
            "{# {% generation %} #}",
            "{{ '{% generation %}' }}",
            "{% raw %}{% generation %}{% endraw %}",
            "{% if x == '%}{% generation %}' %}{% endif %}",
            "generation {% set generation = 1 %}{{ generation }}",
            "{% generations %}",
            "{",
            "{% generatio",
            "{{ 'é",
            "{{ '\\",
        ] {
            assert_eq!(rewrite(same), same);
        }
    }
}
