//! Streamed VMDKs, written by Holdfast and by QEMU.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::num::NonZero;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Mutex;

use holdfast_block::{
    BlockDevice, Error as BlockError, ExtentKind, ExtentList, FileDevice, IoMode, MemoryDevice, to_usize,
};
use holdfast_image::{
    Continue, CreateOptions, Error, Format, ImageId, ImageKind, NewIdentity, OpenOptions, StreamOptions, StreamReader,
    StreamReport, UnnamedChildren, create, open, set_identity, write_stream_optimized,
};

use crate::peer::{Lab, Random, assert_clean, assert_reads_as, flatten, path_text, qemu_img, sample_disk};

const MIB: u64 = 1 << 20;
const SECTOR: usize = 512;

fn options(name: &str) -> StreamOptions<'_> {
    StreamOptions {
        name,
        id: ImageId([0x42; 16]),
        level: None,
        threads: NonZero::new(3).unwrap(),
    }
}

fn written(device: &dyn BlockDevice) -> (Vec<u8>, StreamReport) {
    let mut bytes = Vec::new();
    let report = write_stream_optimized(device, &mut bytes, &options("disk.vmdk"), &mut |_| Continue::Go).unwrap();
    assert_eq!(report.file_bytes, bytes.len() as u64);
    (bytes, report)
}

/// A reader that returns a few bytes at a time, as a pipe may.
struct Dripping<'a>(&'a [u8], Random);

impl Read for Dripping<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = to_usize(1 + self.1.below(9000)).min(buffer.len());
        self.0.read(&mut buffer[..count])
    }
}

/// The disk in a stream.
fn read(stream: &[u8]) -> Result<Vec<u8>, Error> {
    let threads = NonZero::new(1 + stream.len() / SECTOR % 3).unwrap();
    let mut reader = StreamReader::open(Dripping(stream, Random(7)), "stream")?.with_threads(threads);
    let mut disk = vec![0; to_usize(reader.size_bytes())];
    let mut end = 0;
    while let Some(grain) = reader.next_grain()? {
        assert!(grain.offset >= end && !grain.bytes.is_empty());
        end = grain.offset + grain.bytes.len() as u64;
        disk[to_usize(grain.offset)..to_usize(end)].copy_from_slice(grain.bytes);
    }
    assert_eq!(
        reader.read_bytes(),
        stream.len() as u64,
        "the stream was read to its end"
    );
    assert!(reader.next_grain()?.is_none());
    assert!(reader.into_inner().0.is_empty());
    Ok(disk)
}

fn by_peer(lab: &Lab, disk: &[u8]) -> Vec<u8> {
    let (raw, image) = (lab.path("peer.raw"), lab.path("peer.vmdk"));
    File::create(&raw).unwrap().write_all_at(disk, 0).unwrap();
    let options = "subformat=streamOptimized";
    let words = ["convert", "-f", "raw", "-O", "vmdk", "-o", options];
    qemu_img(&[&words[..], &[path_text(&raw), path_text(&image)]].concat());
    fs::read(&image).unwrap()
}

/// Disks of odd sizes: full, empty and mixed.
fn disks() -> Vec<(String, Vec<u8>)> {
    let mut all: Vec<(String, Vec<u8>)> = [512, 65_536 - 512, 65_536, 3 * MIB, 20 * MIB + 512, 33 * MIB - 512]
        .into_iter()
        .map(|size_bytes| (format!("sample of {size_bytes}"), sample_disk(size_bytes, size_bytes)))
        .collect();
    let mut noise = vec![0; to_usize(5 * MIB)];
    Random(3).fill(&mut noise);
    let mut ends = vec![0; to_usize(100 * MIB)];
    ends[0] = 1;
    *ends.last_mut().unwrap() = 2;
    all.push(("noise".to_owned(), noise));
    all.push(("two bytes".to_owned(), ends));
    all.push(("zeroes".to_owned(), vec![0; to_usize(40 * MIB)]));
    all
}

