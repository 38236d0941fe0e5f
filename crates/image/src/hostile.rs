//! Exposes the image parsers to fuzzing: see [`holdfast_block::hostile`].
//!
//! An image is passed as an unlinked file, to the functions that open any other file, with the gate closed.

mod blocks;
mod descriptor;
mod seeds;
mod stream;

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use holdfast_block::hostile::{Outcome, Parser};
use holdfast_block::{BlockDevice, BlockDeviceMut as _, to_usize};
use rustix::fs::MemfdFlags;

pub use blocks::{parallels, vdi, vhd, vhdx, vmdk};
pub use descriptor::disk_descriptor;
pub use seeds::seeds;
pub use stream::{vhd_stream, vmdk_stream};

use crate::{
    Backing, BitmapState, CheckReport, Format, Gate, Image, MapContent, OpenOptions, RepairIntent, RepairMode, Result,
    Shrink, check, detect, open, plan_repair,
};

/// The parsers of this crate.
pub const PARSERS: &[Parser] = &[
    Parser {
        name: "image_format",
        feed: image_format,
    },
    Parser {
        name: "qcow2",
        feed: qcow2,
    },
    Parser {
        name: "qcow2_write",
        feed: qcow2_write,
    },
    Parser {
        name: "vmdk",
        feed: vmdk,
    },
    Parser {
        name: "vmdk_stream",
        feed: vmdk_stream,
    },
    Parser {
        name: "parallels",
        feed: parallels,
    },
    Parser {
        name: "disk_descriptor",
        feed: disk_descriptor,
    },
    Parser { name: "vdi", feed: vdi },
    Parser { name: "vhd", feed: vhd },
    Parser {
        name: "vhd_stream",
        feed: vhd_stream,
    },
    Parser {
        name: "vhdx",
        feed: vhdx,
    },
];

/// Limit of map entries, snapshots and bitmaps that are examined: a small file can describe a disk that takes years to
/// read.
const ENTRY_COUNT_MAX: usize = 500;
const PART_COUNT_MAX: usize = 3;
const READ_BYTES_MAX: u64 = 64 << 10;

/// An unlinked file with the bytes, and its path while it is open.
struct UnnamedFile {
    file: File,
    path: PathBuf,
}

impl UnnamedFile {
    fn new(bytes: &[u8]) -> Self {
        let fd = rustix::fs::memfd_create("image", MemfdFlags::CLOEXEC).expect("Linux has files in memory");
        let file = File::from(fd);
        file.write_all_at(bytes, 0).expect("memory can be written");
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        Self { file, path }
    }

    fn bytes(&self) -> Vec<u8> {
        let length = self.file.metadata().expect("an open file").len();
        let mut bytes = vec![0; to_usize(length)];
        self.file.read_exact_at(&mut bytes, 0).expect("memory can be read");
        bytes
    }
}

fn options(format: Option<Format>, backing: Backing) -> OpenOptions {
    OpenOptions {
        format,
        gate: Gate::Deny,
        backing,
        ..OpenOptions::default()
    }
}

/// A file of any format, which is detected; it is read if possible.
pub fn image_format(bytes: &[u8]) -> Outcome {
    let file = UnnamedFile::new(bytes);
    let format = detect(&file.path).expect("every file has a format, raw if no other");
    assert_eq!(
        Format::from_name(format.name()),
        Some(format),
        "its name is that of another"
    );
    match open(&file.path, &options(None, Backing::Follow)) {
        Ok(image) => {
            assert_eq!(image.layers()[0].format, format, "it was opened as another format");
            outcome_of(&read_all(&image))
        }
        Err(_) => Outcome::Refused,
    }
}

/// Reads a qcow2 image completely: its metadata, map, bitmaps and internal snapshots, and checks it.
pub fn qcow2(bytes: &[u8]) -> Outcome {
    let file = UnnamedFile::new(bytes);
    let checked = use_check(&file.path, Format::Qcow2);
    let followed = open(&file.path, &options(Some(Format::Qcow2), Backing::Follow));
    let named = |image: &Image| {
        let info = image.layers()[0].qcow2.clone().expect("it was opened as qcow2");
        info.backing_file.is_some() || info.data_file.is_some()
    };
    if let Ok(image) = &followed {
        assert!(!named(image), "the gate let another file in");
    }
    let alone = open(&file.path, &options(Some(Format::Qcow2), Backing::Ignore));
    let used = alone.and_then(|image| use_image(&image));
    let outcome = outcome_of(&checked.and(used));
    assert!(file.bytes() == bytes, "reading changed the image");
    repair(bytes, Format::Qcow2);
    outcome
}

