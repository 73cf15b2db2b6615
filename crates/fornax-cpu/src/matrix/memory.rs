//! Zeroed memory for weights and activations, aligned to what vector loads and pages like. It
//! must not know what is stored in it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use fornax_plan::{Error, Result};

/// Bytes of a cache line, and of the widest vector.
const LINE: usize = 64;
/// Bytes of a large page; allocations of several of them start on one and ask for them.
const LARGE_PAGE: usize = 2 << 20;

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
        let align = if len >= 2 * LARGE_PAGE { LARGE_PAGE } else { LINE };
        let layout = Layout::from_size_align(len.max(LINE), align).map_err(|_| {
            Error::malformed(format!("{what}: {len} bytes is more than the address space holds"))
        })?;
        // SAFETY: the layout's size is not zero.
        let at = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(|| {
            Error::out_of_memory(format!(
                "{what}: {len} bytes could not be had; a smaller model or quantisation needs less"
            ))
        })?;
        #[cfg(target_os = "linux")]
        if align == LARGE_PAGE {
            // SAFETY: the range is exactly the allocation; the advice changes no contents, and
            // whether it is taken does not matter.
            unsafe { libc::madvise(at.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        }
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

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this very layout.
        unsafe { dealloc(self.at.as_ptr(), self.layout) }
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}
