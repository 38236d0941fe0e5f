//! What belongs to an instant of a machine beside its disks.

pub(crate) mod memory;
pub(crate) mod nvram;
pub(crate) mod scratch;
pub(crate) mod streams;
pub(crate) mod tpm;
