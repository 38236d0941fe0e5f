//! iSCSI: a target that serves devices as SCSI disks.
//!
//! ```text
//! server ─► login               pure: requests in, responses and a decision out
//!       └─► session             pure: PDUs in, responses and commands to execute out
//!            └─► scsi           logical units and their commands, without any transport
//! ```
//! Sources: RFC 7143 (iSCSI), SAM-5, SPC-4 and SBC-3 (SCSI); quotations in comments are from there. Sessions have one
//! connection, and error recovery level 0.

#![deny(clippy::indexing_slicing)]

mod frames;
#[cfg(feature = "hostile")]
pub(crate) mod hostile;
mod login;
mod nexus;
mod pdu;
mod scsi;
mod server;
mod session;
mod target;
mod target_set;
mod text;

pub use crate::server::connections::StopReport;
pub use crate::server::export_device::{Absent, ExportDevice};
pub use crate::server::limits::Limits;
pub use crate::server::listen::Listener;
pub use crate::server::peer::Peer;
pub use crate::server::resources::ServerResources;
pub use crate::stream::Socket;
pub use login::{Authentication, ChapSecret, ChapUser};
pub use scsi::{LogicalUnit, SectorSize, UnitOptions};
pub use server::{InitiatorGone, RandomSource, TargetEvent, TargetEventSink, TargetServer, TargetServerOptions};
pub use target::{InitiatorAccess, Target, is_iscsi_name};
pub use target_set::{TargetSet, UnitPosition};
