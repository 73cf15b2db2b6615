//! Pieces of JSON that several answers have in common. Knows OpenAI's names for them.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use crate::live::{Reason, Usage};
use crate::tokens::Logprob;

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Names the program that answered, as far as its numbers depend on it.
pub(super) const FINGERPRINT: &str = concat!("fornax-", env!("CARGO_PKG_VERSION"));

pub(super) fn reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Stop => "stop",
        Reason::Length => "length",
        Reason::Calls => "tool_calls",
    }
}

pub(super) fn usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": { "cached_tokens": usage.cached },
        "completion_tokens_details": { "reasoning_tokens": usage.reasoning },
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// JSON has no infinity; nothing is less likely than this.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

/// Log-probabilities as chat completions have them.
pub(super) fn chat_logprobs(all: &[Logprob]) -> Value {
    let one = |l: &Logprob| {
        let top = l.top.iter().map(
            |(bytes, p)| json!({ "token": text(bytes), "logprob": finite(*p), "bytes": bytes }),
        );
        json!({
            "token": text(&l.bytes),
            "logprob": l.logprob.map(finite),
            "bytes": l.bytes,
            "top_logprobs": top.collect::<Vec<_>>(),
        })
    };
    json!({ "content": all.iter().map(one).collect::<Vec<_>>(), "refusal": null })
}

/// Log-probabilities as completions have them; `offset` is where the text begins, in characters.
pub(super) fn completion_logprobs<'a>(
    all: impl Iterator<Item = &'a Logprob>,
    offset: &mut usize,
) -> Value {
    let (mut tokens, mut logprobs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for l in all {
        let token = text(&l.bytes);
        offsets.push(*offset);
        *offset += token.chars().count();
        let top: Map<String, Value> =
            l.top.iter().map(|(bytes, p)| (text(bytes), finite(*p).into())).collect();
        tops.push(if l.logprob.is_none() { Value::Null } else { top.into() });
        logprobs.push(l.logprob.map(finite));
        tokens.push(token);
    }
    json!({ "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets })
}
