//! Which commands may run side by side. It knows ranges of buffers and nothing of kernels: a
//! command that touches what another wrote since the last barrier, or writes what another
//! touched, needs a barrier before it.

use std::ops::Range;

/// How a command uses a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only.
    Read,
    /// Writes, and may read.
    Write,
}

/// A range of a buffer and its use. Bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Touch {
    /// The buffer's number.
    pub(crate) buffer: u32,
    /// The bytes.
    pub(crate) bytes: Range<usize>,
    /// The use.
    pub(crate) access: Access,
}

impl Touch {
    /// True where the two may not run side by side: the ranges meet and either writes.
    pub(crate) fn conflicts(&self, other: &Touch) -> bool {
        self.buffer == other.buffer
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
            && (self.access == Access::Write || other.access == Access::Write)
    }
}

/// The touches since the last barrier.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    open: Vec<Touch>,
}

impl Tracker {
    /// Whether a command with these touches needs a barrier before it; notes them either way.
    pub(crate) fn before(&mut self, touches: &[Touch]) -> bool {
        let conflict = touches.iter().any(|t| self.open.iter().any(|o| o.conflicts(t)));
        if conflict {
            self.open.clear();
        }
        self.open.extend_from_slice(touches);
        conflict
    }

    /// Forgets everything: a new encoder starts behind a barrier.
    pub(crate) fn reset(&mut self) {
        self.open.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Access::{Read, Write};

    fn touch(buffer: u32, bytes: Range<usize>, access: Access) -> Touch {
        Touch { buffer, bytes, access }
    }

    #[test]
    fn only_meeting_ranges_with_a_writer_conflict() {
        for (a, b, expected) in
            [(Read, Read, false), (Read, Write, true), (Write, Read, true), (Write, Write, true)]
        {
            assert_eq!(touch(0, 0..8, a).conflicts(&touch(0, 4..12, b)), expected, "{a:?} {b:?}");
            assert!(!touch(0, 0..8, a).conflicts(&touch(0, 8..12, b)), "neighbours");
            assert!(!touch(0, 0..8, a).conflicts(&touch(1, 0..8, b)), "other buffers");
        }
    }

    #[test]
    fn a_barrier_starts_afresh() {
        let mut tracker = Tracker::default();
        assert!(!tracker.before(&[touch(0, 0..8, Write)]));
        assert!(!tracker.before(&[touch(1, 0..8, Write)]));
        assert!(tracker.before(&[touch(0, 0..8, Read), touch(2, 0..8, Write)]), "after a write");
        assert!(!tracker.before(&[touch(1, 0..8, Read)]), "the barrier covered buffer 1 too");
        assert!(tracker.before(&[touch(1, 4..8, Write)]), "write after read");
        tracker.reset();
        assert!(!tracker.before(&[touch(1, 0..8, Read)]));
    }
}
