//! Machines whose disks are thin volumes of LVM. They need a kernel with device-mapper: `make test-kernel`.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use holdfast_host::MachineState;
use serde_json::{Value, json};

use super::{World, at};
use crate::rig::Rig;
use holdfast_test_kit::file_systems::system;
use holdfast_test_kit::libvirt::{DISK_BYTES, LibvirtLab};

const MIB: u64 = 1 << 20;

/// A volume group on a loop device, with a thin pool.
struct ThinPool {
    group: String,
    device: String,
    place: tempfile::TempDir,
}

impl ThinPool {
    /// # Errors
    /// If this host cannot create a thin pool: the reason.
    fn new() -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/mapper/control").exists() {
            return Err("the kernel has no device-mapper, or it is not ours to use".to_owned());
        }
        let place = tempfile::tempdir().map_err(|error| error.to_string())?;
        let file = place.path().join("device");
        let made = File::create(&file).and_then(|file| file.set_len(300 * MIB));
        made.map_err(|error| error.to_string())?;
        let device = system("losetup", &["--find", "--show", file.to_str().unwrap()])?;
        // Hyphens are doubled in the names of devices.
        let group = format!("holdfast-test-{}", std::process::id());
        let pool = Self { group, device, place };
        system("vgcreate", &["-qq", &pool.group, &pool.device])?;
        system(
            "lvcreate",
            &["-qq", "--type", "thin-pool", "-L", "200M", "-n", "pool", &pool.group],
        )?;
        Ok(pool)
    }

    fn volume(&self, name: &str, size: &str) -> PathBuf {
        let pool = format!("{}/pool", self.group);
        system("lvcreate", &["-qq", "-y", "-V", size, "-T", &pool, "-n", name]).unwrap();
        self.path(name)
    }

    fn path(&self, name: &str) -> PathBuf {
        Path::new("/dev").join(&self.group).join(name)
    }

    fn dataset(&self, name: &str) -> String {
        format!("lvm:{}/{name}", self.group)
    }

    /// The names of the volumes that LVM selects by a condition.
    fn names_where(&self, condition: &str) -> Vec<String> {
        let words = ["--noheadings", "-o", "lv_name", "-S", condition, &self.group];
        let text = system("lvs", &words).unwrap();
        text.split_whitespace().map(str::to_owned).collect()
    }
}

impl Drop for ThinPool {
    fn drop(&mut self) {
        system("vgremove", &["-qq", "-ff", "-y", &self.group]).ok();
        system("losetup", &["--detach", &self.device]).ok();
        drop(std::fs::remove_file(self.place.path().join("device")));
    }
}

/// Writes to an existing device.
fn put(path: &Path, bytes: &[u8]) {
    let mut device = File::options().write(true).open(path).unwrap();
    device.write_all(bytes).unwrap();
    device.sync_all().unwrap();
}

