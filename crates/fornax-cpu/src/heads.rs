//! The stage of attention: head norms, rotation, the write to the cache and the look at it, shared
//! out by row and key head. It knows no kernel and no plan.

use fornax_plan::Span;

use crate::compile::{Look, Rotate, Rows, Wide, Write};
use crate::matrix::{lines, prefetch, prefetch_to_write};
use crate::ops::{Attend, BLOCK, LongAttend, QUERIES, TILE_QUERIES, fits, part_len, splits};
use crate::pool::{Poisoned, Team};
use crate::run::{Machine, Round, SOON_ROWS, Worker};

/// Rows of a key head that are rotated and written together.
const PREPARED: usize = 16;

impl Machine {
    /// Head norms, rotation, the write to the cache and attention.
    pub(crate) fn heads(
        &self,
        wide: &Wide,
        team: &Team<'_>,
        round: &Round<'_>,
        worker: &mut Worker,
    ) -> Result<(), Poisoned> {
        let Wide::Heads { rotate, write, look } = wide else { return Ok(()) };
        let batch = round.batch;
        let n = batch.rows.len();
        // Without the cache there is no key head to go by: a row is one item.
        let kv = write.as_ref().map(|w| w.kv).or(look.as_ref().map(|l| l.kv));
        let heads = kv.map_or(1, |kv| self.cache.pool(kv.group as usize).run.heads);
        let prepare = |row: usize, head: usize| {
            // SAFETY: this head of this row is this thread's alone until the barrier.
            unsafe {
                if let Some(rotate) = rotate {
                    self.rotate(rotate, row, head, heads);
                }
                if let Some(write) = write {
                    self.write(write, row, head, round);
                }
            }
        };
        // Rows of a head lie apart, so that nothing but this brings the next one.
        let ask = |row: usize, head: usize| {
            for (from, to) in rotate.iter().flat_map(|r| [(r.q, r.q_out), (r.k, r.k_out)]) {
                let (len, line) = (from.width / heads, 64 / size_of::<f32>());
                for at in (head * len..(head + 1) * len).step_by(line) {
                    prefetch(from.ptr(row).wrapping_add(at).cast());
                    prefetch_to_write(to.ptr(row).wrapping_add(at));
                }
            }
            if let Some(write) = write {
                let len = write.v.width / heads;
                lines(write.v.ptr(row).wrapping_add(head * len).cast(), len * size_of::<f32>());
            }
        };
        // Rows of one head together: its keys of a block are written into the same cache lines.
        let tall = if n >= 2 * PREPARED { PREPARED } else { 1 };
        let prepare_some = |item: usize| {
            let from = item / heads * tall;
            let rows = from..(from + tall).min(n);
            for row in rows.clone() {
                if row + SOON_ROWS < rows.end {
                    ask(row + SOON_ROWS, item % heads);
                }
                prepare(row, item % heads);
            }
        };
        let items = n.div_ceil(tall) * heads;
        let Some(look) = look else {
            team.share(items, prepare_some);
            return Ok(());
        };
        let share = look.heads / heads;
        let single = batch.spans.len() == n && share <= QUERIES;
        let longest = batch.rows.iter().map(|r| splits(r.pos as usize, look.window).len()).max();
        if single
            && n * heads < 2 * team.threads
            && team.threads > 1
            && longest > Some(2)
            && longest <= Some(self.parts.splits)
        {
            if rotate.is_some() || write.is_some() {
                team.share(items, prepare_some);
                team.barrier()?;
            }
            return self.look_together(look, longest.unwrap_or(1), team, round, worker);
        }
        if single {
            // One row for each sequence: whoever wrote a key head is the one to read it.
            team.share(n * heads, |item| {
                let (row, head) = (item / heads, item % heads);
                let span = &batch.spans[row];
                self.ask(look, span, head, round);
                prepare(row, head);
                self.look(look, span, 0..1, head, 0..share, round, worker);
            });
            return Ok(());
        }
        if rotate.is_some() || write.is_some() {
            team.share(items, prepare_some);
            team.barrier()?;
        }
        let per_call = share.min(QUERIES);
        let calls = share.div_ceil(per_call);
        let step = (QUERIES / per_call).max(1);
        // Rows of long prompts may have a form of their own, all heads of a group in one call.
        let long = self.long_attend(look, share, round);
        let is_long = |span: &&Span| long.is_some() && round.cuts.is_long_span(span);
        let long_step = (TILE_QUERIES / share).max(1);
        let tall = || batch.spans.iter().filter(is_long);
        let flat = || batch.spans.iter().filter(|span| !is_long(span));
        let tall_blocks = blocks(tall(), long_step);
        let flat_blocks = blocks(flat(), step);
        team.share((tall_blocks + flat_blocks * calls) * heads, |item| {
            // Last rows first: they see most keys, and the short ones fill the gaps.
            if let (Some(attend), true) = (long, item < tall_blocks * heads) {
                let block = tall_blocks - 1 - item / heads;
                let Some((span, rows)) = block_of(tall(), long_step, block) else { return };
                self.call(look, span, rows.clone(), item % heads, 0..share, round, |call| {
                    // SAFETY: as for every look, and the shape was asked about.
                    unsafe { attend(&call, &mut worker.tiles) }
                });
                self.make(look, span, rows, item % heads, 0..share, None, round);
                return;
            }
            let item = item - tall_blocks * heads;
            let (head, call) = (item / calls % heads, item % calls);
            let block = flat_blocks - 1 - item / (calls * heads);
            let Some((span, rows)) = block_of(flat(), step, block) else { return };
            let of_group = call * per_call..((call + 1) * per_call).min(share);
            self.look(look, span, rows, head, of_group, round, worker);
        });
        Ok(())
    }

