//! The thin set of driver objects that this crate uses, each freed when dropped: the GPU with its
//! stream, device and page-locked memory, modules, graphs, events. It knows no plan.
//!
//! Everything here runs on one stream in order, so memory is freed only after [`Gpu::finish`].
//! A fault that the driver will answer every later call with is kept: from then on every call
//! says so at once, and nothing is asked of the GPU any more.

mod api;
mod cuda;
#[cfg(test)]
pub(crate) mod host;

use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use fornax_plan::{Error, Result};

use self::api::{Api, Done, Fault, Form};
pub(crate) use self::api::{BoxMap, Boxes};

/// A GPU, its primary context and the stream that everything runs on.
#[derive(Debug)]
pub(crate) struct Gpu {
    api: Box<dyn Api>,
    /// The first fault after which the GPU cannot be used by this process.
    lost: OnceLock<String>,
    /// The product's name.
    pub(crate) name: String,
    /// Compute capability times ten: 90 for sm_90.
    pub(crate) arch: u32,
    /// Multiprocessors.
    pub(crate) units: u32,
    /// Bytes of shared memory that a block may ask for.
    pub(crate) shared_max: u32,
}

impl Gpu {
    /// Opens the GPU of this number.
    ///
    /// # Errors
    /// `is_unsupported` where there is no driver, too old a one, or no such GPU.
    pub(crate) fn open(ordinal: u32) -> Result<Arc<Gpu>> {
        let (api, about) = cuda::open(ordinal)?;
        let cuda::About { name, arch, units, shared_max } = about;
        let lost = OnceLock::new();
        Ok(Arc::new(Gpu { api: Box::new(api), lost, name, arch, units, shared_max }))
    }

    /// What a call gave, with what was being done.
    fn told<T>(&self, doing: &str, done: Done<T>) -> Result<T> {
        done.map_err(|e| self.fault(doing, &e))
    }

    fn fault(&self, doing: &str, e: &Fault) -> Error {
        let text = format!("cuda: {doing}: {e}");
        if e.is_out_of_memory() {
            let free = self.api.free_bytes().map_or(0, |f| f.0);
            return Error::out_of_memory(format!("{text}; {free} bytes are free; {SHRINK}"));
        }
        if e.is_sticky() {
            let _ = self.lost.set(format!("{doing}: {e}"));
            return Error::lost(format!("{text}; {} {RESTART}", self.name));
        }
        Error::failed(text)
    }

    /// Says so where the GPU was lost before.
    fn healthy(&self) -> Result<()> {
        match self.lost.get() {
            None => Ok(()),
            Some(first) => {
                let name = &self.name;
                Err(Error::lost(format!("cuda: {name} was lost before ({first}); it {RESTART}")))
            }
        }
    }

    /// Why the GPU cannot be used any more, if so.
    pub(crate) fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Makes the context current on this thread.
    pub(crate) fn enter(&self) -> Result<()> {
        self.healthy()?;
        self.told("entering the context", self.api.enter())
    }

    /// Free bytes of device memory.
    pub(crate) fn free_bytes(&self) -> Result<u64> {
        self.enter()?;
        Ok(self.told("asking for free memory", self.api.free_bytes())?.0)
    }

    /// Zeroed device memory.
    pub(crate) fn alloc(self: &Arc<Gpu>, bytes: usize) -> Result<Memory> {
        self.enter()?;
        let len = bytes.max(4);
        let ptr = self.told(&format!("allocating {len} bytes"), self.api.alloc(len))?;
        let memory = Memory { gpu: Arc::clone(self), ptr, len };
        self.clear_queued(&memory)?;
        Ok(memory)
    }

    /// Page-locked words of host memory.
    pub(crate) fn pinned(self: &Arc<Gpu>, words: usize) -> Result<Pinned> {
        self.enter()?;
        let words = words.max(1);
        let doing = format!("page-locking {} bytes", 4 * words);
        let at = self.told(&doing, self.api.alloc_host(4 * words))?;
        let at = NonNull::new(at.cast::<u32>())
            .ok_or_else(|| Error::lost("cuda: page-locked memory at no address"))?;
        // SAFETY: the driver gave `words` words.
        unsafe { at.as_ptr().write_bytes(0, words) };
        Ok(Pinned { gpu: Arc::clone(self), at, words })
    }

