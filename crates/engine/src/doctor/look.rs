//! Examines machines and host. Changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use holdfast_host::qemu::{QemuDisk, disks, jobs, runs_in};
use holdfast_host::{Description, MachineState, ProcessInfo, Rights, agent, parent_of, processes_named};
use holdfast_repo::{Liveness, Repository};

use super::chains::{chains_of, is_write_protected};
use super::emptied::emptied;
use super::leftovers::leftovers;
use super::seen::{Leftover, Seen, SeenCommit, SeenDisk, SeenFreeze, SeenMachine, SeenRepository, SeenRun};
use super::{DoctorRequest, ExaminedMachine};
use super::{containers, host_work, instants, places, pool, pulls, virtualbox};
use crate::job::{Error, Job, Result};
use crate::notes::{NOTE_BITMAP, NOTE_CONTAINER_LAYER, NOTE_XEN_BASE, note};
use jiff::tz::TimeZone;

use crate::machine::run_journal::noted_runs;
use crate::repository::calendar::Calendar;
use crate::repository::name_conflict::MachineIdentity;
use crate::repository::open::snapshots;

/// The commands that change a QEMU.
const CHANGING_VERBS: [&str; 7] = ["backup", "restore", "export", "snapshot", "rollback", "clone", "cron"];
/// Timeout of the guest agent for the state of its file systems.
pub(super) const AGENT_DEADLINE: Duration = Duration::from_secs(5);

pub(super) fn look(request: &DoctorRequest<'_>, job: Job<'_>) -> Result<Seen> {
    let (pools, unreachable) = pool::look(request);
    let mut seen = look_at_machines(request, job)?;
    seen.pools = pools;
    seen.unreachable.extend(unreachable);
    seen.forgotten_repositories.clone_from(&request.forgotten_repositories);
    virtualbox::look(request, &mut seen);
    containers::look(request, &mut seen);
    Ok(seen)
}

/// Examines the machines of libvirt and QEMU, and the host.
fn look_at_machines(request: &DoctorRequest<'_>, job: Job<'_>) -> Result<Seen> {
    // Running processes are listed first: files that one of them has created by then are not leftovers.
    let found = processes_named(request.program);
    let noted = match &request.journal {
        Some(folder) => noted_runs(folder)?,
        None => Vec::new(),
    };
    let runs = noted.into_iter().map(|record| SeenRun {
        life: record.liveness(request.processes),
        record,
    });
    let runs: Vec<SeenRun> = runs.collect();
    let unattached = found
        .as_ref()
        .map_or_else(Vec::new, |found| unattached(found, &runs, request));
    let processes = found.map(|found| found.into_iter().map(|process| process.arguments).collect());
    let mut seen = Seen {
        runs,
        unattached,
        processes,
        everything: request.everything,
        address: request.address.clone(),
        unreachable: request.unreachable.clone(),
        repository: request
            .repository
            .map(|repository| look_into(repository, job))
            .transpose()?,
        ..Seen::default()
    };
    let descriptions = descriptions(request, &mut seen, job)?;
    let mut chains = BTreeMap::new();
    for description in &descriptions {
        for (target, chain) in chains_of(description, &Rights::Own) {
            chains.insert((description.summary.name.clone(), target), chain);
        }
    }
    seen.chains = chains.into_iter().map(|((name, _), chain)| (name, chain)).collect();
    let images: Vec<_> = seen.chains.iter().filter_map(|(_, chain)| chain.first()).collect();
    seen.pulls = pulls::look(request);
    seen.places = places::look(request)?;
    let folders = places::folders(&seen.places);
    let instants = instants::look(request, &images, &folders, seen.processes.as_deref());
    let beside = descriptions.iter().flat_map(|description| {
        let tpm = description.tpm.as_ref().and_then(|tpm| tpm.place.file());
        description.nvram.iter().chain(tpm.map(|file| &file.path))
    });
    // An examined machine is also one of the neighbours.
    let files: BTreeSet<&PathBuf> = images.iter().copied().chain(beside).collect();
    seen.host = host_work::look(request, &descriptions, job)?;
    let leftovers = leftovers(request, &files, &seen.host.folders, seen.processes.as_deref());
    let emptied = match request.neighbours {
        Some(_) => emptied(&images, &seen.chains),
        None => Vec::new(),
    };
    seen.instants = instants;
    seen.emptied = emptied;
    seen.leftovers = leftovers;
    let elsewhere = places::leftovers(&seen.places);
    let is_new = |one: &Leftover| !seen.leftovers.iter().any(|known| known.path == one.path);
    let elsewhere: Vec<Leftover> = elsewhere.into_iter().filter(is_new).collect();
    seen.leftovers.extend(elsewhere);
    Ok(seen)
}

