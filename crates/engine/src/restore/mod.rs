//! Restores a snapshot to files, to a machine, or as a device.

mod dry_run;
pub(crate) mod files;
pub(crate) mod instant;
pub(crate) mod instant_job;
pub(crate) mod machine;
pub(crate) mod mount;
pub(crate) mod serve;
pub(crate) mod small_stream;
pub(crate) mod source;
pub(crate) mod stored_memory;
pub(crate) mod target;
