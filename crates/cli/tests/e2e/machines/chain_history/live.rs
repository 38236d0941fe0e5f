//! Changes to the images of a running machine.

use holdfast_block::to_usize;
use serde_json::json;

use super::{History, Outcome, PIECE_BYTES, SIZE_BYTES_MAX, SIZE_BYTES_MIN, TARGETS};
use crate::host::text;

impl History {
    pub(super) fn snapshot(&mut self, words: &[&str]) -> Outcome {
        self.made += 1;
        let name = format!("s{}", self.made);
        let mut all = vec!["snapshot-create-as", "web1", &name, "--disk-only", "--atomic"];
        all.extend(words);
        if self.random.one_in(3) {
            let other = TARGETS[self.disk()];
            let left_out = format!("{other},snapshot=no");
            return self.virsh(&[&all[..], &["--diskspec", &left_out]].concat());
        }
        self.virsh(&all)
    }

    pub(super) fn commit_middle(&mut self) -> Outcome {
        let disk = self.disk();
        let images = self.world.images_below(disk);
        let length = images.len() as u64;
        if length < 3 {
            return Err("there is no middle".to_owned());
        }
        let top = 1 + self.random.below(length - 2);
        let base = top + 1 + self.random.below(length - 1 - top);
        let (base, top) = (text(&images[to_usize(base)]), text(&images[to_usize(top)]));
        let target = TARGETS[disk];
        self.virsh(&["blockcommit", "web1", target, "--base", base, "--top", top, "--wait"])
    }

    pub(super) fn pull(&mut self) -> Outcome {
        let disk = self.disk();
        let images = self.world.images_below(disk);
        let words = ["blockpull", "web1", TARGETS[disk], "--wait"];
        if images.len() > 2 && self.random.one_in(2) {
            let base = 1 + self.random.below(images.len() as u64 - 1);
            return self.virsh(&[&words[..], &["--base", text(&images[to_usize(base)])]].concat());
        }
        self.virsh(&words)
    }

    pub(super) fn copy(&mut self) -> Outcome {
        let target = TARGETS[self.disk()];
        let file = self.new_path("copy");
        let format = if self.random.one_in(4) { "raw" } else { "qcow2" };
        let mut words = vec!["blockcopy", "web1", target, text(&file), "--format", format];
        words.extend(["--transient-job", "--wait", "--pivot"]);
        if format == "qcow2" && self.random.one_in(2) {
            words.push("--shallow");
        }
        self.virsh(&words)
    }

    pub(super) fn resize(&mut self) -> Outcome {
        let disk = self.disk();
        let (node, _) = self.world.bitmaps_on(disk);
        for _ in 0..=self.random.below(2) {
            let pieces = (SIZE_BYTES_MAX - SIZE_BYTES_MIN) / PIECE_BYTES;
            let size_bytes = SIZE_BYTES_MIN + self.random.below(pieces + 1) * PIECE_BYTES;
            self.set_size(disk, &node, size_bytes)?;
        }
        if self.random.one_in(2) {
            self.set_size(disk, &node, holdfast_test_kit::libvirt::DISK_BYTES)?;
        }
        Ok(())
    }

    fn set_size(&mut self, disk: usize, node: &str, size_bytes: u64) -> Outcome {
        let words = json!({ "node-name": node, "size": size_bytes });
        self.world.qmp("block_resize", words)?;
        self.world.disks[disk].resize(to_usize(size_bytes), 0);
        Ok(())
    }

    pub(super) fn meddle(&mut self) -> Outcome {
        let disk = self.disk();
        let (node, names) = self.world.bitmaps_on(disk);
        let name = names.first().ok_or("there is no bitmap")?;
        let words = json!({ "node": node, "name": name });
        let all: [&[&'static str]; 4] = [
            &["block-dirty-bitmap-clear"],
            &["block-dirty-bitmap-disable"],
            &["block-dirty-bitmap-remove"],
            &["block-dirty-bitmap-remove", "block-dirty-bitmap-add"],
        ];
        for command in all[to_usize(self.random.below(4))] {
            self.world.qmp(command, words.clone())?;
        }
        Ok(())
    }

    pub(super) fn save(&mut self) -> Outcome {
        if self.random.one_in(2) {
            self.virsh(&["managedsave", "web1"])?;
            self.world.start();
            return Ok(());
        }
        let file = self.new_path("saved");
        self.virsh(&["save", "web1", text(&file)])?;
        self.virsh(&["restore", text(&file)])
    }

    /// Commits the top image into the one below it, which may be larger: the disk then has that size.
    pub(super) fn commit(&mut self) -> Outcome {
        let disk = self.disk();
        let words = ["blockcommit", "web1", TARGETS[disk], "--active", "--pivot", "--wait"];
        self.virsh(&words)?;
        let now = self.content_of(disk);
        let before = &self.world.disks[disk];
        let shorter = now.len().min(before.len());
        assert!(
            now[..shorter] == before[..shorter],
            "the commit changed what the guest sees"
        );
        self.world.disks[disk] = now;
        Ok(())
    }

    /// Creates a checkpoint of libvirt, with a bitmap of its own in each image that supports bitmaps, or deletes one.
    pub(super) fn checkpoint(&mut self) -> Outcome {
        if self.random.one_in(3) && !self.checkpoints.is_empty() {
            let number = to_usize(self.random.below(self.checkpoints.len() as u64));
            let name = self.checkpoints.swap_remove(number);
            return self.virsh(&["checkpoint-delete", "web1", &name]);
        }
        self.made += 1;
        let name = format!("c{}", self.made);
        let kept = [0, 1].map(|disk| if self.format(disk) == "qcow2" { "bitmap" } else { "no" });
        let specs = [0, 1].map(|disk| format!("{},checkpoint={}", TARGETS[disk], kept[disk]));
        let words = [
            "checkpoint-create-as",
            "web1",
            &name,
            "--diskspec",
            &specs[0],
            "--diskspec",
            &specs[1],
        ];
        self.virsh(&words)?;
        self.checkpoints.push(name);
        Ok(())
    }

    /// Creates an internal snapshot of both disks, or reverts to one.
    pub(super) fn internal_snapshot(&mut self) -> Outcome {
        if self.random.one_in(2) && !self.internal.is_empty() {
            let number = to_usize(self.random.below(self.internal.len() as u64));
            let (name, disks) = self.internal[number].clone();
            let done = self.virsh(&["snapshot-revert", "web1", &name]);
            match &done {
                Ok(()) => self.world.disks = disks,
                // libvirt has ended the old QEMU, and the new one may have reverted only one of the disks.
                Err(_) if !self.world.is_running() => {
                    self.read_disks();
                    self.world.start();
                }
                Err(_) => {}
            }
            return done;
        }
        self.made += 1;
        let name = format!("i{}", self.made);
        self.virsh(&["snapshot-create-as", "web1", &name])?;
        self.internal.push((name, self.world.disks.clone()));
        Ok(())
    }
}
