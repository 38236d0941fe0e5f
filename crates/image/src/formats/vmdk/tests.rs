//! Tests crashes, and invalid headers and descriptors.

use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut as _, to_usize};

use super::concatenated::Concatenated;
use super::create::{NewVmdk, write_empty};
use super::descriptor::{Descriptor, NamedExtentKind};
use super::extent::SparseExtent;
use super::stream::specimen::{GRAIN_BYTES, SpecimenItem, TablePlacement, grain, stream};
use super::tables::{OpenedVmdk, VmdkExtent, VmdkExtentKind, VmdkTables};
use crate::Result;
use crate::allocation_table::crash_tests::{TableCrashCase, survive_busy_flushes, survive_crashes};
use crate::allocation_table::writer::TableMut;
use crate::allocation_table::{AllocationTable as _, TableLayer};
use crate::file::ImageFile;
use crate::file::memory::MemoryFile;
use crate::model::layered::{BackingUse, Layered as _};

fn empty() -> Vec<u8> {
    let file = MemoryFile::default();
    let new = NewVmdk {
        size_bytes: 98_304 + 512,
        grain_bytes: 4096,
        name: "image.vmdk".to_owned(),
        id: crate::ImageId([7; 16]),
        parent: None,
    };
    write_empty(&file, &new).unwrap();
    let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// The same without tables, which are then allocated on demand.
fn without_tables() -> Vec<u8> {
    let mut bytes = empty();
    let extent = SparseExtent::load(&MemoryFile::new(bytes.clone()), "image").unwrap();
    for directory in [extent.directory, extent.second_directory.unwrap()] {
        bytes[to_usize(directory)..to_usize(directory) + 4].fill(0);
    }
    bytes
}

fn opened(file: Arc<dyn ImageFile>) -> Result<OpenedVmdk> {
    let extent = SparseExtent::load(&*file, "image")?;
    let (offset, length) = extent.descriptor.unwrap();
    let mut text = vec![0; to_usize(length)];
    file.read_at(&mut text, offset)?;
    let descriptor = Descriptor::parse(&text, "image")?;
    Ok(OpenedVmdk {
        parts: vec![VmdkExtent {
            start: 0,
            length: extent.disk_bytes,
            kind: VmdkExtentKind::Sparse { window: 0, extent },
        }],
        files: Arc::new(Concatenated { files: vec![file] }),
        content_id_at: offset + descriptor.content_id_at.start as u64..offset + descriptor.content_id_at.end as u64,
    })
}

fn open(file: Arc<dyn ImageFile>, backing: Option<Arc<dyn BlockDevice>>) -> Result<TableLayer> {
    let tables = Box::new(VmdkTables::new("image".into(), opened(Arc::clone(&file))?)?);
    Ok(TableLayer::new("image".into(), file, tables, backing))
}

fn crash_cases() -> Vec<TableCrashCase> {
    let case = |name, start, has_parent| TableCrashCase {
        name,
        start,
        has_parent,
        open,
        check: |file| super::check::check(&opened(file)?),
    };
    vec![
        case("sparse", empty(), false),
        case("without tables", without_tables(), false),
        case("a child", empty(), true),
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

/// A compressed grain must be complete, and its marker must match its entry, also if it is cached.
#[test]
fn misplaced_or_truncated_grain_is_damage() {
    let items = [grain(0, 1), grain(GRAIN_BYTES, 2), grain(3 * GRAIN_BYTES, 3)];
    let bytes = stream(TablePlacement::InFront, 4 * GRAIN_BYTES, &items);
    // Header, descriptor, directory.
    let table = 4 * 512;
    let read_one = |bytes: &[u8], number: u64| {
        let layer = open(Arc::new(MemoryFile::new(bytes.to_vec())), None)?;
        let mut found = vec![0; to_usize(GRAIN_BYTES)];
        layer.read(&mut found, 0, BackingUse::Nothing)?;
        layer.read(&mut found, number * GRAIN_BYTES, BackingUse::Nothing)?;
        Ok::<u8, crate::Error>(found[0])
    };
    assert_eq!(
        [0, 1, 2, 3].map(|number| read_one(&bytes, number).unwrap()),
        [1, 2, 0, 3]
    );
    let mut moved = bytes.clone();
    moved.copy_within(table..table + 4, table + 4);
    assert!(read_one(&moved, 1).unwrap_err().is_corrupt());
    assert_eq!(read_one(&moved, 3).unwrap(), 3);
    let short = SpecimenItem::Grain {
        offset: GRAIN_BYTES,
        byte: 2,
        length: GRAIN_BYTES - 1,
    };
    let bytes = stream(TablePlacement::AtEnd, 4 * GRAIN_BYTES, &[grain(0, 1), short.clone()]);
    assert!(read_one(&bytes, 1).unwrap_err().is_corrupt());
    let bytes = stream(TablePlacement::AtEnd, 2 * GRAIN_BYTES - 512, &[grain(0, 1), short]);
    assert_eq!(
        read_one(&bytes, 1).unwrap(),
        2,
        "the last one may be as short as the disk"
    );
}

#[test]
fn unknown_compression_type_is_refused() {
    let good = stream(TablePlacement::AtEnd, GRAIN_BYTES, &[grain(0, 1)]);
    for (at, value) in [(77, 2), (77, 0), (10, 1)] {
        let mut bytes = good.clone();
        bytes[at] = value;
        let refused = SparseExtent::load(&MemoryFile::new(bytes), "image");
        assert!(matches!(refused, Err(crate::Error::UnsupportedFeature { .. })), "{at}");
    }
}

/// The file would grow over tables of the second directory that are past its end, and entries would be written into
/// grains.
#[test]
fn second_directory_past_the_end_is_not_written() {
    let good = empty();
    let extent = SparseExtent::load(&MemoryFile::new(good.clone()), "image").unwrap();
    let second = to_usize(extent.second_directory.unwrap());
    let past_end = u32::try_from(good.len() / 512 + 16).unwrap();
    for at in [second, 48] {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&past_end.to_le_bytes());
        let opened = opened(Arc::new(MemoryFile::new(bytes))).unwrap();
        assert_eq!(super::check::check(&opened).unwrap().corruption_count, 1, "{at}");
        let mut tables = VmdkTables::new("image".into(), opened).unwrap();
        let refused = tables.start().unwrap_err().to_string();
        assert!(refused.contains("past the end"), "{at}: {refused}");
    }
}

/// The file has the last grain as far as the disk goes, and it is not aligned. A new grain must not be placed over the rest of it.
#[test]
fn a_new_grain_comes_after_a_last_one_that_is_not_aligned() {
    let mut bytes = empty();
    let extent = SparseExtent::load(&MemoryFile::new(bytes.clone()), "image").unwrap();
    bytes.resize(bytes.len().next_multiple_of(4096) + 512, 0);
    let sector = u32::try_from(bytes.len() / 512).unwrap();
    bytes.extend([9; 512]);
    for directory in [extent.directory, extent.second_directory.unwrap()] {
        let file = MemoryFile::new(bytes.clone());
        let table = to_usize(extent.tables_of(&file, directory).unwrap()[0]);
        bytes[table + 24 * 4..table + 25 * 4].copy_from_slice(&sector.to_le_bytes());
    }
    let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::new(bytes));
    let corruption_count = || {
        super::check::check(&opened(Arc::clone(&file)).unwrap())
            .unwrap()
            .corruption_count
    };
    assert_eq!(corruption_count(), 0);
    let layer = TableMut::new(open(Arc::clone(&file), None).unwrap());
    layer.write_at(&[5; 4096], 0).unwrap();
    layer.flush().unwrap();
    assert_eq!(corruption_count(), 0);
}

/// The header refers to grains in place of the first directory: the disk must not read as zero, nor be written to.
#[test]
fn lost_first_directory_falls_back_to_second() {
    let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::new(empty()));
    let layer = TableMut::new(open(Arc::clone(&file), None).unwrap());
    layer.write_at(&[7; 4096], 8192).unwrap();
    layer.flush().unwrap();
    let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
    file.read_at(&mut bytes, 0).unwrap();
    // Zeroes of the guest, and offsets that no table has.
    for filling in [0_u8, 0x7f] {
        let mut lost = bytes.clone();
        let grain = u64::try_from(lost.len()).unwrap().div_ceil(512);
        lost.resize(lost.len() + 4096, filling);
        lost[56..64].copy_from_slice(&grain.to_le_bytes());
        let layer = open(Arc::new(MemoryFile::new(lost)), None).unwrap();
        let mut found = vec![0; 4096];
        layer.read(&mut found, 8192, BackingUse::Nothing).unwrap();
        assert_eq!(found, [7; 4096], "{filling}");
        let refused = TableMut::new(layer).write_at(&[1; 512], 0).unwrap_err().to_string();
        assert!(refused.contains("first directory is lost"), "{refused}");
    }
}