fn outcome_of(result: &Result<()>) -> Outcome {
    match result {
        Ok(()) => Outcome::Decoded,
        Err(_) => Outcome::Refused,
    }
}

fn use_check(path: &Path, format: Format) -> Result<()> {
    let report = check(path, &options(Some(format), Backing::Ignore))?;
    for problem in &report.problems {
        assert!(!problem.kind.to_string().is_empty(), "a problem says nothing");
    }
    Ok(())
}

fn use_image(image: &Image) -> Result<()> {
    let info = image.layers()[0].qcow2.clone().expect("it was opened as qcow2");
    let read = read_all(image);
    for snapshot in info.snapshots.iter().take(PART_COUNT_MAX) {
        let device = image.snapshot(&snapshot.id)?;
        read_ends(&*device)?;
    }
    for bitmap in info.bitmaps.iter().take(PART_COUNT_MAX) {
        let (mut end, mut count) = (0, 0u64);
        let walked = image.for_each_dirty(&bitmap.name, |range| {
            assert!(
                range.start >= end && range.end > range.start,
                "dirty ranges come in order"
            );
            end = range.end;
            count += 1;
        });
        assert!(end <= image.size_bytes(), "a dirty range past the end of the disk");
        if let Ok(dirty) = image.dirty_bitmap(&bitmap.name) {
            assert!(
                walked.is_ok() && bitmap.state == BitmapState::Valid,
                "only a valid bitmap is used"
            );
            assert_eq!(dirty.is_clean(), count == 0, "the bitmap is not what was walked");
        }
    }
    read
}

/// Reads the map, and the data it refers to.
fn read_all(image: &Image) -> Result<()> {
    for note in image.notes() {
        assert!(!note.to_string().is_empty(), "a note says nothing");
    }
    let size_bytes = image.size_bytes();
    let mut buffer = Vec::new();
    let mut at = 0;
    for _ in 0..ENTRY_COUNT_MAX {
        if at >= size_bytes {
            break;
        }
        let entry = image.map_at(at, u64::MAX)?;
        assert!(entry.offset == at && entry.length > 0, "the map makes no progress");
        assert!(at + entry.length <= size_bytes, "the map goes past the end of the disk");
        if let (Some(depth), MapContent::Data { file, host_offset }) = (entry.depth, entry.content) {
            // The map command prints the file of an entry.
            let layer = image.layers().get(depth).expect("an entry is of a layer");
            assert!(
                file <= layer.extent_files.len(),
                "an entry is in a file that the layer does not have"
            );
            assert!(host_offset.checked_add(entry.length).is_some(), "an entry ends nowhere");
        }
        buffer.clear();
        buffer.resize(to_usize(entry.length.min(READ_BYTES_MAX)), 0xee);
        image.read_at(&mut buffer, at)?;
        if entry.content == MapContent::Zero {
            assert!(buffer.iter().all(|byte| *byte == 0), "zeroes read as something else");
        }
        at += entry.length;
    }
    read_ends(image)
}

fn read_ends(device: &dyn BlockDevice) -> Result<()> {
    let size_bytes = device.size_bytes();
    let mut buffer = vec![0; to_usize(size_bytes.min(READ_BYTES_MAX))];
    device.read_at(&mut buffer, 0)?;
    let last = size_bytes - buffer.len() as u64;
    device.read_at(&mut buffer, last)?;
    let list = device.extents(0..size_bytes, ENTRY_COUNT_MAX)?;
    assert!(
        list.end() <= size_bytes && (size_bytes == 0 || list.end() > 0),
        "extents make no progress"
    );
    Ok(())
}

/// Writes to a qcow2 image and flushes it. If the check found no corruption before, it must find none after, and the
/// image must read as written.
///
/// An image may use one host cluster for two ranges of the disk with the copied flag on both; like every program that
/// does not read all metadata first, the writer trusts it: a write to one range changes the other. Therefore corrupt
/// images must only do no harm to the writer.
pub fn qcow2_write(bytes: &[u8]) -> Outcome {
    write(bytes, Format::Qcow2)
}

