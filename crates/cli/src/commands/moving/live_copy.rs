//! `holdfast live-copy`: copies a disk while it is used.

pub(super) mod events;
mod of_export;
mod of_machine;
mod of_snapshot;
mod of_used_disk;
mod report;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{BlockDevice, ExtentKind, for_each_extent};
use holdfast_engine::{ContainerHold, ContainerPlace, HoldContainerRequest, Job, SnapshotState, container_state};
use holdfast_image::{CONTAINER_FILE, Format, OpenOptions};
use holdfast_live_copy::{
    ConvergenceOptions, CopyPurpose, DiskId, ExistingTarget, FreezeTrigger, InterruptedCopy, LiveCopyReport,
    LiveCopyRequest, LiveSource, PriorContent, ReceiveRequest, SessionId, SourceConsistency, StillSource,
    ThrottlePolicy, Unconverged, UnitLayout, copy_live, session_of,
};
use holdfast_repo::key::SystemRandomness;
use holdfast_repo::{Processes as _, SystemProcesses};

use super::copy_advice::copy_error;
use super::copy_target::{CopyTarget, ExportAddress};
use super::far::{SendingArgs, program};
use crate::args::{Example, parse_format};
use crate::commands::images::container::freeze_args::{FreezeArgs, warn_of_freeze};
use crate::commands::images::container::now_s;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::machines::runs::note_places;
use events::{RoundDisplay, ShownEvents};
use of_machine::{MachineSourceArgs, machine_of};
use report::{CopiedFrom, LiveCopied, LiveCopyPlanned};

/// Attempts to freeze within the limit.
const ATTEMPT_COUNT_MAX: u32 = 5;
/// How long a source may be frozen unless the user says otherwise.
const FROZEN_MAX_DEFAULT: Duration = Duration::from_secs(10);
/// Beyond the limit of the frozen time, another process thaws.
const GUARD_TIME: Duration = Duration::from_secs(2);

/// Arguments of `live-copy`.
#[derive(Debug, clap::Args)]
pub(crate) struct LiveCopyArgs {
    /// An image, a raw disk, a block device, an export (nbd://HOST/EXPORT), the folder of a container, or a machine; with
    /// --snapshot a snapshot of a repository (ID, MACHINE, MACHINE@TIME), with :DISK one of its disks
    #[arg(value_name = "SOURCE")]
    source: OsString,
    /// A new file or a block device, on this host or on another one that has holdfast; or an export (nbd://HOST/EXPORT,
    /// nbd+unix:///EXPORT?socket=PATH)
    #[arg(value_name = "PATH|ssh://[USER@]HOST/PATH|nbd://HOST/EXPORT")]
    target: OsString,
    /// Copy a disk of a snapshot of a repository
    #[arg(long)]
    snapshot: bool,
    /// The format of the source (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels), instead of detecting it
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// The format of a new file (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels) [default: by its name]
    #[arg(long = "to", value_name = "FORMAT", value_parser = parse_format)]
    target_format: Option<Format>,
    #[command(flatten)]
    freezing: FreezingArgs,
    #[command(flatten)]
    container_freeze: FreezeArgs,
    #[command(flatten)]
    existing: ExistingArgs,
    /// An image with similar content, on the host of the target: only the differences are sent; may be the target itself
    #[arg(long, value_name = "PATH")]
    seed: Option<PathBuf>,
    /// Try for this long to connect again after a connection was lost
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_time)]
    retry_for: Duration,
    #[command(flatten)]
    sending: SendingArgs,
    /// A command whose standard input and output reach 'holdfast receive-disk 1' on the other host, instead of ssh; PATH is
    /// a path there
    #[arg(long, value_name = "COMMAND", conflicts_with = "ssh_option")]
    connect_command: Option<String>,
    /// Open the source, and show what would be copied; write nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    machine: MachineSourceArgs,
}

/// What happens to what exists at the target.
#[derive(Debug, clap::Args)]
struct ExistingArgs {
    /// Replace a file that exists, when the copy is complete; overwrite a block device or an export
    #[arg(long)]
    force: bool,
    /// Delete an interrupted copy to the same target instead of continuing it
    #[arg(long)]
    restart: bool,
}

