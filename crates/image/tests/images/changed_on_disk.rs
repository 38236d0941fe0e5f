//! What changed on a disk follows from what changed in its files: random writes of QEMU, compared byte by byte.

use std::fs;
use std::path::{Path, PathBuf};

use holdfast_block::{BlockDevice as _, DirtyBitmap, to_usize};
use holdfast_image::{Image, OpenOptions, changed_on_disk, open};

use crate::peer::{Lab, Random, qemu_io};

const DISK_BYTES: u64 = 4 << 20;
/// Granularity of the marks.
const SECTOR: u64 = 512;
const SECTOR_LENGTH: usize = to_usize(SECTOR);

/// The blocks that differ between two states of a file, as a file system would list them.
fn differences(before: &Path, after: &Path) -> DirtyBitmap {
    let (old, new) = (fs::read(before).unwrap(), fs::read(after).unwrap());
    let mut bitmap = DirtyBitmap::new(new.len() as u64, SECTOR).unwrap();
    for (number, block) in new.chunks(SECTOR_LENGTH).enumerate() {
        let start = number * SECTOR_LENGTH;
        if old.get(start..start + block.len()) != Some(block) {
            bitmap.set(start as u64..(start + block.len()) as u64);
        }
    }
    bitmap
}

fn contents(image: &Image) -> Vec<u8> {
    let mut bytes = vec![0; to_usize(image.size_bytes())];
    image.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// Random commands for qemu-io.
fn work(random: &mut Random, count: u64) -> Vec<String> {
    (0..count)
        .flat_map(|_| {
            let offset = random.below(DISK_BYTES / 4096) * 4096;
            let length = (4096 << random.below(6)).min(DISK_BYTES - offset);
            let cluster = random.below(DISK_BYTES >> 16) << 16;
            let command = match random.below(8) {
                0 => format!("discard {offset} {length}"),
                1 => format!("write -z {offset} {length}"),
                2 => format!("write -z -u {offset} {length}"),
                3 => {
                    // QEMU refuses to compress over an uncompressed cluster.
                    let compress = format!("write -c -P {} {cluster} 64k", 1 + random.below(250));
                    return vec![format!("discard {cluster} 64k"), compress];
                }
                _ => format!("write -P {} {offset} {length}", 1 + random.below(250)),
            };
            vec![command]
        })
        .collect()
}

fn run(image: &Path, commands: &[String]) {
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    qemu_io(image, &commands);
}

/// A folder for each state, so that the names of backing files stay valid.
struct States {
    lab: Lab,
    names: &'static [&'static str],
}

impl States {
    fn path(&self, state: &str, name: &str) -> PathBuf {
        self.lab.path(state).join(name)
    }

    /// Copies the newer state over the older one.
    fn take(&self) {
        fs::create_dir_all(self.lab.path("before")).unwrap();
        for name in self.names {
            fs::copy(self.path("after", name), self.path("before", name)).unwrap();
        }
    }

    fn open(&self, state: &str) -> Image {
        open(&self.path(state, self.names[0]), &OpenOptions::default()).unwrap()
    }

    /// Compares both states; returns how many bytes differ, and how many are marked as changed.
    fn check(&self, what: &str) -> (u64, u64) {
        let (before, after) = (self.open("before"), self.open("after"));
        let files: Vec<_> = self
            .names
            .iter()
            .map(|name| differences(&self.path("before", name), &self.path("after", name)))
            .collect();
        let changed = changed_on_disk(&before, &after, &files, SECTOR).unwrap();
        let (old, new) = (contents(&before), contents(&after));
        let mut different = 0;
        for (number, sector) in new.chunks(SECTOR_LENGTH).enumerate() {
            let start = number * SECTOR_LENGTH;
            if old.get(start..start + sector.len()) != Some(sector) {
                different += sector.len() as u64;
                assert!(
                    changed.is_dirty(start as u64..(start + sector.len()) as u64),
                    "{what}: a change at {start} is not marked"
                );
            }
        }
        (different, changed.dirty_bytes())
    }
}

