//! Tests crashes, sizes and invalid headers.

use std::io::Read;
use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut as _, MemoryDevice, to_usize};

use super::create::{NewVhd, write_empty};
use super::footer::ChsGeometry;
use super::header::VhdHeader;
use super::stream::VhdStream;
use super::{check, checksum};
use crate::allocation_table::TableLayer;
use crate::allocation_table::crash_tests::{TableCrashCase, survive_busy_flushes, survive_crashes};
use crate::allocation_table::writer::TableMut;
use crate::file::ImageFile;
use crate::file::memory::MemoryFile;
use crate::model::info::ImageKind;
use crate::{ImageId, Result};

const DISK_BYTES: u64 = 98_304 + 512;

fn empty(kind: ImageKind) -> Vec<u8> {
    let file = MemoryFile::default();
    let new = NewVhd {
        size_bytes: DISK_BYTES,
        block_bytes: 16_384,
        kind,
        id: ImageId([1; 16]),
        created_s: 946_684_805,
        parent: (kind == ImageKind::Differencing).then(|| (ImageId([7; 16]), 5, "parent.vhd".to_owned())),
    };
    write_empty(&file, &new).unwrap();
    let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

fn open(file: Arc<dyn ImageFile>, backing: Option<Arc<dyn BlockDevice>>) -> Result<TableLayer> {
    let header = VhdHeader::load(&*file, "image")?;
    let tables = super::tables::of("image".into(), header, Arc::clone(&file));
    Ok(TableLayer::new("image".into(), file, tables, backing))
}

fn crash_cases() -> Vec<TableCrashCase> {
    let case = |name, kind| TableCrashCase {
        name,
        start: empty(kind),
        has_parent: kind == ImageKind::Differencing,
        open,
        check: |file| check::check(&*file, &VhdHeader::load(&*file, "image")?),
    };
    vec![
        case("dynamic", ImageKind::Dynamic),
        case("fixed", ImageKind::Fixed),
        case("differencing", ImageKind::Differencing),
    ]
}

#[test]
fn crash_keeps_flushed_data() {
    survive_crashes(crash_cases());
}

#[test]
fn busy_flushes_keep_flushed_data() {
    survive_busy_flushes(crash_cases());
}

#[test]
fn lost_footer_falls_back_to_its_copy() {
    let mut bytes = empty(ImageKind::Dynamic);
    let end = bytes.len() - 512;
    bytes[end..].fill(0);
    let header = VhdHeader::load(&MemoryFile::new(bytes.clone()), "image").unwrap();
    assert!(!header.has_footer_at_end && header.footer.id == ImageId([1; 16]));
    bytes[0] = 0;
    assert!(
        VhdHeader::load(&MemoryFile::new(bytes), "image").is_err(),
        "both footers are damaged"
    );
}

/// XenServer and other programs have left such blocks: some programs read them as zeroes, others as data.
#[test]
fn check_reports_unmarked_data() {
    for kind in [ImageKind::Dynamic, ImageKind::Differencing] {
        let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::new(empty(kind)));
        let layer = TableMut::new(open(Arc::clone(&file), None).unwrap());
        layer.write_at(&[7; 4096], 20_000).unwrap();
        layer.flush().unwrap();
        let header = VhdHeader::load(&*file, "image").unwrap();
        let count = || check::check(&*file, &header).unwrap().corruption_count;
        assert_eq!(count(), 0, "{kind:?}");
        let mut entry = [0; 4];
        let sparse = header.sparse.as_ref().unwrap();
        file.read_at(&mut entry, sparse.entry_offset(1)).unwrap();
        let block = u64::from(u32::from_be_bytes(entry)) * 512;
        file.write_at(&vec![0; to_usize(sparse.bitmap_bytes())], block).unwrap();
        // In a differencing image, unmarked sectors belong to the parent.
        assert_eq!(count(), u64::from(kind == ImageKind::Dynamic), "{kind:?}");
        file.write_at(&vec![0; to_usize(sparse.block_bytes)], block + sparse.bitmap_bytes())
            .unwrap();
        assert_eq!(count(), 0, "{kind:?}: zeroes are zeroes either way");
    }
}

#[test]
fn geometries_match_the_specification() {
    for (size_bytes, expected) in [
        (64 << 20, (963, 8, 17)),
        (4 << 30, (8322, 16, 63)),
        (1 << 40, (65_535, 16, 255)),
    ] {
        let ChsGeometry {
            cylinders,
            heads,
            sectors,
        } = ChsGeometry::of(size_bytes);
        assert_eq!((cylinders, heads, sectors), expected, "{size_bytes}");
    }
}

