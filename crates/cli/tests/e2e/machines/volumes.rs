//! Machines whose disks are volumes of ZFS, and guests that resume from their memory. They need a ZFS in the kernel:
//! `make test-kernel`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::Clock as _;

use super::World;
use super::host_snapshot_backups::a_machine_is_backed_up_from_host_snapshots;
use super::host_snapshots::MachineSetup;
use super::rollbacks::{
    a_clone_runs_beside_its_original, snapshots_pruning_and_rollback, unchanged_ranges_are_not_read,
};
use holdfast_test_kit::file_systems::{Pool, system};
use holdfast_test_kit::libvirt::LibvirtLab;

/// Timeout for a step of a guest, which may run on nested emulators.
const PATIENCE: Duration = Duration::from_secs(1200);

/// A machine whose disks are two volumes of a pool.
#[expect(clippy::print_stdout, reason = "a test that is skipped says why")]
pub(super) fn machine_on_volumes() -> Option<MachineSetup> {
    if !Pool::is_in_kernel() {
        println!("skipped: volumes need a ZFS in the kernel: make test-kernel");
        return None;
    }
    let mut made = Err("no folder".to_owned());
    let lab = LibvirtLab::prepared(|folder| {
        made = Pool::at(folder).and_then(|pool| {
            let images = vec![
                ("raw", pool.volume("web1-a", "8M")?),
                ("raw", pool.volume("web1-b", "8M")?),
            ];
            Ok((pool, images))
        });
    });
    match made {
        Ok((pool, images)) => Some(MachineSetup {
            world: World::defined(lab, |lab| lab.define_on("web1", &images)),
            file_system: Box::new(pool),
        }),
        Err(reason) => {
            println!("skipped: {reason}");
            None
        }
    }
}

#[test]
fn a_machine_is_snapshotted_pruned_and_rolled_back_on_volumes() {
    snapshots_pruning_and_rollback("volumes");
}

#[test]
fn a_clone_runs_beside_its_original_on_volumes() {
    a_clone_runs_beside_its_original("volumes");
}

#[test]
fn a_machine_on_volumes_is_backed_up_from_host_snapshots() {
    a_machine_is_backed_up_from_host_snapshots("volumes");
}

#[test]
fn unchanged_ranges_are_not_read_on_volumes() {
    unchanged_ranges_are_not_read("volumes");
}

/// Volumes of a pool are snapshotted at one point in time without a pause, whether or not snapshots are visible as
/// devices.
#[test]
fn volumes_of_a_pool_are_snapshotted_at_one_point_in_time() {
    let Some(mut setup) = machine_on_volumes() else { return };
    let pool = setup.full_names("x")[0].split('/').next().unwrap().to_owned();
    let pool = pool.trim_start_matches("zfs:");
    system("zfs", &["set", "snapdev=visible", pool]).unwrap();
    let cut = setup.take(0, &["web1", "--name", "one"]);
    assert_eq!(cut["snapshots"].as_array().unwrap().len(), 2, "{cut}");
    assert_eq!(cut["is_one_instant"], true, "{cut}");
    assert!(cut["machines"][0]["paused_us"].is_null(), "{cut}");
    let earlier = setup.world.disks.clone();
    setup.world.write(0, 70, 0, 4 << 20);
    setup.world.write(1, 71, 0, 4 << 20);
    setup.world.lab.virsh(&["destroy", "web1"]);
    let planned = setup.point(0, &["rollback", "web1@one", "--dry-run"]);
    assert_eq!(planned["safety"], serde_json::json!([]));
    setup.point(0, &["rollback", "web1@one"]);
    setup.assert_disks(&earlier, "without memory");
    // Held snapshots, and those with clones, are kept.
    let name = &setup.full_names("one")[1];
    setup.world.rig.ok(&["host", "hold", name]);
    let held = setup.world.rig.json(1, &["host", "remove", name])["report"]["snapshots"][0].clone();
    assert_eq!(held["obstacle"], "it has a hold");
    setup.world.rig.ok(&["host", "release", name]);
    let clone = format!("{pool}/trial");
    setup.world.rig.ok(&["host", "clone", name, &clone]);
    let device = Path::new("/dev/zvol").join(&clone);
    assert_eq!(std::fs::read(device).unwrap(), earlier[1]);
    let needed = setup.world.rig.json(1, &["host", "remove", name])["report"]["snapshots"][0].clone();
    assert!(needed["obstacle"].as_str().unwrap().contains("has clones"), "{needed}");
    system("zfs", &["destroy", &clone]).unwrap();
    setup.world.rig.ok(&["host", "remove", name]);
}