#[test]
fn no_change_by_qemu_is_missed() {
    let mut random = Random(17);
    let mut totals = (0, 0);
    for (names, options) in [
        (&["top.qcow2"][..], ""),
        (&["top.qcow2"], "-o compression_type=zstd"),
        (&["top.qcow2"], "-o extended_l2=on"),
        (&["top.qcow2", "base.raw"], "-F raw -b base.raw"),
        (&["top.qcow2", "base.qcow2"], "-F qcow2 -b base.qcow2"),
    ] {
        let states = States { lab: Lab::new(), names };
        fs::create_dir(states.lab.path("after")).unwrap();
        match names.get(1) {
            Some(&"base.raw") => drop(states.lab.raw("after/base.raw", DISK_BYTES - 70_000, 3)),
            Some(name) => {
                states.lab.qemu_img(&format!("create -f qcow2 after/{name} 3M"));
                let commands: Vec<_> = (0..8).map(|n| format!("write -P {n} {}k 200k", n * 300)).collect();
                run(&states.path("after", name), &commands);
            }
            None => {}
        }
        let create = format!("create -f qcow2 {options} after/top.qcow2 {DISK_BYTES}");
        states.lab.qemu_img(&create);
        for round in 0..12 {
            states.take();
            let top = states.path("after", "top.qcow2");
            let count = random.below(10);
            run(&top, &work(&mut random, count));
            if round % 5 == 4 {
                states
                    .lab
                    .qemu_img(&format!("snapshot -c number{round} after/top.qcow2"));
            }
            if round == 7 && names.len() == 2 {
                // The base changes, too.
                let (base, format) = (states.path("after", names[1]), names[1].ends_with("qcow2"));
                if format {
                    run(&base, &["write -P 77 1M 300k".to_owned()]);
                } else {
                    let file = fs::OpenOptions::new().write(true).open(&base).unwrap();
                    std::os::unix::fs::FileExt::write_all_at(&file, &vec![77; 100_000], 1 << 20).unwrap();
                }
            }
            let found = states.check(&format!("{names:?} {options} round {round}"));
            totals = (totals.0 + found.0, totals.1 + found.1);
        }
    }
    println!("{} bytes differ, {} are called changed", totals.0, totals.1);
    // Marked but equal: zeroes over zeroes, the same byte again, moved clusters.
    assert!(totals.1 < totals.0 * 3, "{totals:?}");
}

#[test]
fn incomparable_states_are_changed_completely() {
    let lab = Lab::new();
    lab.raw("raw", DISK_BYTES, 5);
    for (name, options) in [
        ("a.qcow2", "-O qcow2"),
        ("small.qcow2", "-O qcow2 -o cluster_size=4096"),
        ("zstd.qcow2", "-O qcow2 -o compression_type=zstd"),
    ] {
        lab.qemu_img(&format!("convert -f raw {options} raw {name}"));
    }
    lab.qemu_img("create -f qcow2 -F raw -b raw chained.qcow2");
    let image = |name: &str| open(&lab.path(name), &OpenOptions::default()).unwrap();
    let clear = |name: &str| DirtyBitmap::new(fs::metadata(lab.path(name)).unwrap().len(), SECTOR).unwrap();
    let changed = |before: &str, after: &str, files: &[DirtyBitmap]| {
        let changed = changed_on_disk(&image(before), &image(after), files, 65_536).unwrap();
        changed.dirty_bytes()
    };
    assert_eq!(changed("a.qcow2", "a.qcow2", &[clear("a.qcow2")]), 0);
    assert_eq!(changed("raw", "raw", &[clear("raw")]), 0);
    let chain = [clear("chained.qcow2"), clear("raw")];
    assert_eq!(changed("chained.qcow2", "chained.qcow2", &chain), 0);
    for (before, after) in [
        ("small.qcow2", "a.qcow2"),
        ("zstd.qcow2", "a.qcow2"),
        ("raw", "a.qcow2"),
        ("chained.qcow2", "a.qcow2"),
        ("a.qcow2", "raw"),
    ] {
        assert_eq!(changed(before, after, &[clear(after)]), DISK_BYTES, "{before} {after}");
    }
    assert_eq!(changed("chained.qcow2", "chained.qcow2", &chain[..1]), DISK_BYTES);
    // A bitmap of another file.
    assert_eq!(changed("a.qcow2", "a.qcow2", &[clear("raw")]), DISK_BYTES);
}

/// In a raw image the bytes of the file are those of the disk; appended bytes are changed.
#[test]
fn grown_disk_is_changed_past_the_old_end() {
    let lab = Lab::new();
    lab.raw("before.raw", 1 << 20, 5);
    lab.raw("after.raw", 2 << 20, 5);
    let [before, after] =
        ["before.raw", "after.raw"].map(|name| open(&lab.path(name), &OpenOptions::default()).unwrap());
    let mut file = DirtyBitmap::new(2 << 20, SECTOR).unwrap();
    file.set(4096..8192);
    let changed = changed_on_disk(&before, &after, &[file], SECTOR).unwrap();
    assert_eq!(changed.iter().collect::<Vec<_>>(), [4096..8192, 1 << 20..2 << 20]);
    let shorter = DirtyBitmap::new(1 << 20, SECTOR).unwrap();
    let changed = changed_on_disk(&after, &before, &[shorter], SECTOR).unwrap();
    assert_eq!((changed.size_bytes(), changed.dirty_bytes()), (1 << 20, 0));
}
