//! From a grammar to the constraint of one request. It knows `llguidance` and its limits; it knows no format but by
//! the modules that turn them into what `llguidance` reads.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use fornax_plan::TokenId;
use fornax_text::Tokenizer;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory, panic_utils};
use serde_json::json;

use super::worker::ConstraintWorker;
use super::{Grammar, gbnf, lark, limits, schema, trie};
use crate::serve::{BitSet, Constraint};
use crate::{Error, Result};

/// Grammars that stay compiled; an agent sends the same few over and over.
const KEPT: usize = 16;
/// Threads that compute masks, for all requests of a model: a mask takes far less than a step.
const WORKERS: usize = 1;

/// Compiles grammars for one model.
///
/// The tree of its tokens is built once: by [`Constrainer::prepare`], or when the first grammar comes. `Send + Sync`: one compilation runs at a time,
/// others wait; a server compiles where waiting hurts nobody.
pub struct Constrainer {
    tokenizer: Arc<Tokenizer>,
    factory: OnceLock<std::result::Result<ParserFactory, String>>,
    kept: Mutex<VecDeque<(String, Compiled)>>,
    /// Where masks are computed ahead; none where no thread could be had.
    worker: OnceLock<Option<Arc<ConstraintWorker>>>,
}

impl fmt::Debug for Constrainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constrainer").field("ready", &self.factory.get().is_some()).finish()
    }
}

/// A grammar made ready for one model; any number of requests start from it.
#[derive(Clone)]
pub struct Compiled {
    matcher: Arc<Mutex<Matcher>>,
    worker: Option<Arc<ConstraintWorker>>,
}

impl fmt::Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiled").finish_non_exhaustive()
    }
}

impl Constrainer {
    /// For the model of this tokenizer. Costs nothing until a grammar comes.
    pub fn new(tokenizer: &Arc<Tokenizer>) -> Constrainer {
        Constrainer {
            tokenizer: Arc::clone(tokenizer),
            factory: OnceLock::new(),
            kept: Mutex::new(VecDeque::new()),
            worker: OnceLock::new(),
        }
    }

    /// Reads the tokens of the model, which the first grammar would do otherwise: some 0.4 s for a
    /// vocabulary of 50,000, several for the largest. Grammars that come meanwhile wait.
    ///
    /// # Errors
    /// `is_request` where the tokens cannot be read as grammars need them.
    pub fn prepare(&self) -> Result<()> {
        self.factory().map(drop)
    }

    /// Whether [`Constrainer::prepare`] or a first grammar has read the tokens.
    pub fn is_prepared(&self) -> bool {
        self.factory.get().is_some()
    }

    fn factory(&self) -> Result<&ParserFactory> {
        let factory = self.factory.get_or_init(|| factory(&self.tokenizer));
        factory.as_ref().map_err(|e| Error::request(e.clone()))
    }

    /// Makes a grammar ready.
    ///
    /// Takes milliseconds for what people write and is bounded for what nobody should: in size, depth, and work.
    ///
    /// # Errors
    /// `is_unsupported` where something in it cannot be enforced, by name and place; `is_request` where it is broken,
    /// too large, or allows nothing.
    pub fn compile(&self, grammar: &Grammar) -> Result<Compiled> {
        check_size(grammar)?;
        // Not the grammar itself: objects are equal whatever the order of their keys, and here it matters.
        let key = format!("{grammar:?}");
        // Held throughout: hostile grammars wait for each other instead of taking all processors.
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = kept.iter().position(|(known, _)| *known == key) {
            let found = kept.remove(at).expect("invariant: the position is there");
            let compiled = found.1.clone();
            kept.push_front(found);
            return Ok(compiled);
        }
        let compiled = on_deep_stack(grammar, || self.build(grammar))?;
        kept.push_front((key, compiled.clone()));
        kept.truncate(KEPT);
        Ok(compiled)
    }

    fn build(&self, grammar: &Grammar) -> Result<Compiled> {
        let init = prepare(grammar, &self.tokenizer)?;
        let factory = self.factory()?;
        let parser =
            panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| factory.create_parser(init)));
        let mut matcher = Matcher::new(parser);
        // The first mask finds out whether the grammar allows anything, and fills the lexer's tables for all requests.
        match matcher.compute_mask_or_eos() {
            Ok(mask) if !mask.is_zero() => {}
            Ok(_) => return Err(nothing(grammar)),
            Err(e) => return Err(refusal(grammar, &e.to_string())),
        }
        let vocab = self.tokenizer.vocab_len();
        let worker = || ConstraintWorker::new(WORKERS, vocab).ok().map(Arc::new);
        let worker = self.worker.get_or_init(worker).clone();
        Ok(Compiled { matcher: Arc::new(Mutex::new(matcher)), worker })
    }
}

impl Compiled {
    /// The constraint of a request, at its start. Its masks are computed on a thread of the [`Constrainer`], while the
    /// model's step runs; the first one begins now.
    pub fn start(&self) -> Box<dyn Constraint> {
        match &self.worker {
            Some(worker) => worker.overlap(self.start_here()),
            None => self.start_here(),
        }
    }

