//! NVIDIA's driver behind [`Api`], by `cudarc`, which loads it at run time. It knows no plan.

use std::ffi::{CString, c_void};

use cudarc::driver::{result, sys};
use fornax_plan::{Error, Result};

use super::api::{Api, BoxMap, Boxes, Done, Fault, Form};

/// The oldest driver whose functions are all called for: CUDA 12.8.
const DRIVER_MIN: i32 = 12080;

/// A context and its streams.
#[derive(Debug)]
pub(super) struct Cuda {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// For what is written and read while the stream is busy.
    side: sys::CUstream,
}

// SAFETY: a context may be current on any thread, streams may be used from any; every method of the objects above enters the
// context first.
unsafe impl Send for Cuda {}
// SAFETY: as above; the driver's own objects are synchronised by it.
unsafe impl Sync for Cuda {}

/// What a GPU is.
#[derive(Debug)]
pub(super) struct About {
    pub(super) name: String,
    pub(super) arch: u32,
    pub(super) units: u32,
    pub(super) shared_max: u32,
}

fn fault(e: result::DriverError) -> Fault {
    Fault { code: e.0 as u32, text: e.to_string() }
}

/// Opens the GPU of this number.
///
/// # Errors
/// `is_unsupported` where there is no driver, too old a one, or no such GPU.
pub(super) fn open(ordinal: u32) -> Result<(Cuda, About)> {
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
    with(ordinal).map_err(|e| refuse("opening the GPU", e))
}

fn with(ordinal: u32) -> std::result::Result<(Cuda, About), result::DriverError> {
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
    let about = About { name, arch, units: units as u32, shared_max: shared as u32 };
    Ok((Cuda { device, context, stream, side }, about))
}

/// A kernel's parameters: the constants as one, then the pointers.
fn params(constants: &[u32], pointers: &[u64]) -> [*mut c_void; 32] {
    let mut params: [*mut c_void; 32] = [std::ptr::null_mut(); 32];
    params[0] = constants.as_ptr().cast_mut().cast();
    for (to, pointer) in params[1..].iter_mut().zip(pointers) {
        *to = std::ptr::from_ref(pointer).cast_mut().cast();
    }
    params
}

impl Api for Cuda {
    fn enter(&self) -> Done {
        // SAFETY: the condition is the trait's.
        unsafe { result::ctx::set_current(self.context) }.map_err(fault)
    }

    fn free_bytes(&self) -> Done<(u64, u64)> {
        let (free, all) = result::mem_get_info().map_err(fault)?;
        Ok((free as u64, all as u64))
    }

    fn alloc(&self, bytes: usize) -> Done<u64> {
        // SAFETY: the condition is the trait's.
        unsafe { result::malloc_sync(bytes) }.map_err(fault)
    }

    unsafe fn free(&self, at: u64) {
        // SAFETY: the condition is the trait's.
        let _ = unsafe { result::free_sync(at) };
    }

    fn alloc_host(&self, bytes: usize) -> Done<*mut u8> {
        // SAFETY: the condition is the trait's.
        unsafe { result::malloc_host(bytes, 0) }.map(<*mut c_void>::cast).map_err(fault)
    }

    unsafe fn free_host(&self, at: *mut u8) {
        // SAFETY: the condition is the trait's.
        let _ = unsafe { result::free_host(at.cast()) };
    }

    unsafe fn clear_queued(&self, at: u64, bytes: usize) -> Done {
        // SAFETY: the condition is the trait's.
        unsafe { result::memset_d8_async(at, 0, bytes, self.stream) }.map_err(fault)
    }

    unsafe fn upload_queued(&self, to: u64, from: *const u8, bytes: usize) -> Done {
        // SAFETY: the condition is the trait's.
        let from = unsafe { std::slice::from_raw_parts(from, bytes) };
        // SAFETY: the condition is the trait's.
        unsafe { result::memcpy_htod_async(to, from, self.stream) }.map_err(fault)
    }

    unsafe fn download_queued(&self, to: *mut u8, from: u64, bytes: usize) -> Done {
        // SAFETY: the condition is the trait's.
        let to = unsafe { std::slice::from_raw_parts_mut(to, bytes) };
        // SAFETY: the condition is the trait's.
        unsafe { result::memcpy_dtoh_async(to, from, self.stream) }.map_err(fault)
    }

