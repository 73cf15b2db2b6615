//! Device memory: buffers in address windows with wide gaps round them, and what is known of each byte. A buffer that one
//! dispatch binds twice is seen through two windows, so that an address says which argument it was made from. It knows no kernel.

use std::fmt;
use std::io;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Error;

/// Unmapped addresses before and after a buffer: an index that is wrong by less meets nothing else. A 32-bit index of words
/// reaches 16 GiB.
const BEFORE: usize = 4 << 30;
const AFTER: usize = 16 << 30;
const PAGE: usize = 16 << 10;

/// Counts resets of the clock that stamps accesses; stamps of an earlier count mean nothing.
pub(crate) static GENERATION: AtomicU64 = AtomicU64::new(1);

/// An owner of read-only bytes, such as a mapped file.
pub type Owner = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A buffer of device memory, shared with the host. Cloning gives another handle.
#[derive(Clone)]
pub struct Buffer(Arc<Inner>);

struct Inner {
    label: String,
    len: AtomicUsize,
    backing: Backing,
    state: Mutex<State>,
}

enum Backing {
    File(libc::c_int),
    Mapped(Owner),
}

#[derive(Default)]
struct State {
    windows: Vec<Window>,
    /// A bit for each byte that was ever written; empty when all count as written.
    written: Vec<u64>,
    cells: Option<Cells>,
}

/// An address range with the buffer in its middle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) start: usize,
    pub(crate) len: usize,
    /// Where the buffer's first byte is.
    pub(crate) data: usize,
}

struct Cells {
    at: usize,
    len: usize,
    generation: u64,
}

fn os(doing: &str) -> Error {
    Error::host(format!("{doing}: {}", io::Error::last_os_error()))
}

fn reserve(len: usize) -> Result<usize, Error> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE;
    // SAFETY: a fresh mapping at an address of the system's choice touches nothing that exists.
    let at = unsafe { libc::mmap(null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(os("reserving address space for a buffer"));
    }
    Ok(at as usize)
}

fn release(at: usize, len: usize) {
    // SAFETY: the range is a mapping of this module's own, and its owner is going away. A failure leaves it mapped.
    unsafe { libc::munmap(at as *mut libc::c_void, len) };
}

/// A file that has no name.
fn anonymous_file(len: usize) -> Result<libc::c_int, Error> {
    #[cfg(target_os = "linux")]
    // SAFETY: the name is a terminated string.
    let fd = unsafe { libc::memfd_create(c"fornax-msl".as_ptr(), libc::MFD_CLOEXEC) };
    #[cfg(not(target_os = "linux"))]
    let fd = {
        let mut name = *b"/tmp/fornax-msl-XXXXXX\0";
        // SAFETY: a terminated template that the call may write to, and that is removed at once.
        unsafe {
            let fd = libc::mkstemp(name.as_mut_ptr().cast());
            libc::unlink(name.as_ptr().cast());
            fd
        }
    };
    if fd < 0 {
        return Err(os("making a file for a buffer"));
    }
    // SAFETY: the descriptor is open and this module's own.
    if unsafe { libc::ftruncate(fd, len.next_multiple_of(PAGE) as libc::off_t) } != 0 {
        let error = os("sizing a buffer");
        // SAFETY: as above; nobody else has it.
        unsafe { libc::close(fd) };
        return Err(error);
    }
    Ok(fd)
}

