//! VDI, VHD, VHDX, VMDK and Parallels images: reads, checks, and writes to them.
//!
//! Checksums would hide everything that follows them from a fuzzer, so they are corrected after the bytes were
//! damaged.

use holdfast_block::hostile::Outcome;

use super::{UnnamedFile, options, outcome_of, read_all, repair, use_check, write};
use crate::file::ImageFile as _;
use crate::file::memory::MemoryFile;
use crate::formats::vhdx::create::{NewVhdx, write_empty};
use crate::formats::vhdx::metadata::VhdxParent;
use crate::formats::{vhd, vhdx};
use crate::model::info::ImageKind;
use crate::{Backing, Format, ImageId, open};

/// Limit of the image size.
const FILE_BYTES_MAX: usize = 1 << 20;

pub fn vdi(bytes: &[u8]) -> Outcome {
    read_and_write(bytes, Format::Vdi)
}

/// A Parallels or ploop image.
pub fn parallels(bytes: &[u8]) -> Outcome {
    read_and_write(bytes, Format::Parallels)
}

/// A VMDK: a descriptor, or a sparse extent with one.
pub fn vmdk(bytes: &[u8]) -> Outcome {
    read_and_write(bytes, Format::Vmdk)
}

/// A VHD, after correcting its checksums.
pub fn vhd(bytes: &[u8]) -> Outcome {
    let mut bytes = bytes[..bytes.len().min(FILE_BYTES_MAX)].to_vec();
    vhd::seal_all(&mut bytes);
    read_and_write(&bytes, Format::Vhd)
}

/// Changes to an empty VHDX, in rows: part (1), offset in it (2), number of bytes (1), and these bytes. Checksums are
/// corrected.
pub fn vhdx(bytes: &[u8]) -> Outcome {
    let mut image = template(bytes.first().is_some_and(|byte| byte % 2 == 1));
    let mut rest = bytes.get(1..).unwrap_or_default();
    while let [part, low, high, length, tail @ ..] = rest {
        let offset = usize::from(u16::from_le_bytes([*low, *high]));
        let length = usize::from(*length).min(tail.len());
        let start = PARTS[usize::from(*part) % PARTS.len()] + offset;
        let end = (start + length).min(image.len());
        image[start..end].copy_from_slice(&tail[..end - start]);
        rest = &tail[length..];
    }
    vhdx::seal_all(&mut image);
    read_and_write(&image, Format::Vhdx)
}

/// Offsets of the parts of an empty VHDX: headers, regions, log, metadata with items, blocks.
const PARTS: [usize; 8] = [
    64 << 10,
    128 << 10,
    192 << 10,
    256 << 10,
    1 << 20,
    2 << 20,
    (2 << 20) + (64 << 10),
    3 << 20,
];

fn template(has_parent: bool) -> Vec<u8> {
    let file = MemoryFile::default();
    let new = NewVhdx {
        size_bytes: 3 << 20,
        block_bytes: 1 << 20,
        sector_bytes: 512,
        kind: if has_parent {
            ImageKind::Differencing
        } else {
            ImageKind::Dynamic
        },
        id: ImageId([1; 16]),
        parent: has_parent.then(|| VhdxParent {
            linkage: ImageId([7; 16]),
            names: vec!["parent.vhdx".to_owned()],
        }),
    };
    write_empty(&file, &new).expect("memory can be written");
    let mut bytes = vec![0; 4 << 20];
    file.read_at(&mut bytes, 0).expect("memory can be read");
    bytes
}

fn read_and_write(bytes: &[u8], format: Format) -> Outcome {
    let file = UnnamedFile::new(bytes);
    let checked = use_check(&file.path, format);
    let alone = open(&file.path, &options(Some(format), Backing::Ignore));
    let used = alone.and_then(|image| read_all(&image));
    // The gate is closed, so no parent can be opened.
    if let Ok(image) = open(&file.path, &options(Some(format), Backing::Follow)) {
        assert_eq!(image.layers().len(), 1, "the gate let another file in");
    }
    assert!(file.bytes() == bytes, "reading changed the image");
    let read = outcome_of(&checked.and(used));
    repair(bytes, format);
    match write(bytes, format) {
        Outcome::Decoded => read,
        Outcome::Refused => Outcome::Refused,
    }
}