    unsafe fn copy_queued(&self, to: u64, from: u64, bytes: usize) -> Done {
        // SAFETY: the condition is the trait's.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }.map_err(fault)
    }

    unsafe fn poke(&self, to: u64, word: u32) -> Done {
        // Pageable words are staged before the call returns.
        // SAFETY: the condition is the trait's.
        unsafe { result::memcpy_htod_async(to, &[word], self.side) }
            // SAFETY: the condition is the trait's.
            .and_then(|()| unsafe { result::stream::synchronize(self.side) })
            .map_err(fault)
    }

    unsafe fn peek(&self, to: *mut u8, from: u64, bytes: usize) -> Done {
        // SAFETY: the condition is the trait's.
        let to = unsafe { std::slice::from_raw_parts_mut(to, bytes) };
        // SAFETY: the condition is the trait's.
        unsafe { result::memcpy_dtoh_async(to, from, self.side) }
            // SAFETY: the condition is the trait's.
            .and_then(|()| unsafe { result::stream::synchronize(self.side) })
            .map_err(fault)
    }

    fn finish(&self) -> Done {
        // SAFETY: the condition is the trait's.
        unsafe { result::stream::synchronize(self.stream) }.map_err(fault)
    }

    fn module(&self, code: &[u8]) -> Done<usize> {
        // The image is whole, as the compiler made it; the driver checks its header.
        // SAFETY: the condition is the trait's.
        let module = unsafe { result::module::load_data(code.as_ptr().cast()) };
        module.map(|m| m as usize).map_err(fault)
    }

    unsafe fn unload(&self, module: usize) {
        // SAFETY: the condition is the trait's.
        let _ = unsafe { result::module::unload(module as sys::CUmodule) };
    }

    unsafe fn function(&self, module: usize, name: &str) -> Done<usize> {
        let text = CString::new(name).unwrap_or_default();
        // SAFETY: the condition is the trait's.
        let function = unsafe { result::module::get_function(module as sys::CUmodule, text) };
        function.map(|f| f as usize).map_err(fault)
    }

    unsafe fn variable(&self, module: usize, name: &str) -> Done<u64> {
        let text = CString::new(name).unwrap_or_default();
        // SAFETY: the condition is the trait's.
        let found = unsafe { result::module::get_global(module as sys::CUmodule, text) };
        found.map(|(at, _)| at).map_err(fault)
    }

    unsafe fn allow_shared(&self, function: usize, bytes: u32) -> Done {
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SIZE;
        let function = function as sys::CUfunction;
        // SAFETY: the condition is the trait's.
        unsafe { result::function::set_function_attribute(function, SIZE, bytes as i32) }
            .map_err(fault)
    }

    unsafe fn launch(
        &self,
        function: usize,
        form: Form,
        constants: &[u32],
        pointers: &[u64],
    ) -> Done {
        let mut params = params(constants, pointers);
        let params = &mut params[..=pointers.len()];
        let (grid, block) = ((form.grid.0, form.grid.1, 1), (form.threads, 1, 1));
        let (function, stream) = (function as sys::CUfunction, self.stream);
        if form.early || form.cluster > 1 {
            // SAFETY: as this method's own.
            return unsafe { launch_with(function, form, stream, params) };
        }
        let queue =
            if form.together { result::launch_cooperative_kernel } else { result::launch_kernel };
        // The driver copies the parameters before it returns.
        // SAFETY: the condition is the trait's.
        unsafe { queue(function, grid, block, form.shared, stream, params) }.map_err(fault)
    }

    fn boxes(&self, boxes: &Boxes) -> Done<BoxMap> {
        let &Boxes { at, sizes, strides, each } = boxes;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: all places are valid for the call, which only writes the map; the address is not followed.
        let done = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
                4,
                at as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                each.as_ptr(),
                [1; 4].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        let bytes = map.opaque.map(u64::to_le_bytes).concat();
        done.result().map(|()| bytes.try_into().unwrap_or([0; 128])).map_err(fault)
    }

    unsafe fn clusters(&self, function: usize, form: Form) -> Done<u32> {
        let (mut list, n) = attributes(form);
        let config = configuration(form, self.stream, &mut list[..n as usize]);
        let (mut most, function) = (0, function as sys::CUfunction);
        // SAFETY: the condition is the trait's, and both places are valid for the call.
        let done = unsafe {
            sys::cuOccupancyMaxActiveClusters(&raw mut most, function, &raw const config)
        };
        done.result().map(|()| most.max(0) as u32).map_err(fault)
    }

