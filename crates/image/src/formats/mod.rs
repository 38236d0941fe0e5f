//! The formats: each reads, writes, checks, repairs and resizes files of its own kind, and knows no other one.

pub(crate) mod ploop;
pub(crate) mod qcow2;
pub(crate) mod raw;
pub(crate) mod vdi;
pub(crate) mod vhd;
pub(crate) mod vhdx;
pub(crate) mod vmdk;