/// The header refers to zeroes before the grains in place of the first directory.
#[test]
fn zeroed_first_directory_falls_back_to_second() {
    let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::new(empty()));
    // Without any grain, zeroes are right, and can be written to.
    let lost = |bytes: &[u8]| {
        let mut lost = bytes.to_vec();
        let zeroes = lost
            .chunks(512)
            .position(|sector| sector.iter().all(|byte| *byte == 0))
            .unwrap();
        lost[56..64].copy_from_slice(&(zeroes as u64).to_le_bytes());
        open(Arc::new(MemoryFile::new(lost)), None).unwrap()
    };
    let mut found = vec![9; 4096];
    lost(&empty()).read(&mut found, 8192, BackingUse::Nothing).unwrap();
    assert_eq!(found, [0; 4096]);
    let layer = TableMut::new(open(Arc::clone(&file), None).unwrap());
    layer.write_at(&[7; 4096], 8192).unwrap();
    layer.flush().unwrap();
    let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
    file.read_at(&mut bytes, 0).unwrap();
    let layer = lost(&bytes);
    layer.read(&mut found, 8192, BackingUse::Nothing).unwrap();
    assert_eq!(found, [7; 4096]);
    let refused = TableMut::new(layer).write_at(&[1; 512], 0).unwrap_err().to_string();
    assert!(refused.contains("first directory is lost"), "{refused}");
}

