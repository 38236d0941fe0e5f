//! Images to damage, and assertions on their repair.

use std::collections::HashSet;
use std::sync::Arc;

use holdfast_block::{BlockDeviceMut as _, to_usize};

use super::super::{Repair, RepairAction, RepairTarget};
use crate::allocation_table::writer::TableMut;
use crate::allocation_table::{AllocationTable, TableLayer};
use crate::file::memory::{MemoryFile, Random, RecordingFile};
use crate::file::{Access, ImageFile};
use crate::formats::qcow2::header::load_header;
use crate::formats::qcow2::layer::Qcow2Layer;
use crate::formats::qcow2::layout::{new_header, write_empty};
use crate::formats::qcow2::writer::Qcow2Mut;
use crate::formats::vmdk::concatenated::Concatenated;
use crate::formats::vmdk::tables::{OpenedVmdk, VmdkExtent, VmdkExtentKind, VmdkTables};
use crate::formats::{ploop, vdi, vhd, vhdx, vmdk};
use crate::model::create_options::{CreateOptions, Qcow2Options};
use crate::model::info::ImageKind;
use crate::model::layered::{BackingUse, Layered};
use crate::model::repair_action::RepairMode;
use crate::{CheckReport, Format, ImageId, ProblemKind, Result, Severity};

pub(super) const DISK_BYTES: u64 = 98_304 + 512;
pub(super) const FORMATS: [Format; 6] = [
    Format::Qcow2,
    Format::Vdi,
    Format::Vhd,
    Format::Vhdx,
    Format::Vmdk,
    Format::Parallels,
];

pub(super) fn memory(bytes: Vec<u8>) -> Arc<dyn ImageFile> {
    Arc::new(MemoryFile::new(bytes))
}

