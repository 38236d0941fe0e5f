//! ZFS, by incremental streams of zfs-fuse: a private instance, invisible to other processes.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use holdfast_block::SeededRandom;
use holdfast_block::conformance::test_seed;
use holdfast_host::changed_blocks::{SendStreamQuery, StreamObject, WholeFileReason, by_send_stream};
use tempfile::TempDir;

use crate::history::{Tally, Work, change, check, noise};
use crate::mounts::{is_root, run};

const POOL: &str = "hfchanged";

/// zfs-fuse with a pool, in a mount namespace of its own: all its mounts end with it.
struct ZfsFuse {
    daemon: Child,
    folder: TempDir,
}

impl ZfsFuse {
    /// None if it cannot be started, with a printed reason.
    fn start() -> Option<Self> {
        let missing = run(Command::new("sh").args(["-c", "command -v zfs-fuse setpriv && test -c /dev/fuse"])).err();
        if !is_root() || missing.is_some() {
            println!("skipped: needs root, zfs-fuse (Debian package) and /dev/fuse");
            return None;
        }
        let folder = TempDir::new().unwrap();
        fs::create_dir(folder.path().join("mounted")).unwrap();
        File::create(folder.path().join("disk"))
            .unwrap()
            .set_len(256 << 20)
            .unwrap();
        // Its socket, its lock and its list of pools are private.
        let script = "mkdir -p /var/lib/zfs && mount -t tmpfs none /var/lib/zfs && mount -t tmpfs none /run && \
                      mkdir -p /run/zfs /run/lock && touch /run/is-private && \
                      exec setpriv --pdeathsig KILL zfs-fuse --no-daemon";
        let daemon = Command::new("unshare")
            // Not private: a copy of the mounts of other tests would keep their datasets in use.
            .args(["--mount", "--propagation", "slave", "sh", "-c", script])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let zfs = Self { daemon, folder };
        // The process starts in the common mount namespace, where another zfs-fuse may answer.
        let ready = "test -e /run/is-private && zpool list";
        let wait = format!(
            "until nsenter --target {} --mount sh -c '{ready}' 2>/dev/null; do sleep 0.1; done",
            zfs.daemon.id()
        );
        run(Command::new("timeout").args(["30", "sh", "-c", &wait])).unwrap();
        let (mounted, disk) = (zfs.folder.path().join("mounted"), zfs.folder.path().join("disk"));
        zfs.run(&format!(
            "zpool create -m {} {POOL} {}",
            mounted.display(),
            disk.display()
        ));
        zfs.run(&format!("zfs create {POOL}/vm"));
        Some(zfs)
    }

    /// Runs a shell command in the namespace of the pool.
    fn run(&self, line: &str) -> Vec<u8> {
        let target = self.daemon.id().to_string();
        let entered = Command::new("nsenter")
            .args(["--target", &target, "--mount", "sh", "-c", line])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let words = String::from_utf8_lossy(&entered.stderr);
        assert!(entered.status.success(), "{line}: {words}");
        entered.stdout
    }

    /// A path in the pool, as seen from outside.
    fn path(&self, name: &str) -> PathBuf {
        let mounted = self.folder.path().join("mounted");
        let inside = mounted.strip_prefix("/").unwrap().join(name);
        PathBuf::from(format!("/proc/{}/root", self.daemon.id())).join(inside)
    }

    fn property(&self, name: &str, snapshot: &str) -> u64 {
        let printed = self.run(&format!("zfs get -Hp -o value {name} {POOL}/vm@{snapshot}"));
        String::from_utf8(printed).unwrap().trim().parse().unwrap()
    }

    /// Takes a snapshot, and clones it to make its files visible: zfs-fuse has no folder of snapshots.
    fn snapshot(&self, name: &str) {
        self.run(&format!(
            "zfs snapshot {POOL}/vm@{name} && zfs clone {POOL}/vm@{name} {POOL}/{name}"
        ));
    }
}

impl Drop for ZfsFuse {
    fn drop(&mut self) {
        self.daemon.kill().unwrap();
        self.daemon.wait().unwrap();
    }
}

/// The query for the image, between two snapshots.
fn query(zfs: &ZfsFuse, before: &File, after: &File, names: (&str, &str)) -> SendStreamQuery {
    let (old, new) = (before.metadata().unwrap(), after.metadata().unwrap());
    SendStreamQuery {
        from_guid: zfs.property("guid", names.0),
        to_guid: zfs.property("guid", names.1),
        object: StreamObject::File {
            number: new.ino(),
            block_before_bytes: old.blksize(),
            from_transaction: Some(zfs.property("createtxg", names.0)),
        },
        size_before_bytes: old.len(),
        size_after_bytes: new.len(),
    }
}

