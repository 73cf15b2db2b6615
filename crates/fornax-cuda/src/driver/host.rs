//! A stand-in for the driver and the GPU, for tests: kernels compiled as C++ (`host/shim.h`), run at once, on memory that ends
//! at a guard page. It counts memory against a limit, and fails where it is told to. It knows no plan.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use fornax_plan::{Error, Result};
use libloading::Library;

use super::Gpu;
use super::api::{Api, BoxMap, Boxes, Done, Fault, Form, OUT_OF_MEMORY};

const SHIM: &str = include_str!("../../host/shim.h");
const RUN: &str = include_str!("../../host/run.cpp");

type Thunk = unsafe extern "C" fn(*const u32, *const u64);
type Run = unsafe extern "C" fn(
    Thunk,
    *const u32,
    u32,
    *const u32,
    *const u64,
    u32,
) -> *const std::ffi::c_char;

/// One lock for each of what must not be done twice at once.
struct Turns<K>(Mutex<BTreeMap<K, Arc<Mutex<()>>>>);

impl<K: Ord> Turns<K> {
    const fn new() -> Turns<K> {
        Turns(Mutex::new(BTreeMap::new()))
    }

    fn of(&self, key: K) -> Arc<Mutex<()>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(key).or_default())
    }
}

/// Compiles a source with these entries; what comes back stands for machine code.
///
/// # Errors
/// `is_malformed` with the compiler's words.
pub(crate) fn compile(name: &str, source: &str, entries: &[String]) -> Result<Vec<u8>> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    static COMPILING: Turns<String> = Turns::new();
    let kernels = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let glue: Vec<String> = entries.iter().map(|e| format!("HOST_ENTRY({e})")).collect();
    let text = format!("{SHIM}\n{source}\n#line 1 \"run.cpp\"\n{RUN}\n{}\n", glue.join("\n"));
    let mut h = DefaultHasher::new();
    text.hash(&mut h);
    for (name, header) in crate::kernels::HEADERS {
        (name, header).hash(&mut h);
    }
    let folder = std::env::temp_dir().join("fornax-cuda-host");
    let failed = |e: std::io::Error| Error::malformed(format!("compiling {name}: {e}"));
    std::fs::create_dir_all(&folder).map_err(failed)?;
    let stem = format!("{name}-{:016x}", h.finish());
    let made = folder.join(format!("{stem}.so"));
    let turn = COMPILING.of(stem.clone());
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    if !made.exists() {
        let file = folder.join(format!("{stem}.{}.cpp", std::process::id()));
        std::fs::write(&file, text).map_err(failed)?;
        let beside = file.with_extension("so");
        let out = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "g++".into()))
            .args(["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-fno-strict-aliasing"])
            .args(["-fno-exceptions", "-ffp-contract=off", "-fmax-errors=8", "-fsigned-char"])
            .args(["-fvisibility-inlines-hidden", "-Wl,-Bsymbolic", "-x", "c++"])
            .arg("-I")
            .arg(kernels.join(name))
            .arg(&file)
            .arg("-o")
            .arg(&beside)
            .output()
            .map_err(failed)?;
        if !out.status.success() {
            let words = String::from_utf8_lossy(&out.stderr).into_owned();
            return Err(Error::malformed(format!("compiling {name} for the CPU: {words}")));
        }
        std::fs::rename(&beside, &made).map_err(failed)?;
        let _ = std::fs::remove_file(&file);
    }
    Ok(made.to_string_lossy().into_owned().into_bytes())
}

#[derive(Clone, Debug)]
struct Launch {
    function: usize,
    form: (u32, u32, u32),
    constants: Vec<u32>,
    pointers: Vec<u64>,
}

/// What is queued while the stand-in holds.
#[derive(Clone, Debug)]
enum Queued {
    Launch(Launch),
    Clear { at: u64, bytes: usize },
    Copy { to: u64, from: u64, bytes: usize },
}

#[derive(Debug)]
struct Entry {
    name: String,
    thunk: Thunk,
    run: Run,
    /// Bytes of its constants, and pointers.
    takes: (usize, usize),
}

/// A fault to come.
#[derive(Clone, Debug)]
struct Coming {
    /// Launches that still work.
    after: u64,
    fault: Fault,
}

#[derive(Debug, Default)]
struct State {
    /// By address: what was mapped, and the bytes asked for.
    memory: HashMap<u64, (usize, usize, usize)>,
    used: u64,
    room: u64,
    modules: Vec<Library>,
    entries: Vec<Entry>,
    graphs: Vec<Vec<Launch>>,
    capturing: Option<Vec<Launch>>,
    launches: u64,
    coming: Option<Coming>,
    lost: Option<Fault>,
    /// While it holds: the launches that still run as they come.
    holding: Option<u64>,
    /// What has been queued since they were used up.
    waiting: VecDeque<Queued>,
    /// Takes everything and runs nothing.
    blank: bool,
}

