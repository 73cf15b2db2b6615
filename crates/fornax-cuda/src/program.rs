//! A prepared plan at work: the given rows as launches (or a graph, where only single tokens go
//! on), the chain behind them as one graph replayed on the device, one wait for the results. It
//! knows no kernel.

mod cache;
mod race;
mod results;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use fornax_plan::{
    Cmd, Error, Limits, MemoryUse, Op, OpTime, Plan, Program, Progress, Result, SeqStep, SlotId,
    StepOutput, Ticket, Want,
};

use crate::driver::{Event, Gpu, Graph, Pinned};
use crate::fast::drive::{Way, Ways};
use crate::fast::stage::ROWS_THREADS;
use crate::feed::{self, Feed, PENALISED, ROW, Shape};
use crate::prepare::{Action, Extent, KV_BLOCK, Place, Prepared};
use crate::rows::{self, Item, Kinds};
use crate::slots::Slots;

/// Steps that may be under way at once; each has host memory of its own.
const IN_FLIGHT_MAX: usize = 2;

/// The host's side of one step in flight.
#[derive(Debug)]
struct Frame {
    /// The ticket that has it, as the device is told.
    ticket: u32,
    feed: Feed,
    upload: Pinned,
    out: Pinned,
    /// Grown when a step first asks for so many rows.
    logits: Option<(usize, Pinned)>,
    hidden: Option<(usize, Pinned)>,
    done: Event,
    /// What the ticket gave, once the host has seen it.
    result: StepOutput,
    /// Why it gave nothing, told to whoever waits for it.
    failed: Option<Error>,
}

#[derive(Clone, Copy, Debug)]
struct Flight {
    ticket: Ticket,
    frame: usize,
    /// The host has its results.
    seen: bool,
}

/// One round: which rows of the step's words, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Round {
    first: bool,
    rows: u32,
    wanted: u32,
    kinds: Kinds,
    /// How tokens are chosen, beside as the best.
    ways: u32,
}

/// What a whole step must leave in memory, besides the tokens that it chooses.
#[derive(Clone, Copy, Debug)]
struct Leaves {
    logits: bool,
    hidden: bool,
}

#[derive(Debug)]
pub(crate) struct CudaProgram {
    // Graphs and frames wait for the stream when dropped, so they come before what they use.
    graphs: HashMap<Round, Graph>,
    frames: Vec<Frame>,
    /// Outputs of a ticket that still runs, as the last two who asked saw them.
    glances: [Pinned; 2],
    prepared: Prepared,
    gpu: Arc<Gpu>,
    plan: Plan,
    limits: Limits,
    shape: Shape,
    /// How steps of a few rows are decoded.
    ways: Ways,
    free: Vec<usize>,
    flights: VecDeque<Flight>,
    slots: Slots,
    tickets: u32,
    /// Filled while profiling: seconds by op.
    times: Option<Vec<f64>>,
    vocab: usize,
    width: usize,
}

impl CudaProgram {
    pub(crate) fn new(
        gpu: Arc<Gpu>,
        plan: &Plan,
        limits: &Limits,
        shape: Shape,
        prepared: Prepared,
    ) -> Result<CudaProgram> {
        let frame = |_| {
            Ok(Frame {
                ticket: 0,
                feed: Feed::new(&shape, limits),
                upload: gpu.pinned(shape.len())?,
                out: gpu.pinned(shape.out_len())?,
                logits: None,
                hidden: None,
                done: gpu.event()?,
                result: StepOutput::default(),
                failed: None,
            })
        };
        let frames = (0..IN_FLIGHT_MAX).map(frame).collect::<Result<Vec<_>>>()?;
        let glances = [gpu.pinned(shape.out_len())?, gpu.pinned(shape.out_len())?];
        let (vocab, width) = widths(plan);
        let mut program = CudaProgram {
            graphs: HashMap::new(),
            glances,
            ways: Ways { one: Way::Graph, several: Way::Graph },
            frames,
            prepared,
            plan: plan.clone(),
            limits: limits.clone(),
            free: (0..IN_FLIGHT_MAX).collect(),
            flights: VecDeque::with_capacity(IN_FLIGHT_MAX),
            slots: Slots::new(limits, plan.hyper.context),
            tickets: 0,
            times: None,
            vocab,
            width,
            shape,
            gpu,
        };
        program.ways = program.first_ways();
        Ok(program)
    }

