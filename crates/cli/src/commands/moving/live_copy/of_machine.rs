//! The disk of a machine, which may run.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use holdfast_engine::{Job, Quiesced, TrackRequest, TrackedMachine};
use holdfast_host::{Description, DiskChoice, DiskSource, MachineDisk, MachineState};
use holdfast_live_copy::{LiveCopyReport, LiveSource as _, MachineFreezer, SourceConsistency, TrackedSource};
use holdfast_repo::SystemProcesses;

use super::super::copy_advice::copy_error;
use super::super::copy_target::CopyTarget;
use super::events::RoundDisplay;
use super::report::{CopiedFrom, LiveCopied, LiveCopyPlanned};
use super::{GUARD_TIME, LiveCopyArgs, PreparedCopy};
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::machines::guests::QuiesceWhen;
use crate::machines::{Found, Hypervisors, MachineSelection, MachineWord, runs};
use crate::process::time;

/// Options for a machine as source.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options for machines")]
pub(super) struct MachineSourceArgs {
    /// The disk of the machine, by its target (vda); needed if it has several
    #[arg(long, value_name = "DISK")]
    disk: Option<String>,
    /// The hypervisor's address: qemu:///system, qemu:///session
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
    /// Whether the guest agent freezes the file systems for the last pass
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = QuiesceWhen::Try)]
    quiesce: QuiesceWhen,
    /// Limit the writes of the guest if it writes faster than they can be copied
    #[arg(long)]
    throttle: bool,
}

impl MachineSourceArgs {
    /// The first option that was given, and does not apply to other sources.
    pub(super) fn given(&self) -> Option<&'static str> {
        let given = [
            (self.disk.is_some(), "--disk"),
            (self.connect.is_some(), "--connect"),
            (self.quiesce != QuiesceWhen::Try, "--quiesce"),
            (self.throttle, "--throttle"),
        ];
        given.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name)
    }

    pub(super) fn may_throttle(&self) -> bool {
        self.throttle
    }
}

/// The machine that a word means; none if it means a file, a device or a container.
pub(super) fn machine_of(source: &OsStr) -> Option<MachineWord> {
    let word = MachineWord::parse(source)?;
    (!matches!(word, MachineWord::Container(_))).then_some(word)
}

impl LiveCopyArgs {
    /// Copies a disk of a machine.
    pub(super) fn copy_machine(
        &self,
        word: MachineWord,
        target: &CopyTarget,
        context: &Context,
    ) -> Result<Exit, Error> {
        if self.format.is_some() || self.freezing.freeze_command.is_some() {
            return Err(Error::usage(
                "--format and --freeze-command do not apply to a machine: its hypervisor knows the format, and pauses it",
                "remove the option",
            ));
        }
        let hypervisors = Hypervisors::new(self.machine.connect.as_deref(), context);
        let found = one_machine(&hypervisors, word)?;
        let description = found.machine.describe().map_err(holdfast_engine::Error::from)?;
        let disk = self.chosen_disk(&description)?;
        match description.summary.state {
            MachineState::ShutOff => {
                let path = image_of(&description, &disk)?;
                self.copy_at_rest(&path, target, context)
            }
            _ if self.dry_run => context.report(&LiveCopyPlanned {
                dry_run: true,
                source: format!("{}:{}", found.machine.name(), disk.target),
                target: target.to_string(),
                format: target.format.name(),
                size_bytes: found.machine.size_of(&disk).unwrap_or_default(),
                data_bytes: None,
                consistency: None,
            }),
            _ => self.copy_running(&found, &disk, target, context),
        }
    }

    fn chosen_disk(&self, description: &Description) -> Result<MachineDisk, Error> {
        let choice = DiskChoice {
            include: self.machine.disk.iter().cloned().collect(),
            exclude: Vec::new(),
        };
        let machine = &description.summary.name;
        let present = || -> String {
            let targets: Vec<&str> = description.disks.iter().map(|disk| &disk.target[..]).collect();
            targets.join(", ")
        };
        if !description.unknown(&choice).is_empty() {
            return Err(Error::refused(
                Kind::NotFound,
                format!("{machine} has no such disk"),
                format!("its disks are {}", present()),
            ));
        }
        let decisions = description.decide(&choice);
        let taken = description.disks.iter().zip(decisions);
        let taken: Vec<&MachineDisk> = taken
            .filter(|(_, decision)| *decision == holdfast_host::Decision::Take)
            .map(|(disk, _)| disk)
            .collect();
        match taken[..] {
            [disk] => Ok(disk.clone()),
            [] => Err(Error::refused(
                Kind::Refused,
                format!("{machine} has no disk that can be copied"),
                "--disk names one; those of other machines, and drives without a medium, cannot be copied",
            )),
            _ => Err(Error::usage(
                format!("{machine} has several disks: {}", present()),
                "choose one with --disk",
            )),
        }
    }