/// A stream from a block device or tape has zero padding; without support for it, an intact stream was reported as
/// damaged.
#[test]
fn zero_padding_after_a_stream_is_ignored() {
    let bytes = stream(TablePlacement::AtEnd, 5 * GRAIN_BYTES, &[grain(GRAIN_BYTES, 7)]);
    for more in [0, 1, 512, 5000, 64 << 10, 1 << 20] {
        let mut padded = bytes.clone();
        padded.resize(bytes.len() + more, 0);
        let layer =
            open(Arc::new(MemoryFile::new(padded.clone())), None).unwrap_or_else(|error| panic!("{more}: {error}"));
        let mut found = vec![0; to_usize(GRAIN_BYTES)];
        layer.read(&mut found, GRAIN_BYTES, BackingUse::Nothing).unwrap();
        assert!(found.iter().all(|byte| *byte == 7), "{more}");
        // Padding must be zero.
        padded.push(1);
        assert!(open(Arc::new(MemoryFile::new(padded)), None).is_err(), "{more}");
    }
    let cut = &bytes[..bytes.len() - 1024];
    assert!(open(Arc::new(MemoryFile::new(cut.to_vec())), None).is_err());
}

/// A pointer to a table past the end of the file does not mean that the disk is empty.
#[test]
fn table_past_the_end_is_an_error() {
    let mut bytes = empty();
    let extent = SparseExtent::load(&MemoryFile::new(bytes.clone()), "image").unwrap();
    let first = to_usize(extent.directory);
    let past_end = u32::try_from(bytes.len() / 512 + 16).unwrap();
    bytes[first..first + 4].copy_from_slice(&past_end.to_le_bytes());
    let layer = open(Arc::new(MemoryFile::new(bytes)), None).unwrap();
    let refused = layer.read(&mut [0; 512], 0, BackingUse::Nothing).unwrap_err();
    assert!(refused.is_corrupt(), "{refused}");
}

#[test]
fn descriptors_of_other_programs_are_read() {
    let text = b"# Disk DescriptorFile\r\nversion = 1\r\nCID = 7C0BD2A4\r\nparentCID=42e7e526\r\n\
        createType = \"twoGbMaxExtentSparse\"\r\nparentFileNameHint = \"C:\\VMs\\base.vmdk\"\r\n\
        RW 4192256 SPARSE \"web 1-s001.vmdk\"\r\nRW 63 FLAT \"web1-flat.vmdk\" 128\r\nRW 7 ZERO\r\nddb.uuid = \"60 00\"\r\n";
    let found = Descriptor::parse(text, "image").unwrap();
    assert_eq!(found.content_id, 0x7c0b_d2a4);
    assert_eq!(&text[found.content_id_at.clone()], b"7C0BD2A4");
    assert_eq!(found.parent, Some((0x42e7_e526, "base.vmdk".to_owned())));
    let kinds: Vec<_> = found
        .extents
        .iter()
        .map(|extent| (extent.sectors, extent.kind.clone()))
        .collect();
    let file = |name: &str| name.to_owned();
    assert_eq!(
        kinds,
        [
            (
                4_192_256,
                NamedExtentKind::Sparse {
                    file: file("web 1-s001.vmdk")
                }
            ),
            (
                63,
                NamedExtentKind::Flat {
                    file: file("web1-flat.vmdk"),
                    offset: 128
                }
            ),
            (7, NamedExtentKind::Zero),
        ]
    );
    // VMware writes in the code page of its host.
    let text = b"encoding=\"windows-1252\"\n# \xe9\xe9\nCID = \"D\"\nRW 1 ZERO\n";
    let found = Descriptor::parse(text, "image").unwrap();
    assert_eq!((found.content_id, &text[found.content_id_at]), (13, &b"D"[..]));
    for wrong in [
        "CID=",
        "CID=7c0bd2a4c",
        "CID=xxxxxxxx",
        "version=1",
        "CID=7c0bd2a4\nRW x SPARSE \"a\"",
        "CID=7c0bd2a4\nRW 1 SPARSE",
        "CID=7c0bd2a4\nRW 1 VMFSSPARSE \"a\"",
        "CID=7c0bd2a4\nRW 1 FLAT \"a\" x",
    ] {
        assert!(Descriptor::parse(wrong.as_bytes(), "image").is_err(), "{wrong}");
    }
}

