//! After a crash at any point of a resize, the image is consistent, and has the old or the new size.

use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut as _, MemoryDevice, to_usize};

use crate::allocation_table::TableLayer;
use crate::allocation_table::writer::TableMut;
use crate::file::memory::{MemoryFile, Random, RecordingFile};
use crate::file::{Access, ImageFile};
use crate::formats::qcow2::header::load_header;
use crate::formats::qcow2::layer::Qcow2Layer;
use crate::formats::qcow2::layout::{new_header, write_empty};
use crate::formats::qcow2::writer::Qcow2Mut;
use crate::formats::{ploop, qcow2, vdi, vhd, vhdx};
use crate::model::create_options::{CreateOptions, Qcow2Options};
use crate::model::info::ImageKind;
use crate::model::layered::{BackingUse, Layered as _};
use crate::{CheckReport, ImageId, ProblemKind, Result, Severity};

const KIB: u64 = 1 << 10;

const MIB: u64 = 1 << 20;

type Backing = Option<Arc<dyn BlockDevice>>;
type Resize = Box<dyn Fn(&Arc<dyn ImageFile>, u64) -> Result<()>>;
type Read = Box<dyn Fn(&Arc<dyn ImageFile>) -> Result<Vec<u8>>>;

/// A resize of an image.
struct ResizeCase {
    name: &'static str,
    start: Vec<u8>,
    before_bytes: u64,
    after_bytes: u64,
    resize: Resize,
    read: Read,
    check: fn(&Arc<dyn ImageFile>) -> Result<CheckReport>,
}

fn bytes_of(file: &dyn ImageFile) -> Vec<u8> {
    let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

fn survive(case: &ResizeCase) {
    let memory = |bytes: Vec<u8>| Arc::new(MemoryFile::new(bytes)) as Arc<dyn ImageFile>;
    let before = (case.read)(&memory(case.start.clone())).unwrap();
    assert_eq!(before.len() as u64, case.before_bytes);
    let mut after = before.clone();
    after.resize(to_usize(case.after_bytes), 0);
    let kept = before.len().min(after.len());
    let recording = Arc::new(RecordingFile::new(case.start.clone(), None).with_zero_holes());
    let file = Arc::clone(&recording) as Arc<dyn ImageFile>;
    (case.resize)(&file, case.after_bytes).unwrap();
    assert!((case.read)(&file).unwrap() == after, "{}", case.name);
    let report = (case.check)(&file).unwrap();
    assert_eq!(report.corruption_count, 0, "{}: {:?}", case.name, report.problems);
    let mut problems = report.problems.iter();
    let is_left = problems.any(|problem| problem.kind.to_string().contains("past the end of the disk"));
    assert!(!is_left, "{}: {:?}", case.name, report.problems);
    let mut random = Random(11);
    let count = recording.operation_count();
    for round in 0..5 {
        for operations in 0..=count {
            let what = format!("{}, round {round}, after {operations} of {count} operations", case.name);
            let crashed = memory(recording.crashed_after(operations, |bound| random.below(bound)));
            let report = (case.check)(&crashed).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(report.corruption_count, 0, "{what}: {:?}", report.problems);
            let found = (case.read)(&crashed).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(found.len() == before.len() || found.len() == after.len(), "{what}");
            assert!(found[..kept] == before[..kept], "{what}");
            assert!(
                found == before || found == after || after.len() < before.len(),
                "{what}"
            );
            // The resize can be repeated.
            (case.resize)(&crashed, case.after_bytes).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!((case.read)(&crashed).unwrap() == after, "{what}: after a second resize");
            let report = (case.check)(&crashed).unwrap();
            assert_eq!(report.corruption_count, 0, "{what}: {:?}", report.problems);
        }
    }
}

fn open_qcow2(file: &Arc<dyn ImageFile>, backing: Backing) -> Result<Qcow2Layer> {
    Qcow2Layer::new(
        "image".into(),
        load_header(&**file, "image")?,
        Arc::clone(file),
        None,
        backing,
    )
}

fn qcow2_case(
    name: &'static str,
    options: Qcow2Options,
    (before_bytes, after_bytes): (u64, u64),
    backing: Backing,
) -> ResizeCase {
    let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::default());
    let options = CreateOptions {
        qcow2: options,
        ..CreateOptions::qcow2(before_bytes)
    };
    write_empty(&*file, new_header(&options).unwrap()).unwrap();
    let device = Qcow2Mut::new(open_qcow2(&file, backing.clone()).unwrap()).unwrap();
    let mut random = Random(3);
    for number in 1..30 {
        let start = random.below(before_bytes);
        let length = (1 + random.below(3000)).min(before_bytes - start);
        device.write_at(&vec![number; to_usize(length)], start).unwrap();
    }
    device.write_at(&[99; 100], before_bytes - 100).unwrap();
    device.flush().unwrap();
    let below = backing.clone();
    ResizeCase {
        name,
        start: bytes_of(&*file),
        before_bytes,
        after_bytes,
        resize: Box::new(move |file, after| qcow2::resize::resize(file, "image", backing.as_ref(), after)),
        read: Box::new(move |file| {
            let layer = open_qcow2(file, below.clone())?;
            let mut disk = vec![0; to_usize(layer.disk_bytes())];
            layer.read(&mut disk, 0, BackingUse::Backing)?;
            Ok(disk)
        }),
        check: |file| qcow2::check::check(file, &load_header(&**file, "image")?, "image", None),
    }
}

