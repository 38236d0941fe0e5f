//! Random histories of a QEMU without libvirt: monitor commands, restarts and migrations between two backups.
//!
//! `HOLDFAST_SEED` repeats one history; `HOLDFAST_SECONDS` is the duration of the long test.

#![expect(
    clippy::print_stdout,
    reason = "the steps of a history that failed are needed to replay it"
)]

use holdfast_block::{SeededRandom, to_usize};
use holdfast_host::qemu::{Layer, Layers};
use holdfast_host::qmp::{Monitor as _, QmpCommand};
use serde_json::{Value, json};

use super::bare::Bare;
use super::chain_history::{repeat_for_long, seed_asked_for};
use crate::host::{system, text};
use holdfast_test_kit::qemu::{Ending, Image, QemuSetup};

/// The machine keeps its UUID in another QEMU with another socket.
const UUID: &str = "11111111-1111-4111-8111-111111111111";
const STEP_COUNT: usize = 40;
const PIECE_BYTES: u64 = 64 << 10;
const SIZE_BYTES_MIN: u64 = 12 << 20;
const SIZE_BYTES_MAX: u64 = 20 << 20;

struct BareHistory {
    bare: Bare,
    random: SeededRandom,
    /// Number of created files, nodes and bitmaps.
    made: usize,
    /// Number of disks that were read completely, and incrementally.
    counts: [usize; 2],
}

type Outcome = Result<(), String>;

impl BareHistory {
    fn new(seed: u64) -> Self {
        Self {
            bare: Bare::new(&["-uuid", UUID]),
            random: SeededRandom::new(seed),
            made: 0,
            counts: [0; 2],
        }
    }

    fn qmp(&self, command: &'static str, arguments: Value) -> Result<Value, String> {
        let answer = self.bare.lab.monitor.execute(&QmpCommand::new(command, arguments));
        answer.map_err(|error| error.to_string())
    }

    fn new_name(&mut self, what: &str) -> String {
        self.made += 1;
        format!("{what}{}", self.made)
    }

    fn disk(&mut self) -> usize {
        to_usize(self.random.below(2))
    }

    fn node(&self, disk: usize) -> String {
        let disks = self.bare.lab.disks();
        let device = disks.iter().find(|found| found.is_called(&format!("disk{disk}")));
        device.unwrap().node.clone()
    }

    fn layers(&self, disk: usize) -> Vec<Layer> {
        let layers = Layers::query(&*self.bare.lab.monitor).unwrap();
        layers.of(&self.node(disk)).unwrap()
    }

    fn images(&self) -> Vec<Image> {
        let image = |disk| {
            let top = self.layers(disk).swap_remove(0);
            (top.driver, top.files.unwrap().swap_remove(0))
        };
        [0, 1].map(image).to_vec()
    }

    /// The content of a disk, read by other programs.
    fn content_of(&mut self, disk: usize) -> Vec<u8> {
        let message = self.bare.lab.guest(disk, "flush");
        assert!(!message.contains("failed"), "{message}");
        let (format, image) = self.images().swap_remove(disk);
        let raw = self.bare.lab.path("raw");
        let words = ["convert", "-U", "-f", &format, "-O", "raw", text(&image), text(&raw)];
        system("qemu-img", &words).unwrap();
        std::fs::read(&raw).unwrap()
    }

    fn write(&mut self) {
        for _ in 0..=self.random.below(3) {
            let disk = self.disk();
            let byte = u8::try_from(1 + self.random.below(255)).unwrap();
            let size_bytes = self.bare.disks[disk].len() as u64;
            let offset = self.random.below(size_bytes / 512) * 512;
            let length = (1 + self.random.below(PIECE_BYTES / 512)) * 512;
            let length = length.min(size_bytes - offset);
            println!("    disk {disk} is written at {offset}, {length} bytes of {byte}");
            self.bare.write(disk, byte, to_usize(offset), to_usize(length));
        }
    }

