//! `holdfast clone`: new machines of a host snapshot of another one, and new images of an image.

mod image;
mod names;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_engine::{AfterRestore, CloneWish, Job, MachineName};
use serde::Serialize;

use super::point::{OpenPoint, PointArgs, Use};
use super::restore::machine::Done;
use super::rollback::tell;
use crate::args::{Example, JobArgs};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::units;
use image::{ImageCloneArgs, ImageDocument};
use names::NameArgs;

/// Arguments of `clone`.
#[derive(Debug, clap::Args)]
pub struct CloneArgs {
    /// The machine and the name of its host snapshots (web1@before-update, web1@latest), or the file of an image
    #[arg(value_name = "MACHINE@SNAPSHOT|IMAGE")]
    of: OsString,
    #[command(flatten)]
    point: PointArgs,
    #[command(flatten)]
    names: NameArgs,
    #[command(flatten)]
    image: ImageCloneArgs,
    /// The folder for its images, where they are not to be beside the originals, or in a clone of their dataset
    #[arg(long, value_name = "FOLDER")]
    storage: Option<PathBuf>,
    /// Start the new machine
    #[arg(long)]
    start: bool,
    /// Let it go on from the memory of that instant, with its network cards unplugged (of a snapshot --with-memory)
    #[arg(long, conflicts_with = "start")]
    resume: bool,
    /// Show what would be made; make nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    job: JobArgs,
}

/// What a person may want of it.
pub(super) const EXAMPLES: &[Example] = &[
    Example {
        wish: "Try an update on a machine like this one, which takes no room and is there at once",
        line: "holdfast clone web1@latest web1-trial --start",
    },
    Example {
        wish: "See where its disks would be",
        line: "holdfast clone web1@before-update web1-old --dry-run",
    },
    Example {
        wish: "Twenty disks of one, which take no room until they are written to",
        line: "holdfast clone debian.qcow2 --count 20 --name-template 'lab/web{n:02}.qcow2'",
    },
];

/// What `clone` answers.
#[derive(Debug, Serialize)]
struct Clones {
    dry_run: bool,
    machines: Vec<MachineClone>,
    images: Vec<ImageDocument>,
    duration_ms: u64,
}

/// A machine that was made.
#[derive(Debug, Serialize)]
struct MachineClone {
    /// The name of the point.
    point: String,
    /// The host snapshots that the disks come from.
    snapshots: Vec<String>,
    /// Datasets that were cloned for it, or would be.
    datasets: Vec<String>,
    restore: Done,
}

impl Report for Clones {
    fn command(&self) -> &'static str {
        "clone"
    }

    fn human(&self, page: &mut Page) {
        for machine in &self.machines {
            machine.human(self.dry_run, page);
        }
        for image in &self.images {
            image.human(self.dry_run, page);
        }
        let count = self.machines.len() + self.images.len();
        if count > 1 && !self.dry_run {
            let duration = units::duration(Duration::from_millis(self.duration_ms));
            page.line(&format!("{count} clones in {duration}"));
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

/// Makes clones.
pub(super) fn run(args: &CloneArgs, context: &Context) -> Result<Exit, Error> {
    let names = args.names.all()?;
    let start = context.clock().now();
    let mut clones = Clones {
        dry_run: args.dry_run,
        machines: Vec::new(),
        images: Vec::new(),
        duration_ms: 0,
    };
    match Some(Path::new(&args.of)).filter(|path| path.is_file()) {
        Some(file) => clones.images = clone_images(args, file, &names, context)?,
        None => clones.machines = clone_machines(args, &names, context)?,
    }
    clones.duration_ms = units::millis(context.clock().now().saturating_sub(start));
    context.report(&clones)
}

fn clone_images(
    args: &CloneArgs,
    file: &Path,
    names: &[String],
    context: &Context,
) -> Result<Vec<ImageDocument>, Error> {
    let of_machines = [
        ("--start", args.start),
        ("--resume", args.resume),
        ("--storage", args.storage.is_some()),
    ];
    if let Some((option, _)) = of_machines.iter().find(|(_, is_given)| *is_given) {
        return Err(Error::usage(
            format!("{option} is for machines, and {} is an image", file.display()),
            format!("leave {option} out"),
        ));
    }
    args.image
        .clone_images(file, names, (context, args.job.thread_count(), args.dry_run))
}

fn clone_machines(args: &CloneArgs, names: &[String], context: &Context) -> Result<Vec<MachineClone>, Error> {
    args.image.refuse()?;
    let wishes = names
        .iter()
        .map(|name| {
            Ok(CloneWish {
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
    let how = (context, args.job.thread_count(), Use::of(args.dry_run));
    args.point.open(&args.of, how, |mut point, job| {
        wishes.iter().map(|wish| make(args, wish, &mut point, job)).collect()
    })
}

fn make(
    args: &CloneArgs,
    wish: &CloneWish,
    open: &mut OpenPoint<'_>,
    job: Job<'_>,
) -> holdfast_engine::Result<MachineClone> {
    let OpenPoint { restore, point, .. } = open;
    let plan = restore.plan_clone(point, wish, job)?;
    tell(&plan.restore.warnings, job);
    let report = if args.dry_run {
        None
    } else {
        Some(restore.make_clone(point, &plan, job)?)
    };
    Ok(MachineClone {
        point: point.name.clone(),
        snapshots: point.snapshots.iter().map(ToString::to_string).collect(),
        datasets: plan.clones.iter().map(|clone| clone.to.to_string()).collect(),
        restore: Done::new(&plan.restore, report.as_ref()).without_id(),
    })
}
