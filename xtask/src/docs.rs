//! `cargo xtask docs`: the pages under `docs/` that are written by a program, so that they cannot drift from it.
//! Knows the binary by its `--help` alone.

use std::env::consts::EXE_SUFFIX;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// What to do with a page that differs from what the program says now.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Write it anew.
    Write,
    /// Fail, and say how to write it.
    Check,
}

/// Makes every generated page and writes it or compares it.
pub(crate) fn run(root: &Path, mode: Mode) -> Result<()> {
    let folder = crate::built(root, &["--bin", "fornax"])?;
    let page = command_line(&Binary(program(&folder)))?;
    settle(root, "docs/cli.md", &page, mode)?;
    settle(root, "docs/bench.md", &crate::receipts::page(root)?, mode)?;
    settle(root, "docs/metal-predicted.md", &predictions(root, &folder)?, mode)
}

/// The program in a folder of what was built.
pub(crate) fn program(folder: &Path) -> PathBuf {
    folder.join(format!("fornax{EXE_SUFFIX}"))
}

/// The page of what Apple's chips should reach, from the counts that are kept.
fn predictions(root: &Path, built: &Path) -> Result<String> {
    let folder = root.join("docs/metal-counts");
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        files.push(path.to_str().context("a path that is no text")?.to_owned());
    }
    files.sort();
    let predict = built.join("examples").join(format!("predictions{EXE_SUFFIX}"));
    let page = crate::said(Command::new(&predict).args(&files))?;
    String::from_utf8(page).context("the predictions are not UTF-8")
}

/// Writes `page` to `path`, or fails where the file says something else.
fn settle(root: &Path, path: &str, page: &str, mode: Mode) -> Result<()> {
    let file = root.join(path);
    let old = fs::read_to_string(&file).unwrap_or_default();
    if old == page {
        println!("{path} is up to date");
        return Ok(());
    }
    if mode == Mode::Check {
        let line = old.lines().zip(page.lines()).take_while(|(a, b)| a == b).count();
        bail!(
            "{path} is out of date from line {} on: the program says {:?}; run `cargo xtask docs`",
            line + 1,
            page.lines().nth(line).unwrap_or("nothing more")
        );
    }
    fs::write(&file, page).with_context(|| format!("writing {}", file.display()))?;
    println!("wrote {path}");
    Ok(())
}

/// Something that answers questions about its command line.
trait Help {
    /// The text printed for these arguments.
    fn ask(&self, arguments: &[&str]) -> Result<String>;
}

/// The built program.
struct Binary(PathBuf);

impl Help for Binary {
    fn ask(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(&self.0);
        // The width of somebody's terminal is no part of the page.
        command.args(arguments).env_remove("COLUMNS");
        let text = crate::said(&mut command).with_context(|| arguments.join(" "))?;
        String::from_utf8(text).context("the help text is not UTF-8")
    }
}

/// The page on the command line: the general help, then every command's.
fn command_line(program: &impl Help) -> Result<String> {
    let general = program.ask(&["--help"])?;
    let commands = command_names(&general);
    if commands.is_empty() {
        bail!("`fornax --help` lists no commands under \"Commands:\"");
    }
    let mut page = String::from(
        "# The command line\n\nWritten by `cargo xtask docs` from the program's own help; edit that, not this page. \
         Every command takes\nthe shared options, which are listed once.\n",
    );
    section(&mut page, "fornax", &general)?;
    for command in commands {
        let text = program.ask(&[command, "--help"])?;
        section(&mut page, &format!("fornax {command}"), without_shared(&text))?;
    }
    Ok(page)
}

fn section(page: &mut String, title: &str, text: &str) -> Result<()> {
    let text: Vec<&str> = text.trim_end().lines().map(str::trim_end).collect();
    writeln!(page, "\n## {title}\n\n```text\n{}\n```", text.join("\n"))?;
    Ok(())
}

/// A command's help up to the options that all commands take; clap puts those last.
fn without_shared(text: &str) -> &str {
    text.split("\nShared options:\n").next().unwrap_or(text)
}

/// The names in the list of commands of a general help text, without `help` itself.
fn command_names(general: &str) -> Vec<&str> {
    general
        .lines()
        .skip_while(|line| line.trim() != "Commands:")
        .skip(1)
        .take_while(|line| line.is_empty() || line.starts_with(' '))
        // A name is indented by two; what continues its description, by more.
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|&name| name != "help")
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GENERAL: &str = "\
Runs models.

Usage: fornax [OPTIONS] <COMMAND>

Commands:
  run   Answers one prompt
        and stops
  list  Lists models
  help  Print this message

Options:
  -h, --help  Print help
";

    struct Fake;

    impl Help for Fake {
        fn ask(&self, arguments: &[&str]) -> Result<String> {
            Ok(match arguments {
                ["--help"] => GENERAL.to_owned(),
                [name, "--help"] => format!("About {name}.   \n\nShared options:\n  -q\n"),
                _ => bail!("unexpected {arguments:?}"),
            })
        }
    }

    #[test]
    fn commands_are_found_in_the_help() {
        assert_eq!(command_names(GENERAL), ["run", "list"]);
        assert!(command_names("Usage: fornax").is_empty());
    }

    #[test]
    fn the_page_has_a_section_for_each_command() -> Result<()> {
        let page = command_line(&Fake)?;
        assert!(page.contains("## fornax\n\n```text\nRuns models.\n"), "{page}");
        assert!(page.ends_with("## fornax list\n\n```text\nAbout list.\n```\n"), "{page}");
        Ok(())
    }

    #[test]
    fn shared_options_are_listed_once() -> Result<()> {
        assert!(!command_line(&Fake)?.contains("Shared options"));
        assert_eq!(without_shared("none\n"), "none\n");
        Ok(())
    }

    #[test]
    fn a_page_that_drifted_fails_the_check_and_is_written_otherwise() -> Result<()> {
        let root = std::env::temp_dir().join(format!("fornax-docs-{}", std::process::id()));
        fs::create_dir_all(&root)?;
        fs::write(root.join("page.md"), "one\ntwo\n")?;
        let error = settle(&root, "page.md", "one\n2\n", Mode::Check).expect_err("they differ");
        assert!(error.to_string().contains("from line 2 on: the program says \"2\""), "{error}");
        settle(&root, "page.md", "one\n2\n", Mode::Write)?;
        settle(&root, "page.md", "one\n2\n", Mode::Check)?;
        fs::remove_dir_all(root)?;
        Ok(())
    }
}
