//! How often the disks of an export can be read.

/// How often disks can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DiskReads {
    /// As often as anybody wants.
    Any,
    /// From the beginning to the end, once.
    Once,
}
