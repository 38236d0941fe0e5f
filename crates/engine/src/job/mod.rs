//! What every job gets: its context, progress, interruption, names and errors; also measuring and limiting of reads.

pub(crate) mod bottleneck;
mod context;
pub(crate) mod error;
mod interrupt;
pub(crate) mod name;
pub(crate) mod priority;
mod progress;
pub(crate) mod rate_limit;
pub(crate) mod read_meter;

pub(crate) use context::Counting;
pub use context::Job;
pub use error::{Error, Result};
pub use interrupt::{Interrupt, Interrupted};
pub use name::{DiskName, MachineName, NameError};
pub use priority::lower_priority;
pub use progress::{Bottleneck, NoProgress, Progress, Unit};
