//! The bytes of one file, mapped or owned, at a page-aligned address. It must not know what they mean.

use std::alloc::{self, Layout};
use std::fmt;
use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;

use memmap2::Mmap;

use crate::Error;

/// Read-only bytes at a page-aligned address: a memory-mapped file, or a copy in owned memory.
///
/// A device may wrap whole pages of it without a copy. The file must not be cut or rewritten while it is
/// mapped: reading a page that has gone raises a signal that no engine can turn into an error.
pub struct Mapping(Kind);

enum Kind {
    File(Mmap),
    Owned(Pages),
}

/// Zeroed memory in whole pages, the first `len` bytes of it in use.
struct Pages {
    start: NonNull<u8>,
    len: usize,
    layout: Layout,
}

// SAFETY: `Pages` owns its memory alone and hands out shared slices of it only.
unsafe impl Send for Pages {}
// SAFETY: as above; nothing is written after construction.
unsafe impl Sync for Pages {}

impl Mapping {
    /// Alignment of owned memory in bytes: the largest page of the supported hosts (Apple silicon).
    pub const OWNED_ALIGN: usize = 16 * 1024;

    /// Maps the file at `path`.
    ///
    /// # Errors
    /// `is_io` where it cannot be opened or mapped.
    pub fn open(path: &Path) -> Result<Mapping, Error> {
        // A pipe would hold up the opening until somebody writes to it.
        let opening = |e| Error::io("opening", e).in_file(path);
        regular(&std::fs::metadata(path).map_err(opening)?).map_err(|e| e.in_file(path))?;
        let file = File::open(path).map_err(opening)?;
        Mapping::from_file(&file).map_err(|e| e.in_file(path))
    }

    /// Maps an open file, whole. The file may be closed afterwards.
    ///
    /// # Errors
    /// `is_io` where it cannot be mapped: a folder or a pipe, say.
    pub fn from_file(file: &File) -> Result<Mapping, Error> {
        let meta = file.metadata().map_err(|e| Error::io("asking for the length", e))?;
        regular(&meta)?;
        if meta.len() == 0 {
            // A mapping of no bytes is refused by the operating system.
            return Ok(Mapping::from_vec(Vec::new()));
        }
        // SAFETY: the mapping is read-only; that nobody cuts or rewrites the file meanwhile is the
        // documented condition of this type, as it is for every engine that maps weights.
        let map = unsafe { Mmap::map(file) };
        map.map(|m| Mapping(Kind::File(m))).map_err(|e| Error::io("mapping into memory", e))
    }

    /// Copies `bytes` to owned memory, aligned to [`Mapping::OWNED_ALIGN`].
    #[expect(clippy::needless_pass_by_value, reason = "the copy replaces the vector")]
    pub fn from_vec(bytes: Vec<u8>) -> Mapping {
        let size = bytes.len().max(1).next_multiple_of(Self::OWNED_ALIGN);
        let layout = Layout::from_size_align(size, Self::OWNED_ALIGN)
            .expect("invariant: a vector is shorter than the address space");
        // SAFETY: the layout has a size of at least one page.
        let start = NonNull::new(unsafe { alloc::alloc_zeroed(layout) });
        let start = start.unwrap_or_else(|| alloc::handle_alloc_error(layout));
        // SAFETY: `start` is valid for `size >= bytes.len()` bytes and newly allocated.
        unsafe { start.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Mapping(Kind::Owned(Pages { start, len: bytes.len(), layout }))
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.0 {
            Kind::File(map) => map,
            // SAFETY: the first `len` bytes are initialised and live as long as `self`.
            Kind::Owned(pages) => unsafe {
                std::slice::from_raw_parts(pages.start.as_ptr(), pages.len)
            },
        }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.bytes().len()
    }

    /// True for an empty file.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True if the bytes are a mapped file, so that the system can drop and fetch its pages.
    pub fn is_file(&self) -> bool {
        matches!(self.0, Kind::File(_))
    }

    /// Lets the system drop the pages that lie wholly inside `range`, for bytes that were copied elsewhere.
    ///
    /// The bytes stay readable; a later read fetches them from the file again. Does nothing for owned memory.
    pub fn release(&self, range: Range<usize>) {
        let range = self.whole_pages(range);
        if range.is_empty() {
            return;
        }
        #[cfg(unix)]
        if let Kind::File(map) = &self.0 {
            // SAFETY: the mapping is shared and read-only, so that a dropped page is read back from the
            // file with the same content. A refusal costs memory and nothing else.
            let _ = unsafe {
                map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    range.start,
                    range.len(),
                )
            };
        }
    }

    /// Asks the system to read `range` ahead. Does nothing for owned memory.
    pub fn will_need(&self, range: Range<usize>) {
        let range = range.start..range.end.min(self.len());
        if range.is_empty() {
            return;
        }
        #[cfg(unix)]
        if let Kind::File(map) = &self.0 {
            // A refusal costs time and nothing else.
            let _ = map.advise_range(memmap2::Advice::WillNeed, range.start, range.len());
        }
    }

    /// The largest run of whole 16 KiB pages inside `range`. Where pages are larger, their neighbours may be
    /// dropped too, which costs a second read and no more.
    fn whole_pages(&self, range: Range<usize>) -> Range<usize> {
        const STEP: usize = 16 * 1024;
        let len = self.len();
        let start = range.start.min(len).next_multiple_of(STEP);
        // The last page of a file may end past the last byte and is still one page.
        let end = if range.end >= len { len } else { range.end / STEP * STEP };
        start..end.max(start)
    }
}

/// Refuses what cannot be mapped: folders, pipes, devices.
fn regular(meta: &Metadata) -> Result<(), Error> {
    if meta.is_file() {
        return Ok(());
    }
    let kind = if meta.is_dir() { "it is a folder" } else { "it is not a regular file" };
    let source = io::Error::new(io::ErrorKind::InvalidInput, kind);
    Err(Error::io("mapping into memory", source))
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated in `from_vec` with this layout, freed once.
        unsafe { alloc::dealloc(self.start.as_ptr(), self.layout) };
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_file() { "file" } else { "owned" };
        write!(f, "Mapping({kind}, {} bytes at {:p})", self.len(), self.bytes().as_ptr())
    }
}