    /// Queues the step and its chain. Nothing here waits.
    fn queue(&mut self, frame: usize) -> Result<()> {
        let f = &mut self.frames[frame];
        let batch = &f.feed.batch;
        let host = |w: &fornax_plan::Wanted| !matches!(w.want, Want::Token { .. });
        let copies = batch.wanted.iter().any(host);
        let hidden = batch.wanted.iter().any(|w| matches!(w.want, Want::Hidden));
        let (rows, wanted) = (batch.rows.len() as u32, batch.wanted.len() as u32);
        // One row of each sequence, each of them wanted: the shape of decoding.
        let in_turn = batch.wanted.iter().enumerate().all(|(ix, w)| w.row as usize == ix);
        let single = rows == wanted && batch.spans.len() == rows as usize && in_turn;
        let (chain, rounds, ways) = (f.feed.chain.len() as u32, f.feed.rounds, f.feed.ways);
        let outs = f.feed.out_len(&self.shape);
        let used = f.feed.used(&self.shape);
        f.upload.words_mut()[..used].copy_from_slice(&f.feed.words[..used]);
        self.gpu.upload_queued(&self.prepared.feed, &f.upload, used)?;
        self.gpu.clear_queued(&self.prepared.out)?;
        if copies {
            self.room(frame, wanted as usize)?;
        }
        let kinds = self.kinds(frame);
        let first = Round { first: true, rows, wanted, kinds, ways };
        // One token a sequence: the shape of steady decoding.
        let steady = rows == wanted && rows <= self.limits.slots;
        let leaves = Leaves { logits: copies || ways != 0, hidden };
        if single && self.whole_step(first, 1, leaves)? {
            self.choices(first)?;
            if copies {
                self.copies(first, frame)?;
            }
        } else if steady && (!copies || self.prepared.copies_last) {
            self.replay(first)?;
            if copies {
                self.copies(first, frame)?;
            }
        } else {
            self.launches(first, copies.then_some(frame))?;
        }
        let few = self.prepared.many.as_ref().is_none_or(|m| m.few_rows() > 0);
        let kinds = Kinds { few, many: !few, lone: true, ..kinds };
        let next = Round { first: false, rows: chain, wanted: chain, kinds, ways };
        self.chain(next, rounds - 1)?;
        let f = &mut self.frames[frame];
        self.gpu.download_queued(self.prepared.out.ptr, &mut f.out, outs)?;
        f.done.record()
    }

    /// Queues the further rounds of a ticket.
    fn chain(&mut self, round: Round, rounds: u32) -> Result<()> {
        // What is chosen by a draw needs kernels of its own after each round.
        let leaves = Leaves { logits: round.ways != 0, hidden: false };
        if rounds > 0 && round.ways == 0 && self.whole_step(round, rounds, leaves)? {
            return Ok(());
        }
        for _ in 0..rounds {
            if round.ways != 0 && self.whole_step(round, 1, leaves)? {
                self.choices(round)?;
            } else {
                self.replay(round)?;
            }
        }
        Ok(())
    }

    /// Queues the draws and penalties behind a whole step.
    fn choices(&mut self, round: Round) -> Result<()> {
        if round.ways == 0 {
            return Ok(());
        }
        let drawn = |a: &Action| matches!(a, Action::Launch { ways, .. } if *ways != 0);
        for at in 0..self.prepared.actions.len() {
            if drawn(&self.prepared.actions[at]) {
                self.action(at, round, None)?;
            }
        }
        Ok(())
    }

