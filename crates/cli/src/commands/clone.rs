//! `holdfast clone`: a new machine of a host snapshot of another one.

use std::path::PathBuf;

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

/// Arguments of `clone`.
#[derive(Debug, clap::Args)]
pub struct CloneArgs {
    #[command(flatten)]
    point: PointArgs,
    /// What the new machine is called
    #[arg(value_name = "NAME")]
    name: String,
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
];

/// What `clone` answers.
#[derive(Debug, Serialize)]
struct Cloned {
    dry_run: bool,
    /// The name of the point.
    point: String,
    /// The host snapshots that the disks come from.
    snapshots: Vec<String>,
    /// Datasets that were cloned for it, or would be.
    datasets: Vec<String>,
    restore: Done,
}

impl Report for Cloned {
    fn command(&self) -> &'static str {
        "clone"
    }

    fn human(&self, page: &mut Page) {
        let verb = if self.dry_run { "would become" } else { "is" };
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

/// Makes a clone.
pub(super) fn run(args: &CloneArgs, context: &Context) -> Result<Exit, Error> {
    let wish = CloneWish {
        name: MachineName::new(args.name.as_str())?,
        storage: args.storage.clone(),
        after: match (args.resume, args.start) {
            (true, _) => AfterRestore::Resume,
            (_, true) => AfterRestore::Start,
            _ => AfterRestore::LeaveOff,
        },
    };
    let how = (context, args.job.thread_count(), Use::of(args.dry_run));
    let done = args.point.open(how, |point, job| make(args, &wish, point, job))?;
    context.report(&done)
}

fn make(args: &CloneArgs, wish: &CloneWish, point: OpenPoint<'_>, job: Job<'_>) -> holdfast_engine::Result<Cloned> {
    let OpenPoint { restore, mut point, .. } = point;
    let plan = restore.plan_clone(&mut point, wish, job)?;
    tell(&plan.restore.warnings, job);
    let report = if args.dry_run {
        None
    } else {
        Some(restore.make_clone(&point, &plan, job)?)
    };
    Ok(Cloned {
        dry_run: args.dry_run,
        point: point.name.clone(),
        snapshots: point.snapshots.iter().map(ToString::to_string).collect(),
        datasets: plan.clones.iter().map(|clone| clone.to.to_string()).collect(),
        restore: Done::new(&plan.restore, report.as_ref()).without_id(),
    })
}
