//! Machines of VirtualBox: where they are, and how they are backed up.
//!
//! What a machine consists of stands in its settings, a `.vbox` file, and its disks are images beside it: both are read as they are, by any user who may read
//! them. The files do not show whether it runs: VirtualBox locks nothing. `VBoxManage` knows it of the machines of its user; without it, or
//! of a machine that it does not know, no process may have one of the images open for writing. Those of other users can be seen by root
//! alone, so that is an assumption, and a warning says so.
//!
//! 1. A machine that is off is read from its images ([`chain`]). If one of them changes meanwhile, or the machine starts, there is no snapshot.
//! 2. One that runs, or is paused, gets a snapshot of VirtualBox's ([`frozen`]): what was its image until then is not written any more, and is read. The
//!    snapshot is deleted in any case; that of a backup that was killed is deleted by the next one.
//!
//! VirtualBox keeps no record of what a machine writes: everything is read, and compared with the snapshot before.
//!
//! Settings come from the machine's maker, and may name any file of the host. Only those in the machine's own folder are opened, or that a
//! person has allowed.

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

/// An error of a machine, as one of a job.
fn of(error: VirtualBoxError) -> Error {
    ExchangeError::VirtualBox(error).into()
}
