//! Zeroed memory for weights and activations, aligned to what vector loads and pages like. It
//! must not know what is stored in it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use fornax_plan::{Error, Result};

/// Bytes of a cache line, and of the widest vector.
const LINE: usize = 64;
/// Bytes of a large page.
const LARGE_PAGE: usize = 2 << 20;
/// From so many bytes on, memory comes from the system and not from the allocator, which would
/// write zeros over what it had given out before: untouched memory shall take none.
const MAPPED: usize = 128 << 10;

/// A fixed number of zeroed bytes.
pub(crate) struct Memory {
    at: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is owned, and nothing in it is tied to a thread.
unsafe impl Send for Memory {}
// SAFETY: shared access is reading, or writing through raw pointers whose users answer for it.
unsafe impl Sync for Memory {}

impl Memory {
    /// `len` zeroed bytes, at least aligned to a cache line.
    ///
    /// # Errors
    /// `is_out_of_memory`, naming `what` they were for.
    pub(crate) fn zeroed(len: usize, what: &str) -> Result<Memory> {
        Memory::new(len, what, false)
    }

    /// The same on large pages where that is possible: for what is read from end to end.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn large(len: usize, what: &str) -> Result<Memory> {
        Memory::new(len, what, len >= 2 * LARGE_PAGE)
    }

    fn new(len: usize, what: &str, large: bool) -> Result<Memory> {
        let layout = Layout::from_size_align(len.max(LINE), LINE).map_err(|_| {
            Error::malformed(format!("{what}: {len} bytes is more than the address space holds"))
        })?;
        let at = match layout.size() >= MAPPED {
            true => zeroed_pages(layout, large),
            false => zeroed_bytes(layout),
        };
        let at = at.ok_or_else(|| {
            Error::out_of_memory(format!(
                "{what}: {len} bytes could not be had; a smaller model or quantisation needs less"
            ))
        })?;
        Ok(Memory { at, layout })
    }

    /// The first byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// How many bytes there are.
    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }
}

/// Lets go of what was allocated and freed so far: the allocator keeps such memory, page by page
/// between what is still in use, and a model's load leaves much of it.
pub(crate) fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: touches nothing that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Floats from the start of a cache line on: a vector that lies across two lines costs twice.
#[derive(Debug, Default)]
pub(crate) struct Floats(Vec<Lined>);

/// One line of them.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Lined(#[expect(dead_code, reason = "read as a slice of floats")] [f32; LINE / 4]);

impl Floats {
    /// At least `len` zeros.
    pub(crate) fn zeroed(len: usize) -> Floats {
        Floats(vec![Lined([0.0; LINE / 4]); len.div_ceil(LINE / 4)])
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: the lines are whole arrays of floats with nothing between.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * (LINE / 4)) }
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        let len = self.0.len() * (LINE / 4);
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }
}

/// A piece of memory that several share.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    whole: Arc<Memory>,
    from: usize,
    len: usize,
}

impl Share {
    /// The first byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.whole.as_ptr().wrapping_add(self.from)
    }

    /// How many bytes there are.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// Memory that is given out piece by piece, on cache lines, in the order of asking: what is read
/// one after the other lies one after the other, on as few pages as can be.
#[derive(Debug)]
pub(crate) struct Arena {
    whole: Arc<Memory>,
    used: usize,
}

impl Arena {
    /// Room for pieces of `len` bytes together, each counted as whole cache lines.
    ///
    /// # Errors
    /// `is_out_of_memory`, naming `what` they were for.
    pub(crate) fn new(len: usize, what: &str) -> Result<Arena> {
        Ok(Arena { whole: Arc::new(Memory::large(len, what)?), used: 0 })
    }

    /// All that was given out.
    pub(crate) fn taken(&self) -> Share {
        Share { whole: Arc::clone(&self.whole), from: 0, len: self.used }
    }

    /// The next `len` bytes.
    ///
    /// # Panics
    /// Where there is no room for them.
    pub(crate) fn take(&mut self, len: usize) -> Share {
        let from = self.used;
        self.used += len.next_multiple_of(LINE);
        assert!(self.used <= self.whole.len(), "the arena was made too small");
        Share { whole: Arc::clone(&self.whole), from, len }
    }
}

fn zeroed_bytes(layout: Layout) -> Option<NonNull<u8>> {
    // SAFETY: the layout's size is not zero.
    NonNull::new(unsafe { alloc_zeroed(layout) })
}

/// Fresh pages of the system, which are zero without being touched; where `large`, from a large
/// page on and with such pages asked for before the first touch.
#[cfg(target_os = "linux")]
fn zeroed_pages(layout: Layout, large: bool) -> Option<NonNull<u8>> {
    use libc::{MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE};
    let len = layout.size();
    let room = len.checked_add(if large { LARGE_PAGE } else { 0 })?;
    // SAFETY: an anonymous mapping at an address of the system's choice touches nothing that
    // exists; what is cut off its two ends is its own, page by page, and unused.
    unsafe {
        let (prot, flags) = (PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
        let all = libc::mmap(std::ptr::null_mut(), room, prot, flags, -1, 0);
        if all == MAP_FAILED {
            return None;
        }
        if !large {
            return NonNull::new(all.cast());
        }
        let page = libc::sysconf(libc::_SC_PAGESIZE).max(1) as usize;
        let before = all.cast::<u8>().align_offset(LARGE_PAGE);
        let at = all.cast::<u8>().add(before);
        let end = before + len.next_multiple_of(page);
        if before > 0 {
            libc::munmap(all, before);
        }
        if end < room {
            libc::munmap(all.cast::<u8>().add(end).cast(), room - end);
        }
        // Whether the advice is taken does not matter.
        libc::madvise(at.cast(), len, libc::MADV_HUGEPAGE);
        NonNull::new(at)
    }
}

#[cfg(not(target_os = "linux"))]
fn zeroed_pages(layout: Layout, _large: bool) -> Option<NonNull<u8>> {
    zeroed_bytes(layout)
}

impl Drop for Memory {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        if self.layout.size() >= MAPPED {
            // SAFETY: mapped in `zeroed_pages` with this very length; the end of its last page goes
            // with it.
            unsafe { libc::munmap(self.at.as_ptr().cast(), self.layout.size()) };
            return;
        }
        // SAFETY: allocated in `zeroed` with this very layout.
        unsafe { dealloc(self.at.as_ptr(), self.layout) }
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}
