//! `holdfast migrate` of a container.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::error_text;
use holdfast_engine::{ContainerPlace, DiskTransport, Relocation};
use holdfast_host::{LineProcess, StreamTools, shell_line};
use holdfast_live_copy::{CommandFreezer, Connector, CopyWarning, ProgramConnector};
use holdfast_migration::{
    ContainerMove, ContainerMoveObserver, ContainerMoveTools, ContainerPhase, ContainerPlan, ContainerPlanRequest,
    ContainerRound, Error as MigrationError, FarContainers, FormerDisks, MountTarget, MountThere, SocketHost,
    migrate_container, plan_container,
};
use holdfast_repo::key::SystemRandomness;
use holdfast_repo::{Processes as _, SystemProcesses};

use super::super::copy_advice::copy_error;
use super::super::far::{MoveRoute, MoveTarget, program};
use super::super::live_copy::events::warning_text;
use super::super::receive_container::{arrival_tools, mount_arrived};
use super::MigrateArgs;
use super::advice::migration_error;
use super::container_report::{ContainerMigrated, ContainerMigrationPlanned};
use super::other_host::{command_host, stop_with_input};
use super::undo::{KeptReport, ReturnPath, Returned};
use crate::commands::images::container::now_s;
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::output::Console;
use crate::units;

/// How long programs may be stopped unless the user says otherwise.
const FROZEN_MAX_DEFAULT: Duration = Duration::from_secs(60);
/// How long a command that stops or starts programs may take.
const COMMAND_TIME_MAX: Duration = Duration::from_secs(600);
/// The programs are started here again by another process after twice `--max-frozen` and this time: the answer of the other
/// host is waited for, for a minute.
const GUARD_TIME: Duration = Duration::from_secs(180);

/// Options for a container.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options for a container")]
pub(super) struct ContainerMoveArgs {
    /// The command that stops what uses the container where it is, before it is unmounted: 'systemctl stop web1'
    #[arg(long, value_name = "COMMAND")]
    stop_command: Option<String>,
    /// The command that starts it at its destination; or where it was, if the migration fails after it was stopped
    #[arg(long, value_name = "COMMAND")]
    start_command: Option<String>,
    /// Mount it at its destination on this folder [default: the one on which it is mounted now, if it is]
    #[arg(long, value_name = "FOLDER")]
    mount_on: Option<PathBuf>,
}

impl ContainerMoveArgs {
    /// The first option that was given.
    pub(super) fn given(&self) -> Option<&'static str> {
        let given = [
            (self.stop_command.is_some(), "--stop-command"),
            (self.start_command.is_some(), "--start-command"),
            (self.mount_on.is_some(), "--mount-on"),
        ];
        given.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name)
    }

    /// The words that pass the options on to the other host, which migrates the container back.
    pub(super) fn words_for_return(&self) -> Vec<String> {
        let options = [
            ("--stop-command", self.stop_command.clone()),
            ("--start-command", self.start_command.clone()),
            (
                "--mount-on",
                self.mount_on.as_ref().map(|path| path.display().to_string()),
            ),
        ];
        let given = options
            .into_iter()
            .filter_map(|(name, value)| Some([name.to_owned(), value?]));
        given.flatten().collect()
    }
}

/// The host to which a container moves.
struct ContainerHost {
    far: FarContainers,
    reach_again: Box<dyn Fn() -> Result<FarContainers, MigrationError> + Sync>,
    connector: Arc<dyn Connector>,
}

impl ContainerHost {
    fn reach(target: &MoveTarget, args: &MigrateArgs, context: &Context) -> Result<Self, Error> {
        match &target.route {
            MoveRoute::Ssh(host) => {
                let ssh = Arc::new(host.connect(&args.sending.ssh_option, context)?);
                let started_by = Arc::clone(&ssh);
                let start = move || FarContainers::start(&*started_by);
                let streams: Arc<dyn StreamTools> = ssh;
                let clock = Arc::clone(context.clock());
                Ok(Self {
                    far: start().map_err(container_error)?,
                    reach_again: Box::new(start),
                    connector: Arc::new(ProgramConnector::new(streams, "holdfast".to_owned(), clock)),
                })
            }
            MoveRoute::Command(command) => {
                let host = command_host(command, context);
                let connector = host.connector().map_err(container_error)?;
                Ok(Self {
                    far: FarContainers::of_command(&host).map_err(container_error)?,
                    reach_again: Box::new(move || FarContainers::of_command(&host)),
                    connector: Arc::new(connector),
                })
            }
            MoveRoute::Socket { name, path } => {
                stop_with_input();
                let host = SocketHost::new(path.clone(), name.clone());
                let connector = host.connector();
                Ok(Self {
                    far: FarContainers::of_socket(&host).map_err(container_error)?,
                    reach_again: Box::new(move || FarContainers::of_socket(&host)),
                    connector: Arc::new(connector),
                })
            }
        }
    }
}

