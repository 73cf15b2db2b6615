//! What a run counted. It knows no execution.

/// What one dispatch did to what was bound to one argument.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// The argument's index.
    pub index: u32,
    /// The buffer's label; nothing for bytes that travelled with the dispatch.
    pub label: Option<String>,
    /// Loads that the threads made.
    pub loads: u64,
    /// Bytes that these loads asked for.
    pub bytes_loaded: u64,
    /// Different bytes among them.
    pub bytes_read: u64,
    /// Stores that the threads made.
    pub stores: u64,
    /// Bytes that these stores gave.
    pub bytes_stored: u64,
    /// Different bytes among them.
    pub bytes_written: u64,
}

/// What one dispatch did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DispatchReport {
    /// The kernel's name.
    pub kernel: String,
    /// Threadgroups that ran.
    pub threadgroups: u64,
    /// Threads in each.
    pub threads: u32,
    /// Bytes of threadgroup memory that a threadgroup used.
    pub threadgroup_memory: u64,
    /// The barriers in the kernel that threads reached, by their place in [`crate::Library::barriers`].
    pub barriers: Vec<usize>,
    /// For each argument in memory.
    pub traffic: Vec<Traffic>,
}

/// What a run of commands did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The dispatches, in the order in which they were given.
    pub dispatches: Vec<DispatchReport>,
    /// Barriers between them.
    pub barriers: usize,
}

impl Report {
    /// Different bytes read from buffers, summed over the dispatches.
    pub fn bytes_read(&self) -> u64 {
        self.of_buffers().map(|t| t.bytes_read).sum()
    }

    /// Different bytes written to buffers, summed over the dispatches.
    pub fn bytes_written(&self) -> u64 {
        self.of_buffers().map(|t| t.bytes_written).sum()
    }

    fn of_buffers(&self) -> impl Iterator<Item = &Traffic> {
        self.dispatches.iter().flat_map(|d| &d.traffic).filter(|t| t.label.is_some())
    }
}
