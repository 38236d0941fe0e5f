//! Points in time of machines in host snapshots, for `rollback` and `clone`.

use std::ffi::OsStr;

use holdfast_engine::{
    Execution, GuestRequest, HostPoint, HostPointRequest, HostRestore, HostSnapshotReport, HostSnapshotRequest, Job,
    NamedSnapshotSet, PointName, Providers, StateStore, TemporarySnapshots, open_host_point,
};
use holdfast_host::Libvirt;
use holdfast_host::provider::HostSnapshotScope;

use crate::commands::host_snapshots::snapshot::{check_moved, default_name, held_still, request_of, wanted_of};
use crate::context::Context;
use crate::errors::Error;
use crate::machines::datasets;
use crate::machines::guests::{KnownGuest, MemoryHow, QuiesceWhen};
use crate::machines::runs;
use crate::machines::states::StateArgs;
use crate::machines::{Hypervisors, MachineWord, connect_libvirt, libvirt_address};

/// Where points of machines are found.
#[derive(Debug, clap::Args)]
pub(crate) struct PointArgs {
    /// The hypervisor's address: qemu:///system, qemu:///session
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
    #[command(flatten)]
    states: StateArgs,
}

/// A point in time of a machine.
#[derive(Debug, Clone)]
pub(crate) enum When {
    /// That of existing host snapshots.
    Then(PointName),
    /// Now: host snapshots are created for it, and removed as soon as they are not needed any more.
    Now {
        /// Whether its file systems are frozen.
        quiesce: QuiesceWhen,
        /// How its memory is saved, if it is.
        memory: Option<MemoryHow>,
    },
}

impl When {
    /// The name of the point in time; for the present, that of the host snapshots that were `made`.
    fn name(self, made: Option<&TemporarySnapshots<'_>>) -> PointName {
        match self {
            Self::Then(name) => name,
            Self::Now { .. } => PointName::Named(made.map_or("", TemporarySnapshots::name).to_owned()),
        }
    }
}

/// The input of a job on a point in time.
pub(crate) struct OpenPoint<'a> {
    pub(crate) restore: HostRestore<'a>,
    pub(crate) point: HostPoint,
    /// The present machine.
    pub(crate) guest: Option<&'a KnownGuest>,
    /// The name of the machine.
    pub(crate) machine: &'a str,
    /// The report about the host snapshots that were created for this job, if any.
    pub(crate) made: Option<&'a HostSnapshotReport>,
}

/// Parses a machine and a point in time.
pub(crate) fn parse(point: &OsStr) -> Result<(String, PointName), Error> {
    let text = point.to_string_lossy();
    split(&text).ok_or_else(|| {
        Error::usage(
            format!("{text} names no point in time"),
            format!("name one: {text}@latest, or {text}@NAME; holdfast host list {text} shows them"),
        )
    })
}

/// Splits `MACHINE@SNAPSHOT`; `None` if the text has another form.
pub(crate) fn split(text: &str) -> Option<(String, PointName)> {
    let (machine, name) = text
        .rsplit_once('@')
        .filter(|(machine, name)| !machine.is_empty() && !name.is_empty())?;
    let name = match name {
        "latest" => PointName::Latest,
        name => PointName::Named(name.to_owned()),
    };
    Some((machine.to_owned(), name))
}