#[test]
fn our_streams_are_read_by_peers_and_us() {
    for (what, disk) in disks() {
        let lab = Lab::new();
        let (bytes, report) = written(&MemoryDevice::from_bytes(&disk));
        let is_used = |grain: &&[u8]| grain.iter().any(|byte| *byte != 0);
        let expected = disk.chunks(65_536).filter(is_used).count();
        assert_eq!(
            (report.grain_count, report.size_bytes),
            (expected as u64, disk.len() as u64),
            "{what}"
        );
        let image = lab.path("disk.vmdk");
        File::create(&image).unwrap().write_all(&bytes).unwrap();
        qemu_img(&["check", "-f", "vmdk", path_text(&image)]);
        let shown = qemu_img(&["info", path_text(&image)]);
        assert!(
            shown.contains("streamOptimized") && shown.contains("compressed: true"),
            "{shown}"
        );
        assert!(flatten(&image, &lab) == disk, "{what}: the peer reads other data");
        assert_clean(&image);
        let opened = open(&image, &OpenOptions::default()).unwrap();
        assert_reads_as(&opened, &disk, &what);
        let info = opened.layers()[0].blocks.clone().unwrap();
        assert_eq!((info.kind, info.id), (ImageKind::Stream, Some(ImageId([0x42; 16]))));
        assert!(read(&bytes).unwrap() == disk, "{what}: the stream has other data");
        let again = written(&MemoryDevice::from_bytes(&disk)).0;
        assert!(again == bytes, "{what}: a second stream differs");
    }
}

#[test]
fn peer_streams_are_read() {
    for (what, disk) in disks() {
        let lab = Lab::new();
        let bytes = by_peer(&lab, &disk);
        assert!(read(&bytes).unwrap() == disk, "{what}");
        // Other programs write such streams with an end marker.
        let ended = [&bytes[..], &[0; SECTOR]].concat();
        assert!(read(&ended).unwrap() == disk, "{what}, with an end marker");
    }
}

/// A truncated stream must not look complete, at whichever sector it ends.
#[test]
fn truncated_stream_is_an_error_at_any_length() {
    let lab = Lab::new();
    let disk = sample_disk(MIB + 512, 5);
    for bytes in [written(&MemoryDevice::from_bytes(&disk)).0, by_peer(&lab, &disk)] {
        assert!(read(&bytes).unwrap() == disk);
        // Trailing zeroes after the last grain of QEMU's streams are optional.
        let whole = if bytes.ends_with(&[0; 2 * SECTOR]) {
            let last = bytes.iter().rposition(|byte| *byte != 0).unwrap();
            last.next_multiple_of(SECTOR)
        } else {
            bytes.len()
        };
        for length in (0..whole).step_by(SECTOR).chain([1, 600, whole - 1]) {
            let Err(error) = read(&bytes[..length]) else {
                panic!("{length} of {} bytes look complete", bytes.len());
            };
            assert!(error.is_corrupt(), "{length}: {error}");
            let shown = error.to_string();
            assert!(shown.contains("cut off"), "{length}: {shown}");
        }
        for length in (SECTOR..whole).step_by(SECTOR * 7) {
            let image = lab.path("cut.vmdk");
            File::create(&image).unwrap().write_all(&bytes[..length]).unwrap();
            let opened = open(&image, &OpenOptions::default());
            // Missing data is an error, and does not read as zero.
            let found = opened.and_then(|image| {
                let mut found = vec![0; disk.len().min(to_usize(image.size_bytes()))];
                Ok(image.read_at(&mut found, 0).map(|()| found)?)
            });
            assert!(found.is_err(), "{length}");
        }
    }
}

/// A device on which every byte is read at most once, and in order: early threads wait.
struct OnePass {
    disk: Vec<u8>,
    /// Data; everything else is holes.
    data: Vec<Range<u64>>,
    at: Mutex<(u64, u64)>,
    moved: std::sync::Condvar,
}