fn write(bytes: &[u8], format: Format) -> Outcome {
    let file = UnnamedFile::new(bytes);
    let options = options(Some(format), Backing::Ignore);
    let checked = || check(&file.path, &options);
    let is_sound = |report: &Result<CheckReport>| report.as_ref().is_ok_and(|report| report.corruption_count == 0);
    let was_sound = is_sound(&checked());
    let mut written = Vec::new();
    if write_some(&file.path, &options, &mut written).is_err() {
        return Outcome::Refused;
    }
    let again = open(&file.path, &options).and_then(|image| {
        for offset in written {
            let mut back = [0; WRITTEN.len()];
            image.read_at(&mut back, offset)?;
            assert!(
                back == WRITTEN || !was_sound,
                "what was written and flushed reads as something else"
            );
        }
        Ok(())
    });
    let after = checked();
    assert!(
        !was_sound || (again.is_ok() && is_sound(&after)),
        "writing has made a sound {format} image corrupt: {again:?}, {after:?}"
    );
    if after.is_ok() {
        resize_some(&file.path, &options, was_sound);
    }
    outcome_of(&again)
}

/// Repairs an image in every mode: the image must not get worse, planning must change nothing, and a second repair
/// must have nothing to do.
fn repair(bytes: &[u8], format: Format) {
    let options = options(Some(format), Backing::Ignore);
    for mode in [RepairMode::Leaks, RepairMode::Safe, RepairMode::All] {
        let file = UnnamedFile::new(bytes);
        let plan = |intent| plan_repair(&file.path, &options, mode, intent);
        let Ok(looked) = plan(RepairIntent::Look) else { continue };
        assert!(file.bytes() == bytes, "a plan wrote");
        let (before, actions) = (looked.before().clone(), looked.actions().len());
        drop(looked);
        let planned = plan(RepairIntent::Repair).expect("an image that can be inspected can be repaired");
        assert_eq!(planned.actions().len(), actions, "another plan");
        let after = planned.execute().expect("what was planned can be done");
        assert!(
            after.corruption_count <= before.corruption_count,
            "a repair made it worse: {before:?}, {after:?}"
        );
        assert!(actions > 0 || file.bytes() == bytes, "changed without a word");
        let again = plan(RepairIntent::Look);
        let error = again.as_ref().err();
        assert!(
            error.is_none(),
            "an image of {format:?} repaired in mode {mode:?}: {error:?}"
        );
        let again = again.expect("there is no error");
        assert_eq!(again.actions(), [], "a repaired image needs no other repair");
    }
}

/// Grows an image, and then shrinks it: a consistent image must stay consistent, and new bytes must be zero.
fn resize_some(path: &Path, options: &OpenOptions, was_sound: bool) {
    const GROWN_BYTES: u64 = 3 << 20;
    let size_of = || open(path, options).map(|image| image.size_bytes());
    let Ok(before_bytes) = size_of() else { return };
    let larger = (before_bytes / 512 * 512).saturating_add(GROWN_BYTES);
    for size_bytes in [larger, before_bytes / 1024 * 512] {
        if crate::resize(path, options, size_bytes, Shrink::Allow).is_err() || !was_sound {
            continue;
        }
        let image = open(path, options).expect("a sound image that was resized");
        assert_eq!(image.size_bytes(), size_bytes, "it has another size");
        if size_bytes == larger {
            let mut added = vec![0xee; to_usize(larger - before_bytes)];
            image
                .read_at(&mut added, before_bytes)
                .expect("what is new can be read");
            assert!(added.iter().all(|byte| *byte == 0), "what is new is not zero");
        }
        let report = check(path, options).expect("a sound image that was resized");
        assert_eq!(
            report.corruption_count, 0,
            "another size has made it corrupt: {report:?}"
        );
    }
}

const WRITTEN: [u8; 3000] = [0x5a; 3000];

/// Writes at a few offsets, trims after each where nothing was written, and flushes; records the offsets in `written`.
fn write_some(path: &Path, options: &OpenOptions, written: &mut Vec<u64>) -> Result<()> {
    let length = WRITTEN.len() as u64;
    let image = crate::open_mut(path, options)?;
    let size_bytes = image.size_bytes();
    for offset in [0, 700, size_bytes / 2, size_bytes.saturating_sub(length)] {
        if size_bytes.saturating_sub(offset) < length {
            continue;
        }
        image.write_at(&WRITTEN, offset)?;
        written.retain(|other| other.abs_diff(offset) >= length);
        written.push(offset);
        let end = (offset + 2 * length).min(size_bytes);
        if written.iter().all(|other| other.abs_diff(offset + length) >= length) {
            image.trim(offset + length..end)?;
        }
    }
    Ok(image.flush()?)
}