    /// Loads machine code.
    pub(crate) fn module(self: &Arc<Gpu>, cubin: &[u8]) -> Result<Arc<Module>> {
        self.enter()?;
        let module = self.told("loading kernels", self.api.module(cubin))?;
        Ok(Arc::new(Module { gpu: Arc::clone(self), module }))
    }

    /// Returns when everything submitted has run.
    pub(crate) fn finish(&self) -> Result<()> {
        self.enter()?;
        self.told("waiting for the GPU", self.api.finish())
    }

    /// Queues one kernel with so many bytes of dynamic shared memory.
    pub(crate) fn launch(
        &self,
        function: &Function,
        grid: (u32, u32),
        threads: u32,
        shared: u32,
        constants: &[u32],
        pointers: &[u64],
    ) -> Result<()> {
        self.queue(function, Form::plain(grid, threads, shared), constants, pointers)
    }

    /// As [`Gpu::launch`] of a kernel that may begin while the one in front still runs, because it waits for that one
    /// itself; where the GPU cannot do that, it begins behind it.
    pub(crate) fn launch_early(
        &self,
        function: &Function,
        grid: (u32, u32),
        threads: u32,
        shared: u32,
        constants: &[u32],
        pointers: &[u64],
    ) -> Result<()> {
        self.launch_early_clusters(function, (grid, 1), threads, shared, constants, pointers)
    }

    /// As [`Gpu::launch_early`] with so many neighbouring blocks a cluster, where the GPU has clusters.
    pub(crate) fn launch_early_clusters(
        &self,
        function: &Function,
        (grid, each): ((u32, u32), u32),
        threads: u32,
        shared: u32,
        constants: &[u32],
        pointers: &[u64],
    ) -> Result<()> {
        let early = self.arch >= 90;
        let cluster = if early { each } else { 1 };
        let form = Form { early, cluster, ..Form::plain(grid, threads, shared) };
        self.queue(function, form, constants, pointers)
    }

    /// As [`Gpu::launch`] with a row of blocks that all run at once, so that they can wait for one another.
    pub(crate) fn launch_together(
        &self,
        function: &Function,
        blocks: u32,
        threads: u32,
        shared: u32,
        constants: &[u32],
        pointers: &[u64],
    ) -> Result<()> {
        let form = Form { together: true, ..Form::plain((blocks, 1), threads, shared) };
        self.queue(function, form, constants, pointers)
    }

    /// What a kernel reads to copy boxes of memory.
    pub(crate) fn boxes(&self, boxes: &Boxes) -> Result<BoxMap> {
        self.enter()?;
        self.told("describing boxes of memory", self.api.boxes(boxes))
    }

    /// As [`Gpu::launch_together`] with blocks in clusters, so many at most as run at once ([`Function::clusters`]).
    pub(crate) fn launch_clusters(
        &self,
        function: &Function,
        (clusters, each): (u32, u32),
        threads: u32,
        shared: u32,
        constants: &[u32],
        pointers: &[u64],
    ) -> Result<()> {
        let form = in_clusters((clusters, each), threads, shared);
        self.queue(function, form, constants, pointers)
    }

    fn queue(
        &self,
        function: &Function,
        form: Form,
        constants: &[u32],
        pointers: &[u64],
    ) -> Result<()> {
        self.healthy()?;
        // SAFETY: the driver copies the parameters before it returns; they are what the entry
        // declares, which `prepare` builds in one place per entry, and the pointers are to
        // memory that the program keeps.
        let done = unsafe { self.api.launch(function.function, form, constants, pointers) };
        done.map_err(|e| self.fault(&format!("launching {}", function.name), &e))
    }

    /// Queues a copy of page-locked words to the device.
    pub(crate) fn upload_queued(&self, to: &Memory, from: &Pinned, words: usize) -> Result<()> {
        let from = &from.words()[..words];
        assert!(4 * words <= to.len, "invariant: the copy fits");
        // SAFETY: the range is inside the memory; the page-locked words are left alone until the
        // step's event has passed.
        let done = unsafe { self.api.upload_queued(to.ptr, from.as_ptr().cast(), 4 * words) };
        self.told("uploading the step", done)
    }

    /// Queues a copy of device words to page-locked memory.
    pub(crate) fn download_queued(&self, from: u64, to: &mut Pinned, words: usize) -> Result<()> {
        let to = &mut to.words_mut()[..words];
        // SAFETY: the words are not looked at until the step's event has passed.
        let done = unsafe { self.api.download_queued(to.as_mut_ptr().cast(), from, 4 * words) };
        self.told("reading results", done)
    }

