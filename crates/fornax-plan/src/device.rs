//! The two traits that every provider implements, and the plain data they speak in.
//! Nothing here knows a real device.

use fornax_gguf::TensorType;

use crate::count::{StepReport, StepSeconds};
use crate::error::Result;
use crate::ids::{BlockId, SlotId};
use crate::plan::Plan;
use crate::step::{SeqStep, StepOutput};

/// In which form matrices see their activations. Kernels are compared with the reference in
/// their own mode tightly, and the modes with each other loosely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActMode {
    /// f32 throughout.
    F32,
    /// 8-bit blocks of 32 before every block-quantised matrix: [`crate::q8`].
    Q8,
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// 32-bit floats (the oracle's own).
    F32,
    /// 16-bit floats.
    F16,
    /// 8-bit blocks of 32 with an f16 scale, along the head.
    Q8_0,
}

/// What a program is prepared for; nothing grows past it without being asked to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sequences with a slot.
    pub slots: u32,
    /// Token rows of one step.
    pub rows: u32,
    /// Wanted rows of one step.
    pub wanted: u32,
    /// KV blocks in the pool of every group.
    pub kv_blocks: u32,
    /// How keys and values are stored.
    pub kv_type: KvType,
    /// The activation form; the device's own where absent.
    pub act: Option<ActMode>,
    /// Tokens that one ticket may produce for a sequence ([`crate::SeqStep::max_new`]).
    pub chain: u32,
    /// Stop tokens that a sequence may name.
    pub stops: u32,
    /// The same numbers for a row whatever runs beside it, however its sequence is cut into steps and
    /// whichever slot and blocks it has. A device that cannot promise that refuses by name.
    pub deterministic: bool,
}

impl Default for Limits {
    /// One sequence, and what recorded graphs are comfortable with.
    fn default() -> Limits {
        Limits {
            slots: 1,
            rows: 256,
            wanted: 256,
            kv_blocks: 1,
            kv_type: KvType::F16,
            act: None,
            chain: 64,
            stops: 15,
            deterministic: false,
        }
    }
}

/// What a device is and prefers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `reference`, `cpu`, `metal`, `cuda`.
    pub kind: &'static str,
    /// The product's name.
    pub name: String,
    /// Instruction tier or GPU family.
    pub tier: String,
    /// Worker threads; 1 where that means nothing.
    pub threads: u32,
    /// Tokens of one KV block.
    pub kv_block: u32,
    /// The form in which its fast kernels take activations.
    pub act: ActMode,
    /// Weight types that it reads without conversion.
    pub weight_types: Vec<TensorType>,
    /// Tickets that may be under way at once; `submit` refuses one more.
    pub in_flight: u32,
    /// Token rows of a step from which on further rows make a prompt no faster.
    pub step_rows: u32,
}

/// Something that a device does not do, found at load and told by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The op or the limit.
    pub what: String,
    /// Why not: type, size, tier.
    pub why: String,
    /// What would help.
    pub help: String,
}

/// A step on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// How far a ticket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More tokens will come.
    Running,
    /// All results are in the output.
    Done,
}

/// Bytes held by a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Weights that the program keeps beside or instead of the file's map.
    pub weights: u64,
    /// KV pools.
    pub kv: u64,
    /// Values, states and the rest.
    pub scratch: u64,
}

/// Time of one kind of op within a profiled step.
#[derive(Clone, Debug, PartialEq)]
pub struct OpTime {
    /// The op's name, or the fused kernel's.
    pub name: String,
    /// Times it ran.
    pub calls: u64,
    /// Wall time, seconds.
    pub seconds: f64,
    /// Weight bytes it read.
    pub bytes: u64,
}

impl OpTime {
    /// Folds times by op (seconds, in plan order) into one entry per kind, longest first.
    pub fn by_name(plan: &Plan, seconds: &[f64]) -> Vec<OpTime> {
        let mut all: Vec<OpTime> = Vec::new();
        for (op, seconds) in plan.ops.iter().zip(seconds) {
            let bytes = plan.op_bytes_per_token(op);
            match all.iter_mut().find(|t| t.name == op.name()) {
                Some(t) => {
                    t.calls += 1;
                    t.seconds += seconds;
                    t.bytes += bytes;
                }
                None => {
                    let name = op.name().to_string();
                    all.push(OpTime { name, calls: 1, seconds: *seconds, bytes });
                }
            }
        }
        all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        all
    }
}