    /// Copies the disk of a machine that runs, or is paused.
    fn copy_running(
        &self,
        found: &Found,
        disk: &MachineDisk,
        target: &CopyTarget,
        context: &Context,
    ) -> Result<Exit, Error> {
        let run = runs::new_run()?;
        let journal = runs::journal(context, &found.way);
        let watchdog = runs::watchdog(found.way.clone(), run, journal.as_ref())?;
        let shown = format!("{}:{}", found.machine.name(), disk.target);
        let frozen_max = self.freezing.max_frozen(FROZEN_MAX_DEFAULT);
        let request = TrackRequest {
            machine: &*found.machine,
            run,
            choice: DiskChoice {
                include: vec![disk.target.clone()],
                exclude: Vec::new(),
            },
            runtime: context.runtime_folder(),
            journal,
            patience: Duration::ZERO,
            watchdog: Some(watchdog),
            quiesce: self.machine.quiesce.into(),
            pause_max: frozen_max * 2 + GUARD_TIME,
            processes: &SystemProcesses,
            now: &time::now,
        };
        let uuid = found
            .machine
            .describe()
            .map_err(holdfast_engine::Error::from)?
            .summary
            .uuid;
        let place = CopyPlace {
            identity: &[uuid.as_bytes(), disk.target.as_bytes()],
            target,
        };
        let copied = context.work(1, |job| {
            let tracked = TrackedMachine::begin(request, job)?;
            let freezer = MachineFreezer::new(&tracked);
            let result = self.copy_tracked(&tracked, &freezer, place, context, job);
            let quiesced = freezer.quiesced();
            tracked.end()?;
            Ok(result.map(|(report, consistency)| (report, consistency, quiesced)))
        })?;
        let (report, consistency, quiesced) = copied?;
        if let Some(Quiesced::NoAgent) = quiesced {
            context
                .console()
                .note("the machine has no guest agent: the copy is as after a power failure");
        }
        context.report(&LiveCopied::new(
            &shown,
            target,
            &report,
            consistency,
            CopiedFrom::Frozen,
        ))
    }

    fn copy_tracked(
        &self,
        tracked: &TrackedMachine<'_>,
        freezer: &MachineFreezer<'_>,
        place: CopyPlace<'_>,
        context: &Context,
        job: Job<'_>,
    ) -> Result<(LiveCopyReport, SourceConsistency), Error> {
        let source = TrackedSource::open(tracked, 0, freezer).map_err(copy_error)?;
        let prepared = PreparedCopy {
            source: &source,
            target: place.target,
            identity: place.identity,
            frozen_max: self.freezing.max_frozen(FROZEN_MAX_DEFAULT),
            rounds: RoundDisplay::Shown,
        };
        let report = self.run_copy(&prepared, context, job)?;
        Ok((report, source.consistency()))
    }
}

/// What is copied, and where to.
#[derive(Clone, Copy)]
struct CopyPlace<'a> {
    identity: &'a [&'a [u8]],
    target: &'a CopyTarget,
}

/// How long a machine may be paused unless the user says otherwise.
const FROZEN_MAX_DEFAULT: Duration = Duration::from_millis(500);

fn one_machine(hypervisors: &Hypervisors<'_>, word: MachineWord) -> Result<Found, Error> {
    let choice = hypervisors.choose(&MachineSelection {
        words: vec![word],
        ..MachineSelection::default()
    })?;
    match &choice.chosen[..] {
        [chosen] => hypervisors.find(chosen),
        _ => Err(Error::usage("these are several machines", "name one of them")),
    }
}

/// The image of a disk of a machine that is shut off.
fn image_of(description: &Description, disk: &MachineDisk) -> Result<PathBuf, Error> {
    match &disk.source {
        DiskSource::File(path) | DiskSource::Device(path) => Ok(path.clone()),
        DiskSource::Other(_) | DiskSource::Empty => Err(Error::refused(
            Kind::Unsupported,
            format!(
                "disk {} of {} is not a file of this host",
                disk.target, description.summary.name
            ),
            "start the machine: then its hypervisor reads the disk",
        )),
    }
}
