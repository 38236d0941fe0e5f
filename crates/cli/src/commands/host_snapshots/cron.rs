//! `holdfast cron`: applies a policy once, for cron or a timer.

use std::cell::{Cell, OnceCell, RefCell};
use std::path::PathBuf;
use std::time::Duration;

use holdfast_block::error_text;
use holdfast_daemon::{Outcome as RunOutcome, RunEntry, RunReport};
use holdfast_engine::{
    GuestRequest, Guests, MachinePlaces, MemoryOptions, PolicyRunReport, PolicyRunRequest, SetId, run_policy,
};
use holdfast_host::Description;
use holdfast_host::provider::HostSnapshotScope;
use jiff::Timestamp;
use serde::Serialize;

use crate::args::{Example, JobArgs, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::sanoid_file::{self, SanoidFileArgs};
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::Hypervisors;
use crate::machines::datasets;
use crate::machines::guests::{GuestDocument, GuestState, KnownGuest, MemoryHow, QuiesceWhen};
use crate::machines::runs;
use crate::machines::states::{self, StateArgs};
use crate::output::{Page, Report, Style};
use crate::process::environment;
use crate::process::time;
use crate::units;

/// Arguments of `cron`.
#[derive(Debug, clap::Args)]
pub(crate) struct CronArgs {
    #[command(flatten)]
    file: SanoidFileArgs,
    /// Only take snapshots; remove none
    #[arg(long, conflicts_with = "prune_only")]
    take_only: bool,
    /// Only remove expired snapshots; take none
    #[arg(long)]
    prune_only: bool,
    /// Show what would be taken and removed, and why; change nothing, call no scripts
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Whether the guest agents freeze the file systems of the machines during the snapshot
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = QuiesceWhen::Try)]
    quiesce: QuiesceWhen,
    /// The hypervisor's address: qemu:///system, qemu:///session, qemu+ssh://HOST/system
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
    /// Also save the memory of a machine that alone has disks in a due dataset
    #[arg(long, value_enum, value_name = "HOW", num_args = 0..=1, require_equals = true, default_missing_value = "auto")]
    with_memory: Option<MemoryHow>,
    #[command(flatten)]
    states: StateArgs,
    #[command(flatten)]
    job: JobArgs,
}

impl Verb for CronArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See what a sanoid.conf would have done now, and why",
            line: "holdfast cron /etc/sanoid/sanoid.conf --dry-run",
        },
        Example {
            wish: "Apply it; run this every 15 minutes, instead of sanoid --cron",
            line: "holdfast cron /etc/sanoid/sanoid.conf",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `cron`.
#[derive(Debug, Serialize)]
struct CronDone {
    dry_run: bool,
    taken: Vec<TakenDocument>,
    removed: Vec<CronRemoved>,
    /// States of machines that were removed together with their snapshots.
    forgotten_state_count: usize,
    /// Settings of the policy that are probably mistakes.
    doubts: Vec<String>,
    /// Datasets that could not be examined.
    unreadable: Vec<UnreadableDocument>,
    /// Whether it was interrupted before everything was done.
    interrupted: bool,
    #[serde(skip)]
    signal: Option<u8>,
}

#[derive(Debug, Serialize)]
struct TakenDocument {
    snapshots: Vec<String>,
    machines: Vec<GuestDocument>,
    /// Running machines, in a dry run.
    would_freeze: Vec<String>,
    /// Machines of which some disks are missing, since no snapshot could be taken of other datasets.
    incomplete_machines: Vec<String>,
    /// Why there are no snapshots; null if there are.
    failure: Option<String>,
}

#[derive(Debug, Serialize)]
struct CronRemoved {
    snapshot: String,
    reason: String,
    used_bytes: Option<u64>,
    /// Why it was kept although it is expired; null if it was removed.
    obstacle: Option<String>,
}

#[derive(Debug, Serialize)]
struct UnreadableDocument {
    dataset: String,
    error: String,
}

impl CronDone {
    /// The first failure and its reason.
    fn failure(&self) -> Option<String> {
        let taken = self.taken.iter().filter_map(|taken| taken.failure.clone());
        let unreadable = self
            .unreadable
            .iter()
            .map(|one| format!("{}: {}", one.dataset, one.error));
        let interrupted = self
            .interrupted
            .then(|| "it was stopped before all was done".to_owned());
        taken.chain(unreadable).chain(interrupted).next()
    }
}

impl Report for CronDone {
    fn command(&self) -> &'static str {
        "cron"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn exit(&self) -> Exit {
        let is_failed = self.taken.iter().any(|taken| taken.failure.is_some()) || !self.unreadable.is_empty();
        let stays = self.removed.iter().any(|removed| removed.obstacle.is_some());
        if self.interrupted {
            return self.signal.map_or(Exit::Error, Exit::Signal);
        }
        match (is_failed, stays || !self.doubts.is_empty()) {
            (true, _) => Exit::Error,
            (false, true) => Exit::Warnings,
            (false, false) => Exit::Ok,
        }
    }

    fn human(&self, page: &mut Page) {
        let would = if self.dry_run { "would take" } else { "took" };
        for taken in &self.taken {
            for snapshot in &taken.snapshots {
                match &taken.failure {
                    Some(why) => page.styled(Style::Bad, &format!("no {snapshot}: {why}")),
                    None => page.line(&format!("{would} {snapshot}")),
                }
            }
            for machine in &taken.machines {
                page.line(&format!("  {}", machine.line()));
            }
            if !taken.would_freeze.is_empty() {
                page.line(&format!("  would freeze: {}", taken.would_freeze.join(", ")));
            }
        }
        let incomplete = self.taken.iter().flat_map(|taken| &taken.incomplete_machines);
        for machine in incomplete {
            page.styled(
                Style::Warning,
                &format!("{machine} has other disks, of which there is no snapshot"),
            );
        }
        let would = if self.dry_run { "would remove" } else { "removed" };
        for removed in &self.removed {
            match &removed.obstacle {
                Some(why) => page.styled(Style::Warning, &format!("{} stays: {why}", removed.snapshot)),
                None => page.line(&format!("{would} {}: {}", removed.snapshot, removed.reason)),
            }
        }
        let freed: u64 = self.removed.iter().filter_map(|removed| removed.used_bytes).sum();
        if freed > 0 {
            page.line(&format!("{} were used only by them", units::bytes(freed)));
        }
        if self.interrupted {
            page.styled(
                Style::Bad,
                "it was stopped before all was done; the next run does the rest",
            );
        } else if self.taken.is_empty() && self.removed.is_empty() {
            page.line("nothing to do: no snapshot is due or expired");
        }
        for doubt in &self.doubts {
            page.styled(Style::Warning, doubt);
        }
        for one in &self.unreadable {
            page.styled(Style::Bad, &format!("{}: {}", one.dataset, one.error));
        }
    }
}

/// The machines of libvirt, looked up when something is due.
struct FoundGuests<'a> {
    args: &'a CronArgs,
    context: &'a Context,
    hypervisors: Hypervisors<'a>,
    known: OnceCell<Vec<KnownGuest>>,
    state: Cell<GuestState>,
    /// How memory is saved, if requested.
    memory: RefCell<Option<MemoryOptions>>,
}

