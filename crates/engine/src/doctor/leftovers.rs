//! Files and folders of killed runs.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use holdfast_host::fuse_mount::dead_fuse_mounts;
use holdfast_host::provider::is_probe;
use holdfast_host::{MEMORY_PIPE, open_below};

use super::DoctorRequest;
use super::seen::{Leftover, LeftoverKind};
use crate::container::is_of_mount;
use crate::files::atomic_file::left_of;
use crate::files::state_file::half_notes;
use crate::host_snapshot::states::StateStore;
use crate::machine::run_journal::HALF;
use crate::machine::state::scratch::{
    CONTROL_SOCKET, HYPERVISOR_SOCKETS, MIGRATION_SOCKETS, PLAIN_SOCKETS, RETURN_SOCKET, RUNTIME_FOLDERS, SOCKET,
    is_migration_socket, lock_unneeded, own_folders,
};

/// A younger file may still be in use by its creator.
pub(super) const AGE_MIN_MS: i64 = 60_000;
/// Prefixes of folders with scratch files, which earlier versions created.
const SCRATCH: [&str; 2] = ["holdfast-memory-", "holdfast-overlay-"];

/// Finds leftovers. `files` are the files of machines, `snapshot_folders` the folders with host snapshots.
///
/// `processes` are the other Holdfast processes, if known: if there are none, no file can be in use by its creator.
pub(super) fn leftovers(
    request: &DoctorRequest<'_>,
    files: &BTreeSet<&PathBuf>,
    snapshot_folders: &[PathBuf],
    processes: Option<&[Vec<String>]>,
) -> Vec<Leftover> {
    let mut found = Vec::new();
    let is_alone = processes.is_some_and(<[_]>::is_empty);
    let now_ms = (request.now_ms)();
    let is_old = |path: &Path| changed_ms(path).is_some_and(|changed| now_ms - changed > AGE_MIN_MS);
    if request.everything {
        // The mounts of containers are examined with their file systems.
        let runtime = request
            .runtime
            .canonicalize()
            .unwrap_or_else(|_| request.runtime.clone());
        // Also those of other runtime folders: only there, their file systems are thawed and unmounted first.
        let is_of_container = |folder: &PathBuf| folder.parent().is_some_and(is_of_mount);
        let is_other = |folder: &PathBuf| !folder.starts_with(&runtime) && !is_of_container(folder);
        let mounts = dead_fuse_mounts().into_iter().filter(is_other);
        found.extend(mounts.map(|folder| leftover(folder, LeftoverKind::DeadMount)));
        let notes = request.journal.iter().chain(&request.places).chain(&request.pulls);
        let half_notes = notes.flat_map(|folder| half_notes(folder, HALF));
        found.extend(half_notes.map(|path| leftover(path, LeftoverKind::HalfNote)));
        for folder in own_folders(&request.runtime, &[RUNTIME_FOLDERS]) {
            let is_left = match names(&folder).as_deref() {
                // QEMU or a server may still serve there.
                Some([name]) if name == SOCKET || name == CONTROL_SOCKET => is_deserted(&folder.join(name)),
                // Nothing yet, a pipe, or the sockets of a migration.
                Some(names)
                    if names.iter().all(|name| {
                        [MEMORY_PIPE, RETURN_SOCKET].contains(&&name[..]) || MIGRATION_SOCKETS.contains(&&name[..])
                    }) =>
                {
                    lock_unneeded(&folder).is_some()
                }
                _ => false,
            };
            found.extend(is_left.then(|| leftover(folder, LeftoverKind::Socket)));
        }
        let sockets = [HYPERVISOR_SOCKETS, PLAIN_SOCKETS].map(Path::new);
        let sockets = sockets.into_iter().flat_map(unbound_sockets);
        found.extend(sockets.map(|path| leftover(path, LeftoverKind::MigrationSocket)));
        let states = request.storage.as_ref().and_then(|storage| storage.states);
        let scratch = states.map(StateStore::scratch).into_iter();
        let scratch = scratch.chain([request.scratch.clone()]);
        for folder in scratch.flat_map(|place| own_folders(&place, &SCRATCH)) {
            // A machine may have a disk in it, even if another program created it.
            let is_image = files.iter().any(|file| file.starts_with(&folder));
            if is_old(&folder) && !is_image && open_below(&folder) == Some(false) {
                found.push(leftover(folder, LeftoverKind::Scratch));
            }
        }
    }
    let beside = files.iter().filter_map(|file| file.parent());
    let folders: BTreeSet<&Path> = beside.chain(snapshot_folders.iter().map(PathBuf::as_path)).collect();
    let probes = folders
        .into_iter()
        .flat_map(probes)
        .filter(|probe| is_alone || is_old(probe));
    found.extend(probes.map(|probe| leftover(probe, LeftoverKind::Probe)));
    for file in files {
        let partials = left_of(file).into_iter();
        found.extend(partials.map(|path| leftover(path, LeftoverKind::Partial)));
    }
    found
}

/// Files in a folder with which a process tested whether files can be cloned.
fn probes(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let probes = entries.filter(|entry| {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        is_file && entry.file_name().to_str().is_some_and(is_probe)
    });
    probes.map(|entry| entry.path()).collect()
}

pub(super) fn leftover(path: PathBuf, kind: LeftoverKind) -> Leftover {
    Leftover {
        since_ms: changed_ms(&path),
        path,
        kind,
    }
}

pub(super) fn changed_ms(path: &Path) -> Option<i64> {
    Some(path.symlink_metadata().ok()?.mtime() * 1000)
}

fn names(folder: &Path) -> Option<Vec<String>> {
    let entries = std::fs::read_dir(folder).ok()?;
    Some(
        entries
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect(),
    )
}

/// Sockets of migrations that no process has bound. A connection would be taken for the memory of a machine.
fn unbound_sockets(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let sockets = names(folder)
        .unwrap_or_default()
        .into_iter()
        .map(|name| folder.join(name));
    let sockets: Vec<PathBuf> = sockets.filter(|path| is_migration_socket(path)).collect();
    // It is read after the names: a socket of a new migration is in it. Without it, every socket may be in use.
    let bound = std::fs::read_to_string("/proc/net/unix").ok();
    sockets.into_iter().filter(move |socket| {
        let is_bound = |line: &str| line.split_whitespace().nth(7).map(Path::new) == Some(socket);
        bound.as_ref().is_some_and(|bound| !bound.lines().any(is_bound))
    })
}

/// Whether a socket has no listener: neither the backup, nor QEMU, to which the backup has passed it.
fn is_deserted(socket: &Path) -> bool {
    let refused = |error: std::io::Error| error.kind() == std::io::ErrorKind::ConnectionRefused;
    UnixStream::connect(socket).is_err_and(refused)
}
