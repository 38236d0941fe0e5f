//! A machine with its disks chosen, and what is stored of one point in time.

use holdfast_hardware::Machine;
use jiff::Timestamp;

use super::machine::{Condition, LoadedSettings};
use super::request::{VirtualBoxBackup, VirtualBoxMethod};
use crate::capture::foreign_machine::AttachedDisk;
use crate::capture::sink::SnapshotSink;
use crate::image::source::OpenSource;
use crate::job::Job;
use crate::machine::hooks::HookCalls;

/// A backup of a machine.
pub(crate) struct VirtualBoxCapture<'a> {
    pub(super) request: VirtualBoxBackup<'a>,
    pub(super) said: LoadedSettings,
    pub(super) condition: Condition,
    pub(super) sink: &'a dyn SnapshotSink,
    pub(super) hooks: &'a HookCalls<'a>,
    pub(super) job: Job<'a>,
}

/// A disk that is read.
pub(super) struct ChosenDisk {
    pub(super) attached: AttachedDisk,
    pub(super) source: OpenSource,
}

/// What is stored of one point in time.
pub(super) struct VirtualBoxPoint<'i> {
    /// The settings as they are kept.
    pub(super) text: &'i str,
    pub(super) machine: &'i Machine,
    pub(super) time: Timestamp,
    pub(super) way: VirtualBoxMethod,
    pub(super) reason: String,
    pub(super) nvram: Option<&'i str>,
    pub(super) memory: Option<&'i str>,
    pub(super) consistency: &'static str,
}