    /// Queues zeroes over all of it.
    pub(crate) fn clear_queued(&self, memory: &Memory) -> Result<()> {
        self.clear_range(memory.ptr, memory.len)
    }

    /// Queues zeroes over a part of some memory.
    pub(crate) fn clear_range(&self, at: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller computes the range inside one allocation.
        self.told("clearing memory", unsafe { self.api.clear_queued(at, bytes) })
    }

    /// Queues a copy within the device.
    pub(crate) fn copy_queued(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller computes both ranges inside one pool's memory.
        self.told("copying a block", unsafe { self.api.copy_queued(to, from, bytes) })
    }

    /// Copies bytes to the device behind everything submitted, and returns when they are there.
    ///
    /// On the stream, and not by the call that is called synchronous: that one returns when the bytes have left the
    /// host's memory, and kernels of a stream that does not block can run before they have arrived.
    pub(crate) fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller computes the range inside one allocation; the bytes live past the wait below.
        let done = unsafe { self.api.upload_queued(to, bytes.as_ptr(), bytes.len()) };
        self.told("writing memory", done)?;
        self.finish()
    }

    /// Copies bytes from the device behind everything submitted.
    pub(crate) fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: as for `write`.
        let done = unsafe { self.api.download_queued(bytes.as_mut_ptr(), from, bytes.len()) };
        self.told("reading memory", done)?;
        self.finish()
    }

    /// Writes one word at once, past everything that is queued.
    pub(crate) fn poke(&self, to: u64, word: u32) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller computes the address inside one allocation.
        self.told("stopping a slot", unsafe { self.api.poke(to, word) })
    }

    /// Reads words past everything that is queued, into page-locked memory that no step uses.
    pub(crate) fn peek(&self, from: u64, to: &mut Pinned, words: usize) -> Result<()> {
        self.enter()?;
        let to = &mut to.words_mut()[..words];
        // SAFETY: the caller computes the range inside one allocation; the words are there when the call returns.
        let done = unsafe { self.api.peek(to.as_mut_ptr().cast(), from, 4 * words) };
        self.told("reading results so far", done)
    }

    /// Records what `queue` launches as a graph instead of running it.
    pub(crate) fn capture(self: &Arc<Gpu>, queue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.told("beginning a graph", self.api.begin_graph())?;
        let queued = queue();
        let graph = self.api.end_graph();
        queued?;
        let graph = self.told("making a graph", graph)?;
        Ok(Graph { gpu: Arc::clone(self), graph })
    }

    /// An event; it has passed until it is recorded.
    pub(crate) fn event(self: &Arc<Gpu>) -> Result<Event> {
        self.enter()?;
        let event = self.told("making an event", self.api.event())?;
        Ok(Event { gpu: Arc::clone(self), event })
    }
}

/// Clusters that all run at once.
fn in_clusters((clusters, each): (u32, u32), threads: u32, shared: u32) -> Form {
    Form { cluster: each, ..Form::plain((clusters * each, 1), threads, shared) }
}

/// What helps where memory runs out.
const SHRINK: &str = "a smaller --ctx or --max-running, or --kv-type q8_0, needs less";
/// What helps where a GPU is lost.
const RESTART: &str = "cannot be used any more; start the program anew, or use --device cpu";

/// Device memory.
#[derive(Debug)]
pub(crate) struct Memory {
    gpu: Arc<Gpu>,
    pub(crate) ptr: u64,
    /// Bytes.
    pub(crate) len: usize,
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.gpu.api.enter();
        // SAFETY: allocated by `alloc`, freed once; freeing waits for what uses it.
        unsafe { self.gpu.api.free(self.ptr) };
    }
}

/// Page-locked host words, which the GPU reads and writes at its own time.
#[derive(Debug)]
pub(crate) struct Pinned {
    gpu: Arc<Gpu>,
    at: NonNull<u32>,
    words: usize,
}

// SAFETY: the memory belongs to this object alone.
unsafe impl Send for Pinned {}

impl Pinned {
    pub(crate) fn words(&self) -> &[u32] {
        // SAFETY: `words` initialised words live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.words) }
    }

