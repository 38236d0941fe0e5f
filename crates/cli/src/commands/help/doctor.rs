//! `holdfast doctor`: finds and repairs what dead backups and forgotten snapshots left behind.

mod named;
mod pools;
mod qemu;

use std::ffi::OsString;
use std::path::PathBuf;

use holdfast_block::error_text;
use holdfast_engine::{
    Action, DoctorReport, DoctorRequest, DoctorStorage, EmptiedOverlays, ExaminedMachine, ExaminedPool, Execution,
    FindingState, Outcome, StateStore, VirtualBox, VirtualBoxMachine, doctor,
};
use holdfast_host::provider::Dataset;
use holdfast_repo::key::{Randomness as _, SystemRandomness};
use holdfast_repo::{Processes as _, Repository, SystemProcesses};
use jiff::Timestamp;
use serde::Serialize;

use self::qemu::QemuMachines;
use crate::args::PoolArgs;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::datasets;
use crate::machines::runs;
use crate::machines::states::StateArgs;
use crate::machines::virtualbox::{self, VirtualBoxChoice};
use crate::machines::{Everything, Found, Hypervisors, MachineWord, WordsByHypervisor, libvirt_address};
use crate::output::{Page, Report, Style};
use crate::process::time;
use crate::units;

/// Arguments of `doctor`.
#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    /// Only these: a name, a pattern ('web*'), tag:TAG, qmp:SOCKET, vbox:NAME (vbox: is all of VirtualBox), or
    /// xen://POOL[/NAME]; containers; or datasets [default: all machines of libvirt and VirtualBox, mounted containers,
    /// and all that configurations name]
    #[arg(value_name = "MACHINE|CONTAINER|DATASET")]
    targets: Vec<OsString>,
    /// The hypervisor's address: qemu:///system, qemu:///session, qemu+ssh://HOST/system
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
    /// Repair what can be repaired; without it nothing is changed
    #[arg(long)]
    fix: bool,
    /// Delete leftover overlays whose content is already in their base, where no machine uses them
    #[arg(long, requires = "fix")]
    delete_overlays: bool,
    /// Where backups keep their scratch files
    #[arg(long, value_name = "FOLDER")]
    scratch: Option<PathBuf>,
    #[command(flatten)]
    states: StateArgs,
    /// A repository that is gone, by its id: pools and containers need not keep anything for backups to it
    #[arg(
        long,
        value_name = "ID",
        value_parser = parse_repository,
        requires = "targets",
        help_heading = "Options for pools of XenServer and XCP-ng"
    )]
    forget_repository: Vec<String>,
    #[command(flatten)]
    pools: PoolArgs,
}

