//! An answer that is given at once: pieces gathered by choice. Knows no protocol.

use crate::live::{End, Live, Piece, Usage};
use crate::refusal::Refusal;
use crate::tokens::Logprob;

/// A function's call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) id: String,
    pub(crate) name: String,
    /// JSON text.
    pub(crate) arguments: String,
}

/// One choice, whole.
#[derive(Clone, Debug, Default)]
pub(crate) struct Whole {
    pub(crate) text: String,
    pub(crate) reasoning: String,
    pub(crate) calls: Vec<Call>,
    pub(crate) logprobs: Vec<Logprob>,
    pub(crate) prompt: Vec<Logprob>,
    pub(crate) end: Option<End>,
}

impl Whole {
    pub(crate) fn usage(&self) -> Usage {
        self.end.as_ref().map_or(Usage::default(), |end| end.usage)
    }
}

/// Waits for the whole of every choice.
///
/// # Errors
/// When the engine failed or time is up.
pub(crate) async fn gather(mut live: Live, choices: usize) -> Result<Vec<Whole>, Refusal> {
    let mut all = vec![Whole::default(); choices];
    while let Some((choice, piece)) = live.next().await? {
        let whole = &mut all[choice];
        match piece {
            Piece::Prompt(mut logprobs) => whole.prompt.append(&mut logprobs),
            Piece::Text(mut certain) => {
                whole.text += &certain.text;
                whole.logprobs.append(&mut certain.logprobs);
            }
            Piece::Reasoning(mut certain) => {
                whole.reasoning += &certain.text;
                whole.logprobs.append(&mut certain.logprobs);
            }
            Piece::Call { id, name, .. } => {
                whole.calls.push(Call { id, name, arguments: String::new() });
            }
            Piece::Arguments { index, fragment } => {
                if let Some(call) = whole.calls.get_mut(index) {
                    call.arguments += &fragment;
                }
            }
            Piece::End(end) => whole.end = Some(end),
        }
    }
    Ok(all)
}