impl Inner {
    fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change of the state is complete before the next can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_window(&self) -> Result<Window, Error> {
        let span = self.len().next_multiple_of(PAGE) + 2 * PAGE;
        let len = span + BEFORE + AFTER;
        let start = reserve(len)?;
        let middle = start + BEFORE;
        match &self.backing {
            Backing::File(fd) => {
                let (rights, flags) =
                    (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
                let span = self.len().next_multiple_of(PAGE).max(PAGE);
                let to = middle as *mut libc::c_void;
                // SAFETY: the target lies in the range reserved above, which nothing uses yet.
                let at = unsafe { libc::mmap(to, span, rights, flags, *fd, 0) };
                if at == libc::MAP_FAILED {
                    let error = os("mapping a buffer");
                    release(start, len);
                    return Err(error);
                }
                Ok(Window { start, len, data: middle })
            }
            Backing::Mapped(owner) => {
                let from = (**owner).as_ref().as_ptr() as usize;
                let head = from % page();
                if duplicate(from - head, self.len() + head, middle) {
                    return Ok(Window { start, len, data: middle + head });
                }
                let error = os("mapping wrapped bytes a second time");
                release(start, len);
                Err(error)
            }
        }
    }
}

fn page() -> usize {
    // SAFETY: no preconditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(PAGE)
}

/// Maps the pages of a shared mapping a second time, at `to`.
#[cfg(target_os = "linux")]
fn duplicate(from: usize, len: usize, to: usize) -> bool {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let (from, to) = (from as *mut libc::c_void, to as *mut libc::c_void);
    // SAFETY: an old size of zero leaves the old mapping as it is, and the target lies in a range that the caller reserved.
    unsafe { libc::mremap(from, 0, len.next_multiple_of(page()), flags, to) != libc::MAP_FAILED }
}

#[cfg(not(target_os = "linux"))]
fn duplicate(_: usize, _: usize, _: usize) -> bool {
    false
}

impl Drop for Inner {
    fn drop(&mut self) {
        let state = std::mem::take(&mut *self.lock());
        for w in &state.windows {
            release(w.start, w.len);
        }
        if let Some(c) = state.cells {
            release(c.at, c.len);
        }
        if let Backing::File(fd) = self.backing {
            // SAFETY: the descriptor is this buffer's own, and no window needs it any more.
            unsafe { libc::close(fd) };
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer('{}', {} bytes)", self.0.label, self.0.len())
    }
}

impl Buffer {
    /// A buffer of `len` bytes. Its bytes are zero, but count as never written: a kernel that reads one is at fault.
    ///
    /// # Errors
    /// `is_host` when the system refuses the memory.
    pub fn new(label: &str, len: usize) -> Result<Buffer, Error> {
        let backing = Backing::File(anonymous_file(len)?);
        let written = vec![0; len.div_ceil(64) + 1];
        Buffer::with(label, len, backing, written)
    }

    /// A read-only buffer over bytes that exist, such as a mapped file; these are not copied if they are a shared mapping.
    ///
    /// # Errors
    /// `is_host` when the system refuses the memory.
    pub fn wrap(label: &str, owner: &Owner) -> Result<Buffer, Error> {
        let len = (**owner).as_ref().len();
        let mapped = Buffer::with(label, len, Backing::Mapped(Owner::clone(owner)), Vec::new());
        if len != 0 && mapped.is_ok() {
            return mapped;
        }
        let copy = Buffer::with(label, len, Backing::File(anonymous_file(len)?), Vec::new())?;
        copy.copy_in(0, (**owner).as_ref());
        Ok(copy)
    }

    fn with(label: &str, len: usize, backing: Backing, written: Vec<u64>) -> Result<Buffer, Error> {
        let state = Mutex::new(State { written, ..State::default() });
        let len = AtomicUsize::new(len);
        let inner = Inner { label: label.to_owned(), len, backing, state };
        let first = inner.open_window()?;
        inner.lock().windows.push(first);
        Ok(Buffer(Arc::new(inner)))
    }

