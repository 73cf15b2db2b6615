//! `fornax chat`: a conversation, line by line. What was said before stays in the context; only what is new is computed.
//! The conversation is data; reading lines, generating and files are each a function beside it.

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::Value;

use super::start::{self, Started, chat_tokens, message};
use crate::answer::{self, Finish, Listener, Request};
use crate::flags::high::Config;
use crate::flags::low::{Chat, Sampling};
use crate::output;
use fornax_engine::{Model, Session};

const HELP: &str = "/reset forgets the conversation, /system TEXT sets the system message and resets, /save FILE and \
    /load FILE keep it, /exit ends; Ctrl-C stops an answer";

/// Talks until the lines end.
///
/// # Errors
/// When the model cannot be had or run.
pub(crate) fn chat(config: &Config, flags: &Chat) -> Result<()> {
    let started = Started::open(config, flags.model.model.as_deref())?;
    // A model without a template is told now, not after the first line.
    chat_tokens(&started.model, &[message("user", "hi")])?;
    let mut session = started.session(config, started.context(None, None))?;
    let limit = started.announce(config)?;
    output::note(config, HELP);
    let stop = stop_on_ctrl_c()?;
    let mut lines = Lines::open(config);
    let mut talk = Talk::default();
    while let Some(line) = lines.next()? {
        let line = line.trim();
        match Said::of(line) {
            Said::Nothing => {}
            Said::Exit => break,
            Said::Reset => talk.reset(),
            Said::System(system) => talk.set_system(system),
            Said::Save(path) => tell(config, talk.save(Path::new(path))),
            Said::Load(path) => tell(config, talk.load(Path::new(path))),
            Said::Unknown(what) => output::note(config, &format!("there is no {what}; {HELP}")),
            Said::User(content) => {
                stop.store(false, Ordering::Relaxed);
                let turn = Turn { config, model: &started.model, stop: &stop };
                match turn.take(&mut session, &mut talk, content) {
                    Ok(answer) => {
                        let bytes = started.bytes();
                        let share = limit
                            .zip(answer.tokens_per_s())
                            .map(|(l, r)| l.percent(bytes, 1.0 / r));
                        start::conclude(config, &answer, share);
                    }
                    Err(e) if output::reader_left(&e) => return Err(e),
                    // The conversation is worth more than the turn.
                    Err(e) => tell(config, Err(e)),
                }
            }
        }
    }
    Ok(())
}

/// The messages so far. What the session holds of them it knows itself.
#[derive(Default)]
struct Talk {
    messages: Vec<Value>,
}

impl Talk {
    fn reset(&mut self) {
        self.messages.retain(|m| m["role"] == "system");
    }

    fn set_system(&mut self, system: &str) {
        self.messages =
            if system.is_empty() { Vec::new() } else { vec![message("system", system)] };
    }

    fn save(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.messages)? + "\n";
        // What was saved before is there until this is whole.
        super::whole_file(path, |part| {
            let mut file = fs::File::create(part)?;
            file.write_all(text.as_bytes())?;
            Ok(file.sync_all()?)
        })
        .with_context(|| format!("could not write {}", path.display()))
    }

    fn load(&mut self, path: &Path) -> Result<()> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("could not read {}", path.display()))?;
        let messages: Vec<Value> = serde_json::from_str(&text)
            .with_context(|| format!("{} is no saved conversation", path.display()))?;
        let whole = |m: &Value| m["role"].is_string() && m["content"].is_string();
        anyhow::ensure!(
            messages.iter().all(whole),
            "{} has messages without role or content",
            path.display()
        );
        self.messages = messages;
        Ok(())
    }
}

/// One question and its answer.
struct Turn<'a> {
    config: &'a Config,
    model: &'a Model,
    stop: &'a AtomicBool,
}

impl Turn<'_> {
    /// On an error the conversation is as before.
    fn take(
        &self,
        session: &mut Session,
        talk: &mut Talk,
        content: &str,
    ) -> Result<answer::Answer> {
        let mut messages = talk.messages.clone();
        messages.push(message("user", content));
        let request = Request {
            prompt: &chat_tokens(self.model, &messages)?,
            most: u32::MAX,
            sample: answer::sample_params(&Sampling::default()),
            stops: &[],
            continues: false,
            begun: None,
        };
        let mut listener = Listener {
            piece: &mut |piece| output::product(piece.as_bytes()),
            cancelled: &|| self.stop.load(Ordering::Relaxed),
        };
        let answer = answer::generate(self.config, session, self.model, &request, &mut listener)?;
        output::product(b"\n")?;
        messages.push(message("assistant", &answer.text));
        talk.messages = messages;
        if answer.finish == Finish::Length {
            output::note(self.config, "the context is full; /reset begins anew");
        }
        Ok(answer)
    }
}

