//! Fills packs: collects chunks and pages into frames, seals frames in parallel, makes packs durable.
//!
//! Used by all writers of data: a backup, and gc when it repacks.

mod frame_room;
mod frames;
mod output;

pub(crate) use frames::FrameStream;
pub(crate) use output::{BufferPool, FREE_FRAME_COUNT_MAX, FinishedPack, PackOutput};
