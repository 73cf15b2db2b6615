//! A command buffer as it is written: commands, barriers, and the arguments of all of them in two lists that are
//! used again. It knows no device.

use std::ops::Range;
use std::sync::Arc;

use super::{Grid, Pipeline, Slice};
use crate::hazard::Access;

pub(super) type Arg = Option<(Slice, Access)>;

#[derive(Debug)]
pub(super) struct Dispatch {
    pub(super) pipeline: Pipeline,
    pub(super) note: Note,
    pub(super) grid: Grid,
    args: Range<usize>,
    words: Range<usize>,
}

/// What is said of a command beside what it does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Note {
    /// What it was made for, for errors and times.
    pub label: u32,
    /// Seconds that are predicted of it: by them, what would run too long at once is cut into several command buffers.
    pub plain_s: f64,
    /// Different bytes that it should read, for rates where nobody counts.
    pub bytes: u64,
}

#[derive(Debug)]
pub(super) enum Entry {
    Dispatch(Dispatch),
    Barrier,
}

#[derive(Debug, Default)]
pub(super) struct Recording {
    pub(super) entries: Vec<Entry>,
    args: Vec<Arg>,
    words: Vec<u32>,
    /// Entries before which a new command buffer begins.
    pub(super) cuts: Vec<usize>,
    /// Entries before which a round has ended.
    pub(super) marks: Vec<usize>,
}

/// A command that has run.
#[derive(Clone, Debug)]
pub(crate) struct Ran {
    /// What it was made for.
    pub(crate) label: u32,
    pub(crate) kernel: Arc<str>,
    /// Behind a barrier of its own.
    pub(crate) barrier: bool,
    /// The first of its round.
    pub(crate) begins: bool,
    /// Where commands are timed one by one.
    pub(crate) seconds: f64,
    /// What it should read.
    pub(crate) bytes: u64,
    /// What it accessed, where the form counts that.
    pub(crate) counts: Option<fornax_msl::DispatchReport>,
}

impl Recording {
    /// The arguments by slot, without the constants.
    pub(super) fn args(&self, d: &Dispatch) -> &[Arg] {
        &self.args[d.args.clone()]
    }

    /// The constants, which are the argument after the last.
    pub(super) fn words(&self, d: &Dispatch) -> &[u32] {
        &self.words[d.words.clone()]
    }

    /// Whether what stands before entry `at` is done before it begins.
    pub(super) fn is_fence(&self, at: usize) -> bool {
        matches!(self.entries[at], Entry::Barrier) || self.cuts.contains(&at)
    }

    /// The entries of each command buffer.
    #[cfg_attr(not(target_os = "macos"), allow(dead_code, reason = "for the system's Metal"))]
    pub(super) fn parts(&self) -> impl Iterator<Item = &[Entry]> {
        let ends = self.cuts.iter().copied().chain([self.entries.len()]);
        let mut start = 0;
        ends.map(move |end| &self.entries[std::mem::replace(&mut start, end)..end])
    }

    /// Place in the list and predicted seconds of every command.
    pub(super) fn commands(&self) -> impl Iterator<Item = (usize, f64)> + '_ {
        self.entries.iter().enumerate().filter_map(|(at, entry)| match entry {
            Entry::Dispatch(d) => Some((at, d.note.plain_s)),
            Entry::Barrier => None,
        })
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.args.clear();
        self.words.clear();
        self.cuts.clear();
        self.marks.clear();
    }

    /// Begins a command's arguments; forgets those that no command took.
    pub(super) fn begin(&mut self, open: &mut Open) {
        self.args.truncate(open.args);
        self.words.truncate(open.words);
        *open = Open { args: self.args.len(), words: self.words.len() };
    }

    pub(super) fn bind(&mut self, open: &Open, slot: usize, arg: Arg) {
        if self.args.len() <= open.args + slot {
            self.args.resize(open.args + slot + 1, None);
        }
        self.args[open.args + slot] = arg;
    }

    pub(super) fn constants(&mut self, open: &Open, words: &[u32]) {
        self.words.truncate(open.words);
        self.words.extend_from_slice(words);
    }

    /// What is bound so far.
    pub(super) fn bound(&self, open: &Open) -> (&[Arg], &[u32]) {
        (&self.args[open.args..], &self.words[open.words..])
    }

    /// Makes a command of what is bound.
    pub(super) fn take(&mut self, open: &mut Open, pipeline: Pipeline, note: Note, grid: Grid) {
        let (args, words) = (open.args..self.args.len(), open.words..self.words.len());
        self.entries.push(Entry::Dispatch(Dispatch { pipeline, note, grid, args, words }));
        *open = Open { args: self.args.len(), words: self.words.len() };
    }
}

/// Where the arguments of the command being written begin.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Open {
    args: usize,
    words: usize,
}