    /// The attention of long prompts, where it takes this one's shape.
    fn long_attend(&self, l: &Look, share: usize, round: &Round<'_>) -> Option<LongAttend> {
        let run = self.cache.pool(l.kv.group as usize).run;
        let takes = share <= TILE_QUERIES && fits(run.cell, run.k_width, run.v_width);
        self.prompt.as_ref().filter(|_| takes && round.cuts.any())?.attend
    }

    /// Asks for the first keys that a row of a sequence will look at.
    fn ask(&self, l: &Look, span: &Span, head: usize, round: &Round<'_>) {
        let pool = self.cache.pool(l.kv.group as usize);
        let table = round.step[span.seq as usize].tables[l.kv.group as usize];
        let first = (span.pos as usize + 1).saturating_sub(l.window) / BLOCK;
        let (keys, values) = pool.run(table[first], l.kv.layer as usize, head);
        lines(keys, values.addr() - keys.addr());
    }

    /// Norms and rotates key head `head` of `heads` and its share of the query heads.
    ///
    /// # Safety
    /// Nobody else touches these heads of this row meanwhile.
    unsafe fn rotate(&self, r: &Rotate, row: usize, head: usize, heads: usize) {
        for (x, out, norm) in [(r.q, r.q_out, &r.q_norm), (r.k, r.k_out, &r.k_norm)] {
            let len = x.width / heads;
            for at in (head * len..(head + 1) * len).step_by(r.dim) {
                // SAFETY: `at` is the start of a head of this row.
                unsafe {
                    let (from, to) = (x.ptr(row).add(at), out.ptr(row).add(at));
                    match norm {
                        Some(w) => {
                            let none = std::ptr::null();
                            (self.ops.norm)(from, w.as_ptr(), none, r.eps, to, r.dim);
                        }
                        None => std::ptr::copy_nonoverlapping(from, to, r.dim),
                    }
                    if let Some((range, pairs)) = &r.angles {
                        let head = std::slice::from_raw_parts_mut(to, r.dim);
                        (self.ops.rotate)(head, &self.angles.row(row)[range.clone()], *pairs);
                    }
                }
            }
        }
    }