    fn back_up(&mut self, step: &str) {
        for disk in 0..2 {
            let bytes = self.content_of(disk);
            assert!(
                bytes == self.bare.disks[disk],
                "{step}: the expected content of disk {disk} is wrong"
            );
        }
        let words: &[&str] = match self.random.below(20) {
            0 => &["--method", "pause"],
            1 => &["--with-memory=stopped"],
            2 => &["--no-parent"],
            _ => &[],
        };
        let report = self.bare.back_up(words);
        let reasons = [0, 1].map(|disk| report["disks"][disk]["reason"].as_str().map(str::to_owned));
        self.bare
            .assert_snapshot_is_right(&format!("{step}, {words:?}, {reasons:?}"));
        for reason in reasons {
            println!("    {}", reason.as_deref().unwrap_or("by its bitmap"));
            self.counts[usize::from(reason.is_none())] += 1;
        }
    }

    fn snapshot(&mut self) -> Outcome {
        let disk = self.disk();
        let name = self.new_name("s");
        let words = json!({
            "node-name": self.node(disk), "snapshot-file": text(&self.bare.lab.path(&name)), "format": "qcow2",
            "snapshot-node-name": name,
        });
        self.qmp("blockdev-snapshot-sync", words).map(drop)
    }

    /// Runs a job, during which the guest may write.
    fn job(&mut self, command: &'static str, words: Value) -> Outcome {
        println!("    {command}: {words}");
        self.qmp(command, words)?;
        if self.random.one_in(2) {
            self.write();
        }
        self.bare.end_jobs();
        Ok(())
    }

    /// Commits the top image into its backing file, whose size the disk then has.
    fn commit(&mut self) -> Outcome {
        let disk = self.disk();
        let node = self.node(disk);
        self.job("block-commit", json!({ "job-id": "commit", "device": node }))?;
        let now = self.content_of(disk);
        let before = &self.bare.disks[disk];
        let shorter = now.len().min(before.len());
        assert!(
            now[..shorter] == before[..shorter],
            "the commit changed what the guest sees"
        );
        self.bare.disks[disk] = now;
        Ok(())
    }

    fn commit_middle(&mut self) -> Outcome {
        let disk = self.disk();
        let layers = self.layers(disk);
        let count = layers.len() as u64;
        if count < 3 {
            return Err("there is no middle".to_owned());
        }
        let top = 1 + self.random.below(count - 2);
        let base = top + 1 + self.random.below(count - 1 - top);
        let [top, base] = [top, base].map(|number| &layers[to_usize(number)].node);
        let words = json!({ "job-id": "commit", "device": layers[0].node, "top-node": top, "base-node": base });
        self.job("block-commit", words)
    }

    fn stream(&mut self) -> Outcome {
        let disk = self.disk();
        let layers = self.layers(disk);
        let mut words = json!({ "job-id": "stream", "device": layers[0].node });
        if layers.len() > 2 && self.random.one_in(2) {
            let base = 1 + self.random.below(layers.len() as u64 - 1);
            words["base-node"] = json!(layers[to_usize(base)].node);
        }
        self.job("block-stream", words)
    }

    fn mirror(&mut self) -> Outcome {
        let disk = self.disk();
        let node = self.node(disk);
        let name = self.new_name("m");
        let file = self.bare.lab.path(&name);
        let format = ["qcow2", "qcow2", "raw"][to_usize(self.random.below(3))];
        let is_top = format == "qcow2" && self.layers(disk).len() > 1 && self.random.one_in(2);
        let sync = if is_top { "top" } else { "full" };
        if is_top || self.random.one_in(2) {
            let words = json!({
                "job-id": "mirror", "device": node, "target": text(&file), "format": format, "sync": sync, "node-name": name,
            });
            return self.job("drive-mirror", words);
        }
        let size = self.bare.disks[disk].len().to_string();
        system("qemu-img", &["create", "-q", "-f", format, text(&file), &size])?;
        let words = json!({
            "driver": format, "node-name": name, "file": { "driver": "file", "filename": text(&file) },
        });
        self.qmp("blockdev-add", words)?;
        let words = json!({ "job-id": "mirror", "device": node, "target": name, "sync": "full" });
        self.job("blockdev-mirror", words)
    }