impl PointArgs {
    /// Finds and opens a point in time of a machine, or creates it, and calls `work` with it.
    pub(crate) fn open<T>(
        &self,
        machine: &str,
        when: When,
        context: &Context,
        threads: usize,
        execution: Execution,
        work: impl FnOnce(OpenPoint<'_>, Job<'_>) -> holdfast_engine::Result<T>,
    ) -> Result<T, Error> {
        let uri = libvirt_address(self.connect.as_deref(), context);
        let hypervisor: Libvirt = connect_libvirt(&uri, context)?;
        let hypervisors = Hypervisors::new(Some(&uri), context);
        let guest = match find(machine, &hypervisors) {
            Ok(guest) => Some(guest),
            Err(error) if error.is_no_such_machine() && matches!(when, When::Then(_)) => None,
            Err(error) => return Err(error),
        };
        let is_now = matches!(when, When::Now { .. });
        let present = guest.as_ref().filter(|_| is_now);
        let wanted = present.map_or(Ok(Vec::new()), |guest| wanted_now(guest, context))?;
        let providers = datasets::providers(context);
        let environment = context.environment();
        context.work(threads, |job| {
            let states = self.states(execution, context, job)?;
            let temporary = match (&when, present) {
                (When::Now { quiesce, memory }, Some(guest)) => {
                    let asked = held_still(guest, *quiesce, *memory, Some(&states), context)?;
                    let request = request_now(asked, wanted, &providers, &states)?;
                    Some(TemporarySnapshots::take(&request, &states, &environment, job)?)
                }
                _ => None,
            };
            let name = when.name(temporary.as_ref());
            let opened = || {
                let request = HostPointRequest {
                    providers: &providers,
                    states: &states,
                    machine,
                    present: guest.as_ref().map(|guest| (&guest.description, &guest.places)),
                    name,
                    run: runs::new_run()?,
                };
                open_host_point(&request, job)
            };
            let restore = HostRestore {
                providers: &providers,
                states: &states,
                hypervisor: &hypervisor,
                environment: &environment,
                runtime: context.runtime_folder(),
            };
            let done = opened().and_then(|point| {
                let point = OpenPoint {
                    restore,
                    point,
                    guest: guest.as_ref(),
                    machine,
                    made: temporary.as_ref().map(TemporarySnapshots::report),
                };
                work(point, job)
            });
            if let Some(temporary) = temporary {
                temporary.remove(job);
                self.states.sweep(&providers, context, job);
            }
            done
        })
    }

    fn states(&self, execution: Execution, context: &Context, job: Job<'_>) -> holdfast_engine::Result<StateStore> {
        match execution {
            Execution::DryRun => self.states.open_to_look(context, job),
            Execution::Execute => self.states.open_for_memory(context, job),
        }
    }

    /// The hypervisors to search for machines.
    pub(crate) fn hypervisors<'a>(&self, context: &'a Context) -> Hypervisors<'a> {
        Hypervisors::new(self.connect.as_deref(), context)
    }

    /// The host snapshots that would be created of a machine's present state.
    pub(crate) fn planned_now(
        &self,
        machine: &str,
        context: &Context,
    ) -> Result<(Vec<HostSnapshotScope>, KnownGuest), Error> {
        let guest = find(machine, &self.hypervisors(context))?;
        Ok((wanted_now(&guest, context)?, guest))
    }
}

/// The request for host snapshots of a machine's present state.
fn request_now<'a>(
    asked: GuestRequest<'a>,
    wanted: Vec<HostSnapshotScope>,
    providers: &'a Providers,
    states: &'a StateStore,
) -> holdfast_engine::Result<HostSnapshotRequest<'a>> {
    check_moved(&asked, &wanted)?;
    let set = runs::new_set()?;
    let of = default_name(Some(&asked.description.summary.name));
    let cut = NamedSnapshotSet {
        // A random suffix, so that two clones in the same second do not conflict.
        name: format!("{of}_for-clone-{:04x}", set.0 & 0xffff),
        wanted,
    };
    Ok(HostSnapshotRequest {
        guests: vec![asked],
        ..request_of(providers, cut, set, Some(states))
    })
}

fn wanted_now(guest: &KnownGuest, context: &Context) -> Result<Vec<HostSnapshotScope>, Error> {
    let name = &guest.description.summary.name;
    let advice =
        format!("holdfast backup {name}, then holdfast restore {name} --to-machine --live: that runs at once, too");
    wanted_of(guest, advice, context)
}

fn find(machine: &str, hypervisors: &Hypervisors<'_>) -> Result<KnownGuest, Error> {
    let word = [OsStr::new(machine).to_owned()];
    let chosen = hypervisors.all_of(MachineWord::parse_all(&word)?)?;
    match &chosen[..] {
        [one] => KnownGuest::find(one, hypervisors),
        _ => Err(Error::usage(
            format!("{machine} means {} machines", chosen.len()),
            "name one",
        )),
    }
}
