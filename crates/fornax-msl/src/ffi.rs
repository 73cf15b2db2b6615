//! The host's half of the C boundary, field for field that of cpp/runtime.h, and the run-time library behind it. It knows
//! no meaning of what it passes on.

use std::ffi::{c_char, c_int, c_void};
use std::os::raw::c_long;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::Error;
use crate::compiler::Compiler;

pub(crate) const SLOTS: usize = 31;
/// The barrier sites of a library of which it is recorded whether a threadgroup reached them.
pub(crate) const SITES: usize = 1024;

#[repr(C)]
pub(crate) struct ArgDesc {
    pub(crate) name: *const c_char,
    pub(crate) type_text: *const c_char,
    pub(crate) source: u32,
    pub(crate) index: u32,
    pub(crate) flags: u32,
    pub(crate) size: u32,
    pub(crate) align: u32,
    pub(crate) needs: i32,
}

#[repr(C)]
pub(crate) struct KernelDesc {
    pub(crate) name: *const c_char,
    pub(crate) thunk: Option<unsafe extern "C" fn(*const Launch)>,
    pub(crate) args: *const ArgDesc,
    pub(crate) nargs: u32,
    pub(crate) max_threads: u32,
}

#[repr(C)]
pub(crate) struct ConstantDesc {
    pub(crate) name: *const c_char,
    pub(crate) id: u32,
    pub(crate) kind: u32,
    pub(crate) size: u32,
    pub(crate) value: *mut u8,
    pub(crate) defined: *mut bool,
}

#[repr(C)]
pub(crate) struct Table {
    pub(crate) kernels: *const KernelDesc,
    pub(crate) nkernels: u64,
    pub(crate) constants: *const ConstantDesc,
    pub(crate) nconstants: u64,
    pub(crate) derive: Option<unsafe extern "C" fn()>,
    pub(crate) image_low: usize,
    pub(crate) image_high: usize,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct Binding {
    pub(crate) window: usize,
    pub(crate) window_len: u64,
    pub(crate) low: usize,
    pub(crate) len: u64,
    pub(crate) in_buffer: u64,
    pub(crate) written: *mut u64,
    pub(crate) cells: *mut u32,
    pub(crate) read_set: *mut u64,
    pub(crate) write_set: *mut u64,
    pub(crate) writable: u32,
    pub(crate) index: u32,
    pub(crate) loads: u64,
    pub(crate) load_bytes: u64,
    pub(crate) stores: u64,
    pub(crate) store_bytes: u64,
}

#[repr(C)]
pub(crate) struct Launch {
    pub(crate) thunk: Option<unsafe extern "C" fn(*const Launch)>,
    pub(crate) args: *const ArgDesc,
    pub(crate) nargs: u32,
    pub(crate) nbindings: u32,
    pub(crate) bindings: *mut Binding,
    pub(crate) buffer: [*mut c_void; SLOTS],
    pub(crate) group_bytes: [u32; SLOTS],
    pub(crate) grid: [u32; 3],
    pub(crate) size: [u32; 3],
    pub(crate) image_low: usize,
    pub(crate) image_high: usize,
    pub(crate) disabled_barrier: i64,
    pub(crate) order: u32,
    pub(crate) checks: u32,
    pub(crate) name: *const c_char,
    pub(crate) dispatch: u64,
}

#[repr(C)]
pub(crate) struct RawFault {
    pub(crate) kind: u32,
    pub(crate) group: [u32; 3],
    pub(crate) thread: u32,
    pub(crate) binding: i32,
    pub(crate) line: i32,
    pub(crate) size: u32,
    pub(crate) write: u32,
    pub(crate) offset: i64,
    pub(crate) pc: usize,
    pub(crate) file: [u8; 192],
    pub(crate) text: [u8; 512],
}

impl RawFault {
    pub(crate) fn new() -> RawFault {
        RawFault {
            kind: 0,
            group: [0; 3],
            thread: 0,
            binding: -1,
            line: 0,
            size: 0,
            write: 0,
            offset: 0,
            pc: 0,
            file: [0; 192],
            text: [0; 512],
        }
    }
}

type RunGroup = unsafe extern "C" fn(*const Launch, *const [u32; 3], u64, *mut RawFault) -> c_int;

/// The entry points of the run-time library, which exists once in a process and runs one threadgroup at a time.
pub(crate) struct Runtime {
    run_group: RunGroup,
    begin_span: unsafe extern "C" fn(),
    clock_is_low: unsafe extern "C" fn() -> c_int,
    reset_clock: unsafe extern "C" fn(),
    group_bytes: unsafe extern "C" fn() -> u64,
    reached: unsafe extern "C" fn() -> *const [u64; SITES / 64],
}

static RUNTIME: OnceLock<Result<Mutex<Runtime>, String>> = OnceLock::new();

impl Runtime {
    /// Makes sure that the run-time library is there: kernels cannot be loaded before.
    pub(crate) fn load() -> Result<(), Error> {
        Runtime::get().map(|_| ())
    }