/// A volume without a device is refused, and no clone of it is left.
#[test]
fn a_clone_of_volumes_without_devices_is_refused() {
    let Some(setup) = machine_on_volumes() else { return };
    setup.take(0, &["web1", "--name", "one"]);
    let name = setup.full_names("one").remove(1);
    let pool = name.trim_start_matches("zfs:").split('/').next().unwrap().to_owned();
    system("zfs", &["set", "volmode=none", &pool]).unwrap();
    let clone = format!("{pool}/trial");
    let (_, message) = setup.world.rig.error(1, &["host", "clone", &name, &clone]);
    assert!(message.contains("volmode"), "{message}");
    assert!(system("zfs", &["list", &clone]).is_err());
}

/// The folder with the guest of scripts/test-guest, which has one disk.
fn guest() -> Option<PathBuf> {
    std::env::var_os("HOLDFAST_TEST_GUEST").map(PathBuf::from)
}

/// The console output of a guest.
struct Console(PathBuf);

impl Console {
    fn lines(&self) -> Vec<String> {
        let text = std::fs::read(&self.0).unwrap_or_default();
        String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()
    }

    /// The numbers of blocks that the guest has printed, each with the id of the boot.
    fn blocks(&self) -> Vec<(u64, String)> {
        let words = |line: &String| {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["seq", number, "boot", boot] if boot.len() == 16 => Some((number.parse().ok()?, boot.to_owned())),
                _ => None,
            }
        };
        self.lines().iter().filter_map(words).collect()
    }

    fn wait_for(&self, setup: &MachineSetup, number: u64) -> (u64, String) {
        let start = setup.world.lab.clock.now();
        loop {
            if let Some(last) = self.blocks().last().filter(|(last, _)| *last >= number) {
                return last.clone();
            }
            let waited = setup.world.lab.clock.now().saturating_sub(start);
            assert!(waited < PATIENCE, "the console shows {:?}", self.lines().last());
            setup.world.lab.clock.sleep(Duration::from_millis(300));
        }
    }

    /// Asserts that the guest has read nothing that differs from its memory.
    fn assert_no_mismatch(&self) {
        let bad: Vec<String> = self.lines().into_iter().filter(|line| line.contains("BAD")).collect();
        assert!(bad.is_empty(), "{bad:?}");
    }
}

/// A writing guest is rolled back with its memory: it continues at the earlier number, and its disk matches its memory.
fn assert_guest_resumes(setup: Option<MachineSetup>) {
    let (Some(setup), Some(guest)) = (setup, guest()) else {
        return;
    };
    let lab = &setup.world.lab;
    lab.virsh(&["destroy", "web1"]);
    let console = Console(lab.path("console.log"));
    let xml = lab.virsh(&["dumpxml", "--inactive", "web1"]);
    let boot = format!(
        "<kernel>{0}/vmlinuz</kernel><initrd>{0}/initrd</initrd><cmdline>console=ttyS0 quiet</cmdline></os>",
        guest.display()
    );
    let serial = format!(
        "<serial type='file'><source path='{}' append='on'/><target port='0'/></serial></devices>",
        console.0.display()
    );
    let xml = xml.replace("</os>", &boot).replace("</devices>", &serial);
    let xml = xml
        .replace(">16384</memory>", ">196608</memory>")
        .replace(">16384</currentMemory>", ">196608</currentMemory>");
    lab.define_xml(&xml);
    lab.virsh(&["start", "web1"]);
    console.wait_for(&setup, 20);
    let cut = setup.take(0, &["web1", "--with-memory", "--name", "hourly"]);
    assert_eq!(cut["machines"][0]["consistency"], "memory", "{cut}");
    // The last printed block is the last one before the point in time, or one of the few after it.
    let (number, boot) = console.blocks().last().unwrap().clone();
    for point in 0..10 {
        setup.take(0, &["web1", "--name", &format!("point-{point}")]);
    }
    for point in 0..5 {
        let names = setup.full_names(&format!("point-{point}"));
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        setup.world.rig.ok(&[&["host", "remove"], &names[..]].concat());
    }
    let (last, _) = console.wait_for(&setup, number + 200);
    console.assert_no_mismatch();
    std::fs::rename(&console.0, lab.path("console-before.log")).unwrap();
    setup.point(0, &["rollback", "web1@hourly", "--power-off", "--resume"]);
    console.wait_for(&setup, 1);
    let (first, same) = console.blocks()[0].clone();
    assert_eq!(same, boot, "the guest has booted again");
    assert!(
        first <= number + 5 && first < last,
        "resumed at {first}; was at {number}, and later at {last}"
    );
    console.wait_for(&setup, first + 100);
    console.assert_no_mismatch();
    setup.world.assert_runs_and_is_clean();
}

#[test]
fn a_guest_on_volumes_resumes_where_it_was() {
    assert_guest_resumes(machine_on_volumes());
}

/// With ZFS in the kernel, the files of snapshots are visible without clones.
#[test]
fn a_guest_on_zfs_resumes_where_it_was() {
    if guest().is_some() {
        assert_guest_resumes(super::host_snapshots::machine_on("zfs"));
    }
}