pub(super) fn bytes_of(file: &dyn ImageFile) -> Vec<u8> {
    let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

pub(super) fn opened_vmdk(file: &Arc<dyn ImageFile>) -> Result<OpenedVmdk> {
    let extent = vmdk::extent::SparseExtent::load(&**file, "image")?;
    let (offset, _) = extent.descriptor.unwrap_or_default();
    Ok(OpenedVmdk {
        parts: vec![VmdkExtent {
            start: 0,
            length: extent.disk_bytes,
            kind: VmdkExtentKind::Sparse { window: 0, extent },
        }],
        files: Arc::new(Concatenated {
            files: vec![Arc::clone(file)],
        }),
        content_id_at: offset..offset + 8,
    })
}

pub(super) fn layer(format: Format, file: &Arc<dyn ImageFile>) -> Result<Box<dyn Layered>> {
    let of_tables = |file: &Arc<dyn ImageFile>, tables: Box<dyn AllocationTable>| -> Box<dyn Layered> {
        Box::new(TableLayer::new("image".into(), Arc::clone(file), tables, None))
    };
    Ok(match format {
        Format::Qcow2 => {
            let header = load_header(&**file, "image")?;
            Box::new(Qcow2Layer::new("image".into(), header, Arc::clone(file), None, None)?)
        }
        Format::Vdi => {
            let header = vdi::header::VdiHeader::load(&**file, "image")?;
            let tables = vdi::tables::VdiTables::new("image".into(), header, Arc::clone(file));
            of_tables(file, Box::new(tables))
        }
        Format::Vhd => {
            let header = vhd::header::VhdHeader::load(&**file, "image")?;
            of_tables(file, vhd::tables::of("image".into(), header, Arc::clone(file)))
        }
        Format::Vhdx => {
            let opened = vhdx::opened::OpenedVhdx::load(Arc::clone(file), Access::Read, "image")?;
            let replayed = Arc::clone(&opened.file);
            of_tables(
                &replayed,
                Box::new(vhdx::tables::VhdxTables::new("image".into(), opened)),
            )
        }
        Format::Vmdk => {
            let tables = VmdkTables::new("image".into(), opened_vmdk(file)?)?;
            of_tables(file, Box::new(tables))
        }
        _ => {
            let header = ploop::header::PloopHeader::load(&**file, "image")?;
            let tables = ploop::tables::PloopTables::new("image".into(), header, Arc::clone(file));
            of_tables(file, Box::new(tables))
        }
    })
}

pub(super) fn target(format: Format, file: &Arc<dyn ImageFile>) -> Result<RepairTarget> {
    let vmdk = (format == Format::Vmdk).then(|| opened_vmdk(file)).transpose()?;
    RepairTarget::new("image".to_owned(), format, vec![Arc::clone(file)], vmdk)
}

/// An image with some content.
pub(super) fn sample(format: Format) -> Vec<u8> {
    let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::default());
    if format == Format::Qcow2 {
        return sample_qcow2(&Qcow2Options {
            cluster_bytes: 512,
            ..Qcow2Options::default()
        });
    }
    create_empty(format, &*file);
    let tables = {
        // The same tables, opened for writing.
        let table_layer = |tables| TableLayer::new("image".into(), Arc::clone(&file), tables, None);
        match format {
            Format::Vdi => {
                let header = vdi::header::VdiHeader::load(&*file, "image").unwrap();
                table_layer(Box::new(vdi::tables::VdiTables::new("image".into(), header, Arc::clone(&file))) as Box<_>)
            }
            Format::Vhd => {
                let header = vhd::header::VhdHeader::load(&*file, "image").unwrap();
                table_layer(vhd::tables::of("image".into(), header, Arc::clone(&file)))
            }
            Format::Vhdx => {
                let opened = vhdx::opened::OpenedVhdx::load(Arc::clone(&file), Access::Write, "image").unwrap();
                table_layer(Box::new(vhdx::tables::VhdxTables::new("image".into(), opened)))
            }
            Format::Vmdk => table_layer(Box::new(
                VmdkTables::new("image".into(), opened_vmdk(&file).unwrap()).unwrap(),
            )),
            _ => {
                let header = ploop::header::PloopHeader::load(&*file, "image").unwrap();
                table_layer(Box::new(ploop::tables::PloopTables::new(
                    "image".into(),
                    header,
                    Arc::clone(&file),
                )))
            }
        }
    };
    let device = TableMut::new(tables);
    let mut random = Random(4);
    for number in 1..20 {
        let start = random.below(DISK_BYTES);
        let length = (1 + random.below(3000)).min(DISK_BYTES - start);
        device.write_at(&vec![number; to_usize(length)], start).unwrap();
    }
    device.flush().unwrap();
    bytes_of(&*file)
}

pub(super) fn create_empty(format: Format, file: &dyn ImageFile) {
    match format {
        Format::Vdi => vdi::create::write_empty(
            file,
            &vdi::create::NewVdi {
                size_bytes: DISK_BYTES,
                block_bytes: 4096,
                sector_bytes: 512,
                kind: vdi::header::VdiKind::Dynamic,
                id: ImageId([1; 16]),
                parent: ImageId::NIL,
                parent_modification: ImageId::NIL,
            },
        ),
        Format::Vhd => vhd::create::write_empty(file, &new_vhd(ImageKind::Dynamic)),
        Format::Vhdx => vhdx::create::write_empty(
            file,
            &vhdx::create::NewVhdx {
                size_bytes: 3 << 20,
                block_bytes: 1 << 20,
                sector_bytes: 512,
                kind: ImageKind::Dynamic,
                id: ImageId([1; 16]),
                parent: None,
            },
        ),
        Format::Vmdk => vmdk::create::write_empty(
            file,
            &vmdk::create::NewVmdk {
                size_bytes: DISK_BYTES,
                grain_bytes: 4096,
                name: "image.vmdk".to_owned(),
                id: ImageId([7; 16]),
                parent: None,
            },
        ),
        _ => ploop::create::write_empty(file, DISK_BYTES, 4096),
    }
    .unwrap();
}

pub(super) fn new_vhd(kind: ImageKind) -> vhd::create::NewVhd {
    vhd::create::NewVhd {
        size_bytes: DISK_BYTES,
        block_bytes: 4096,
        kind,
        id: ImageId([1; 16]),
        created_s: 946_684_805,
        parent: None,
    }
}

