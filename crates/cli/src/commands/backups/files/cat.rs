//! `holdfast files cat`: writes a file of a guest to standard output.

use holdfast_engine::{GuestAddress, GuestFilesError, open_guest_volumes, read_guest_file};

use super::address_parser;
use super::options::ReaderArgs;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::standard_streams::{StandardOutput, stopped_or};
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `files cat`.
#[derive(Debug, clap::Args)]
pub(crate) struct FilesCatArgs {
    /// The snapshot (ID, MACHINE, MACHINE@TIME), and the path of a file
    #[arg(value_name = "SNAPSHOT[:DISK][:VOLUME]:/PATH", value_parser = address_parser())]
    address: GuestAddress,
    #[command(flatten)]
    readers: ReaderArgs,
}

impl Verb for FilesCatArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Compare a configuration with that of the last backup",
            line: "holdfast files cat -r /backup/vms web1:/etc/nginx/nginx.conf | diff - nginx.conf",
        },
        Example {
            wish: "Read a file as it was at a given time",
            line: "holdfast files cat -r /backup/vms web1@2026-11-20T12:00:vda:1:/etc/fstab",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Json];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

fn run(args: &FilesCatArgs, context: &Context) -> Result<Exit, Error> {
    context.output().refuse_json("files cat")?;
    let repository = context.open_repository()?;
    let mut stdout = StandardOutput::open(context)?;
    args.readers.with(context, |readers| {
        context.work(1, |job| {
            if args.address.has_no_path() {
                return Err(GuestFilesError::NoPath.into());
            }
            // A link is followed: its target is what a user wants to read.
            let mut volumes = open_guest_volumes(&repository, &args.address, context.zone(), readers, job)?;
            let mut files = volumes.locate(&args.address.path, job)?;
            if files.found.metadata.kind == holdfast_guest_files::FileKind::Link {
                let path = [&args.address.path[..], b"/"].concat();
                files = volumes.locate(&path, job)?;
            }
            stopped_or(read_guest_file(&mut files, &mut stdout, job), job).map(drop)
        })
    })?;
    Ok(Exit::Ok.with_warning_count(context.console().warnings().len()))
}
