//! Backups of machines under a real libvirt: they keep running, and restores have the content of their disks at the point in time.

mod backups;
mod bare;
mod bare_history;
mod bases;
mod chain_history;
mod chains;
mod chains_bare;
mod chains_in_host_snapshots;
mod choosing;
mod devices;
mod doctors;
mod doctors_partial_snapshots;
mod doctors_storage;
mod doctors_work;
mod endings;
mod exchanges;
mod exports;
mod halting_disk;
mod hooks;
mod host_snapshot_backups;
mod host_snapshot_mishaps;
mod host_snapshots;
mod instant;
mod instant_deaths;
mod iothreads;
mod kill_torture;
mod kills;
mod leftovers;
mod limits;
mod live_copies;
mod memory;
mod methods;
mod mishaps;
mod monitoring;
mod policies;
mod policy_recipes;
mod restore_refusals;
mod restore_starts;
mod restores;
mod rollback_mishaps;
mod rollbacks;
mod sysprep;
mod thin_volumes;
mod tpm;
mod volumes;

use holdfast_host::qemu::runs_in;
use holdfast_host::{Hypervisor as _, Machine, MachineState};
use holdfast_test_kit::libvirt::{DISK_BYTES, LibvirtLab};

use crate::rig::Rig;

/// A machine with two disks, and their expected content.
struct World {
    lab: LibvirtLab,
    rig: Rig,
    disks: [Vec<u8>; 2],
}

impl World {
    /// A running machine, and a repository.
    fn new() -> Self {
        Self::of(LibvirtLab::new())
    }

    fn of(lab: LibvirtLab) -> Self {
        Self::defined(lab, |lab| lab.define("web1", &["qcow2", "raw"]))
    }

    /// A machine that `define` defines, with two disks.
    fn defined(lab: LibvirtLab, define: impl FnOnce(&LibvirtLab)) -> Self {
        lab.connect();
        define(&lab);
        lab.virsh(&["start", "web1"]);
        let length = usize::try_from(DISK_BYTES).unwrap();
        Self {
            lab,
            rig: Rig::new(),
            disks: [vec![1; length], vec![2; length]],
        }
    }

    fn machine(&self) -> Box<dyn Machine> {
        self.lab.connect().machine("web1").unwrap()
    }

    fn write(&mut self, disk: usize, byte: u8, offset: usize, length: usize) {
        self.lab
            .guest_writes(self.machine().monitor(), disk, byte, offset as u64, length as u64);
        self.disks[disk][offset..offset + length].fill(byte);
    }

    /// Backs the machine up; returns its part of the report.
    fn back_up(&self) -> serde_json::Value {
        let uri = self.lab.uri();
        let report = self.rig.report(&at(&uri, &["backup", "web1"]));
        report["machines"][0].clone()
    }

    fn back_up_by(&self, method: &str) -> serde_json::Value {
        let report = self
            .rig
            .report(&at(&self.lab.uri(), &["backup", "web1", "--method", method]));
        let report = report["machines"][0].clone();
        assert_eq!(report["method"], method);
        assert_eq!(report["method_reason"], "asked for");
        report
    }

    /// Asserts that the newest snapshot has the content of the disks.
    fn assert_snapshot_is_right(&self, what: &str) {
        self.assert_snapshot_in("repo", what);
    }

    fn assert_snapshot_in(&self, repository: &str, what: &str) {
        for (target, bytes) in ["vda", "vdb"].iter().zip(&self.disks) {
            let name = format!("web1@latest:{target}");
            let restored = format!("{target}.raw");
            self.rig.ok(&["restore", "--force", &name, &restored, "-r", repository]);
            let restored = self.rig.read(&restored);
            if restored == *bytes {
                continue;
            }
            assert_eq!(restored.len(), bytes.len(), "{what}: {target}");
            let other = (0..bytes.len()).find(|at| restored[*at] != bytes[*at]);
            let other = other.map(|at| (at, restored[at], bytes[at]));
            assert_eq!(other, None, "{what}: {target} at an offset, restored and expected");
        }
    }

    fn is_running(&self) -> bool {
        self.machine().describe().unwrap().summary.state == MachineState::Running
    }

    fn assert_runs_and_is_clean(&self) {
        assert!(self.is_running());
        assert!(runs_in(self.machine().monitor()).unwrap().is_empty());
    }
}

/// The report of `backup` about machines, one of which is missing.
pub(crate) fn report_of_machines() -> serde_json::Value {
    let world = World::new();
    let uri = world.lab.uri();
    world.rig.json(1, &at(&uri, &["backup", "web1", "missing"]))["report"].clone()
}

/// The report of `machines`.
pub(crate) fn report_of_listing() -> serde_json::Value {
    let world = World::new();
    world.rig.report(&at(&world.lab.uri(), &["machines"]))
}

/// The report of `doctor`.
pub(crate) fn report_of_doctor() -> serde_json::Value {
    doctors::report_of_a_dead_backup()
}

/// Reports of `restore --to-machine`.
pub(crate) fn reports_of_machine_restores() -> Vec<serde_json::Value> {
    let world = World::new();
    world.back_up();
    vec![
        world.restore(&["--dry-run"]),
        world.restore(&[]),
        world.restore(&["--live"]),
    ]
}

/// Reports of `snapshot` and the verbs of `host`; empty if this host has no btrfs.
pub(crate) fn reports_of_host_snapshots() -> Vec<(&'static str, serde_json::Value)> {
    host_snapshots::reports()
}

/// Reports of `cron`; empty if this host has no ZFS.
pub(crate) fn reports_of_policies() -> Vec<serde_json::Value> {
    policies::reports()
}

/// The report of `resume`.
pub(crate) fn report_of_resume() -> serde_json::Value {
    let world = World::new();
    world.rig.report(&at(&world.lab.uri(), &["resume"]))
}

/// Arguments of a command line about a machine at `uri`.
fn at<'a>(uri: &'a str, words: &[&'a str]) -> Vec<&'a str> {
    [words, &["--connect", uri]].concat()
}
