//! `restore` of a machine: its disks, its firmware's variables, the state of its TPM and its configuration, brought back to a hypervisor.
//!
//! [`plan_machine_restore`] looks at everything and changes nothing: its [`MachineRestorePlan`] is a value that says what will be
//! written where, and what will be defined. [`restore_machine`] does what the plan says. What could go wrong is found by the
//! plan, before the first byte is written: a machine that runs, files that others use, too little room, a configuration that the
//! hypervisor does not accept.
//!
//! The order of the second part is what makes a crash harmless: files under names of their own, durable; then their real
//! names; then the definition; then the start. See `docs/design/0005-machine-restore.md`.

mod execute;
mod existing_image;
mod in_place;
mod made;
mod neighbours;
mod new_machine;
mod output;
mod places;
mod plan;
mod refusal;
mod resumption;
mod stored;
mod tpm;
mod witness;

pub use execute::{MachineRestoreReport, Started, restore_machine};
pub(crate) use execute::{restore_point, write_companions};
pub(crate) use made::Made;
pub(crate) use neighbours::{chain_of, is_same};
pub use plan::{
    AfterRestore, ConfigurationChoice, Content, Definition, FileWay, InPlaceWish, MachineRestorePlan,
    MachineRestoreRequest, NewMachineIdentity, NewMachineWish, PlannedFile, PlannedMachine, Presence, RestoreAs, Room,
    plan_machine_restore,
};
pub(crate) use plan::{Planner, plan_point};
pub use refusal::Refusal;
pub use resumption::{PlannedResumption, Resumed};
pub(crate) use stored::bytes_of;
pub(crate) use witness::Witness;