impl Verb for DoctorArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See leftovers, and what would be done about them",
            line: "holdfast doctor",
        },
        Example {
            wish: "Repair it",
            line: "holdfast doctor --fix",
        },
        Example {
            wish: "Look at what was left in a dataset",
            line: "holdfast doctor tank/vm",
        },
        Example {
            wish: "Look at one QEMU that libvirt does not know",
            line: "holdfast doctor qmp:/run/web1.qmp",
        },
        Example {
            wish: "Delete the snapshots that interrupted backups left in VirtualBox machines",
            line: "holdfast doctor vbox: --fix",
        },
        Example {
            wish: "Delete the snapshots that interrupted backups left in a container",
            line: "holdfast doctor -r /backup/vms container:/srv/web1 --fix",
        },
        Example {
            wish: "See what backups have left in a pool of XenServer or XCP-ng",
            line: "holdfast doctor xen://xen1",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `doctor`.
#[derive(Debug, Serialize)]
struct Examined {
    fix: bool,
    is_healthy: bool,
    machines: Vec<String>,
    /// Datasets named on the command line or in a configuration.
    datasets: Vec<String>,
    findings: Vec<FindingDocument>,
    notes: Vec<String>,
}

/// A finding.
#[derive(Debug, Serialize)]
struct FindingDocument {
    machine: Option<String>,
    kind: &'static str,
    what: String,
    since: Option<String>,
    is_danger: bool,
    /// What --fix does; null if only the user can resolve it.
    fix: Option<String>,
    /// What the user can do; null if --fix resolves it.
    advice: Option<String>,
    /// What was done; null if nothing was.
    repaired: Option<String>,
    /// Why the repair failed; null if it did not.
    error: Option<String>,
}

impl From<&Outcome> for FindingDocument {
    fn from(outcome: &Outcome) -> Self {
        let finding = &outcome.finding;
        let (fix, advice) = match &finding.remedy {
            Action::Repair(_, words) => (Some(words.clone()), None),
            Action::Advice(words) => (None, Some(words.clone())),
        };
        let (repaired, error) = match &outcome.result {
            FindingState::Left => (None, None),
            FindingState::Repaired(words) => (Some(words.clone()), None),
            FindingState::Failed(words) => (None, Some(words.clone())),
        };
        let since = finding.since_ms.and_then(|ms| Timestamp::from_millisecond(ms).ok());
        Self {
            machine: finding.machine.clone(),
            kind: finding.kind.word(),
            what: finding.what.clone(),
            since: since.map(|since| since.to_string()),
            is_danger: finding.is_danger,
            fix,
            advice,
            repaired,
            error,
        }
    }
}

impl FindingDocument {
    fn human(&self, page: &mut Page) {
        let style = match (&self.repaired, self.is_danger) {
            (Some(_), _) => Style::Good,
            (None, true) => Style::Bad,
            (None, false) => Style::Warning,
        };
        let machine = self
            .machine
            .as_ref()
            .map(|name| format!("{name}: "))
            .unwrap_or_default();
        let since = self
            .since
            .as_ref()
            .map(|since| format!(" (since {since})"))
            .unwrap_or_default();
        page.styled(style, &format!("{machine}{}{since}", self.what));
        if self.is_danger && self.repaired.is_none() {
            page.line("  the machine is in danger");
        }
        let lines = [
            ("repaired", &self.repaired),
            ("NOT repaired", &self.error),
            (
                "--fix would",
                self.fix
                    .as_ref()
                    .map_or(&None, |_| if self.repaired.is_some() { &None } else { &self.fix }),
            ),
            ("to do", &self.advice),
        ];
        for (word, text) in lines {
            if let Some(text) = text {
                page.line(&format!("  {word}: {text}"));
            }
        }
    }
}

impl Report for Examined {
    fn command(&self) -> &'static str {
        "doctor"
    }

    fn exit(&self) -> Exit {
        if self.is_healthy { Exit::Ok } else { Exit::Warnings }
    }

    fn human(&self, page: &mut Page) {
        for finding in &self.findings {
            finding.human(page);
        }
        for note in &self.notes {
            page.line(&format!("note: {note}"));
        }
        let mut machines = units::counted(self.machines.len() as u64, "machine", "machines");
        if !self.datasets.is_empty() {
            let datasets = units::counted(self.datasets.len() as u64, "dataset", "datasets");
            machines = format!("{machines}, and {datasets} by name,");
        }
        let is_left = |finding: &&FindingDocument| finding.repaired.is_none();
        let left = self.findings.iter().filter(is_left).count() as u64;
        if self.is_healthy {
            page.styled(Style::Good, &format!("{machines} examined: all is well"));
        } else {
            let left = units::counted(left, "finding is left", "findings are left");
            page.line(&format!("{machines} examined: {left}"));
        }
        if !self.fix && !self.is_healthy {
            page.line("nothing was changed");
        }
    }
}

fn run(args: &DoctorArgs, context: &Context) -> Result<Exit, Error> {
    let (words, mut datasets) = targets(args)?;
    let everything = args.examines_everything();
    if everything {
        datasets = named::datasets(context);
    }
    let WordsByHypervisor {
        of_virtualbox: boxes,
        of_pools,
        containers,
        others: words,
    } = MachineWord::by_hypervisor(words);
    let place = virtualbox::place(context);
    let mut unreachable = Unreachable::new();
    let boxes = of_virtualbox(&place, &boxes, everything, &mut unreachable, context)?;
    let pools = pools::of_pools(args, &of_pools, context)?;
    let journal = context.journal_folder();
    let hypervisors = Hypervisors::new(args.connect.as_deref(), context);
    let qemu = QemuMachines::find(words, args.everything(), &hypervisors, journal.as_deref())?;
    let libvirt = qemu.libvirt;
    unreachable.extend(qemu.unreachable);
    unreachable.extend(pools.unreachable);
    let repository = repository(context);
    let providers = datasets::providers(context);
    let states = states(args, context)?;
    let mut machines = names_of(&qemu.found, &boxes, &pools.subjects);
    machines.extend(containers.iter().map(|folder| folder.display().to_string()));
    let names = datasets.iter().map(ToString::to_string).collect();
    let request = DoctorRequest {
        subjects: qemu.found.iter().map(subject).collect(),
        virtualbox: boxes.chosen,
        pools: pools.subjects,
        containers,
        forgotten_repositories: args.forget_repository.clone(),
        unreachable,
        address: libvirt_address(args.connect.as_deref(), context),
        neighbours: libvirt.map(|libvirt| libvirt as _),
        overlays: libvirt.map(|libvirt| libvirt as _),
        everything,
        journal,
        places: runs::places(context).map(|places| places.folder),
        pulls: Some(runs::pulls_folder(context)),
        processes: &SystemProcesses,
        process: SystemProcesses.this(),
        program: "holdfast",
        runtime: context.runtime_folder(),
        scratch: args.scratch.clone().unwrap_or_else(runs::scratch_folder),
        repository: repository.as_ref(),
        now_ms: &|| time::now().as_millisecond(),
        new_run: &new_run,
        emptied: args.emptied(),
        storage: Some(DoctorStorage {
            providers: &providers,
            datasets,
            states: states.as_ref(),
        }),
    };
    let report: DoctorReport = context.work(1, |job| doctor(&request, args.execution(), job))?;
    let is_healthy = report.left_count() == 0;
    let mut notes = report.notes;
    notes.extend(qemu.note);
    context.report(&Examined {
        fix: args.fix,
        is_healthy,
        machines,
        datasets: names,
        findings: report.findings.iter().map(FindingDocument::from).collect(),
        notes,
    })
}