pub(super) fn sample_qcow2(options: &Qcow2Options) -> Vec<u8> {
    let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::default());
    let options = CreateOptions {
        qcow2: options.clone(),
        ..CreateOptions::qcow2(DISK_BYTES)
    };
    write_empty(&*file, new_header(&options).unwrap()).unwrap();
    let header = load_header(&*file, "image").unwrap();
    let opened = Qcow2Layer::new("image".into(), header, Arc::clone(&file), None, None).unwrap();
    let device = Qcow2Mut::new(opened).unwrap();
    let mut random = Random(3);
    for number in 1..30 {
        let start = random.below(DISK_BYTES);
        let length = (1 + random.below(3000)).min(DISK_BYTES - start);
        device.write_at(&vec![number; to_usize(length)], start).unwrap();
    }
    device.flush().unwrap();
    bytes_of(&*file)
}

/// The content of each sector of the disk, where readable.
pub(super) fn sectors(format: Format, file: &Arc<dyn ImageFile>) -> Vec<Option<Vec<u8>>> {
    let Ok(layer) = layer(format, file) else {
        return Vec::new();
    };
    let read = |at| {
        let mut sector = vec![0; 512];
        layer.read(&mut sector, at, BackingUse::Backing).ok().map(|()| sector)
    };
    // A damaged size may have any value.
    (0..layer.disk_bytes().min(8 << 20) / 512)
        .map(|number| read(number * 512))
        .collect()
}

/// The number of corruptions. A cluster counts once, even if its refcount, flags and entries are all wrong; a missing
/// flag on a cluster with one reference only causes an unneeded copy.
pub(super) fn damage_score(report: &CheckReport) -> u64 {
    let corruptions = report.problems.iter();
    let corruptions = corruptions.filter(|problem| problem.severity == Severity::Corruption);
    let (mut clusters, mut others) = (HashSet::new(), 0);
    for problem in corruptions {
        match problem.kind {
            ProblemKind::CopiedFlag { refcount: 1, .. } => {}
            ProblemKind::CopiedFlag { offset, .. }
            | ProblemKind::Refcount { offset, .. }
            | ProblemKind::Shared { offset, .. } => {
                clusters.insert(offset);
            }
            _ => others += 1,
        }
    }
    others + clusters.len() as u64
}

/// Repairs `damaged`, crashes at every point of that, and repairs the result. What was readable before must stay the
/// same all the time, except for what was discarded.
pub(super) fn survive(
    name: &str,
    format: Format,
    damaged: &[u8],
    mode: RepairMode,
) -> (Vec<RepairAction>, CheckReport) {
    let start = memory(damaged.to_vec());
    let readable = sectors(format, &start);
    let recording = Arc::new(RecordingFile::new(damaged.to_vec(), None).with_zero_holes());
    let file = Arc::clone(&recording) as Arc<dyn ImageFile>;
    let plan = Repair::plan(target(format, &file).unwrap(), mode).unwrap();
    assert_eq!(recording.operation_count(), 0, "{name}: planning changed the image");
    let (before, after, actions) = (plan.before().clone(), plan.after().clone(), plan.actions().to_vec());
    let report = plan.execute().unwrap();
    assert_eq!(report, after, "{name}: the actions differ from the plan");
    let finds = |action: &RepairAction| matches!(action, RepairAction::FromSecondCopy { .. });
    let loses = actions.iter().any(|action| action.loses_data() || finds(action));
    let check_sectors = |file: &Arc<dyn ImageFile>, what: &str| {
        if loses || readable.is_empty() {
            return;
        }
        let now = sectors(format, file);
        assert_eq!(now.len(), readable.len(), "{what}");
        for (number, (before, now)) in readable.iter().zip(&now).enumerate() {
            assert!(before.is_none() || before == now, "{what}: sector {number}");
        }
    };
    check_sectors(&file, name);
    let again = Repair::plan(target(format, &file).unwrap(), mode).unwrap();
    assert_eq!(again.actions(), [], "{name}: a second repair still has actions");
    let mut random = Random(11);
    let count = recording.operation_count();
    for round in 0..5 {
        for operations in 0..=count {
            let what = format!("{name}, round {round}, after {operations} of {count} operations");
            let crashed = memory(recording.crashed_after(operations, |bound| random.below(bound)));
            let found = target(format, &crashed).unwrap().check_even_damaged().unwrap().0;
            assert!(
                damage_score(&found) <= damage_score(&before),
                "{what}: {:?} after {:?}",
                found.problems,
                before.problems
            );
            check_sectors(&crashed, &what);
            let plan = Repair::plan(target(format, &crashed).unwrap(), mode).unwrap();
            let report = plan.execute().unwrap();
            assert_eq!(
                (report.corruption_count, report.leak_count.min(1)),
                (after.corruption_count, after.leak_count.min(1)),
                "{what}: repaired again: {:?}",
                report.problems
            );
            check_sectors(&crashed, &what);
        }
    }
    (actions, report)
}

