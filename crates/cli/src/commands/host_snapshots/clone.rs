//! `holdfast clone`: creates machines from the present or a past state of another machine, and images from an image.

mod image;
mod names;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::{
    AfterRestore, CloneOptions, GuestIdentity, HostSnapshotReport, Job, MachineName, OwnGuest, Refusal, SYSPREP,
    SourceName,
};
use holdfast_host::{Hypervisor as _, LocalTools};
use holdfast_image::is_container;
use serde::Serialize;

use crate::args::{Example, JobArgs, SharedOptions, Switch as _};
use crate::commands::backups::restore::done::MachineRestored;
use crate::commands::host_snapshots::point::{OpenPoint, PointArgs, When, split};
use crate::commands::host_snapshots::rollback::tell;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::search_path;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::guests::{GuestDocument, MemoryHow, QuiesceWhen};
use crate::machines::no_image;
use crate::output::{Page, Report};
use crate::units;
use image::{ImageCloneArgs, ImageCloneDocument, Sysprep};
use names::NameArgs;

/// virt-sysprep boots a small virtual machine, which takes minutes without hardware virtualization.
pub(crate) const SYSPREP_TIME_OUT: Duration = Duration::from_secs(30 * 60);

/// The path of virt-sysprep; only its name if it is not installed.
pub(crate) fn sysprep_program(context: &Context) -> PathBuf {
    search_path::find(SYSPREP, context).unwrap_or_else(|| SYSPREP.into())
}

/// Arguments of `clone`.
#[derive(Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(crate) struct CloneArgs {
    /// A machine (web1), a machine in host snapshots (web1@before-update, web1@latest), or an image file
    #[arg(value_name = "MACHINE[@SNAPSHOT]|IMAGE")]
    of: OsString,
    #[command(flatten)]
    point: PointArgs,
    #[command(flatten)]
    names: NameArgs,
    #[command(flatten)]
    image: ImageCloneArgs,
    /// Folder for the images [default: beside the originals, or in a clone of their dataset]
    #[arg(long, value_name = "FOLDER")]
    storage: Option<PathBuf>,
    /// Start the new machine
    #[arg(long)]
    start: bool,
    /// Resume it from the saved memory, with its network cards unplugged (needs --with-memory snapshots, or a running machine)
    #[arg(long, conflicts_with = "start")]
    resume: bool,
    /// For a machine as it is now: whether the guest agent freezes its file systems during the snapshot [default: try]
    #[arg(long, value_enum, value_name = "WHEN")]
    quiesce: Option<QuiesceWhen>,
    /// Run virt-sysprep: new machine id, SSH host keys and the like, and a host name like the machine or image
    #[arg(long, conflicts_with = "resume")]
    sysprep: bool,
    /// Show what would be made; make nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    job: JobArgs,
}

impl Verb for CloneArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Try an update on a clone, which is made at once and uses no space at first",
            line: "holdfast clone web1 web1-trial --start",
        },
        Example {
            wish: "See where its disks would be",
            line: "holdfast clone web1@before-update web1-old --dry-run",
        },
        Example {
            wish: "Make twenty clones of a disk, which use no space until they are written to",
            line: "holdfast clone debian.qcow2 --count 20 --name-template 'lab/web{n:02}.qcow2'",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `clone`.
#[derive(Debug, Serialize)]
struct Clones {
    dry_run: bool,
    /// Host snapshots created for the clones; null if existing ones were used.
    instant: Option<CloneInstantDocument>,
    machines: Vec<MachineClone>,
    images: Vec<ImageCloneDocument>,
    duration_ms: u64,
}

/// The host snapshots of a machine's present state, from which clones are made.
#[derive(Debug, Serialize)]
struct CloneInstantDocument {
    /// The machine.
    of: String,
    /// Names of the clones.
    clones: Vec<String>,
    /// The time of the host snapshots; null with --dry-run.
    time: Option<String>,
    /// The datasets of the host snapshots.
    datasets: Vec<String>,
    /// The time that the providers took; null with --dry-run.
    cut_us: Option<u64>,
    /// How the machine was frozen or paused; null with --dry-run.
    machine: Option<GuestDocument>,
}

/// A cloned machine.
#[derive(Debug, Serialize)]
struct MachineClone {
    /// The name of the point in time.
    point: String,
    /// The host snapshots of the disks.
    snapshots: Vec<String>,
    /// Datasets that were or would be cloned.
    datasets: Vec<String>,
    restore: MachineRestored,
}

impl Report for Clones {
    fn command(&self) -> &'static str {
        "clone"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        if let Some(instant) = &self.instant {
            instant.human(page);
        }
        for machine in &self.machines {
            machine.human(self.dry_run, page);
        }
        for image in &self.images {
            if self.dry_run {
                image.human_planned(page);
            } else {
                image.human(page);
            }
        }
        let count = self.machines.len() + self.images.len();
        if count > 1 && !self.dry_run {
            let duration = units::duration(Duration::from_millis(self.duration_ms));
            page.line(&format!("{count} clones in {duration}"));
        }
    }
}