#[test]
fn qcow2_resize_is_crash_safe() {
    let small = Qcow2Options {
        cluster_bytes: 512,
        ..Qcow2Options::default()
    };
    let extended = Qcow2Options {
        cluster_bytes: 16_384,
        extended_l2: true,
        ..Qcow2Options::default()
    };
    let base = || Some(Arc::new(MemoryDevice::from_bytes(&vec![b'b'; 300_000])) as Arc<dyn BlockDevice>);
    for (name, options, sizes, backing) in [
        ("a longer table", small.clone(), (100 * KIB, 4000 * KIB), None),
        ("a table in place", small.clone(), (100 * KIB - 512, 200 * KIB), None),
        (
            "above a longer one",
            small.clone(),
            (100 * KIB + 512, 400 * KIB),
            base(),
        ),
        ("subclusters", extended.clone(), (100 * KIB + 512, 500 * KIB), base()),
        (
            "version 2",
            Qcow2Options {
                version: 2,
                ..small.clone()
            },
            (100 * KIB + 512, 2000 * KIB),
            base(),
        ),
        (
            "version 2, shorter",
            Qcow2Options {
                version: 2,
                ..small.clone()
            },
            (400 * KIB, 99 * KIB + 512),
            base(),
        ),
        ("shorter", small, (400 * KIB, 99 * KIB + 512), None),
        ("shorter above another one", extended, (400 * KIB, 99 * KIB), base()),
    ] {
        survive(&qcow2_case(name, options, sizes, backing));
    }
}

/// The functions of a format with allocation tables.
#[derive(Clone, Copy)]
struct TableFormat {
    open: fn(&Arc<dyn ImageFile>) -> Result<TableLayer>,
    resize: fn(&Arc<dyn ImageFile>, &str, u64) -> Result<()>,
    check: fn(&Arc<dyn ImageFile>) -> Result<CheckReport>,
}

fn tables_case(
    name: &'static str,
    format: TableFormat,
    file: &Arc<dyn ImageFile>,
    (before_bytes, after_bytes): (u64, u64),
) -> ResizeCase {
    let device = TableMut::new((format.open)(file).unwrap());
    let mut random = Random(4);
    for number in 1..20 {
        let start = random.below(before_bytes);
        let length = (1 + random.below(3000)).min(before_bytes - start);
        device.write_at(&vec![number; to_usize(length)], start).unwrap();
    }
    device.write_at(&[99; 100], before_bytes - 100).unwrap();
    device.flush().unwrap();
    ResizeCase {
        name,
        start: bytes_of(&**file),
        before_bytes,
        after_bytes,
        resize: Box::new(move |file, after| (format.resize)(file, "image", after)),
        read: Box::new(move |file| {
            let layer = (format.open)(file)?;
            let mut disk = vec![0; to_usize(layer.disk_bytes())];
            layer.read(&mut disk, 0, BackingUse::Backing)?;
            Ok(disk)
        }),
        check: format.check,
    }
}

#[test]
fn vhd_resize_is_crash_safe() {
    let format = TableFormat {
        open: |file| {
            let header = vhd::header::VhdHeader::load(&**file, "image")?;
            let tables = vhd::tables::of("image".into(), header, Arc::clone(file));
            Ok(TableLayer::new("image".into(), Arc::clone(file), tables, None))
        },
        resize: vhd::resize::resize,
        check: |file| {
            let mut report = vhd::check::check(&**file, &vhd::header::VhdHeader::load(&**file, "image")?)?;
            // One footer has the new size already, the other one does not.
            let is_footer = |kind: &ProblemKind| matches!(kind, ProblemKind::Structure { detail } if detail.contains("its copy at the start"));
            let differing = report.problems.iter();
            let differing =
                differing.filter(|problem| problem.severity == Severity::Corruption && is_footer(&problem.kind));
            report.corruption_count -= differing.count() as u64;
            Ok(report)
        },
    };
    for (name, kind, sizes) in [
        ("a table in its sector", ImageKind::Dynamic, (98_304 + 512, 40 * 4096)),
        ("a longer table", ImageKind::Dynamic, (98_304 + 512, 3 * MIB)),
        ("shorter", ImageKind::Dynamic, (98_304 + 512, 50_176)),
        ("fixed", ImageKind::Fixed, (98_304 + 512, 200_192)),
        ("fixed, by a sector", ImageKind::Fixed, (98_304 + 512, 98_304 + 1024)),
        ("fixed, shorter", ImageKind::Fixed, (98_304 + 512, 50_176)),
    ] {
        let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::default());
        let new = vhd::create::NewVhd {
            size_bytes: sizes.0,
            block_bytes: 4096,
            kind,
            id: ImageId([1; 16]),
            created_s: 946_684_805,
            parent: None,
        };
        vhd::create::write_empty(&*file, &new).unwrap();
        survive(&tables_case(name, format, &file, sizes));
    }
}