/// Takes snapshots and reads the streams between them; returns the tally, and how often all of the file was changed.
fn histories(zfs: &ZfsFuse, work: Work, prefix: &str, round_count: u64) -> (Tally, u64) {
    let mut random = SeededRandom::new(test_seed());
    let image = zfs.path("vm/image");
    fs::write(&image, noise(3 << 20, &mut random)).unwrap();
    zfs.snapshot(&format!("{prefix}0"));
    let (mut tally, mut whole_count) = (Tally::default(), 0);
    for round in 1..=round_count {
        change(&image, work, &mut random);
        File::open(&image).unwrap().sync_all().unwrap();
        let names = (format!("{prefix}{}", round - 1), format!("{prefix}{round}"));
        zfs.snapshot(&names.1);
        let [before, after] = [&names.0, &names.1].map(|name| File::open(zfs.path(name).join("image")).unwrap());
        let stream = zfs.run(&format!("zfs send -i {} {POOL}/vm@{}", names.0, names.1));
        let mut query = query(zfs, &before, &after, (&names.0, &names.1));
        if before.metadata().unwrap().ino() != after.metadata().unwrap().ino() {
            // Another file: a caller would not query the stream. If it does, all is changed.
            query.size_before_bytes = 0;
        }
        let found = by_send_stream(&mut &stream[..], &query).unwrap();
        whole_count += u64::from(found.whole.is_some());
        assert_eq!(found.stream_bytes, stream.len() as u64);
        tally.add(check(
            &before,
            &after,
            &found.ranges,
            &format!("{prefix}{round}: {found:?}"),
        ));
    }
    (tally, whole_count)
}

/// Blocks of 4 KiB in records of 8 KiB and of 128 KiB, then every operation.
#[test]
fn no_change_is_missed_by_streams_of_zfs_fuse() {
    let Some(zfs) = ZfsFuse::start() else { return };
    for record_kib in [8, 128] {
        zfs.run(&format!(
            "zfs set recordsize={record_kib}K {POOL}/vm && rm -f {}",
            inside(&zfs)
        ));
        let (tally, whole_count) = histories(&zfs, Work::Blocks, &format!("blocks{record_kib}x"), 6);
        tally.print(&format!("zfs-fuse, records of {record_kib} KiB, blocks"));
        assert_eq!(whole_count, 0, "the file is the same one all the time");
        // A changed block of 4 KiB changes its whole record.
        assert!(tally.reported <= tally.different * record_kib / 4);
    }
    let (tally, whole_count) = histories(&zfs, Work::Anything, "anything", 12);
    tally.print(&format!("zfs-fuse, anything ({whole_count} times all)"));
}

fn inside(zfs: &ZfsFuse) -> String {
    zfs.folder.path().join("mounted/vm/image").display().to_string()
}

/// A file is removed, and its object number is reused for another one of the same size.
#[test]
fn a_reused_object_number_is_detected() {
    let Some(zfs) = ZfsFuse::start() else { return };
    let image = zfs.path("vm/image");
    fs::write(&image, vec![1; 1 << 20]).unwrap();
    let number = fs::metadata(&image).unwrap().ino();
    zfs.snapshot("before");
    // Object numbers are reused after an export of the pool.
    let line = format!(
        "rm {0} && sync && zpool export {POOL} && zpool import -d {1} {POOL} && head -c 1048576 /dev/zero > {0} && sync",
        inside(&zfs),
        zfs.folder.path().display()
    );
    zfs.run(&line);
    let reused = fs::metadata(&image).unwrap().ino() == number;
    println!("the number was reused: {reused}");
    zfs.snapshot("after");
    let [before, after] = ["before", "after"].map(|name| File::open(zfs.path(name).join("image")).unwrap());
    let stream = zfs.run(&format!("zfs send -i before {POOL}/vm@after"));
    let found = by_send_stream(&mut &stream[..], &query(&zfs, &before, &after, ("before", "after"))).unwrap();
    assert_eq!(found.ranges.bytes(), 1 << 20);
    assert!(!reused || found.whole == Some(WholeFileReason::Replaced), "{found:?}");
}