/// The stand-in; what it is told to do is told by [`Control`].
#[derive(Debug)]
struct Host(Arc<Mutex<State>>);

/// The tests' hand on a stand-in.
#[derive(Clone, Debug)]
pub(crate) struct Control(Arc<Mutex<State>>);

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Control {
    /// Has the launch after so many more fail with this fault of the driver, and everything after it if it is sticky.
    pub(crate) fn fail_after(&self, launches: u64, code: u32, text: &str) {
        let fault = Fault { code, text: text.to_string() };
        lock(&self.0).coming = Some(Coming { after: launches, fault });
    }

    /// Bytes of device memory that there are.
    pub(crate) fn room(&self, bytes: u64) {
        lock(&self.0).room = bytes;
    }

    /// Bytes allocated now.
    pub(crate) fn used(&self) -> u64 {
        lock(&self.0).used
    }

    /// Has nothing that is queued from now on run, until somebody waits for all of it.
    pub(crate) fn hold(&self) {
        lock(&self.0).holding = Some(0);
    }

    /// Runs so many more of the launches that are held, and what stands between and behind them; returns those left.
    pub(crate) fn go_on(&self, launches: u64) -> usize {
        let mut s = lock(&self.0);
        s.holding = Some(launches);
        let waiting = std::mem::take(&mut s.waiting);
        waiting.into_iter().try_for_each(|q| s.take(q)).expect("held launches work");
        s.holding = Some(0);
        s.waiting.iter().filter(|q| matches!(q, Queued::Launch(_))).count()
    }

    /// Kernels run so far.
    pub(crate) fn launches(&self) -> u64 {
        lock(&self.0).launches
    }

    /// Graphs captured so far.
    pub(crate) fn graphs(&self) -> usize {
        lock(&self.0).graphs.len()
    }
}

/// A GPU that is none: kernels are run on the CPU.
pub(crate) fn gpu() -> (Arc<Gpu>, Control) {
    let about = ("the CPU, in place of a GPU".to_string(), 0, 4, 0);
    made(State { room: 1 << 32, ..State::default() }, about)
}

/// A GPU that takes every kernel and runs none: for compiling what a model needs on one of this shape.
pub(crate) fn blank(arch: u32, units: u32, shared_max: u32) -> Arc<Gpu> {
    let about = ("no GPU".to_string(), arch, units, shared_max);
    made(State { room: 1 << 36, blank: true, ..State::default() }, about).0
}

fn made(state: State, about: (String, u32, u32, u32)) -> (Arc<Gpu>, Control) {
    let state = Arc::new(Mutex::new(state));
    let (name, arch, units, shared_max) = about;
    let (api, lost) = (Box::new(Host(Arc::clone(&state))), OnceLock::new());
    (Arc::new(Gpu { api, lost, name, arch, units, shared_max }), Control(state))
}

const PAGE: usize = 4096;

impl State {
    /// Runs it, or puts it behind what waits.
    fn take(&mut self, queued: Queued) -> Done {
        let is_launch = matches!(queued, Queued::Launch(_));
        if !self.waiting.is_empty() || is_launch && self.holding == Some(0) {
            self.waiting.push_back(queued);
            return Ok(());
        }
        if let (true, Some(left)) = (is_launch, &mut self.holding) {
            *left -= 1;
        }
        match queued {
            Queued::Launch(launch) => return self.run(&launch),
            // SAFETY: the conditions are those of the trait's queued copies.
            Queued::Clear { at, bytes } => unsafe { (at as *mut u8).write_bytes(0, bytes) },
            // SAFETY: as above.
            Queued::Copy { to, from, bytes } => unsafe {
                std::ptr::copy(from as *const u8, to as *mut u8, bytes);
            },
        }
        Ok(())
    }

    /// Catches up with everything queued.
    fn catch_up(&mut self) -> Done {
        self.holding = None;
        let waiting = std::mem::take(&mut self.waiting);
        waiting.into_iter().try_for_each(|q| self.take(q))?;
        self.lost.clone().map_or(Ok(()), Err)
    }

