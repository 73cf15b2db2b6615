//! Times every variant of the kernels that the policy chooses between, on the shapes of a plan, with cold caches, and keeps
//! the fastest of each. It knows no step, and what a clock says it takes as it is.

mod attention;
mod products;

use std::ops::Range;

use fornax_gguf::TensorType;
use fornax_plan::{Error, Plan, Result};

use crate::api::{Access, Buffer, Device, Encoder, Grid, Note, Pipeline, Queue};
use crate::args::CopyArgs;
use crate::profile::Profile;

/// How much is done for each figure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Bytes of weights or of cache that a timed command buffer reads at least.
    pub(crate) read_bytes: usize,
    /// Bytes that pass through the caches before each: more than the largest holds.
    pub(crate) flush_bytes: usize,
    /// Timed command buffers of each variant, of which the fastest counts.
    pub(crate) repeats: u32,
    /// Keys in the cache.
    pub(crate) keys: u32,
    /// Rows of products, of which the small and the tiled ones are compared.
    pub(crate) rows: &'static [u32],
    /// Rows of a prompt's chunk.
    pub(crate) chunk: u32,
}

impl Effort {
    /// What a GPU is timed with.
    pub(crate) const FULL: Effort = Effort {
        read_bytes: 256 << 20,
        flush_bytes: 128 << 20,
        repeats: 5,
        keys: 2048,
        rows: &[8, 16, 32, 64, 128],
        chunk: 256,
    };
}

/// Types of cache that are timed.
const CACHES: [TensorType; 2] = [TensorType::F16, TensorType::Q8_0];

/// Says what a variant, by its name, took for one dispatch, given what was measured.
pub(crate) type Clock<'a> = &'a mut dyn FnMut(&str, f64) -> f64;

/// What [`tune`] would time, line by line.
pub(crate) fn listing(plan: &Plan) -> Vec<String> {
    products::listing(plan).into_iter().chain(attention::listing(plan)).collect()
}

/// Times all variants on all shapes; `say` hears of each shape when it is done.
///
/// # Errors
/// `is_unsupported` on the stand-in, whose times say nothing of a GPU; what building and running
/// kernels can fail with.
pub(crate) fn tune(
    device: &Device,
    gpu: &str,
    plan: &Plan,
    say: impl FnMut(&str),
) -> Result<Profile> {
    if !device.has_clock() {
        return Err(Error::unsupported(
            "tune: there is no Metal GPU here, and times of a stand-in say nothing of one; --dry-run lists what would \
             be timed",
        ));
    }
    tune_by(device, gpu, plan, Effort::FULL, &mut |_, seconds| seconds, say)
}

/// The same by a clock of the caller's.
pub(crate) fn tune_by(
    device: &Device,
    gpu: &str,
    plan: &Plan,
    effort: Effort,
    clock: Clock<'_>,
    mut say: impl FnMut(&str),
) -> Result<Profile> {
    let mut bench = Bench::new(device, effort, clock)?;
    let mut profile = Profile::new(gpu);
    products::tune(&mut bench, plan, &mut profile, &mut say)?;
    attention::tune(&mut bench, plan, &mut profile, &mut say)?;
    Ok(profile)
}

/// One dispatch: pipeline, arguments by slot, constants, grid.
struct Call<'a> {
    pipeline: &'a Pipeline,
    args: Vec<Option<(Buffer, Access)>>,
    constants: Vec<u32>,
    grid: Grid,
}

/// Buffers that all measurements share.
struct Bench<'a> {
    device: &'a Device,
    effort: Effort,
    clock: Clock<'a>,
    queue: Queue,
    flush: [Buffer; 2],
}

impl<'a> Bench<'a> {
    fn new(device: &'a Device, effort: Effort, clock: Clock<'a>) -> Result<Bench<'a>> {
        let flush = || filled(device, "flush", effort.flush_bytes / 4, 0);
        let flush = [flush()?, flush()?];
        Ok(Bench { device, effort, clock, queue: device.queue()?, flush })
    }

    /// The kernel, where its pipeline takes so many threads.
    fn pipeline(&self, name: &str, constants: &[u32], threads: u32) -> Result<Option<Pipeline>> {
        let pipeline = self.device.pipeline(name, constants)?;
        Ok((threads <= pipeline.threads_max).then_some(pipeline))
    }

    /// Seconds of one of these dispatches, which follow each other as often as `times` says.
    fn seconds(&mut self, variant: &str, calls: &[Call<'_>], times: usize) -> Result<f64> {
        let mut least = f64::INFINITY;
        for _ in 0..self.effort.repeats {
            self.flushed()?;
            let mut buffer = self.queue.command_buffer();
            let mut encoder = buffer.encoder();
            for call in calls.iter().cycle().take(times) {
                write(&mut encoder, call)?;
                // The next writes what this one wrote, as in a step.
                encoder.barrier();
            }
            least = least.min(self.timed(buffer)?);
        }
        Ok((self.clock)(variant, least / times as f64))
    }

    /// Fills the caches with something else.
    fn flushed(&self) -> Result<()> {
        let pipeline = self.device.pipeline("copy", &[])?;
        let words: Range<usize> = 0..self.effort.flush_bytes / 4;
        let width = words.len() as u32 / 256;
        let args = [Access::Read, Access::Write].into_iter().zip(self.flush);
        let call = Call {
            pipeline: &pipeline,
            args: args.map(|(access, buffer)| Some((buffer, access))).collect(),
            constants: CopyArgs { rows: 256, width }.words(),
            grid: Grid { groups: [width.div_ceil(256), 256, 1], threads: 256 },
        };
        let mut buffer = self.queue.command_buffer();
        write(&mut buffer.encoder(), &call)?;
        self.timed(buffer).map(|_| ())
    }

    fn timed(&self, buffer: crate::api::CommandBuffer) -> Result<f64> {
        let before = self.queue.device_seconds();
        buffer.commit().wait()?;
        Ok(self.queue.device_seconds() - before)
    }
}