pub(super) fn names(actions: &[RepairAction]) -> Vec<&'static str> {
    actions.iter().map(RepairAction::name).collect()
}

/// Asserts that this mode repairs the image with these actions, and that the image is clean afterwards.
pub(super) fn assert_repairs(name: &str, format: Format, damaged: &[u8], mode: RepairMode, expected: &[&str]) {
    let (actions, report) = survive(name, format, damaged, mode);
    assert_eq!(names(&actions), expected, "{name}: {actions:?}");
    assert_eq!(report.problems, [], "{name}");
}

/// Asserts that this mode changes nothing.
pub(super) fn assert_not_repairable(name: &str, format: Format, damaged: &[u8], mode: RepairMode) {
    let file = memory(damaged.to_vec());
    let plan = Repair::plan(target(format, &file).unwrap(), mode).unwrap();
    assert_eq!(plan.actions(), [], "{name}");
    assert_eq!(plan.before(), plan.after(), "{name}");
    let report = plan.execute().unwrap();
    assert!(!report.is_clean(), "{name}: the damage was not found");
    assert!(bytes_of(&*file) == damaged, "{name}: the image was changed");
}

pub(super) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

pub(super) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// Damages an image.
pub(super) type Damage<'a> = Box<dyn Fn(&mut Vec<u8>) + 'a>;

/// Offsets in an image with clusters of 512 bytes.
pub(super) struct Places {
    pub(super) refcount_table: usize,
    pub(super) refcount_block: usize,
    pub(super) l1: usize,
    pub(super) l2: usize,
    /// The first entry with data in the first L2 table.
    pub(super) entry: usize,
    /// The cluster of that entry.
    pub(super) data: usize,
}

pub(super) fn places(image: &[u8]) -> Places {
    let mask = 0x00ff_ffff_ffff_fe00;
    let table = to_usize(be64(image, 48));
    let l1 = to_usize(be64(image, 40));
    let l2 = to_usize(be64(image, l1) & mask);
    let entry = (l2..l2 + 512)
        .step_by(8)
        .find(|at| be64(image, *at) & mask != 0)
        .unwrap();
    Places {
        refcount_table: table,
        refcount_block: to_usize(be64(image, table)),
        l1,
        l2,
        entry,
        data: to_usize(be64(image, entry) & mask) / 512,
    }
}

/// The sample after `damage`.
pub(super) fn damaged(image: &[u8], damage: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut image = image.to_vec();
    damage(&mut image);
    image
}

/// Repairs without comparing the content: restored ranges that were absent before read differently.
pub(super) fn repair(format: Format, damaged: &[u8], mode: RepairMode) -> (Vec<RepairAction>, CheckReport) {
    let file = memory(damaged.to_vec());
    let plan = Repair::plan(target(format, &file).unwrap(), mode).unwrap();
    let actions = plan.actions().to_vec();
    let report = plan.execute().unwrap();
    let sound = memory(sample(format));
    assert!(
        sectors(format, &file) == sectors(format, &sound),
        "data is still missing"
    );
    (actions, report)
}
