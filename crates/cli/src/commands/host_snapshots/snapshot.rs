//! `holdfast snapshot`: takes host snapshots of machines and datasets.

use std::borrow::Cow;
use std::ffi::OsString;
use std::time::Duration;

use holdfast_block::{error_messages, error_text};
use holdfast_engine::{
    GuestRequest, HostSnapshotReport, HostSnapshotRequest, Job, NamedSnapshotSet, Providers, SetId, StateStore,
    Subject, name_of_instant, take_host_snapshots,
};
use holdfast_host::provider::{DatasetPath, HostSnapshotScope};
use serde::Serialize;

use crate::args::{Example, JobArgs, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::machines::datasets;
use crate::machines::guests::{GuestDocument, GuestState, KnownGuest, MemoryHow, QuiesceWhen};
use crate::machines::runs;
use crate::machines::states::{self, StateArgs};
use crate::machines::{Hypervisors, MachineSelection, MachineWord};
use crate::output::{Page, Report, Style};
use crate::process::time;
use crate::units;

/// Arguments of `snapshot`.
#[derive(Debug, clap::Args)]
pub(crate) struct SnapshotArgs {
    /// A machine (web1, 'web*', tag:TAG, qmp:SOCKET), or a dataset: tank/vm of ZFS, the folder of a btrfs
    /// subvolume, lvm:GROUP/VOLUME, reflink:FOLDER
    #[arg(value_name = "MACHINE|DATASET", required = true)]
    targets: Vec<OsString>,
    /// Name of the snapshots [default: holdfast_TIME, holdfast_MACHINE_TIME for machines]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Include all ZFS datasets below, at the same instant
    #[arg(long)]
    recursive: bool,
    /// The hypervisor's address: qemu:///system, qemu:///session, qemu+ssh://HOST/system
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
    /// Whether the guest agents freeze the file systems of the machines during the snapshot
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = QuiesceWhen::Try)]
    quiesce: QuiesceWhen,
    /// Also save the machine's memory: after a rollback it can resume where it was
    #[arg(long, value_enum, value_name = "HOW", num_args = 0..=1, require_equals = true, default_missing_value = "auto")]
    with_memory: Option<MemoryHow>,
    #[command(flatten)]
    states: StateArgs,
    /// Show what would be made, and which machines would be frozen; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    job: JobArgs,
}

