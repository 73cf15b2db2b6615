//! A prepared plan at work: one command buffer for a step and the whole chain behind it, one wait
//! for its results. It knows no kernel.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use fornax_gguf::{TensorType, blocks};
use fornax_plan::{
    BlockId, Cmd, Error, Limits, MemoryUse, OpTime, Plan, Program, Progress, Result, SeqStep,
    SlotId, StepOutput, StepReport, StepSeconds, Ticket, Want,
};

use crate::api::{Buffer, Committed, Device, Queue};
use crate::device::Journal;
use crate::encode::{Barriers, Round, Writer};
use crate::feed::{Feed, NONE, Shape};
use crate::prepare::{KV_BLOCK, Prepared, pool_words};
use crate::report;

mod collect;
mod grow;

/// Steps that may be under way at once; each has buffers of its own.
const IN_FLIGHT_MAX: usize = 2;

/// The buffers of one step in flight.
#[derive(Debug)]
struct Frame {
    feed: Feed,
    upload: Buffer,
    out: Buffer,
    logits: Buffer,
    hidden: Buffer,
    /// When its commands were committed: buffers made, and the host's seconds.
    made: u64,
    encode_s: f64,
}

#[derive(Debug)]
struct Flight {
    ticket: Ticket,
    frame: usize,
    committed: Committed,
}

#[derive(Debug)]
pub(crate) struct MetalProgram {
    device: Device,
    queue: Queue,
    plan: Plan,
    limits: Limits,
    shape: Shape,
    prepared: Prepared,
    writer: Writer,
    frames: Vec<Frame>,
    free: Vec<usize>,
    flights: VecDeque<Flight>,
    /// By slot: a token is chosen, or will be by a step in flight.
    known: Vec<bool>,
    tickets: u32,
    journal: Arc<Journal>,
    /// As many times nothing as a ticket has choices.
    nothing: Vec<u32>,
    /// Read back from the device.
    words: Vec<u32>,
    floats: Vec<f32>,
    last: Last,
    /// Of one token.
    weight_bytes: u64,
}

/// What is known of the last step that was waited for.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    command_buffers: u64,
    waits: u64,
    readback: u64,
    /// The least that its last token could read.
    needed: u64,
    made: u64,
    seconds: StepSeconds,
}

impl MetalProgram {
    #[allow(clippy::too_many_arguments, reason = "one call, from prepare")]
    pub(crate) fn new(
        device: Device,
        plan: &Plan,
        limits: &Limits,
        shape: Shape,
        prepared: Prepared,
        barriers: Barriers,
        journal: Arc<Journal>,
    ) -> Result<MetalProgram> {
        let wanted = limits.wanted as usize;
        let (vocab, width) = collect::widths(plan);
        let queue = device.queue()?;
        let frame = |_| {
            Ok(Frame {
                feed: Feed::new(&shape, limits),
                upload: device.buffer("step", shape.len())?,
                out: device.buffer("outputs", 2 * shape.choices())?,
                logits: device.buffer("logits", wanted * vocab)?,
                hidden: device.buffer("hidden rows", wanted * width)?,
                made: 0,
                encode_s: 0.0,
            })
        };
        Ok(MetalProgram {
            queue,
            frames: (0..IN_FLIGHT_MAX).map(frame).collect::<Result<_>>()?,
            free: (0..IN_FLIGHT_MAX).collect(),
            flights: VecDeque::with_capacity(IN_FLIGHT_MAX),
            known: vec![false; limits.slots as usize],
            writer: Writer::new(barriers),
            plan: plan.clone(),
            limits: limits.clone(),
            tickets: 0,
            nothing: vec![NONE; shape.choices()],
            words: Vec::new(),
            floats: Vec::new(),
            last: Last::default(),
            weight_bytes: plan.bytes_per_token(),
            device,
            shape,
            prepared,
            journal,
        })
    }

    /// Writes the step and its chain into one command buffer.
    fn encode(&mut self, frame: usize) -> Result<crate::api::CommandBuffer> {
        let MetalProgram { queue, writer, prepared, frames, shape, journal, .. } = self;
        let frame = &frames[frame];
        let batch = &frame.feed.batch;
        let wants_rows = |w: &fornax_plan::Wanted| !matches!(w.want, Want::Token { .. });
        let mut round = Round {
            first: true,
            rows: batch.rows.len(),
            wanted: batch.wanted.len(),
            apart: batch.spans.len() == batch.rows.len(),
            copies: batch.wanted.iter().any(wants_rows),
            ways: frame.feed.ways,
            base: 0,
            number: 0,
            batch,
            chain: &frame.feed.chain,
            most_s: queue.pace().most(),
            upload: frame.upload,
            out: frame.out,
            logits: frame.logits,
            hidden: frame.hidden,
            shape,
        };
        let mut buffer = queue.command_buffer();
        let mut encoder = buffer.encoder();
        writer.begin();
        let before = writer.asked();
        let mut commands = writer.round(&mut encoder, &prepared.commands, &round)?;
        (round.first, round.apart) = (false, true);
        round.base = shape.chain_base();
        (round.rows, round.wanted) = (frame.feed.chain.len(), frame.feed.chain.len());
        for number in 1..frame.feed.rounds {
            encoder.mark();
            round.number = number;
            commands += writer.round(&mut encoder, &prepared.commands, &round)?;
        }
        journal.commands.fetch_add(commands, Relaxed);
        journal.barriers.fetch_add(writer.asked() - before, Relaxed);
        Ok(buffer)
    }

