//! Copies a disk on several threads: pieces are read and compressed in parallel, and written in order.

pub(crate) mod copy_pipeline;
pub(crate) mod piece;
