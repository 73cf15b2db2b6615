//! Rewrites what Hugging Face's Jinja has and minijinja has not. It must not know what templates mean.

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
