//! `holdfast files`: files inside the guests' file systems, read from a snapshot.

mod cat;
mod document;
mod find;
mod list;
pub(super) mod machine;
mod options;
pub(super) mod reader;
mod restore;

use clap::builder::TypedValueParser;
use holdfast_engine::{GuestAddress, Job, LocatedFiles, ReaderOptions, open_guest_volumes};
use holdfast_repo::Repository;

use crate::args::{Example, VerbEntry};
use crate::commands::verb::{Verb, VerbSet, verbs};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `files`.
#[derive(Debug, clap::Args)]
pub(crate) struct FilesArgs {
    #[command(subcommand)]
    verb: FilesVerb,
}

verbs! {
    enum FilesVerb {
        /// List the volumes of a snapshot, or the files of a directory
        "ls" => List(list::FilesListArgs),
        /// Search a directory for names
        "find" => Find(find::FilesFindArgs),
        /// Write a file to standard output
        "cat" => Cat(cat::FilesCatArgs),
        /// Restore a file or a whole directory into a folder
        "restore" => Restore(restore::FilesRestoreArgs),
    }
}

impl Verb for FilesArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "List the volumes of the newest snapshot of a machine",
            line: "holdfast files ls -r /backup/vms web1",
        },
        Example {
            wish: "Restore a directory of a guest",
            line: "holdfast files restore -r /backup/vms web1:/etc/nginx restored",
        },
    ];
    const BELOW: &'static [VerbEntry] = FilesVerb::TABLE;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        self.verb.run(context)
    }
}

/// Parses `SNAPSHOT[:DISK][:VOLUME][:/PATH]`.
fn address_parser() -> impl TypedValueParser<Value = GuestAddress> {
    clap::builder::OsStringValueParser::new().try_map(|text| GuestAddress::parse(&text))
}

/// The file or directory that an address names.
fn locate(
    repository: &Repository,
    address: &GuestAddress,
    readers: &ReaderOptions<'_>,
    context: &Context,
    job: Job<'_>,
) -> holdfast_engine::Result<Located> {
    let mut volumes = open_guest_volumes(repository, address, context.zone(), readers, job)?;
    let files = volumes.locate(&address.path, job)?;
    let snapshot = volumes.snapshot();
    Ok(Located {
        id: snapshot.id.to_string(),
        machine: snapshot.machine.clone(),
        time: holdfast_engine::time_of(snapshot).to_string(),
        files,
    })
}

/// A file or directory, and its snapshot.
struct Located {
    id: String,
    machine: String,
    time: String,
    files: LocatedFiles,
}
