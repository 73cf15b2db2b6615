//! A ladder's dispatch on the GPU of this Mac in place of the emulator: the same arguments, the same bounds. It knows
//! no kernel.

use fornax_msl::Buffer;

use super::{floats, words};
use crate::api::{Access, Device, Grid, Note, Pipeline};
use crate::device::MetalDevice;

/// A dispatch on the GPU, or, with a line, under the emulator on a Mac that has none for it.
pub(super) enum Either {
    Gpu(Run),
    Emulated(super::emulated::Run),
}

impl Either {
    pub(super) fn new(entry: &str, constants: &[u32], grid: [u32; 3], threads: [u32; 3]) -> Either {
        match MetalDevice::system() {
            Ok(_) => Either::Gpu(Run::new(entry, constants, grid, threads)),
            Err(why) => {
                println!("not run on a GPU, there is none: {why}");
                Either::Emulated(super::emulated::Run::new(entry, constants, grid, threads))
            }
        }
    }

    pub(super) fn buffer(self, buffer: &Buffer) -> Either {
        match self {
            Either::Gpu(run) => Either::Gpu(run.buffer(buffer)),
            Either::Emulated(run) => Either::Emulated(run.buffer(buffer)),
        }
    }

    pub(super) fn floats(self, values: &[f32]) -> Either {
        self.buffer(&floats(values))
    }

    pub(super) fn words(self, values: &[u32]) -> Either {
        self.buffer(&words(values))
    }

    pub(super) fn go(self, constants: &[u32]) {
        match self {
            Either::Gpu(run) => run.go(constants),
            Either::Emulated(run) => run.go(constants),
        }
    }
}

/// A dispatch under way: buffers in the order of their slots, then the constants.
pub(super) struct Run {
    device: Device,
    pipeline: Pipeline,
    grid: Grid,
    buffers: Vec<Buffer>,
}

impl Run {
    pub(super) fn new(entry: &str, constants: &[u32], grid: [u32; 3], threads: [u32; 3]) -> Run {
        let device = MetalDevice::system().and_then(|d| d.open());
        let device = device.unwrap_or_else(|e| panic!("the GPU was there before: {e}"));
        let pipeline = device.pipeline(entry, constants).unwrap_or_else(|e| panic!("{entry}: {e}"));
        assert_eq!(threads[1..], [1, 1], "{entry}");
        Run {
            device,
            pipeline,
            grid: Grid { groups: grid, threads: threads[0] },
            buffers: Vec::new(),
        }
    }

    pub(super) fn buffer(mut self, buffer: &Buffer) -> Run {
        self.buffers.push(buffer.clone());
        self
    }

    /// Copies everything there, runs, and copies back what changed.
    pub(super) fn go(self, constants: &[u32]) {
        let run = || {
            let queue = self.device.queue()?;
            let mut commands = queue.command_buffer();
            let mut encoder = commands.encoder();
            encoder.set_pipeline(&self.pipeline);
            let mut there = Vec::new();
            for (slot, buffer) in self.buffers.iter().enumerate() {
                let before = contents(buffer);
                let copy = self.device.buffer(buffer.label(), before.len())?;
                self.device.write(copy, 0, &before);
                encoder.set_buffer(slot, copy.all(), Access::Write);
                there.push((before, copy));
            }
            encoder.set_constants(constants);
            encoder.dispatch(Note::default(), self.grid)?;
            commands.commit().wait()?;
            for (buffer, (before, copy)) in self.buffers.iter().zip(there) {
                let mut after = vec![0; before.len()];
                self.device.read(copy, 0, &mut after);
                for (at, _) in before.iter().zip(&after).enumerate().filter(|(_, (b, a))| b != a) {
                    let len = (buffer.len() - 4 * at).min(4);
                    let bytes = after[at].to_ne_bytes();
                    buffer.write(4 * at, &bytes[..len]).expect("a range inside");
                }
            }
            Ok::<_, fornax_plan::Error>(())
        };
        run().unwrap_or_else(|e| panic!("{} with {constants:?}: {e}", self.pipeline.name));
    }
}

/// A buffer's bytes as whole words; what nobody has written is a NaN that no kernel makes.
fn contents(buffer: &Buffer) -> Vec<u32> {
    let mut bytes = vec![0; buffer.len().next_multiple_of(4)];
    let len = buffer.len();
    buffer.read(0, &mut bytes[..len]).expect("a range inside");
    let words = bytes.chunks_exact(4).enumerate().map(|(at, b)| {
        let whole = 4 * at + 4 <= len && buffer.first_unwritten(4 * at, 4).is_some();
        if whole { 0x7fa1_b2c3 } else { u32::from_ne_bytes([b[0], b[1], b[2], b[3]]) }
    });
    words.collect()
}