fn write(encoder: &mut Encoder<'_>, call: &Call<'_>) -> Result<()> {
    encoder.set_pipeline(call.pipeline);
    for (slot, arg) in call.args.iter().enumerate() {
        match arg {
            Some((buffer, access)) => encoder.set_buffer(slot, buffer.all(), *access),
            None => encoder.set_nothing(slot),
        }
    }
    encoder.set_constants(&call.constants);
    encoder.dispatch(Note::default(), call.grid)
}

/// A buffer of one word again and again: no kernel may read what nobody wrote.
fn filled(device: &Device, label: &str, words: usize, word: u32) -> Result<Buffer> {
    let buffer = device.buffer(label, words)?;
    let part = vec![word; words.min(1 << 16)];
    for start in (0..words).step_by(part.len().max(1)) {
        device.write(buffer, start, &part[..part.len().min(words - start)]);
    }
    Ok(buffer)
}

#[cfg(all(test, not(target_os = "macos")))]
mod tests {
    use super::*;
    use crate::device::MetalDevice;
    use crate::policy::{Family, Policy};
    use fornax_plan::conformance;

    const LEAST: Effort = Effort {
        read_bytes: 1,
        flush_bytes: 4096,
        repeats: 1,
        keys: 40,
        rows: &[8, 16, 32],
        chunk: 17,
    };

    /// What is timed is run, under the emulator; what it takes says a clock of the test's own, by which another variant
    /// is the fastest than the rules would take.
    #[test]
    fn the_fastest_of_every_family_is_kept_and_taken() {
        let emulated = MetalDevice::emulated(3);
        let device = emulated.open().expect("the emulator is there");
        let plan = conformance::proof(TensorType::Q8_0).plan;
        let mut asked = Vec::new();
        let mut clock = |variant: &str, _: f64| {
            asked.push(variant.to_string());
            let fast = ["matvec 4x8", "append f16 2x2", "split f16 1x4", "tiled f16 1"];
            let is_fast = fast.contains(&variant) || variant.starts_with("matmul_small");
            if is_fast { 1.0 } else { 2.0 }
        };
        let mut said = 0;
        let profile = tune_by(&device, "M9", &plan, LEAST, &mut clock, |_| said += 1)
            .expect("all variants run");
        for family in
            ["matvec 1x1", "matmul_small 8", "matmul_tiled 32", "append q8_0 1x1", "split f16 1x32"]
        {
            assert!(asked.iter().any(|a| a == family), "{family} was not timed: {asked:?}");
        }
        assert_eq!(said, listing(&plan).len());
        // Written, read, and what a policy then says.
        let read = Profile::parse(&profile.to_string(), "M9").expect("it was just written");
        assert_eq!(read, profile);
        let policy = Policy { family: Family::Apple8, profile: read };
        let w = &plan.weights[products::trials(&plan)[0].weights[0].ix()];
        let tile = policy.matvec_tile(w.ty, w.rows, w.cols);
        assert_eq!((tile.outs, tile.simds), (4, 8));
        assert_eq!(policy.small_rows(w.ty, w.rows, w.cols), 32);
        let heads = attention::trials(&plan)[0];
        let append = policy.append(TensorType::F16, heads);
        assert_eq!((append.together, append.splits), (2, 2));
        let split = policy.split(TensorType::F16, heads, 99);
        assert_eq!((split.together, split.splits), (1, 4));
        assert_eq!(policy.tiled(TensorType::F16, heads), 1);
        // And a program with it gives the reference its tokens.
        let gpu = fornax_plan::Device::info(&emulated).name;
        let text = profile.to_string().replace("gpu M9", &format!("gpu {gpu}"));
        let tuned = emulated.with_profile(&text).expect("of this device");
        conformance::check(&tuned, &conformance::proof(TensorType::Q8_0)).expect("the same ids");
    }

    #[test]
    fn a_stand_in_is_not_timed() {
        let device = MetalDevice::emulated(5).open().expect("the emulator is there");
        let plan = conformance::proof(TensorType::Q8_0).plan;
        let e = tune(&device, "M9", &plan, |_| panic!("nothing is timed")).unwrap_err();
        assert!(e.is_unsupported() && e.to_string().contains("--dry-run"), "{e}");
    }
}
