//! btrfs: snapshots are read-only subvolumes.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use holdfast_block::SeededRandom;
use holdfast_block::conformance::test_seed;
use holdfast_host::changed_blocks::by_extents;

use crate::history::{Tally, Work, change, check, noise};
use crate::mounts::{Mount, run};

const SIZE: usize = 3 << 20;

fn btrfs(words: &[&str], paths: &[&Path]) {
    run(Command::new("btrfs").args(words).args(paths)).unwrap();
}

/// A file system with an empty image in a subvolume, overwritten in place if the options permit.
fn mount(options: &str) -> Option<Mount> {
    let mount = Mount::new("mkfs.btrfs", &["-q"], options)?;
    btrfs(&["subvolume", "create"], &[&mount.path("live")]);
    File::create(mount.path("live/image")).unwrap();
    Some(mount)
}

fn snapshot(mount: &Mount, name: &str) -> File {
    btrfs(
        &["subvolume", "snapshot", "-r"],
        &[&mount.path("live"), &mount.path(name)],
    );
    File::open(mount.path(name).join("image")).unwrap()
}

fn histories(mount: &Mount, work: Work, round_count: u64, what: &str) -> Tally {
    let mut random = SeededRandom::new(test_seed());
    let image = mount.path("live/image");
    fs::write(&image, noise(SIZE, &mut random)).unwrap();
    let mut tally = Tally::default();
    let mut before = snapshot(mount, "0");
    for round in 1..=round_count {
        change(&image, work, &mut random);
        let after = snapshot(mount, &round.to_string());
        if work == Work::Anything && random.one_in(4) {
            btrfs(&["filesystem", "defragment"], &[&image]);
        }
        if work == Work::Anything && random.one_in(8) {
            btrfs(&["balance", "start", "-d"], &[&mount.path("")]);
        }
        let found = by_extents(&before, &after).unwrap();
        tally.add(check(&before, &after, &found.ranges, &format!("{what}, round {round}")));
        before = after;
        btrfs(&["subvolume", "delete"], &[&mount.path(&(round - 1).to_string())]);
    }
    tally
}

#[test]
fn no_change_is_missed_on_btrfs() {
    for options in ["noatime", "nodatacow", "compress-force=zstd"] {
        let Some(mount) = mount(options) else { return };
        let what = format!("btrfs {options}");
        histories(&mount, Work::Anything, 25, &what).print(&format!("{what}, anything"));
    }
}

/// Changes are reported with a granularity of 4 KiB; with nodatacow too, where the first write after a snapshot goes to
/// a new address, and later ones are in place.
#[test]
fn blocks_are_reported_exactly_on_btrfs() {
    for options in ["noatime", "nodatacow"] {
        let Some(mount) = mount(options) else { return };
        let tally = histories(&mount, Work::Blocks, 25, options);
        tally.print(&format!("btrfs {options}, blocks"));
        assert_eq!(tally.reported, tally.different);
    }
}

/// The kernel reports the address of a whole compressed extent for every part of it, so another part of it looks the
/// same.
#[test]
fn compressed_data_counts_as_changed() {
    let Some(mount) = mount("compress-force=zstd") else {
        return;
    };
    let image = mount.path("live/image");
    let file = File::options().read(true).write(true).open(&image).unwrap();
    let words: Vec<u8> = (0..131_072_u32)
        .map(|at| u8::try_from(at / 65_536 + 65).unwrap())
        .collect();
    file.write_all_at(&words, 0).unwrap();
    file.sync_all().unwrap();
    // The first half of an extent in the middle of the file, then its second half at the same offset.
    let copy = |from: u64| {
        let (mut from, mut to) = (from, 1 << 20);
        let copied = rustix::fs::copy_file_range(&file, Some(&mut from), &file, Some(&mut to), 65_536);
        assert_eq!(copied, Ok(65_536));
    };
    copy(0);
    let before = snapshot(&mount, "before");
    copy(65_536);
    let after = snapshot(&mount, "after");
    let found = by_extents(&before, &after).unwrap();
    assert!(found.ambiguous_bytes >= 65_536);
    let tally = check(&before, &after, &found.ranges, "compressed");
    assert_eq!(tally.different, 65_536);
}

/// A balance of all data, cancelled on drop: a file system with a running balance cannot be unmounted.
struct Balance {
    program: Child,
    point: PathBuf,
}

impl Balance {
    fn start(mount: &Mount) -> Self {
        let point = mount.path("");
        let program = Command::new("btrfs")
            .args(["balance", "start", "-d"])
            .arg(&point)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { program, point }
    }

    fn is_running(&mut self) -> bool {
        self.program.try_wait().unwrap().is_none()
    }
}

impl Drop for Balance {
    fn drop(&mut self) {
        // The balance has usually ended.
        run(Command::new("btrfs").args(["balance", "cancel"]).arg(&self.point)).ok();
        self.program.wait().unwrap();
    }
}

/// All data is moved repeatedly while two snapshots are compared.
#[test]
fn a_concurrent_balance_hides_no_change() {
    let Some(mount) = mount("noatime") else { return };
    let mut random = SeededRandom::new(test_seed());
    let image = mount.path("live/image");
    fs::write(&image, noise(SIZE, &mut random)).unwrap();
    let before = snapshot(&mount, "before");
    for _ in 0..10 {
        change(&image, Work::Blocks, &mut random);
    }
    let after = snapshot(&mount, "after");
    let exact = by_extents(&before, &after).unwrap();
    let tally = check(&before, &after, &exact.ranges, "before the balance");
    let (mut count, mut reported_more) = (0, 0);
    for _ in 0..6 {
        let mut balance = Balance::start(&mount);
        while balance.is_running() {
            let found = by_extents(&before, &after).unwrap();
            for range in exact.ranges.as_slice() {
                let holds =
                    |reported: &std::ops::Range<u64>| reported.start <= range.start && range.end <= reported.end;
                assert!(found.ranges.as_slice().iter().any(holds), "{range:?} is not reported");
            }
            count += 1;
            reported_more += u64::from(found.ranges.bytes() > tally.reported);
        }
    }
    println!("compared {count} times during balances, {reported_more} times with more than there is");
    assert_eq!(by_extents(&before, &after).unwrap().ranges, exact.ranges);
}
