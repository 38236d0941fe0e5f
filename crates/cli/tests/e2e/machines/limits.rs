//! The load that reading puts on a machine and its host.

use std::process::Child;
use std::time::Duration;

use holdfast_block::Clock as _;
use holdfast_host::qemu::runs_in;
use serde_json::{Value, json};

use super::bare::Bare;
use holdfast_test_kit::qemu::DISK_BYTES;

const MIB: u64 = 1 << 20;

/// Starts a backup, and waits until the machine is being read.
fn start(bare: &Bare, words: &[&str]) -> Child {
    let words = [&["backup", &bare.source, "--json"], words].concat();
    let mut child = bare.rig.command(&words).spawn().unwrap();
    for _ in 0..400 {
        let nodes = bare.lab.execute("query-block-exports", Value::Null);
        if !runs_in(&*bare.lab.monitor).unwrap().is_empty()
            && nodes.as_array().unwrap().len() == 2
            && bare.lab.is_running()
        {
            return child;
        }
        bare.lab.clock.sleep(Duration::from_millis(25));
    }
    child.kill().unwrap();
    panic!("the backup does not begin to read: {:?}", child.wait());
}

fn document(child: Child) -> Value {
    let output = child.wait_with_output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// The guest writes in a way that QEMU counts in its statistics.
fn writes_counted(bare: &Bare, offset: u64, length: u64) {
    let line = format!("qemu-io -d /machine/peripheral/disk0/virtio-backend \"aio_write -q {offset} {length}\"");
    bare.lab
        .execute("human-monitor-command", json!({ "command-line": line }));
}

#[test]
fn the_read_rate_of_a_machine_is_limited() {
    let bare = Bare::new(&[]);
    let start = bare.lab.clock.now();
    let report = bare.back_up(&["--bwlimit", "16M"]);
    let took = bare.lab.clock.now().saturating_sub(start);
    assert!(took >= Duration::from_millis(1800), "32 MiB in {took:?}");
    assert!(report["load"]["waited_ms"].as_u64().unwrap() > 0, "{report}");
    bare.assert_snapshot_is_right("slow");
    // Slow enough for the limit to be the bottleneck on a busy host too.
    let page = bare.rig.ok(&["backup", &bare.source, "--no-parent", "--bwlimit", "2M"]);
    assert!(page.contains("limited by --bwlimit"), "{page}");
}

#[test]
fn a_copy_that_takes_too_much_space_is_cancelled_and_the_machine_keeps_running() {
    let mut bare = Bare::new(&[]);
    let child = start(&bare, &["--bwlimit", "2M", "--scratch-max", "1M"]);
    bare.write(0, 70, 8 << 20, 8 << 20);
    bare.wait_until_clean("given up");
    let document = document(child);
    assert_eq!(document["error"]["kind"], "no-space", "{document}");
    assert!(
        document["error"]["message"].as_str().unwrap().contains("1048576"),
        "{document}"
    );
    bare.write(1, 71, 0, 1 << 20);
    // The next backup is correct again, without influence of the previous one.
    let report = bare.back_up(&[]);
    assert!(report["load"]["scratch_bytes"].is_u64());
    bare.assert_snapshot_is_right("after");
}

/// A twentieth of the file system of the scratch files stays free. Needs root to mount a small one.
#[test]
fn a_part_of_the_scratch_file_system_stays_free() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let mut bare = Bare::new(&[]);
    let small = bare.rig.path("small");
    std::fs::create_dir(&small).unwrap();
    let small = small.to_str().unwrap().to_owned();
    holdfast_test_kit::run("mount", &["-t", "tmpfs", "-o", "size=20M", "tmpfs", &small]);
    let _mounted = Mounted(small.clone());
    let child = start(&bare, &["--bwlimit", "512K", "--scratch", &small]);
    let free = || {
        let small = rustix::fs::statvfs(&*small).unwrap();
        small.f_bavail * small.f_frsize
    };
    let (mut lowest, mut place) = (free(), 0);
    while place < 2 * DISK_BYTES && !runs_in(&*bare.lab.monitor).unwrap().is_empty() {
        // Fast at first; then slow enough to be noticed in time, at five checks a second.
        let (length, pause_ms) = if lowest > 4 * MIB { (MIB, 0) } else { (MIB / 8, 250) };
        // From the end backwards, which is read last.
        let offset = usize::try_from(2 * DISK_BYTES - place - length).unwrap();
        let size = usize::try_from(DISK_BYTES).unwrap();
        bare.write(offset / size, 73, offset % size, usize::try_from(length).unwrap());
        place += length;
        lowest = lowest.min(free());
        bare.lab.clock.sleep(Duration::from_millis(pause_ms));
    }
    let document = document(child);
    assert_eq!(document["error"]["kind"], "no-space", "{document}");
    assert!(
        document["error"]["message"].as_str().unwrap().contains("stay free"),
        "{document}"
    );
    assert!((MIB / 2..2 * MIB).contains(&lowest), "{lowest}");
    bare.wait_until_clean("nearly full");
    assert_eq!(free(), 20 * MIB, "the scratch files are gone");
}

struct Mounted(String);

impl Drop for Mounted {
    fn drop(&mut self) {
        holdfast_test_kit::run("umount", &["--lazy", &self.0]);
    }
}

#[test]
fn a_machine_whose_writes_are_slow_is_read_slower_with_a_warning() {
    let bare = Bare::new(&[]);
    // Simulates a slow disk: few writes per second, further ones wait.
    let device = "/machine/peripheral/disk0/virtio-backend";
    let throttle = json!({ "id": device, "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 20 });
    bare.lab.execute("block_set_io_throttle", throttle);
    let mut child = start(&bare, &["--bwlimit", "16M", "--max-latency", "5"]);
    while child.try_wait().unwrap().is_none() {
        for number in 0..8 {
            writes_counted(&bare, 15 * MIB + number * 65_536, 65_536);
        }
        bare.lab.clock.sleep(Duration::from_millis(300));
    }
    let document = document(child);
    let load = &document["report"]["machines"][0]["load"];
    assert!(load["slowed_count"].as_u64().unwrap() > 0, "{document}");
    assert!(load["write_latency_us"].as_u64().unwrap() > 5000, "{document}");
    assert!(
        load["write_latency_highest_us"].as_u64() >= load["write_latency_us"].as_u64(),
        "{document}"
    );
    assert!(load["scratch_bytes"].as_u64().unwrap() > 0, "{document}");
}
