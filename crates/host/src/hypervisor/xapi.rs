//! XenServer and XCP-ng, through the XenAPI of a pool.
//!
//! Sources: the XenAPI reference and its note on the wire protocol; for the HTTP handlers, `export_raw_vdi.ml`,
//! `import_raw_vdi.ml` and `importexport.ml` of xen-api.
//!
//! - [`Pool`] logs in at the pool master and calls its methods ([`call`](Pool::call)); expired sessions are renewed.
//! - Long operations are [`Task`]s, and only the task reports success: the HTTP status precedes the transfer.
//! - Data is transferred by GET and PUT ([`Pool::get`], [`Pool::put`]), which a host may redirect to another host of
//!   the pool.
//! - Nothing is sent to a host without a trusted certificate ([`Trust`]).

mod address;
mod changed;
mod error;
mod http;
mod leftovers;
mod machine;
mod nbd;
mod pool;
mod record;
mod retry;
mod task;
mod transfer;
mod trust;

pub use address::XenAddress;
pub use changed::changed_blocks;
pub use error::{XapiError, XapiResult};
pub use leftovers::{BaseDisk, ListedSnapshot};
pub use machine::{Tracking, VirtualDisk, XenMachine, XenSnapshot};
pub use nbd::NbdAddress;
pub use pool::{Login, Pool, check_trust};
pub use record::{Reference, XapiRecord};
pub use task::{Task, TaskOutcome};
pub use transfer::{DiskForm, Download, Upload, UploadIdentity};
pub use trust::{Fingerprint, Trust};
