//! The boundary between models and devices: a model describes itself once as a flat [`Plan`] of
//! fused operations, a [`Device`] prepares that plan once, and from then on one [`Program`] step
//! of the whole batch is one call, one submission and one wait.
//!
//! Here too: the slow, readable [`reference`] device, which is the oracle of every other, the
//! [`conformance`] cases that each of them must pass, and how their [`accuracy`] is compared with
//! another engine's. This crate knows block formats (from `fornax-gguf`) but no file, no model
//! family and no real device.

pub mod accuracy;
mod batch;
pub mod conformance;
mod count;
mod device;
mod error;
mod ids;
pub mod liveness;
mod op;
mod plan;
pub mod q8;
pub mod reference;
pub mod sample;
mod slots;
mod step;
mod validate;

pub use batch::{Batch, Row, Span, Wanted};
pub use count::{KernelCount, StepReport, StepSeconds};
pub use device::{
    ActMode, Cmd, Device, DeviceInfo, KvType, Limits, MemoryUse, OpTime, Program, Progress,
    Refusal, Ticket,
};
pub use error::{Error, Result};
pub use ids::{BlockId, RopeId, SlotId, StateId, TokenId, ValueId, WeightId};
pub use op::{Activation, Gating, KvRef, Linear, Op, Wires};
pub use plan::{
    Hyper, KvGroup, LayerSpan, Plan, RopePairs, RopeTable, RowSpace, StateSpec, ValueSpec,
    ValueType, WeightRef,
};
pub use sample::SampleParams;
pub use slots::Slots;
pub use step::{RowOut, SeqStep, StepOutput, TokenOut, Tokens, Want};
