//! `holdfast migrate`: moves a machine to another host, also while it runs.

mod advice;
mod connections;
mod container;
mod container_report;
mod other_host;
mod repeat;
mod report;
mod shown_move;
mod undo;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::{Job, PullNote, Quiesce, RuntimeFolder, TrackRequest, TrackedMachine};
use holdfast_host::{DiskChoice, Machine, MachineState};
use holdfast_live_copy::ThrottlePolicy;
use holdfast_migration::{
    DiskArrival, FormerDisks, IncompleteMemory, MigrationPlan, MigrationReport, MigrationTools, PlanRequest, PullTools,
    RunningTools, Settlement, migrate_running, migrate_shut_off, plan, resume_pull, settle,
};
use holdfast_repo::SystemProcesses;
use holdfast_repo::key::SystemRandomness;

use super::far::{MoveRoute, MoveTarget, SendingArgs, program};
use super::live_copy::parse_time;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::{MachineWord, monitor_address, runs};
use crate::process::time;
use advice::migration_error;
use connections::Connections;
use container::ContainerMoveArgs;
use other_host::OtherHost;
use report::{Migrated, MigrationPlanned};
use shown_move::ShownMove;
use undo::Returned;

/// How long a machine may be stopped unless the user says otherwise.
const FROZEN_MAX_DEFAULT: Duration = Duration::from_millis(500);
/// Attempts to stop the machine within the limit.
const ATTEMPT_COUNT_MAX: u32 = 5;
/// Beyond the limit of the stopped time, another process resumes the machine. The hypervisor resumes it before.
const GUARD_TIME: Duration = Duration::from_secs(30);

/// Arguments of `migrate`.
#[derive(Debug, clap::Args)]
pub(crate) struct MigrateArgs {
    /// A machine of libvirt, which runs or is shut off; qmp:PATH, the QEMU with a monitor socket; or the folder of a container
    #[arg(value_name = "MACHINE")]
    machine: String,
    /// A host that has holdfast; disks are stored in the folder [default: that of libvirt's pool], and a container becomes a
    /// folder in it [default: the same as here]
    #[arg(value_name = "ssh://[USER@]HOST[/FOLDER]|FOLDER")]
    destination: OsString,
    /// The hypervisor's address here: qemu:///system
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
    /// The address of libvirt there, as that host reaches it [default: qemu:///system]
    #[arg(long, value_name = "URI")]
    connect_there: Option<String>,
    /// An image at the other host with content similar to that of a disk: only the differences are sent; may be repeated
    /// [default: the disks of a definition of the machine there]
    #[arg(long, value_name = "DISK=PATH")]
    seed: Vec<OsString>,
    /// Delete the disks that the machine had there before, when it runs there
    #[arg(long)]
    delete_former: bool,
    /// Try for this long to connect again after a connection was lost
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_time)]
    retry_for: Duration,
    #[command(flatten)]
    sending: SendingArgs,
    /// A command whose standard input and output reach 'holdfast receive-migration 1' on the other host, instead of ssh; it is
    /// called for each connection, and the destination is the path of a folder there
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["ssh_option", "connect_there", "undo", "repeat"])]
    connect_command: Option<String>,
    /// Show what would be migrated, and what prevents it; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Bring a machine back that was migrated to the host: it becomes the source, and only the differences are sent
    #[arg(long)]
    undo: bool,
    /// Migrate the machine to the host and back, this number of times, and show the times; needs --delete-former
    #[arg(long, value_name = "NUMBER", conflicts_with_all = ["undo", "dry_run", "seed"], requires = "delete_former")]
    repeat: Option<NonZeroU32>,
    #[command(flatten)]
    running: RunningArgs,
    #[command(flatten)]
    container: ContainerMoveArgs,
}

/// Options for a machine that runs.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options for a machine that runs")]
struct RunningArgs {
    /// Resume the machine here if it is stopped for longer, and try again later [default: 500ms; 1m for a container]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    max_frozen: Option<Duration>,
    /// Slow the guest if it changes its disks or memory faster than they can be copied
    #[arg(long)]
    throttle: bool,
    /// Migrate an emulated machine although its QEMU is older than 9.0, and may lose what it writes to memory meanwhile
    #[arg(long)]
    accept_incomplete_memory: bool,
    /// Start it there at once, and pull its disks while it runs there; until they are complete, it needs this host
    #[arg(long, conflicts_with_all = ["seed", "repeat", "bwlimit"])]
    post_copy: bool,
}

impl RunningArgs {
    /// How long a machine may be stopped.
    fn frozen_max(&self) -> Duration {
        self.max_frozen.unwrap_or(FROZEN_MAX_DEFAULT)
    }
}

