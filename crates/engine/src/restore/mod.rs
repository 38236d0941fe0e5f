//! A snapshot becomes files, a machine, or a device.

pub(crate) mod files;
pub(crate) mod instant;
pub(crate) mod machine;
pub(crate) mod serve;
pub(crate) mod source;
pub(crate) mod stored_memory;