impl OnePass {
    /// Whether the piece at `offset` is the next one: only holes are between it and the end of the last read.
    fn is_next(&self, at: u64, offset: u64) -> bool {
        !self
            .data
            .iter()
            .any(|range| range.start.max(at) < range.end.min(offset))
    }
}

impl BlockDevice for OnePass {
    fn size_bytes(&self) -> u64 {
        self.disk.len() as u64
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), BlockError> {
        self.check_bounds(offset, buffer.len() as u64)?;
        let mut at = self.at.lock().unwrap();
        while !self.is_next(at.0, offset) {
            at = self.moved.wait(at).unwrap();
        }
        assert!(offset >= at.0, "byte {offset} is read for the second time");
        buffer.copy_from_slice(&self.disk[to_usize(offset)..][..buffer.len()]);
        at.0 = offset + buffer.len() as u64;
        self.moved.notify_all();
        Ok(())
    }

    /// Returns few extents at a time.
    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList, BlockError> {
        let mut at = self.at.lock().unwrap();
        assert!(range.start >= at.1, "extents are queried in order");
        at.1 = range.start;
        let end = range.end.min(range.start + 700_000);
        let mut list = ExtentList::new(range.start, extent_count_max);
        while list.end() < end {
            let from = list.end();
            let found = self.data.iter().find(|data| data.end > from);
            let (until, kind) = match found {
                Some(data) if data.start <= from => (data.end, ExtentKind::Data),
                Some(data) => (data.start, ExtentKind::Zero),
                None => (end, ExtentKind::Zero),
            };
            if !list.push(until.min(end) - from, kind) {
                break;
            }
        }
        Ok(list)
    }
}

#[test]
fn stream_reads_the_device_once() {
    let disk = sample_disk(30 * MIB + 1000, 11);
    let length = disk.len() as u64;
    let whole = vec![0..length / 2, length / 2..length];
    let mut holed = disk.clone();
    let mut data = Vec::new();
    let mut at = 0;
    for number in 0_u64.. {
        let (hole, end) = (at + 1000 * (number * 37 % 700), at + 900_000);
        if end > disk.len() as u64 {
            holed[to_usize(at)..].fill(0);
            break;
        }
        holed[to_usize(at)..to_usize(hole)].fill(0);
        data.push(hole..end);
        at = end;
    }
    for (disk, data) in [(disk, whole), (holed, data)] {
        let device = OnePass {
            disk: disk.clone(),
            data,
            at: Mutex::default(),
            moved: std::sync::Condvar::new(),
        };
        let (bytes, report) = written(&device);
        let mut expected = disk;
        expected.resize(expected.len().next_multiple_of(SECTOR), 0);
        assert_eq!(report.size_bytes, expected.len() as u64);
        assert!(read(&bytes).unwrap() == expected);
    }
}

#[test]
fn large_sparse_disks_are_fast_and_small() {
    const TIB: u64 = 1 << 40;
    let lab = Lab::new();
    let raw = lab.path("large.raw");
    let file = File::create(&raw).unwrap();
    file.set_len(3 * TIB + 512).unwrap();
    let noise = sample_disk(3 * MIB, 1);
    for offset in [0, TIB - 1000, 3 * TIB - 3 * MIB + 512] {
        file.write_all_at(&noise, offset).unwrap();
    }
    let device = FileDevice::open(&raw, IoMode::Buffered).unwrap();
    let image = lab.path("large.vmdk");
    let mut sink = File::create(&image).unwrap();
    let mut reached = 0;
    let report = write_stream_optimized(&device, &mut sink, &options("large.vmdk"), &mut |offset| {
        assert!(offset >= reached, "progress never decreases");
        reached = offset;
        Continue::Go
    })
    .unwrap();
    assert_eq!(reached, 3 * TIB + 512);
    assert!(report.file_bytes < 12 * MIB && report.grain_count <= 3 * 50);
    qemu_img(&["check", "-f", "vmdk", path_text(&image)]);
    // A full comparison takes QEMU a minute: compare around the middle only.
    lab.qemu_img("dd -f vmdk -O raw bs=1M skip=1048575 count=1048578 if=large.vmdk of=middle.raw");
    let mut middle = vec![0; to_usize(3 * MIB)];
    device.read_at(&mut middle, TIB - MIB).unwrap();
    assert!(fs::read(lab.path("middle.raw")).unwrap()[..] == middle[..]);
    let opened = open(&image, &OpenOptions::default()).unwrap();
    let mut found = vec![0; noise.len()];
    opened.read_at(&mut found, TIB - 1000).unwrap();
    assert!(found == noise);
    assert_clean(&image);
    let mut reader = StreamReader::open(File::open(&image).unwrap(), "large.vmdk").unwrap();
    let mut count = 0;
    while let Some(grain) = reader.next_grain().unwrap() {
        let mut expected = vec![0; grain.bytes.len()];
        device.read_at(&mut expected, grain.offset).unwrap();
        assert!(grain.bytes == expected);
        count += 1;
    }
    assert_eq!(count, report.grain_count);
}

