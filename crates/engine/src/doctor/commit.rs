//! Bringing forgotten overlays down into their base while the machine runs.
//!
//! libvirt does it, and knows of it at every moment. It can be interrupted anywhere: until the machine goes over to the base, it is on
//! its overlay as before; a commit that is complete, whose doctor died, is noted in the journal, and the next doctor ends it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_host::Overlays;
use holdfast_host::qemu::RunId;

use super::chains::{chains_of, is_same, is_used, used_images};
use super::{DoctorRequest, EmptiedOverlays, Patient};
use crate::Unit;
use crate::job::Job;
use crate::run_journal::{Phase, RunNote, RunRecord};

const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// How often going over to the base is tried: the guest may write just then.
const PIVOT_COUNT: u32 = 50;

type Words<T> = Result<T, String>;

pub(super) fn commit(
    request: &DoctorRequest<'_>,
    patient: &Patient<'_>,
    (disk, images, base): (&str, &[PathBuf], &Path),
    job: Job<'_>,
) -> Words<String> {
    let overlays = request.overlays.ok_or("libvirt does not manage it")?;
    let description = patient.machine.describe().map_err(|error| error.to_string())?;
    let uuid = &description.summary.uuid;
    // What was planned may be old: nothing is brought down from or into another chain.
    let chain = chains_of(&description).into_iter().find(|(target, _)| target == disk);
    let planned: Vec<&Path> = images.iter().map(PathBuf::as_path).chain([base]).collect();
    let is_as_planned = chain.is_some_and(|(_, chain)| {
        chain.len() >= planned.len() && chain.iter().zip(&planned).all(|(now, then)| is_same(now, then))
    });
    if !is_as_planned {
        return Err("its images are others than a moment ago".to_owned());
    }
    let note = note(request, patient, uuid)?;
    let going = Going {
        overlays,
        machine: uuid,
        disk,
        job,
    };
    going.to_the_end(base)?;
    if let Some(note) = note {
        note.close().map_err(|error| error.to_string())?;
    }
    let mut words = format!("brought disk {disk} down into {}", base.display());
    let deleted = match request.emptied {
        EmptiedOverlays::Keep => Vec::new(),
        EmptiedOverlays::Delete => delete_unused(request, patient, images)?,
    };
    for path in images {
        let shown = path.display();
        let fate = if deleted.contains(path) {
            format!("; deleted {shown}")
        } else {
            format!("; {shown} stays, and is not used by this machine any more")
        };
        words.push_str(&fate);
    }
    Ok(words)
}

fn note(request: &DoctorRequest<'_>, patient: &Patient<'_>, uuid: &str) -> Words<Option<RunNote>> {
    let Some(folder) = &request.journal else {
        return Ok(None);
    };
    let record = RunRecord {
        run: RunId((request.new_run)()),
        machine: patient.machine.name().to_owned(),
        uuid: uuid.to_owned(),
        way: patient.way.clone(),
        process: request.process.clone(),
        start_ms: (request.now_ms)(),
        phase: Phase::Committing,
        was_running: true,
        scratch: request.scratch.clone(),
    };
    RunNote::begin(folder, record)
        .map(Some)
        .map_err(|error| error.to_string())
}

struct Going<'a> {
    overlays: &'a dyn Overlays,
    machine: &'a str,
    disk: &'a str,
    job: Job<'a>,
}

impl Going<'_> {
    fn to_the_end(&self, base: &Path) -> Words<()> {
        let words = |error: holdfast_host::Error| error.to_string();
        let progress = || self.overlays.commit_progress(self.machine, self.disk).map_err(words);
        if progress()?.is_none() {
            self.overlays
                .begin_commit(self.machine, self.disk, base)
                .map_err(words)?;
        }
        let title = format!("bringing disk {} down into its base", self.disk);
        self.job.progress.phase(&title, Unit::Bytes);
        let mut pivots = 0;
        let mut shown = 0;
        loop {
            let Some(now) = progress()? else {
                return Err(
                    "the commit has ended before it was complete; the machine is on its overlay as before".to_owned(),
                );
            };
            self.job.progress.total(now.total_bytes);
            self.job.progress.advance(now.done_bytes.saturating_sub(shown));
            shown = shown.max(now.done_bytes);
            if now.is_complete() {
                match self.overlays.pivot(self.machine, self.disk) {
                    Ok(()) => return Ok(()),
                    Err(error) if pivots == PIVOT_COUNT => return Err(self.give_up(&error.to_string())),
                    Err(_) => pivots += 1,
                }
            }
            if self.job.interrupt.check().is_err() {
                return Err(self.give_up("interrupted"));
            }
            self.job.clock.sleep(LOOK_INTERVAL);
        }
    }

    /// The machine stays on its overlay, and no job is left.
    fn give_up(&self, why: &str) -> String {
        match self.overlays.abandon_commit(self.machine, self.disk) {
            Ok(()) => format!("{why}; the machine is on its overlay as before"),
            Err(error) => format!("{why}; and the commit does not end: {error}"),
        }
    }
}

/// Deletes what no machine has in any chain, as it is now.
fn delete_unused(request: &DoctorRequest<'_>, patient: &Patient<'_>, images: &[PathBuf]) -> Words<Vec<PathBuf>> {
    let used = used_images(request)?;
    let mut deleted = Vec::new();
    for path in images {
        if is_used(&used, path) {
            continue;
        }
        std::fs::remove_file(path).map_err(|error| {
            let name = patient.machine.name();
            format!("{name} is on its base, but {} is not deleted: {error}", path.display())
        })?;
        deleted.push(path.clone());
    }
    Ok(deleted)
}
