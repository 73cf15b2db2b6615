//! Compiles every kernel for the architectures named (80 and 90 where none are) through the path
//! that the provider takes, and checks that every entry is there. It needs NVRTC and no GPU. Other
//! arguments choose kernels by parts of their names.

#![allow(clippy::print_stdout, reason = "the report is the output")]

use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let compiler = match fornax_cuda::Compiler::load() {
        Ok(compiler) => compiler,
        Err(e) => {
            println!("{e}");
            return ExitCode::FAILURE;
        }
    };
    let mut archs: Vec<u32> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let parts: Vec<String> =
        std::env::args().skip(1).filter(|a| a.parse::<u32>().is_err()).collect();
    let asked = |name: &str| parts.is_empty() || parts.iter().any(|p| name.contains(p.as_str()));
    if archs.is_empty() {
        archs = vec![80, 90];
    }
    let (major, minor) = compiler.version();
    println!("NVRTC {major}.{minor}");
    let (mut passed, mut failed) = (0, 0);
    for family in fornax_cuda::families().iter().filter(|f| asked(f.name)) {
        for arch in &archs {
            let started = Instant::now();
            match compiler.compile(family, &[], *arch) {
                Ok(code) => {
                    let (size, s) = (code.cubin.len(), started.elapsed().as_secs_f64());
                    println!("{} sm_{arch}: {size} bytes, {s:.2} s", family.name);
                    passed += 1;
                }
                Err(e) => {
                    println!("{} sm_{arch}: {e}", family.name);
                    failed += 1;
                }
            }
        }
    }
    for variant in fornax_cuda::variants().iter().filter(|v| asked(v.name)) {
        for arch in archs.iter().filter(|a| variant.runs_on(**a)) {
            let started = Instant::now();
            match compiler.compile_variant(variant, *arch) {
                Ok(size) => {
                    let s = started.elapsed().as_secs_f64();
                    println!("{} sm_{arch}: {size} bytes, {s:.2} s", variant.label());
                    passed += 1;
                }
                Err(e) => {
                    println!("{} sm_{arch}: {e}", variant.label());
                    failed += 1;
                }
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