impl Verb for MigrateArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See whether web1 can be migrated, and where its disks would be",
            line: "holdfast migrate web1 ssh://root@host2 --dry-run",
        },
        Example {
            wish: "Migrate it; it may be stopped for 200 ms at most",
            line: "holdfast migrate web1 ssh://root@host2/srv/vm --max-frozen 200ms",
        },
        Example {
            wish: "Migrate the machine of a QEMU without libvirt",
            line: "holdfast migrate qmp:/run/web1.qmp ssh://root@host2/srv/vm",
        },
        Example {
            wish: "Migrate a container, and the service that uses it",
            line: "holdfast migrate /srv/web1 ssh://root@host2 --stop-command 'systemctl stop web1' --start-command 'systemctl start web1'",
        },
        Example {
            wish: "Bring it back, send only what differs from its old disks, and delete these",
            line: "holdfast migrate web1 ssh://root@host2 --undo --delete-former",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let target = match &self.connect_command {
            Some(command) => MoveTarget::behind_command(&self.destination, command)?,
            None => MoveTarget::parse(&self.destination)?,
        };
        if let Some(MachineWord::Container(folder)) = MachineWord::parse(OsStr::new(&self.machine)) {
            return if self.undo {
                self.bring_container_back(&folder, &target, context)
            } else {
                self.move_container(&folder, &target, context)
            };
        }
        if let Some(option) = self.container.given() {
            return Err(Error::usage(
                format!("{option} applies to containers, and {} is a machine", self.machine),
                "remove the option; container:FOLDER is a container in any case",
            ));
        }
        self.refuse_options_of_libvirt()?;
        if let Some(count) = self.repeat {
            return self.move_repeatedly(&target, count, context);
        }
        if self.undo {
            return match self.bring_back(&target, context)? {
                Returned::Back { report, exit } => {
                    let shown = context.report(&*report)?;
                    Ok(shown.with_warning_count(usize::from(exit == Exit::Warnings)))
                }
                Returned::Shown(exit) => Ok(exit),
            };
        }
        let other = OtherHost::reach(&target, self, context)?;
        let Some(report) = self.migrate(&target, &other, context)? else {
            return Ok(Exit::Ok);
        };
        match target.route {
            MoveRoute::Ssh(_) | MoveRoute::Command(_) => context.report(&report),
            MoveRoute::Socket { .. } => {
                let document = serde_json::to_value(&report).map_err(Error::Json)?;
                match other.far.send_report(document) {
                    Ok(()) => Ok(Exit::Ok.with_warning_count(context.console().warnings().len())),
                    // The machine is there.
                    Err(_) => context.report(&report),
                }
            }
        }
    }
}

/// Seeds by the targets of their disks.
fn parse_seeds(words: &[OsString]) -> Result<BTreeMap<String, PathBuf>, Error> {
    let mut seeds = BTreeMap::new();
    for word in words {
        let wrong = |reason: &str| {
            let reason = format!("{}: {reason}", word.display());
            Err(Error::usage(
                reason,
                "write the disk and its whole path there: --seed vda=/srv/old/web1.qcow2",
            ))
        };
        let Some((disk, path)) = word.to_str().and_then(|text| text.split_once('=')) else {
            return wrong("it does not name a disk");
        };
        if disk.is_empty() || !Path::new(path).is_absolute() {
            return wrong("it is not a disk with an absolute path of the other host");
        }
        if seeds.insert(disk.to_owned(), PathBuf::from(path)).is_some() {
            return wrong("the disk has two seeds");
        }
    }
    Ok(seeds)
}

impl MigrateArgs {
    /// Migrates the machine. Returns nothing after a dry run, which is reported here.
    fn migrate(&self, target: &MoveTarget, other: &OtherHost, context: &Context) -> Result<Option<Migrated>, Error> {
        let connections = Connections::open(&self.word(), self.connect.as_deref(), context)?;
        let watched = connections.named()?;
        if let Some(moved) = self.resume_pull(target, &*watched, &connections, other, context)? {
            return Ok(Some(moved));
        }
        if let Some(moved) = self.settle(target, &*watched, &connections, other, context)? {
            return Ok(Some(moved));
        }
        let run = runs::new_run()?;
        let plan = plan(&PlanRequest {
            hypervisor: &*connections.control,
            machine: &*watched,
            far: &other.far,
            folder: target.folder.as_deref(),
            seeds: parse_seeds(&self.seed)?,
            incomplete_memory: if self.running.accept_incomplete_memory {
                IncompleteMemory::Accept
            } else {
                IncompleteMemory::Refuse
            },
            arrival: if self.running.post_copy {
                DiskArrival::AfterStart { run }
            } else {
                DiskArrival::BeforeStart
            },
            clock: &**context.clock(),
        })
        .map_err(migration_error)?;
        if self.dry_run {
            context.report(&MigrationPlanned::new(&plan, target))?;
            return Ok(None);
        }
        for note in &plan.notes {
            context.console().note(note);
        }
        plan.require_no_obstacles().map_err(migration_error)?;
        let report = match plan.state {
            MachineState::Running => self.move_running(&plan, run, &connections, other, context)?,
            _ => self.move_shut_off(&plan, &connections, other, context)?,
        };
        Ok(Some(Migrated::new(&plan.machine, plan.state, target, &report)))
    }