    fn begin_graph(&self) -> Done {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the condition is the trait's.
        unsafe { result::stream::begin_capture(self.stream, mode) }.map_err(fault)
    }

    fn end_graph(&self) -> Done<usize> {
        // SAFETY: the condition is the trait's.
        let graph = unsafe { result::stream::end_capture(self.stream) }.map_err(fault)?;
        // The graph is destroyed once, after its instance is made.
        // SAFETY: the condition is the trait's.
        let exec = unsafe {
            let exec = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let destroyed = result::graph::destroy(graph);
            exec.and_then(|exec| destroyed.map(|()| exec))
        };
        exec.map(|e| e as usize).map_err(fault)
    }

    unsafe fn launch_graph(&self, graph: usize) -> Done {
        // SAFETY: the condition is the trait's.
        unsafe { result::graph::launch(graph as sys::CUgraphExec, self.stream) }.map_err(fault)
    }

    unsafe fn free_graph(&self, graph: usize) {
        // SAFETY: the condition is the trait's.
        let _ = unsafe { result::graph::exec_destroy(graph as sys::CUgraphExec) };
    }

    fn event(&self) -> Done<usize> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        event.map(|e| e as usize).map_err(fault)
    }

    unsafe fn record(&self, event: usize) -> Done {
        // SAFETY: the condition is the trait's.
        unsafe { result::event::record(event as sys::CUevent, self.stream) }.map_err(fault)
    }

    unsafe fn passed(&self, event: usize) -> Done<bool> {
        // SAFETY: the condition is the trait's.
        match unsafe { result::event::query(event as sys::CUevent) } {
            Ok(()) => Ok(true),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(e) => Err(fault(e)),
        }
    }

    unsafe fn wait(&self, event: usize) -> Done {
        // SAFETY: the condition is the trait's.
        unsafe { result::event::synchronize(event as sys::CUevent) }.map_err(fault)
    }

    unsafe fn free_event(&self, event: usize) {
        // SAFETY: the condition is the trait's.
        let _ = unsafe { result::event::destroy(event as sys::CUevent) };
    }
}

/// What a launch asks for beside its size; what is past the number returned is not looked at.
fn attributes(form: Form) -> ([sys::CUlaunchAttribute; 3], u32) {
    use sys::CUlaunchAttributeID_enum::{
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION as CLUSTER,
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE as TOGETHER,
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as EARLY,
    };
    type Value = sys::CUlaunchAttributeValue;
    let one = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
    let cluster = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: form.cluster, y: 1, z: 1 };
    let all = [
        (form.early, one(EARLY, Value { programmaticStreamSerializationAllowed: 1 })),
        (form.together, one(TOGETHER, Value { cooperative: 1 })),
        (form.cluster > 1, one(CLUSTER, Value { clusterDim: cluster })),
    ];
    let mut list = all.map(|(_, attribute)| attribute);
    let mut n = 0;
    for (_, attribute) in all.into_iter().filter(|(asked, _)| *asked) {
        list[n] = attribute;
        n += 1;
    }
    (list, n as u32)
}

/// A launch as the driver takes it, with these of its attributes.
fn configuration(
    form: Form,
    stream: sys::CUstream,
    attributes: &mut [sys::CUlaunchAttribute],
) -> sys::CUlaunchConfig {
    sys::CUlaunchConfig {
        gridDimX: form.grid.0,
        gridDimY: form.grid.1,
        gridDimZ: 1,
        blockDimX: form.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: form.shared,
        hStream: stream,
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    }
}

/// A launch with attributes.
///
/// # Safety
/// As [`Api::launch`].
unsafe fn launch_with(
    function: sys::CUfunction,
    form: Form,
    stream: sys::CUstream,
    params: &mut [*mut std::ffi::c_void],
) -> Done {
    let (mut list, n) = attributes(form);
    let config = configuration(form, stream, &mut list[..n as usize]);
    let none = std::ptr::null_mut();
    // SAFETY: the caller's; the driver copies configuration and parameters before it returns.
    let done =
        unsafe { sys::cuLaunchKernelEx(&raw const config, function, params.as_mut_ptr(), none) };
    done.result().map_err(fault)
}

impl Drop for Cuda {
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
