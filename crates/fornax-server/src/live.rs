//! A request under way: updates of the engine become pieces of answers. Knows no protocol: what a piece looks
//! like in JSON is the endpoint's.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use axum::http::StatusCode;
use fornax_engine::serve::{Done, Finish, TokenUpdate, Update};

use crate::backend::Served;
use crate::metrics::Metrics;
use crate::order::{Order, Submitted};
use crate::refusal::Refusal;
use crate::tokens::{Certain, Logprob, TokenReader};
use crate::turn::{Turn, TurnFormat, TurnPiece};

/// How the text of an answer is to be read.
#[derive(Clone, Debug)]
pub(crate) enum Reading {
    /// It goes on from the prompt and is nothing but text.
    Continued,
    /// It is an assistant's turn.
    Turn(TurnFormat),
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Piece {
    /// Tokens of the prompt, where their log-probabilities were asked for.
    Prompt(Vec<Logprob>),
    Text(Certain),
    Reasoning(Certain),
    /// A call begins.
    Call {
        index: usize,
        id: String,
        name: String,
    },
    /// More of a call's arguments, JSON text.
    Arguments {
        index: usize,
        fragment: String,
    },
    End(End),
}

/// Why and how an answer ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct End {
    pub(crate) reason: Reason,
    /// The stop string that ended it, by its place in the list.
    pub(crate) stop: Option<usize>,
    pub(crate) usage: Usage,
    /// The pooled vector, where one was asked for.
    pub(crate) hidden: Option<Vec<f32>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Stop,
    Length,
    Calls,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt: u32,
    pub(crate) cached: u32,
    pub(crate) generated: u32,
    /// Of those, tokens of thoughts.
    pub(crate) reasoning: u32,
}

impl Usage {
    /// Over all choices: prompts count once for each prompt.
    pub(crate) fn sum(all: &[Usage], n: usize) -> Usage {
        let mut sum = Usage::default();
        for (i, usage) in all.iter().enumerate() {
            if i % n.max(1) == 0 {
                sum.prompt += usage.prompt;
                sum.cached += usage.cached;
            }
            sum.generated += usage.generated;
            sum.reasoning += usage.reasoning;
        }
        sum
    }
}

/// A request under way. Dropping it cancels what is left.
pub(crate) struct Live {
    submitted: Submitted,
    served: Arc<Served>,
    choices: Vec<Choice>,
    ready: VecDeque<(usize, Piece)>,
    deadline: Option<Instant>,
    started: Instant,
    metrics: Arc<Metrics>,
}

struct Choice {
    reader: TokenReader,
    turn: Option<Turn>,
    usage: Usage,
    /// Bytes of the prompt that its log-probabilities were given for.
    prompt_bytes: usize,
    last: Option<Instant>,
    called: bool,
}

impl Live {
    /// Hands the order to the engine.
    ///
    /// # Errors
    /// Why it is not taken.
    pub(crate) fn start(order: &Order, metrics: Arc<Metrics>) -> Result<Live, Refusal> {
        let submitted = order.submit()?;
        let choice = |index: usize| Choice {
            reader: TokenReader::new(
                order.served.model.tokenizer().clone(),
                &order.stops,
                order.logprobs.is_some(),
                matches!(order.reading, Reading::Continued),
                !matches!(&order.reading, Reading::Turn(format) if format.keeps_special()),
            ),
            turn: match &order.reading {
                Reading::Continued => None,
                Reading::Turn(format) => Some(format.start()),
            },
            usage: Usage {
                prompt: order.prompts[index / order.n].len() as u32,
                ..Usage::default()
            },
            prompt_bytes: 0,
            last: None,
            called: false,
        };
        Ok(Live {
            choices: (0..submitted.choices()).map(choice).collect(),
            submitted,
            served: order.served.clone(),
            ready: VecDeque::new(),
            deadline: order.deadline,
            started: Instant::now(),
            metrics,
        })
    }