    pub(crate) fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: as above, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.words) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.gpu.finish();
        // SAFETY: allocated by `pinned`, freed once, and the stream no longer uses it.
        unsafe { self.gpu.api.free_host(self.at.as_ptr().cast()) };
    }
}

/// Loaded kernels.
#[derive(Debug)]
pub(crate) struct Module {
    gpu: Arc<Gpu>,
    module: usize,
}

impl Module {
    /// The entry of this name.
    pub(crate) fn function(self: &Arc<Module>, name: &str) -> Result<Function> {
        self.gpu.enter()?;
        // SAFETY: the module is loaded.
        let function = unsafe { self.gpu.api.function(self.module, name) };
        let function = self.gpu.told(&format!("looking for the kernel {name}"), function)?;
        Ok(Function { _module: Arc::clone(self), function, name: name.to_string() })
    }

    /// The words of a variable.
    pub(crate) fn variable<const N: usize>(self: &Arc<Module>, name: &str) -> Result<[u32; N]> {
        self.gpu.enter()?;
        // SAFETY: the module is loaded.
        let at = unsafe { self.gpu.api.variable(self.module, name) };
        let at = self.gpu.told(&format!("looking for {name}"), at)?;
        let mut bytes = vec![0; 4 * N];
        self.gpu.read(at, &mut bytes)?;
        let word = |ix: usize| [0, 1, 2, 3].map(|b| bytes[4 * ix + b]);
        Ok(std::array::from_fn(|ix| u32::from_le_bytes(word(ix))))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.gpu.finish();
        // SAFETY: loaded by `module`, unloaded once, nothing of it runs any more.
        unsafe { self.gpu.api.unload(self.module) };
    }
}

/// One kernel.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    _module: Arc<Module>,
    function: usize,
    pub(crate) name: String,
}

impl Function {
    /// Lets launches ask for so many bytes of dynamic shared memory.
    pub(crate) fn allow_shared(&self, bytes: u32) -> Result<()> {
        let gpu = &self._module.gpu;
        gpu.enter()?;
        // SAFETY: the function belongs to a loaded module.
        let done = unsafe { gpu.api.allow_shared(self.function, bytes) };
        gpu.told(&format!("giving {} shared memory", self.name), done)
    }

    /// How many clusters of so many blocks the GPU runs at once; [`Function::allow_shared`] comes first.
    pub(crate) fn clusters(&self, each: u32, threads: u32, shared: u32) -> Result<u32> {
        let gpu = &self._module.gpu;
        gpu.enter()?;
        // SAFETY: the function belongs to a loaded module.
        let most =
            unsafe { gpu.api.clusters(self.function, in_clusters((1, each), threads, shared)) };
        gpu.told(&format!("asking how many clusters of {} run at once", self.name), most)
    }
}

/// A captured sequence of launches.
#[derive(Debug)]
pub(crate) struct Graph {
    gpu: Arc<Gpu>,
    graph: usize,
}

impl Graph {
    /// Queues all of it with one call.
    pub(crate) fn launch(&self) -> Result<()> {
        self.gpu.healthy()?;
        // SAFETY: the graph is alive.
        self.gpu.told("launching a graph", unsafe { self.gpu.api.launch_graph(self.graph) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.gpu.finish();
        // SAFETY: made by `capture`, destroyed once.
        unsafe { self.gpu.api.free_graph(self.graph) };
    }
}

/// A point on the stream.
#[derive(Debug)]
pub(crate) struct Event {
    gpu: Arc<Gpu>,
    event: usize,
}

impl Event {
    /// Puts the point behind everything submitted.
    pub(crate) fn record(&self) -> Result<()> {
        // SAFETY: the event is alive.
        self.gpu.told("recording an event", unsafe { self.gpu.api.record(self.event) })
    }

    /// Whether it has passed.
    pub(crate) fn passed(&self) -> Result<bool> {
        self.gpu.enter()?;
        // SAFETY: the event is alive.
        self.gpu.told("running a step", unsafe { self.gpu.api.passed(self.event) })
    }

    /// Returns when it has passed.
    pub(crate) fn wait(&self) -> Result<()> {
        self.gpu.enter()?;
        // SAFETY: the event is alive.
        self.gpu.told("running a step", unsafe { self.gpu.api.wait(self.event) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.gpu.api.enter();
        // SAFETY: made by `event`, destroyed once.
        unsafe { self.gpu.api.free_event(self.event) };
    }
}
