//! Random histories of a machine and its images: each backup holds what the disks held.
//!
//! A history is a function of its seed, as far as libvirt and QEMU are. `HOLDFAST_SEED` replays one; `HOLDFAST_SECONDS` is how long the
//! long test goes on.

#![expect(
    clippy::print_stdout,
    reason = "the steps of a history that failed are needed to replay it"
)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom, SystemClock, to_usize};
use serde_json::{Value, json};

use super::{World, at};
use crate::host::{system, text};

const STEP_COUNT: usize = 40;
const PIECE_BYTES: u64 = 64 << 10;
const SIZE_BYTES_MIN: u64 = 6 << 20;
const SIZE_BYTES_MAX: u64 = 10 << 20;
/// How long the long test goes on unless it is told otherwise.
const SECONDS: u64 = 600;
const TARGETS: [&str; 2] = ["vda", "vdb"];

struct History {
    world: World,
    random: SeededRandom,
    /// Files that were made.
    made: usize,
    /// Copies of images from when the machine was off, with what they hold.
    kept: Vec<(PathBuf, String, Vec<u8>)>,
    /// Disks that were read in full, and those that were not.
    counts: [usize; 2],
}

type Outcome = Result<(), String>;

impl History {
    fn new(seed: u64) -> Self {
        Self {
            world: World::new(),
            random: SeededRandom::new(seed),
            made: 0,
            kept: Vec::new(),
            counts: [0; 2],
        }
    }

    fn virsh(&self, words: &[&str]) -> Outcome {
        let uri = self.world.lab.uri();
        system("virsh", &[&["-q", "-c", &uri], words].concat()).map(drop)
    }

    fn new_path(&mut self, what: &str) -> PathBuf {
        self.made += 1;
        self.world.lab.path(&format!("{what}{}", self.made))
    }

    fn disk(&mut self) -> usize {
        to_usize(self.random.below(2))
    }

    fn format(&self, disk: usize) -> String {
        let description = self.world.machine().describe().unwrap();
        description.disks[disk].format.clone().unwrap()
    }

    /// The images of a disk, the one that is written first.
    fn chain(&self, disk: usize) -> Vec<Value> {
        let (image, format) = (self.world.top_image(disk), self.format(disk));
        let words = [
            "info",
            "-U",
            "--backing-chain",
            "--output=json",
            "-f",
            &format,
            text(&image),
        ];
        serde_json::from_str(&system("qemu-img", &words).unwrap()).unwrap()
    }

    /// What an image of a machine that is off holds.
    fn content(&mut self, image: &Path, format: &str) -> Vec<u8> {
        let raw = self.new_path("raw");
        system(
            "qemu-img",
            &["convert", "-f", format, "-O", "raw", text(image), text(&raw)],
        )
        .unwrap();
        let bytes = std::fs::read(&raw).unwrap();
        std::fs::remove_file(&raw).unwrap();
        bytes
    }

    fn read_disks(&mut self) {
        for disk in 0..2 {
            let (image, format) = (self.world.top_image(disk), self.format(disk));
            self.world.disks[disk] = self.content(&image, &format);
        }
    }

    fn place(&mut self, disk: usize) -> (u8, u64, u64) {
        let byte = u8::try_from(1 + self.random.below(255)).unwrap();
        let size_bytes = self.world.disks[disk].len() as u64;
        let offset = self.random.below(size_bytes / 512) * 512;
        let length = (1 + self.random.below(PIECE_BYTES / 512)) * 512;
        (byte, offset, length.min(size_bytes - offset))
    }

    fn write(&mut self) {
        for _ in 0..=self.random.below(3) {
            let disk = self.disk();
            let (byte, offset, length) = self.place(disk);
            self.world.write(disk, byte, to_usize(offset), to_usize(length));
        }
    }

    fn back_up(&mut self, step: &str) {
        if self.random.one_in(12) {
            let uri = self.world.lab.uri();
            let words = at(&uri, &["backup", "web1", "--method", "overlay"]);
            self.world.rig.ok(&words);
            self.world.assert_snapshot_is_right(step);
            return;
        }
        for reason in self.world.back_up_rightly(step) {
            println!("    {}", reason.as_deref().unwrap_or("by its bitmap"));
            self.counts[usize::from(reason.is_none())] += 1;
        }
    }