fn bytes_of(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

/// A running machine with two volumes.
struct ThinVolumeSetup {
    // Dropped before the volumes.
    world: World,
    pool: ThinPool,
}

#[expect(clippy::print_stdout, reason = "a test that is skipped says why")]
fn thin_pool() -> Option<ThinPool> {
    match ThinPool::new() {
        Ok(pool) => Some(pool),
        Err(reason) => {
            println!("skipped: no thin pool: {reason}");
            None
        }
    }
}

impl ThinVolumeSetup {
    fn new() -> Option<Self> {
        let pool = thin_pool()?;
        let lab = LibvirtLab::new();
        lab.connect();
        let length = usize::try_from(DISK_BYTES).unwrap();
        let disks = [vec![1; length], vec![2; length]];
        let mut devices = String::new();
        for (letter, bytes) in ["a", "b"].iter().zip(&disks) {
            let path = pool.volume(&format!("web1-{letter}"), "8M");
            put(&path, bytes);
            let disk = format!(
                "<disk type='block' device='disk'><driver name='qemu' type='raw'/><source dev='{}'/>\
                 <target dev='vd{letter}' bus='virtio'/></disk>",
                path.display()
            );
            devices.push_str(&disk);
        }
        let xml = format!(
            "<domain type='qemu'><name>web1</name><memory unit='MiB'>16</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='pc'>hvm</type></os><features><acpi/></features><devices>{devices}\
             <memballoon model='none'/></devices></domain>"
        );
        let file = lab.path("domain.xml");
        File::create(&file).unwrap().write_all(xml.as_bytes()).unwrap();
        lab.virsh(&["define", file.to_str().unwrap()]);
        lab.virsh(&["start", "web1"]);
        let world = World {
            lab,
            rig: Rig::new(),
            disks,
        };
        Some(Self { world, pool })
    }

    fn report(&self, code: i32, words: &[&str]) -> Value {
        self.world.rig.json(code, &at(&self.world.lab.uri(), words))["report"].clone()
    }

    fn back_up(&self) -> Value {
        self.report(0, &["backup", "web1", "--method", "snapshot"])["machines"][0].clone()
    }

    fn assert_incremental(done: &Value, dirty_bytes_max: u64) {
        for disk in done["disks"].as_array().unwrap() {
            let dirty_bytes = disk["dirty_bytes"].as_u64();
            let is_right = disk["is_incremental"] == true && dirty_bytes.is_some_and(|bytes| bytes <= dirty_bytes_max);
            assert!(is_right, "{disk}");
        }
    }

    /// Asserts that no host snapshot is active.
    fn assert_all_inactive(&self) {
        let awake = "lv_active=active && lv_permissions=\"read-only\"";
        assert_eq!(self.pool.names_where(awake), [""; 0]);
    }
}

#[test]
fn a_machine_in_thin_volumes_is_snapshotted_and_pruned() {
    let Some(mut setup) = ThinVolumeSetup::new() else {
        return;
    };
    let cut = setup.report(0, &["snapshot", "web1", "--name", "at:noon"])["cuts"][0].clone();
    let [first, second] = ["web1-a", "web1-b"].map(|name| setup.pool.dataset(name));
    assert_eq!(
        cut["snapshots"],
        json!([format!("{first}@at:noon"), format!("{second}@at:noon")])
    );
    // Volumes are snapshotted one after the other, so the machine is paused meanwhile.
    assert_eq!(cut["is_one_instant"], false);
    assert!(cut["machines"][0]["paused_us"].is_u64(), "{cut}");
    setup.world.assert_runs_and_is_clean();
    setup.world.write(0, 77, 0, 65_536);
    let listed = setup.report(0, &["host", "list", "web1"]);
    for dataset in listed["datasets"].as_array().unwrap() {
        let snapshot = &dataset["snapshots"][0];
        assert_eq!(
            (&snapshot["name"], &snapshot["machines"]),
            (&json!("at:noon"), &json!(["web1"]))
        );
        assert_eq!(snapshot["consistency"], "crash");
    }
    // A disk can also be selected by its device.
    let device = setup.pool.path("web1-a").display().to_string();
    let rig = &setup.world.rig;
    let measured = rig.report(&["host", "list", &device, "--space"])["datasets"][0]["snapshots"][0].clone();
    assert_eq!(
        (&measured["referenced_bytes"], &measured["used_bytes"]),
        (&json!(8 * MIB), &json!(65_536))
    );
    let states = rig.report(&["host", "datasets"]);
    let state = states["datasets"]
        .as_array()
        .unwrap()
        .iter()
        .find(|one| one["dataset"] == *first)
        .unwrap();
    assert!(
        state["is_volume"] == true && state["available_bytes"].as_u64().unwrap() > 100 * MIB,
        "{state}"
    );
    assert_eq!(
        setup.pool.names_where("lv_tags={\"holdfast.snapshot=at:noon\"}"),
        ["web1-a+at+noon", "web1-b+at+noon"]
    );

    let name = format!("{first}@at:noon");
    let (error, _) = rig.error(1, &["snapshot", &first, "--name", "at:noon"]);
    assert_eq!(error, "exists");
    std::fs::create_dir(rig.path("mounted")).unwrap();
    let (_, text) = rig.error(1, &["mount", &name, rig.path("mounted").to_str().unwrap()]);
    assert!(text.contains("holdfast host clone"), "{text}");
    rig.ok(&["host", "hold", &name, "--tag", "audit"]);
    assert_eq!(
        rig.json(1, &["host", "remove", &name])["report"]["snapshots"][0]["obstacle"],
        "it has a hold"
    );
    rig.ok(&["host", "release", &name, "--tag", "audit"]);
    // A clone has the content of its snapshot, is writable, and outlives its snapshot.
    let clone = format!("{}/trial", setup.pool.group);
    rig.ok(&["host", "clone", &name, &clone]);
    let trial = setup.pool.path("trial");
    assert!(bytes_of(&trial).iter().all(|byte| *byte == 1));
    put(&trial, &[9; 4096]);
    // An active snapshot can be removed, too.
    let own = format!("{}/web1-a+at+noon", setup.pool.group);
    system("lvchange", &["-qq", "-y", "-ay", "-K", &own]).unwrap();
    rig.ok(&["host", "remove", &name]);
    rig.error(1, &["host", "remove", &name]);
    assert_eq!(
        setup.pool.names_where("lv_tags={\"holdfast.snapshot=at:noon\"}"),
        ["web1-b+at+noon"]
    );
    // The origin may be removed: the snapshot remains, and restores it.
    setup.world.lab.virsh(&["destroy", "web1"]);
    let gone = format!("{}/web1-b", setup.pool.group);
    system("lvremove", &["-qq", "-f", &gone]).unwrap();
    setup
        .world
        .rig
        .ok(&["host", "clone", &format!("{second}@at:noon"), &gone]);
    assert!(bytes_of(&setup.pool.path("web1-b")).iter().all(|byte| *byte == 2));
    assert_eq!(
        setup.world.rig.report(&["host", "list", &second])["datasets"][0]["snapshots"][0]["name"],
        "at:noon"
    );
    setup.assert_all_inactive();
}

#[test]
fn a_machine_in_thin_volumes_is_backed_up_by_the_changes_its_pool_reports() {
    let Some(mut setup) = ThinVolumeSetup::new() else {
        return;
    };
    let first = setup.back_up();
    assert_eq!(
        (&first["method"], &first["consistency"]),
        (&json!("snapshot"), &json!("crash"))
    );
    setup.world.assert_snapshot_is_right("first");
    setup.world.write(0, 50, 1 << 20, 65_536);
    setup.world.write(1, 51, 3 << 20, 4096);
    ThinVolumeSetup::assert_incremental(&setup.back_up(), 65_536);
    setup.world.assert_snapshot_is_right("second");
    ThinVolumeSetup::assert_incremental(&setup.back_up(), 0);
    setup.world.assert_runs_and_is_clean();
    // One snapshot of each volume is left, with a hold.
    assert_eq!(setup.pool.names_where("lv_tags={\"holdfast.held\"}").len(), 2);
    assert_eq!(setup.pool.names_where("lv_tags={\"holdfast.metadata\"}"), [""; 0]);
    // Another program uses the pool's metadata: everything is read, with the reason.
    let target = format!("{}-pool-tpool", setup.pool.group.replace('-', "--"));
    system("dmsetup", &["message", &target, "0", "reserve_metadata_snap"]).unwrap();
    setup.world.write(1, 52, 0, 65_536);
    let all = setup.back_up();
    let reason = all["disks"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("another process has reserved"), "{all}");
    setup.world.assert_snapshot_is_right("third");
    // Holdfast reuses a metadata snapshot that a dead process of Holdfast left.
    system(
        "lvchange",
        &[
            "-qq",
            "--addtag",
            "holdfast.metadata",
            &format!("{}/pool", setup.pool.group),
        ],
    )
    .unwrap();
    ThinVolumeSetup::assert_incremental(&setup.back_up(), 0);
    assert_eq!(setup.pool.names_where("lv_tags={\"holdfast.metadata\"}"), [""; 0]);
    setup.world.lab.virsh(&["destroy", "web1"]);
    ThinVolumeSetup::assert_incremental(&setup.back_up(), 0);
    setup.world.rig.ok(&["verify"]);
    setup.assert_all_inactive();
}

#[test]
fn a_machine_in_thin_volumes_is_rolled_back_and_cloned() {
    let Some(mut setup) = ThinVolumeSetup::new() else {
        return;
    };
    setup.report(0, &["snapshot", "web1", "--name", "one"]);
    setup.world.write(0, 60, 4096, 65_536);
    setup.world.write(1, 61, 0, 1 << 20);
    let changed = setup.world.disks.clone();
    let report = setup.report(0, &["clone", "web1@one", "trial", "--start"]);
    for file in report["machines"][0]["restore"]["files"].as_array().unwrap() {
        assert_eq!(file["way"], "cloned", "{report}");
    }
    assert!(setup.world.lab.virsh(&["list", "--name"]).contains("trial"));
    for (letter, byte) in [("a", 1), ("b", 2)] {
        let path = setup.pool.path(&format!("trial-web1-{letter}"));
        assert!(bytes_of(&path).iter().all(|found| *found == byte), "{}", path.display());
    }
    setup.world.lab.virsh(&["destroy", "trial"]);
    // A second clone of the same name is refused, and leaves nothing.
    let before = setup.pool.names_where("lv_name!=\"\"");
    setup
        .world
        .rig
        .error(1, &at(&setup.world.lab.uri(), &["clone", "web1@one", "trial"]));
    assert_eq!(setup.pool.names_where("lv_name!=\"\""), before);

    let report = setup.report(0, &["rollback", "web1@one", "--power-off", "--start"]);
    assert_eq!(
        setup.world.machine().describe().unwrap().summary.state,
        MachineState::Running
    );
    setup.world.lab.virsh(&["destroy", "web1"]);
    for (letter, byte) in [("a", 1), ("b", 2)] {
        let path = setup.pool.path(&format!("web1-{letter}"));
        assert!(bytes_of(&path).iter().all(|found| *found == byte), "{}", path.display());
    }
    // Earlier snapshots still exist.
    let safety = report["safety"][0].as_str().unwrap();
    let safety = safety.rsplit_once('@').unwrap().1;
    setup.report(0, &["rollback", &format!("web1@{safety}"), "--without-safety-snapshot"]);
    for (letter, bytes) in ["a", "b"].iter().zip(&changed) {
        assert!(
            bytes_of(&setup.pool.path(&format!("web1-{letter}"))) == *bytes,
            "{letter}"
        );
    }
    setup.assert_all_inactive();
}

#[test]
fn a_thin_pool_that_is_nearly_full_gets_no_more_snapshots() {
    let Some(pool) = thin_pool() else { return };
    let rig = Rig::empty();
    system("lvcreate", &["-qq", "-y", "-L", "8M", "-n", "thick", &pool.group]).unwrap();
    let (_, text) = rig.error(1, &["snapshot", &pool.dataset("thick"), "--quiesce", "off"]);
    assert!(text.contains("not in a thin pool"), "{text}");
    let thick = pool.path("thick").display().to_string();
    let (_, text) = rig.error(1, &["snapshot", &thick, "--quiesce", "off"]);
    assert!(text.contains("not in a thin pool"), "{text}");
    let path = pool.volume("data", "200M");
    put(&path, &vec![7; 196 << 20]);
    let (_, text) = rig.error(1, &["snapshot", &pool.dataset("data"), "--quiesce", "off"]);
    assert!(
        text.contains("of the data of its thin pool") && text.contains("lvextend"),
        "{text}"
    );
    assert_eq!(pool.names_where("origin=data"), [""; 0]);
}