/// A command that takes its place in the order of the steps.
#[derive(Debug)]
pub enum Cmd<'a> {
    /// Copies one block of a group over another (copy on write).
    CopyBlock {
        /// KV group.
        group: u32,
        /// Read from.
        from: BlockId,
        /// Written to.
        to: BlockId,
    },
    /// Reads keys and values of a token range as f32: for every layer of the group, then every
    /// token, `heads · k_width` keys followed by `heads · v_width` values.
    ReadKv {
        /// KV group.
        group: u32,
        /// The sequence's table of that group.
        table: &'a [BlockId],
        /// Token positions.
        tokens: std::ops::Range<u32>,
        /// Replaced by the elements.
        out: &'a mut Vec<f32>,
    },
    /// Writes what `ReadKv` read.
    WriteKv {
        /// KV group.
        group: u32,
        /// The sequence's table of that group.
        table: &'a [BlockId],
        /// Token positions.
        tokens: std::ops::Range<u32>,
        /// The elements.
        data: &'a [f32],
    },
    /// Reads all states of a slot, one after the other, as f32.
    ReadState {
        /// The sequence.
        slot: SlotId,
        /// Replaced by the elements.
        out: &'a mut Vec<f32>,
    },
    /// Writes what `ReadState` read.
    WriteState {
        /// The sequence.
        slot: SlotId,
        /// The elements.
        data: &'a [f32],
    },
}

/// A provider: one real device.
pub trait Device {
    /// What it is.
    fn info(&self) -> DeviceInfo;

    /// Bytes that may still be allocated on it now, as far as it knows: nothing of them is promised.
    /// `None` where nobody counts.
    fn memory_free(&self) -> Option<u64> {
        None
    }

    /// How much of [`Device::memory_free`] a program may take that nobody gave a size: less where
    /// others live on the same memory.
    fn memory_unasked(&self) -> Option<u64> {
        self.memory_free()
    }

    /// Everything about this plan and these limits that the device does not do; empty if it
    /// can run them.
    fn supports(&self, plan: &Plan, limits: &Limits) -> Vec<Refusal>;

    /// Makes the plan ready to run: pipelines, re-tiled weights, pools. Called once per model.
    ///
    /// # Errors
    /// `is_unsupported` for what [`Device::supports`] names, `is_out_of_memory` with the bytes
    /// needed, `is_malformed` for a plan that contradicts itself.
    fn prepare(&self, plan: &Plan, limits: &Limits) -> Result<Box<dyn Program>>;
}

/// A prepared model with its KV pools.
pub trait Program: Send {
    /// Records and commits one ragged step; may return before the device has run it. A program
    /// must be able to choose in every way that [`crate::SampleParams`] names, on the host if
    /// need be.
    ///
    /// # Errors
    /// `is_malformed` for a step that breaks a limit or contradicts itself (nothing was done), or
    /// when [`DeviceInfo::in_flight`] tickets are under way; `is_lost` when the device failed.
    fn submit(&mut self, step: &[SeqStep<'_>]) -> Result<Ticket>;

    /// Fills `out` with the results so far, without waiting.
    ///
    /// # Errors
    /// As [`Program::wait`].
    fn poll(&mut self, ticket: &Ticket, out: &mut StepOutput) -> Result<Progress>;

    /// Waits for the ticket and fills `out` (cleared first). The only wait there is.
    ///
    /// # Errors
    /// `is_lost` naming the op, when the device failed; `is_malformed` when a row had no usable
    /// logit. No token of that step may be used.
    fn wait(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()>;

    /// Asks the device to end the slot's chain before its next token. It counts for the tickets
    /// submitted so far: a later step of the slot runs as if nothing had been said.
    fn stop(&mut self, slot: SlotId);

    /// Runs a command after every step submitted before it.
    ///
    /// # Errors
    /// `is_malformed` for ids or lengths out of range, `is_unsupported` where a program cannot.
    fn command(&mut self, command: Cmd<'_>) -> Result<()>;

    /// Bytes held now.
    fn memory(&self) -> MemoryUse;

    /// Adds blocks to every pool without moving what is there.
    ///
    /// # Errors
    /// `is_out_of_memory` with the bytes needed, `is_unsupported` where pools are fixed.
    fn grow_kv(&mut self, blocks: u32) -> Result<()>;

    /// Runs the step like `submit` and `wait` and tells the time of every kind of op.
    ///
    /// # Errors
    /// As `submit` and `wait`.
    fn profile(&mut self, step: &[SeqStep<'_>], out: &mut StepOutput) -> Result<Vec<OpTime>>;

    /// The same step's times kernel by kernel; empty where every op is one kernel.
    fn kernel_times(&self) -> Vec<OpTime> {
        Vec::new()
    }

    /// What the last token cost; `None` where the device does not count.
    fn step_report(&self) -> Option<StepReport> {
        None
    }

    /// Where the time of the last step went; `None` where the device does not tell.
    fn step_seconds(&self) -> Option<StepSeconds> {
        None
    }
}
