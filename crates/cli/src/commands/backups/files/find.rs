//! `holdfast files find`: searches a directory of a guest for names.

use holdfast_engine::{GuestAddress, WalkDepth, walk_files};
use holdfast_policy::Glob;
use serde::Serialize;

use super::document::{FailureDocument, FileDocument, LineDetail, line, walk_exit, warn_of};
use super::options::{ReaderArgs, reader_word};
use super::{address_parser, locate};
use crate::args::Example;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Format, Page, Report};

/// Arguments of `files find`.
#[derive(Debug, clap::Args)]
pub(crate) struct FilesFindArgs {
    /// The snapshot (ID, MACHINE, MACHINE@TIME), and the directory to search
    #[arg(value_name = "SNAPSHOT[:DISK][:VOLUME]:/PATH", value_parser = address_parser())]
    address: GuestAddress,
    /// Pattern for names: * matches any text, ? one character, [a-z] one of these
    #[arg(value_name = "PATTERN", value_parser = Glob::parse)]
    pattern: Glob,
    /// Show permissions, owners, sizes and times
    #[arg(short = 'l', long)]
    long: bool,
    #[command(flatten)]
    readers: ReaderArgs,
}

impl Verb for FilesFindArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Find all configurations of nginx",
            line: "holdfast files find -r /backup/vms web1:/etc '*.conf'",
        },
        Example {
            wish: "Find a document on the second partition of a Windows machine",
            line: "holdfast files find -r /backup/vms pc7:2:/ 'invoice*.docx' -l",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `files find`.
#[derive(Debug, Serialize)]
struct FilesFound {
    id: String,
    machine: String,
    time: String,
    volume: String,
    reader: &'static str,
    files: Vec<FileDocument>,
    unreadable: Vec<FailureDocument>,
    #[serde(skip)]
    exit: Exit,
}

impl Report for FilesFound {
    fn command(&self) -> &'static str {
        "files find"
    }

    fn exit(&self) -> Exit {
        self.exit
    }

    /// The lines were printed when the files were found.
    fn human(&self, _page: &mut Page) {}
}

fn run(args: &FilesFindArgs, context: &Context) -> Result<Exit, Error> {
    let repository = context.open_repository()?;
    let is_json = context.output().format() == Format::Json;
    let detail = if args.long { LineDetail::Long } else { LineDetail::Name };
    let mut files = Vec::new();
    let mut printed = Ok(());
    let (located, walked) = args.readers.with(context, |readers| {
        context.work(1, |job| {
            let mut located = locate(&repository, &args.address, readers, context, job)?;
            let walked = walk_files(&mut located.files, WalkDepth::Tree, job, &mut |file| {
                let name = file.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
                if args.pattern.matches(&String::from_utf8_lossy(name)) {
                    if is_json {
                        files.push(FileDocument::from(&file));
                    } else if printed.is_ok() {
                        printed = context
                            .output()
                            .data(line(&file, b"", detail, context.zone()).as_bytes());
                    }
                }
                Ok(())
            })?;
            Ok((located, walked))
        })
    })?;
    printed?;
    warn_of(&walked.unreadable, context);
    context.report(&FilesFound {
        id: located.id,
        machine: located.machine,
        time: located.time,
        volume: located.files.volume,
        reader: reader_word(located.files.reader),
        files,
        unreadable: walked.unreadable.iter().map(FailureDocument::from).collect(),
        exit: walk_exit(&walked),
    })
}