#[test]
fn inconsistent_headers_are_refused() {
    let good = empty();
    let is_refused = |at: usize, value: u32| {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        SparseExtent::load(&MemoryFile::new(bytes), "image").is_err()
    };
    assert!(!is_refused(64, 9), "another overhead");
    assert!(!is_refused(20, 4096), "grains of 2 MiB, which others write");
    for (what, at, value) in [
        ("magic", 0, 1),
        ("version", 4, 4),
        ("grain of nothing", 20, 0),
        ("grain of nine sectors", 20, 9),
        ("grain of 32 MiB", 20, 65_536),
        ("tables without entries", 44, 0),
        ("tables of too many", 44, 5000),
        ("no directory", 56, 0),
        ("a directory past the end", 56, 1 << 20),
        ("more sectors than there are numbers", 16, 0xffff_ffff),
        ("line ends changed on the way", 73, 0x0a0a_0a0a),
    ] {
        assert!(is_refused(at, value), "{what}");
    }
}

/// VirtualBox stores neither CID nor name of a parent: such a child must not be read as if it had none.
#[test]
fn parent_is_found_by_uuid() {
    use holdfast_block::BlockDeviceMut as _;

    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir(path("Snapshots")).unwrap();
    let (base, child) = (path("base.vmdk"), path("Snapshots/child.vmdk"));
    crate::create(&base, &crate::CreateOptions::new(crate::Format::Vmdk, 1 << 20)).unwrap();
    let image = crate::open_mut(&base, &crate::OpenOptions::default()).unwrap();
    image.write_at(&[7; 512], 4096).unwrap();
    image.flush().unwrap();
    drop(image);
    let mut options = crate::CreateOptions::new(crate::Format::Vmdk, 1 << 20);
    options.blocks.parent = Some(base.clone());
    options.blocks.kind = crate::ImageKind::Differencing;
    crate::create(&child, &options).unwrap();
    let mut bytes = std::fs::read(&child).unwrap();
    for (key, length) in [(&b"parentCID="[..], 8), (b"parentFileNameHint=", 1)] {
        let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
        if length == 8 {
            bytes[at + key.len()..at + key.len() + 8].copy_from_slice(b"ffffffff");
        } else {
            bytes[at] = b'#';
        }
    }
    let mut file = std::fs::File::create(&child).unwrap();
    std::io::Write::write_all(&mut file, &bytes).unwrap();
    let open = |allow: &[std::path::PathBuf]| {
        let options = crate::OpenOptions {
            allow: allow.to_vec(),
            ..crate::OpenOptions::default()
        };
        crate::open(&child, &options)
    };
    assert!(matches!(open(&[]), Err(crate::Error::ParentNotFound { .. })));
    let image = open(std::slice::from_ref(&base)).unwrap();
    let mut read = [0; 512];
    image.read_at(&mut read, 4096).unwrap();
    assert_eq!((read, image.layers().len()), ([7; 512], 2));
    drop(image);
    std::fs::rename(&base, path("Snapshots/other name.vmdk")).unwrap();
    assert_eq!(open(&[]).unwrap().layers().len(), 2, "in the subfolder");
}

#[test]
fn new_cid_keeps_its_length() {
    for digits in ["2", "f2e3d", "0f2e3d4c"] {
        let mut bytes = without_tables();
        let extent = SparseExtent::load(&MemoryFile::new(bytes.clone()), "image").unwrap();
        let (offset, length) = extent.descriptor.unwrap();
        let place = to_usize(offset)..to_usize(offset + length);
        let text = String::from_utf8(bytes[place.clone()].to_vec()).unwrap();
        let old = Descriptor::parse(text.as_bytes(), "image").unwrap().content_id_at;
        let mut text = format!("{}{digits}{}", &text[..old.start], &text[old.end..]).into_bytes();
        text.resize(place.len(), 0);
        bytes[place].copy_from_slice(&text);
        let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::new(bytes));
        let image = TableMut::new(open(Arc::clone(&file), None).unwrap());
        image.write_at(&[1; 512], 0).unwrap();
        image.flush().unwrap();
        drop(image);
        let mut text = vec![0; to_usize(length)];
        file.read_at(&mut text, offset).unwrap();
        let changed = Descriptor::parse(&text, "image").unwrap();
        assert_eq!(changed.content_id_at, old.start..old.start + digits.len(), "{digits}");
        assert_ne!(changed.content_id, u32::from_str_radix(digits, 16).unwrap(), "{digits}");
        assert_eq!(open(file, None).unwrap().disk_bytes(), extent.disk_bytes);
    }
}
