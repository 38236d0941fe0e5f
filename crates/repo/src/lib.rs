//! The deduplicating, encrypted, self-checking repository.

mod backup;
mod check;
mod claim;
mod codec;
mod compact;
mod condemned;
mod config;
mod cut;
mod damage;
mod dead_writers;
mod device;
mod diff;
mod differing;
mod error;
mod finding;
mod fingerprint;
mod forget;
mod frame_plan;
mod frame_set;
mod gc;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod id;
mod impact;
mod index;
mod init;
pub mod key;
mod lease;
mod loss;
mod lru;
mod machine_code;
mod manifest;
mod map;
mod map_walk;
mod mark;
mod moves;
mod pack;
mod packing;
mod packs;
mod relocated;
mod relocation;
mod repack;
mod repair;
mod repository;
mod restore;
mod room;
mod scrub;
mod stage;
mod stats;
pub mod store;
mod surroundings;
mod tidy;
mod verify;
mod wire;

pub use backup::{
    BackupProgress, BackupReport, BackupRequest, CopyMemory, CopySurvey, Parent, Source, SourceData, StoredDisk,
    Surveyor,
};
pub use claim::{Claim, GcPause};
pub use config::{REPOSITORY_VERSION, RepositoryConfig};
pub use device::SnapshotDevice;
pub use error::{Error, Result};
pub use finding::{Finding, FindingKind, Touched};
pub use fingerprint::BLOCK_BYTES;
pub use gc::{GcPlan, GcReport, GcRequest};
pub use id::{ChunkId, PackId, ParseIdError, RepositoryId, SegmentId, SnapshotId, WriterId};
pub use init::{InitRequest, Opened};
pub use loss::{AcceptedLoss, Loss, LostSearch, LostSnapshot};
pub use manifest::{DiskContent, DiskRecord, DiskStatistics, Manifest};
pub use repair::{RepairAction, RepairPlan, RepairReport, RepairRequest};
pub use repository::Repository;
pub use restore::{JobProgress, RestoreReport, RestoreRequest, TargetState, Unwatched};
pub use scrub::{ScrubReport, ScrubRequest};
pub use stage::{Stage, StageTimer, Untimed};
pub use stats::{SnapshotStatistics, Statistics};
pub use surroundings::{Liveness, ProcessIdentity, Processes, Surroundings, SystemProcesses};
pub use verify::{Compare, Selection, VerifyDepth, VerifyReport, VerifyRequest};
