//! Types that all formats and operations share: options, descriptions, reports, and the mapping of disk ranges.

pub(crate) mod block_options;
pub(crate) mod bytes;
pub(crate) mod create_options;
pub(crate) mod format;
pub(crate) mod forward_reader;
pub(crate) mod identity;
pub(crate) mod info;
pub(crate) mod layered;
pub(crate) mod mapped_extent;
pub(crate) mod qcow2_info;
pub(crate) mod repair_action;
pub(crate) mod report;
pub(crate) mod shared_cache;
pub(crate) mod windows_path;
