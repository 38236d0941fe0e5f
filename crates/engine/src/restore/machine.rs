//! `restore` of a machine: its disks, firmware variables, TPM state and configuration.
//!
//! [`plan_machine_restore`] examines everything and changes nothing. Its [`MachineRestorePlan`] says which files will
//! be written and what will be defined. [`restore_machine`] executes the plan. Problems are found by the plan, before
//! the first byte is written: a running machine, files in use by others, too little space, a configuration that the
//! hypervisor does not accept.
//!
//! The order of execution makes a crash harmless: files are written under temporary names and made durable, then
//! renamed; then the machine is defined; then it is started. See `docs/design/0005-machine-restore.md`.

mod draft;
mod execute;
mod existing_image;
mod host_folders;
mod host_needs;
mod in_place;
mod made_files;
mod neighbours;
mod new_machine;
mod observer;
mod output;
mod places;
mod plan;
mod planned_file;
mod present_image;
mod request;
mod resumption;
mod stored;
mod tpm;

pub(crate) use draft::Planner;
pub use draft::{Definition, PlannedMachine};
pub use execute::{MachineRestoreReport, Started, restore_machine};
pub(crate) use execute::{restore_point, write_companions};
pub use host_needs::PlannedFolder;
pub(crate) use made_files::MadeFiles;
pub use neighbours::chain_of;
pub(crate) use neighbours::is_same;
pub(crate) use observer::RestoreObserver;
pub use places::SpaceNeeded;
pub(crate) use plan::plan_point;
pub use plan::{MachineRestorePlan, plan_machine_restore};
pub use planned_file::{FileContent, FileWay, PlannedFile};
pub use request::{
    AfterRestore, ConfigurationChoice, InPlaceOptions, MachineRestoreRequest, NewMachineIdentity, NewMachineOptions,
    Presence, RestoreAs,
};
pub use resumption::{PlannedResumption, Resumed};
pub use tpm::store_tpm_state;
