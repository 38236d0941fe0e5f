//! Repairs one finding.

use std::path::Path;
use std::time::Duration;

use holdfast_block::error_text;
use holdfast_host::fuse_mount::{UnmountMode, unmount_fuse};
use holdfast_host::qemu::{RunId, dismiss_job, remove_bitmap, remove_run, resume};
use holdfast_host::{Machine, MachineState, agent};

use super::commit::commit;
use super::instants::abandon;
use super::look::AGENT_DEADLINE;
use super::seen::Repair;
use super::{
    Action, DoctorRequest, ExaminedMachine, Finding, FindingState, containers, emptied, places, pool, repair_host,
    virtualbox,
};
use crate::files::atomic_file::delete_left;
use crate::files::state_file::delete_half_note;
use crate::job::Job;
use crate::machine::run_journal::forget_run;
use crate::machine::state::scratch::lock_unneeded;
use crate::restore::instant::is_still_unfinished;

/// Timeout for thawing: guests with many pending writes need time.
const THAW_DEADLINE: Duration = Duration::from_secs(20);

pub(super) fn repair(request: &DoctorRequest<'_>, finding: &Finding, job: Job<'_>) -> FindingState {
    let Action::Repair(repair, _) = &finding.remedy else {
        return FindingState::Left;
    };
    let done = match repair {
        Repair::DeleteFolder(path) => delete_folder(path),
        Repair::DeletePartial(path) => delete_left(path)
            .map(|()| format!("deleted {}", path.display()))
            .map_err(|error| error.to_string()),
        // Programs that still use it only get errors.
        Repair::Unmount(folder) => unmount_fuse(folder, UnmountMode::Detach)
            .map(|()| format!("unmounted {}", folder.display()))
            .map_err(|error| error_text(&error)),
        Repair::ForgetPlace { number, held } => places::forget(request, *number, held.as_ref()),
        Repair::DeleteEmptied { overlay, image } => emptied::delete(request, overlay, image),
        Repair::DeleteHalfNote(path) => delete_half_note(path)
            .map(|()| format!("deleted {}", path.display()))
            .map_err(|error| error.to_string()),
        Repair::DeleteFile(path) => repair_host::delete_file(path),
        Repair::ClearRemain(remain) => repair_host::clear_remain(request, remain),
        Repair::DestroyClone(clone) => repair_host::destroy_clone(request, clone),
        Repair::FinishClone(clone) => repair_host::finish_clone(request, clone),
        Repair::RemoveHalfClone(uuid) => repair_host::remove_half_clone(request, uuid),
        Repair::RemoveCut(names, set) => repair_host::remove_cut(request, names, *set, job),
        Repair::RemoveInstant(set) => repair_host::remove_instant(request, set, job),
        Repair::ForgetWork(uuid) => repair_host::forget_work(request, uuid),
        Repair::DeleteSnapshots(uuid) => virtualbox::delete(request, uuid, job),
        Repair::RemovePoolSnapshots { pool: title, uuids } => pool::remove_snapshots(request, title, uuids, job),
        Repair::RemoveKeptDisks {
            pool: title,
            purpose,
            uuids,
        } => pool::remove_kept_disks(request, title, purpose, uuids),
        Repair::ClearRuntime(folder) => containers::clear_runtime(folder, job),
        Repair::ResetGracePeriods => containers::reset_grace_periods(),
        Repair::DeleteContainerSnapshots { folder, ids } => containers::delete_layers(request, folder, ids, job),
        Repair::DeleteUnfinishedContainer(folder) => containers::delete_partial(request, folder, job),
        Repair::ForgetStates => repair_host::forget_states(request, job),
        Repair::Abandon(folder) => abandon(request, folder, job.clock),
        Repair::ForgetRun(run) => forget(request, finding, *run, job),
        of_machine => {
            let name = finding.machine.as_deref().unwrap_or_default();
            match request.subjects.iter().find(|subject| subject.machine.name() == name) {
                Some(subject) => repair_machine(request, subject, of_machine, job),
                None => Err("the machine is gone".to_owned()),
            }
        }
    };
    match done {
        Ok(words) => FindingState::Repaired(words),
        Err(words) => FindingState::Failed(words),
    }
}