    /// Continues a migration with `--post-copy` that was interrupted after the machine had started there; none if it is not that.
    fn resume_pull(
        &self,
        target: &MoveTarget,
        machine: &dyn Machine,
        connections: &Connections,
        other: &OtherHost,
        context: &Context,
    ) -> Result<Option<Migrated>, Error> {
        let summary = machine.describe().map_err(holdfast_engine::Error::from)?.summary;
        if summary.state != MachineState::ShutOff || self.dry_run {
            return Ok(None);
        }
        let Some(note) = PullNote::find(&runs::pulls_folder(context), &summary.uuid)? else {
            return Ok(None);
        };
        let observer = ShownMove::of_pull(context);
        let tools = self.common_tools(connections, other, &observer, context);
        let resumed = context.work(1, |job| Ok(resume_pull(note, &tools, job)))?;
        let resumed = resumed.map_err(migration_error)?;
        Ok(resumed.map(|resumed| Migrated::new(&summary.name, resumed.state, target, &resumed.report)))
    }

    /// Completes a migration that was interrupted when the machine had sent all of its memory; none if it runs here.
    fn settle(
        &self,
        target: &MoveTarget,
        machine: &dyn Machine,
        connections: &Connections,
        other: &OtherHost,
        context: &Context,
    ) -> Result<Option<Migrated>, Error> {
        if self.dry_run {
            return Ok(None);
        }
        let summary = machine.describe().map_err(holdfast_engine::Error::from)?.summary;
        let observer = ShownMove::of_pull(context);
        let tools = self.common_tools(connections, other, &observer, context);
        match settle(&summary.name, &summary.uuid, &tools).map_err(migration_error)? {
            Settlement::NotInterrupted => Ok(None),
            Settlement::StaysHere => {
                let note = "an earlier migration was interrupted before the machine ran there; it was resumed here";
                context.console().note(note);
                Ok(None)
            }
            Settlement::Moved => {
                let report = MigrationReport::default();
                Ok(Some(Migrated::new(
                    &summary.name,
                    MachineState::Running,
                    target,
                    &report,
                )))
            }
        }
    }