    /// Makes room for more bytes behind those that are there, which stay where they are; the new ones count as never
    /// written. No kernel may run meanwhile.
    ///
    /// # Errors
    /// `is_arguments` for wrapped bytes or fewer than there are, `is_host` when the system refuses the memory.
    pub fn grow(&self, len: usize) -> Result<(), Error> {
        let old = self.0.len();
        let (Backing::File(fd), true) = (&self.0.backing, len >= old) else {
            let label = &self.0.label;
            let what = format!("buffer '{label}' of {old} bytes cannot become {len} long");
            return Err(Error::arguments(what));
        };
        let span = len.next_multiple_of(PAGE).max(PAGE);
        // SAFETY: the descriptor is open and this buffer's own.
        if span > AFTER || unsafe { libc::ftruncate(*fd, span as libc::off_t) } != 0 {
            return Err(os("growing a buffer"));
        }
        let mut state = self.0.lock();
        for w in &state.windows {
            let (rights, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
            let to = w.data as *mut libc::c_void;
            // SAFETY: the window has reserved that much behind its first byte; the same pages of the same file come back.
            let at = unsafe { libc::mmap(to, span, rights, flags, *fd, 0) };
            if at == libc::MAP_FAILED {
                return Err(os("mapping a buffer"));
            }
        }
        state.written.resize(len.div_ceil(64) + 1, 0);
        if let Some(c) = state.cells.take() {
            release(c.at, c.len);
        }
        self.0.len.store(len, Ordering::Relaxed);
        Ok(())
    }

    /// The label that reports name the buffer by.
    pub fn label(&self) -> &str {
        &self.0.label
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    /// Where the host sees the first byte, for as long as the buffer exists. What it writes there it declares with
    /// [`Buffer::mark_written`]; it neither writes nor reads while kernels run.
    pub fn contents(&self) -> *mut u8 {
        self.0.lock().windows[0].data as *mut u8
    }

    fn range(&self, offset: usize, len: usize) -> Result<(), Error> {
        if offset.checked_add(len).is_some_and(|end| end <= self.0.len()) {
            return Ok(());
        }
        Err(Error::arguments(format!(
            "buffer '{}' has {} bytes; the host asked for {len} at {offset}",
            self.0.label,
            self.0.len()
        )))
    }

    fn copy_in(&self, offset: usize, bytes: &[u8]) {
        // SAFETY: the callers have checked the range; the window maps it for writing, and kernels do not run now.
        unsafe {
            self.contents().add(offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// # Errors
    /// `is_arguments` when they do not fit or the buffer is read-only.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        self.range(offset, bytes.len())?;
        if self.is_read_only() {
            return Err(Error::arguments(format!("buffer '{}' is read-only", self.0.label)));
        }
        self.copy_in(offset, bytes);
        self.mark_written(offset, bytes.len());
        Ok(())
    }

    /// Copies bytes out, from `offset` on, whether or not anything has written them.
    ///
    /// # Errors
    /// `is_arguments` when the buffer has not so many.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        self.range(offset, bytes.len())?;
        // SAFETY: the range is checked; the window maps it for reading, and kernels do not run now.
        unsafe {
            self.contents().add(offset).copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len());
        }
        Ok(())
    }

    /// The first byte in a range that nothing has written, or nothing.
    pub fn first_unwritten(&self, offset: usize, len: usize) -> Option<usize> {
        let state = self.0.lock();
        if state.written.is_empty() {
            return None;
        }
        (offset..(offset + len).min(self.0.len()))
            .find(|&b| state.written[b / 64] >> (b % 64) & 1 == 0)
    }

    /// Declares bytes written.
    pub fn mark_written(&self, offset: usize, len: usize) {
        self.mark(offset, len, true);
    }

    /// Declares bytes never written, as those of memory that gets a new use.
    pub fn forget(&self, offset: usize, len: usize) {
        self.mark(offset, len, false);
    }

    fn mark(&self, offset: usize, len: usize, written: bool) {
        let mut state = self.0.lock();
        if state.written.is_empty() {
            return;
        }
        let end = offset.saturating_add(len).min(self.0.len());
        let mut at = offset;
        while at < end {
            let n = (64 - at % 64).min(end - at);
            let mask = (u64::MAX >> (64 - n)) << (at % 64);
            let word = &mut state.written[at / 64];
            *word = if written { *word | mask } else { *word & !mask };
            at += n;
        }
    }

    /// True for wrapped bytes.
    pub fn is_read_only(&self) -> bool {
        self.0.lock().written.is_empty()
    }

    /// Identifies the buffer among those that exist.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    /// The window for the `n`th binding of the buffer in one dispatch.
    pub(crate) fn window(&self, n: usize) -> Result<Window, Error> {
        loop {
            let mut state = self.0.lock();
            if let Some(w) = state.windows.get(n) {
                return Ok(*w);
            }
            let fresh = self.0.open_window()?;
            state.windows.push(fresh);
        }
    }

    /// The bits that say which bytes were written, or null when all count as written.
    pub(crate) fn written_bits(&self) -> *mut u64 {
        let mut state = self.0.lock();
        if state.written.is_empty() { null_mut() } else { state.written.as_mut_ptr() }
    }

    /// The records of who accessed which byte, sixteen bytes for each, cleared if they are of an earlier generation.
    pub(crate) fn cells(&self) -> Result<*mut u32, Error> {
        let now = GENERATION.load(Ordering::Relaxed);
        let mut state = self.0.lock();
        if let Some(c) = &mut state.cells {
            if c.generation != now {
                map_zeroes(c.at, c.len)?;
                c.generation = now;
            }
            return Ok(c.at as *mut u32);
        }
        let len = (self.0.len().max(1) * 16).next_multiple_of(PAGE);
        let at = reserve(len)?;
        map_zeroes(at, len)?;
        state.cells = Some(Cells { at, len, generation: now });
        Ok(at as *mut u32)
    }
}

fn map_zeroes(at: usize, len: usize) -> Result<(), Error> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the range is one that this module has reserved, and no kernel runs.
    let got = unsafe { libc::mmap(at as *mut libc::c_void, len, rights, flags, -1, 0) };
    if got == libc::MAP_FAILED {
        Err(os("clearing the access records of a buffer"))
    } else {
        Ok(())
    }
}
