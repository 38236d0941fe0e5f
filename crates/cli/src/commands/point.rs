//! Points in time of machines in host snapshots: what `rollback` and `clone` have in common.

use std::ffi::OsStr;

use holdfast_engine::{HostPoint, HostPointRequest, HostRestore, Job, PointName, StateStore, open_host_point};
use holdfast_host::Libvirt;

use crate::context::Context;
use crate::datasets;
use crate::errors::Error;
use crate::guests::KnownGuest;
use crate::machines::{Hypervisors, MachineWord, connect_libvirt, libvirt_address};
use crate::runs;
use crate::states::StateArgs;

/// Where points of machines are found.
#[derive(Debug, clap::Args)]
pub(super) struct PointArgs {
    /// The hypervisor's address: qemu:///system, qemu:///session
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
    #[command(flatten)]
    states: StateArgs,
}

/// Whether anything is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// Nothing is, and nothing is made.
    Look,
    /// It may be.
    Change,
}

impl Use {
    /// That of a run with `--dry-run`, or without.
    pub(super) fn of(is_dry_run: bool) -> Self {
        if is_dry_run { Self::Look } else { Self::Change }
    }
}

/// What a job on a point works with.
pub(super) struct OpenPoint<'a> {
    pub(super) restore: HostRestore<'a>,
    pub(super) point: HostPoint,
    /// The machine as it is today.
    pub(super) guest: Option<&'a KnownGuest>,
    /// What it is called.
    pub(super) machine: &'a str,
}

/// The machine, and the point.
fn parse(point: &OsStr) -> Result<(String, PointName), Error> {
    let text = point.to_string_lossy();
    let both = text
        .rsplit_once('@')
        .filter(|(machine, name)| !machine.is_empty() && !name.is_empty());
    let Some((machine, name)) = both else {
        return Err(Error::usage(
            format!("{text} names no point in time"),
            format!("name one: {text}@latest, or {text}@NAME; holdfast host list {text} shows them"),
        ));
    };
    let name = match name {
        "latest" => PointName::Latest,
        name => PointName::Named(name.to_owned()),
    };
    Ok((machine.to_owned(), name))
}

impl PointArgs {
    /// Finds and opens the point, `MACHINE@SNAPSHOT`, and does `work` with it.
    pub(super) fn open<T>(
        &self,
        point: &OsStr,
        (context, threads, use_of): (&Context, usize, Use),
        work: impl FnOnce(OpenPoint<'_>, Job<'_>) -> holdfast_engine::Result<T>,
    ) -> Result<T, Error> {
        let (machine, name) = parse(point)?;
        let uri = libvirt_address(self.connect.as_deref(), context);
        let hypervisor: Libvirt = connect_libvirt(&uri, context)?;
        let hypervisors = Hypervisors::new(Some(&uri), context);
        let guest = match find(&machine, &hypervisors) {
            Ok(guest) => Some(guest),
            Err(error) if error.is_no_such_machine() => None,
            Err(error) => return Err(error),
        };
        let providers = datasets::providers(context);
        let surroundings = context.surroundings();
        context.work(threads, |job| {
            let states: StateStore = match use_of {
                Use::Look => self.states.open_to_look(context, job)?,
                Use::Change => self.states.open_for_memory(context, job)?,
            };
            let request = HostPointRequest {
                providers: &providers,
                states: &states,
                machine: &machine,
                present: guest.as_ref().map(|guest| (&guest.description, &guest.places)),
                name,
                run: runs::new_run()?,
            };
            let point = open_host_point(&request, job)?;
            let restore = HostRestore {
                providers: &providers,
                states: &states,
                hypervisor: &hypervisor,
                surroundings: &surroundings,
                runtime: context.runtime_folder(),
            };
            let point = OpenPoint {
                restore,
                point,
                guest: guest.as_ref(),
                machine: &machine,
            };
            work(point, job)
        })
    }
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