    /// The first option that was given, and applies to machines only.
    fn option_of_machines(&self) -> Option<&'static str> {
        let given = [
            (self.connect.is_some(), "--connect"),
            (!self.seed.is_empty(), "--seed"),
            (self.repeat.is_some(), "--repeat"),
            (self.running.throttle, "--throttle"),
            (self.running.accept_incomplete_memory, "--accept-incomplete-memory"),
            (self.running.post_copy, "--post-copy"),
        ];
        given.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name)
    }

    /// A word that does not name a machine in another way is a name at libvirt.
    fn word(&self) -> MachineWord {
        let word = MachineWord::parse(OsStr::new(&self.machine));
        word.unwrap_or_else(|| MachineWord::Libvirt(self.machine.clone()))
    }

    /// The address of the hypervisor there. The monitor of a QEMU has the same path on both hosts.
    fn address_there(&self) -> String {
        match (self.word(), &self.connect_there) {
            (MachineWord::Qmp(path), _) => monitor_address(&path).to_string_lossy().into_owned(),
            (_, Some(uri)) => uri.clone(),
            (_, None) => "qemu:///system".to_owned(),
        }
    }

    /// # Errors
    /// An option was given that does not apply to a QEMU without libvirt.
    fn refuse_options_of_libvirt(&self) -> Result<(), Error> {
        if !matches!(self.word(), MachineWord::Qmp(_)) {
            return Ok(());
        }
        let given = [
            (self.connect.is_some(), "--connect"),
            (self.connect_there.is_some(), "--connect-there"),
            (self.undo, "--undo"),
            (self.repeat.is_some(), "--repeat"),
            (self.running.post_copy, "--post-copy"),
        ];
        match given.into_iter().find(|(is_given, _)| *is_given) {
            None => Ok(()),
            Some((_, "--undo")) => Err(Error::usage(
                "--undo applies to machines of libvirt and containers",
                "run holdfast migrate on the other host, with the address of this one",
            )),
            Some((_, option)) => Err(Error::usage(
                format!("{option} applies to machines of libvirt"),
                "remove the option",
            )),
        }
    }

    fn throttle_policy(&self) -> ThrottlePolicy {
        if self.running.throttle {
            ThrottlePolicy::IfNeeded
        } else {
            ThrottlePolicy::Never
        }
    }

    fn common_tools<'a>(
        &self,
        connections: &'a Connections,
        other: &'a OtherHost,
        observer: &'a ShownMove<'a>,
        context: &Context,
    ) -> MigrationTools<'a> {
        MigrationTools {
            control: &*connections.control,
            far: &other.far,
            reach_far_again: &*other.reach_again,
            connector: Arc::clone(&other.connector),
            pull: PullTools {
                link: Arc::clone(&other.link),
                records: runs::pulls_folder(context),
                destination: other.address.clone(),
            },
            former_disks: if self.delete_former {
                FormerDisks::Delete
            } else {
                FormerDisks::Keep
            },
            retry_time: self.retry_for,
            compression: self.sending.compression(),
            rate: self.sending.rate(context),
            clock: Arc::clone(context.clock()),
            randomness: &SystemRandomness,
            program: program(),
            observer,
        }
    }

    fn move_shut_off(
        &self,
        plan: &MigrationPlan,
        connections: &Connections,
        other: &OtherHost,
        context: &Context,
    ) -> Result<MigrationReport, Error> {
        let observer = ShownMove::new(plan, context);
        let tools = self.common_tools(connections, other, &observer, context);
        let moved = context.work(1, |job| Ok(migrate_shut_off(plan, &tools, job)))?;
        moved.map_err(migration_error)
    }

    /// The disks whose writes are recorded: those that are copied.
    fn tracked_disks(&self, plan: &MigrationPlan, machine: &dyn Machine) -> Result<DiskChoice, Error> {
        if self.running.post_copy {
            let description = machine.describe().map_err(holdfast_engine::Error::from)?;
            return Ok(DiskChoice {
                include: Vec::new(),
                exclude: description.disks.into_iter().map(|disk| disk.target).collect(),
            });
        }
        Ok(DiskChoice {
            include: plan.disks.iter().map(|disk| disk.target.clone()).collect(),
            exclude: Vec::new(),
        })
    }

    fn move_running(
        &self,
        plan: &MigrationPlan,
        run: u32,
        connections: &Connections,
        other: &OtherHost,
        context: &Context,
    ) -> Result<MigrationReport, Error> {
        let way = connections.way_to(&plan.machine);
        let journal = runs::journal(context, &way);
        let watchdog = runs::watchdog(way, run, journal.as_ref())?;
        let (tracked_machine, watched) = (connections.tracked(&plan.uuid)?, connections.watched(&plan.uuid)?);
        let request = TrackRequest {
            machine: &*tracked_machine,
            run,
            choice: self.tracked_disks(plan, &*watched)?,
            runtime: context.runtime_folder(),
            journal,
            patience: Duration::ZERO,
            watchdog: Some(watchdog),
            quiesce: Quiesce::Off,
            pause_max: self.running.frozen_max() * 2 + GUARD_TIME,
            processes: &SystemProcesses,
            now: &time::now,
        };
        let sockets = RuntimeFolder::make(&context.runtime_folder())?;
        let observer = ShownMove::new(plan, context);
        let moved = context.work(1, |job: Job<'_>| {
            let tracked = TrackedMachine::begin(request, job)?;
            let tools = RunningTools {
                common: self.common_tools(connections, other, &observer, context),
                hypervisor: &*connections.moving,
                watched: &*watched,
                tracked: &tracked,
                forward: &*other.forward,
                folder: sockets.path().to_owned(),
                relay_socket: connections.relay_socket(run, sockets.path()),
                memory_socket: connections.memory_socket(run),
                frozen_max: self.running.frozen_max(),
                attempt_count_max: ATTEMPT_COUNT_MAX,
                throttle: self.throttle_policy(),
            };
            let moved = migrate_running(plan, &tools, job);
            tracked.end()?;
            Ok(moved)
        })?;
        moved.map_err(migration_error)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::path::PathBuf;

    use super::parse_seeds;

    #[test]
    fn seeds_name_a_disk_and_an_absolute_path() {
        let parse = |words: &[&str]| parse_seeds(&words.iter().map(OsString::from).collect::<Vec<_>>());
        let seeds = parse(&["vda=/srv/a=b.raw", "sdb=/dev/vg/old"]).unwrap();
        let pairs: Vec<(&str, PathBuf)> = seeds.iter().map(|(disk, path)| (&disk[..], path.clone())).collect();
        assert_eq!(pairs, [("sdb", "/dev/vg/old".into()), ("vda", "/srv/a=b.raw".into())]);
        for wrong in [
            &["/srv/a.raw"] as &[&str],
            &["vda=a.raw"],
            &["=/srv/a.raw"],
            &["vda=/a", "vda=/b"],
        ] {
            parse(wrong).unwrap_err();
        }
    }
}