    fn run(&mut self, launch: &Launch) -> Done {
        if let Some(fault) = &self.lost {
            return Err(fault.clone());
        }
        if let Some(coming) = &mut self.coming {
            if coming.after == 0 {
                let fault = coming.fault.clone();
                self.coming = None;
                if fault.is_sticky() {
                    self.lost = Some(fault.clone());
                }
                return Err(fault);
            }
            coming.after -= 1;
        }
        self.launches += 1;
        let entry = &self.entries[launch.function];
        // The run-time parts of one library are shared by everybody who has loaded it.
        static RUNNING: Turns<usize> = Turns::new();
        let turn = RUNNING.of(entry.run as usize);
        let _running = turn.lock().unwrap_or_else(PoisonError::into_inner);
        let (x, y, threads) = launch.form;
        let (words, pointers) = (launch.constants.as_ptr(), launch.pointers.as_ptr());
        // SAFETY: the entry was asked what it takes, and the arrays have as much; addresses are the program's to get right,
        // and a wrong one ends at a guard page.
        let told = unsafe {
            let order = self.launches as u32;
            (entry.run)(entry.thunk, [x, y].as_ptr(), threads, words, pointers, order)
        };
        if told.is_null() {
            return Ok(());
        }
        // SAFETY: static text of the library.
        let told = unsafe { std::ffi::CStr::from_ptr(told) }.to_string_lossy().into_owned();
        let fault = Fault { code: 719, text: format!("{}: {told}", entry.name) };
        self.lost = Some(fault.clone());
        Err(fault)
    }
}

fn fault(code: u32, text: impl Into<String>) -> Fault {
    Fault { code, text: text.into() }
}

impl Api for Host {
    fn enter(&self) -> Done {
        Ok(())
    }

    fn free_bytes(&self) -> Done<(u64, u64)> {
        let s = lock(&self.0);
        Ok((s.room.saturating_sub(s.used), s.room))
    }

