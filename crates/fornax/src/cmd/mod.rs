//! The commands, one file each, and which of them was asked for.
//! A command takes the resolved configuration and its own flags; it never reads the environment.

mod against;
mod bench;
mod bench_batch;
mod bench_serve;
mod chat;
mod count;
mod devices;
mod inspect;
mod logits;
mod perplexity;
mod pull;
mod quantize;
mod run;
mod serve;
mod start;
mod synth;
mod tokens;
mod tune;
mod verify;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::flags::high::Config;
use crate::flags::low::{Cli, Command};
use crate::output;

/// The command line was at fault: exit code 2, as for clap's own errors.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Runs one command to its end.
///
/// # Errors
/// Whatever the command could not do.
pub(crate) fn dispatch(config: &Config, command: Command) -> Result<()> {
    match command {
        Command::Pull(flags) => pull::pull(config, &flags),
        Command::List(_) => pull::list(config),
        Command::Completions(flags) => {
            let mut script = Vec::new();
            clap_complete::generate(flags.shell, &mut Cli::command(), "fornax", &mut script);
            output::product(&script)
        }
        Command::Man => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Cli::command())
                .render(&mut page)
                .context("could not write the man page")?;
            output::product(&page)
        }
        Command::Inspect(flags) => inspect::inspect(config, &flags),
        Command::Quantize(flags) => quantize::quantize(config, &flags),
        Command::Synth(flags) => synth::synth(config, &flags),
        Command::Run(flags) => run::run(config, &flags),
        Command::Chat(flags) => chat::chat(config, &flags),
        Command::Serve(flags) => serve::serve(config, &flags),
        Command::Bench(flags) => bench::bench(config, &flags),
        Command::Perplexity(flags) => perplexity::perplexity(config, &flags),
        Command::Logits(flags) => logits::logits(config, &flags),
        Command::Tokenize(flags) => tokens::tokenize(config, &flags),
        Command::Detokenize(flags) => tokens::detokenize(config, &flags),
        Command::Verify(flags) => verify::verify(config, &flags),
        Command::Devices(flags) => devices::devices(config, &flags),
        Command::Tune(flags) => tune::tune(config, &flags),
    }
}

/// What is wrong with the command line, from what a parser said.
fn usage(error: &anyhow::Error) -> anyhow::Error {
    Usage(format!("{error:#}")).into()
}

/// Writes beside `path` and renames, so that a failure leaves no half a file. The name beside it is this
/// process's own: another that writes the same file, or a part that is being read, is not touched.
///
/// # Errors
/// Where something other than a plain file is there: a rename would put a file in a device's place.
fn whole_file(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if path.file_name().is_none() {
        anyhow::bail!("{path:?} is no name for a file");
    }
    if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        anyhow::bail!("there is something that is no plain file; name another");
    }
    let mut part = OsString::from(path);
    part.push(format!(".{}.part", std::process::id()));
    let part = PathBuf::from(part);
    let written = write(&part).and_then(|()| Ok(fs::rename(&part, path)?));
    written.inspect_err(|_| drop(fs::remove_file(&part)))
}