/// What a line asks for.
#[derive(Debug, PartialEq, Eq)]
enum Said<'a> {
    Nothing,
    Exit,
    Reset,
    System(&'a str),
    Save(&'a str),
    Load(&'a str),
    Unknown(&'a str),
    User(&'a str),
}

impl Said<'_> {
    fn of(line: &str) -> Said<'_> {
        if !line.starts_with('/') {
            return if line.is_empty() { Said::Nothing } else { Said::User(line) };
        }
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        match (name, rest) {
            ("/exit" | "/quit", "") => Said::Exit,
            ("/reset", "") => Said::Reset,
            ("/system", system) => Said::System(system),
            ("/save", path) if !path.is_empty() => Said::Save(path),
            ("/load", path) if !path.is_empty() => Said::Load(path),
            _ => Said::Unknown(line),
        }
    }
}

/// Where lines come from: an editor where a person types, plain stdin otherwise.
enum Lines {
    Editor { editor: Box<DefaultEditor>, history: Option<PathBuf> },
    Plain(io::Lines<io::StdinLock<'static>>),
}

impl Lines {
    fn open(config: &Config) -> Lines {
        let person = io::stdin().is_terminal() && io::stdout().is_terminal();
        let editor = person.then(DefaultEditor::new).and_then(Result::ok);
        let Some(mut editor) = editor else { return Lines::Plain(io::stdin().lines()) };
        let history = config.home().ok().map(|home| home.join("chat-history"));
        if let Some(history) = &history {
            let _ = editor.load_history(history);
        }
        Lines::Editor { editor: Box::new(editor), history }
    }

    /// The next line; `None` at the end.
    fn next(&mut self) -> Result<Option<String>> {
        match self {
            Lines::Plain(lines) => match lines.next() {
                Some(Err(e)) if e.kind() == io::ErrorKind::InvalidData => {
                    Err(e).context("standard input is not UTF-8")
                }
                Some(line) => line.map(Some).context("could not read standard input"),
                None => Ok(None),
            },
            Lines::Editor { editor, history } => loop {
                match editor.readline("> ") {
                    Ok(line) => {
                        let _ = editor.add_history_entry(&line);
                        if let Some(history) = history {
                            let _ = editor.save_history(history);
                        }
                        return Ok(Some(line));
                    }
                    // Ctrl-C clears the line; Ctrl-D on an empty one ends.
                    Err(ReadlineError::Interrupted) => {}
                    Err(ReadlineError::Eof) => return Ok(None),
                    Err(e) => return Err(e).context("could not read a line"),
                }
            },
        }
    }
}

/// A flag that Ctrl-C sets; the program goes on.
fn stop_on_ctrl_c() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&stop);
    ctrlc::set_handler(move || set.store(true, Ordering::Relaxed))
        .context("could not watch for Ctrl-C")?;
    Ok(stop)
}

fn tell(config: &Config, result: Result<()>) {
    if let Err(e) = result {
        output::note(config, &format!("fornax: {e:#}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_mean_what_they_say() {
        for (line, want) in [
            ("", Said::Nothing),
            ("hello /reset", Said::User("hello /reset")),
            ("/exit", Said::Exit),
            ("/system Be brief.", Said::System("Be brief.")),
            ("/save  a b.json", Said::Save("a b.json")),
            ("/save", Said::Unknown("/save")),
            ("/reset now", Said::Unknown("/reset now")),
            ("/nonsense", Said::Unknown("/nonsense")),
        ] {
            assert_eq!(Said::of(line), want);
        }
    }

    #[test]
    fn a_reset_keeps_the_system_message() {
        let mut talk = Talk::default();
        talk.set_system("Be brief.");
        talk.messages.push(message("user", "hi"));
        talk.reset();
        assert_eq!(talk.messages, [message("system", "Be brief.")]);
    }
}