/// How a source that is written is frozen.
#[derive(Debug, clap::Args)]
struct FreezingArgs {
    /// The command that freezes what writes to the source: 'fsfreeze --freeze /srv'
    #[arg(long, value_name = "COMMAND", requires = "thaw_command")]
    freeze_command: Option<String>,
    /// The command that thaws it, which is called in any case
    #[arg(long, value_name = "COMMAND", requires = "freeze_command")]
    thaw_command: Option<String>,
    /// Thaw a source that is frozen for longer, and try again later [default: 10s; 500ms for a machine]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    max_frozen: Option<Duration>,
}

impl FreezingArgs {
    fn max_frozen(&self, default: Duration) -> Duration {
        self.max_frozen.unwrap_or(default)
    }
}

impl Verb for LiveCopyArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Copy an image to another host; if the connection breaks, it continues",
            line: "holdfast live-copy web1.qcow2 ssh://root@backup/srv/copies/web1.raw",
        },
        Example {
            wish: "Copy it again the next day, and send only what differs",
            line: "holdfast live-copy web1.qcow2 ssh://root@backup/srv/copies/web1.raw --seed /srv/copies/web1.raw --force",
        },
        Example {
            wish: "Copy it to an export of an NBD server, which is overwritten",
            line: "holdfast live-copy web1.qcow2 nbd://storage:10809/web1 --force",
        },
        Example {
            wish: "Copy it to a host that is reached by TLS, without ssh",
            line: "holdfast live-copy web1.qcow2 /srv/copies/web1.raw --connect-command 'socat - OPENSSL:backup:7070,cert=/etc/holdfast/web.pem,cafile=/etc/holdfast/ca.pem'",
        },
        Example {
            wish: "Copy a container that is used, as it is now",
            line: "holdfast live-copy /srv/web1 ssh://root@backup/srv/copies/web1.raw",
        },
        Example {
            wish: "Bring a disk back from a repository, to another host",
            line: "holdfast live-copy -r /backup/vms --snapshot web1@2026-11-20:vda ssh://root@host2/srv/vm/web1.raw",
        },
        Example {
            wish: "Copy a disk of a machine that runs, which is paused for 200 ms at most",
            line: "holdfast live-copy web1 /backup/web1.raw --disk vda --max-frozen 200ms",
        },
        Example {
            wish: "Copy a volume while its file system is used, which is frozen at the end",
            line: "holdfast live-copy /dev/vg/srv /backup/srv.raw --freeze-command 'fsfreeze --freeze /srv' --thaw-command 'fsfreeze --unfreeze /srv'",
        },
        Example {
            wish: "The same, if the file system may be frozen for two seconds at most",
            line: "holdfast live-copy /dev/vg/srv /backup/srv.raw --freeze-command 'fsfreeze --freeze /srv' --thaw-command 'fsfreeze --unfreeze /srv' --max-frozen 2s",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let target = match &self.connect_command {
            Some(command) => CopyTarget::behind_command(&self.target, self.target_format, command)?,
            None => CopyTarget::parse(&self.target, self.target_format)?,
        };
        let machine = if self.snapshot { None } else { machine_of(&self.source) };
        if let Some(word) = machine {
            return self.copy_machine(word, &target, context);
        }
        if let Some(option) = self.machine.given() {
            return Err(Error::usage(
                format!(
                    "{option} applies to machines only, and {} is none",
                    self.source.display()
                ),
                "remove the option; libvirt:NAME is a machine in any case",
            ));
        }
        if self.snapshot {
            return self.copy_snapshot(&target, context);
        }
        if let Some(export) = ExportAddress::of(&self.source)? {
            return self.copy_export(&export, &target, context);
        }
        let source = Path::new(&self.source);
        let path = source.canonicalize().map_err(|error| Error::File {
            action: "find",
            path: source.to_owned(),
            source: error,
        })?;
        let target_path = target.local_path().and_then(|target| target.canonicalize().ok());
        if target_path.is_some_and(|found| found == path) {
            return Err(Error::usage("the target is the source", "name another file"));
        }
        match (&self.freezing.freeze_command, &self.freezing.thaw_command) {
            _ if path.is_dir() => self.copy_container(&path, &target, context),
            (Some(freeze), Some(thaw)) => self.copy_used_disk([freeze, thaw], &path, &target, context),
            _ => self.copy_at_rest(&path, &target, context),
        }
    }
}