    /// Runs everything that is under way, so that the host may touch the pools.
    fn drain(&mut self) -> Result<()> {
        self.flights.iter().try_for_each(|f| f.committed.wait())
    }

    /// Bytes that the last token of a frame had to read: the weights, and what its sequences see
    /// of the cache.
    fn needed(&self, frame: usize) -> u64 {
        let feed = &self.frames[frame].feed;
        let chained = feed.chain.iter().filter(|_| feed.rounds > 1).map(|c| c.pos + feed.rounds);
        let rows = feed.batch.rows.iter().filter(|_| feed.rounds == 1).map(|r| r.pos + 1);
        let kv: u64 = chained.chain(rows).map(|end| self.live_kv(end)).sum();
        self.weight_bytes + kv
    }

    /// Bytes of keys and values that a row with so many positions up to its own sees.
    fn live_kv(&self, end: u32) -> u64 {
        let element =
            self.prepared.kv_type.block_bytes() as f64 / self.prepared.kv_type.block_len() as f64;
        let group = |g: &fornax_plan::KvGroup| {
            let seen = g.window.map_or(end, |w| end.min(w)) as usize;
            (seen * g.layers.len()) as f64 * f64::from(g.heads * (g.k_width + g.v_width))
        };
        (self.plan.kv.iter().map(group).sum::<f64>() * element) as u64
    }

    fn flight(&self, ticket: Ticket) -> Result<usize> {
        self.flights
            .iter()
            .position(|f| f.ticket == ticket)
            .ok_or_else(|| Error::malformed(format!("ticket {} is not under way", ticket.0)))
    }

    fn known_blocks(&self, group: u32, blocks: &[BlockId], tokens: u32) -> Result<()> {
        if group as usize >= self.plan.kv.len() {
            let have = self.plan.kv.len();
            return Err(Error::malformed(format!("kv group {group}, expected less than {have}")));
        }
        if let Some(b) = blocks.iter().find(|b| b.0 >= self.limits.kv_blocks) {
            let have = self.limits.kv_blocks;
            return Err(Error::malformed(format!("kv block {}, the pool has {have}", b.0)));
        }
        let need = tokens.div_ceil(KV_BLOCK) as usize;
        if blocks.len() < need {
            let have = blocks.len();
            return Err(Error::malformed(format!("kv table of {have} blocks, {need} are needed")));
        }
        Ok(())
    }

    fn known_slot(&self, slot: SlotId) -> Result<()> {
        let have = self.limits.slots;
        if slot.0 >= have {
            return Err(Error::malformed(format!("slot {}, expected less than {have}", slot.0)));
        }
        Ok(())
    }

