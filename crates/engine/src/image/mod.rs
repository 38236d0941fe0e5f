//! Verbs about image files.

pub(crate) mod apply_differences;
pub(crate) mod clone;
pub(crate) mod compare;
pub(crate) mod consistency;
pub(crate) mod convert;
pub(crate) mod create;
pub(crate) mod guest_identity;
pub(crate) mod new_folder;
pub(crate) mod new_image;
pub(crate) mod sector_size;
pub(crate) mod sectors;
pub(crate) mod source;