#[test]
fn stream_identity_can_be_changed() {
    let lab = Lab::new();
    let disk = sample_disk(MIB, 1);
    let image = lab.path("disk.vmdk");
    let (bytes, _) = written(&MemoryDevice::from_bytes(&disk));
    File::create(&image).unwrap().write_all(&bytes).unwrap();
    let id = ImageId([0x17; 16]);
    let new = NewIdentity {
        id,
        children: Vec::new(),
        unnamed_children: UnnamedChildren::Refuse,
        name: Some("other.vmdk".to_owned()),
    };
    set_identity(&image, &OpenOptions::default(), &new).unwrap();
    let bytes = fs::read(&image).unwrap();
    assert_eq!(StreamReader::open(&bytes[..], "disk").unwrap().id(), Some(id));
    assert!(read(&bytes).unwrap() == disk && flatten(&image, &lab) == disk);
}

#[test]
fn interrupted_stream_is_invalid() {
    struct Full(usize);
    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            if self.0 < bytes.len() {
                return Err(std::io::ErrorKind::StorageFull.into());
            }
            self.0 -= bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let device = MemoryDevice::from_bytes(&sample_disk(20 * MIB, 2));
    for room in [0, 70_000, 3 << 20] {
        let failed = write_stream_optimized(&device, &mut Full(room), &options("disk.vmdk"), &mut |_| Continue::Go);
        assert!(
            matches!(failed, Err(Error::Device(error)) if error.is_no_space()),
            "{room}"
        );
    }
    let mut bytes = Vec::new();
    let stopped = write_stream_optimized(&device, &mut bytes, &options("disk.vmdk"), &mut |offset| {
        if offset > 6 * MIB { Continue::Stop } else { Continue::Go }
    });
    assert!(stopped.is_err() && read(&bytes).unwrap_err().is_corrupt());
}

#[test]
fn invalid_options_are_refused() {
    let device = MemoryDevice::new(MIB);
    let refuses = |options: &StreamOptions<'_>| {
        let mut bytes = Vec::new();
        let error = write_stream_optimized(&device, &mut bytes, options, &mut |_| Continue::Go).unwrap_err();
        assert!(
            matches!(error, Error::InvalidOption { .. }) && bytes.is_empty(),
            "{error}"
        );
    };
    let long = "a".repeat(20_000);
    for name in ["", "a\"b", "a\nb", "../a", &long] {
        refuses(&options(name));
    }
    let mut empty = CreateOptions::new(Format::Vmdk, MIB);
    empty.blocks.kind = ImageKind::Stream;
    let lab = Lab::new();
    assert!(create(&lab.path("a.vmdk"), &empty).is_err() && !lab.path("a.vmdk").exists());
    for level in [0, 13, u32::MAX] {
        refuses(&StreamOptions {
            level: Some(level),
            ..options("disk.vmdk")
        });
    }
}
