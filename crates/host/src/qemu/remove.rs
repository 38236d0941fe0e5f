//! Removes the objects of a run from QEMU, identified by their names, whatever state the run was in.

use std::collections::BTreeSet;
use std::time::Duration;

use holdfast_block::Clock;
use serde_json::{Value, json};

use super::copy::end_jobs;
use super::disks::{QemuDisk, bitmaps_of, disks};
use super::graph::{Graph, about_node};
use super::jobs::jobs;
use super::memory::end_sending;
use super::names::{Role, RunId, role_of, run_of};
use super::write_limit::{limiting_runs, unlimit_writes};
use crate::qemu::disks::set_drive;
use crate::qemu::jobs::list;
use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand, Result};

/// A closing export releases its node when its last request has completed.
const ATTEMPT_COUNT: u32 = 40;
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(50);
/// Part of QEMU's message if its NBD server does not run.
const SERVER_STOPPED: &str = "not running";

/// The runs with objects in this QEMU.
///
/// Files of a paused machine do not count, unless the machine is sending its memory: QEMU closes removed files only
/// while the machine runs. A machine that has sent its memory remains in that state as long as it is paused.
pub fn runs_in(monitor: &dyn Monitor) -> Result<BTreeSet<RunId>> {
    let mut runs: BTreeSet<RunId> = node_names(monitor)?.iter().filter_map(|name| run_of(name)).collect();
    runs.extend(export_ids(monitor)?.iter().filter_map(|id| run_of(id)));
    runs.extend(jobs(monitor)?.iter().filter_map(|job| run_of(&job.id)));
    let status = monitor.execute(&QmpCommand::new("query-status", Value::Null))?;
    if status["running"] == true || status["status"] == "finish-migrate" {
        runs.extend(fd_sets(monitor)?.iter().filter_map(|(_, label)| run_of(label)));
    }
    runs.extend(limiting_runs(monitor)?);
    runs.extend(bitmaps(monitor)?.iter().filter_map(|bitmap| run_of(&bitmap.name)));
    Ok(runs)
}

/// Removes runs that have only files in this QEMU, and an NBD server without exports. These belong to a run that read
/// the machine while it was paused, or that ended before its point in time. A run that is sending the machine's
/// memory is not removed.
pub fn drop_idle_files(monitor: &dyn Monitor, clock: &dyn Clock) -> Result<()> {
    let status = monitor.execute(&QmpCommand::new("query-status", Value::Null))?;
    if status["status"] == "finish-migrate" {
        return Ok(());
    }
    let names = node_names(monitor)?.into_iter().chain(export_ids(monitor)?);
    let at_work: BTreeSet<RunId> = names.filter_map(|name| run_of(&name)).collect();
    let with_files: BTreeSet<RunId> = fd_sets(monitor)?
        .iter()
        .filter_map(|(_, label)| run_of(label))
        .collect();
    with_files
        .difference(&at_work)
        .try_for_each(|run| remove_run(monitor, clock, *run))
}

/// Removes all objects of `run` from this QEMU, without effect on the guest.
///
/// # Errors
/// The first removal that failed. All other removals were tried.
pub fn remove_run(monitor: &dyn Monitor, clock: &dyn Clock, run: RunId) -> Result<()> {
    let mut removal = Removal {
        monitor,
        clock,
        run,
        first_error: None,
    };
    let mut results = vec![
        end_sending(monitor, clock, run),
        unlimit_writes(monitor, run),
        removal.jobs(),
    ];
    let server = removal.exports();
    let is_stopped = server.is_ok();
    results.extend([
        server,
        // While a reader uses the filter, QEMU forbids writes that bypass the filter.
        removal.nodes(&[Role::Frozen]),
        removal.detach_from_devices(Role::Switch),
        // A switch above a filter forbids all other writers of the disk, even when no device uses the switch any
        // more.
        removal.nodes(&[Role::Switch]),
        removal.detach_from_devices(Role::Filter),
        removal.nodes(&[Role::Filter, Role::Spool, Role::Marks]),
    ]);
    // A server without exports has no name. While these objects remain, the next attempt recognizes the server as
    // Holdfast's own.
    if is_stopped {
        results.extend([removal.bitmaps(), removal.nodes(&[Role::Scratch]), removal.files()]);
    }
    for error in results.into_iter().filter_map(Result::err) {
        removal.note(error);
    }
    removal.first_error.map_or(Ok(()), Err)
}

