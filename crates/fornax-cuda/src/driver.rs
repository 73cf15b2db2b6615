//! The thin set of driver objects that this crate uses, each freed when dropped: the GPU with its
//! stream, device and page-locked memory, modules, graphs, events. It knows no plan.
//!
//! Everything here runs on one stream in order, so memory is freed only after [`Gpu::finish`].

use std::ffi::{CString, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use fornax_plan::{Error, Result};

/// The oldest driver whose functions are all called for: CUDA 12.8.
const DRIVER_MIN: i32 = 12080;

/// A GPU, its primary context and the stream that everything runs on.
#[derive(Debug)]
pub(crate) struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// For the one word that is written while the stream is busy.
    side: sys::CUstream,
    /// The product's name.
    pub(crate) name: String,
    /// Compute capability times ten: 90 for sm_90.
    pub(crate) arch: u32,
    /// Multiprocessors.
    pub(crate) units: u32,
    /// Bytes of shared memory that a block may ask for.
    pub(crate) shared_max: u32,
}

// SAFETY: a context may be current on any thread, streams may be used from any; every method makes
// the context current first.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver's own objects are synchronised by it.
unsafe impl Sync for Gpu {}

fn told(doing: &str, e: result::DriverError) -> Error {
    let text = format!("cuda: {doing}: {e}");
    if e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return Error::out_of_memory(format!("{text}; lower the KV limit or use a smaller model"));
    }
    Error::lost(text)
}

/// A kernel's parameters: the constants as one, then the pointers.
fn params(constants: &[u32], pointers: &[u64]) -> [*mut c_void; 24] {
    let mut params: [*mut c_void; 24] = [std::ptr::null_mut(); 24];
    params[0] = constants.as_ptr().cast_mut().cast();
    for (to, pointer) in params[1..].iter_mut().zip(pointers) {
        *to = std::ptr::from_ref(pointer).cast_mut().cast();
    }
    params
}

