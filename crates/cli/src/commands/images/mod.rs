//! Verbs about image files, machine archives, streams and templates.

pub(super) mod archive;
pub(super) mod compress;
pub(super) mod export;
pub(super) mod image;
pub(super) mod import;
pub(super) mod template;