impl CloneInstantDocument {
    fn human(&self, page: &mut Page) {
        if let Some(machine) = &self.machine {
            page.line(&machine.line());
            return;
        }
        for dataset in &self.datasets {
            page.line(&format!(
                "would create a host snapshot of {dataset}, and remove it unless it is needed"
            ));
        }
        for clone in &self.clones {
            page.line(&format!(
                "  {} as of then would become the new machine {clone}",
                self.of
            ));
        }
    }
}

impl MachineClone {
    fn human(&self, dry_run: bool, page: &mut Page) {
        let verb = if dry_run { "would become" } else { "is" };
        let machine = self.restore.machine();
        let (name, uuid) = self.restore.target();
        page.line(&format!(
            "{machine} as of {} {verb} the new machine {name} ({uuid})",
            self.point
        ));
        for snapshot in &self.snapshots {
            page.line(&format!("  from {snapshot}"));
        }
        for dataset in &self.datasets {
            page.line(&format!("  its dataset: {dataset}"));
        }
        self.restore.body(page);
    }
}

fn run(args: &CloneArgs, context: &Context) -> Result<Exit, Error> {
    let names = args.names.all()?;
    let start = context.clock().now();
    let mut clones = Clones {
        dry_run: args.dry_run,
        instant: None,
        machines: Vec::new(),
        images: Vec::new(),
        duration_ms: 0,
    };
    // A Parallels disk is a folder.
    let is_image = |path: &&Path| path.is_file() || path.join("DiskDescriptor.xml").is_file();
    if let Some(file) = Some(Path::new(&args.of)).filter(is_image) {
        no_image::refuse(&args.of)?;
        clones.images = clone_images(args, file, &names, context)?;
    } else if is_container(Path::new(&args.of)) {
        return Err(Error::usage(
            format!(
                "{} is a container, which this command does not clone",
                args.of.display()
            ),
            "holdfast container clone CONTAINER NEW",
        ));
    } else if is_path(&args.of) {
        return Err(Error::from(holdfast_engine::Error::File {
            action: "open",
            path: PathBuf::from(&args.of),
            source: std::io::ErrorKind::NotFound.into(),
        }));
    } else {
        args.image.refuse()?;
        clone_machines(args, &names, context, &mut clones)?;
    }
    clones.duration_ms = units::millis(context.clock().now().saturating_sub(start));
    context.report(&clones)
}

/// Whether a word is a path rather than a machine name, even if no such file exists.
fn is_path(word: &OsStr) -> bool {
    let is_led_to = ["/", "./", "../"]
        .iter()
        .any(|start| word.as_bytes().starts_with(start.as_bytes()));
    is_led_to || SourceName::is_called_like_an_image(word)
}

fn clone_images(
    args: &CloneArgs,
    file: &Path,
    names: &[String],
    context: &Context,
) -> Result<Vec<ImageCloneDocument>, Error> {
    let of_machines = [
        ("--start", args.start),
        ("--resume", args.resume),
        ("--storage", args.storage.is_some()),
        ("--quiesce", args.quiesce.is_some()),
    ];
    if let Some((option, _)) = of_machines.iter().find(|(_, is_given)| *is_given) {
        return Err(Error::usage(
            format!("{option} is for machines, and {} is an image", file.display()),
            format!("leave {option} out"),
        ));
    }
    let sysprep = if args.sysprep { Sysprep::Yes } else { Sysprep::No };
    let execution = args.dry_run.execution();
    let threads = args.job.thread_count();
    args.image
        .clone_images(file, names, sysprep, execution, context, threads)
}