    /// Stores one key head of a row.
    ///
    /// # Safety
    /// Nobody else touches this head of this row's token meanwhile.
    unsafe fn write(&self, w: &Write, row: usize, head: usize, round: &Round<'_>) {
        let at = round.batch.rows[row];
        let table = round.step[at.seq as usize].tables[w.kv.group as usize];
        let pool = self.cache.pool(w.kv.group as usize);
        let pos = at.pos as usize;
        let place = (table[pos / BLOCK], w.kv.layer as usize, head, pos % BLOCK);
        let run = pool.run;
        // SAFETY: the caller's word; the row holds all heads.
        unsafe {
            let k = &w.k.row(row)[head * run.k_width..][..run.k_width];
            let v = &w.v.row(row)[head * run.v_width..][..run.v_width];
            pool.write(self.ops, place, k, v);
        }
    }

    /// Attention of few long rows: threads share the splits of every key head, then its merges.
    fn look_together(
        &self,
        l: &Look,
        longest: usize,
        team: &Team<'_>,
        round: &Round<'_>,
        worker: &mut Worker,
    ) -> Result<(), Poisoned> {
        let run = self.cache.pool(l.kv.group as usize).run;
        let (heads, share) = (run.heads, l.heads / run.heads);
        let len = part_len(run.v_stride);
        let stride = self.parts.splits * len;
        let n = round.batch.spans.len();
        let parts = |row: usize, head: usize| {
            let at = (row * l.heads + head * share) * stride;
            debug_assert!(4 * (at + share * stride) <= self.parts.memory.len());
            self.parts.memory.as_ptr().cast::<f32>().wrapping_add(at)
        };
        team.share(n * heads * longest, |item| {
            let (row, head, split) =
                (item / longest / heads, item / longest % heads, item % longest);
            let span = &round.batch.spans[row];
            let all = splits(span.pos as usize, l.window);
            if split < all.len() {
                self.call(l, span, 0..1, head, 0..share, round, |call| {
                    let to = parts(row, head).wrapping_add(split * len);
                    // SAFETY: as for a whole call; these parts are this thread's alone.
                    unsafe {
                        let scratch = &mut worker.scratch;
                        (self.ops.attend_part)(&call, scratch, all.start + split, to, stride);
                    }
                });
            }
        });
        team.barrier()?;
        team.share(n * heads, |item| {
            let (row, head) = (item / heads, item % heads);
            let span = &round.batch.spans[row];
            self.call(l, span, 0..1, head, 0..share, round, |call| {
                let from = parts(row, head).cast_const();
                // SAFETY: all parts were complete before the barrier.
                unsafe { (self.ops.attend_merge)(&call, &mut worker.scratch, from, stride) }
            });
            self.make(l, span, 0..1, head, 0..share, None, round);
        });
        Ok(())
    }

    /// Attention of some rows of a span for some query heads of a key head. Where the next stage takes the 8-bit form
    /// and nobody the f32, that stays with the thread.
    #[expect(clippy::too_many_arguments, reason = "the coordinates of one item")]
    fn look(
        &self,
        l: &Look,
        span: &Span,
        rows: std::ops::Range<usize>,
        head: usize,
        of_group: std::ops::Range<usize>,
        round: &Round<'_>,
        worker: &mut Worker,
    ) {
        let Worker { heads, scratch, .. } = worker;
        let width = of_group.len() * self.cache.pool(l.kv.group as usize).run.v_width;
        let own = (l.makes && !l.keeps).then_some(Rows { at: heads.as_mut_ptr(), width });
        self.call(l, span, rows.clone(), head, of_group.clone(), round, |mut call| {
            if let Some(own) = own {
                debug_assert!(rows.len() * width <= heads.len());
                (call.out, call.out_stride) = (own.at, own.width);
            }
            // SAFETY: the tier was checked when the machine was made; keys up to these rows were
            // written before the last barrier or by this thread; these heads of `out` are this
            // thread's alone.
            unsafe { (self.ops.attend)(&call, scratch) }
        });
        self.make(l, span, rows, head, of_group, own, round);
    }

