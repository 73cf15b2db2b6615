//! Fields that several protocols have in common, read into the engine's terms. Knows no endpoint.

use std::sync::Arc;

use fornax_engine::sampler::{Dry, SamplerParams, Xtc};
use fornax_plan::TokenId;
use serde_json::Value;

use crate::backend::Served;
use crate::order::random;
use crate::refusal::Refusal;
use crate::schema::Body;
use crate::schema::shape::integer;

/// How tokens are chosen.
///
/// # Errors
/// 400 where fields contradict each other or the model.
pub(super) fn sampling(body: &Body, served: &Served) -> Result<SamplerParams, Refusal> {
    let mut params = basic(body);
    let window = |field| body.integer(field).and_then(|n| u32::try_from(n).ok());
    params.base.min_p = body.number("min_p").unwrap_or(0.0);
    params.base.frequency_penalty = body.number("frequency_penalty").unwrap_or(0.0);
    params.base.presence_penalty = body.number("presence_penalty").unwrap_or(0.0);
    // The boundary's own word for all is the largest number; -1 does not fit and becomes that.
    params.base.penalty_window = window("repeat_last_n").unwrap_or(u32::MAX);
    params.base.top_k = window("top_k").unwrap_or(0);
    params.base.repeat_penalty =
        match (body.number("repetition_penalty"), body.number("repeat_penalty")) {
            (Some(_), Some(_)) => {
                let said = "repetition_penalty and repeat_penalty are the same; give one of them";
                return Err(Refusal::field("repeat_penalty", said));
            }
            (one, other) => one.or(other).unwrap_or(1.0),
        };
    params.typical_p = body.number("typical_p");
    let xtc = (body.number("xtc_probability"), body.number("xtc_threshold"));
    if let Some(probability) = xtc.0 {
        params.xtc = Some(Xtc { probability, threshold: xtc.1.unwrap_or(0.1) });
    } else if xtc.1.is_some() {
        let said = "xtc_threshold does nothing without xtc_probability";
        return Err(Refusal::field("xtc_threshold", said));
    }
    params.dry = Dry {
        multiplier: body.number("dry_multiplier").unwrap_or(0.0),
        base: body.number("dry_base").unwrap_or(1.75),
        allowed_length: window("dry_allowed_length").unwrap_or(2),
        window: window("dry_penalty_last_n").unwrap_or(u32::MAX),
        breakers: Vec::new(),
    };
    params.logit_bias = logit_bias(body, served)?;
    params.validate().map_err(|e| Refusal::field("", e.to_string()))?;
    Ok(params)
}

/// Temperature, top-p and seed: what every protocol has.
pub(super) fn basic(body: &Body) -> SamplerParams {
    let mut params = SamplerParams::default();
    params.base.temperature = body.number("temperature").unwrap_or(1.0);
    params.base.top_p = body.number("top_p").unwrap_or(1.0);
    params.base.seed = random();
    params
}

/// The seed that a request names; a number below zero means its two's complement.
pub(super) fn seed(body: &Body, params: &mut SamplerParams) {
    if let Some(seed) = body.integer("seed") {
        params.base.seed = seed as u64;
    }
}

fn logit_bias(body: &Body, served: &Served) -> Result<Vec<(TokenId, f32)>, Refusal> {
    let vocab = served.model.tokenizer().vocab_len();
    let mut all = Vec::new();
    for (id, bias) in body.get("logit_bias").and_then(Value::as_object).into_iter().flatten() {
        let known = id.parse::<TokenId>().ok().filter(|id| (*id as usize) < vocab);
        let Some(known) = known else {
            let said = format!("logit_bias: there is no token {id}; the model has {vocab}");
            return Err(Refusal::field("logit_bias", said));
        };
        all.push((known, bias.as_f64().unwrap_or(0.0) as f32));
    }
    Ok(all)
}

/// Stop strings: one or several.
pub(super) fn stops(body: &Body, field: &'static str) -> Vec<String> {
    match body.get(field) {
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(all)) => {
            all.iter().filter_map(|s| s.as_str().map(str::to_owned)).collect()
        }
        _ => Vec::new(),
    }
}

/// A number of tokens: -1 is as many as fit.
pub(super) fn limit(asked: i128) -> u32 {
    if asked < 0 { u32::MAX } else { u32::try_from(asked).unwrap_or(u32::MAX) }
}

/// The number of choices.
pub(super) fn choices(body: &Body) -> usize {
    body.integer("n").and_then(|n| usize::try_from(n).ok()).unwrap_or(1)
}

pub(super) fn priority(body: &Body) -> i32 {
    body.integer("priority").and_then(|p| i32::try_from(p).ok()).unwrap_or(0)
}

/// Whether a stream was asked for, and with usage at its end.
///
/// # Errors
/// 400 for options of a stream that there is none of.
pub(super) fn streaming(body: &Body) -> Result<Option<bool>, Refusal> {
    let stream = body.flag("stream").unwrap_or(false);
    let options = body.get("stream_options");
    if options.is_some() && !stream {
        return Err(Refusal::field("stream_options", "stream_options need stream to be true"));
    }
    let usage = options.is_some_and(|o| o["include_usage"].as_bool() == Some(true));
    Ok(stream.then_some(usage))
}

/// The prompts of a request, as texts or ids, in any of their four forms.
///
/// # Errors
/// 400 for ids that the model does not have.
pub(super) fn prompts(
    value: &Value,
    served: &Served,
    field: &str,
) -> Result<Vec<Vec<TokenId>>, Refusal> {
    let text = |text: &str| {
        let ids = served.model.encode(text);
        let bos = served.model.tokenizer().bos();
        if ids.is_empty() { bos.into_iter().collect() } else { ids }
    };
    let vocab = served.model.tokenizer().vocab_len();
    let ids = |list: &[Value]| -> Result<Vec<TokenId>, Refusal> {
        let known = |v: &Value| integer(v).and_then(|id| TokenId::try_from(id).ok());
        let all = list.iter().map(|v| known(v).filter(|id| (*id as usize) < vocab).ok_or(v));
        all.collect::<Result<_, _>>().map_err(|v| {
            let said = format!("{field}: there is no token {v}; the model has {vocab}");
            Refusal::field(field, said)
        })
    };
    match value {
        Value::String(one) => Ok(vec![text(one)]),
        Value::Array(list) => match list.first() {
            Some(Value::String(_)) => Ok(list.iter().filter_map(Value::as_str).map(text).collect()),
            Some(Value::Array(_)) => {
                list.iter().filter_map(Value::as_array).map(|l| ids(l)).collect()
            }
            _ => Ok(vec![ids(list)?]),
        },
        _ => Err(Refusal::field(field, format!("{field} is missing"))),
    }
}

/// The model that a request names.
///
/// # Errors
/// 404.
pub(super) fn model(app: &crate::app::App, body: &Body) -> Result<Arc<Served>, Refusal> {
    app.model(body.text("model"))
}
