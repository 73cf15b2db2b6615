//! Perplexity over a text by a sliding window. It knows tokens alone.

use fornax_plan::TokenId;

use crate::error::{Error, Result};
use crate::session::Session;

/// What a text measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perplexity {
    /// `exp` of the mean negative log-probability.
    pub value: f64,
    /// Standard error of `value`, from the spread of the log-probabilities.
    pub standard_error: f64,
    /// Tokens that counted.
    pub tokens: usize,
}

/// Runs windows of `window` tokens, each half a window after the last; in every window but the
/// first only the second half counts, so that each counted token has at least half a window of
/// context. A `first` token (BOS) stands before every window where given.
///
/// # Errors
/// `is_request` for fewer than two tokens or a window that the session has no room for.
pub fn perplexity(
    session: &mut Session,
    tokens: &[TokenId],
    window: usize,
    first: Option<TokenId>,
    mut progress: impl FnMut(usize),
) -> Result<Perplexity> {
    let lead = usize::from(first.is_some());
    if tokens.len() < 2 || window < 4 || window + lead > session.context() as usize {
        return Err(Error::request(format!(
            "perplexity: {} tokens in windows of {window}, expected at least 2 tokens and a window of \
             4 to {}",
            tokens.len(),
            session.context() as usize - lead
        )));
    }
    let (mut sum, mut squares, mut n) = (0.0f64, 0.0f64, 0usize);
    let mut counted_to = 1;
    let mut start = 0;
    while counted_to < tokens.len() {
        let end = tokens.len().min(start + window);
        let part: Vec<TokenId> =
            first.into_iter().chain(tokens[start..end].iter().copied()).collect();
        let logprobs = session.logprobs(&part)?;
        for at in counted_to..end {
            let nll = -f64::from(logprobs[at - start + lead - 1]);
            sum += nll;
            squares += nll * nll;
            n += 1;
        }
        counted_to = end;
        start += window / 2;
        progress(n);
    }
    let mean = sum / n as f64;
    let variance = (squares / n as f64 - mean * mean).max(0.0);
    let value = mean.exp();
    Ok(Perplexity { value, standard_error: value * (variance / n as f64).sqrt(), tokens: n })
}