impl LiveCopyArgs {
    /// Copies an image that is locked against writers.
    fn copy_at_rest(&self, path: &Path, target: &CopyTarget, context: &Context) -> Result<Exit, Error> {
        let options = OpenOptions {
            format: self.format,
            ..OpenOptions::default()
        };
        let image = holdfast_image::open_at_rest(path, &options).map_err(|error| {
            let is_locked = matches!(error, holdfast_image::Error::Locked { .. });
            let error = Error::from(holdfast_engine::Error::from(error));
            if is_locked {
                let hint =
                    "unmount it or shut the program down, or freeze it during the last pass with --freeze-command and --thaw-command";
                return Error::refused(Kind::Locked, holdfast_block::error_text(&error), hint);
            }
            error
        })?;
        self.copy(
            &StillSource::new(&image),
            target,
            &NamedSource::of_path(path),
            CopiedFrom::AtRest,
            context,
        )
    }

    /// Copies the disk of a container as it is now. A snapshot holds it meanwhile.
    fn copy_container(&self, path: &Path, target: &CopyTarget, context: &Context) -> Result<Exit, Error> {
        if self.format.is_some() || self.freezing.freeze_command.is_some() {
            return Err(Error::usage(
                "--format and --freeze-command do not apply to a container, whose file system is frozen without a command",
                "remove the option",
            ));
        }
        let place = ContainerPlace::find(path, &context.runtime_folder())?;
        let here = SystemProcesses.this();
        let request = HoldContainerRequest {
            place: &place,
            comment: format!("for a copy to {target}"),
            consistency: self.container_freeze.consistency(),
            now_s: now_s(),
            process: &here,
        };
        if self.dry_run {
            let state = container_state(&place)?;
            return context.report(&LiveCopyPlanned {
                dry_run: true,
                source: path.display().to_string(),
                target: target.to_string(),
                format: target.format.name(),
                size_bytes: state.chain.size_bytes,
                data_bytes: None,
                consistency: None,
            });
        }
        let in_container = place.folder.join(CONTAINER_FILE);
        let _noted = note_places([in_container.as_path()], context);
        let held = context.work(1, |job| ContainerHold::hold(&request, job))?;
        warn_of_freeze(held.taken(), context);
        let consistency = match held.taken().state {
            SnapshotState::Unmounted => SourceConsistency::AtRest,
            SnapshotState::Frozen => SourceConsistency::FileSystem,
            SnapshotState::Crash => SourceConsistency::Crash,
        };
        let source = StillSource::as_of(held.device(), consistency);
        let waited = Duration::from_micros(held.taken().paused_us);
        let copied = self.copy(
            &source,
            target,
            &NamedSource::of_path(path),
            CopiedFrom::Snapshot { waited },
            context,
        );
        context.work(1, |job| {
            held.release(job);
            Ok(())
        })?;
        copied
    }

    fn copy(
        &self,
        source: &dyn LiveSource,
        target: &CopyTarget,
        name: &NamedSource,
        from: CopiedFrom,
        context: &Context,
    ) -> Result<Exit, Error> {
        if self.dry_run {
            return context.report(&LiveCopyPlanned {
                dry_run: true,
                source: name.shown.clone(),
                target: target.to_string(),
                format: target.format.name(),
                size_bytes: layout_of(source.device(), PriorContent::of_seed(self.seed.as_ref()))?.size_bytes(),
                data_bytes: Some(data_bytes(source.device())?),
                consistency: Some(source.consistency().word()),
            });
        }
        let prepared = PreparedCopy {
            source,
            target,
            identity: &[&name.identity],
            frozen_max: self.freezing.max_frozen(FROZEN_MAX_DEFAULT),
            rounds: match from {
                CopiedFrom::Frozen => RoundDisplay::Shown,
                CopiedFrom::AtRest | CopiedFrom::Unlocked | CopiedFrom::Snapshot { .. } => RoundDisplay::Hidden,
            },
        };
        let report = context.work(1, |job| Ok(self.run_copy(&prepared, context, job)))??;
        context.report(&LiveCopied::new(
            &name.shown,
            target,
            &report,
            source.consistency(),
            from,
        ))
    }

