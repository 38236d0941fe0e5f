//! How often the disks of an export can be read.

/// How often disks can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DiskReads {
    /// Any number of times.
    Any,
    /// Once, from start to end.
    Once,
}
