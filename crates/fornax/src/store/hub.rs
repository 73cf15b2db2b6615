//! What is particular to the Hugging Face hub: its URLs, the list of a repository's files, and which of them is meant.
//! Brings no model bytes itself.

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::http::{Client, Remote};
use crate::flags::high::HubConfig;

/// Without a wish, the first of these that a repository has: small, and close to the full model.
const PREFERRED: &[&str] = &["q4_k_m", "q8_0", "q4_0", "q4_1", "q5_k_m", "q6_k", "f16", "bf16"];

#[derive(Deserialize)]
struct Listing {
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

/// Where a file of the main branch is.
pub(crate) fn remote(hub: &HubConfig, repo: &str, file: &str) -> Remote {
    let url = format!("{}/{}/resolve/main/{}", hub.endpoint, escape(repo), escape(file));
    Remote { url, token: hub.token.clone() }
}

/// The file that is meant: named in full, by its quantisation, or the repository's most useful one.
/// A model in several parts is all of its parts, the first one first.
///
/// # Errors
/// When the hub cannot be reached, the repository is not there, or has no such file.
pub(crate) fn choose(
    client: &Client,
    hub: &HubConfig,
    repo: &str,
    wish: Option<&str>,
) -> Result<Vec<String>> {
    if let Some(file) = wish.filter(|w| w.ends_with(".gguf") && shard(w).is_none()) {
        return Ok(vec![file.to_owned()]);
    }
    let url = format!("{}/api/models/{}", hub.endpoint, escape(repo));
    let text = client.text(&Remote { url: url.clone(), token: hub.token.clone() })?;
    let listing: Listing = serde_json::from_str(&text)
        .with_context(|| format!("the answer of {url} is no list of files"))?;
    let names: Vec<String> = listing.siblings.into_iter().map(|s| s.rfilename).collect();
    pick(&names, repo, wish)
}

fn pick(names: &[String], repo: &str, wish: Option<&str>) -> Result<Vec<String>> {
    let models: Vec<&String> = names
        .iter()
        .filter(|n| n.ends_with(".gguf") && !n.to_ascii_lowercase().contains("mmproj"))
        .filter(|n| shard(n).is_none_or(|s| s.index == 1))
        .collect();
    let with = |tag: &str| models.iter().copied().find(|n| has_tag(n, tag));
    let found = match wish {
        Some(wish) if wish.ends_with(".gguf") => models.iter().copied().find(|n| *n == wish),
        Some(wish) => with(wish),
        None => PREFERRED.iter().find_map(|tag| with(tag)).or_else(|| models.first().copied()),
    };
    let Some(found) = found else {
        let has: Vec<&str> = models.iter().map(|n| n.as_str()).collect();
        let wish = wish.unwrap_or("a GGUF file");
        bail!(
            "{repo} has no {wish}; it has: {}",
            if has.is_empty() { "none".into() } else { has.join(", ") }
        );
    };
    match shard(found) {
        None => Ok(vec![found.clone()]),
        Some(first) => Ok((1..=first.count).map(|i| first.name(i)).collect()),
    }
}

/// Whether the quantisation `tag` stands in a file's name between its separators.
fn has_tag(name: &str, tag: &str) -> bool {
    let (name, tag) = (name.to_ascii_lowercase(), tag.to_ascii_lowercase());
    let base = name.rsplit('/').next().unwrap_or(&name);
    base.match_indices(&tag).any(|(at, _)| {
        let border = |c: Option<char>| c.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '_');
        border(base[..at].chars().next_back()) && border(base[at + tag.len()..].chars().next())
    })
}

/// One part of a model in several files: `PREFIX-00002-of-00003.gguf`.
struct Shard<'a> {
    prefix: &'a str,
    index: u32,
    count: u32,
}

impl Shard<'_> {
    fn name(&self, index: u32) -> String {
        format!("{}-{index:05}-of-{:05}.gguf", self.prefix, self.count)
    }
}

fn shard(name: &str) -> Option<Shard<'_>> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (prefix, index) = rest.rsplit_once('-')?;
    let five = |t: &str| (t.len() == 5).then(|| t.parse::<u32>().ok()).flatten();
    Some(Shard { prefix, index: five(index)?, count: five(count).filter(|n| *n > 0)? })
}

/// Percent-encodes all but unreserved characters and the slash.
fn escape(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                out.push(char::from(byte));
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|&n| n.to_owned()).collect()
    }

    #[test]
    fn the_meant_file_is_found() {
        let all = names(&[
            "README.md",
            "m.Q8_0.gguf",
            "m-IQ4_K_M.gguf",
            "m-Q4_K_M.gguf",
            "mmproj-f16.gguf",
        ]);
        let pick = |wish| pick(&all, "o/r", wish);
        assert_eq!(pick(None).unwrap(), ["m-Q4_K_M.gguf"]);
        assert_eq!(pick(Some("q8_0")).unwrap(), ["m.Q8_0.gguf"]);
        let text = pick(Some("q2_k")).unwrap_err().to_string();
        assert_eq!(text, "o/r has no q2_k; it has: m.Q8_0.gguf, m-IQ4_K_M.gguf, m-Q4_K_M.gguf");
    }

    #[test]
    fn a_model_in_parts_is_all_of_them() {
        let all = names(&["x/m-q4_0-00002-of-00002.gguf", "x/m-q4_0-00001-of-00002.gguf"]);
        let want = ["x/m-q4_0-00001-of-00002.gguf", "x/m-q4_0-00002-of-00002.gguf"];
        assert_eq!(pick(&all, "o/r", Some("Q4_0")).unwrap(), want);
        assert_eq!(pick(&all, "o/r", None).unwrap(), want);
    }

    #[test]
    fn urls_are_escaped() {
        assert_eq!(escape("a b/ü#?"), "a%20b/%C3%BC%23%3F");
    }
}