#[test]
fn vhdx_resize_is_crash_safe() {
    let format = TableFormat {
        open: |file| {
            let opened = vhdx::opened::OpenedVhdx::load(Arc::clone(file), Access::Write, "image")?;
            let tables = Box::new(vhdx::tables::VhdxTables::new("image".into(), opened));
            Ok(TableLayer::new("image".into(), Arc::clone(file), tables, None))
        },
        resize: vhdx::resize::resize,
        check: |file| {
            vhdx::check::check(&vhdx::opened::OpenedVhdx::load(
                Arc::clone(file),
                Access::Read,
                "image",
            )?)
        },
    };
    for (name, kind, sizes) in [
        ("dynamic", ImageKind::Dynamic, (2 * MIB + 512 * 7, 4 * MIB)),
        ("a table that moves", ImageKind::Dynamic, (2 * MIB + 512 * 7, 4 * MIB)),
        ("shorter", ImageKind::Dynamic, (2 * MIB + 512 * 7, MIB + 512)),
        ("fixed", ImageKind::Fixed, (2 * MIB + 512 * 7, 4 * MIB + 512)),
    ] {
        let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::default());
        let new = vhdx::create::NewVhdx {
            size_bytes: sizes.0,
            block_bytes: MIB,
            sector_bytes: 512,
            kind,
            id: ImageId([1; 16]),
            parent: None,
        };
        vhdx::create::write_empty(&*file, &new).unwrap();
        if name == "a table that moves" {
            // Its region has exactly the size of its three entries.
            let mut bytes = bytes_of(&*file);
            for table in [192 << 10, 256 << 10] {
                bytes[table + 40..table + 44].copy_from_slice(&24_u32.to_le_bytes());
            }
            vhdx::seal_all(&mut bytes);
            file.write_at(&bytes, 0).unwrap();
        }
        survive(&tables_case(name, format, &file, sizes));
    }
}

#[test]
fn vdi_resize_is_crash_safe() {
    use vdi::header::{VdiHeader, VdiKind};
    let format = TableFormat {
        open: |file| {
            let tables =
                vdi::tables::VdiTables::new("image".into(), VdiHeader::load(&**file, "image")?, Arc::clone(file));
            Ok(TableLayer::new(
                "image".into(),
                Arc::clone(file),
                Box::new(tables),
                None,
            ))
        },
        resize: vdi::resize::resize,
        check: |file| vdi::check::check(&**file, &VdiHeader::load(&**file, "image")?),
    };
    for (name, kind, sizes) in [
        ("dynamic", VdiKind::Dynamic, (98_304 + 512, 200_192)),
        ("shorter", VdiKind::Dynamic, (98_304 + 512, 50_176)),
        ("fixed", VdiKind::Fixed, (98_304 + 512, 200_192)),
        ("fixed, shorter", VdiKind::Fixed, (98_304 + 512, 50_176)),
    ] {
        let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::default());
        let new = vdi::create::NewVdi {
            size_bytes: sizes.0,
            block_bytes: 4096,
            sector_bytes: 512,
            kind,
            id: ImageId([1; 16]),
            parent: ImageId::NIL,
            parent_modification: ImageId::NIL,
        };
        vdi::create::write_empty(&*file, &new).unwrap();
        survive(&tables_case(name, format, &file, sizes));
    }
}

#[test]
fn ploop_resize_is_crash_safe() {
    use ploop::header::PloopHeader;
    let format = TableFormat {
        open: |file| {
            let tables =
                ploop::tables::PloopTables::new("image".into(), PloopHeader::load(&**file, "image")?, Arc::clone(file));
            Ok(TableLayer::new(
                "image".into(),
                Arc::clone(file),
                Box::new(tables),
                None,
            ))
        },
        resize: ploop::resize::resize,
        check: |file| ploop::check::check(&**file, &PloopHeader::load(&**file, "image")?),
    };
    for (name, sizes) in [("longer", (98_304 + 512, 200_192)), ("shorter", (98_304 + 512, 50_176))] {
        let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::default());
        ploop::create::write_empty(&*file, sizes.0, 4096).unwrap();
        survive(&tables_case(name, format, &file, sizes));
    }
}
