//! The state of a machine at a point in time, besides its disks.

pub(crate) mod memory;
pub(crate) mod nvram;
pub(crate) mod scratch;
pub(crate) mod streams;
pub(crate) mod tpm;
