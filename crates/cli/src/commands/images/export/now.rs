//! `holdfast export --now`: exports a machine as it is at this moment.

use std::ffi::OsStr;

use holdfast_engine::{ExportFrom, MachineName, MachineReading};
use holdfast_host::DiskChoice;
use serde::Serialize;

use super::ExportArgs;
use crate::commands::backups::backup::{InstantShown, ReadingArgs, ReadingOptions};
use crate::context::Context;
use crate::errors::Error;
use crate::machines::{MachineSelection, MachineWord};

/// Options about a machine as it is.
#[derive(Debug, clap::Args)]
pub(super) struct NowArgs {
    /// Export the machine as it is now, running or not, without a repository
    #[arg(long = "now")]
    pub(super) is_wanted: bool,
    #[command(flatten)]
    pub(super) reading: ReadingArgs,
}

/// How a machine was read.
#[derive(Debug, Serialize)]
pub(super) struct ExportInstantDocument {
    method: &'static str,
    method_reason: String,
    /// How long the machine was paused: zero if it was not paused; null if it was not running.
    paused_us: Option<u64>,
    /// "file system", "crash", or "shut off".
    consistency: String,
    /// How long its file systems were frozen; null if they were not.
    frozen_us: Option<u64>,
    #[serde(skip)]
    pub(super) lines: Vec<String>,
}

impl ExportInstantDocument {
    pub(super) fn new(reading: &MachineReading) -> Self {
        let shown = InstantShown::new(reading);
        Self {
            method: reading.method.word(),
            method_reason: reading.method_reason.clone(),
            paused_us: shown.paused_us,
            consistency: reading.consistency.clone(),
            frozen_us: shown.frozen_us,
            lines: shown.lines(),
        }
    }
}

/// Reads the machine and calls `work` with it.
pub(super) fn from<T>(
    args: &ExportArgs,
    context: &Context,
    work: impl FnOnce(ExportFrom<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    let word = match MachineWord::parse(OsStr::new(&args.what)) {
        Some(MachineWord::VirtualBox(_) | MachineWord::Pool(_)) => {
            return Err(Error::usage(
                format!(
                    "--now reads machines of libvirt and of QEMU, and {} is another's",
                    args.what
                ),
                "back it up, and export the snapshot",
            ));
        }
        Some(MachineWord::Container(_)) => {
            return Err(Error::usage(
                format!("{} is a container, and no machine", args.what),
                "holdfast backup backs it up; holdfast restore --to-tar writes the files of the snapshot to an archive",
            ));
        }
        Some(word) if !word.may_be_several() => word,
        Some(_) => {
            return Err(Error::usage(
                "one machine is exported, and this may mean several",
                "name it in full",
            ));
        }
        None => {
            return Err(Error::usage(
                format!("{} is an image, and no machine", args.what),
                "holdfast image convert makes another image of it",
            ));
        }
    };
    let hypervisors = args.now.reading.hypervisors(context);
    let choice = hypervisors.choose(&MachineSelection {
        words: vec![word],
        ..MachineSelection::default()
    })?;
    let [chosen] = &choice.chosen[..] else {
        unreachable!("one machine was named in full")
    };
    let wish = ReadingOptions {
        chosen,
        // The machine is not listed in a repository.
        listed: &|name| Ok(MachineName::near(name)),
        choice: DiskChoice {
            include: Vec::new(),
            exclude: args.left_out.clone(),
        },
        allowed: Vec::new(),
        memory: None,
    };
    args.now.reading.read(wish, &hypervisors, context, |request| {
        work(ExportFrom::Now(Box::new(request)))
    })
}