    fn alloc(&self, bytes: usize) -> Done<u64> {
        let mut s = lock(&self.0);
        if s.used + bytes as u64 > s.room {
            return Err(fault(OUT_OF_MEMORY, "out of memory"));
        }
        // The end, but for what alignment takes, is where the guard page begins.
        let room = bytes.next_multiple_of(16);
        let mapped = room.next_multiple_of(PAGE) + PAGE;
        // SAFETY: the condition is the trait's.
        let at = unsafe {
            let (prot, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let at = libc::mmap(std::ptr::null_mut(), mapped, prot, flags, -1, 0);
            assert!(at != libc::MAP_FAILED, "the host has no memory");
            libc::mprotect(at.byte_add(mapped - PAGE), PAGE, libc::PROT_NONE);
            at as usize
        };
        let ptr = (at + mapped - PAGE - room) as u64;
        s.memory.insert(ptr, (at, mapped, bytes));
        s.used += bytes as u64;
        Ok(ptr)
    }

    unsafe fn free(&self, at: u64) {
        let mut s = lock(&self.0);
        let (base, mapped, bytes) = s.memory.remove(&at).expect("memory is freed once");
        s.used -= bytes as u64;
        // SAFETY: the condition is the trait's.
        unsafe { libc::munmap(base as *mut libc::c_void, mapped) };
    }

    fn alloc_host(&self, bytes: usize) -> Done<*mut u8> {
        // SAFETY: the condition is the trait's.
        Ok(unsafe { libc::malloc(bytes) }.cast())
    }

    unsafe fn free_host(&self, at: *mut u8) {
        // SAFETY: the condition is the trait's.
        unsafe { libc::free(at.cast()) };
    }

    unsafe fn clear_queued(&self, at: u64, bytes: usize) -> Done {
        let mut s = lock(&self.0);
        if s.blank { Ok(()) } else { s.take(Queued::Clear { at, bytes }) }
    }

    unsafe fn upload_queued(&self, to: u64, from: *const u8, bytes: usize) -> Done {
        let mut s = lock(&self.0);
        if s.blank { Ok(()) } else { s.take(Queued::Copy { to, from: from as u64, bytes }) }
    }

    unsafe fn download_queued(&self, to: *mut u8, from: u64, bytes: usize) -> Done {
        lock(&self.0).take(Queued::Copy { to: to as u64, from, bytes })
    }

    unsafe fn copy_queued(&self, to: u64, from: u64, bytes: usize) -> Done {
        lock(&self.0).take(Queued::Copy { to, from, bytes })
    }

    unsafe fn poke(&self, to: u64, word: u32) -> Done {
        // SAFETY: the condition is the trait's.
        unsafe { (to as *mut u32).write(word) };
        Ok(())
    }

    unsafe fn peek(&self, to: *mut u8, from: u64, bytes: usize) -> Done {
        // SAFETY: the condition is the trait's.
        unsafe { std::ptr::copy(from as *const u8, to, bytes) };
        Ok(())
    }

    fn finish(&self) -> Done {
        lock(&self.0).catch_up()
    }

    fn module(&self, code: &[u8]) -> Done<usize> {
        if lock(&self.0).blank {
            return Ok(0);
        }
        let path = String::from_utf8_lossy(code).into_owned();
        // SAFETY: the condition is the trait's.
        let library = unsafe { Library::new(&path) }.map_err(|e| fault(200, e.to_string()))?;
        let mut s = lock(&self.0);
        s.modules.push(library);
        Ok(s.modules.len() - 1)
    }

    unsafe fn unload(&self, _: usize) {}

    unsafe fn function(&self, module: usize, name: &str) -> Done<usize> {
        let mut s = lock(&self.0);
        if s.blank {
            return Ok(0);
        }
        let missing = |e: libloading::Error| fault(500, format!("named symbol not found: {e}"));
        let library = &s.modules[module];
        let symbol = |prefix: &str| format!("{prefix}{name}\0").into_bytes();
        // SAFETY: the condition is the trait's.
        let (thunk, run, form) = unsafe {
            let thunk = *library.get::<Thunk>(symbol("host_thunk_").as_slice()).map_err(missing)?;
            let run = *library.get::<Run>(b"host_run\0").map_err(missing)?;
            let form = library
                .get::<unsafe extern "C" fn() -> u32>(symbol("host_form_").as_slice())
                .map_err(missing)?;
            (thunk, run, form())
        };
        let takes = ((form >> 8) as usize, (form & 255) as usize);
        s.entries.push(Entry { name: name.to_string(), thunk, run, takes });
        Ok(s.entries.len() - 1)
    }

    /// No kernel that runs here has any; on paper they are zeroes.
    unsafe fn variable(&self, _: usize, name: &str) -> Done<u64> {
        static ZEROES: [u32; 16] = [0; 16];
        if lock(&self.0).blank {
            return Ok(ZEROES.as_ptr() as u64);
        }
        Err(fault(500, format!("named symbol not found: {name}")))
    }

    unsafe fn allow_shared(&self, _: usize, _: u32) -> Done {
        Ok(())
    }

    unsafe fn launch(
        &self,
        function: usize,
        form: Form,
        constants: &[u32],
        pointers: &[u64],
    ) -> Done {
        let mut s = lock(&self.0);
        if s.blank {
            return Ok(());
        }
        let entry = &s.entries[function];
        let given = (4 * constants.len(), pointers.len());
        assert_eq!(given, entry.takes, "constants' bytes and pointers of {}", entry.name);
        let plain = !form.together && form.cluster <= 1 && form.shared == 0;
        assert!(plain, "{} is no plain kernel", entry.name);
        let launch = Launch {
            function,
            form: (form.grid.0, form.grid.1, form.threads),
            constants: constants.to_vec(),
            pointers: pointers.to_vec(),
        };
        match &mut s.capturing {
            Some(list) => list.push(launch),
            None => s.take(Queued::Launch(launch))?,
        }
        Ok(())
    }

    /// No kernel copies boxes here.
    fn boxes(&self, _: &Boxes) -> Done<BoxMap> {
        Ok([0; 128])
    }

    /// Nothing here runs side by side; on paper there are as many as on an H200.
    unsafe fn clusters(&self, _: usize, _: Form) -> Done<u32> {
        Ok(if lock(&self.0).blank { 15 } else { 0 })
    }

    fn begin_graph(&self) -> Done {
        lock(&self.0).capturing = Some(Vec::new());
        Ok(())
    }

    fn end_graph(&self) -> Done<usize> {
        let mut s = lock(&self.0);
        let list = s.capturing.take().unwrap_or_default();
        s.graphs.push(list);
        Ok(s.graphs.len() - 1)
    }

    unsafe fn launch_graph(&self, graph: usize) -> Done {
        let mut s = lock(&self.0);
        for launch in s.graphs[graph].clone() {
            s.take(Queued::Launch(launch))?;
        }
        Ok(())
    }

    unsafe fn free_graph(&self, _: usize) {}

    fn event(&self) -> Done<usize> {
        Ok(1)
    }

    unsafe fn record(&self, _: usize) -> Done {
        Ok(())
    }

    /// Events are those of everything queued.
    unsafe fn passed(&self, _: usize) -> Done<bool> {
        let s = lock(&self.0);
        s.lost.clone().map_or(Ok(s.waiting.is_empty()), Err)
    }

    unsafe fn wait(&self, _: usize) -> Done {
        lock(&self.0).catch_up()
    }

    unsafe fn free_event(&self, _: usize) {}
}
