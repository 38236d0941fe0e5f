//! The image chain of a disk of a bare QEMU changes between two backups.

use serde_json::{Value, json};

use super::bare::Bare;
use super::chains::GONE;
use crate::host::text;
use holdfast_host::qmp::{Monitor as _, QmpCommand};

impl Bare {
    fn snapshot(&self, name: &str, nodes: &[&str]) {
        for node in nodes {
            let file = self.lab.path(&format!("{name}-{node}"));
            let words = json!({
                "node-name": node, "snapshot-file": text(&file), "format": "qcow2",
                "snapshot-node-name": format!("{name}-{node}"),
            });
            self.lab.execute("blockdev-snapshot-sync", words);
        }
    }

    /// Waits for the end of all jobs, and completes those that are ready.
    pub(super) fn end_jobs(&self) {
        loop {
            let jobs = self.lab.execute("query-block-jobs", Value::Null);
            let Some(job) = jobs.as_array().unwrap().first() else {
                return;
            };
            if job["ready"] == true && job["status"] == "ready" {
                // The job may have ended since the query.
                let words = json!({ "device": job["device"] });
                let complete = QmpCommand::new("block-job-complete", words);
                self.lab.monitor.execute(&complete).ok();
            }
            std::thread::yield_now();
        }
    }

    /// Writes, backs up, and asserts that the snapshot is correct. Returns the reasons why disks were read completely.
    fn back_up_rightly(&self, what: &str) -> [Option<String>; 2] {
        let report = self.back_up(&[]);
        self.assert_snapshot_is_right(what);
        [0, 1].map(|disk| report["disks"][disk]["reason"].as_str().map(str::to_owned))
    }
}

/// Without libvirt, overlays have no bitmaps: their allocated clusters show what was written.
#[test]
fn a_qemu_without_libvirt_is_backed_up_through_all_layers() {
    let mut bare = Bare::new(&[]);
    let mut at = 0;
    let mut write = |bare: &mut Bare| {
        at += 1;
        for disk in [0, 1] {
            bare.write(disk, u8::try_from(100 + at).unwrap(), at * 65_536 + disk * 512, 4096);
        }
    };
    bare.back_up(&[]);
    write(&mut bare);
    bare.snapshot("one", &["format0", "format1"]);
    write(&mut bare);
    assert_eq!(bare.back_up_rightly("a snapshot"), [None, None]);
    write(&mut bare);
    assert_eq!(bare.back_up_rightly("on the overlay"), [None, None]);
    bare.snapshot("two", &["one-format0", "one-format1"]);
    write(&mut bare);
    bare.snapshot("three", &["two-one-format0", "two-one-format1"]);
    write(&mut bare);
    assert_eq!(bare.back_up_rightly("two snapshots"), [None, None]);
    // The middle image is committed into the one below; the last backup was of the top image.
    let commit = json!({
        "job-id": "commit", "device": "three-two-one-format0", "top-node": "two-one-format0", "base-node": "one-format0",
    });
    write(&mut bare);
    bare.lab.execute("block-commit", commit);
    bare.end_jobs();
    write(&mut bare);
    let [first, second] = bare.back_up_rightly("what it is based on is written by a commit");
    assert!(first.unwrap().contains("the base of the image") && second.is_none());
    // All layers are committed into the first.
    write(&mut bare);
    let commit = json!({ "job-id": "commit", "device": "three-two-one-format0" });
    bare.lab.execute("block-commit", commit);
    bare.end_jobs();
    write(&mut bare);
    let [first, second] = bare.back_up_rightly("committed");
    assert!(first.unwrap().contains(GONE) && second.is_none());
    // The content of the backing file is streamed into the image.
    write(&mut bare);
    bare.snapshot("four", &["format0"]);
    write(&mut bare);
    bare.lab
        .execute("block-stream", json!({ "job-id": "stream", "device": "four-format0" }));
    bare.end_jobs();
    let [first, second] = bare.back_up_rightly("streamed");
    assert!(first.unwrap().contains(GONE) && second.is_none());
}