    /// The next piece and whose it is; none when every choice has ended.
    ///
    /// # Errors
    /// When the engine failed or time is up; nothing follows.
    pub(crate) async fn next(&mut self) -> Result<Option<(usize, Piece)>, Refusal> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Ok(Some(piece));
            }
            if !self.submitted.any_open() {
                return Ok(None);
            }
            let update = match self.deadline {
                None => self.submitted.next().await,
                Some(at) => tokio::time::timeout_at(at.into(), self.submitted.next())
                    .await
                    .map_err(|_| too_late())?,
            };
            let lost = || Refusal::failed("the engine ended without an answer");
            let (choice, update) = update.ok_or_else(lost)?;
            if self.submitted.is_open(choice) {
                self.take(choice, update)?;
            }
        }
    }

    fn take(&mut self, index: usize, update: Update) -> Result<(), Refusal> {
        let choice = &mut self.choices[index];
        match update {
            Update::Started { cached } => choice.usage.cached = cached,
            Update::Prompt(tokens) => {
                let piece = choice.prompt(&self.served, &tokens);
                self.ready.push_back((index, piece));
            }
            Update::Tokens(tokens) => {
                choice.time(tokens.len(), self.started, &self.metrics);
                for token in &tokens {
                    let certain = choice.token(token);
                    let stopped = certain.stopped;
                    choice.show(index, certain, &mut self.ready);
                    if stopped.is_some() {
                        self.end(index, Finish::Stop, stopped, None);
                        self.submitted.cancel(index);
                        break;
                    }
                }
            }
            Update::Done(Done { finish, hidden, cached, .. }) => {
                self.submitted.ended(index);
                choice.usage.cached = cached;
                if finish == Finish::Cancelled {
                    return Err(Refusal::failed("the engine gave the request up; it is ending"));
                }
                let certain = self.choices[index].reader.finish();
                let stopped = certain.stopped;
                self.choices[index].show(index, certain, &mut self.ready);
                let finish = if stopped.is_some() { Finish::Stop } else { finish };
                self.end(index, finish, stopped, hidden);
            }
            Update::Failed(error) => {
                self.submitted.ended(index);
                let late = self.deadline.is_some_and(|at| at <= Instant::now());
                let refusal = if error.is_request() && !late {
                    Refusal::field("", error.to_string())
                } else if late {
                    too_late()
                } else {
                    Refusal::failed(error.to_string())
                };
                return Err(refusal);
            }
        }
        Ok(())
    }

    fn end(&mut self, index: usize, finish: Finish, stop: Option<usize>, hidden: Option<Vec<f32>>) {
        let choice = &mut self.choices[index];
        if let Some(mut turn) = choice.turn.take() {
            let pieces = turn.finish();
            choice.hand_on(index, pieces, Vec::new(), &mut self.ready);
        }
        let reason = match finish {
            Finish::Length => Reason::Length,
            _ if choice.called => Reason::Calls,
            _ => Reason::Stop,
        };
        self.metrics.ended(self.started.elapsed(), choice.usage);
        let end = End { reason, stop, usage: choice.usage, hidden };
        self.ready.push_back((index, Piece::End(end)));
    }
}

impl Choice {
    fn prompt(&mut self, served: &Served, tokens: &[TokenUpdate]) -> Piece {
        let tokenizer = served.model.tokenizer();
        let mut all = Vec::with_capacity(tokens.len());
        for token in tokens {
            all.push(Logprob::new(tokenizer, token, self.prompt_bytes));
            self.prompt_bytes += tokenizer.token_bytes(token.id).len();
        }
        Piece::Prompt(all)
    }

    fn time(&mut self, tokens: usize, started: Instant, metrics: &Metrics) {
        let now = Instant::now();
        match self.last {
            None => metrics.first_token(now - started),
            Some(last) => metrics.tokens_after(now - last, tokens),
        }
        self.last = Some(now);
    }

    fn token(&mut self, token: &TokenUpdate) -> Certain {
        self.usage.generated += 1;
        if self.turn.as_ref().is_some_and(Turn::is_reasoning) {
            self.usage.reasoning += 1;
        }
        self.reader.push(token)
    }

    /// Hands on what is certain, as what the turn's format makes of it.
    fn show(&mut self, index: usize, certain: Certain, ready: &mut VecDeque<(usize, Piece)>) {
        if certain.text.is_empty() && certain.logprobs.is_empty() {
            return;
        }
        match &mut self.turn {
            None => ready.push_back((index, Piece::Text(certain))),
            Some(turn) => {
                let pieces = turn.push(&certain.text);
                self.hand_on(index, pieces, certain.logprobs, ready);
            }
        }
    }

    fn hand_on(
        &mut self,
        index: usize,
        pieces: Vec<TurnPiece>,
        mut logprobs: Vec<Logprob>,
        ready: &mut VecDeque<(usize, Piece)>,
    ) {
        for piece in pieces {
            let certain = |text, logprobs| Certain { text, logprobs, stopped: None };
            let piece = match piece {
                TurnPiece::Text(text) => Piece::Text(certain(text, std::mem::take(&mut logprobs))),
                TurnPiece::Reasoning(text) => {
                    Piece::Reasoning(certain(text, std::mem::take(&mut logprobs)))
                }
                TurnPiece::Call { index, id, name } => {
                    self.called = true;
                    Piece::Call { index, id, name }
                }
                TurnPiece::Arguments { index, fragment } => Piece::Arguments { index, fragment },
            };
            ready.push_back((index, piece));
        }
        if !logprobs.is_empty() {
            // Their text is markup, or still held back.
            let bare = Certain { text: String::new(), logprobs, stopped: None };
            ready.push_back((index, Piece::Text(bare)));
        }
    }
}

fn too_late() -> Refusal {
    let said = "the request took longer than this server allows";
    Refusal::new(StatusCode::GATEWAY_TIMEOUT, said).with_code("timeout")
}
