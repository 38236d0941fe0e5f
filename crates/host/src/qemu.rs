//! Operations on a running QEMU through its monitor, with or without a management layer.
//!
//! A point in time of a machine's disks is created as follows. A copy-before-write filter is inserted under each
//! device. It saves data that the guest is about to overwrite to Holdfast's scratch file. A node on top of the filter
//! shows the frozen disk, and QEMU exports that node over NBD. If the scratch file is full or slow, the filter breaks
//! the *copy*, never the guest's write (`on-cbw-error=break-snapshot`, `cbw-timeout`).
//! `docs/design/0004-live-machines.md` has the evidence.
//!
//! Some versions of QEMU have defects with which this would harm the guest: [`DEFECTS`] lists them and the
//! alternatives.

mod context;
mod copy;
mod defects;
mod disks;
mod graph;
mod jobs;
mod latency;
mod layers;
pub mod memory;
mod names;
mod point_in_time;
pub mod qmp;
pub(crate) mod qom;
mod remove;
mod serving;
mod tracking;
mod version;
mod write_limit;

pub use context::DiskContext;
pub use copy::PartCopier;
pub use defects::{DEFECTS, Danger, Defect};
pub(crate) use disks::device_path;
pub use disks::{Bitmap, QemuDisk, disks};
pub use jobs::{QemuJob, dismiss_job, jobs, remove_bitmap, resume};
pub use latency::{WriteCounters, write_counters};
pub use layers::{Layer, Layers};
pub use names::RunId;
pub(crate) use names::run_of;
pub use point_in_time::{
    DiskRequest, Pause, PausePolicy, PointInTime, PointInTimeEvent, PointInTimeRequest, PreparedPointInTime,
    UnservedPointInTime,
};
pub use remove::{drop_idle_files, remove_run, runs_in};
pub use serving::{NotServed, no_filter};
pub use tracking::{TakenMarks, TrackingRequest, WriteTracker};
pub use version::QemuVersion;
pub use write_limit::{WriteLimit, limit_writes, unlimit_writes};