/// Minimum number of digits of a repository id in messages, and the full number.
const ID_DIGITS: std::ops::RangeInclusive<usize> = 8..=32;

/// The id of a repository, or a prefix of it.
fn parse_repository(text: &str) -> Result<String, String> {
    let is_id = ID_DIGITS.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_id {
        Ok(text.to_ascii_lowercase())
    } else {
        Err("the id of a repository has 32 digits from 0 to f, of which the first eight will do".to_owned())
    }
}

impl DoctorArgs {
    /// Whether all machines are examined because none is named.
    fn examines_everything(&self) -> bool {
        self.targets.is_empty()
    }

    fn everything(&self) -> Everything {
        if self.examines_everything() {
            Everything::Wanted
        } else {
            Everything::NotWanted
        }
    }

    fn execution(&self) -> Execution {
        if self.fix {
            Execution::Execute
        } else {
            Execution::DryRun
        }
    }

    fn emptied(&self) -> EmptiedOverlays {
        if self.delete_overlays {
            EmptiedOverlays::Delete
        } else {
            EmptiedOverlays::Keep
        }
    }
}

/// The names of the examined machines.
fn names_of(found: &[Found], boxes: &VirtualBoxChoice<'_>, pools: &[ExaminedPool]) -> Vec<String> {
    let of_qemu = found.iter().map(|found| found.machine.name());
    let of_virtualbox = boxes.chosen.iter().map(VirtualBoxMachine::name);
    let of_pools = pools.iter().flat_map(|pool| &pool.machines);
    let of_pools = of_pools.map(|machine| &machine.summary.name[..]);
    let names = of_qemu.chain(of_virtualbox).chain(of_pools);
    names.map(str::to_owned).collect()
}

/// The selected machines of VirtualBox; all machines of the user if everything is examined. A registry that cannot be read does
/// not prevent the other checks then.
fn of_virtualbox<'a>(
    place: &'a VirtualBox,
    said: &[String],
    everything: bool,
    unreachable: &mut Unreachable,
    context: &Context,
) -> Result<VirtualBoxChoice<'a>, Error> {
    if !everything {
        return virtualbox::choose(place, said, &[], context);
    }
    if !place.registry_file().exists() {
        return Ok(VirtualBoxChoice::default());
    }
    let chosen = virtualbox::choose(place, &[String::new()], &[], context);
    Ok(chosen.unwrap_or_else(|error| {
        unreachable.push(("VirtualBox".to_owned(), error_text(&error)));
        VirtualBoxChoice::default()
    }))
}

/// Machines that cannot be examined, each with the reason.
type Unreachable = Vec<(String, String)>;

/// The store of machine states. If it cannot be opened, the other checks still run.
fn states(args: &DoctorArgs, context: &Context) -> Result<Option<StateStore>, Error> {
    let opened = context.work(1, |job| Ok(args.states.open(context, job)))?;
    Ok(opened.unwrap_or_else(|error| {
        let message = format!("states of machines are not looked at: {error}");
        context.console().warning(&message);
        None
    }))
}

/// The machines and datasets given on the command line.
fn targets(args: &DoctorArgs) -> Result<(Vec<MachineWord>, Vec<Dataset>), Error> {
    let (mut words, mut datasets) = (Vec::new(), Vec::new());
    for target in &args.targets {
        if let Some(MachineWord::Container(_)) = MachineWord::parse(target) {
            words.push(target.clone());
            continue;
        }
        match datasets::parse(target)? {
            Some(dataset) => datasets.push(dataset),
            None => words.push(target.clone()),
        }
    }
    Ok((MachineWord::parse_all(&words)?, datasets))
}

/// A random number that identifies the run.
fn new_run() -> u32 {
    let mut run = [0; 4];
    // If this fails, the number is merely less unique.
    SystemRandomness.fill(&mut run).ok();
    u32::from_le_bytes(run)
}

fn subject(found: &Found) -> ExaminedMachine<'_> {
    ExaminedMachine {
        machine: &*found.machine,
        address: found.address.to_string_lossy().into_owned(),
        way: runs::texts(&found.way),
    }
}

/// The repository, if one is given; a repository that cannot be opened is skipped.
fn repository(context: &Context) -> Option<Repository> {
    context.repository().ok()?;
    let opened = context.open_repository();
    opened
        .map_err(|error| {
            let why = error_text(&error);
            context
                .console()
                .warning(&format!("which bitmaps snapshots need is not known: {why}"));
        })
        .ok()
}