impl MigrateArgs {
    /// Migrates the container at `folder`.
    pub(super) fn move_container(&self, folder: &Path, target: &MoveTarget, context: &Context) -> Result<Exit, Error> {
        if let Some(option) = self.option_of_machines() {
            return Err(option_of_machines(option, folder));
        }
        let place = ContainerPlace::find(folder, &context.runtime_folder())?;
        let host = ContainerHost::reach(target, self, context)?;
        let folder_there = folder_there(&place, target, &host)?;
        let address = target.address_of(&folder_there);
        let plan = plan_container(&ContainerPlanRequest {
            place: &place,
            far: &host.far,
            folder: &folder_there,
            address: address.clone(),
            mount: self
                .container
                .mount_on
                .clone()
                .map_or(MountThere::AsHere, MountThere::On),
        })
        .map_err(container_error)?;
        if self.container.stop_command.is_some() && plan.mounted.is_none() {
            return Err(Error::usage(
                format!(
                    "{} is not mounted here, so there is nothing to stop",
                    place.folder.display()
                ),
                "remove the option --stop-command",
            ));
        }
        if self.dry_run {
            return context.report(&ContainerMigrationPlanned::new(&place, &plan));
        }
        for note in &plan.notes {
            context.console().note(note);
        }
        let report = self.run_container_move(&place, &plan, &host, context)?;
        match target.route {
            MoveRoute::Ssh(_) | MoveRoute::Command(_) => context.report(&report),
            MoveRoute::Socket { .. } => {
                let document = serde_json::to_value(&report).map_err(Error::Json)?;
                match host.far.send_report(document) {
                    Ok(()) => Ok(Exit::Ok.with_warning_count(context.console().warnings().len())),
                    // The container is there.
                    Err(_) => context.report(&report),
                }
            }
        }
    }

    /// Lets the host of `target` migrate the container back to `folder`.
    pub(super) fn bring_container_back(
        &self,
        folder: &Path,
        target: &MoveTarget,
        context: &Context,
    ) -> Result<Exit, Error> {
        if let Some(option) = self.option_of_machines() {
            return Err(option_of_machines(option, folder));
        }
        let place = ContainerPlace::find(folder, &context.runtime_folder())?;
        let Some(relocation) = Relocation::of(&place)? else {
            return Err(Error::refused(
                Kind::Refused,
                format!("{} was not migrated to another host", place.folder.display()),
                "--undo brings a container back that is at the other host",
            ));
        };
        let there = MoveTarget::folder_of_address(&relocation.target);
        let there = there.unwrap_or_else(|| place.folder.clone());
        let report = KeptReport::default();
        let note = |document| report.note(document);
        let mount = |place: &ContainerPlace, point: &Path, transport| mount_arrived(place, point, transport, context);
        let parent = place.folder.parent().unwrap_or(Path::new("/")).to_owned();
        let requests = arrival_tools(context, Some(parent), &note, &mount);
        let subject = format!("container:{}", there.display());
        let path = ReturnPath {
            subject: &subject,
            options: self.container.words_for_return(),
            requests: &requests,
        };
        let end = self.let_return(&path, target, context)?;
        match end.returned::<ContainerMigrated>(&report, &self.machine, target, context)? {
            Returned::Back { report, exit } => {
                let shown = context.report(&*report)?;
                Ok(shown.with_warning_count(usize::from(exit == Exit::Warnings)))
            }
            Returned::Shown(exit) => Ok(exit),
        }
    }

    fn run_container_move(
        &self,
        place: &ContainerPlace,
        plan: &ContainerPlan,
        host: &ContainerHost,
        context: &Context,
    ) -> Result<ContainerMigrated, Error> {
        let frozen_max = self.running.max_frozen.unwrap_or(FROZEN_MAX_DEFAULT);
        let stopper = match &plan.mounted {
            Some(mounted) => Some(self.stopper(place, mounted, frozen_max)?),
            None => None,
        };
        let observer = ShownContainerMove {
            console: context.console(),
        };
        let here = SystemProcesses.this();
        let request = ContainerMove {
            place,
            plan,
            start_command: self.container.start_command.as_deref(),
            frozen_max,
            former: if self.delete_former {
                FormerDisks::Delete
            } else {
                FormerDisks::Keep
            },
            now_s: now_s(),
            process: &here,
        };
        let tools = ContainerMoveTools {
            far: &host.far,
            reach_far_again: &*host.reach_again,
            connector: Arc::clone(&host.connector),
            stopper: stopper.as_ref(),
            retry_time: self.retry_for,
            compression: self.sending.compression(),
            rate: self.sending.rate(context),
            clock: Arc::clone(context.clock()),
            randomness: &SystemRandomness,
            program: program(),
            processes: &SystemProcesses,
            observer: &observer,
        };
        let moved = context.work(1, |job| Ok(migrate_container(&request, &tools, job)))?;
        let report = moved.map_err(container_error)?;
        Ok(ContainerMigrated::new(place, plan, &report))
    }

