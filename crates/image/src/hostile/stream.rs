//! Streamed images: reads them, writes the disk to a new stream, and reads that.

use std::num::NonZero;

use holdfast_block::hostile::Outcome;
use holdfast_block::{BlockDeviceMut as _, MemoryDevice};

use super::{UnnamedFile, options, outcome_of, read_all, use_check};
use crate::{
    Backing, Continue, Format, ImageId, Result, StreamOptions, StreamReader, VhdStream, open, write_stream_optimized,
};

/// Larger disks are not written.
const WRITTEN_BYTES_MAX: u64 = 1 << 20;

/// A VMDK read as a stream, and as a file.
pub fn vmdk_stream(bytes: &[u8]) -> Outcome {
    let file = UnnamedFile::new(bytes);
    let whole = read_stream(bytes);
    let checked = use_check(&file.path, Format::Vmdk);
    let alone = open(&file.path, &options(Some(Format::Vmdk), Backing::Ignore));
    let used = alone.and_then(|image| read_all(&image));
    if let Ok(Some(disk)) = &whole {
        let again = read_stream(&written(disk)).expect("what was written is a stream");
        let (disk, again) = (disk.to_bytes(), again.expect("it is as small as it was").to_bytes());
        assert!(disk == again, "a disk that was written reads as something else");
    }
    outcome_of(&whole.and(checked).and(used))
}

/// A VHD read as a stream: each stored range must come once and be inside the disk.
pub fn vhd_stream(bytes: &[u8]) -> Outcome {
    let mut sealed = bytes.to_vec();
    crate::formats::vhd::seal_all(&mut sealed);
    outcome_of(&read_vhd(bytes).and(read_vhd(&sealed)))
}

fn read_vhd(bytes: &[u8]) -> Result<()> {
    let mut stream = VhdStream::open(bytes, "image")?;
    let size_bytes = stream.size_bytes();
    let stored = stream.stored();
    assert!(
        stored.windows(2).all(|pair| pair[0].end <= pair[1].start),
        "a block over another one"
    );
    while let Some(block) = stream.next_block()? {
        let end = block.offset + block.bytes.len() as u64;
        assert!(end <= size_bytes, "a block past the end of the disk");
        assert!(stored.contains(&(block.offset..end)), "a block that was not listed");
        assert!(
            block.ranges().iter().all(|range| range.end <= block.bytes.len()),
            "sectors past the end of a block"
        );
    }
    Ok(())
}

/// Reads a stream completely; returns the disk if it is small.
fn read_stream(bytes: &[u8]) -> Result<Option<MemoryDevice>> {
    // The result is the same for any number of threads, as tests of the reader show.
    let threads = NonZero::new(1 + bytes.len() % 2).expect("it is one or two");
    let mut reader = StreamReader::open(bytes, "image")?.with_threads(threads);
    let size_bytes = reader.size_bytes();
    let disk = (size_bytes <= WRITTEN_BYTES_MAX).then(|| MemoryDevice::new(size_bytes));
    let mut end = 0;
    while let Some(grain) = reader.next_grain()? {
        assert!(
            grain.offset >= end && !grain.bytes.is_empty(),
            "a grain over another one"
        );
        end = grain.offset + grain.bytes.len() as u64;
        assert!(end <= size_bytes, "a grain past the end of the disk");
        if let Some(disk) = &disk {
            disk.write_at(grain.bytes, grain.offset)?;
        }
    }
    assert_eq!(reader.read_bytes(), bytes.len() as u64, "some of it was not read");
    Ok(disk)
}

fn written(disk: &MemoryDevice) -> Vec<u8> {
    let options = StreamOptions {
        name: "image.vmdk",
        id: ImageId([1; 16]),
        level: Some(1),
        threads: NonZero::<usize>::MIN,
    };
    let mut bytes = Vec::new();
    write_stream_optimized(disk, &mut bytes, &options, &mut |_| Continue::Go).expect("memory can be written");
    bytes
}
