//! Times every variant of the matrix kernels on the shapes of a plan, on a real GPU with cold caches, and keeps the
//! fastest of each. It knows no step.

use std::ops::Range;

use fornax_gguf::TensorType;
use fornax_plan::{Error, Op, Plan, Result, WeightId};

use crate::api::{Access, Buffer, Device, Grid};
use crate::args::{CopyArgs, MatmulArgs};
use crate::library::typed;
use crate::policy::{Policy, Tile};
use crate::profile::Profile;

/// Bytes of weights that a timed command buffer reads at least.
const READ_BYTES: usize = 256 << 20;
/// Bytes that pass through the caches before each: more than the largest holds.
const FLUSH_BYTES: usize = 128 << 20;
/// Timed command buffers of each variant, of which the fastest counts.
const REPEATS: u32 = 5;

/// One shape of a plan's matrices, and where the plan has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Trial {
    pub(crate) ty: TensorType,
    pub(crate) outs: u32,
    pub(crate) cols: u32,
    weights: Vec<WeightId>,
}

/// The shapes that a token reads, each once, in the plan's order.
pub(crate) fn trials(plan: &Plan) -> Vec<Trial> {
    let mut all: Vec<Trial> = Vec::new();
    let single = |op: &&Op| !matches!(op, Op::MoeRoute { .. } | Op::MoeMlp { .. });
    for linear in
        plan.ops.iter().filter(single).flat_map(|op| op.linears().iter().collect::<Vec<_>>())
    {
        let w = &plan.weights[linear.weight.ix()];
        let same = |t: &&mut Trial| (t.ty, t.outs, t.cols) == (w.ty, w.rows, w.cols);
        match all.iter_mut().find(same) {
            Some(trial) => trial.weights.push(linear.weight),
            None => all.push(Trial {
                ty: w.ty,
                outs: w.rows,
                cols: w.cols,
                weights: vec![linear.weight],
            }),
        }
    }
    all
}

/// What [`tune`] would time, line by line.
pub(crate) fn listing(plan: &Plan) -> Vec<String> {
    let tiles: Vec<String> = Policy::tiles().map(|t| format!("{}x{}", t.outs, t.simds)).collect();
    let line = |t: Trial| {
        let (ty, n) = (t.ty.name().to_ascii_lowercase(), t.weights.len());
        let tiles = tiles.join(" ");
        format!("matvec_{ty} {} x {} ({n} matrices): {tiles}", t.outs, t.cols)
    };
    trials(plan).into_iter().map(line).collect()
}

/// Times all variants on all shapes; `say` hears of each shape when it is done.
///
/// # Errors
/// `is_unsupported` on a stand-in, whose times say nothing of a GPU; what building and running
/// kernels can fail with.
pub(crate) fn tune(
    device: &Device,
    gpu: &str,
    plan: &Plan,
    mut say: impl FnMut(&str),
) -> Result<Profile> {
    if !device.has_clock() {
        return Err(Error::unsupported(
            "tune: there is no Metal GPU here, and times of a stand-in say nothing of one; --dry-run lists what would \
             be timed",
        ));
    }
    let bench = Bench::new(device)?;
    let mut profile = Profile::new(gpu);
    for trial in trials(plan) {
        let weights = trial.weights.iter().map(|id| {
            let w = &plan.weights[id.ix()];
            device.wrap(&w.data, w.offset, w.len_bytes())
        });
        let weights = weights.collect::<Result<Vec<_>>>()?;
        let mut best: Option<(f64, Tile)> = None;
        for tile in Policy::tiles() {
            let Some(s) = bench.seconds(&trial, &weights, tile)? else { continue };
            if best.is_none_or(|(least, _)| s < least) {
                best = Some((s, tile));
            }
        }
        let Some((s, tile)) = best else { continue };
        profile.insert(trial.ty, trial.outs, trial.cols, tile);
        let rate = weights[0].len_bytes as f64 / s / 1e9;
        let ty = trial.ty.name().to_ascii_lowercase();
        say(&format!(
            "matvec_{ty} {} x {}: {} outputs in {} simdgroups, {rate:.1} GB/s",
            trial.outs, trial.cols, tile.outs, tile.simds
        ));
    }
    Ok(profile)
}