    /// The 8-bit form of what some query heads of a key head have just written, where the next
    /// stage takes it; `own` is where that is if not among all heads.
    #[expect(clippy::too_many_arguments, reason = "the coordinates of one item")]
    fn make(
        &self,
        l: &Look,
        span: &Span,
        rows: std::ops::Range<usize>,
        head: usize,
        of_group: std::ops::Range<usize>,
        own: Option<Rows>,
        round: &Round<'_>,
    ) {
        if !l.makes {
            return;
        }
        let run = self.cache.pool(l.kv.group as usize).run;
        let first = (head * (l.heads / run.heads) + of_group.start) * run.v_width;
        let len = of_group.len() * run.v_width;
        let view = self.made.shaped(round.batch.rows.len(), l.out.width);
        let start = span.start as usize;
        for row in rows.clone() {
            view.ask(start + row, first / 32..(first + len) / 32);
        }
        for (ix, row) in rows.map(|row| start + row).enumerate() {
            if l.coarse && round.cuts.is_long(row) {
                continue;
            }
            let from = match own {
                Some(own) => own.ptr(ix),
                None => l.out.ptr(row).wrapping_add(first),
            };
            // SAFETY: these heads of this row are this thread's alone until the barrier.
            unsafe {
                let part = std::slice::from_raw_parts(from, len);
                view.fill_part(self.kernels, row, part, first / 32);
            }
        }
    }

    /// Puts a call of attention together.
    #[expect(clippy::too_many_arguments, reason = "the coordinates of one item")]
    fn call(
        &self,
        l: &Look,
        span: &Span,
        rows: std::ops::Range<usize>,
        head: usize,
        of_group: std::ops::Range<usize>,
        round: &Round<'_>,
        go: impl FnOnce(Attend<'_>),
    ) {
        let pool = self.cache.pool(l.kv.group as usize);
        let run = pool.run;
        let table = round.step[span.seq as usize].tables[l.kv.group as usize];
        let layer = l.kv.layer as usize;
        let block = |i: usize| {
            let (k, v) = pool.run(table[i], layer, head);
            (k.cast_const(), v.cast_const())
        };
        let first = head * (l.heads / run.heads) + of_group.start;
        let row = span.start as usize + rows.start;
        let sinks = l.sinks.as_ref().map_or(&[][..], |s| &s[first..first + of_group.len()]);
        let call = Attend {
            q: l.q.ptr(row).wrapping_add(first * run.k_width),
            q_stride: l.q.width,
            out: l.out.ptr(row).wrapping_add(first * run.v_width),
            out_stride: l.out.width,
            rows: rows.len(),
            heads: of_group.len(),
            pos: span.pos as usize + rows.start,
            window: l.window,
            k_width: run.k_width,
            v_width: run.v_width,
            v_stride: run.v_stride,
            scale: l.scale,
            cap: l.cap,
            sinks,
            cell: run.cell,
            block: &block,
        };
        go(call);
    }
}

/// Blocks of `step` rows of some sequences.
fn blocks<'a>(spans: impl Iterator<Item = &'a Span>, step: usize) -> usize {
    spans.map(|s| (s.rows as usize).div_ceil(step)).sum()
}

/// Block `block` of them.
fn block_of<'a>(
    spans: impl Iterator<Item = &'a Span>,
    step: usize,
    mut block: usize,
) -> Option<(&'a Span, std::ops::Range<usize>)> {
    for span in spans {
        let rows = span.rows as usize;
        let here = rows.div_ceil(step);
        if block < here {
            return Some((span, block * step..((block + 1) * step).min(rows)));
        }
        block -= here;
    }
    None
}
