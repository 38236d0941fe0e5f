//! Containers that are mounted through the kernel's NBD client. It must be loaded: `make test-kernel`.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};

use super::containers::kill_worker;
use super::mounts::{MountPoint, wait_for};
use crate::host::{skipped, system, text};
use crate::rig::{Rig, noise};

/// Whether this kernel has an NBD client; prints the reason if not.
fn has_nbd() -> bool {
    let is_loaded = Path::new("/sys/module/nbd").exists();
    if !is_loaded || !rustix::process::geteuid().is_root() {
        skipped("no NBD client in this kernel: make test-kernel");
        return false;
    }
    true
}

fn write(path: &Path, bytes: &[u8]) {
    let mut file = File::create(path).unwrap();
    file.write_all(bytes).unwrap();
    file.sync_all().unwrap();
}

/// NBD devices that show a container of this test.
fn devices(rig: &Rig) -> usize {
    let folder = rig.path(".").canonicalize().unwrap();
    let entries = std::fs::read_dir("/sys/block").unwrap().map(|entry| entry.unwrap());
    let shown = entries.filter_map(|entry| std::fs::read_to_string(entry.path().join("backend")).ok());
    shown.filter(|backend| backend.contains(text(&folder))).count()
}

fn mount(rig: &Rig, name: &str, point: &MountPoint) {
    rig.ok(&["container", "mount", name, text(&point.path(".")), "--through", "nbd"]);
}

/// Everything that is done through FUSE and a loop device works through NBD.
fn lives(file_system: &str, size: &str, grown: &str) {
    let rig = Rig::empty();
    rig.ok(&["container", "create", "web1", size, "--filesystem", file_system]);
    let point = MountPoint::new(&rig, "mnt");
    mount(&rig, "web1", &point);
    assert_eq!(devices(&rig), 1);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let folder = rig.path("web1").canonicalize().unwrap();
    assert!(!mounts.contains(&format!("holdfast:{}", text(&folder))), "{mounts}");
    write(&point.path("first"), b"one");
    write(&point.path("big"), &noise(8 << 20, 1));
    let taken = rig.report(&["container", "snapshot", "web1", "monday"]);
    assert_eq!(taken["consistency"], "frozen", "{taken}");
    write(&point.path("first"), b"two");
    let info = rig.report(&["container", "info", "web1"]);
    assert_eq!(
        info["mount_points"][0].as_str().unwrap(),
        text(&point.path(".").canonicalize().unwrap())
    );
    let resized = rig.report(&["container", "resize", "web1", grown]);
    assert_eq!(resized["at_next_mount"], false, "{resized}");
    write(&point.path("after"), &noise(12 << 20, 2));
    std::fs::remove_file(point.path("big")).unwrap();
    system("sync", &[]).unwrap();
    let trimmed = rig.report(&["container", "trim", "web1"]);
    assert!(trimmed.to_string().contains("bytes"), "{trimmed}");
    let (kind, _) = rig.error(4, &["container", "switch", "web1", "monday"]);
    assert_eq!(kind, "locked");
    rig.ok(&["container", "merge", "web1", "--all"]);
    rig.ok(&["container", "snapshot", "web1", "tuesday"]);
    rig.ok(&["container", "unmount", "web1"]);
    assert!(!point.is_mounted());
    assert_eq!((devices(&rig), rig.runtime_names().len()), (0, 0));
    rig.ok(&["container", "check", "web1"]);
    // Both ways show the same disk.
    rig.ok(&["container", "mount", "web1", text(&point.path("."))]);
    assert!(point.read("after") == noise(12 << 20, 2) && point.read("first") == b"two");
    rig.ok(&["container", "unmount", "web1"]);
    mount(&rig, "web1", &point);
    assert!(point.read("after") == noise(12 << 20, 2) && !point.path("big").exists());
    // The usual command is enough.
    system("umount", &[text(&point.path("."))]).unwrap();
    wait_for("the container is free", || {
        !rig.report(&["container", "info", "web1"])["is_used"].as_bool().unwrap()
    });
    assert_eq!(devices(&rig), 0);
}

#[test]
fn through_nbd_an_ext4_is_used_while_its_snapshots_come_and_go() {
    if has_nbd() {
        lives("ext4", "64M", "128M");
    }
}

#[test]
fn through_nbd_an_xfs_is_used_while_its_snapshots_come_and_go() {
    if has_nbd() {
        lives("xfs", "320M", "512M");
    }
}

#[test]
fn through_nbd_a_btrfs_is_used_while_its_snapshots_come_and_go() {
    if has_nbd() {
        lives("btrfs", "256M", "384M");
    }
}

