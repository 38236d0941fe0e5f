//! A machine becomes a snapshot in a repository.

pub(crate) mod foreign_disks;
pub(crate) mod foreign_machine;
pub(crate) mod foreign_store;
pub(crate) mod images;
pub(crate) mod qemu;
pub(crate) mod virtualbox;
pub(crate) mod xen;
