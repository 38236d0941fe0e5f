//! `restore` of a machine: its disks, its firmware's variables, the state of its TPM and its configuration, brought back to a hypervisor.
//!
//! [`plan_machine_restore`] looks at everything and changes nothing: its [`MachineRestorePlan`] is a value that says what will be
//! written where, and what will be defined. [`restore_machine`] does what the plan says. What could go wrong is found by the
//! plan, before the first byte is written: a machine that runs, files that others use, too little room, a configuration that the
//! hypervisor does not accept.
//!
//! The order of the second part is what makes a crash harmless: files under names of their own, durable; then their real
//! names; then the definition; then the start. See `docs/design/0005-machine-restore.md`.

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
pub(crate) use neighbours::{chain_of, is_same};
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