    fn resize(&mut self) -> Outcome {
        let disk = self.disk();
        for _ in 0..=self.random.below(2) {
            let pieces = (SIZE_BYTES_MAX - SIZE_BYTES_MIN) / PIECE_BYTES;
            let size_bytes = SIZE_BYTES_MIN + self.random.below(pieces + 1) * PIECE_BYTES;
            let words = json!({ "node-name": self.node(disk), "size": size_bytes });
            self.qmp("block_resize", words)?;
            self.bare.disks[disk].resize(to_usize(size_bytes), 0);
        }
        Ok(())
    }

    fn meddle(&mut self) -> Outcome {
        let (disk, kind) = (self.disk(), self.random.below(6));
        let layers = self.layers(disk);
        let layer = &layers[to_usize(self.random.below(layers.len() as u64))];
        println!("    way {kind} at {}", layer.node);
        let bitmap_name = layer.bitmaps.iter().find(|bitmap| bitmap.name.starts_with("holdfast-"));
        let bitmap_name = &bitmap_name.ok_or("there is no bitmap")?.name;
        let words = json!({ "node": layer.node, "name": bitmap_name });
        let one = |command| self.qmp(command, words.clone()).map(drop);
        match kind {
            0 => one("block-dirty-bitmap-clear"),
            1 => one("block-dirty-bitmap-disable"),
            2 => one("block-dirty-bitmap-remove"),
            3 => {
                one("block-dirty-bitmap-remove")?;
                one("block-dirty-bitmap-add")
            }
            4 => self.rename_and_back(&layer.node, bitmap_name),
            _ => {
                let name = self.new_name("others");
                self.merge(&layer.node, bitmap_name, &name)
            }
        }
    }

    /// Creates a bitmap with the content of another one.
    fn merge(&self, node: &str, from: &str, to: &str) -> Outcome {
        self.qmp("block-dirty-bitmap-add", json!({ "node": node, "name": to }))?;
        let words = json!({ "node": node, "target": to, "bitmaps": [from] });
        self.qmp("block-dirty-bitmap-merge", words).map(drop)
    }

    /// A copy under another name replaces the bitmap while the guest writes, and is then merged back.
    fn rename_and_back(&mut self, node: &str, bitmap_name: &str) -> Outcome {
        let name = self.new_name("kept");
        self.merge(node, bitmap_name, &name)?;
        self.qmp(
            "block-dirty-bitmap-remove",
            json!({ "node": node, "name": bitmap_name }),
        )?;
        self.write();
        self.merge(node, &name, bitmap_name)
    }

    fn internal_snapshot(&mut self) -> Outcome {
        let disk = self.disk();
        let name = self.new_name("i");
        let words = json!({ "device": self.node(disk), "name": name });
        self.qmp("blockdev-snapshot-internal-sync", words).map(drop)
    }

    /// Arguments for a new QEMU that replaces this one; from now on, backups use its monitor.
    fn words_of_next(&mut self) -> [String; 6] {
        let socket = self.new_name("web1.qmp");
        self.bare.source = format!("qmp:{}", self.bare.lab.path(&socket).display());
        let socket = format!("unix:{{}}/{socket},server=on,wait=off");
        ["-name", "web1", "-uuid", UUID, "-qmp", &socket].map(str::to_owned)
    }

    fn restart(&mut self) {
        let images = self.images();
        let ending = if self.random.one_in(2) {
            Ending::Quit
        } else {
            for disk in 0..2 {
                self.bare.lab.guest(disk, "flush");
            }
            Ending::Killed
        };
        let words = self.words_of_next();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.bare.lab.restart(
            QemuSetup {
                images: &images,
                words: &words,
            },
            ending,
        );
    }

