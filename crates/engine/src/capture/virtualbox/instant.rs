//! A backup of a machine, and what is stored of one instant.

use super::machine::Condition;
use super::request::{VirtualBoxBackup, VirtualBoxWay};
use crate::capture::foreign_machine::Attached;
use crate::image::source::OpenSource;
use crate::job::Job;
use crate::machine::hooks::HookCalls;
use holdfast_hardware::Machine;
use holdfast_repo::{Manifest, Repository};
use jiff::Timestamp;

/// A backup of a machine.
pub(super) struct Backup<'a> {
    pub(super) repository: &'a Repository,
    pub(super) request: VirtualBoxBackup<'a>,
    pub(super) parent: Option<&'a Manifest>,
    /// What the snapshot says of other machines of its name.
    pub(super) note: Option<(String, String)>,
    pub(super) condition: Condition,
    pub(super) hooks: &'a HookCalls<'a>,
    pub(super) job: Job<'a>,
}

/// A disk that is read.
pub(super) struct Taken {
    pub(super) attached: Attached,
    pub(super) source: OpenSource,
}

/// What is stored of one instant.
pub(super) struct Instant<'i> {
    /// The settings as they are kept.
    pub(super) text: &'i str,
    pub(super) machine: &'i Machine,
    pub(super) time: Timestamp,
    pub(super) way: VirtualBoxWay,
    pub(super) nvram: Option<&'i str>,
    pub(super) memory: Option<&'i str>,
    pub(super) consistency: &'static str,
}
