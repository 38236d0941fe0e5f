//! `holdfast host`: the host snapshots that are there.

mod clone;
mod datasets;
mod hold;
mod list;
mod prune;
mod remove;

use std::ffi::OsString;

use holdfast_host::provider::Dataset;

use crate::args::Example;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::guests::KnownGuest;
use crate::machines::{Hypervisors, MachineWord};

/// Arguments of `host`.
#[derive(Debug, clap::Args)]
pub struct HostArgs {
    #[command(subcommand)]
    verb: HostVerb,
}

#[derive(Debug, clap::Subcommand)]
enum HostVerb {
    /// List the datasets of this host, and what they take
    Datasets(datasets::DatasetsArgs),
    /// List host snapshots, whoever made them
    List(list::ListArgs),
    /// Make a writable dataset of a host snapshot, which shares all with it
    Clone(clone::CloneArgs),
    /// Remove the host snapshots that no rule keeps
    Prune(prune::PruneArgs),
    /// Remove host snapshots
    Remove(remove::RemoveArgs),
    /// Hold host snapshots: nobody can remove them until they are released
    Hold(hold::HoldArgs),
    /// Release host snapshots that were held
    Release(hold::HoldArgs),
}

/// What a person may want of it.
pub(in crate::commands) const EXAMPLES: &[Example] = &[
    Example {
        wish: "See which datasets there are, and what they take",
        line: "holdfast host datasets",
    },
    Example {
        wish: "See the host snapshots of a dataset",
        line: "holdfast host list tank/vm",
    },
];

/// What a person may want of its verbs.
pub(in crate::commands) fn examples_of(path: &str) -> &'static [Example] {
    match path {
        "host" => EXAMPLES,
        "host datasets" => datasets::EXAMPLES,
        "host clone" => clone::EXAMPLES,
        "host list" => list::EXAMPLES,
        "host prune" => prune::EXAMPLES,
        "host remove" => remove::EXAMPLES,
        "host hold" => hold::EXAMPLES_HOLD,
        "host release" => hold::EXAMPLES_RELEASE,
        _ => &[],
    }
}

/// What a word means.
enum Meant {
    Dataset(Dataset),
    Machine(Box<KnownGuest>),
}

/// What words mean: datasets, or machines.
fn meant(words: &[OsString], connect: Option<&str>, context: &Context) -> Result<Vec<Meant>, Error> {
    let hypervisors = Hypervisors::new(connect, context);
    let mut meant = Vec::new();
    for word in words {
        if let Some(dataset) = crate::machines::datasets::parse(word)? {
            meant.push(Meant::Dataset(dataset));
            continue;
        }
        let machines = MachineWord::parse_all(std::slice::from_ref(word))?;
        for chosen in hypervisors.all_of(machines)? {
            meant.push(Meant::Machine(Box::new(KnownGuest::find(&chosen, &hypervisors)?)));
        }
    }
    Ok(meant)
}

/// The datasets with the disks of a machine, and with what these are based on.
fn datasets_of(guest: &KnownGuest) -> impl Iterator<Item = Dataset> {
    guest.places.wanted_with_bases().into_iter().map(|one| one.dataset)
}

/// Does it.
pub(in crate::commands) fn run(args: &HostArgs, context: &Context) -> Result<Exit, Error> {
    match &args.verb {
        HostVerb::Datasets(args) => datasets::run(args, context),
        HostVerb::Clone(args) => clone::run(args, context),
        HostVerb::List(args) => list::run(args, context),
        HostVerb::Prune(args) => prune::run(args, context),
        HostVerb::Remove(args) => remove::run(args, context),
        HostVerb::Hold(args) => hold::run(args, hold::Change::Hold, context),
        HostVerb::Release(args) => hold::run(args, hold::Change::Release, context),
    }
}
