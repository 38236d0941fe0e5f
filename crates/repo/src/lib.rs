//! The deduplicating, encrypted, self-checking repository.

mod backup;
mod check;
mod environment;
mod error;
mod format;
mod gc;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod id;
pub mod key;
mod losses;
mod packing;
mod progress;
mod read;
mod repair;
mod repository;
pub mod store;
mod vault;
mod wire;
mod writers;

pub use backup::{
    BackupProgress, BackupReport, BackupRequest, CopyMemory, CopySurvey, Parent, Source, SourceData, StoredDisk,
    Surveyor,
};
pub use check::finding::{Finding, FindingKind, TouchedDisk};
pub use check::scrub::{ScrubReport, ScrubRequest};
pub use check::verify::{Compare, Selection, VerifyDepth, VerifyReport, VerifyRequest};
pub use environment::{Environment, Liveness, ProcessIdentity, Processes, SystemProcesses};
pub use error::{Error, Result};
pub use format::config::{REPOSITORY_VERSION, RepositoryConfig};
pub use format::fingerprint::BLOCK_BYTES;
pub use format::manifest::{DiskContent, DiskRecord, DiskStatistics, Manifest};
pub use gc::loss::{AcceptedLoss, LostSearch};
pub use gc::request::{GcPlan, GcReport, GcRequest};
pub use gc::statistics::{SnapshotStatistics, Statistics, StoredSizes};
pub use id::{ChunkId, PackId, ParseIdError, RepositoryId, SegmentId, SnapshotId, WriterId};
pub use losses::{Loss, LostSnapshot};
pub use progress::job::{JobProgress, NoProgress};
pub use progress::stage::{NoStageTimer, Stage, StageTimer};
pub use read::device::{FrameCacheUse, SnapshotDevice};
pub use read::restore::{RestoreReport, RestoreRequest, TargetState};
pub use repair::{RepairAction, RepairPlan, RepairReport, RepairRequest};
pub use repository::Repository;
pub use repository::init::{InitRequest, OpenedRepository};
pub use writers::claim::{Claim, GcPause};
