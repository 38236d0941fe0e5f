//! Runs on machines: their numbers, watchdogs, journal entries and scratch folders.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use holdfast_engine::{JournalPlace, PlaceJournal, PlaceNote, SetId};
use holdfast_repo::key::{Randomness as _, SystemRandomness};
use holdfast_repo::{Processes as _, SystemProcesses};

use crate::context::Context;

/// A folder on a disk: a guest may overwrite much data during the backup.
const SCRATCH_DEFAULT: &str = "/var/tmp";

/// Folder of the locks that prevent concurrent runs on this host.
pub fn locks_folder(context: &Context) -> PathBuf {
    let state = context
        .journal_folder()
        .and_then(|runs| Some(runs.parent()?.to_owned()));
    state.unwrap_or_else(|| context.runtime_folder())
}

/// Folder of the records of machines whose disks another host pulls.
pub fn pulls_folder(context: &Context) -> PathBuf {
    locks_folder(context).join("pulls")
}

/// The journal location of a run on the machine at `way`.
pub fn journal(context: &Context, way: &[OsString]) -> Option<JournalPlace> {
    Some(JournalPlace {
        folder: context.journal_folder()?,
        way: texts(way),
        process: SystemProcesses.this(),
    })
}

/// The journal of paths that are being created; `None` if there is no folder for it.
pub fn places(context: &Context) -> Option<PlaceJournal> {
    Some(PlaceJournal {
        folder: context.journal_folder()?.with_file_name("places"),
        process: SystemProcesses.this(),
    })
}

/// Records, until dropped, that something is being created at these paths, so that leftovers of a killed process
/// are found.
pub fn note_places<'p>(paths: impl IntoIterator<Item = &'p Path>, context: &Context) -> Vec<PlaceNote> {
    let folders = paths.into_iter().map(|path| match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    });
    let folders: BTreeSet<&Path> = folders.collect();
    let Some(journal) = places(context) else {
        return Vec::new();
    };
    let note = |folder| {
        let noted = new_run().and_then(|number| PlaceNote::begin(&journal, folder, number));
        let tell = |error: &_| {
            let message = format!("not noted for holdfast doctor: {error}");
            context.console().note(&message);
        };
        noted.inspect_err(tell).ok()
    };
    folders.into_iter().filter_map(note).collect()
}

/// A random number that identifies a run.
pub fn new_run() -> holdfast_engine::Result<u32> {
    let mut run = [0; 4];
    SystemRandomness.fill(&mut run)?;
    Ok(u32::from_le_bytes(run))
}

/// A random number that host snapshots of one point in time share.
pub fn new_set() -> holdfast_engine::Result<SetId> {
    let mut set = [0; 8];
    SystemRandomness.fill(&mut set)?;
    Ok(SetId(u64::from_le_bytes(set)))
}

/// The command that starts this program as the watchdog of a run on the machine at `way`.
pub fn watchdog(
    way: Vec<OsString>,
    run: u32,
    journal: Option<&JournalPlace>,
) -> holdfast_engine::Result<Vec<OsString>> {
    let program = std::env::current_exe().map_err(|source| holdfast_engine::Error::File {
        action: "find the program itself,",
        path: "/proc/self/exe".into(),
        source,
    })?;
    let mut command = vec![program.into(), "watchdog".into()];
    command.extend(way);
    command.extend(["--run".into(), run.to_string().into()]);
    command.extend(words(journal));
    Ok(command)
}

/// The watchdog's arguments for the journal location of its run.
fn words(journal: Option<&JournalPlace>) -> Vec<OsString> {
    let folder = journal.map(|place| place.folder.clone().into_os_string());
    folder
        .into_iter()
        .flat_map(|folder| ["--journal".into(), folder])
        .collect()
}

/// Arguments in the form that the journal stores.
pub fn texts(way: &[OsString]) -> Vec<String> {
    way.iter().map(|word| word.to_string_lossy().into_owned()).collect()
}

/// The folder for scratch files.
pub fn scratch_folder() -> PathBuf {
    SCRATCH_DEFAULT.into()
}
