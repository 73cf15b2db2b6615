//! The strict lint: kernel source read by clang as C++ for OpenCL, which has Metal's address spaces and refuses to mix them;
//! g++ sees none of that. It runs nothing.

use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::compiler::Compiler;
use crate::library::joined;
use crate::prepare;
use crate::rewrite::Target;
use crate::{CompileOptions, Error};

const HEADER: &str = include_str!("../cpp/lint.h");
/// Older releases lack parts of the language.
const CLANG: [&str; 4] = ["clang++-19", "clang++-20", "clang++-21", "clang++"];

/// Checks source parts, in their order as one source, for mixed address spaces, writes to constant data, implicit conversions
/// between vectors and unknown functions. What it cannot see: address spaces of local pointers that name none.
///
/// # Errors
/// `is_compile` with clang's message, lines being those of the parts; `is_host` when there is no clang.
pub fn lint(sources: &[(&str, &str)], options: &CompileOptions) -> Result<(), Error> {
    let text = Compiler::get()?.preprocess(&joined(sources), &options.defines)?;
    let prepared = prepare::prepare(&text, Target::Lint)?;
    // Before version 4, Metal's language is C++14; the header itself is read by clang alone.
    let source = format!(
        "#pragma clang diagnostic push\n#pragma clang diagnostic ignored \"-Wpre-c++17-compat\"\n# 1 \"(lint.h)\"\n\
         {HEADER}\n#pragma clang diagnostic pop\n{}",
        prepared.code
    );
    let runs = |name: &&&str| {
        let mut command = Command::new(name);
        command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|s| s.success())
    };
    let named = std::env::var("FORNAX_MSL_CLANG").ok();
    let clang = named.or_else(|| CLANG.iter().find(runs).map(|c| (*c).to_owned()));
    let clang = clang.ok_or_else(|| {
        Error::host(
            "the lint of Metal kernels needs clang 19: install it, or name it in FORNAX_MSL_CLANG",
        )
    })?;
    let mut command = Command::new(&clang);
    command.args(["-x", "clcpp", "-cl-std=clc++2021", "-target", "x86_64-unknown-linux-gnu"]);
    command.args(["-Xclang", "-finclude-default-header", "-fsyntax-only", "-ferror-limit=20"]);
    command.args(["-Xclang", "-cl-ext=-__opencl_c_device_enqueue,-__opencl_c_pipes,-__opencl_c_program_scope_global_variables"]);
    // Declared and not defined is what everything here is; and a vector of several values is a list in braces only here.
    command.args(["-Wall", "-Werror", "-Wpre-c++17-compat"]);
    command.args(["-Wno-unused-function", "-Wno-undefined-inline"]);
    command.args(["-Wno-undefined-internal", "-Wno-unused-const-variable", "-Wno-unused-variable"]);
    command.args([
        "-Wno-unknown-pragmas",
        "-Wno-c++11-narrowing",
        "-Wno-unused-but-set-variable",
        "-",
    ]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let failed = |e: std::io::Error| Error::host(format!("running {clang}: {e}"));
    let mut child = command.spawn().map_err(failed)?;
    let mut input = child.stdin.take().ok_or_else(|| Error::host("no pipe to clang"))?;
    let feed = std::thread::spawn(move || input.write_all(source.as_bytes()));
    let output = child.wait_with_output().map_err(failed)?;
    // A compiler that stops reading has said why.
    let _ = feed.join();
    if output.status.success() {
        return Ok(());
    }
    Err(Error::compile(String::from_utf8_lossy(&output.stderr).into_owned()))
}