impl Verb for SnapshotArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Snapshot all disks of a running machine at one instant, wherever they are",
            line: "holdfast snapshot web1",
        },
        Example {
            wish: "With its memory, to resume from there after a rollback",
            line: "holdfast snapshot web1 --with-memory --name before-update",
        },
        Example {
            wish: "Snapshot a ZFS dataset, with all machines in it frozen",
            line: "holdfast snapshot tank/vm --name before-update",
        },
        Example {
            wish: "See what would happen",
            line: "holdfast snapshot 'web*' --dry-run",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `snapshot`.
#[derive(Debug, Serialize)]
struct Taken {
    dry_run: bool,
    cuts: Vec<CutDocument>,
    failed: Vec<FailedDocument>,
}

/// Host snapshots of one point in time.
#[derive(Debug, Serialize)]
struct CutDocument {
    /// The targets as given.
    targets: Vec<String>,
    /// The point in time; null with --dry-run.
    time: Option<String>,
    /// The snapshots, by their full names.
    snapshots: Vec<String>,
    /// Whether they are of one point in time even without pausing the guests.
    is_one_instant: Option<bool>,
    /// The time that the providers took.
    cut_us: Option<u64>,
    machines: Vec<GuestDocument>,
    /// Disks that are not included: `machine`, `disk`, `reason`.
    left_out: Vec<LeftOutDocument>,
    /// Running machines, in a dry run.
    would_freeze: Vec<String>,
}

#[derive(Debug, Clone, Serialize)]
struct LeftOutDocument {
    machine: String,
    disk: String,
    reason: String,
}

/// A target without a host snapshot.
#[derive(Debug, Serialize)]
struct FailedDocument {
    target: String,
    error: String,
}

impl Report for Taken {
    fn command(&self) -> &'static str {
        "snapshot"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn exit(&self) -> Exit {
        if self.failed.is_empty() { Exit::Ok } else { Exit::Error }
    }

    fn human(&self, page: &mut Page) {
        for cut in &self.cuts {
            let verb = if self.dry_run { "would create " } else { "" };
            for snapshot in &cut.snapshots {
                page.line(&format!("{verb}{snapshot}"));
            }
            for machine in &cut.machines {
                page.line(&format!("  {}", machine.line()));
            }
            if !cut.would_freeze.is_empty() {
                page.line(&format!("  would freeze: {}", cut.would_freeze.join(", ")));
            }
            if let Some(us) = cut.cut_us {
                page.line(&format!("  made in {}", units::duration(Duration::from_micros(us))));
            }
            for disk in &cut.left_out {
                page.line(&format!(
                    "  {} of {} is not in it, or not all of it: {}",
                    disk.disk, disk.machine, disk.reason
                ));
            }
        }
        if !self.failed.is_empty() {
            let names: Vec<&str> = self.failed.iter().map(|failed| &failed.target[..]).collect();
            page.styled(Style::Bad, &format!("no snapshot of {}", names.join(", ")));
        }
    }
}

/// Host snapshots to take at one point in time.
struct Plan {
    targets: Vec<String>,
    wanted: Vec<HostSnapshotScope>,
    name: String,
    /// Machines to freeze.
    guests: Vec<KnownGuest>,
    /// Whether it is for a machine rather than for datasets.
    is_of_machine: bool,
}

/// Takes host snapshots: all named datasets together, and each machine by itself.
fn run(args: &SnapshotArgs, context: &Context) -> Result<Exit, Error> {
    let hypervisors = Hypervisors::new(args.connect.as_deref(), context);
    let (mut wanted, mut words, mut named) = (Vec::new(), Vec::new(), Vec::new());
    for target in &args.targets {
        if let Some(dataset) = datasets::parse(target)? {
            named.push(target.display().to_string());
            wanted.push(HostSnapshotScope {
                is_tree: args.recursive,
                ..HostSnapshotScope::all_of(dataset)
            });
        } else {
            words.push(target.clone());
        }
    }
    check(args, !wanted.is_empty())?;
    let mut done = Taken {
        dry_run: args.dry_run,
        cuts: Vec::new(),
        failed: Vec::new(),
    };
    if !wanted.is_empty() {
        let plan = Plan {
            targets: named,
            guests: guests_in(&wanted, args, &hypervisors, context)?,
            wanted,
            name: args.name.clone().unwrap_or_else(|| default_name(None)),
            is_of_machine: false,
        };
        done.cuts.push(carry_out(&plan, args, &hypervisors, context)?);
    }
    let wish = MachineSelection {
        words: MachineWord::parse_all(&words)?,
        ..MachineSelection::default()
    };
    let chosen = if words.is_empty() {
        Vec::new()
    } else {
        hypervisors.choose(&wish)?.chosen
    };
    for one in &chosen {
        let cut = KnownGuest::find(one, &hypervisors)
            .and_then(|guest| plan_of(guest, args, context))
            .and_then(|plan| carry_out(&plan, args, &hypervisors, context));
        match cut {
            Ok(cut) => done.cuts.push(cut),
            Err(error) if args.targets.len() == 1 && chosen.len() == 1 || matches!(error, Error::Interrupted(_)) => {
                return Err(error);
            }
            Err(error) => {
                let causes = error_messages(&error);
                context.console().error(&causes, error.advice().hint.as_deref());
                done.failed.push(FailedDocument {
                    target: one.said.clone(),
                    error: causes.join(": "),
                });
            }
        }
    }
    context.report(&done)
}

/// Returns an error if options contradict each other.
fn check(args: &SnapshotArgs, has_dataset: bool) -> Result<(), Error> {
    if args.recursive && !has_dataset {
        return Err(Error::usage(
            "--recursive is about datasets, and only machines are named",
            "remove the option",
        ));
    }
    if args.with_memory.is_some() && has_dataset {
        return Err(Error::usage(
            "--with-memory is about machines, one after the other, and a dataset is named",
            "name the machines in it: holdfast snapshot web1 --with-memory",
        ));
    }
    if args.with_memory.is_some() && args.quiesce == QuiesceWhen::Require {
        return Err(Error::usage(
            "--with-memory and --quiesce require do not go together: memory holds what the file systems have not written yet",
            "remove one of them",
        ));
    }
    Ok(())
}

/// The machines with disks in the requested datasets. If libvirt cannot be reached, a note says so, since there
/// may be no machines.
fn guests_in(
    wanted: &[HostSnapshotScope],
    args: &SnapshotArgs,
    hypervisors: &Hypervisors<'_>,
    context: &Context,
) -> Result<Vec<KnownGuest>, Error> {
    let all = match KnownGuest::all(hypervisors, context) {
        Ok(all) => all,
        Err(error) if args.quiesce == QuiesceWhen::Require || args.connect.is_some() => return Err(error),
        Err(error) => {
            let reason = error_text(&error);
            context
                .console()
                .note(&format!("no machine is frozen for this: {reason}"));
            return Ok(Vec::new());
        }
    };
    let are_there = holdfast_engine::machines_in(all.iter().map(|guest| &guest.places), wanted);
    let both = all.into_iter().zip(are_there);
    Ok(both.filter(|(_, is_there)| *is_there).map(|(guest, _)| guest).collect())
}

/// The plan for a machine.
fn plan_of(guest: KnownGuest, args: &SnapshotArgs, context: &Context) -> Result<Plan, Error> {
    let name = &guest.description.summary.name;
    let wanted = wanted_of(&guest, "holdfast backup needs no such file system", context)?;
    Ok(Plan {
        targets: vec![name.clone()],
        wanted,
        name: args.name.clone().unwrap_or_else(|| default_name(Some(name))),
        guests: vec![guest],
        is_of_machine: true,
    })
}

/// The datasets of a machine's disks. A disk outside of any dataset is an error with this advice.
pub(crate) fn wanted_of(
    guest: &KnownGuest,
    advice: impl Into<Cow<'static, str>>,
    context: &Context,
) -> Result<Vec<HostSnapshotScope>, Error> {
    let name = &guest.description.summary.name;
    if let Some((disk, why)) = guest.places.nowhere.first() {
        return Err(Error::refused(
            Kind::Unsupported,
            format!("there can be no host snapshot of {name} with all its disks: disk {disk}: {why}"),
            advice,
        ));
    }
    let wanted = guest.places.wanted_with_bases();
    if wanted.is_empty() {
        return Err(Error::refused(
            Kind::Unsupported,
            format!("{name} has no disk that it could write"),
            "holdfast machines lists its disks",
        ));
    }
    for (disk, why) in &guest.places.bases_nowhere {
        context.console().warning(&format!(
            "what the disk {disk} of {name} is based on is not in its snapshot, and must not change as long as that is needed: {why}"
        ));
    }
    Ok(wanted)
}

/// `holdfast_web1_2026-11-22_16:45:10Z`: in UTC, so that names sort by time and are unambiguous on other
/// hosts.
pub(crate) fn default_name(machine: Option<&str>) -> String {
    name_of_instant(machine, time::now())
}

fn carry_out(
    plan: &Plan,
    args: &SnapshotArgs,
    hypervisors: &Hypervisors<'_>,
    context: &Context,
) -> Result<CutDocument, Error> {
    let left_out = plan.guests.iter().flat_map(|guest| left_out(guest, &plan.wanted));
    let mut cut = CutDocument {
        targets: plan.targets.clone(),
        time: None,
        snapshots: plan
            .wanted
            .iter()
            .map(|one| format!("{}@{}", one.dataset, plan.name))
            .collect(),
        is_one_instant: None,
        cut_us: None,
        machines: Vec::new(),
        left_out: left_out.collect(),
        would_freeze: Vec::new(),
    };
    if args.dry_run {
        let runs = |guest: &&KnownGuest| guest.description.summary.state == holdfast_host::MachineState::Running;
        let running = plan.guests.iter().filter(runs);
        cut.would_freeze = running.map(|guest| guest.description.summary.name.clone()).collect();
        return Ok(cut);
    }
    let newcomers = |wanted: &[HostSnapshotScope]| KnownGuest::newcomers(&plan.guests, wanted, hypervisors);
    let subject = if plan.is_of_machine {
        Subject::Machines
    } else {
        Subject::Datasets(&newcomers)
    };
    let report = context.work(args.job.thread_count(), |job| take(plan, subject, args, context, job))?;
    cut.time = Some(report.time.to_string());
    cut.is_one_instant = Some(report.is_one_instant);
    cut.cut_us = Some(u64::try_from(report.cut.as_micros()).unwrap_or(u64::MAX));
    cut.machines = report.guests.iter().map(GuestDocument::from).collect();
    Ok(cut)
}

fn take(
    plan: &Plan,
    subject: Subject<'_>,
    args: &SnapshotArgs,
    context: &Context,
    job: Job<'_>,
) -> holdfast_engine::Result<HostSnapshotReport> {
    let providers = datasets::providers(context);
    let store = match args.with_memory {
        Some(_) => Some(args.states.open_for_memory(context, job)?),
        None => args.states.open_if_possible(context, job),
    };
    let guests = plan.guests.iter();
    let guests = guests.map(|guest| held_still(guest, args.quiesce, args.with_memory, store.as_ref(), context));
    let guests = guests.collect::<holdfast_engine::Result<Vec<_>>>()?;
    if plan.is_of_machine {
        guests.iter().try_for_each(|guest| check_moved(guest, &plan.wanted))?;
    }
    let cut = NamedSnapshotSet {
        name: plan.name.clone(),
        wanted: plan.wanted.clone(),
    };
    let request = HostSnapshotRequest {
        guests,
        subject,
        ..request_of(&providers, cut, runs::new_set()?, store.as_ref())
    };
    take_host_snapshots(&request, &mut || (), job)
}

/// How a machine is paused or frozen, and where its state is stored.
pub(crate) fn held_still<'g>(
    guest: &'g KnownGuest,
    quiesce: QuiesceWhen,
    memory: Option<MemoryHow>,
    store: Option<&StateStore>,
    context: &Context,
) -> holdfast_engine::Result<GuestRequest<'g>> {
    Ok(GuestRequest {
        memory: states::memory_wish(memory, store, context),
        ..guest.request(quiesce.into(), GuestState::kept_in(store), context)?
    })
}