    fn get() -> Result<&'static Mutex<Runtime>, Error> {
        let open = || open().map(Mutex::new).map_err(|e| e.to_string());
        RUNTIME.get_or_init(open).as_ref().map_err(Error::host)
    }

    /// Takes the run-time library for one run.
    pub(crate) fn lock() -> Result<MutexGuard<'static, Runtime>, Error> {
        // Each run sets all state that it depends on, so a panic in another leaves nothing behind.
        Ok(Runtime::get()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs one threadgroup; true if it committed a fault.
    ///
    /// # Safety
    /// Every pointer in `launch` is valid for what cpp/runtime.h says of it.
    pub(crate) unsafe fn run_group(
        &mut self,
        launch: &Launch,
        group: [u32; 3],
        seed: u64,
        fault: &mut RawFault,
    ) -> bool {
        // SAFETY: passed on; the library keeps none of the pointers beyond the call.
        unsafe { (self.run_group)(launch, &group, seed, fault) != 0 }
    }

    pub(crate) fn begin_span(&mut self) {
        // SAFETY: no preconditions; the lock keeps other runs away.
        unsafe { (self.begin_span)() }
    }

    pub(crate) fn clock_is_low(&mut self) -> bool {
        // SAFETY: as above.
        unsafe { (self.clock_is_low)() != 0 }
    }

    pub(crate) fn reset_clock(&mut self) {
        // SAFETY: as above.
        unsafe { (self.reset_clock)() }
    }

    /// The barrier sites that the last threadgroup reached, as bits.
    pub(crate) fn reached(&mut self) -> [u64; SITES / 64] {
        // SAFETY: as above; the array lives as long as the library, and changes only in runs.
        unsafe { *(self.reached)() }
    }

    pub(crate) fn group_bytes(&mut self) -> u64 {
        // SAFETY: as above.
        unsafe { (self.group_bytes)() }
    }
}

fn open() -> Result<Runtime, Error> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    let path = Compiler::get()?.runtime()?;
    let failed = |e: libloading::Error| Error::host(format!("loading {}: {e}", path.display()));
    // SAFETY: the library is the one that was built from this crate's own source; it has no initialisers.
    let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) }.map_err(failed)?;
    // SAFETY: the symbols have the types that cpp/runtime.h declares.
    let runtime = unsafe {
        Runtime {
            run_group: *library.get::<RunGroup>(b"msl_run_group\0").map_err(failed)?,
            begin_span: *library.get(b"msl_begin_span\0").map_err(failed)?,
            clock_is_low: *library.get(b"msl_clock_is_low\0").map_err(failed)?,
            reset_clock: *library.get(b"msl_reset_clock\0").map_err(failed)?,
            reached: *library.get(b"msl_reached\0").map_err(failed)?,
            group_bytes: *library.get(b"msl_group_bytes\0").map_err(failed)?,
        }
    };
    // Kernels of the whole process run in it: it stays.
    std::mem::forget(library);
    Ok(runtime)
}

const _: () = assert!(size_of::<c_long>() == 8, "the emulator is for 64-bit hosts");