    /// Queues so many rounds as one launch; false where there is no kernel for that.
    fn whole_step(&mut self, round: Round, rounds: u32, leaves: Leaves) -> Result<bool> {
        if self.times.is_some() {
            return Ok(false);
        }
        let way = if round.rows == 1 { self.ways.one } else { self.ways.several };
        let (base, wanted) = self.places(round.first);
        let words = self.prepared.words(&self.shape, wanted);
        let (gpu, size) = (&self.gpu, (round.rows, rounds, base as u32));
        match (way, &mut self.prepared.tape, &mut self.prepared.decode) {
            (Way::Tape, Some(tape), _) if round.rows == 1 && !leaves.hidden => {
                tape.launch(gpu, (rounds, base as u32), &words, leaves.logits)?;
            }
            (Way::Tape | Way::Whole, _, Some(decode)) if decode.takes(round.rows) => {
                decode.launch(gpu, size, &words)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Where a round's rows begin among all rows, and the words of its wants.
    fn places(&self, first: bool) -> (usize, std::ops::Range<usize>) {
        if first {
            (0, self.shape.wanted())
        } else {
            (self.shape.chain_base(), self.shape.chain_wanted())
        }
    }

    /// Queues the host's copies behind a whole round.
    fn copies(&mut self, round: Round, frame: usize) -> Result<()> {
        for at in 0..self.prepared.actions.len() {
            self.copy(at, round, frame)?;
        }
        Ok(())
    }

    /// Queues the copy that action `at` is, if it is one.
    fn copy(&mut self, at: usize, round: Round, frame: usize) -> Result<()> {
        let f = &mut self.frames[frame];
        let (from, to, width) = match self.prepared.actions[at] {
            Action::CopyLogits { from } => (from, &mut f.logits, self.vocab),
            Action::CopyHidden { from } => (from, &mut f.hidden, self.width),
            _ => return Ok(()),
        };
        match to {
            Some((_, to)) => self.gpu.download_queued(from, to, round.wanted as usize * width),
            None => Ok(()),
        }
    }

    /// Host memory for so many rows of logits and of hidden values.
    fn room(&mut self, frame: usize, rows: usize) -> Result<()> {
        let f = &mut self.frames[frame];
        for (to, width) in [(&mut f.logits, self.vocab), (&mut f.hidden, self.width)] {
            if width > 0 && to.as_ref().is_none_or(|(have, _)| *have < rows) {
                *to = None;
                *to = Some((rows, self.gpu.pinned(rows * width)?));
            }
        }
        Ok(())
    }

    /// Queues a round as one graph, captured when its shape is first met. Rows up to the next of a few numbers are there and
    /// masked, so that there are few graphs.
    fn replay(&mut self, round: Round) -> Result<()> {
        if self.times.is_some() {
            return self.launches(round, None);
        }
        let padded = feed::padded(round.rows, feed::row_limit(&self.limits, round.first));
        let round = Round { rows: padded, wanted: padded, ..round };
        if let Some(graph) = self.graphs.get(&round) {
            return graph.launch();
        }
        let gpu = Arc::clone(&self.gpu);
        let graph = gpu.capture(|| self.launches(round, None))?;
        graph.launch()?;
        self.graphs.insert(round, graph);
        Ok(())
    }

    /// Which sequences the frame's step has, for attention.
    fn kinds(&self, frame: usize) -> Kinds {
        let (Some(many), f) = (&self.prepared.many, &self.frames[frame].feed) else {
            return Kinds::default();
        };
        let few = many.few_rows();
        let spans = || f.batch.spans.iter();
        let last = f.batch.rows.iter().map(|r| r.pos).max().unwrap_or(0) + f.rounds;
        let by_row = many.by_row();
        Kinds {
            few: by_row || few > 0 && spans().any(|s| s.rows <= 16),
            many: !by_row && spans().any(|s| s.rows > few),
            lone: spans().all(|s| s.rows == 1),
            parts: rows::parts(last).next_power_of_two(),
        }
    }

    /// Queues a round launch by launch.
    fn launches(&mut self, round: Round, copies: Option<usize>) -> Result<()> {
        let Some(many) = self.prepared.many.take() else {
            return (0..self.prepared.actions.len())
                .try_for_each(|at| self.action(at, round, copies));
        };
        // Taken out for as long as plain actions want the rest.
        let done = many.items.iter().try_for_each(|item| {
            if let Item::Action(at) = item {
                return self.action(*at, round, copies);
            }
            let started = self.times.is_some().then(Instant::now);
            let op = many.launch(&self.gpu, item, &self.step_of(round))?;
            self.note(op, started)
        });
        self.prepared.many = Some(many);
        done
    }

    fn step_of(&self, round: Round) -> rows::Step {
        let feed = self.prepared.feed.ptr;
        rows::Step {
            rows: round.rows,
            wanted: round.wanted,
            rows_at: feed + 4 * (self.places(round.first).0 * ROW) as u64,
            tables: rows::tables(feed, &self.shape),
            kinds: round.kinds,
        }
    }

    /// Adds what an op took, while profiling.
    fn note(&mut self, op: u32, started: Option<Instant>) -> Result<()> {
        if let (Some(times), Some(started)) = (&mut self.times, started) {
            self.gpu.finish()?;
            times[op as usize] += started.elapsed().as_secs_f64();
        }
        Ok(())
    }

    /// Queues one plain action.
    fn action(&mut self, at: usize, round: Round, copies: Option<usize>) -> Result<()> {
        let feed = self.prepared.feed.ptr;
        let (base, wanted) = self.places(round.first);
        let rows_at = feed + 4 * (base * ROW) as u64;
        let wanted_at = feed + 4 * wanted.start as u64;
        let address = |place: &Place| match place {
            Place::At(at) => *at,
            Place::Rows => rows_at,
            Place::Wanted => wanted_at,
        };
        let mut words = [0u32; 16];
        let mut pointers = [0u64; 16];
        if let Some(frame) = copies {
            self.copy(at, round, frame)?;
        }
        let started = self.times.is_some().then(Instant::now);
        let rows = |extent: Extent| if extent == Extent::Rows { round.rows } else { round.wanted };
        let op = match &self.prepared.actions[at] {
            Action::CopyLogits { .. } | Action::CopyHidden { .. } => return Ok(()),
            Action::Stage { op, at, extent } => {
                let n = rows(*extent);
                if let (Some(kernel), 1..) = (&self.prepared.rows, n) {
                    let mut words = kernel.args();
                    words[0] = n;
                    let grid = (self.gpu.units, n.div_ceil(kernel.rows));
                    let shared = kernel.room.bytes;
                    self.gpu.launch(&kernel.stage, grid, ROWS_THREADS, shared, &words, &[*at])?;
                }
                *op
            }
            Action::EmbedRows { op, constants, places } => {
                if let Some(kernel) = &self.prepared.rows {
                    let words = &mut words[..constants.len()];
                    words.copy_from_slice(constants);
                    words[0] = round.rows;
                    let pointers = &mut pointers[..places.len()];
                    pointers.iter_mut().zip(places).for_each(|(to, p)| *to = address(p));
                    let grid = (round.rows, 1);
                    self.gpu.launch(&kernel.embed, grid, 256, 0, words, pointers)?;
                }
                *op
            }
            Action::Launch {
                op,
                function,
                grid,
                threads,
                extent,
                constants,
                base_at,
                places,
                ways,
            } => {
                let n = rows(*extent);
                if n == 0 || *ways != 0 && *ways & round.ways == 0 {
                    return Ok(());
                }
                let words = &mut words[..constants.len()];
                words.copy_from_slice(constants);
                words[0] = n;
                if let Some(at) = base_at {
                    words[*at] = base as u32;
                }
                let pointers = &mut pointers[..places.len()];
                pointers.iter_mut().zip(places).for_each(|(to, p)| *to = address(p));
                self.gpu.launch(function, grid.of(n), *threads, 0, words, pointers)?;
                *op
            }
        };
        self.note(op, started)
    }

    fn flight(&self, ticket: Ticket) -> Result<usize> {
        self.flights
            .iter()
            .position(|f| f.ticket == ticket)
            .ok_or_else(|| Error::malformed(format!("ticket {} is not under way", ticket.0)))
    }
}

/// Elements of a row of logits and of a hidden row; 0 where the plan hands none out.
fn widths(plan: &Plan) -> (usize, usize) {
    let (mut vocab, mut width) = (0, 0);
    for op in &plan.ops {
        match op {
            Op::Sample { logits } => vocab = plan.width(*logits) as usize,
            Op::HiddenOut { x } => width = plan.width(*x) as usize,
            _ => {}
        }
    }
    (vocab, width)
}

impl Program for CudaProgram {
    fn submit(&mut self, step: &[SeqStep<'_>]) -> Result<Ticket> {
        self.gpu.enter()?;
        let Some(&frame) = self.free.last() else {
            return Err(Error::malformed(format!(
                "step: {IN_FLIGHT_MAX} steps are under way, wait for one of them first"
            )));
        };
        self.remember(step)?;
        let ticket = self.tickets + 1;
        let CudaProgram { frames, slots, .. } = self;
        let f = &mut frames[frame];
        f.feed.fill(step, &self.plan, &self.limits, KV_BLOCK, &self.shape, ticket, slots)?;
        (self.tickets, f.ticket) = (ticket, ticket);
        self.queue(frame)?;
        for seq in step {
            if seq.wants.iter().any(|(_, w)| matches!(w, Want::Token { .. })) {
                self.slots.chooses(seq.slot);
            }
            let noted = seq.sample.is_some_and(|p| feed::ways(&p) & PENALISED != 0);
            let rows = seq.tokens.rows() as u32;
            self.slots.submitted(seq.slot, seq.pos, rows, seq.max_new, noted);
        }
        self.free.pop();
        let ticket = Ticket(ticket.into());
        self.flights.push_back(Flight { ticket, frame, seen: false });
        Ok(ticket)
    }

    fn poll(&mut self, ticket: &Ticket, out: &mut StepOutput) -> Result<Progress> {
        let at = self.flight(*ticket)?;
        out.clear();
        let Flight { frame, seen, .. } = self.flights[at];
        if !seen && !self.frames[frame].done.passed()? {
            self.so_far(frame, out)?;
            return Ok(Progress::Running);
        }
        self.see(at)?;
        if let Some(e) = self.frames[frame].failed.take() {
            return Err(e);
        }
        out.clone_from(&self.frames[frame].result);
        Ok(Progress::Done)
    }

    fn wait(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        let at = self.flight(ticket)?;
        out.clear();
        let frame = self.flights[at].frame;
        let seen = self.see(at);
        self.flights.remove(at);
        self.free.push(frame);
        seen?;
        let f = &mut self.frames[frame];
        std::mem::swap(out, &mut f.result);
        f.failed.take().map_or(Ok(()), Err)
    }

    fn stop(&mut self, slot: SlotId) {
        if slot.0 < self.limits.slots {
            // A GPU that is lost is told by the next wait; there is nothing to stop any more.
            let _ = self.gpu.poke(self.prepared.stop.ptr + 4 * u64::from(slot.0), self.tickets);
        }
    }

    fn command(&mut self, command: Cmd<'_>) -> Result<()> {
        self.cache_command(command)
    }

    fn memory(&self) -> MemoryUse {
        let pools = self.prepared.pools.iter().flatten();
        let kv = pools.map(|p| (p.keys.len + p.values.len) as u64).sum();
        let step = (self.prepared.feed.len + self.prepared.out.len) as u64;
        let states: u64 = self.prepared.states.iter().map(|s| s.len as u64).sum();
        MemoryUse {
            weights: self.prepared.weight_bytes,
            kv,
            scratch: self.prepared.scratch_bytes + step + states,
        }
    }

    fn grow_kv(&mut self, _: u32) -> Result<()> {
        Err(Error::unsupported("cuda: KV blocks cannot be added to a prepared program yet"))
    }

    fn profile(&mut self, step: &[SeqStep<'_>], out: &mut StepOutput) -> Result<Vec<OpTime>> {
        self.gpu.finish()?;
        self.times = Some(vec![0.0; self.plan.ops.len()]);
        let ran = self.submit(step).and_then(|ticket| self.wait(ticket, out));
        let times = self.times.take().unwrap_or_default();
        ran?;
        Ok(OpTime::by_name(&self.plan, &times))
    }
}