/// Returns an error if a machine's disks have moved out of the requested datasets.
pub(crate) fn check_moved(guest: &GuestRequest<'_>, wanted: &[HostSnapshotScope]) -> holdfast_engine::Result<()> {
    if guest.places.wanted_with_bases() == wanted {
        return Ok(());
    }
    Err(holdfast_host::Error::Refused {
        action: "make a host snapshot of",
        machine: guest.description.summary.name.clone(),
        reason: "its disks have been moved since it was looked at; do it again".to_owned(),
    }
    .into())
}

/// A request for host snapshots, without any machines to pause yet.
pub(crate) fn request_of<'a>(
    providers: &'a Providers,
    cut: NamedSnapshotSet,
    set: SetId,
    states: Option<&'a StateStore>,
) -> HostSnapshotRequest<'a> {
    HostSnapshotRequest {
        providers,
        cuts: vec![cut],
        guests: Vec::new(),
        subject: Subject::Machines,
        now: &time::now,
        program: crate::PROGRAM.to_owned(),
        set,
        states,
    }
}

/// Disks of a machine that are outside of the requested datasets.
fn left_out(guest: &KnownGuest, wanted: &[HostSnapshotScope]) -> Vec<LeftOutDocument> {
    let machine = &guest.description.summary.name;
    let document = |disk: &str, reason: String| LeftOutDocument {
        machine: machine.clone(),
        disk: disk.to_owned(),
        reason,
    };
    let mut left_out = Vec::new();
    let is_in_it = |place: &DatasetPath| {
        let alone = holdfast_engine::MachinePlaces {
            disks: vec![(String::new(), place.clone())],
            ..holdfast_engine::MachinePlaces::default()
        };
        holdfast_engine::machines_in([&alone], wanted) == [true]
    };
    for (disk, place) in &guest.places.disks {
        if !is_in_it(place) {
            left_out.push(document(disk, format!("it is in {}", place.dataset)));
        }
    }
    for (disk, place) in &guest.places.bases {
        if !is_in_it(place) {
            let base = format!("{} in {}", place.path.display(), place.dataset);
            left_out.push(document(disk, format!("what it is based on is {base}")));
        }
    }
    let places = &guest.places;
    let others = places
        .nowhere
        .iter()
        .chain(&places.left_out)
        .chain(&places.bases_nowhere);
    left_out.extend(others.map(|(disk, why)| document(disk, why.clone())));
    left_out
}