impl FoundGuests<'_> {
    fn known(&self) -> &[KnownGuest] {
        self.known.get_or_init(|| {
            match KnownGuest::all(&self.hypervisors, self.context) {
                Ok(known) => known,
                Err(error) => {
                    let reason = error_text(&error);
                    let message = format!("no machine is frozen for this: {reason}");
                    // If the user gives the address of libvirt, machines are expected there, so a failure is a warning.
                    if self.args.connect.is_some() {
                        self.context.console().warning(&message);
                    } else {
                        self.context.console().note(&message);
                    }
                    Vec::new()
                }
            }
        })
    }
}

impl Guests for FoundGuests<'_> {
    fn places(&self) -> Vec<&MachinePlaces> {
        self.known().iter().map(|guest| &guest.places).collect()
    }

    fn request(&self, index: usize) -> holdfast_engine::Result<GuestRequest<'_>> {
        let guest = &self.known()[index];
        let request = guest.request(self.args.quiesce.into(), self.state.get(), self.context)?;
        Ok(GuestRequest {
            memory: self.memory.borrow().clone(),
            ..request
        })
    }

    fn newcomers(&self, wanted: &[HostSnapshotScope]) -> Vec<Description> {
        KnownGuest::newcomers(self.known(), wanted, &self.hypervisors)
    }

    fn new_set(&self) -> holdfast_engine::Result<SetId> {
        runs::new_set()
    }
}

fn run(args: &CronArgs, context: &Context) -> Result<Exit, Error> {
    let config = sanoid_file::parse(&args.file)?;
    let providers = datasets::providers(context);
    let guests = FoundGuests {
        args,
        context,
        hypervisors: Hypervisors::new(args.connect.as_deref(), context),
        known: OnceCell::new(),
        state: Cell::new(GuestState::Omitted),
        memory: RefCell::new(None),
    };
    let zone = context.zone().clone();
    let now = move || time::now().to_zoned(zone.clone());
    let (start, begun) = (time::now(), context.clock().now());
    let report = context.work(args.job.thread_count(), |job| {
        // A dry run creates nothing.
        let store = match args.with_memory {
            _ if args.dry_run => None,
            Some(_) => Some(args.states.open_for_memory(context, job)?),
            None => args.states.open_if_possible(context, job),
        };
        *guests.memory.borrow_mut() = states::memory_wish(args.with_memory, store.as_ref(), context);
        guests.state.set(GuestState::kept_in(store.as_ref()));
        let request = PolicyRunRequest {
            providers: &providers,
            config: &config,
            takes: !args.prune_only,
            prunes: !args.take_only,
            execution: crate::args::Switch::execution(args.dry_run),
            guests: &guests,
            now: &now,
            states: store.as_ref(),
            program: crate::PROGRAM.to_owned(),
            lock: lock_file(context),
            withheld: vec![environment::PASSWORD.to_owned()],
        };
        run_policy(&request, job)
    });
    let signal = context.signal().and_then(|signal| u8::try_from(signal).ok());
    let report = report.map(|report| CronDone {
        signal,
        ..document(report, args.dry_run, &guests)
    });
    // The scheduler records the runs that it starts.
    if !args.dry_run && context.variable(environment::JOB).is_none() {
        let duration = context.clock().now().saturating_sub(begun);
        crate::commands::service::daemon::note(entry(&report, start, duration), context);
    }
    context.report(&report?)
}

