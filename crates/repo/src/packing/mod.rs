//! Filling packs: chunks and pages gathered into frames, frames sealed in parallel, packs made durable.
//!
//! Whoever stores anything goes through here: a backup, and gc when it rewrites packs that are mostly dead.

mod frame_room;
mod frames;
mod output;

pub(crate) use frames::FrameStream;
pub(crate) use output::{BufferPool, FREE_FRAME_COUNT_MAX, FinishedPack, PackOutput};
