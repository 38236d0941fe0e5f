//! The jobs of Holdfast as stories.
//!
//! What every job shares: how it tells where it stands ([`Progress`]), how it is stopped ([`Interrupt`]), and how people
//! name what is in a repository ([`MachineName`], [`DiskName`], [`SnapshotName`] and [`resolve`]).

mod interrupt;
mod name;
mod progress;
mod resolve;
mod snapshot_name;

pub use interrupt::{Interrupt, Interrupted};
pub use name::{DiskName, MachineName, NameError};
pub use progress::{Bottleneck, NoProgress, Progress, Unit};
pub use resolve::{Candidate, ResolveError, resolve};
pub use snapshot_name::{Moment, SnapshotName, SnapshotReference};