/// Deletes the note of a run, after a last attempt to remove the run from the machine's QEMU: files of a paused machine
/// are visible only when it runs again, and without the note their owner would be unknown.
fn forget(request: &DoctorRequest<'_>, finding: &Finding, run: RunId, job: Job<'_>) -> Result<String, String> {
    let name = finding.machine.as_deref().unwrap_or_default();
    let subjects = request.subjects.iter();
    for subject in subjects.filter(|subject| subject.machine.name() == name) {
        let state = subject.machine.describe().map(|description| description.summary.state);
        if matches!(state, Ok(MachineState::Running | MachineState::Paused)) {
            remove_run(subject.machine.monitor(), job.clock, run).map_err(|error| error.to_string())?;
        }
    }
    let folder = request.journal.as_deref().unwrap_or(Path::new("."));
    forget_run(folder, run)
        .map(|()| format!("removed the note of run {run}"))
        .map_err(|error| error.to_string())
}

fn repair_machine(
    request: &DoctorRequest<'_>,
    subject: &ExaminedMachine<'_>,
    repair: &Repair,
    job: Job<'_>,
) -> Result<String, String> {
    let machine = subject.machine;
    let monitor = machine.monitor();
    let done = match repair {
        Repair::Resume => return resume_and_thaw(machine),
        Repair::Thaw => {
            let thawed = agent::thaw(machine, THAW_DEADLINE).map_err(|error| error.to_string())?;
            return Ok(format!("thawed {thawed} file systems"));
        }
        Repair::RemoveRun(run) => {
            remove_run(monitor, job.clock, *run).map(|()| format!("removed what run {run} had added to QEMU"))
        }
        Repair::DismissJob(id) => dismiss_job(monitor, id).map(|()| format!("dismissed the job {id}")),
        Repair::RemoveBitmap { node, name } => {
            remove_bitmap(monitor, node, name).map(|()| format!("removed the bitmap {name}"))
        }
        Repair::Commit { disk, overlays, base } => return commit(request, subject, disk, overlays, base, job),
        other => return Err(format!("{other:?} is about no machine")),
    };
    done.map_err(|error| error.to_string())
}

/// Resumes a machine, and thaws its file systems: a run freezes them before it pauses the machine, and a paused guest
/// cannot be asked.
fn resume_and_thaw(machine: &dyn Machine) -> Result<String, String> {
    let words = |error: holdfast_host::Error| error.to_string();
    resume(machine.monitor()).map_err(|error| error.to_string())?;
    if !machine.describe().map_err(words)?.has_agent_channel {
        return Ok("resumed it".to_owned());
    }
    match agent::is_frozen(machine, AGENT_DEADLINE) {
        Ok(false) => Ok("resumed it".to_owned()),
        Ok(true) => {
            let thawed = agent::thaw(machine, THAW_DEADLINE).map_err(|error| error.to_string())?;
            Ok(format!("resumed it, and thawed {thawed} file systems"))
        }
        Err(error) => match agent::is_connected(machine.monitor()) {
            Ok(true) => Err(format!(
                "resumed it, but its guest agent does not answer, so its file systems may be frozen: {error}; run the \
                 doctor again"
            )),
            _ => Ok("resumed it".to_owned()),
        },
    }
}

/// Deletes a folder, unless a process has locked it since it was found.
fn delete_folder(path: &Path) -> Result<String, String> {
    let lock = lock_unneeded(path).filter(|_| is_still_unfinished(path));
    let _lock = lock.ok_or_else(|| format!("{}: a process is using it", path.display()))?;
    std::fs::remove_dir_all(path)
        .map(|()| format!("deleted {}", path.display()))
        .map_err(|error| format!("{}: {error}", path.display()))
}