#[test]
fn inconsistent_headers_are_refused() {
    let good = empty(ImageKind::Differencing);
    let refused = |start: usize, sum_at: usize, length: usize, at: usize, field: &[u8]| {
        let mut bytes = good.clone();
        bytes[start + at..start + at + field.len()].copy_from_slice(field);
        let sum = checksum(&bytes[start..start + length], sum_at);
        bytes[start + sum_at..start + sum_at + 4].copy_from_slice(&sum.to_be_bytes());
        VhdHeader::load(&MemoryFile::new(bytes), "image").is_err()
    };
    let header = |at: usize, value: u32| refused(512, 36, 1024, at, &value.to_be_bytes());
    assert!(!header(56, 9), "another modification time of the parent");
    for (what, at, value) in [
        ("cookie", 0, 1),
        ("table past the end", 20, 1 << 30),
        ("table at no sector", 20, 1537),
        ("too few entries", 28, 6),
        ("more entries than fit into the file", 28, 0xffff_0000),
        ("block of nothing", 32, 0),
        ("block of three sectors", 32, 1536),
        ("block of 1 GiB", 32, 1 << 30),
    ] {
        assert!(header(at, value), "{what}");
    }
    let footer = good.len() - 512;
    assert!(refused(footer, 64, 512, 16, &u64::MAX.to_be_bytes()), "no header");
    assert!(
        refused(footer, 64, 512, 48, &(1_u64 << 60).to_be_bytes()),
        "a disk too large for its table"
    );
    let mut bytes = good;
    bytes[600] ^= 1;
    assert!(
        VhdHeader::load(&MemoryFile::new(bytes), "image").is_err(),
        "a wrong checksum"
    );
}

/// A differencing image with some sectors in three of its blocks, and the marks of its bytes.
fn differencing() -> (Vec<u8>, Vec<u8>) {
    let file: Arc<MemoryFile> = Arc::default();
    file.write_at(&empty(ImageKind::Differencing), 0).unwrap();
    let parent = MemoryDevice::from_bytes(&vec![9; to_usize(DISK_BYTES)]);
    let image = TableMut::new(open(Arc::clone(&file) as _, Some(Arc::new(parent))).unwrap());
    for (offset, length, byte) in [(98_304, 512, 3), (512, 1024, 1), (16_384 * 2, 16_384, 2)] {
        image.write_at(&vec![byte; length], offset).unwrap();
    }
    image.flush().unwrap();
    let mut disk = vec![0; to_usize(DISK_BYTES)];
    image.read_at(&mut disk, 0).unwrap();
    let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
    file.read_at(&mut bytes, 0).unwrap();
    (bytes, disk)
}

#[test]
fn stream_returns_only_stored_sectors() {
    let (bytes, disk) = differencing();
    let mut stream = VhdStream::open(&bytes[..], "stream").unwrap();
    assert_eq!((stream.size_bytes(), stream.id()), (DISK_BYTES, ImageId([1; 16])));
    assert_eq!(stream.parent(), Some(ImageId([7; 16])));
    // Blocks are stored in another order than that of the disk.
    assert!(!stream.is_in_order());
    assert_eq!(stream.stored(), [0..16_384, 32_768..49_152, 98_304..DISK_BYTES]);
    let mut found = vec![9; to_usize(DISK_BYTES)];
    let mut count = 0;
    while let Some(block) = stream.next_block().unwrap() {
        for range in block.ranges() {
            count += range.len();
            let start = to_usize(block.offset) + range.start;
            found[start..start + range.len()].copy_from_slice(&block.bytes[range]);
        }
    }
    assert!(found == disk);
    assert_eq!(count, 512 + 1024 + 16_384);
    assert!(stream.next_block().is_err(), "the end is reported once");
}

#[test]
fn truncated_stream_is_never_complete() {
    let (bytes, _) = differencing();
    let read = |bytes: &[u8]| -> Result<()> {
        let mut stream = VhdStream::open(bytes, "stream")?;
        while stream.next_block()?.is_some() {}
        Ok(())
    };
    read(&bytes).unwrap();
    for end in (0..bytes.len()).step_by(511) {
        assert!(read(&bytes[..end]).unwrap_err().is_corrupt(), "{end}");
    }
    let mut other = bytes.clone();
    let end = other.len() - 512;
    other[end + 30] ^= 1;
    assert!(read(&other).unwrap_err().to_string().contains("footer"));
    // A stream without blocks is valid, too.
    read(&empty(ImageKind::Dynamic)).unwrap();
    // A fixed image cannot be read as blocks.
    assert!(read(&empty(ImageKind::Fixed)).is_err());
}

/// A reader that records the largest buffer it was given.
struct BufferRecorder<'a> {
    bytes: &'a [u8],
    most: usize,
}

impl Read for BufferRecorder<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.most = self.most.max(buffer.len());
        self.bytes.read(buffer)
    }
}

/// A header of 1 KiB claimed a table of 35 MiB, and that much was allocated.
#[test]
fn claimed_table_size_allocates_nothing() {
    let mut bytes = empty(ImageKind::Dynamic);
    bytes[512 + 28..512 + 32].copy_from_slice(&(12u32 << 20).to_be_bytes());
    super::seal_all(&mut bytes);
    let mut recorder = BufferRecorder { bytes: &bytes, most: 0 };
    let error = VhdStream::open(&mut recorder, "stream").err().unwrap();
    assert!(error.to_string().contains("cut off"), "{error}");
    assert!(recorder.most <= 1 << 20, "{}", recorder.most);
}
