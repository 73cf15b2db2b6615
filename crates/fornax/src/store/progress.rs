//! A bar on stderr while bytes come in; nothing at all where stderr cannot redraw a line.
//! Knows no source and no file.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::flags::high::Config;

/// A bar, or nothing.
#[derive(Debug)]
pub(crate) struct Progress(Option<ProgressBar>);

impl Progress {
    /// `total` in bytes; without it a count runs up.
    pub(crate) fn bytes(config: &Config, name: &str, total: Option<u64>) -> Progress {
        let template = match total {
            Some(_) => "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{msg} {bytes} {bytes_per_sec}",
        };
        Progress::drawn(config, name, template, total)
    }

    /// Something that says only that it is still at work.
    pub(crate) fn waiting(config: &Config, name: &str) -> Progress {
        Progress::drawn(config, name, "{spinner} {msg} {elapsed}", None)
    }

    fn drawn(config: &Config, name: &str, template: &str, total: Option<u64>) -> Progress {
        if !config.stderr_draws {
            return Progress(None);
        }
        let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(name.to_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        Progress(Some(bar))
    }

    /// `done` bytes are there.
    pub(crate) fn at(&self, done: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(done);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
