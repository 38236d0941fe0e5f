//! Random histories of a machine and its images: each backup has the current content of the disks.
//!
//! A history is a function of its seed, as far as libvirt and QEMU are deterministic. `HOLDFAST_SEED` repeats one;
//! `HOLDFAST_SECONDS` is the duration of the long test.

#![expect(
    clippy::print_stdout,
    reason = "the steps of a history that failed are needed to replay it"
)]

mod live;
mod off;

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom, SystemClock, to_usize};
use serde_json::Value;

use super::World;
use crate::host::{system, text};

const STEP_COUNT: usize = 40;
const PIECE_BYTES: u64 = 64 << 10;
const SIZE_BYTES_MIN: u64 = 6 << 20;
const SIZE_BYTES_MAX: u64 = 10 << 20;
/// Duration of the long test without `HOLDFAST_SECONDS`.
const SECONDS: u64 = 600;
const TARGETS: [&str; 2] = ["vda", "vdb"];

struct History {
    world: World,
    random: SeededRandom,
    /// Number of created files.
    made: usize,
    /// Copies of images, made while the machine was off: path, format and content.
    kept: Vec<(PathBuf, String, Vec<u8>)>,
    /// Checkpoints of libvirt.
    checkpoints: Vec<String>,
    /// Internal snapshots, with the content of both disks.
    internal: Vec<(String, [Vec<u8>; 2])>,
    /// The content of the newest snapshot.
    stored: Option<[Vec<u8>; 2]>,
    /// Number of disks that were read completely, and incrementally.
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
            checkpoints: Vec::new(),
            internal: Vec::new(),
            stored: None,
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

    /// The images of a disk, the top first.
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

    /// The content of an image. An image that QEMU has open was flushed.
    fn content(&mut self, image: &Path, format: &str) -> Vec<u8> {
        let raw = self.new_path("raw");
        system(
            "qemu-img",
            &["convert", "-U", "-f", format, "-O", "raw", text(image), text(&raw)],
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

    /// The content of a disk, read by other programs.
    fn content_of(&mut self, disk: usize) -> Vec<u8> {
        self.world.flush(disk);
        let (image, format) = (self.world.top_image(disk), self.format(disk));
        self.content(&image, &format)
    }

    fn back_up(&mut self, step: &str) {
        for disk in 0..2 {
            let bytes = self.content_of(disk);
            assert!(
                bytes == self.world.disks[disk],
                "{step}: the expected content of disk {disk} is wrong"
            );
        }
        let words: &[&str] = match self.random.below(20) {
            0 => &["--method", "overlay"],
            1 => &["--method", "pause"],
            2 => &["--with-memory=stopped"],
            3 => &["--with-memory"],
            4 => &["--no-parent"],
            _ => &[],
        };
        for reason in self.world.back_up_rightly_with(step, words) {
            println!("    {}", reason.as_deref().unwrap_or("by its bitmap"));
            self.counts[usize::from(reason.is_none())] += 1;
        }
        self.stored = Some(self.world.disks.clone());
    }

    /// Changes the images while the machine is off.
    fn while_off(&mut self) -> Outcome {
        self.world.stop();
        let done = self.off();
        self.world.start();
        done
    }

    fn killed(&mut self) {
        self.world.kill();
        self.read_disks();
        self.world.start();
    }

    fn step(&mut self, number: usize) {
        let kind = self.random.below(36);
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
            18 => ("commit", self.commit()),
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
            26 => ("checkpoint", self.checkpoint()),
            27 => ("internal snapshot", self.internal_snapshot()),
            _ => ("off", self.while_off()),
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

pub(super) fn seed_asked_for() -> Option<u64> {
    std::env::var("HOLDFAST_SEED").ok().map(|seed| seed.parse().unwrap())
}

/// Runs histories until the time has passed; a run returns how many disks were read completely and by their bitmaps.
pub(super) fn repeat_for_long(run: fn(u64) -> [usize; 2]) {
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

#[test]
fn backups_are_right_after_any_change_of_the_images() {
    run(seed_asked_for().unwrap_or_else(SeededRandom::fresh_seed));
}

/// A random history may have no backup by a bitmap; these have some.
#[test]
fn bitmaps_are_right_after_any_change_of_the_images() {
    let counts = [2, 4].map(run);
    assert!(counts.iter().all(|[_, by_bitmap]| *by_bitmap > 0), "{counts:?}");
}

#[test]
#[ignore = "runs for HOLDFAST_SECONDS: make torture"]
fn backups_are_right_after_any_change_of_the_images_for_long() {
    repeat_for_long(run);
}
