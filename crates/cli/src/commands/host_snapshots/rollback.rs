//! `holdfast rollback`: rolls a machine back to a host snapshot.

use std::ffi::OsString;

use holdfast_engine::{
    AfterRestore, ConfigurationChoice, GuestRequest, HostSnapshotRequest, Job, MachineRestorePlan, NamedSnapshotSet,
    RollbackOptions, Subject,
};
use serde::Serialize;

use crate::args::{Example, JobArgs, SharedOptions, Switch as _};
use crate::commands::backups::restore::done::MachineRestored;
use crate::commands::host_snapshots::point::{OpenPoint, PointArgs, When, parse};
use crate::commands::host_snapshots::snapshot::{default_name, request_of};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::guests::GuestState;
use crate::machines::runs;
use crate::output::{Page, Report};

/// Arguments of `rollback`.
#[derive(Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(crate) struct RollbackArgs {
    /// The machine and its host snapshot: web1@before-update, web1@latest
    #[arg(value_name = "MACHINE@SNAPSHOT")]
    of: OsString,
    #[command(flatten)]
    point: PointArgs,
    /// Restore the machine's configuration too
    #[arg(long)]
    configuration: bool,
    /// Start the machine after the rollback
    #[arg(long)]
    start: bool,
    /// Resume the machine from its saved memory (needs a --with-memory snapshot)
    #[arg(long, conflicts_with = "start")]
    resume: bool,
    /// Power the machine off first, after all checks have passed
    #[arg(long)]
    power_off: bool,
    /// Do not take a host snapshot of the present state first; that state is lost
    #[arg(long)]
    without_safety_snapshot: bool,
    /// Show what would be written; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    job: JobArgs,
}

impl Verb for RollbackArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See what going back to before an update would change",
            line: "holdfast rollback web1@before-update --dry-run",
        },
        Example {
            wish: "Roll back a running machine, and resume it from its saved memory",
            line: "holdfast rollback web1@before-update --power-off --resume",
        },
        Example {
            wish: "Roll back to the newest host snapshot, and start the machine",
            line: "holdfast rollback web1@latest --start",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `rollback`.
#[derive(Debug, Serialize)]
struct RolledBack {
    dry_run: bool,
    /// The name of the point in time.
    point: String,
    /// The host snapshots of the disks.
    snapshots: Vec<String>,
    /// Whether configuration, firmware variables and TPM of that point in time are stored.
    has_state: bool,
    /// Host snapshots of the previous state; none in a dry run.
    safety: Vec<String>,
    restore: MachineRestored,
}

impl Report for RolledBack {
    fn command(&self) -> &'static str {
        "rollback"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let verb = if self.dry_run { "would go back" } else { "went back" };
        let machine = self.restore.machine();
        page.line(&format!("{machine} {verb} to {}", self.point));
        for snapshot in &self.snapshots {
            page.line(&format!("  from {snapshot}"));
        }
        if !self.has_state {
            page.line("  its disks only: no configuration of it is kept with this host snapshot");
        }
        for snapshot in &self.safety {
            page.line(&format!("  what was there before: {snapshot}"));
        }
        self.restore.body(page);
    }
}

fn run(args: &RollbackArgs, context: &Context) -> Result<Exit, Error> {
    let (threads, execution) = (args.job.thread_count(), args.dry_run.execution());
    let (machine, name) = parse(&args.of)?;
    let when = When::Then(name);
    let done = args
        .point
        .open(&machine, when, context, threads, execution, |point, job| {
            roll_back(args, &point, context, job)
        })?;
    context.report(&done)
}

fn roll_back(
    args: &RollbackArgs,
    point: &OpenPoint<'_>,
    context: &Context,
    job: Job<'_>,
) -> holdfast_engine::Result<RolledBack> {
    let Some(guest) = point.guest else {
        return Err(holdfast_engine::Refusal::MachineGone {
            machine: point.machine.to_owned(),
            point: point.point.name.clone(),
        }
        .into());
    };
    let mut wish = wish(args);
    let document = |restore, safety| RolledBack {
        dry_run: args.dry_run,
        point: point.point.name.clone(),
        snapshots: point.point.snapshots.iter().map(ToString::to_string).collect(),
        has_state: point.point.has_state,
        safety,
        restore,
    };
    if args.dry_run {
        let plan = dry_plan(args, point, &wish, job)?;
        tell(&plan.warnings, job);
        return Ok(document(MachineRestored::new(&plan, None).without_id(), Vec::new()));
    }
    // The machine must be shut off when the host snapshots are created; a running machine is not an error
    // before that.
    let mut now = guest.request(holdfast_engine::Quiesce::Off, GuestState::Kept, context)?;
    now.description.summary.state = holdfast_host::MachineState::ShutOff;
    let set = runs::new_set()?;
    let cut = NamedSnapshotSet {
        // A random suffix, so that two rollbacks in the same second do not conflict.
        name: format!(
            "{}_before-rollback-{:04x}",
            default_name(Some(point.machine)),
            set.0 & 0xffff
        ),
        wanted: guest.places.wanted(),
    };
    let request = HostSnapshotRequest {
        guests: vec![GuestRequest { memory: None, ..now }],
        // The present configuration may name other disks than those the machine ran with.
        subject: Subject::Datasets(&|_| Vec::new()),
        ..request_of(point.restore.providers, cut, set, Some(point.restore.states))
    };
    if !args.without_safety_snapshot {
        wish.safety = Some(&request);
    }
    let report = point.restore.roll_back(&point.point, &wish, job)?;
    tell(&report.plan.warnings, job);
    let restore = MachineRestored::new(&report.plan, Some(&report.restore)).without_id();
    Ok(document(
        restore,
        report.safety.iter().map(ToString::to_string).collect(),
    ))
}

/// The plan of a dry run; the machine may be running.
fn dry_plan(
    args: &RollbackArgs,
    point: &OpenPoint<'_>,
    wish: &RollbackOptions<'_>,
    job: Job<'_>,
) -> holdfast_engine::Result<MachineRestorePlan> {
    let wish = RollbackOptions {
        powers_off: true,
        ..*wish
    };
    let mut plan = point.restore.plan_rollback(&point.point, &wish, job)?;
    let machine = point.restore.hypervisor.machine(&plan.machine.uuid)?;
    let state = machine.describe()?.summary.state;
    if state != holdfast_host::MachineState::ShutOff && !args.power_off {
        plan.notes.push(format!(
            "{} is {state}: shut it off first, or have --power-off switch it off",
            plan.machine.name
        ));
    }
    Ok(plan)
}

/// The options of the rollback.
fn wish<'w>(args: &RollbackArgs) -> RollbackOptions<'w> {
    RollbackOptions {
        configuration: if args.configuration {
            ConfigurationChoice::Restore
        } else {
            ConfigurationChoice::Keep
        },
        after: match (args.resume, args.start) {
            (true, _) => AfterRestore::Resume,
            (_, true) => AfterRestore::Start,
            _ => AfterRestore::LeaveOff,
        },
        powers_off: args.power_off,
        safety: None,
    }
}

/// Prints the warnings of a plan.
pub(crate) fn tell(warnings: &[String], job: Job<'_>) {
    for warning in warnings {
        job.progress.warning(warning);
    }
}
