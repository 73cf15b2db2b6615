//! Commands resolved at `prepare` and written, step after step, into an encoder, with barriers
//! only where the tracker sees a conflict. It knows no op and no kernel's meaning.

use std::ops::{Range, RangeInclusive};

use fornax_plan::{Batch, Result};

use crate::api::{Buffer, Encoder, Grid, Note, Pipeline, Slice};
use crate::args::stride_at;
use crate::feed::Chain;
use crate::hazard::{Access, Touch, Tracker};
use crate::policy::MATVEC_ROWS;
use crate::work::Work;

/// Which barriers are written; all but `Tracked` exist for tests, which must see that a missing
/// barrier shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barriers {
    /// Those that the tracker asks for.
    Tracked,
    /// The same without the one of this number, counted from the start of the program.
    AllBut(u64),
    /// None at all.
    None,
}

/// What an argument is bound to: fixed at `prepare`, or a part of the step's own buffers.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// Weights, tables, pools.
    Fixed(Slice),
    /// A value: its buffer and the words of one row; as many rows as the command has.
    Value(Buffer, usize),
    /// This round's rows.
    Rows,
    /// All rows: the host's and the chain's.
    AllRows,
    /// This round's wanted rows.
    Wanted,
    /// The stop lists.
    Stops,
    /// How tokens are drawn.
    Draws,
    /// A group's block tables.
    Table(usize),
    /// The ticket's outputs.
    Out,
    /// The ticket's copy of the logits.
    Logits,
    /// The ticket's copy of the hidden rows.
    Hidden,
}

/// How often a command runs, and over which rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Every round, over its token rows.
    Rows,
    /// Every round, over its wanted rows.
    Wanted,
    /// The first round only, over its wanted rows, where the host wants them.
    FirstWanted,
    /// Every round of a step in which some token is chosen in one of these ways, over its wanted
    /// rows.
    Ways(u32),
}

/// Threadgroups of a command along one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    /// As many whatever the rows.
    Fixed(u32),
    /// One for so many rows.
    RowsBy(u32),
    /// So many for every row.
    RowsTimes(u32),
    /// One for `by` of what every row has `times`, and some more.
    Tiles { times: u32, by: u32, plus: u32 },
}

impl Axis {
    fn groups(self, rows: u32) -> u32 {
        match self {
            Axis::Fixed(n) => n,
            Axis::RowsBy(n) => rows.div_ceil(n),
            Axis::RowsTimes(n) => rows * n,
            Axis::Tiles { times, by, plus } => (rows * times) / by + plus,
        }
    }
}

/// The grid of a command as a function of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) axes: [Axis; 3],
    pub(crate) threads: u32,
}

impl Span {
    fn grid(self, rows: u32) -> Grid {
        Grid { groups: self.axes.map(|a| a.groups(rows)), threads: self.threads }
    }
}

/// One command of the plan.
#[derive(Clone, Debug)]
pub(crate) struct Command {
    /// The op that it was made for.
    pub(crate) op: u32,
    pub(crate) pipeline: Pipeline,
    /// By slot.
    pub(crate) args: Vec<Option<(Place, Access)>>,
    /// The first word is the number of rows, filled in for every round.
    pub(crate) constants: Vec<u32>,
    /// A second word to fill in: where this round's rows begin among all rows.
    pub(crate) base_at: Option<usize>,
    pub(crate) extent: Extent,
    /// The numbers of rows that it runs for; others are another command's.
    pub(crate) when: RangeInclusive<u32>,
    /// Only for rounds of few rows, each of another sequence, or only for others; any where absent.
    pub(crate) apart: Option<bool>,
    pub(crate) span: Span,
    /// The pools that it reads or writes.
    pub(crate) pools: Option<Pools>,
    /// What a row of it asks for.
    pub(crate) work: Work,
    /// Its rows may be dispatched apart, so many or a multiple of that at once.
    pub(crate) parts: Option<u32>,
}

/// A layer's keys and values among a command's arguments: the slots of the first piece of each, which those of the
/// others follow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pools {
    pub(crate) group: u32,
    pub(crate) layer: u32,
    pub(crate) keys: usize,
    pub(crate) values: usize,
}

/// The buffers of one step in flight and where this round's parts lie in them.
#[derive(Clone, Debug)]
pub(crate) struct Round<'a> {
    pub(crate) first: bool,
    pub(crate) rows: usize,
    pub(crate) wanted: usize,
    /// No two of the rows are of one sequence.
    pub(crate) apart: bool,
    /// The host wants logits or hidden rows back.
    pub(crate) copies: bool,
    /// The ways in which tokens are chosen.
    pub(crate) ways: u32,
    pub(crate) base: usize,
    /// 0 for the host's rows, then the rounds of the chain.
    pub(crate) number: u32,
    pub(crate) batch: &'a Batch,
    pub(crate) chain: &'a [Chain],
    /// Predicted seconds that a command may take where it can be parted.
    pub(crate) most_s: f64,
    pub(crate) upload: Buffer,
    pub(crate) out: Buffer,
    pub(crate) logits: Buffer,
    pub(crate) hidden: Buffer,
    pub(crate) shape: &'a crate::feed::Shape,
}

