//! What a decoded token cost a device: counted, so that it is the same on a slow machine and on a
//! stand-in. It knows no device.

/// One kind of dispatch within the token: a kernel over one grid for one kind of op.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelCount {
    /// The op's name.
    pub op: &'static str,
    /// The kernel's name.
    pub kernel: String,
    /// Dispatches.
    pub dispatches: u64,
    /// Barriers before them.
    pub barriers: u64,
    /// Threadgroups of each.
    pub threadgroups: u64,
    /// Threads of a threadgroup.
    pub threads: u32,
    /// Different bytes read, counted anew in every dispatch.
    pub bytes_read: u64,
    /// Bytes that the threads asked for: caches serve most of what is asked for again.
    pub bytes_loaded: u64,
    /// Different bytes written, counted anew in every dispatch.
    pub bytes_written: u64,
    /// Of `bytes_read`, those of weights.
    pub bytes_weights: u64,
    /// Of `bytes_read`, those of keys and values.
    pub bytes_kv: u64,
}

/// The last decoded token of a program, counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Layers of the plan.
    pub layers: u32,
    /// Command buffers committed; a chain of tokens shares them.
    pub command_buffers: u64,
    /// Encoders opened.
    pub encoders: u64,
    /// Times that the host waited for a device that was not done.
    pub waits: u64,
    /// Dispatches.
    pub dispatches: u64,
    /// Barriers between them.
    pub barriers: u64,
    /// Dispatches that belong to layers.
    pub layer_dispatches: u64,
    /// Barriers before those.
    pub layer_barriers: u64,
    /// Threadgroups, all dispatches together.
    pub threadgroups: u64,
    /// Different bytes read, summed over the dispatches.
    pub bytes_read: u64,
    /// Bytes that the threads asked for.
    pub bytes_loaded: u64,
    /// Different bytes written, summed over the dispatches.
    pub bytes_written: u64,
    /// Of `bytes_read`, those of weights.
    pub bytes_weights: u64,
    /// Of `bytes_read`, those of keys and values.
    pub bytes_kv: u64,
    /// What must be read at least: the weights of one token, and the live keys and values once.
    pub bytes_needed: u64,
    /// Bytes that came back to the host.
    pub readback_bytes: u64,
    /// Device buffers made during the step.
    pub allocations: u64,
    /// Each kind of dispatch, in the order of the first of each.
    pub kernels: Vec<KernelCount>,
}

impl StepReport {
    /// Different bytes read as a share of those that must be.
    pub fn read_ratio(&self) -> f64 {
        self.bytes_read as f64 / self.bytes_needed.max(1) as f64
    }
}

/// Where the time of the last step went, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepSeconds {
    /// Checking, laying out and recording the step, up to its commit.
    pub encode: f64,
    /// The device's own time for it.
    pub device: f64,
}
