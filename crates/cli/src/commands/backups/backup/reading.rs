//! How a machine of a hypervisor is read: options of `backup` and of `export --now`.

use std::path::PathBuf;
use std::time::Duration;

use holdfast_engine::{CaptureOptions, MachineName, MachineReadRequest, Method};
use holdfast_host::DiskChoice;
use holdfast_host::qemu::memory::MemoryMethod;
use holdfast_repo::{Processes as _, SystemProcesses};

use super::hooks::{self, HookArgs};
use super::limits::LimitArgs;
use crate::context::Context;
use crate::errors::Error;
use crate::machines::datasets;
use crate::machines::guests::QuiesceWhen;
use crate::machines::runs;
use crate::machines::{Chosen, Found, Hypervisors};
use crate::process::time;

/// The longest time that a guest's write may wait until the old data is copied.
const WRITE_DEADLINE: Duration = Duration::from_secs(3);

/// Options about how a machine is read.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options for machines")]
pub(crate) struct ReadingArgs {
    /// The hypervisor's address: qemu:///system, qemu:///session, qemu+ssh://HOST/system
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
    /// Whether the guest agent freezes the machine's file systems during the snapshot
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = QuiesceWhen::Try)]
    pub(super) quiesce: QuiesceWhen,
    /// Folder on a local disk, with room, for old data of blocks that the machine overwrites during the backup
    #[arg(long, value_name = "FOLDER")]
    scratch: Option<PathBuf>,
    /// How to read the disks of a running machine [default: the best method that it offers]
    #[arg(long, value_enum, value_name = "HOW")]
    method: Option<MethodHow>,
    /// Wait this long for another backup of the machine to end; without it, the exit code is 4
    #[arg(long, value_name = "SECONDS")]
    wait: Option<u64>,
    #[command(flatten)]
    pub(super) limits: LimitArgs,
    #[command(flatten)]
    pub(super) hooks: HookArgs,
}

/// How the disks of a machine that runs are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum MethodHow {
    /// Through a filter in QEMU: leaves nothing behind, and the next backup reads only changes
    Filter,
    /// From reflink clones of the images (XFS, btrfs)
    Reflink,
    /// From the images, while the machine writes to overlays, which are committed afterwards
    Overlay,
    /// From the images, while the machine is paused
    Pause,
    /// From host snapshots (ZFS, btrfs, XFS, thin LVM); one stays until the next backup, which on btrfs and XFS then reads only changes
    Snapshot,
}

impl From<MethodHow> for Method {
    fn from(how: MethodHow) -> Self {
        match how {
            MethodHow::Filter => Self::Filter,
            MethodHow::Reflink => Self::Reflink,
            MethodHow::Overlay => Self::Overlay,
            MethodHow::Pause => Self::Pause,
            MethodHow::Snapshot => Self::Snapshot,
        }
    }
}

/// Options for reading a machine.
pub(crate) struct ReadingOptions<'a> {
    pub(crate) chosen: &'a Chosen,
    /// The name under which a machine is listed in the repository, given its name in the hypervisor.
    pub(crate) listed: &'a dyn Fn(&str) -> Result<MachineName, Error>,
    pub(crate) choice: DiskChoice,
    /// Files in other folders that images may use as backing files.
    pub(crate) allowed: Vec<PathBuf>,
    pub(crate) memory: Option<MemoryMethod>,
}

impl ReadingArgs {
    /// The hypervisors to search for machines.
    pub(crate) fn hypervisors<'c>(&self, context: &'c Context) -> Hypervisors<'c> {
        Hypervisors::new(self.connect.as_deref(), context)
    }

    /// Returns an error if options contradict each other.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.method == Some(MethodHow::Pause) && self.quiesce == QuiesceWhen::Require {
            return Err(Error::usage(
                "--method pause and --quiesce require do not go together: file systems that are frozen thaw by themselves after seconds",
                "remove one of them",
            ));
        }
        Ok(())
    }

    /// How long to wait for another backup of the same machine.
    pub(super) fn patience(&self) -> Duration {
        Duration::from_secs(self.wait.unwrap_or_default())
    }

    /// The first option that was given and applies to QEMU machines only.
    pub(super) fn only_of_qemu(&self) -> Option<&'static str> {
        let given = [
            (self.quiesce == QuiesceWhen::Require, "--quiesce require"),
            (self.scratch.is_some(), "--scratch"),
            (self.method.is_some(), "--method"),
        ];
        let first = given.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name);
        first.or_else(|| self.limits.of_guests())
    }

    /// The first option that was given and does not apply to containers.
    pub(super) fn not_of_containers(&self) -> Option<&'static str> {
        let given = [
            (self.scratch.is_some(), "--scratch"),
            (self.method.is_some(), "--method"),
        ];
        let first = given.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name);
        first.or_else(|| self.limits.of_guests())
    }

    /// The first option that was given, for error messages.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let given = [
            (self.connect.is_some(), "--connect"),
            (self.quiesce != QuiesceWhen::Try, "--quiesce"),
            (self.scratch.is_some(), "--scratch"),
            (self.method.is_some(), "--method"),
            (self.wait.is_some(), "--wait"),
        ];
        let first = given.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name);
        first.or_else(|| self.limits.given()).or_else(|| self.hooks.given())
    }

    /// Finds a machine; `work` reads it.
    pub(crate) fn read<T>(
        &self,
        wish: ReadingOptions<'_>,
        hypervisors: &Hypervisors<'_>,
        context: &Context,
        work: impl FnOnce(MachineReadRequest<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let Found {
            machine,
            way,
            address,
            hypervisor,
        } = hypervisors.find(wish.chosen)?;
        let overlays = match hypervisor {
            "libvirt" => Some(hypervisors.libvirt()? as _),
            _ => None,
        };
        let hooks = self.hooks.hooks(&address.to_string_lossy())?;
        let run = runs::new_run()?;
        let name = (wish.listed)(machine.name())?;
        let journal = runs::journal(context, &way);
        let mut watchdog = runs::watchdog(way, run, journal.as_ref())?;
        watchdog.extend(hooks::words(&hooks, &name, &*machine)?);
        let providers = datasets::providers(context);
        work(MachineReadRequest {
            machine: &*machine,
            capture: CaptureOptions {
                name,
                choice: wish.choice,
                allowed: wish.allowed,
                now: &time::now,
                host: SystemProcesses.this().host,
                program: crate::PROGRAM.to_owned(),
                journal,
                patience: self.patience(),
                hooks,
                run,
            },
            overlays,
            method: self.method.map(Method::from),
            providers: &providers,
            scratch: self.scratch.clone().unwrap_or_else(runs::scratch_folder),
            runtime: context.runtime_folder(),
            write_deadline: WRITE_DEADLINE,
            quiesce: self.quiesce.into(),
            memory: wish.memory,
            watchdog: Some(watchdog),
            processes: &SystemProcesses,
            limits: self.limits.limits(),
        })
    }
}