impl Round<'_> {
    /// A row's position, or the furthest that it can be at.
    fn pos(&self, row: usize) -> u32 {
        if self.first {
            return self.batch.rows.get(row).map_or(0, |r| r.pos);
        }
        self.chain.get(row).map_or(0, |c| c.pos + self.number - 1)
    }

    /// What a place is for the rows `part`.
    fn slice(&self, place: &Place, part: Range<usize>) -> Slice {
        let row = crate::feed::ROW;
        let upload = |words: Range<usize>| self.upload.words(words);
        match place {
            Place::Fixed(slice) => slice.clone(),
            Place::Value(buffer, width) => buffer.words(part.start * width..part.end * width),
            Place::Rows => upload((self.base + part.start) * row..(self.base + part.end) * row),
            Place::AllRows => upload(self.shape.all_rows()),
            Place::Wanted if self.first => upload(self.shape.wanted()),
            Place::Wanted => upload(self.shape.chain_wanted()),
            Place::Stops => upload(self.shape.stops()),
            Place::Draws => upload(self.shape.draws()),
            Place::Table(group) => upload(self.shape.tables(*group)),
            Place::Out => self.out.all(),
            Place::Logits => self.logits.all(),
            Place::Hidden => self.hidden.all(),
        }
    }
}

/// Writes commands and the barriers between them.
#[derive(Debug)]
pub(crate) struct Writer {
    tracker: Tracker,
    barriers: Barriers,
    /// Barriers that the tracker asked for so far.
    asked: u64,
    touches: Vec<Touch>,
    constants: Vec<u32>,
}

impl Writer {
    pub(crate) fn new(barriers: Barriers) -> Writer {
        Writer {
            tracker: Tracker::default(),
            barriers,
            asked: 0,
            touches: Vec::new(),
            constants: Vec::new(),
        }
    }

    /// Barriers that the tracker asked for so far.
    pub(crate) fn asked(&self) -> u64 {
        self.asked
    }

    /// Begins a command buffer.
    pub(crate) fn begin(&mut self) {
        self.tracker.reset();
    }

    /// Writes one round of the plan. Returns the number of commands.
    pub(crate) fn round(
        &mut self,
        encoder: &mut Encoder<'_>,
        commands: &[Command],
        round: &Round<'_>,
    ) -> Result<u64> {
        let mut written = 0;
        for command in commands {
            let rows = match command.extent {
                Extent::Rows => round.rows,
                Extent::Wanted => round.wanted,
                Extent::FirstWanted if round.first && round.copies => round.wanted,
                Extent::FirstWanted => 0,
                Extent::Ways(ways) if round.ways & ways != 0 => round.wanted,
                Extent::Ways(_) => 0,
            };
            let few = round.apart && round.rows <= MATVEC_ROWS as usize;
            // A grid of nothing is an error in Metal.
            if rows > 0
                && command.apart.is_none_or(|apart| apart == few)
                && command.when.contains(&(rows as u32))
            {
                written += self.parts(encoder, command, round, rows)?;
            }
        }
        Ok(written)
    }

    /// Writes a command, or several where its rows take too long at once. Returns their number.
    fn parts(
        &mut self,
        encoder: &mut Encoder<'_>,
        command: &Command,
        round: &Round<'_>,
        rows: usize,
    ) -> Result<u64> {
        let grain = command.parts.map_or(rows, |n| n as usize);
        let (mut start, mut written) = (0, 0);
        while start < rows {
            let all = (start, rows, grain);
            let work = &command.work;
            let (end, keys) = work.part(all, round.most_s, |row| round.pos(row));
            let (label, bytes) = (command.op, work.read(keys));
            let note = Note { label, plain_s: work.seconds(end - start, keys), bytes };
            self.command(encoder, command, round, start..end, note)?;
            (start, written) = (end, written + 1);
        }
        Ok(written)
    }

    fn command(
        &mut self,
        encoder: &mut Encoder<'_>,
        command: &Command,
        round: &Round<'_>,
        part: Range<usize>,
        note: Note,
    ) -> Result<()> {
        let rows = part.len();
        self.touches.clear();
        encoder.set_pipeline(&command.pipeline);
        for (slot, arg) in command.args.iter().enumerate() {
            let Some((place, access)) = arg else {
                encoder.set_nothing(slot);
                continue;
            };
            let slice = round.slice(place, part.clone());
            self.touches.push(Touch {
                buffer: slice.buffer.id,
                bytes: slice.bytes.clone(),
                access: *access,
            });
            encoder.set_buffer(slot, slice, *access);
        }
        if self.tracker.before(&self.touches) {
            let skip = match self.barriers {
                Barriers::Tracked => false,
                Barriers::AllBut(n) => n == self.asked,
                Barriers::None => true,
            };
            self.asked += 1;
            if !skip {
                encoder.barrier();
            }
        }
        self.constants.clear();
        self.constants.extend_from_slice(&command.constants);
        self.constants[0] = rows as u32;
        if let Some(at) = stride_at(&command.pipeline.name) {
            self.constants[at] = round.shape.stride as u32;
        }
        if let Some(at) = command.base_at {
            self.constants[at] = round.base as u32;
        }
        encoder.set_constants(&self.constants);
        encoder.dispatch(note, command.span.grid(rows as u32))
    }
}