struct Removal<'a> {
    monitor: &'a dyn Monitor,
    clock: &'a dyn Clock,
    run: RunId,
    first_error: Option<MonitorError>,
}

impl Removal<'_> {
    fn note(&mut self, error: MonitorError) {
        self.first_error.get_or_insert(error);
    }

    fn is_of_run(&self, name: &str) -> bool {
        run_of(name) == Some(self.run)
    }

    /// Repeats a command until it succeeds, or the attempts are used up.
    fn execute_with_retries(&mut self, command: &QmpCommand) {
        for attempt in 1.. {
            match self.monitor.execute(command) {
                Ok(_) => return,
                Err(error) if error.is_refusal() && attempt < ATTEMPT_COUNT => self.clock.sleep(ATTEMPT_INTERVAL),
                Err(error) => return self.note(error),
            }
        }
    }

    /// Cancels the jobs that copy ranges of disks.
    fn jobs(&self) -> Result<()> {
        end_jobs(self.monitor, self.clock, &|id| self.is_of_run(id))
    }

    /// Removes the exports and stops the server.
    ///
    /// # Errors
    /// The server may still be running.
    fn exports(&mut self) -> Result<()> {
        let ids = export_ids(self.monitor)?;
        let of_run: Vec<&String> = ids.iter().filter(|id| self.is_of_run(id)).collect();
        for id in &of_run {
            if let Err(error) = delete_export(self.monitor, id) {
                self.note(error);
            }
        }
        let has_nodes = node_names(self.monitor)?.iter().any(|name| self.is_of_run(name))
            || bitmaps(self.monitor)?.iter().any(|bitmap| self.is_of_run(&bitmap.name));
        let has_files = fd_sets(self.monitor)?.iter().any(|(_, label)| self.is_of_run(label));
        // QEMU has one NBD server. Another client could not have started a second one, and has exports if the server
        // is its own.
        if of_run.len() == ids.len() && (has_nodes || has_files || !of_run.is_empty()) {
            match self.monitor.execute(&QmpCommand::new("nbd-server-stop", Value::Null)) {
                Ok(_) => {}
                Err(MonitorError::Refused { description, .. }) if description.contains(SERVER_STOPPED) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sets devices that use a Holdfast node of this role back to the node below it.
    fn detach_from_devices(&mut self, role: Role) -> Result<()> {
        let has_role = |disk: &QemuDisk| self.is_of_run(&disk.node) && role_of(&disk.node) == Some(role);
        let with_role: Vec<QemuDisk> = disks(self.monitor)?.into_iter().filter(has_role).collect();
        for disk in with_role {
            // A snapshot may have replaced the node that was below Holdfast's node when it was inserted, so the current
            // graph is used.
            let graph = Graph::query(self.monitor)?;
            let Some(below) = graph.child(&disk.node, "file") else {
                self.note(MonitorError::Invalid {
                    command: "x-debug-query-block-graph".to_owned(),
                    detail: format!("the node {} has no child", disk.node),
                });
                continue;
            };
            // Another process may be removing the run, too: see `Danger::SameNodeAgain`.
            let mut present = disks(self.monitor)?.into_iter();
            if !present.any(|now| now.device == disk.device && now.node == disk.node) {
                continue;
            }
            if let Err(error) = set_drive(self.monitor, &disk.device, below) {
                self.note(error);
            }
        }
        Ok(())
    }

    fn nodes(&mut self, roles: &[Role]) -> Result<()> {
        let names = node_names(self.monitor)?;
        for role in roles {
            for name in names.iter().filter(|name| role_of(name).as_ref() == Some(role)) {
                if self.is_of_run(name) {
                    self.execute_with_retries(&about_node("blockdev-del", name));
                }
            }
        }
        Ok(())
    }

    fn bitmaps(&mut self) -> Result<()> {
        for BitmapPlace { node, name } in bitmaps(self.monitor)? {
            if self.is_of_run(&name) {
                let arguments = json!({ "node": node, "name": name });
                self.execute_with_retries(&QmpCommand::new("block-dirty-bitmap-remove", arguments));
            }
        }
        Ok(())
    }

    fn is_machine_running(&self) -> Result<bool> {
        let status = self.monitor.execute(&QmpCommand::new("query-status", Value::Null))?;
        Ok(status.get("running").and_then(Value::as_bool).unwrap_or_default())
    }

    fn files(&mut self) -> Result<()> {
        // QEMU closes files only while the machine runs, and not always immediately after a resume. Files of a paused
        // machine are removed by a later call.
        for _ in 0..ATTEMPT_COUNT {
            let sets = fd_sets(self.monitor)?;
            let of_run: Vec<u64> = sets
                .iter()
                .filter(|(_, label)| self.is_of_run(label))
                .map(|(set, _)| *set)
                .collect();
            if of_run.is_empty() {
                break;
            }
            for set in of_run {
                match self
                    .monitor
                    .execute(&QmpCommand::new("remove-fd", json!({ "fdset-id": set })))
                {
                    Ok(_) => {}
                    // QEMU removed the file with the last node that used it.
                    Err(error) if error.is_refusal() => {}
                    Err(error) => self.note(error),
                }
            }
            if !self.is_machine_running()? {
                break;
            }
            if !fd_sets(self.monitor)?.iter().any(|(_, label)| self.is_of_run(label)) {
                break;
            }
            self.clock.sleep(ATTEMPT_INTERVAL);
        }
        // A listening socket that the server has not taken over, or a pipe that no migration has used.
        for name in ["nbd", "memory"] {
            let unused = json!({ "fdname": self.run.thing(name) });
            match self.monitor.execute(&QmpCommand::new("closefd", unused)) {
                Ok(_) => {}
                Err(error) if error.is_refusal() => {}
                Err(error) => self.note(error),
            }
        }
        Ok(())
    }
}

fn texts(items: &[Value], key: &str) -> Vec<String> {
    let texts = items.iter().filter_map(|item| item.get(key)?.as_str());
    texts.map(str::to_owned).collect()
}

fn node_names(monitor: &dyn Monitor) -> Result<Vec<String>> {
    let items = list(monitor, "query-named-block-nodes", json!({ "flat": true }))?;
    Ok(texts(&items, "node-name"))
}

/// Disconnects the clients of an export and removes it.
pub(super) fn delete_export(monitor: &dyn Monitor, id: &str) -> Result<()> {
    let arguments = json!({ "id": id, "mode": "hard" });
    match monitor.execute(&QmpCommand::new("block-export-del", arguments)) {
        // The export is already closing.
        Err(error) if !error.is_refusal() => Err(error),
        _ => Ok(()),
    }
}

/// A bitmap, and the node that it belongs to.
struct BitmapPlace {
    node: String,
    name: String,
}

/// The bitmaps of all nodes. After a snapshot by another client, the node is below that of the device.
fn bitmaps(monitor: &dyn Monitor) -> Result<Vec<BitmapPlace>> {
    let nodes = list(monitor, "query-named-block-nodes", json!({ "flat": true }))?;
    let of_node = |node: &Value| {
        let name = node.get("node-name").and_then(Value::as_str).unwrap_or_default();
        let places = bitmaps_of(node).into_iter().map(|bitmap| BitmapPlace {
            node: name.to_owned(),
            name: bitmap.name,
        });
        places.collect::<Vec<_>>()
    };
    Ok(nodes.iter().flat_map(of_node).collect())
}

fn export_ids(monitor: &dyn Monitor) -> Result<Vec<String>> {
    let items = list(monitor, "query-block-exports", Value::Null)?;
    Ok(texts(&items, "id"))
}

/// The ids of the fdsets, and the label of each.
fn fd_sets(monitor: &dyn Monitor) -> Result<Vec<(u64, String)>> {
    let items = list(monitor, "query-fdsets", Value::Null)?;
    let sets = items.iter().filter_map(|set| {
        let label = set.get("fds")?.as_array()?.first()?.get("opaque")?.as_str()?;
        Some((set.get("fdset-id")?.as_u64()?, label.to_owned()))
    });
    Ok(sets.collect())
}