/// Processes that may be working on a machine, but have no note and no watchdog of a run.
///
/// A run has its watchdog from before its first change to a QEMU until after its last.
fn unattached(processes: &[ProcessInfo], runs: &[SeenRun], request: &DoctorRequest<'_>) -> Vec<String> {
    let watchdogs = processes
        .iter()
        .filter(|process| process.arguments.iter().any(|word| word == "watchdog"));
    let watched: BTreeSet<u32> = watchdogs.filter_map(|watchdog| parent_of(watchdog.pid)).collect();
    let noted = runs.iter().filter(|noted| noted.life == Liveness::Alive);
    let noted: BTreeSet<u32> = noted.map(|noted| noted.record.process.process).collect();
    let is_examined = |address: &str| {
        let mut subjects = request.subjects.iter();
        address == request.address || subjects.any(|subject| subject.address == address)
    };
    let may_be = processes.iter().filter(|process| {
        let is_verb = |word: &String| CHANGING_VERBS.contains(&&word[..]);
        process.arguments.iter().any(is_verb)
            && address_in(&process.arguments).is_none_or(is_examined)
            && !watched.contains(&process.pid)
            && !noted.contains(&process.pid)
    });
    may_be
        .map(|process| format!("process {} ({})", process.pid, process.arguments.join(" ")))
        .collect()
}

/// The hypervisor address in the arguments of a process.
fn address_in(words: &[String]) -> Option<&str> {
    let mut words = words.iter();
    words
        .find_map(|word| match word.strip_prefix("--connect") {
            Some("") => Some(""),
            Some(rest) => rest.strip_prefix('='),
            None => (word == "-c").then_some(""),
        })
        .and_then(|value| {
            if value.is_empty() {
                words.next().map(String::as_str)
            } else {
                Some(value)
            }
        })
}

/// The examined machines, and their neighbours whose files may be read: not those whose files another user names.
fn descriptions(request: &DoctorRequest<'_>, seen: &mut Seen, job: Job<'_>) -> Result<Vec<Description>> {
    let mut descriptions = Vec::new();
    for subject in &request.subjects {
        job.interrupt.check()?;
        match machine(subject, request) {
            Ok((machine, description)) => {
                let name = machine.name.clone();
                seen.machines.push(machine);
                match subject.machine.rights().other_user() {
                    None => descriptions.push(description),
                    Some(user) => seen.unreachable.push((
                        name,
                        format!("its files are those of user {user}: holdfast doctor of that user looks at them"),
                    )),
                }
            }
            Err(error) => seen
                .unreachable
                .push((subject.machine.name().to_owned(), error.to_string())),
        }
    }
    let neighbours = request.neighbours;
    if let Some(hypervisor) = neighbours.filter(|hypervisor| hypervisor.rights() == Rights::Own) {
        for summary in hypervisor.machines()? {
            if let Ok(description) = hypervisor.machine(&summary.uuid).and_then(|machine| machine.describe()) {
                descriptions.push(description);
            }
        }
    }
    Ok(descriptions)
}

/// The bitmaps that the newest snapshot of each machine needs, also if several machines have the same name, and the
/// disks that pools must keep.
///
/// The next backup ignores a snapshot in the future, so such a snapshot does not replace the newest one of the past.
fn look_into(repository: &Repository, job: Job<'_>) -> Result<SeenRepository> {
    let (mut newest, mut bases) = (BTreeMap::new(), BTreeSet::new());
    let zone = TimeZone::UTC;
    let calendar = Calendar::new(repository, &zone, job.progress);
    for manifest in snapshots(repository, job.progress)? {
        let of_disks = manifest
            .disks
            .iter()
            .filter_map(|disk| note(&disk.notes, NOTE_XEN_BASE));
        bases.extend(of_disks.cloned());
        let kept = newest
            .entry((
                manifest.machine.clone(),
                MachineIdentity::of(&manifest),
                calendar.is_future(&manifest),
            ))
            .or_insert_with(|| manifest.clone());
        if kept.time_ms < manifest.time_ms {
            *kept = manifest;
        }
    }
    let disks = newest.values().flat_map(|manifest| &manifest.disks);
    let layers = disks
        .clone()
        .filter_map(|disk| disk.notes.get(NOTE_CONTAINER_LAYER).cloned());
    Ok(SeenRepository {
        layers: layers.collect(),
        id: repository.config().id.to_string(),
        needed: disks.filter_map(|disk| disk.notes.get(NOTE_BITMAP).cloned()).collect(),
        bases,
    })
}