/// The entry of this run in the journal of runs.
fn entry(report: &Result<CronDone, Error>, start: Timestamp, duration: Duration) -> RunEntry {
    let (exit, error) = match report {
        Ok(done) => (done.exit(), done.failure()),
        Err(error) => (error.advice().exit, Some(error_text(error))),
    };
    let outcome = match exit {
        Exit::Ok => RunOutcome::Done,
        Exit::Warnings => RunOutcome::Warnings,
        Exit::Locked => RunOutcome::Locked,
        Exit::Signal(_) => RunOutcome::Stopped,
        _ => RunOutcome::Failed,
    };
    RunEntry {
        job: "cron".to_owned(),
        kind: "cron".to_owned(),
        by: "cron".to_owned(),
        start: start.to_string(),
        end: time::now().to_string(),
        duration_ms: units::millis(duration),
        outcome: outcome.word().to_owned(),
        exit_code: Some(exit.code().into()),
        failed_before: 0,
        retry_at: None,
        error,
        lines: Vec::new(),
        result: RunReport::default(),
    }
}

/// The lock that prevents concurrent runs of a policy on this host.
fn lock_file(context: &Context) -> PathBuf {
    match context.journal_folder() {
        Some(folder) => folder.with_file_name("policy.lock"),
        None => context.runtime_folder().join("policy.lock"),
    }
}

fn document(report: PolicyRunReport, dry_run: bool, guests: &FoundGuests<'_>) -> CronDone {
    let runs = |index: &usize| guests.known()[*index].description.summary.state == holdfast_host::MachineState::Running;
    let name = |index: usize| guests.known()[index].description.summary.name.clone();
    let taken = report.taken.into_iter().map(|taken| TakenDocument {
        snapshots: taken.snapshots.iter().map(ToString::to_string).collect(),
        machines: taken.guests.iter().map(GuestDocument::from).collect(),
        would_freeze: taken.would_freeze.into_iter().filter(runs).map(name).collect(),
        incomplete_machines: taken.incomplete.into_iter().map(name).collect(),
        failure: taken.failure,
    });
    let removed = report.removed.into_iter().map(|removed| CronRemoved {
        snapshot: removed.snapshot.to_string(),
        reason: removed.reason,
        used_bytes: removed.used_bytes,
        obstacle: removed.obstacle,
    });
    let unreadable = report.unreadable.into_iter();
    CronDone {
        dry_run,
        taken: taken.collect(),
        removed: removed.collect(),
        forgotten_state_count: report.forgotten_states,
        doubts: report.doubts,
        unreadable: unreadable
            .map(|(dataset, error)| UnreadableDocument { dataset, error })
            .collect(),
        interrupted: report.is_interrupted,
        signal: None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{CronDone, TakenDocument, UnreadableDocument, entry};
    use crate::errors::Error;

    fn done(failure: Option<&str>, doubts: &[&str]) -> CronDone {
        CronDone {
            dry_run: false,
            taken: vec![TakenDocument {
                snapshots: Vec::new(),
                machines: Vec::new(),
                would_freeze: Vec::new(),
                incomplete_machines: Vec::new(),
                failure: failure.map(str::to_owned),
            }],
            forgotten_state_count: 0,
            removed: Vec::new(),
            doubts: doubts.iter().map(|doubt| (*doubt).to_owned()).collect(),
            unreadable: Vec::new(),
            interrupted: false,
            signal: None,
        }
    }

    #[test]
    fn the_journal_of_runs_has_how_it_went_and_why() {
        let noted = |report: Result<CronDone, Error>| {
            let start = "2026-11-20T10:00:00Z".parse().unwrap();
            let entry = entry(&report, start, Duration::from_millis(1500));
            assert_eq!((&entry.start[..], entry.duration_ms), ("2026-11-20T10:00:00Z", 1500));
            (entry.outcome, entry.error)
        };
        assert_eq!(noted(Ok(done(None, &[]))), ("done".to_owned(), None));
        assert_eq!(noted(Ok(done(None, &["odd"]))), ("warnings".to_owned(), None));
        let failed = ("failed".to_owned(), Some("no room".to_owned()));
        assert_eq!(noted(Ok(done(Some("no room"), &["odd"]))), failed);
        let mut unreadable = done(None, &[]);
        unreadable.unreadable.push(UnreadableDocument {
            dataset: "tank".to_owned(),
            error: "gone".to_owned(),
        });
        assert_eq!(noted(Ok(unreadable)).1.as_deref(), Some("tank: gone"));
        let busy = holdfast_engine::Error::PolicyBusy { lock: "/x".into() };
        assert_eq!(noted(Err(busy.into())).0, "locked");
    }
}
