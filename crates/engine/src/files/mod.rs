//! Files that appear complete or not at all, and streams in order.

pub(crate) mod atomic_file;
pub(crate) mod block_target;
pub(crate) mod ordered_stream;
pub(crate) mod room;
pub(crate) mod state_file;
pub(crate) mod stream_device;