fn clone_machines(args: &CloneArgs, names: &[String], context: &Context, clones: &mut Clones) -> Result<(), Error> {
    let wishes = names
        .iter()
        .map(|name| {
            Ok(CloneOptions {
                name: MachineName::new(name.as_str())?,
                storage: args.storage.clone(),
                after: match (args.resume, args.start) {
                    (true, _) => AfterRestore::Resume,
                    (_, true) => AfterRestore::Start,
                    _ => AfterRestore::LeaveOff,
                },
            })
        })
        .collect::<Result<Vec<_>, Error>>()?;
    let text = args.of.to_string_lossy();
    let (machine, when) = match split(&text) {
        Some((machine, name)) if args.quiesce.is_none() => (machine, When::Then(name)),
        Some(_) => {
            return Err(Error::usage(
                format!("--quiesce is for machines as they are now, and {text} is of then"),
                "leave --quiesce out",
            ));
        }
        None => (text.into_owned(), args.now()?),
    };
    if let (When::Now { .. }, true) = (&when, args.dry_run) {
        let (wanted, guest) = args.point.planned_now(&machine, context)?;
        args.refuse_taken(names, context)?;
        clones.instant = Some(CloneInstantDocument {
            of: guest.description.summary.name,
            clones: names.to_vec(),
            time: None,
            datasets: wanted.iter().map(|one| one.dataset.to_string()).collect(),
            cut_us: None,
            machine: None,
        });
        return Ok(());
    }
    let (threads, execution) = (args.job.thread_count(), args.dry_run.execution());
    let made = args
        .point
        .open(&machine, when, context, threads, execution, |mut point, job| {
            let instant = point.made.map(|made| CloneInstantDocument::of(made, names));
            let mut warned = BTreeSet::new();
            let tools = LocalTools::new(Arc::clone(context.clock()), SYSPREP_TIME_OUT);
            let made = wishes.iter().map(|wish| {
                let guest = args.sysprep.then(|| OwnGuest {
                    identity: GuestIdentity {
                        host_name: Some(wish.name.to_string()),
                        program: sysprep_program(context),
                    },
                    tools: &tools,
                });
                make(args, wish, guest.as_ref(), &mut point, &mut warned, job)
            });
            Ok((instant, made.collect::<holdfast_engine::Result<_>>()?))
        })?;
    (clones.instant, clones.machines) = made;
    Ok(())
}

impl CloneArgs {
    /// Checks before any host snapshot is created: names of existing machines, a missing folder.
    fn refuse_taken(&self, names: &[String], context: &Context) -> Result<(), Error> {
        let hypervisors = self.point.hypervisors(context);
        let machines = hypervisors.libvirt()?.machines();
        let machines = machines.map_err(holdfast_engine::Error::from)?;
        let refuse = |refusal: Refusal| Err(Error::from(holdfast_engine::Error::from(refusal)));
        if let Some(there) = machines.iter().find(|machine| names.contains(&machine.name)) {
            return refuse(Refusal::MachineExists {
                name: there.name.clone(),
                uuid: there.uuid.clone(),
            });
        }
        match &self.storage {
            Some(folder) if !folder.is_dir() => refuse(Refusal::NoFolder { folder: folder.clone() }),
            _ => Ok(()),
        }
    }

    /// The present state of a machine.
    fn now(&self) -> Result<When, Error> {
        let quiesce = self.quiesce.unwrap_or(QuiesceWhen::Try);
        if self.resume && quiesce == QuiesceWhen::Require {
            return Err(Error::usage(
                "--resume and --quiesce require do not go together: memory holds what the file systems have not written yet",
                "remove one of them",
            ));
        }
        Ok(When::Now {
            quiesce,
            memory: self.resume.then_some(MemoryHow::Auto),
        })
    }
}

impl CloneInstantDocument {
    fn of(made: &HostSnapshotReport, names: &[String]) -> Self {
        Self {
            of: made.guests.first().map(|guest| guest.name.clone()).unwrap_or_default(),
            clones: names.to_vec(),
            time: Some(made.time.to_string()),
            datasets: made.snapshots.iter().map(|name| name.dataset.to_string()).collect(),
            cut_us: Some(u64::try_from(made.cut.as_micros()).unwrap_or(u64::MAX)),
            machine: made.guests.first().map(GuestDocument::from),
        }
    }
}

fn make(
    args: &CloneArgs,
    wish: &CloneOptions,
    guest: Option<&OwnGuest<'_>>,
    open: &mut OpenPoint<'_>,
    warned: &mut BTreeSet<String>,
    job: Job<'_>,
) -> holdfast_engine::Result<MachineClone> {
    let OpenPoint { restore, point, .. } = open;
    let plan = restore.plan_clone(point, wish, job)?;
    // A warning that applies to all clones is printed once.
    let warnings = plan.restore.warnings.iter();
    let new: Vec<String> = warnings
        .filter(|warning| warned.insert((*warning).clone()))
        .cloned()
        .collect();
    tell(&new, job);
    let report = if args.dry_run {
        None
    } else {
        Some(restore.make_clone(point, &plan, guest, job)?)
    };
    Ok(MachineClone {
        point: point.name.clone(),
        snapshots: point.snapshots.iter().map(ToString::to_string).collect(),
        datasets: plan.clones.iter().map(|clone| clone.to.to_string()).collect(),
        restore: MachineRestored::new(&plan.restore, report.as_ref()).without_id(),
    })
}
