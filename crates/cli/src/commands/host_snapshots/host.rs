//! `holdfast host`: manages existing host snapshots.

mod clone;
mod datasets;
mod hold;
mod list;
mod prune;
mod remove;

use std::ffi::OsString;

use holdfast_host::provider::Dataset;

use crate::args::{Example, SharedOptions, VerbEntry};
use crate::commands::verb::{Verb, VerbSet, verbs};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::guests::KnownGuest;
use crate::machines::{Hypervisors, MachineWord};

/// Arguments of `host`.
#[derive(Debug, clap::Args)]
pub(crate) struct HostArgs {
    #[command(subcommand)]
    verb: HostVerb,
}

verbs! {
    enum HostVerb {
        /// List the datasets of this host and their sizes
        "datasets" => Datasets(datasets::DatasetsArgs),
        /// List host snapshots
        "list" => List(list::HostListArgs),
        /// Clone a host snapshot to a writable dataset, which shares its data
        "clone" => Clone(clone::HostCloneArgs),
        /// Remove the host snapshots that no retention rule keeps
        "prune" => Prune(prune::HostPruneArgs),
        /// Remove host snapshots
        "remove" => Remove(remove::HostRemoveArgs),
        /// Hold host snapshots: they cannot be removed until they are released
        "hold" => Hold(hold::HoldArgs),
        /// Release held host snapshots
        "release" => Release(hold::ReleaseArgs),
    }
}

impl Verb for HostArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See the datasets, and their sizes",
            line: "holdfast host datasets",
        },
        Example {
            wish: "See the host snapshots of a dataset",
            line: "holdfast host list tank/vm",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];
    const BELOW: &'static [VerbEntry] = HostVerb::TABLE;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        self.verb.run(context)
    }
}

/// The meaning of a word.
enum Meant {
    Dataset(Dataset),
    Machine(Box<KnownGuest>),
}

/// The datasets or machines that the words select.
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

/// The datasets of a machine's disks and of their backing files.
fn datasets_of(guest: &KnownGuest) -> impl Iterator<Item = Dataset> {
    guest.places.wanted_with_bases().into_iter().map(|one| one.dataset)
}
