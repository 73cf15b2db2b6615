//! The fornax command: flags to configuration to command, and how the process ends.
//! The only crate that links providers; what a command does lives in `cmd`, what a model is elsewhere.
#![forbid(unsafe_code)]

mod answer;
mod cmd;
mod convert;
mod devices;
mod flags;
mod machine;
mod output;
mod store;
mod synth;

use std::process::ExitCode;

use clap::Parser;

use crate::flags::high::Config;
use crate::flags::low::Cli;

fn main() -> ExitCode {
    let Cli { shared, command } = Cli::parse();
    let config = Config::resolve(shared);
    match cmd::dispatch(&config, command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if output::reader_left(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::complain(&error);
            ExitCode::from(if error.is::<cmd::Usage>() { 2 } else { 1 })
        }
    }
}
