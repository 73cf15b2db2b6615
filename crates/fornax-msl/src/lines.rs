//! Finds the source line of an address in a compiled kernel library. It knows no fault.

use std::path::Path;
use std::process::Command;

use crate::compiler::Compiler;

/// Whether a file is one of the emulator's own.
pub(crate) fn is_own(file: &str) -> bool {
    Compiler::get().is_ok_and(|c| c.is_own(file))
}

/// File and line of the innermost code at `address` that is no code of the emulator; nothing where no tool can tell.
pub(crate) fn of(library: &Path, address: usize) -> Option<(String, u32)> {
    let tools = ["addr2line", "llvm-addr2line", "llvm-addr2line-19"];
    let output = tools.iter().find_map(|tool| {
        let mut command = Command::new(tool);
        command.args(["-i", "-e"]).arg(library).arg(format!("{address:#x}"));
        command.output().ok().filter(|o| o.status.success())
    })?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().find_map(|l| {
        let (file, line) = l.split(" (").next()?.rsplit_once(':')?;
        let own = is_own(file) || file == "??";
        // The compiler writes a name without folder as relative to the working folder or as it is.
        let name = file.rsplit_once('/').map_or(file, |(_, name)| name);
        line.parse().ok().filter(|&n: &u32| !own && n > 0).map(|n| (name.to_owned(), n))
    })
}