    fn snapshot(&mut self, words: &[&str]) -> Outcome {
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

    fn commit_middle(&mut self) -> Outcome {
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

    fn pull(&mut self) -> Outcome {
        let disk = self.disk();
        let images = self.world.images_below(disk);
        let words = ["blockpull", "web1", TARGETS[disk], "--wait"];
        if images.len() > 2 && self.random.one_in(2) {
            let base = 1 + self.random.below(images.len() as u64 - 1);
            return self.virsh(&[&words[..], &["--base", text(&images[to_usize(base)])]].concat());
        }
        self.virsh(&words)
    }

    fn copy(&mut self) -> Outcome {
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

    fn resize(&mut self) -> Outcome {
        let disk = self.disk();
        let (node, _) = self.world.bitmaps_on(disk);
        for _ in 0..=self.random.below(2) {
            let pieces = (SIZE_BYTES_MAX - SIZE_BYTES_MIN) / PIECE_BYTES;
            let size_bytes = SIZE_BYTES_MIN + self.random.below(pieces + 1) * PIECE_BYTES;
            self.set_size(disk, &node, size_bytes)?;
        }
        if self.random.one_in(2) {
            self.set_size(disk, &node, super::lab::DISK_BYTES)?;
        }
        Ok(())
    }

    fn set_size(&mut self, disk: usize, node: &str, size_bytes: u64) -> Outcome {
        let words = json!({ "node-name": node, "size": size_bytes });
        self.world.qmp("block_resize", words)?;
        self.world.disks[disk].resize(to_usize(size_bytes), 0);
        Ok(())
    }

    fn meddle(&mut self) -> Outcome {
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

    fn save(&mut self) -> Outcome {
        if self.random.one_in(2) {
            self.virsh(&["managedsave", "web1"])?;
            self.world.start();
            return Ok(());
        }
        let file = self.new_path("saved");
        self.virsh(&["save", "web1", text(&file)])?;
        self.virsh(&["restore", text(&file)])
    }

    /// Something is done to the images while the machine is off.
    fn while_off(&mut self) -> Outcome {
        self.world.stop();
        let done = self.off();
        self.world.start();
        done
    }

    fn off(&mut self) -> Outcome {
        let disk = self.disk();
        let (image, format) = (self.world.top_image(disk), self.format(disk));
        match self.random.below(8) {
            0 => Ok(()),
            1 => self.keep(disk, &image, &format),
            2 => self.put_back(disk),
            3 => self.flatten(disk, &image, &format),
            4 => {
                self.exchange();
                Ok(())
            }
            5 => self.change_base(disk, &image, &format),
            6 => {
                let other = self.new_path("moved");
                std::fs::copy(&image, &other).unwrap();
                self.world.put(disk, &other, &format);
                Ok(())
            }
            _ => {
                let (byte, offset, length) = self.place(disk);
                let line = format!("write -P {byte} {offset} {length}");
                system("qemu-io", &["-f", &format, "-c", &line, text(&image)])?;
                self.world.disks[disk][to_usize(offset)..to_usize(offset + length)].fill(byte);
                Ok(())
            }
        }
    }

    fn keep(&mut self, disk: usize, image: &Path, format: &str) -> Outcome {
        if self.chain(disk).len() > 1 {
            return Err("it has a base".to_owned());
        }
        let copy = self.new_path("kept");
        std::fs::copy(image, &copy).unwrap();
        self.kept
            .push((copy, format.to_owned(), self.world.disks[disk].clone()));
        Ok(())
    }

    /// An image of earlier, perhaps of the other disk.
    fn put_back(&mut self, disk: usize) -> Outcome {
        if self.kept.is_empty() {
            return Err("nothing was kept".to_owned());
        }
        let number = to_usize(self.random.below(self.kept.len() as u64));
        let (image, format, bytes) = self.kept.swap_remove(number);
        self.world.put(disk, &image, &format);
        self.world.disks[disk] = bytes;
        Ok(())
    }

    fn flatten(&mut self, disk: usize, image: &Path, format: &str) -> Outcome {
        let flat = self.new_path("flat");
        let mut words = vec!["convert", "-f", format, "-O", "qcow2"];
        if format == "qcow2" && self.random.one_in(2) {
            words.push("--bitmaps");
        }
        system("qemu-img", &[&words[..], &[text(image), text(&flat)]].concat())?;
        self.world.put(disk, &flat, "qcow2");
        Ok(())
    }

    fn exchange(&mut self) {
        let images = [0, 1].map(|disk| (self.world.top_image(disk), self.format(disk)));
        let nowhere = self.new_path("nowhere");
        self.world.put(0, &nowhere, "raw");
        self.world.put(1, &images[0].0, &images[0].1);
        self.world.put(0, &images[1].0, &images[1].1);
        self.world.disks.swap(0, 1);
    }

    /// The image gets a base that is not what it was.
    fn change_base(&mut self, disk: usize, image: &Path, format: &str) -> Outcome {
        let chain = self.chain(disk);
        let below = chain.get(1).ok_or("there is no base")?;
        let (file, kind) = (below["filename"].as_str().unwrap(), below["format"].as_str().unwrap());
        let base = self.new_path("base");
        std::fs::copy(file, &base).unwrap();
        let size_bytes = below["virtual-size"].as_u64().unwrap();
        let offset = self.random.below(size_bytes / PIECE_BYTES) * PIECE_BYTES;
        let line = format!("write -P 222 {offset} {PIECE_BYTES}");
        system("qemu-io", &["-f", kind, "-c", &line, text(&base)])?;
        let words = ["rebase", "-u", "-f", format, "-F", kind, "-b", text(&base), text(image)];
        system("qemu-img", &words)?;
        self.world.put(disk, image, format);
        self.world.disks[disk] = self.content(image, format);
        Ok(())
    }

    fn killed(&mut self) {
        self.world.kill();
        self.read_disks();
        self.world.start();
    }

    fn step(&mut self, number: usize) {
        let kind = self.random.below(30);
        let target = TARGETS[self.disk()];
        let (what, outcome) = match kind {
            0..=6 => {
                self.write();
                ("write", Ok(()))
            }
            7..=14 => {
                self.back_up(&format!("step {number}"));
                ("back up", Ok(()))
            }
            15..=16 => ("snapshot without metadata", self.snapshot(&["--no-metadata"])),
            17 => ("snapshot", self.snapshot(&[])),
            18 => {
                let words = ["blockcommit", "web1", target, "--active", "--pivot", "--wait"];
                ("commit", self.virsh(&words))
            }
            19 => ("commit in the middle", self.commit_middle()),
            20 => ("pull", self.pull()),
            21 => ("copy", self.copy()),
            22 => ("resize", self.resize()),
            23 => ("meddle", self.meddle()),
            24 => ("save", self.save()),
            25 => {
                self.killed();
                ("kill", Ok(()))
            }
            _ => ("off", self.while_off()),
        };
        println!("  {number}: {what} {target}: {outcome:?}");
    }

    fn run(mut self) -> [usize; 2] {
        self.back_up("the first");
        for number in 0..STEP_COUNT {
            self.step(number);
        }
        self.write();
        self.back_up("the last");
        self.world.assert_runs_and_is_clean();
        self.counts
    }
}

fn run(seed: u64) -> [usize; 2] {
    println!("HOLDFAST_SEED={seed}");
    let counts = History::new(seed).run();
    println!("{} disks read in full, {} by their bitmaps", counts[0], counts[1]);
    counts
}

fn seed_asked_for() -> Option<u64> {
    std::env::var("HOLDFAST_SEED").ok().map(|seed| seed.parse().unwrap())
}

#[test]
fn whatever_happens_to_the_images_backups_are_right() {
    if let Some(seed) = seed_asked_for() {
        run(seed);
        return;
    }
    let counts = [run(1), run(2)];
    assert!(counts.iter().all(|[_, by_bitmap]| *by_bitmap > 0), "{counts:?}");
    run(SeededRandom::fresh_seed());
}

#[test]
#[ignore = "the longer, the better: make torture"]
fn whatever_happens_to_the_images_for_long() {
    let seconds = std::env::var("HOLDFAST_SECONDS").map_or(SECONDS, |seconds| seconds.parse().unwrap());
    let clock = SystemClock::new();
    let (mut done, mut counts) = (0, [0; 2]);
    while clock.now() < Duration::from_secs(seconds) {
        let one = run(seed_asked_for().map_or_else(SeededRandom::fresh_seed, |seed| seed + done));
        counts = [counts[0] + one[0], counts[1] + one[1]];
        done += 1;
    }
    println!(
        "{done} histories: {} disks read in full, {} by their bitmaps",
        counts[0], counts[1]
    );
}