#[test]
fn through_nbd_a_partition_is_mounted() {
    if !has_nbd() {
        return;
    }
    let rig = Rig::empty();
    rig.ok(&["container", "create", "web1", "64M", "--filesystem", "none"]);
    let point = MountPoint::new(&rig, "mnt");
    rig.ok(&["container", "mount", "web1", text(&point.path(".")), "--disk"]);
    let disk = point.path("disk.raw");
    let script = r#"echo '2048,,L' | sfdisk -q "$1"; device=$(losetup -f --show -o 1048576 "$1"); mkfs.ext4 -q "$device"; losetup -d "$device""#;
    system("sh", &["-euc", script, "sh", text(&disk)]).unwrap();
    rig.ok(&["container", "unmount", "web1"]);
    mount(&rig, "web1", &point);
    write(&point.path("file"), b"content");
    rig.ok(&["container", "unmount", "web1"]);
    assert_eq!(devices(&rig), 0);
    rig.ok(&["container", "mount", "web1", text(&point.path("."))]);
    assert_eq!(point.read("file"), b"content");
    rig.ok(&["container", "unmount", "web1"]);
}

/// The kernel keeps the requests until the next worker has connected it, also before Linux 6.9.
#[test]
fn through_nbd_programs_see_no_kill_of_the_worker() {
    const KILLS: u32 = 3;
    if !has_nbd() {
        return;
    }
    let rig = Rig::empty();
    rig.ok(&["container", "create", "web1", "96M"]);
    let point = MountPoint::new(&rig, "mnt");
    mount(&rig, "web1", &point);
    let clock = SystemClock::new();
    let is_done = AtomicBool::new(false);
    let written = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut count = 0_u64;
            while !is_done.load(Ordering::SeqCst) {
                write(&point.path(&format!("file{}", count % 50)), &noise(200_000, count));
                count += 1;
            }
            count
        });
        for number in 0..KILLS {
            clock.sleep(Duration::from_secs(2));
            kill_worker(&rig, "web1").expect("a worker");
            // A request that it had received is sent again after 30 seconds.
            wait_for("the next worker answers", || {
                let name = format!("s{number}");
                rig.run(&["container", "snapshot", "web1", &name]).status.success()
            });
        }
        is_done.store(true, Ordering::SeqCst);
        writer.join().unwrap()
    });
    assert!(written > 10, "{written}");
    let check = || {
        for count in written.saturating_sub(50)..written {
            assert!(
                point.read(&format!("file{}", count % 50)) == noise(200_000, count),
                "{count}"
            );
        }
    };
    check();
    rig.ok(&["container", "unmount", "web1"]);
    rig.ok(&["container", "check", "web1"]);
    mount(&rig, "web1", &point);
    check();
    rig.ok(&["container", "unmount", "web1"]);
}

/// What killed processes leave is found and removed by the doctor.
#[test]
fn through_nbd_the_doctor_ends_a_mount_without_processes() {
    if !has_nbd() {
        return;
    }
    let rig = Rig::new();
    rig.ok(&["container", "create", "web1", "64M"]);
    let point = MountPoint::new(&rig, "mnt");
    mount(&rig, "web1", &point);
    write(&point.path("file"), b"content");
    let folder = rig.path("web1").canonicalize().unwrap();
    let supervisor = format!("container mount-server {}", text(&folder));
    system("pkill", &["-9", "-f", &supervisor]).unwrap();
    // A worker still serves it.
    assert_eq!(rig.report(&["doctor", "container:web1"])["is_healthy"], true);
    kill_worker(&rig, "web1").expect("a worker");
    wait_for("the doctor finds it", || {
        rig.run(&["doctor", "container:web1"]).status.code() == Some(3)
    });
    rig.report(&["doctor", "container:web1", "--fix"]);
    assert!(!point.is_mounted());
    wait_for("the device is free", || devices(&rig) == 0);
    mount(&rig, "web1", &point);
    assert_eq!(point.read("file"), b"content");
    rig.ok(&["container", "unmount", "web1"]);
}

#[test]
fn through_nbd_is_for_the_file_system_of_a_container_only() {
    let rig = Rig::empty();
    rig.ok(&["container", "create", "web1", "8M", "--filesystem", "none"]);
    for more in [&["--disk"][..], &["--snapshot", "monday"]] {
        let words = [&["container", "mount", "web1", "mnt", "--through", "nbd"][..], more].concat();
        rig.code(2, &words);
    }
    if !Path::new("/sys/module/nbd").exists() && rustix::process::geteuid().is_root() {
        std::fs::create_dir(rig.path("mnt")).unwrap();
        let (kind, message) = rig.error(1, &["container", "mount", "web1", "mnt", "--through", "nbd"]);
        assert_eq!(kind, "unsupported", "{message}");
    }
}