fn machine(subject: &ExaminedMachine<'_>, request: &DoctorRequest<'_>) -> Result<(SeenMachine, Description)> {
    let machine = subject.machine;
    let description = machine.describe()?;
    let summary = description.summary.clone();
    let is_libvirt = !subject.address.starts_with("qmp:");
    let has_qemu = matches!(summary.state, MachineState::Running | MachineState::Paused);
    let failed = |source| {
        Error::from(holdfast_host::Error::Monitor {
            machine: summary.name.clone(),
            source,
        })
    };
    let overlays = request.overlays.filter(|_| is_libvirt);
    let mut seen = SeenMachine {
        name: summary.name.clone(),
        uuid: summary.uuid.clone(),
        address: subject.address.clone(),
        is_libvirt,
        state: summary.state,
        runs: Vec::new(),
        frozen: SeenFreeze::NotAsked,
        jobs: Vec::new(),
        disks: Vec::new(),
        snapshot_files: overlays.and_then(|overlays| overlays.snapshot_files(&summary.uuid).ok()),
    };
    let mut devices = Vec::new();
    if has_qemu {
        seen.runs = runs_in(machine.monitor()).map_err(failed)?.into_iter().collect();
        seen.jobs = jobs(machine.monitor()).map_err(failed)?;
        devices = disks(machine.monitor()).map_err(failed)?;
    }
    if summary.state == MachineState::Running && description.has_agent_channel {
        seen.frozen = freeze(subject);
    }
    for (target, chain) in chains_of(&description, &machine.rights()) {
        let alias = description.disks.iter().find(|disk| disk.target == target);
        let alias = alias.and_then(|disk| disk.alias.as_deref());
        let device: Option<&QemuDisk> = alias.and_then(|alias| devices.iter().find(|device| device.is_called(alias)));
        let commit = overlays
            .filter(|_| has_qemu && chain.len() > 1)
            .and_then(|overlays| overlays.commit_progress(&summary.uuid, &target).ok().flatten());
        seen.disks.push(SeenDisk {
            commit: match commit {
                None => SeenCommit::None,
                Some(progress) if progress.is_complete() => SeenCommit::Complete,
                Some(_) => SeenCommit::OnItsWay,
            },
            node: device.map(|device| device.node.clone()),
            bitmaps: device.map(|device| device.bitmaps.clone()).unwrap_or_default(),
            write_protected: chain.iter().filter(|path| is_write_protected(path)).cloned().collect(),
            target,
            chain,
        });
    }
    Ok((seen, description))
}

fn freeze(subject: &ExaminedMachine<'_>) -> SeenFreeze {
    match agent::is_frozen(subject.machine, AGENT_DEADLINE) {
        Ok(true) => SeenFreeze::Frozen,
        Ok(false) => SeenFreeze::Thawed,
        // Most machines have an agent channel, and many have no agent connected to it.
        Err(error) => match agent::is_connected(subject.machine.monitor()) {
            Ok(true) => SeenFreeze::Silent(error.to_string()),
            _ => SeenFreeze::NotAsked,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::address_in;

    #[test]
    fn the_address_that_a_process_was_given_is_found() {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for line in [
            "holdfast backup x --connect qemu:///a",
            "holdfast --connect=qemu:///a backup x",
            "h -c qemu:///a",
        ] {
            assert_eq!(address_in(&words(line)), Some("qemu:///a"), "{line}");
        }
        assert_eq!(address_in(&words("holdfast backup --all")), None);
        assert_eq!(address_in(&words("holdfast backup --connect")), None);
    }
}