    fn run_copy(&self, prepared: &PreparedCopy<'_>, context: &Context, job: Job<'_>) -> Result<LiveCopyReport, Error> {
        let PreparedCopy { source, target, .. } = *prepared;
        // Before the other host is connected.
        let seed = self.seed.as_deref().map(|path| target.seed(path)).transpose()?;
        let layout = layout_of(source.device(), PriorContent::of_seed(self.seed.as_ref()))?;
        let request = LiveCopyRequest {
            source,
            layout,
            connector: target.connector(&self.sending.ssh_option, context)?,
            receive: ReceiveRequest {
                target: target.path(),
                size_bytes: layout.size_bytes(),
                expected_bytes: data_bytes(source.device())?,
                existing: if self.existing.force {
                    ExistingTarget::Replace
                } else {
                    ExistingTarget::Refuse
                },
                interrupted: if self.existing.restart {
                    InterruptedCopy::Delete
                } else {
                    InterruptedCopy::Continue
                },
                seed,
                format: (target.format != Format::Raw).then(|| target.format.name().to_owned()),
            },
            session: session(prepared.identity, target),
            disk: DiskId([0; 16]),
            convergence: ConvergenceOptions {
                frozen_max: prepared.frozen_max,
                other_frozen: Duration::ZERO,
                throttle: if self.machine.may_throttle() {
                    ThrottlePolicy::IfNeeded
                } else {
                    ThrottlePolicy::Never
                },
                unconverged: Unconverged::GiveUp,
            },
            purpose: CopyPurpose::Duplicate,
            trigger: FreezeTrigger::WhenReady,
            compression: self.sending.compression(),
            rate: self.sending.rate(context),
            attempt_count_max: ATTEMPT_COUNT_MAX,
            retry_time: self.retry_for,
            clock: Arc::clone(context.clock()),
            randomness: &SystemRandomness,
            program: program(),
            director: None,
            observer: &ShownEvents {
                console: context.console(),
                rounds: prepared.rounds,
            },
        };
        copy_live(&request, job).map_err(copy_error)
    }
}

/// How a source is called.
struct NamedSource {
    /// For people.
    shown: String,
    /// What identifies it on this host, so that an interrupted copy is continued.
    identity: Vec<u8>,
}

impl NamedSource {
    fn of_path(path: &Path) -> Self {
        Self {
            shown: path.display().to_string(),
            identity: path.as_os_str().as_encoded_bytes().to_vec(),
        }
    }
}

/// A source that is ready to be copied.
struct PreparedCopy<'a> {
    source: &'a dyn LiveSource,
    target: &'a CopyTarget,
    /// What identifies the source on this host.
    identity: &'a [&'a [u8]],
    frozen_max: Duration,
    rounds: RoundDisplay,
}

fn layout_of(device: &dyn BlockDevice, prior: PriorContent) -> Result<UnitLayout, Error> {
    UnitLayout::of_copy(device.size_bytes(), prior).map_err(|_| {
        Error::refused(
            Kind::Unsupported,
            format!("a disk of {} bytes cannot be copied", device.size_bytes()),
            "a disk has 1 byte to 32 TiB",
        )
    })
}

/// Bytes that the source reports as data.
fn data_bytes(device: &dyn BlockDevice) -> Result<u64, Error> {
    let mut bytes = 0;
    for_each_extent(device, 0..device.size_bytes(), |extent| {
        if extent.kind == ExtentKind::Data {
            bytes += extent.length;
        }
        Ok(())
    })?;
    Ok(bytes)
}

/// The same for each attempt to copy this disk to this target.
fn session(identity: &[&[u8]], target: &CopyTarget) -> SessionId {
    let host = std::fs::read("/etc/machine-id").unwrap_or_default();
    let target = target.identity();
    let facts = [&[&host[..]], identity, &[target.as_bytes()]].concat();
    session_of(&facts)
}

/// Parses `500ms`, `10s`, `5m`, `1h`.
pub(super) fn parse_time(text: &str) -> Result<Duration, String> {
    let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];
    let parsed = units.iter().find_map(|(unit, factor)| {
        let number: u64 = text.strip_suffix(unit)?.trim_end().parse().ok()?;
        number.checked_mul(*factor)
    });
    let milliseconds = parsed.ok_or_else(|| "it is not a time: write 500ms, 10s, 5m or 1h".to_owned())?;
    Ok(Duration::from_millis(milliseconds))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::parse_time;

    #[test]
    fn times_have_a_unit() {
        for (text, milliseconds) in [("500ms", 500), ("10s", 10_000), ("5m", 300_000), ("1h", 3_600_000)] {
            assert_eq!(parse_time(text), Ok(Duration::from_millis(milliseconds)));
        }
        for wrong in [
            "",
            "10",
            "s",
            "-1s",
            "1d",
            "99999999999999999999s",
            "18446744073709551615h",
        ] {
            parse_time(wrong).unwrap_err();
        }
    }
}
