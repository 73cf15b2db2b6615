//! What every bad file has to meet: a typed error, soon, without a large allocation, and the same from memory
//! as from a file. It must not know what is wrong with a file.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use fornax_gguf::{Error, Gguf};

/// Most bytes that a bad file may make a reader allocate.
pub(crate) const ALLOCATION_MAX: usize = 64 << 20;
const TIME_MAX: Duration = Duration::from_secs(1);

thread_local! {
    /// Bytes allocated by this thread: now, and at most since the last reset.
    static NOW: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn count(change: isize) {
    NOW.set(NOW.get() + change);
    PEAK.set(PEAK.get().max(NOW.get()));
}

// SAFETY: every call is passed on to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Most bytes that were allocated at once in this thread while `f` ran, beyond those before.
pub(crate) fn peak_of<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = NOW.get();
    PEAK.set(before);
    let result = f();
    (result, (PEAK.get() - before) as usize)
}

/// A folder that goes when the value does.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Folder {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("fornax-gguf-{}-{n}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Opens `bytes` from memory and, where `file` says so, from a file.
fn open_both(bytes: &[u8]) -> (Result<Gguf, Error>, Result<Gguf, Error>) {
    let folder = Folder::new();
    let path = folder.write("model.gguf", bytes);
    let start = Instant::now();
    let (results, peak) = peak_of(|| (Gguf::from_bytes(bytes.to_vec()), Gguf::open(&path)));
    let took = start.elapsed();
    assert!(took < TIME_MAX, "took {took:?}");
    let allowed = ALLOCATION_MAX + 3 * bytes.len();
    assert!(peak < allowed, "{peak} bytes allocated for a file of {}", bytes.len());
    results
}

/// Asserts that `bytes` are refused by the oracle's terms, and gives the error of the file.
#[track_caller]
pub(crate) fn refused(bytes: &[u8]) -> Error {
    let (memory, file) = open_both(bytes);
    let memory = memory.expect_err("refused from memory");
    let file = file.expect_err("refused from a file");
    let path = file.path().expect("the file is named").display().to_string();
    assert_eq!(file.to_string(), format!("{path}: {memory}"), "both ways say the same");
    assert!(memory.is_malformed() || memory.is_unsupported() || memory.is_missing(), "{memory:?}");
    file
}

/// As [`refused`], and the message names `what`.
#[track_caller]
pub(crate) fn refused_naming(bytes: &[u8], what: &str) -> Error {
    let error = refused(bytes);
    assert!(error.to_string().contains(what), "{error} does not name {what}");
    error
}

/// Asserts that `bytes` are accepted both ways, and gives what came from the file.
#[track_caller]
pub(crate) fn accepted(bytes: &[u8]) -> Gguf {
    let (memory, file) = open_both(bytes);
    let (memory, file) = (memory.unwrap(), file.unwrap());
    assert_eq!(memory.metadata(), file.metadata());
    assert_eq!(memory.tensors(), file.tensors());
    file
}