    /// Every state, and the elements that it has for a slot.
    fn states(&self) -> impl Iterator<Item = (Buffer, usize)> + '_ {
        let states = self.prepared.states.iter().zip(&self.plan.states);
        states.map(|(buffer, spec)| (*buffer, spec.len as usize))
    }

    /// The elements of every token of a range: layer by layer, keys before values.
    fn kv_tokens(
        &self,
        group: u32,
        table: &[BlockId],
        tokens: std::ops::Range<u32>,
        mut each: impl FnMut(Buffer, usize, usize) -> Result<()>,
    ) -> Result<()> {
        let g = &self.plan.kv[group as usize];
        let widths = [g.heads * g.k_width, g.heads * g.v_width].map(|w| w as usize);
        for [keys, values] in &self.prepared.pools[group as usize] {
            for pos in tokens.clone() {
                let (piece, block) = self.shape.pieces.place(table[(pos / KV_BLOCK) as usize].0);
                let at = (block * KV_BLOCK + pos % KV_BLOCK) as usize;
                each(keys.pieces[piece], at * widths[0], widths[0])?;
                each(values.pieces[piece], at * widths[1], widths[1])?;
            }
        }
        Ok(())
    }

    fn read_kv(
        &self,
        group: u32,
        table: &[BlockId],
        tokens: std::ops::Range<u32>,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        let (ty, mut words) = (self.prepared.kv_type, Vec::new());
        self.kv_tokens(group, table, tokens, |buffer, at, len| {
            let (first, skip, bytes) = words_of(ty, at, len);
            words.resize((skip + bytes).div_ceil(4), 0);
            self.device.read(buffer, first, &mut words);
            let data: Vec<u8> = words.iter().flat_map(|w: &u32| w.to_le_bytes()).collect();
            let start = out.len();
            out.resize(start + len, 0.0);
            blocks::dequantize(ty, &data[skip..skip + bytes], &mut out[start..])
                .map_err(|e| Error::malformed(e.to_string()))
        })
    }

    fn write_kv(
        &self,
        group: u32,
        table: &[BlockId],
        tokens: std::ops::Range<u32>,
        data: &[f32],
    ) -> Result<()> {
        let (ty, mut words, mut data) = (self.prepared.kv_type, Vec::new(), data);
        self.kv_tokens(group, table, tokens, |buffer, at, len| {
            let (first, skip, bytes) = words_of(ty, at, len);
            words.resize((skip + bytes).div_ceil(4), 0);
            // What shares the first and the last word stays as it is.
            self.device.read(buffer, first, &mut words);
            let mut all: Vec<u8> = words.iter().flat_map(|w: &u32| w.to_le_bytes()).collect();
            let (now, rest) = data.split_at(len);
            data = rest;
            blocks::quantize(ty, now, &mut all[skip..skip + bytes])
                .map_err(|e| Error::malformed(e.to_string()))?;
            for (w, b) in words.iter_mut().zip(all.chunks_exact(4)) {
                *w = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
            self.device.write(buffer, first, &words);
            Ok(())
        })
    }
}

/// The first word of `len` elements from `at` on, the bytes before them in it, and their bytes.
fn words_of(ty: TensorType, at: usize, len: usize) -> (usize, usize, usize) {
    let bytes = |elements: usize| elements / ty.block_len() * ty.block_bytes();
    (bytes(at) / 4, bytes(at) % 4, bytes(len))
}