    /// As [`Compiled::start`], each mask computed when and where it is asked for.
    pub fn start_here(&self) -> Box<dyn Constraint> {
        let matcher = self.matcher.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        Box::new(Running { matcher })
    }
}

/// The state of one request.
struct Running {
    matcher: Matcher,
}

impl Constraint for Running {
    fn mask(&mut self, allowed: &mut BitSet) -> Result<()> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|e| stuck(&e.to_string()))?;
        allowed.copy_from_words(mask.as_slice());
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<()> {
        self.matcher.consume_token(token).map_err(|e| {
            Error::request(format!(
                "taking token {token}: the grammar does not allow it here ({})",
                first_line(&e.to_string())
            ))
        })
    }

    fn may_end(&mut self) -> bool {
        self.matcher.is_accepting().unwrap_or(false)
    }

    fn is_done(&mut self) -> bool {
        self.matcher.is_stopped() && self.matcher.stop_reason().is_ok()
    }
}

/// # Errors
/// `is_request` where the grammar is too large to be looked at.
fn check_size(grammar: &Grammar) -> Result<()> {
    match grammar {
        Grammar::JsonSchema(schema) => limits::json("the JSON schema", schema),
        Grammar::JsonObject => Ok(()),
        Grammar::Regex(text) => limits::regex("the regular expression", text),
        Grammar::Lark(text) | Grammar::Gbnf(text) => {
            limits::length(&grammar.to_string(), text, limits::BYTES)
        }
        Grammar::Choice(texts) => {
            let bytes: usize = texts.iter().map(String::len).sum();
            if texts.is_empty() || texts.len() > limits::CHOICES || bytes > limits::BYTES {
                return Err(Error::request(format!(
                    "the list of choices has {} texts of {bytes} bytes together, expected 1 to {} and at most {}",
                    texts.len(),
                    limits::CHOICES,
                    limits::BYTES
                )));
            }
            Ok(())
        }
    }
}

/// The grammar as `llguidance` reads it.
///
/// # Errors
/// As [`Constrainer::compile`].
fn prepare(grammar: &Grammar, tokenizer: &Tokenizer) -> Result<TopLevelGrammar> {
    Ok(match grammar {
        Grammar::JsonSchema(value) => TopLevelGrammar::from_json_schema(schema::prepare(value)?),
        Grammar::JsonObject => {
            TopLevelGrammar::from_json_schema(schema::prepare(&json!({"type": "object"}))?)
        }
        Grammar::Regex(pattern) => TopLevelGrammar::from_regex(lark::whole(pattern)),
        Grammar::Lark(text) => TopLevelGrammar::from_lark(lark::prepare(text)?),
        Grammar::Gbnf(text) => {
            let text = gbnf::to_lark(text, &|piece| tokenizer.token_id(piece))?;
            TopLevelGrammar::from_lark(text)
        }
        Grammar::Choice(texts) => {
            TopLevelGrammar::from_lark(format!("start: /{}/", lark::any_of(texts)))
        }
    })
}

fn factory(tokenizer: &Tokenizer) -> std::result::Result<ParserFactory, String> {
    let environment = trie::environment(tokenizer);
    let slices = llguidance::earley::SlicedBiasComputer::general_slices();
    let made = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices);
    let mut made =
        made.map_err(|e| format!("reading the tokens of the model for a grammar: {e}"))?;
    made.quiet();
    *made.limits_mut() = limits::parser();
    Ok(made)
}

/// Runs on a thread whose stack is known to suffice for what [`limits`] lets through.
fn on_deep_stack<T: Send>(grammar: &Grammar, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let failed = |why: &str| Error::request(format!("compiling {grammar}: {why}"));
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(limits::STACK);
        let thread = thread
            .spawn_scoped(scope, work)
            .map_err(|e| failed(&format!("no thread could be had: {e}")))?;
        thread.join().unwrap_or_else(|_| Err(failed("its compilation broke down")))
    })
}

fn nothing(grammar: &Grammar) -> Error {
    Error::request(format!("{grammar} allows no text that this model can write"))
}

/// What `llguidance` says of a grammar, in a sentence that names the matter.
fn refusal(grammar: &Grammar, message: &str) -> Error {
    let why = first_line(message);
    if why.contains("NoExtensionBias") {
        return nothing(grammar);
    }
    Error::unsupported(format!("{grammar} cannot be enforced: {why}"))
}

fn stuck(message: &str) -> Error {
    Error::request(format!(
        "holding the answer to its grammar: no token can follow, or finding it takes too much ({})",
        first_line(message)
    ))
}

/// The part of a message that is for people: no state, no backtrace, and of a broken regular expression the reason.
fn first_line(message: &str) -> &str {
    let end = message.find("\n<").unwrap_or(message.len());
    let mut lines = message[..end].trim().lines();
    let first = lines.next().unwrap_or_default();
    lines.find_map(|line| line.strip_prefix("error: ")).unwrap_or(first)
}
