//! The formats. Each reads, writes, checks, repairs and resizes its own files, and does not use the others.

pub(crate) mod ploop;
pub(crate) mod qcow2;
pub(crate) mod raw;
pub(crate) mod vdi;
pub(crate) mod vhd;
pub(crate) mod vhdx;
pub(crate) mod vmdk;
