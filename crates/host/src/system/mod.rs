//! The operating system: processes, rights, trusted files, and programs that are called.

pub(crate) mod allocator;
pub(crate) mod file_stamp;
pub(crate) mod identity;
pub(crate) mod process;
pub(crate) mod processes;
pub(crate) mod rights;
pub(crate) mod sandbox;
pub(crate) mod ssh;
pub(crate) mod ssh_signature;
pub(crate) mod standard_streams;
pub(crate) mod trusted_files;
pub(crate) mod waits;
