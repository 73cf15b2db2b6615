//! What the driver is asked for, as a trait, so that a stand-in can answer where there is no GPU. Handles and addresses are
//! plain numbers here; who owns them is said by the objects of the module above. It knows no plan.

use std::fmt;

/// A call that failed: the driver's number and name of the fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) code: u32,
    pub(crate) text: String,
}

/// The driver's numbers of the faults that are told apart here.
pub(crate) const OUT_OF_MEMORY: u32 = 2;
/// After these a context answers every call with the same fault: the process must begin anew to use the GPU. Double-bit ECC,
/// NVLink, illegal address, launch timeout, assert, hardware stack, illegal instruction, misaligned address, address space,
/// program counter, failed launch, unknown.
const STICKY: [u32; 12] = [214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719, 999];

impl Fault {
    pub(crate) fn is_out_of_memory(&self) -> bool {
        self.code == OUT_OF_MEMORY
    }

    /// True where the GPU cannot be used by this process any more.
    pub(crate) fn is_sticky(&self) -> bool {
        STICKY.contains(&self.code)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

pub(crate) type Done<T = ()> = Result<T, Fault>;

/// A launch: blocks by two axes, threads of each, bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub(crate) grid: (u32, u32),
    pub(crate) threads: u32,
    pub(crate) shared: u32,
    /// All blocks run at once, so that they can wait for one another.
    pub(crate) together: bool,
    /// Blocks may begin while the kernel in front still runs: it waits for that one itself.
    pub(crate) early: bool,
    /// So many blocks in a row share a part of the GPU, and see each other's shared memory; 1 where that is nothing to them.
    pub(crate) cluster: u32,
}

impl Form {
    /// Blocks that know nothing of one another.
    pub(crate) fn plain(grid: (u32, u32), threads: u32, shared: u32) -> Form {
        Form { grid, threads, shared, together: false, early: false, cluster: 1 }
    }
}

/// A part of memory as bytes along four axes, the first of them lines, and the boxes that are copied of it: what
/// `cuTensorMapEncodeTiled` is told. In lines of 64 bytes, pieces of 16 change places, so that those of eight lines lie in
/// all banks of shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Boxes {
    pub(crate) at: u64,
    /// Bytes of a line, then lengths of the other axes.
    pub(crate) sizes: [u64; 4],
    /// Bytes from one to the next along the axes behind the first: multiples of 16, below 2^40.
    pub(crate) strides: [u64; 3],
    pub(crate) each: [u32; 4],
}

/// What a kernel reads to copy boxes.
pub(crate) type BoxMap = [u8; 128];

/// The driver, or what stands in for it. Everything that is queued runs in order, on one stream.
///
/// # Safety
/// Of every method that is unsafe: addresses and handles are this object's own and alive, ranges lie inside one allocation,
/// and host memory that a queued copy uses is left alone until an event behind it has passed.
pub(crate) trait Api: fmt::Debug + Send + Sync {
    /// Makes the context current on this thread.
    fn enter(&self) -> Done;
    /// Free bytes of device memory, and all of them.
    fn free_bytes(&self) -> Done<(u64, u64)>;
    fn alloc(&self, bytes: usize) -> Done<u64>;
    unsafe fn free(&self, at: u64);
    /// Page-locked host memory.
    fn alloc_host(&self, bytes: usize) -> Done<*mut u8>;
    unsafe fn free_host(&self, at: *mut u8);
    unsafe fn clear_queued(&self, at: u64, bytes: usize) -> Done;
    unsafe fn upload_queued(&self, to: u64, from: *const u8, bytes: usize) -> Done;
    unsafe fn download_queued(&self, to: *mut u8, from: u64, bytes: usize) -> Done;
    unsafe fn copy_queued(&self, to: u64, from: u64, bytes: usize) -> Done;
    /// Writes a word past everything that is queued.
    unsafe fn poke(&self, to: u64, word: u32) -> Done;
    /// Reads past everything that is queued: what is being written may come in any state.
    unsafe fn peek(&self, to: *mut u8, from: u64, bytes: usize) -> Done;
    /// Returns when everything queued has run.
    fn finish(&self) -> Done;
    fn module(&self, code: &[u8]) -> Done<usize>;
    unsafe fn unload(&self, module: usize);
    unsafe fn function(&self, module: usize, name: &str) -> Done<usize>;
    /// Where a module's variable of this name is.
    unsafe fn variable(&self, module: usize, name: &str) -> Done<u64>;
    unsafe fn allow_shared(&self, function: usize, bytes: u32) -> Done;
    fn boxes(&self, boxes: &Boxes) -> Done<BoxMap>;
    /// How many clusters of such a launch the GPU runs at once.
    unsafe fn clusters(&self, function: usize, form: Form) -> Done<u32>;
    /// Queues a kernel; `constants` are its first argument, `pointers` the others.
    unsafe fn launch(
        &self,
        function: usize,
        form: Form,
        constants: &[u32],
        pointers: &[u64],
    ) -> Done;
    /// What is queued from now on is kept instead of run.
    fn begin_graph(&self) -> Done;
    /// What was queued since.
    fn end_graph(&self) -> Done<usize>;
    unsafe fn launch_graph(&self, graph: usize) -> Done;
    unsafe fn free_graph(&self, graph: usize);
    fn event(&self) -> Done<usize>;
    unsafe fn record(&self, event: usize) -> Done;
    unsafe fn passed(&self, event: usize) -> Done<bool>;
    unsafe fn wait(&self, event: usize) -> Done;
    unsafe fn free_event(&self, event: usize);
}