    /// Another process that stops what uses the container, and starts it again if this one is killed.
    fn stopper(
        &self,
        place: &ContainerPlace,
        mounted: &MountTarget,
        frozen_max: Duration,
    ) -> Result<CommandFreezer, Error> {
        let failed = |source| Error::File {
            action: "start",
            path: "/proc/self/exe".into(),
            source,
        };
        let program = std::env::current_exe().map_err(failed)?;
        let [stop, start] = self.commands_here(&program, place, mounted)?;
        let thaw_after = frozen_max * 2 + GUARD_TIME;
        let launch = move || {
            let words: Vec<OsString> = vec![
                "freeze-commands".into(),
                stop.clone().into(),
                start.clone().into(),
                "--thaw-after".into(),
                thaw_after.as_millis().to_string().into(),
                "--command-time".into(),
                COMMAND_TIME_MAX.as_millis().to_string().into(),
            ];
            LineProcess::start(&program.clone().into(), &words)
        };
        CommandFreezer::start(Box::new(launch), COMMAND_TIME_MAX).map_err(failed)
    }

    /// The commands that stop what uses the container and unmount it, and that undo this.
    fn commands_here(
        &self,
        program: &Path,
        place: &ContainerPlace,
        mounted: &MountTarget,
    ) -> Result<[String; 2], Error> {
        let text = |path: &Path| {
            path.to_str()
                .map(str::to_owned)
                .ok_or_else(|| Error::usage(format!("{} is not UTF-8", path.display()), "rename the folder"))
        };
        let (program, folder, point) = (text(program)?, text(&place.folder)?, text(&mounted.point)?);
        let through = match mounted.transport {
            DiskTransport::Fuse => "fuse",
            DiskTransport::Nbd => "nbd",
        };
        let unmount = shell_line([&program[..], "container", "unmount", &folder]);
        let mount = shell_line([
            &program[..],
            "container",
            "mount",
            &folder,
            &point,
            "--through",
            through,
        ]);
        let is_mounted = shell_line(["mountpoint", "-q", &point]);
        let stop = match &self.container.stop_command {
            Some(command) => format!("{{ {command}\n}} && {unmount}"),
            None => unmount,
        };
        let mount = format!("{{ {is_mounted} || {mount}; }}");
        let start = match &self.container.start_command {
            Some(command) => format!("{mount} && {{ {command}\n}}"),
            None => mount,
        };
        Ok([stop, start])
    }
}

/// The folder of the container at the other host.
fn folder_there(place: &ContainerPlace, target: &MoveTarget, host: &ContainerHost) -> Result<PathBuf, Error> {
    let parent = match &target.folder {
        Some(folder) => folder.clone(),
        None => match host.far.folder().map_err(container_error)? {
            Some(folder) => folder,
            None => place.folder.parent().unwrap_or(Path::new("/")).to_owned(),
        },
    };
    let name = place
        .folder
        .file_name()
        .ok_or_else(|| Error::usage(format!("{} has no name", place.folder.display()), "name a folder"))?;
    Ok(parent.join(name))
}

fn option_of_machines(option: &str, folder: &Path) -> Error {
    Error::usage(
        format!("{option} applies to machines, and {} is a container", folder.display()),
        "remove the option",
    )
}

/// Prints what happens.
struct ShownContainerMove<'a> {
    console: &'a Console,
}

impl ContainerMoveObserver for ShownContainerMove<'_> {
    fn phase(&self, phase: ContainerPhase) {
        self.console.note(match phase {
            ContainerPhase::Layers => "copying the layers",
            ContainerPhase::Stop => "stopping what uses the container, and unmounting it",
            ContainerPhase::LastPass => "sending what was written last",
            ContainerPhase::Complete | ContainerPhase::Mount => "mounting it there",
            ContainerPhase::Start => "starting what uses it there",
        });
    }

    fn round(&self, round: &ContainerRound) {
        self.console.note(&format!(
            "{} sent in {}",
            units::bytes(round.sent_bytes),
            units::duration(round.duration)
        ));
    }

    fn copy_warning(&self, file: &str, warning: CopyWarning) {
        self.console.warning(&format!("{file}: {}", warning_text(warning)));
    }

    fn left(&self, reason: &str) {
        self.console.warning(reason);
    }
}

/// The advice on errors of the migration of a container.
fn container_error(error: MigrationError) -> Error {
    let text = error_text(&error);
    let refused = |kind, hint: &'static str| Error::refused(kind, text.clone(), hint);
    match error {
        MigrationError::Disk { source, .. } => copy_error(*source),
        MigrationError::FarHost { .. } => refused(
            Kind::Io,
            "install holdfast there, where ssh or the --connect-command finds it; the container is used here, and the same command \
             continues",
        ),
        MigrationError::Stop { .. } => refused(
            Kind::Locked,
            "--stop-command has to end all programs that use it: fuser -m FOLDER lists them; they run here again",
        ),
        MigrationError::FrozenTooLong { .. } | MigrationError::ContainerChangesTooFast { .. } => refused(
            Kind::Refused,
            "permit more time with --max-frozen, or migrate it when less is written; the same command continues",
        ),
        MigrationError::ContainerUnresolved { .. } => refused(
            Kind::Io,
            "it is used at neither host now; the same command continues when the other host answers. If that host is lost, \
             holdfast container mount --take-back uses the container here",
        ),
        MigrationError::Refused { .. } => refused(Kind::Io, "the container is used here, as before"),
        other => migration_error(other),
    }
}
