//! Measures the first write of 4 KiB into parts of an image that its backing file has: `first_write FOLDER [MIB]`.
//!
//! A ploop delta and a qcow2 with extended L2 entries lie over the same raw disk. Each write goes to another MiB of the
//! disk. It is measured alone, and followed by a second write to the same place, which allocates nothing.

#![expect(clippy::print_stdout, reason = "the result of the measurement")]

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::time::Duration;

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, Clock as _, SeededRandom, SystemClock, to_usize};
use holdfast_image::{BackingFile, CreateOptions, Format, ImageMut, OpenOptions, Qcow2Options, create, open_mut};

const MIB: u64 = 1 << 20;
const WRITE_BYTES: u64 = 4096;
const ROOT: &str = "01010101-0101-0101-0101-010101010101";
const TOP: &str = "5fbaabe3-6958-40ff-92a7-860e329aab41";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let folder = Path::new(arguments.first().ok_or("usage: first_write FOLDER [MIB]")?);
    let size_bytes = arguments.get(1).map_or(Ok(512), |size| size.parse::<u64>())? * MIB;
    make_base(&folder.join("base.raw"), size_bytes)?;
    let (ploop, top) = (make_ploop(folder, size_bytes)?, folder.join("top.hds"));
    report("ploop, clusters of 1 MiB", &ploop, &top)?;
    let top = folder.join("top.qcow2");
    report("qcow2, extended L2", &make_qcow2(&top, size_bytes)?, &top)
}

/// A disk without zeroes.
fn make_base(path: &Path, size_bytes: u64) -> std::io::Result<()> {
    let file = File::create(path)?;
    let piece = SeededRandom::new(1).bytes(to_usize(MIB));
    for offset in (0..size_bytes).step_by(to_usize(MIB)) {
        file.write_all_at(&piece, offset)?;
    }
    file.sync_all()
}

fn make_ploop(folder: &Path, size_bytes: u64) -> Result<ImageMut, Box<dyn std::error::Error>> {
    let sectors = size_bytes / 512;
    let descriptor = format!(
        "<?xml version='1.0' encoding='UTF-8'?>\n<Parallels_disk_image Version=\"1.0\">\n<Disk_Parameters>\
         <Disk_size>{sectors}</Disk_size><Cylinders>{sectors}</Cylinders><Heads>1</Heads><Sectors>1</Sectors>\
         <Padding>0</Padding></Disk_Parameters>\n<StorageData><Storage><Start>0</Start><End>{sectors}</End>\
         <Blocksize>2048</Blocksize>\
         <Image><GUID>{{{ROOT}}}</GUID><Type>Plain</Type><File>base.raw</File></Image>\
         <Image><GUID>{{{TOP}}}</GUID><Type>Compressed</Type><File>top.hds</File></Image>\
         </Storage></StorageData>\n<Snapshots>\
         <Shot><GUID>{{{ROOT}}}</GUID><ParentGUID>{{00000000-0000-0000-0000-000000000000}}</ParentGUID></Shot>\
         <Shot><GUID>{{{TOP}}}</GUID><ParentGUID>{{{ROOT}}}</ParentGUID></Shot>\
         </Snapshots>\n</Parallels_disk_image>\n"
    );
    let place = folder.join("DiskDescriptor.xml");
    File::create(&place)?.write_all_at(descriptor.as_bytes(), 0)?;
    let top = folder.join("top.hds");
    std::fs::remove_file(&top).ok();
    create(&top, &CreateOptions::new(Format::Parallels, size_bytes))?;
    Ok(open_mut(&place, &OpenOptions::default())?)
}

fn make_qcow2(top: &Path, size_bytes: u64) -> Result<ImageMut, Box<dyn std::error::Error>> {
    std::fs::remove_file(top).ok();
    let qcow2 = Qcow2Options {
        extended_l2: true,
        backing: Some(BackingFile {
            name: "base.raw".to_owned(),
            format: Format::Raw,
        }),
        ..Qcow2Options::default()
    };
    create(
        top,
        &CreateOptions {
            qcow2,
            ..CreateOptions::qcow2(size_bytes)
        },
    )?;
    Ok(open_mut(top, &OpenOptions::default())?)
}

/// Measures the writes, and prints their medians and the space that they took.
fn report(name: &str, image: &ImageMut, top: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let clock = SystemClock::new();
    let mut random = SeededRandom::new(2);
    // The first write of all prepares the image.
    image.write_at(&[1; to_usize(WRITE_BYTES)], 0)?;
    image.flush()?;
    let allocated = || -> std::io::Result<u64> { Ok(top.metadata()?.blocks() * 512) };
    let before = allocated()?;
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for start in (MIB..image.size_bytes()).step_by(to_usize(MIB)) {
        let offset = start + random.below(MIB / WRITE_BYTES) * WRITE_BYTES;
        let data = random.bytes(to_usize(WRITE_BYTES));
        for durations in [&mut first, &mut second] {
            let begin = clock.now();
            image.write_at(&data, offset)?;
            durations.push(clock.now().saturating_sub(begin));
        }
    }
    let begin = clock.now();
    image.flush()?;
    let flush = clock.now().saturating_sub(begin);
    let count = first.len() as u64;
    println!(
        "{name}: first write {:?}, second write {:?} (medians of {count}), {} bytes of space for each, flush {flush:?}",
        median(first),
        median(second),
        (allocated()? - before) / count
    );
    Ok(())
}

fn median(mut durations: Vec<Duration>) -> Duration {
    durations.sort_unstable();
    durations[durations.len() / 2]
}
