//! Memory that the host and the GPU share: new buffers, and pages of a file's map without a copy. It knows no
//! command.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use block2::RcBlock;
use fornax_gguf::Mapping;
use fornax_plan::{Error, Result};
use objc2::rc::autoreleasepool;
use objc2_foundation::NSString;
use objc2_metal::{MTLBuffer, MTLDevice, MTLResource, MTLResourceOptions};

use super::{Gpu, Object};
use crate::api::memory::{NOTHING_BYTES, PAGE, window};

/// A buffer of the GPU's.
#[derive(Clone, Debug)]
pub(crate) struct Buffer(Arc<Held>);

struct Held {
    object: Object<dyn MTLBuffer>,
    len: usize,
    held: Arc<AtomicU64>,
}

// SAFETY: Metal's objects may be sent and shared between threads; the binding leaves buffers out because of what is in
// them. That is read and written through the device's lock alone, while no command that uses it is under way.
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.held.fetch_sub(self.len as u64, Relaxed);
    }
}

impl Buffer {
    pub(super) fn object(&self) -> &Object<dyn MTLBuffer> {
        &self.0.object
    }

    /// Copies words in, from byte `at` on.
    pub(in crate::api) fn write(&self, at: usize, words: &[u32]) {
        let bytes = size_of_val(words);
        assert!(at + bytes <= self.0.len, "invariant: the host knows its buffers");
        let to: *mut u8 = self.0.object.contents().as_ptr().cast();
        // SAFETY: the range is inside the buffer, which is shared memory, and the device is not using it.
        unsafe { to.add(at).copy_from_nonoverlapping(words.as_ptr().cast(), bytes) };
    }

    /// Copies words out, from byte `at` on.
    pub(in crate::api) fn read(&self, at: usize, words: &mut [u32]) {
        let bytes = size_of_val(words);
        assert!(at + bytes <= self.0.len, "invariant: the host knows its buffers");
        let from: *const u8 = self.0.object.contents().as_ptr().cast();
        // SAFETY: as above; any bytes are words.
        unsafe { from.add(at).copy_to_nonoverlapping(words.as_mut_ptr().cast(), bytes) };
    }
}

impl Gpu {
    /// Shared memory, zeroed; its hazards between command buffers are the system's business.
    pub(in crate::api) fn buffer(&self, label: &str, bytes: usize) -> Result<Buffer> {
        // None may be empty, or shorter than an element that a kernel points to.
        let bytes = bytes.max(NOTHING_BYTES);
        self.room(label, bytes)?;
        let options = MTLResourceOptions::StorageModeShared;
        let object = autoreleasepool(|_| {
            let object = self.device.newBufferWithLength_options(bytes, options)?;
            object.setLabel(Some(&NSString::from_str(label)));
            Some(object)
        });
        self.taken(object.ok_or_else(|| refused(label, bytes))?, bytes)
    }

    /// A buffer over whole pages of the map with `len` bytes from `offset` in it, and where they begin. One of
    /// `known`, each with its map and first byte, where it holds them.
    pub(in crate::api) fn wrap(
        &self,
        known: &mut Vec<(Arc<Mapping>, usize, Buffer)>,
        map: &Arc<Mapping>,
        offset: usize,
        len: usize,
    ) -> Result<(Buffer, usize)> {
        let holds = |(m, start, b): &&(Arc<Mapping>, usize, Buffer)| {
            Arc::ptr_eq(m, map) && *start <= offset && offset + len <= start + b.0.len
        };
        if let Some((_, start, buffer)) = known.iter().find(holds) {
            return Ok((buffer.clone(), offset - start));
        }
        let pages = window(map.len(), self.device.maxBufferLength(), offset..offset + len);
        if let Some(pages) = pages {
            // Copies would fit no better, and would be found too many one by one.
            self.room("weights", pages.len())?;
            if let Some(object) = self.over(map, pages.clone()) {
                let buffer = self.taken(object, pages.len())?;
                known.push((Arc::clone(map), pages.start, buffer.clone()));
                return Ok((buffer, offset - pages.start));
            }
        }
        // Some virtual machines wrap nothing, and a map may lie where nothing can be wrapped.
        let copy = self.copied(&map.bytes()[offset..offset + len])?;
        Ok((copy, 0))
    }

    /// The map's pages themselves; the map lives as long as Metal looks at them.
    fn over(
        &self,
        map: &Arc<Mapping>,
        pages: std::ops::Range<usize>,
    ) -> Option<Object<dyn MTLBuffer>> {
        let base = NonNull::new(map.bytes().as_ptr().cast_mut())?.cast::<u8>();
        if !base.addr().get().is_multiple_of(PAGE) {
            return None;
        }
        // SAFETY: the window begins inside the map.
        let start: NonNull<c_void> = unsafe { base.add(pages.start) }.cast();
        let owner = Arc::clone(map);
        // Runs once, on any thread, after the last use; until then it owns the map.
        let release = RcBlock::new(move |_: NonNull<c_void>, _: usize| {
            let _ = &owner;
        });
        let options =
            MTLResourceOptions::StorageModeShared | MTLResourceOptions::HazardTrackingModeUntracked;
        let object = autoreleasepool(|_| {
            // SAFETY: the pages are mapped to the end of the last, and stay so while the block lives; kernels only read
            // them, so that nothing has to be tracked. The block holds what may be sent and shared.
            unsafe {
                self.device.newBufferWithBytesNoCopy_length_options_deallocator(
                    start,
                    pages.len(),
                    options,
                    Some(&release),
                )
            }
        });
        // Seen in virtual machines: a buffer of no length.
        object.filter(|o| o.length() == pages.len())
    }

    fn copied(&self, bytes: &[u8]) -> Result<Buffer> {
        self.room("weights", bytes.len())?;
        let start: NonNull<c_void> = NonNull::from(bytes).cast();
        let options = MTLResourceOptions::StorageModeShared;
        // SAFETY: the bytes are copied before the call returns.
        let object = autoreleasepool(|_| unsafe {
            self.device.newBufferWithBytes_length_options(start, bytes.len(), options)
        });
        self.taken(object.ok_or_else(|| refused("weights", bytes.len()))?, bytes.len())
    }

    fn taken(&self, object: Object<dyn MTLBuffer>, len: usize) -> Result<Buffer> {
        self.held.fetch_add(len as u64, Relaxed);
        Ok(Buffer(Arc::new(Held { object, len, held: Arc::clone(&self.held) })))
    }

    /// Whether so much more may be wired: past its working set the whole machine crawls.
    fn room(&self, label: &str, bytes: usize) -> Result<()> {
        let (held, most) = (self.held.load(Relaxed), self.device.recommendedMaxWorkingSetSize());
        let (need, longest) = (held + bytes as u64, self.device.maxBufferLength());
        if need <= most && bytes <= longest {
            return Ok(());
        }
        let limit = if need > most { "working set" } else { "longest buffer" };
        let most = if need > most { most } else { longest as u64 };
        Err(Error::out_of_memory(format!(
            "metal: {bytes} bytes ({label}) beside {held} that are in use: the GPU's {limit} is {most}; try a smaller \
             --ctx, a smaller model or --device cpu"
        )))
    }
}

fn refused(label: &str, bytes: usize) -> Error {
    Error::out_of_memory(format!(
        "metal: the system refuses {bytes} bytes ({label}); try a smaller --ctx, a smaller model or --device cpu"
    ))
}
