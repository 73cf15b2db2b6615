//! Splits text into the pieces within which merges happen, by the rule that a model was trained with.
//! It must not know tokens.
//!
//! `tokenizer.ggml.pre` names the rule. A wrong rule gives fluent but poorer answers, so an unknown name
//! is an error. Sources: the `pre_tokenizer` of the models' `tokenizer.json`, and for the names of rules
//! llama.cpp's converter.

mod class;
mod rules;
#[cfg(test)]
mod tests;

use crate::Error;
pub(crate) use class::{Ch, byte_len, classify};
use rules::{Contractions, Tail, Tiktoken, Word};

/// A step of splitting; it works on the pieces of the step before, and what it does not match stays a piece.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// How many characters at the start belong together; 0 for no match.
    Rule(fn(&[Ch]) -> usize),
    Tiktoken(Tiktoken),
    /// `\s+$`: the white space that ends a piece.
    TrailingSpace,
}

/// The splitting rule of one family, and what else goes with its name.
#[derive(Debug)]
pub(crate) struct Pretokenizer {
    steps: &'static [Step],
    /// Normalise to NFC first.
    pub(crate) nfc: bool,
    /// A piece that is a token is taken whole, whatever the merges say.
    pub(crate) ignore_merges: bool,
    /// Whether sequences start with BOS where the file does not say.
    pub(crate) add_bos: bool,
}

const fn tiktoken(contractions: Contractions, word: Word, digits: usize, tail: Tail) -> Step {
    Step::Tiktoken(Tiktoken { contractions, word, digits, tail })
}

static GPT2: [Step; 1] = [Step::Rule(rules::gpt2)];
static DIGIT_GPT2: [Step; 2] = [Step::Rule(rules::digit), Step::Rule(rules::gpt2)];
static LLAMA3: [Step; 1] = [tiktoken(Contractions::Apart, Word::Letters, 3, Tail::Newlines)];
static QWEN2: [Step; 1] = [tiktoken(Contractions::Apart, Word::Letters, 1, Tail::Newlines)];
static UFAKZEKA: [Step; 1] = [tiktoken(Contractions::None, Word::Letters, 1, Tail::Newlines)];
static LAGUNA: [Step; 2] = [
    Step::Rule(rules::line_feeds_or_others),
    tiktoken(Contractions::Apart, Word::Letters, 1, Tail::Newlines),
];
static QWEN35: [Step; 1] =
    [tiktoken(Contractions::Apart, Word::LettersAndMarks, 1, Tail::Newlines)];
static SEED_CODER: [Step; 1] = [tiktoken(Contractions::Apart, Word::Letters, 1, Tail::None)];
static TEKKEN: [Step; 1] = [tiktoken(Contractions::None, Word::Cased, 1, Tail::NewlinesAndSlashes)];
static GPT_4O: [Step; 1] =
    [tiktoken(Contractions::Suffix, Word::Cased, 3, Tail::NewlinesAndSlashes)];
static DEEPSEEK_LLM: [Step; 6] = [
    Step::Rule(rules::newline),
    Step::Rule(rules::deepseek_llm_words),
    Step::Rule(rules::deepseek_llm_punctuation),
    Step::TrailingSpace,
    Step::Rule(rules::deepseek_llm_cjk),
    Step::Rule(rules::digit),
];
static DEEPSEEK_CODER: [Step; 5] = [
    Step::Rule(rules::newline),
    Step::Rule(rules::space_letters),
    Step::Rule(rules::space_punctuation),
    Step::Rule(rules::deepseek_llm_cjk),
    Step::Rule(rules::digit),
];
static DEEPSEEK_V3: [Step; 3] = [
    Step::Rule(rules::three_digits),
    Step::Rule(rules::deepseek_v3_cjk),
    Step::Rule(rules::deepseek_v3),
];
static FALCON: [Step; 4] = [
    Step::Rule(rules::punctuation_signs_and_backtick),
    Step::Rule(rules::gpt2),
    Step::Rule(rules::digits),
    Step::Rule(rules::exactly_three_ascii_digits),
];
static DEFAULT: [Step; 4] = [
    Step::Rule(rules::punctuation_and_signs),
    Step::Rule(rules::gpt2),
    Step::Rule(rules::digits),
    Step::Rule(rules::exactly_three_ascii_digits),
];
static BLOOM: [Step; 1] = [Step::Rule(rules::bloom)];
static VIKING: [Step; 2] = [Step::Rule(rules::bloom), Step::Rule(rules::digit)];