impl Program for MetalProgram {
    fn submit(&mut self, step: &[SeqStep<'_>]) -> Result<Ticket> {
        let Some(&frame) = self.free.last() else {
            return Err(Error::malformed(format!(
                "step: {IN_FLIGHT_MAX} steps are under way, wait for one of them first"
            )));
        };
        let ticket = self.tickets + 1;
        let started = Instant::now();
        let before = self.device.allocations();
        let Frame { feed, upload, out, .. } = &mut self.frames[frame];
        let known = |slot: SlotId| self.known.get(slot.ix()).copied().unwrap_or(false);
        feed.fill(step, &self.plan, &self.limits, KV_BLOCK, &self.shape, ticket, known)?;
        self.device.write(*upload, 0, &feed.words);
        let choices = feed.choices(&self.shape);
        self.device.write(*out, 0, &self.nothing[..choices]);
        let committed = self.encode(frame)?.commit();
        self.frames[frame].made = self.device.allocations() - before;
        self.frames[frame].encode_s = started.elapsed().as_secs_f64();
        self.journal.submissions.fetch_add(committed.parts(), Relaxed);
        self.tickets = ticket;
        for seq in step {
            let chooses = seq.wants.iter().any(|(_, w)| matches!(w, Want::Token { .. }));
            self.known[seq.slot.ix()] |= chooses;
        }
        self.free.pop();
        self.flights.push_back(Flight { ticket: Ticket(ticket.into()), frame, committed });
        Ok(Ticket(ticket.into()))
    }

    fn poll(&mut self, ticket: &Ticket, out: &mut StepOutput) -> Result<Progress> {
        let flight = &self.flights[self.flight(*ticket)?];
        if !flight.committed.is_ready() {
            out.clear();
            return Ok(Progress::Running);
        }
        let done = flight.committed.advance()?;
        let frame = flight.frame;
        self.collect(frame, out)?;
        Ok(if done { Progress::Done } else { Progress::Running })
    }

    fn wait(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        out.clear();
        let at = self.flight(ticket)?;
        let flight = &self.flights[at];
        let (frame, waits) = (flight.frame, u64::from(!flight.committed.is_done()));
        let before = self.queue.device_seconds();
        let waited = flight.committed.wait();
        let (device, encode) = (self.queue.device_seconds() - before, self.frames[frame].encode_s);
        self.journal.waits.fetch_add(waits, Relaxed);
        self.last = Last {
            command_buffers: flight.committed.parts(),
            waits,
            needed: self.needed(frame),
            made: self.frames[frame].made,
            seconds: StepSeconds { encode, device },
            readback: 0,
        };
        self.flights.remove(at);
        self.free.push(frame);
        if waited.is_err() {
            // What those slots chose is nothing that a later step may begin with.
            let spans = &self.frames[frame].feed.batch.spans;
            spans.iter().for_each(|span| self.known[span.slot.ix()] = false);
        }
        waited?;
        self.last.readback = self.collect(frame, out)?;
        Ok(())
    }

    fn stop(&mut self, slot: SlotId) {
        if slot.0 < self.limits.slots {
            self.device.write(self.prepared.stop, slot.ix(), &[self.tickets]);
        }
    }

    fn command(&mut self, command: Cmd<'_>) -> Result<()> {
        self.drain()?;
        match command {
            Cmd::CopyBlock { group, from, to } => {
                self.known_blocks(group, &[from, to], 0)?;
                let g = &self.plan.kv[group as usize];
                let widths = [g.heads * g.k_width, g.heads * g.v_width];
                let [from, to] = [from, to].map(|b| self.shape.pieces.place(b.0));
                let mut words = Vec::new();
                for pair in &self.prepared.pools[group as usize] {
                    for (pool, width) in pair.iter().zip(widths) {
                        let len = pool_words(self.prepared.kv_type, 1, width);
                        words.resize(len, 0);
                        self.device.read(pool.pieces[from.0], from.1 as usize * len, &mut words);
                        self.device.write(pool.pieces[to.0], to.1 as usize * len, &words);
                    }
                }
            }
            Cmd::ReadKv { group, table, tokens, out } => {
                self.known_blocks(group, table, tokens.end)?;
                out.clear();
                self.read_kv(group, table, tokens, out)?;
            }
            Cmd::WriteKv { group, table, tokens, data } => {
                self.known_blocks(group, table, tokens.end)?;
                let mut need = 0;
                self.kv_tokens(group, table, tokens.clone(), |_, _, len| {
                    need += len;
                    Ok(())
                })?;
                if data.len() != need {
                    let found = data.len();
                    let what = format!("write kv: {found} elements, expected {need}");
                    return Err(Error::malformed(what));
                }
                self.write_kv(group, table, tokens, data)?;
            }
            Cmd::ReadState { slot, out } => {
                self.known_slot(slot)?;
                out.clear();
                for (buffer, len) in self.states() {
                    let mut words = vec![0; len];
                    self.device.read(buffer, slot.ix() * len, &mut words);
                    out.extend(words.iter().map(|w| f32::from_bits(*w)));
                }
            }
            Cmd::WriteState { slot, data } => {
                self.known_slot(slot)?;
                let need: usize = self.states().map(|(_, len)| len).sum();
                if data.len() != need {
                    let found = data.len();
                    let what = format!("write state: {found} elements, expected {need}");
                    return Err(Error::malformed(what));
                }
                let mut rest = data;
                for (buffer, len) in self.states() {
                    let (now, after) = rest.split_at(len);
                    rest = after;
                    let words: Vec<u32> = now.iter().map(|v| v.to_bits()).collect();
                    self.device.write(buffer, slot.ix() * len, &words);
                }
            }
        }
        Ok(())
    }

    fn memory(&self) -> MemoryUse {
        let pools = self.prepared.pools.iter().flatten();
        let kv = pools.flatten().flat_map(|p| &p.pieces).map(|b| b.len_bytes as u64).sum();
        let step = |f: &Frame| {
            [f.upload, f.out, f.logits, f.hidden].iter().map(|b| b.len_bytes as u64).sum::<u64>()
        };
        let scratch = self.prepared.scratch_bytes + self.frames.iter().map(step).sum::<u64>();
        MemoryUse { weights: 0, kv, scratch }
    }

    fn grow_kv(&mut self, blocks: u32) -> Result<()> {
        self.grow(blocks)
    }

    fn profile(&mut self, step: &[SeqStep<'_>], out: &mut StepOutput) -> Result<Vec<OpTime>> {
        self.drain()?;
        self.queue.start_times(self.plan.ops.len());
        let ran = self.submit(step).and_then(|ticket| self.wait(ticket, out));
        let times = self.queue.take_times();
        ran?;
        Ok(OpTime::by_name(&self.plan, &times))
    }

    fn kernel_times(&self) -> Vec<OpTime> {
        self.queue.look(report::times)
    }

    fn step_report(&self) -> Option<StepReport> {
        let counted = self.queue.look(|ran| report::count(&self.plan, ran))?;
        let Last { command_buffers, waits, readback, needed, made, .. } = self.last;
        Some(StepReport {
            command_buffers,
            encoders: command_buffers,
            waits,
            readback_bytes: readback,
            bytes_needed: needed,
            allocations: made,
            ..counted
        })
    }

    fn step_seconds(&self) -> Option<StepSeconds> {
        Some(self.last.seconds)
    }
}