/// Buffers that all measurements share.
struct Bench<'a> {
    device: &'a Device,
    queue: crate::api::Queue,
    flush: [Buffer; 2],
}

impl Bench<'_> {
    fn new(device: &Device) -> Result<Bench<'_>> {
        let flush = || device.buffer("flush", FLUSH_BYTES / 4);
        Ok(Bench { device, queue: device.queue()?, flush: [flush()?, flush()?] })
    }

    /// Seconds of one product; none where the pipeline does not take so many threads.
    fn seconds(&self, trial: &Trial, weights: &[Buffer], tile: Tile) -> Result<Option<f64>> {
        let (name, constants) = typed("matvec", &[trial.ty], &[tile.outs, 1, tile.simds, 0]);
        let pipeline = self.device.pipeline(&name, &constants)?;
        if 32 * tile.simds > pipeline.threads_max {
            return Ok(None);
        }
        let x = self.device.buffer("x", trial.cols as usize)?;
        let out = self.device.buffer("out", trial.outs as usize)?;
        let (cols, outs) = (trial.cols, trial.outs);
        let args =
            MatmulArgs { rows: 1, cols, outs, bias: 0, residual: 0, scale: 1.0, softcap: 0.0 };
        let grid = Grid { groups: [outs.div_ceil(tile.outs), 1, 1], threads: 32 * tile.simds };
        let products = (READ_BYTES / weights[0].len_bytes).max(1).max(weights.len());
        let mut least = f64::INFINITY;
        for _ in 0..REPEATS {
            self.flushed()?;
            let mut buffer = self.queue.command_buffer();
            let mut encoder = buffer.encoder();
            for weight in weights.iter().cycle().take(products) {
                encoder.set_pipeline(&pipeline);
                encoder.set_buffer(0, weight.all(), Access::Read);
                encoder.set_buffer(1, x.all(), Access::Read);
                encoder.set_buffer(4, out.all(), Access::Write);
                encoder.set_constants(&args.words());
                encoder.dispatch((0, 0.0), grid)?;
                // The next writes what this one wrote, as in a step.
                encoder.barrier();
            }
            least = least.min(self.timed(buffer)?);
        }
        Ok(Some(least / products as f64))
    }

    /// Fills the caches with something else.
    fn flushed(&self) -> Result<()> {
        let copy = self.device.pipeline("copy", &[])?;
        let words: Range<usize> = 0..FLUSH_BYTES / 4;
        let width = words.len() as u32 / 256;
        let mut buffer = self.queue.command_buffer();
        let mut encoder = buffer.encoder();
        encoder.set_pipeline(&copy);
        encoder.set_buffer(0, self.flush[0].words(words.clone()), Access::Read);
        encoder.set_buffer(1, self.flush[1].words(words), Access::Write);
        encoder.set_constants(&CopyArgs { rows: 256, width }.words());
        encoder.dispatch((0, 0.0), Grid { groups: [width.div_ceil(256), 256, 1], threads: 256 })?;
        self.timed(buffer).map(|_| ())
    }

    fn timed(&self, buffer: crate::api::CommandBuffer) -> Result<f64> {
        let before = self.queue.device_seconds();
        buffer.commit().wait()?;
        Ok(self.queue.device_seconds() - before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fornax_plan::conformance;

    #[test]
    fn every_shape_of_a_plan_is_listed_once() {
        let plan = conformance::proof(TensorType::Q8_0).plan;
        let all = trials(&plan);
        for (n, t) in all.iter().enumerate() {
            assert!(!t.weights.is_empty());
            let same = |o: &&Trial| (o.ty, o.outs, o.cols) == (t.ty, t.outs, t.cols);
            assert_eq!(all.iter().position(|o| same(&o)), Some(n), "{t:?} twice");
        }
        let lines = listing(&plan);
        assert_eq!(lines.len(), all.len());
        assert!(lines[0].starts_with("matvec_q8_0 ") && lines[0].ends_with("4x8"), "{}", lines[0]);
    }
}