impl Gpu {
    /// Opens the GPU of this number.
    ///
    /// # Errors
    /// `is_unsupported` where there is no driver, too old a one, or no such GPU.
    pub(crate) fn open(ordinal: u32) -> Result<Arc<Gpu>> {
        // SAFETY: loading the driver runs its initialisers, which have no conditions. Every other
        // call of this crate panics without the library, so this check comes first.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::unsupported(
                "cuda: no NVIDIA driver on this machine (libcuda was not found); use --device cpu",
            ));
        }
        let refuse = |doing: &str, e: result::DriverError| {
            Error::unsupported(format!("cuda: {doing}: {e}; use --device cpu"))
        };
        result::init().map_err(|e| refuse("starting the driver", e))?;
        let mut version = 0;
        // SAFETY: the pointer is valid for the call.
        let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
        asked.map_err(|e| refuse("asking the driver's version", e))?;
        if version < DRIVER_MIN {
            return Err(Error::unsupported(format!(
                "cuda: the driver is of CUDA {}.{}, at least {}.{} is needed; update it or use \
                 --device cpu",
                version / 1000,
                version % 1000 / 10,
                DRIVER_MIN / 1000,
                DRIVER_MIN % 1000 / 10
            )));
        }
        let count = result::device::get_count().map_err(|e| refuse("counting GPUs", e))?;
        if i64::from(ordinal) >= i64::from(count) {
            return Err(Error::unsupported(format!(
                "cuda: GPU {ordinal} was asked for, this machine has {count}; use --device cpu"
            )));
        }
        Gpu::with(ordinal).map_err(|e| refuse("opening the GPU", e))
    }

    fn with(ordinal: u32) -> std::result::Result<Arc<Gpu>, result::DriverError> {
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as UNITS,
        };
        let device = result::device::get(ordinal as i32)?;
        let name = result::device::get_name(device)?;
        // SAFETY: the device comes from the driver.
        let (major, minor, units, shared) = unsafe {
            (
                result::device::get_attribute(device, MAJOR)?,
                result::device::get_attribute(device, MINOR)?,
                result::device::get_attribute(device, UNITS)?,
                result::device::get_attribute(device, SHARED)?,
            )
        };
        // SAFETY: as above.
        let context = unsafe { result::primary_ctx::retain(device)? };
        // SAFETY: the context was just retained.
        unsafe { result::ctx::set_current(context)? };
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        let side = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        let arch = (10 * major + minor) as u32;
        let (units, shared_max) = (units as u32, shared as u32);
        Ok(Arc::new(Gpu { device, context, stream, side, name, arch, units, shared_max }))
    }

    /// Makes the context current on this thread.
    pub(crate) fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { result::ctx::set_current(self.context) }
            .map_err(|e| told("entering the context", e))
    }

    /// Free bytes of device memory.
    pub(crate) fn free_bytes(&self) -> Result<u64> {
        self.enter()?;
        let (free, _) = result::mem_get_info().map_err(|e| told("asking for free memory", e))?;
        Ok(free as u64)
    }

    /// Zeroed device memory.
    pub(crate) fn alloc(self: &Arc<Gpu>, bytes: usize) -> Result<Memory> {
        self.enter()?;
        let len = bytes.max(4);
        // SAFETY: the memory is zeroed before anybody reads it.
        let ptr = unsafe { result::malloc_sync(len) }
            .map_err(|e| told(&format!("allocating {len} bytes"), e))?;
        let memory = Memory { gpu: Arc::clone(self), ptr, len };
        // SAFETY: the range was just allocated.
        unsafe { result::memset_d8_async(ptr, 0, len, self.stream) }
            .map_err(|e| told("clearing memory", e))?;
        Ok(memory)
    }

    /// Page-locked words of host memory.
    pub(crate) fn pinned(self: &Arc<Gpu>, words: usize) -> Result<Pinned> {
        self.enter()?;
        let words = words.max(1);
        // SAFETY: the memory is zeroed below before anybody reads it.
        let at = unsafe { result::malloc_host(4 * words, 0) }
            .map_err(|e| told(&format!("page-locking {} bytes", 4 * words), e))?;
        let at = NonNull::new(at.cast::<u32>())
            .ok_or_else(|| Error::lost("cuda: page-locked memory at no address"))?;
        // SAFETY: the driver gave `words` words.
        unsafe { at.as_ptr().write_bytes(0, words) };
        Ok(Pinned { gpu: Arc::clone(self), at, words })
    }

    /// Loads machine code.
    pub(crate) fn module(self: &Arc<Gpu>, cubin: &[u8]) -> Result<Arc<Module>> {
        self.enter()?;
        // SAFETY: the image is whole, as the compiler made it; the driver checks its header.
        let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) }
            .map_err(|e| told("loading kernels", e))?;
        Ok(Arc::new(Module { gpu: Arc::clone(self), module }))
    }

    /// Returns when everything submitted has run.
    pub(crate) fn finish(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.stream) }
            .map_err(|e| told("waiting for the GPU", e))
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
        let mut params = params(constants, pointers);
        let (grid, block) = ((grid.0, grid.1, 1), (threads, 1, 1));
        let params = &mut params[..=pointers.len()];
        // SAFETY: the driver copies the parameters before it returns; they are what the entry
        // declares, which `prepare` builds in one place per entry, and the pointers are to
        // memory that the program keeps.
        unsafe {
            result::launch_kernel(function.function, grid, block, shared, self.stream, params)
        }
        .map_err(|e| told(&format!("launching {}", function.name), e))
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
        let mut params = params(constants, pointers);
        let (grid, block) = ((blocks, 1, 1), (threads, 1, 1));
        let params = &mut params[..=pointers.len()];
        // SAFETY: as for `launch`.
        unsafe {
            result::launch_cooperative_kernel(
                function.function,
                grid,
                block,
                shared,
                self.stream,
                params,
            )
        }
        .map_err(|e| told(&format!("launching {}", function.name), e))
    }

    /// Queues a copy of page-locked words to the device.
    pub(crate) fn upload_queued(&self, to: &Memory, from: &Pinned, words: usize) -> Result<()> {
        let from = &from.words()[..words];
        assert!(4 * words <= to.len, "invariant: the copy fits");
        // SAFETY: the range is inside the memory; the page-locked words are left alone until the
        // step's event has passed.
        unsafe { result::memcpy_htod_async(to.ptr, from, self.stream) }
            .map_err(|e| told("uploading the step", e))
    }

    /// Queues a copy of device words to page-locked memory.
    pub(crate) fn download_queued(&self, from: u64, to: &mut Pinned, words: usize) -> Result<()> {
        let to = &mut to.words_mut()[..words];
        // SAFETY: the words are not looked at until the step's event has passed.
        unsafe { result::memcpy_dtoh_async(to, from, self.stream) }
            .map_err(|e| told("reading results", e))
    }

    /// Queues zeroes over all of it.
    pub(crate) fn clear_queued(&self, memory: &Memory) -> Result<()> {
        // SAFETY: the range is the memory's own.
        unsafe { result::memset_d8_async(memory.ptr, 0, memory.len, self.stream) }
            .map_err(|e| told("clearing memory", e))
    }

    /// Queues a copy within the device.
    pub(crate) fn copy_queued(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller computes both ranges inside one pool's memory.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }
            .map_err(|e| told("copying a block", e))
    }

    /// Copies bytes to the device behind everything submitted, and returns when they are there.
    ///
    /// On the stream, and not by the call that is called synchronous: that one returns when the bytes have left the
    /// host's memory, and kernels of a stream that does not block can run before they have arrived.
    pub(crate) fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller computes the range inside one allocation; the bytes live past the wait below.
        unsafe { result::memcpy_htod_async(to, bytes, self.stream) }
            .map_err(|e| told("writing memory", e))?;
        self.finish()
    }

    /// Copies bytes from the device behind everything submitted.
    pub(crate) fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.finish()?;
        // SAFETY: as for `write`.
        unsafe { result::memcpy_dtoh_sync(bytes, from) }.map_err(|e| told("reading memory", e))
    }

    /// Writes one word at once, past everything that is queued.
    pub(crate) fn poke(&self, to: u64, word: u32) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller computes the address inside one allocation; pageable words are
        // staged before the call returns.
        unsafe { result::memcpy_htod_async(to, &[word], self.side) }
            .and_then(|()| unsafe { result::stream::synchronize(self.side) })
            .map_err(|e| told("stopping a slot", e))
    }

    /// Records what `queue` launches as a graph instead of running it.
    pub(crate) fn capture(self: &Arc<Gpu>, queue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::begin_capture(self.stream, mode) }
            .map_err(|e| told("beginning a graph", e))?;
        let queued = queue();
        // SAFETY: the capture was begun above.
        let graph = unsafe { result::stream::end_capture(self.stream) };
        queued?;
        let graph = graph.map_err(|e| told("ending a graph", e))?;
        // SAFETY: the graph is valid and is destroyed once, after its instance is made.
        let exec = unsafe {
            let exec = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let destroyed = result::graph::destroy(graph);
            exec.and_then(|exec| destroyed.map(|()| exec))
        };
        let exec = exec.map_err(|e| told("making a graph", e))?;
        Ok(Graph { gpu: Arc::clone(self), exec })
    }

    /// An event; it has passed until it is recorded.
    pub(crate) fn event(self: &Arc<Gpu>) -> Result<Event> {
        self.enter()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(|e| told("making an event", e))?;
        Ok(Event { gpu: Arc::clone(self), event })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // A failure here has nobody to be told to, and the process is about to end or to go on
        // without the GPU.
        // SAFETY: the handles are this object's own and are released once.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            let _ = result::stream::destroy(self.stream);
            let _ = result::stream::destroy(self.side);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

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
        let _ = self.gpu.enter();
        // SAFETY: allocated by `alloc`, freed once; freeing waits for what uses it.
        let _ = unsafe { result::free_sync(self.ptr) };
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
        let _ = unsafe { result::free_host(self.at.as_ptr().cast()) };
    }
}

