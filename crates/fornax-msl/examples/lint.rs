//! Lints kernel sources given on the command line; the parts of one source are joined with `+`. It knows no folder.

#![expect(clippy::print_stderr, clippy::print_stdout, reason = "a command's output")]

use std::process::ExitCode;

use fornax_msl::{CompileOptions, lint};

fn main() -> ExitCode {
    let mut bad = 0;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    for argument in &arguments {
        let mut parts = Vec::new();
        for path in argument.split('+') {
            match std::fs::read_to_string(path) {
                Ok(text) => parts.push((path, text)),
                Err(e) => {
                    eprintln!("{path}: {e}");
                    return ExitCode::FAILURE;
                }
            }
        }
        let parts: Vec<(&str, &str)> = parts.iter().map(|(p, t)| (*p, t.as_str())).collect();
        if let Err(e) = lint(&parts, &CompileOptions::default()) {
            eprintln!("{e}");
            bad += 1;
        }
    }
    println!("{} sources linted, {bad} with faults", arguments.len());
    if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