impl Pretokenizer {
    /// The rule that `tokenizer.ggml.pre` names.
    ///
    /// # Errors
    /// `is_unsupported` for an unknown name, `is_missing` for an empty one.
    pub(crate) fn named(name: &str) -> Result<Pretokenizer, Error> {
        let steps: &'static [Step] = match name {
            "default" => &DEFAULT,
            "gpt-2" | "gpt2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion"
            | "granite-docling" | "jina-es" | "jina-de" | "jina-v2-es" | "jina-v2-de"
            | "gigachat" | "a.x-4.0" | "mellum" | "modern-bert" | "exaone4" => &GPT2,
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone"
            | "minerva-7b" | "mellum2" => &DIGIT_GPT2,
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral"
            | "midm-2.0" | "lfm2" | "jina-v5-nano" | "jais-2" | "dbrx" | "smaug-bpe" | "glm4"
            | "chatglm-bpe" => &LLAMA3,
            "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "stablelm2"
            | "hunyuan" | "solar-open" | "bailingmoe" | "bailingmoe2" | "llada-moe" | "grok-2" => {
                &QWEN2
            }
            "laguna" => &LAGUNA,
            "ufakzeka" => &UFAKZEKA,
            "qwen35" => &QWEN35,
            "seed-coder" => &SEED_CODER,
            "tekken" => &TEKKEN,
            "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" => &GPT_4O,
            "deepseek-llm" => &DEEPSEEK_LLM,
            "deepseek-coder" => &DEEPSEEK_CODER,
            "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => &DEEPSEEK_V3,
            "falcon" => &FALCON,
            "bloom" | "gpt3-finnish" | "poro-chat" => &BLOOM,
            "viking" => &VIKING,
            "" => {
                return Err(Error::missing(
                    "reading the tokenizer: tokenizer.ggml.pre is absent, so that the splitting rule is \
                     not known; convert the model again with a current converter",
                ));
            }
            _ => {
                return Err(Error::unsupported(format!(
                    "reading the tokenizer: tokenizer.ggml.pre is {name:?}, a splitting rule that is not \
                     known here; another rule would give wrong tokens"
                )));
            }
        };
        let whole_pieces = matches!(
            name,
            "llama3"
                | "llama-v3"
                | "llama-bpe"
                | "falcon3"
                | "falcon-h1"
                | "pixtral"
                | "midm-2.0"
                | "lfm2"
                | "jina-v5-nano"
                | "tekken"
        );
        Ok(Pretokenizer {
            steps,
            nfc: matches!(name, "qwen2" | "qwen35" | "deepseek-r1-qwen"),
            ignore_merges: whole_pieces,
            add_bos: whole_pieces,
        })
    }

    /// Splits `text`, and gives the number of characters of each piece in `pieces`; `spare` is scratch.
    pub(crate) fn split(&self, text: &[Ch], pieces: &mut Vec<u32>, spare: &mut Vec<u32>) {
        pieces.clear();
        pieces.push(text.len() as u32);
        for step in self.steps {
            std::mem::swap(pieces, spare);
            pieces.clear();
            let mut at = 0;
            for &len in spare.iter() {
                let end = at + len as usize;
                step.split(&text[at..end], pieces);
                at = end;
            }
        }
    }
}

impl Step {
    fn split(self, piece: &[Ch], out: &mut Vec<u32>) {
        let rule = match self {
            Step::Rule(rule) => rule,
            Step::Tiktoken(t) => {
                return isolate(piece, |rest| t.next(rest), out);
            }
            Step::TrailingSpace => {
                let text = piece.iter().rposition(|c| !c.is(class::SPACE)).map_or(0, |i| i + 1);
                out.extend(
                    [text, piece.len() - text].into_iter().filter(|&n| n > 0).map(|n| n as u32),
                );
                return;
            }
        };
        isolate(piece, rule, out);
    }
}

/// Cuts `piece` into the matches of `rule` and the gaps between them.
fn isolate(piece: &[Ch], rule: impl Fn(&[Ch]) -> usize, out: &mut Vec<u32>) {
    let mut gap = 0;
    let mut at = 0;
    while at < piece.len() {
        let n = rule(&piece[at..]);
        if n == 0 {
            at += 1;
            gap += 1;
            continue;
        }
        if gap > 0 {
            out.push(gap);
            gap = 0;
        }
        out.push(n as u32);
        at += n;
    }
    if gap > 0 {
        out.push(gap);
    }
}
