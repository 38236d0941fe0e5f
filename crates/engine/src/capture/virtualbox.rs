//! Machines of VirtualBox: where they are, and how they are backed up.
//!
//! The settings of a machine, a `.vbox` file, describe it, and its disks are images beside it. Both are read as they
//! are, by any user who may read them. The files do not show whether the machine runs: VirtualBox locks nothing.
//! `VBoxManage` knows the state of its user's machines. Without it, or for a machine that it does not know, Holdfast
//! checks that no process has one of the images open for writing. Only root can see the processes of other users; for
//! anyone else that the machine is off is an assumption, and a warning says so.
//!
//! 1. A machine that is off is read from its images ([`chain`]). If one of them changes meanwhile, or the machine
//!    starts, no snapshot is created.
//! 2. A machine that runs or is paused gets a VirtualBox snapshot ([`frozen`]). The images that it used until then are
//!    no longer written, and are read. The VirtualBox snapshot is always deleted; that of a killed backup is deleted by
//!    the next one.
//!
//! VirtualBox keeps no record of a machine's writes: everything is read, and compared with the previous snapshot.
//!
//! The author of the machine controls its settings, which may name any file of the host. Only files in the machine's
//! own folder, or that the user has allowed, are opened.

mod backup;
mod chain;
mod frozen;
mod instant;
mod machine;
mod media;
mod place;
mod request;
mod store;
mod unchanged;

pub use backup::{back_up_virtualbox, plan_virtualbox_backup};
pub(crate) use frozen::LeftSnapshot;
pub use machine::VirtualBox;
pub use machine::VirtualBoxMachine;
pub(crate) use machine::targets;
pub use place::InaccessibleMachine;
pub use request::{VirtualBoxBackup, VirtualBoxMemory, VirtualBoxMethod, VirtualBoxReading};

use crate::job::Error;
use crate::job::error::{ExchangeError, VirtualBoxError};

/// Wraps an error of a machine as one of a job.
fn of(error: VirtualBoxError) -> Error {
    ExchangeError::VirtualBox(error).into()
}