/// Loaded kernels.
#[derive(Debug)]
pub(crate) struct Module {
    gpu: Arc<Gpu>,
    module: sys::CUmodule,
}

// SAFETY: a module belongs to its context, which any thread may enter.
unsafe impl Send for Module {}
// SAFETY: as above; it is only read after loading.
unsafe impl Sync for Module {}

impl Module {
    /// The entry of this name.
    pub(crate) fn function(self: &Arc<Module>, name: &str) -> Result<Function> {
        self.gpu.enter()?;
        let text = CString::new(name).map_err(|_| Error::malformed("cuda: a NUL in a name"))?;
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(self.module, text) }
            .map_err(|e| told(&format!("looking for the kernel {name}"), e))?;
        Ok(Function { _module: Arc::clone(self), function, name: name.to_string() })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.gpu.finish();
        // SAFETY: loaded by `module`, unloaded once, nothing of it runs any more.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

/// One kernel.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    _module: Arc<Module>,
    function: sys::CUfunction,
    pub(crate) name: String,
}

// SAFETY: as for its module.
unsafe impl Send for Function {}

impl Function {
    /// Lets launches ask for so many bytes of dynamic shared memory.
    pub(crate) fn allow_shared(&self, bytes: u32) -> Result<()> {
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SIZE;
        self._module.gpu.enter()?;
        // SAFETY: the function belongs to a loaded module.
        unsafe { result::function::set_function_attribute(self.function, SIZE, bytes as i32) }
            .map_err(|e| told(&format!("giving {} shared memory", self.name), e))
    }
}

/// A captured sequence of launches.
#[derive(Debug)]
pub(crate) struct Graph {
    gpu: Arc<Gpu>,
    exec: sys::CUgraphExec,
}

// SAFETY: a graph is launched by its owner alone.
unsafe impl Send for Graph {}

impl Graph {
    /// Queues all of it with one call.
    pub(crate) fn launch(&self) -> Result<()> {
        // SAFETY: both handles are alive.
        unsafe { result::graph::launch(self.exec, self.gpu.stream) }
            .map_err(|e| told("launching a graph", e))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.gpu.finish();
        // SAFETY: made by `capture`, destroyed once.
        let _ = unsafe { result::graph::exec_destroy(self.exec) };
    }
}

/// A point on the stream.
#[derive(Debug)]
pub(crate) struct Event {
    gpu: Arc<Gpu>,
    event: sys::CUevent,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// Puts the point behind everything submitted.
    pub(crate) fn record(&self) -> Result<()> {
        // SAFETY: both handles are alive.
        unsafe { result::event::record(self.event, self.gpu.stream) }
            .map_err(|e| told("recording an event", e))
    }

    /// Whether it has passed.
    pub(crate) fn passed(&self) -> Result<bool> {
        self.gpu.enter()?;
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(e) => Err(told("running a step", e)),
        }
    }

    /// Returns when it has passed.
    pub(crate) fn wait(&self) -> Result<()> {
        self.gpu.enter()?;
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.event) }.map_err(|e| told("running a step", e))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.gpu.enter();
        // SAFETY: made by `event`, destroyed once.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}