    fn migrate(&mut self) -> Outcome {
        let images = self.images();
        let capabilities = json!({ "capabilities": [
            { "capability": "dirty-bitmaps", "state": self.random.one_in(2) },
        ] });
        println!("    {capabilities}");
        let source = self.bare.source.clone();
        let words = self.words_of_next();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let done = self.bare.lab.migrate(
            QemuSetup {
                images: &images,
                words: &words,
            },
            &capabilities,
        );
        if done.is_err() {
            self.bare.source = source;
        }
        done
    }

    fn step(&mut self, number: usize) {
        let (what, outcome) = match self.random.below(32) {
            0..=6 => {
                self.write();
                ("write", Ok(()))
            }
            7..=15 => {
                self.back_up(&format!("step {number}"));
                ("back up", Ok(()))
            }
            16..=17 => ("snapshot", self.snapshot()),
            18..=19 => ("commit", self.commit()),
            20 => ("commit in the middle", self.commit_middle()),
            21..=22 => ("stream", self.stream()),
            23..=24 => ("mirror", self.mirror()),
            25 => ("resize", self.resize()),
            26..=27 => ("meddle", self.meddle()),
            28 => ("internal snapshot", self.internal_snapshot()),
            29 => {
                self.restart();
                ("restart", Ok(()))
            }
            _ => ("migrate", self.migrate()),
        };
        println!("  {number}: {what}: {outcome:?}");
    }

    fn run(mut self) -> [usize; 2] {
        self.back_up("the first");
        for number in 0..STEP_COUNT {
            self.step(number);
        }
        self.write();
        self.back_up("the last");
        self.bare.wait_until_clean("the end");
        self.counts
    }
}

fn run(seed: u64) -> [usize; 2] {
    println!("HOLDFAST_SEED={seed}");
    let counts = BareHistory::new(seed).run();
    println!("{} disks read in full, {} by their bitmaps", counts[0], counts[1]);
    counts
}

/// A disk moves from its node to another image, and the node keeps its bitmap; in the next QEMU the new image has the
/// name of that node.
#[test]
fn a_bitmap_of_a_node_that_a_disk_left_is_not_used_after_a_migration() {
    let mut history = BareHistory::new(1);
    history.bare.back_up(&[]);
    let file = history.bare.lab.path("mirror");
    let words = json!({
        "job-id": "mirror", "device": "format1", "target": text(&file), "format": "raw", "sync": "full", "node-name": "mirror",
    });
    history.qmp("drive-mirror", words).unwrap();
    history.bare.end_jobs();
    history.bare.write(1, 72, 10 << 20, 4096);
    let images = history.images();
    let words = history.words_of_next();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let capabilities = json!({ "capabilities": [{ "capability": "dirty-bitmaps", "state": true }] });
    history
        .bare
        .lab
        .migrate(
            QemuSetup {
                images: &images,
                words: &words,
            },
            &capabilities,
        )
        .unwrap();
    let report = history.bare.back_up(&[]);
    history.bare.assert_snapshot_is_right("migrated");
    let reason = report["disks"][1]["reason"].as_str().unwrap();
    assert!(reason.contains("came to another image"), "{reason}");
    // The other disk still has its image.
    assert!(report["disks"][0]["reason"].is_null(), "{report}");
}

#[test]
fn backups_of_a_bare_qemu_are_right_after_any_command() {
    if let Some(seed) = seed_asked_for() {
        run(seed);
        return;
    }
    let [_, by_bitmap] = run(1);
    assert!(by_bitmap > 0);
    run(SeededRandom::fresh_seed());
}

#[test]
#[ignore = "runs for HOLDFAST_SECONDS: make torture"]
fn backups_of_a_bare_qemu_are_right_after_any_command_for_long() {
    repeat_for_long(run);
}
