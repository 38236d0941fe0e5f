//! Operations on images of any format: each detects the format and calls its implementation.

pub(crate) mod changes;
pub(crate) mod create;
pub(crate) mod fill;
pub(crate) mod image;
pub(crate) mod image_mut;
pub(crate) mod map;
pub(crate) mod new_identity;
pub(crate) mod renamed_backing;
pub(crate) mod repair;
pub(crate) mod resize;
