//! Damaged images of every format are mended; a crash at any point of that leaves them no worse, and they can be mended again.

use std::collections::HashSet;
use std::sync::Arc;

use holdfast_block::{BlockDeviceMut as _, to_usize};

use super::{Repair, RepairAction, RepairMode, Target};
use crate::blocks::writer::TableMut;
use crate::blocks::{TableLayer, Tables};
use crate::chain::load_header;
use crate::create::{CreateOptions, Qcow2Options};
use crate::file::memory::{MemoryFile, Random, RecordingFile};
use crate::file::{Access, ImageFile};
use crate::info::ImageKind;
use crate::layered::{Below, Layered};
use crate::qcow2::layer::Layer;
use crate::qcow2::layout::{new_header, write_empty};
use crate::qcow2::writer::Qcow2Mut;
use crate::vmdk::joined::Joined;
use crate::vmdk::tables::{Opened, Part, PartKind, VmdkTables};
use crate::{CheckReport, Format, ImageId, ProblemKind, Result, Severity, ploop, vdi, vhd, vhdx, vmdk};

const DISK_BYTES: u64 = 98_304 + 512;
const FORMATS: [Format; 6] = [
    Format::Qcow2,
    Format::Vdi,
    Format::Vhd,
    Format::Vhdx,
    Format::Vmdk,
    Format::Parallels,
];

fn memory(bytes: Vec<u8>) -> Arc<dyn ImageFile> {
    Arc::new(MemoryFile::new(bytes))
}

fn bytes_of(file: &dyn ImageFile) -> Vec<u8> {
    let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

fn opened_vmdk(file: &Arc<dyn ImageFile>) -> Result<Opened> {
    let extent = vmdk::extent::SparseExtent::load(&**file, "image")?;
    let (offset, _) = extent.descriptor.unwrap_or_default();
    Ok(Opened {
        parts: vec![Part {
            start: 0,
            length: extent.disk_bytes,
            kind: PartKind::Sparse { window: 0, extent },
        }],
        files: Arc::new(Joined {
            files: vec![Arc::clone(file)],
        }),
        content_id_at: offset..offset + 8,
    })
}

fn layer(format: Format, file: &Arc<dyn ImageFile>) -> Result<Box<dyn Layered>> {
    let of_tables = |file: &Arc<dyn ImageFile>, tables: Box<dyn Tables>| -> Box<dyn Layered> {
        Box::new(TableLayer::new("image".into(), Arc::clone(file), tables, None))
    };
    Ok(match format {
        Format::Qcow2 => {
            let header = load_header(&**file, "image")?;
            Box::new(Layer::new("image".into(), header, Arc::clone(file), None, None)?)
        }
        Format::Vdi => {
            let header = vdi::header::Header::load(&**file, "image")?;
            let tables = vdi::tables::VdiTables::new("image".into(), header, Arc::clone(file));
            of_tables(file, Box::new(tables))
        }
        Format::Vhd => {
            let header = vhd::footer::Header::load(&**file, "image")?;
            of_tables(file, vhd::tables::of("image".into(), header, Arc::clone(file)))
        }
        Format::Vhdx => {
            let opened = vhdx::header::Opened::load(Arc::clone(file), Access::Read, "image")?;
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
            let header = ploop::header::Header::load(&**file, "image")?;
            let tables = ploop::tables::PloopTables::new("image".into(), header, Arc::clone(file));
            of_tables(file, Box::new(tables))
        }
    })
}

fn target(format: Format, file: &Arc<dyn ImageFile>) -> Result<Target> {
    let vmdk = (format == Format::Vmdk).then(|| opened_vmdk(file)).transpose()?;
    Target::new("image".to_owned(), format, vec![Arc::clone(file)], vmdk)
}

/// An image with something in it.
fn sample(format: Format) -> Vec<u8> {
    let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::default());
    if format == Format::Qcow2 {
        return sample_qcow2(&Qcow2Options {
            cluster_bytes: 512,
            ..Qcow2Options::default()
        });
    }
    create_empty(format, &*file);
    let tables = {
        // The same as of reading, opened for writing.
        let table_layer = |tables| TableLayer::new("image".into(), Arc::clone(&file), tables, None);
        match format {
            Format::Vdi => {
                let header = vdi::header::Header::load(&*file, "image").unwrap();
                table_layer(Box::new(vdi::tables::VdiTables::new("image".into(), header, Arc::clone(&file))) as Box<_>)
            }
            Format::Vhd => {
                let header = vhd::footer::Header::load(&*file, "image").unwrap();
                table_layer(vhd::tables::of("image".into(), header, Arc::clone(&file)))
            }
            Format::Vhdx => {
                let opened = vhdx::header::Opened::load(Arc::clone(&file), Access::Write, "image").unwrap();
                table_layer(Box::new(vhdx::tables::VhdxTables::new("image".into(), opened)))
            }
            Format::Vmdk => table_layer(Box::new(
                VmdkTables::new("image".into(), opened_vmdk(&file).unwrap()).unwrap(),
            )),
            _ => {
                let header = ploop::header::Header::load(&*file, "image").unwrap();
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

fn create_empty(format: Format, file: &dyn ImageFile) {
    match format {
        Format::Vdi => vdi::create::write_empty(
            file,
            &vdi::create::NewVdi {
                size_bytes: DISK_BYTES,
                block_bytes: 4096,
                sector_bytes: 512,
                kind: vdi::header::Kind::Dynamic,
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

fn new_vhd(kind: ImageKind) -> vhd::create::NewVhd {
    vhd::create::NewVhd {
        size_bytes: DISK_BYTES,
        block_bytes: 4096,
        kind,
        id: ImageId([1; 16]),
        created_s: 946_684_805,
        parent: None,
    }
}

fn sample_qcow2(options: &Qcow2Options) -> Vec<u8> {
    let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::default());
    let options = CreateOptions {
        qcow2: options.clone(),
        ..CreateOptions::qcow2(DISK_BYTES)
    };
    write_empty(&*file, new_header(&options).unwrap()).unwrap();
    let header = load_header(&*file, "image").unwrap();
    let opened = Layer::new("image".into(), header, Arc::clone(&file), None, None).unwrap();
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

/// What each sector of the disk reads as, where it can be read.
fn sectors(format: Format, file: &Arc<dyn ImageFile>) -> Vec<Option<Vec<u8>>> {
    let Ok(layer) = layer(format, file) else {
        return Vec::new();
    };
    let read = |at| {
        let mut sector = vec![0; 512];
        layer.read(&mut sector, at, Below::Backing).ok().map(|()| sector)
    };
    // A damaged size may be any.
    (0..layer.disk_bytes().min(8 << 20) / 512)
        .map(|number| read(number * 512))
        .collect()
}

/// Corruptions, each cluster once, whether its count, its flags or its entries say so; a flag that is missing where there is one use makes a copy that is
/// not needed, and nothing else.
fn harm(report: &CheckReport) -> u64 {
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

/// Mends `damaged`, crashes at every point of that, and mends what is left. What could be read before reads the same at any time, but for
/// what was given up.
fn survive(name: &str, format: Format, damaged: &[u8], mode: RepairMode) -> (Vec<RepairAction>, CheckReport) {
    let start = memory(damaged.to_vec());
    let readable = sectors(format, &start);
    let recording = Arc::new(RecordingFile::new(damaged.to_vec(), None).with_zero_holes());
    let file = Arc::clone(&recording) as Arc<dyn ImageFile>;
    let plan = Repair::plan(target(format, &file).unwrap(), mode).unwrap();
    assert_eq!(recording.operation_count(), 0, "{name}: a plan wrote");
    let (before, after, actions) = (plan.before().clone(), plan.after().clone(), plan.actions().to_vec());
    let report = plan.execute().unwrap();
    assert_eq!(report, after, "{name}: the plan was not what happened");
    let finds = |action: &RepairAction| matches!(action, RepairAction::FromTwin { .. });
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
    assert_eq!(again.actions(), [], "{name}: it is mended, and is to be mended again");
    let mut random = Random(11);
    let count = recording.operation_count();
    for round in 0..5 {
        for operations in 0..=count {
            let what = format!("{name}, round {round}, after {operations} of {count} operations");
            let crashed = memory(recording.crashed_after(operations, |bound| random.below(bound)));
            let found = target(format, &crashed).unwrap().check_or_tell().unwrap().0;
            assert!(
                harm(&found) <= harm(&before),
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
                "{what}: mended again: {:?}",
                report.problems
            );
            check_sectors(&crashed, &what);
        }
    }
    (actions, report)
}

fn names(actions: &[RepairAction]) -> Vec<&'static str> {
    actions.iter().map(RepairAction::name).collect()
}

/// It is mended in this mode, by these actions, and clean.
fn mended(name: &str, format: Format, damaged: &[u8], mode: RepairMode, expected: &[&str]) {
    let (actions, report) = survive(name, format, damaged, mode);
    assert_eq!(names(&actions), expected, "{name}: {actions:?}");
    assert_eq!(report.problems, [], "{name}");
}

/// It stays as it is in this mode.
fn untouched(name: &str, format: Format, damaged: &[u8], mode: RepairMode) {
    let file = memory(damaged.to_vec());
    let plan = Repair::plan(target(format, &file).unwrap(), mode).unwrap();
    assert_eq!(plan.actions(), [], "{name}");
    assert_eq!(plan.before(), plan.after(), "{name}");
    let report = plan.execute().unwrap();
    assert!(!report.is_clean(), "{name}: it was not damaged");
    assert!(bytes_of(&*file) == damaged, "{name}: it was touched");
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// What is done to an image.
type Damage<'a> = Box<dyn Fn(&mut Vec<u8>) + 'a>;

/// Where things are in an image of clusters of 512 bytes.
struct Places {
    refcount_table: usize,
    refcount_block: usize,
    l1: usize,
    l2: usize,
    /// The first entry of the first L2 table that leads to data.
    entry: usize,
    /// The cluster that it leads to.
    data: usize,
}

fn places(image: &[u8]) -> Places {
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

/// The sample with this done to it.
fn damaged(image: &[u8], damage: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut image = image.to_vec();
    damage(&mut image);
    image
}

#[test]
fn a_sound_image_is_left_alone() {
    for format in FORMATS {
        let image = sample(format);
        let file = memory(image.clone());
        for mode in [RepairMode::Leaks, RepairMode::Safe, RepairMode::All] {
            let plan = Repair::plan(target(format, &file).unwrap(), mode).unwrap();
            assert_eq!(plan.actions(), [], "{format}");
            assert_eq!(plan.execute().unwrap().problems, [], "{format}");
        }
        assert!(bytes_of(&*file) == image, "{format}");
    }
}

#[test]
fn refcounts_of_a_qcow2_become_what_is_counted() {
    let image = sample(Format::Qcow2);
    let at = places(&image);
    let count_of = |cluster: usize| at.refcount_block + cluster * 2;
    let behind = image.len() / 512;
    let leak = damaged(&image, |image| {
        image.resize((behind + 3) * 512, 0xaa);
        put(image, count_of(behind + 1), &[0, 1]);
        put(image, count_of(at.data), &[0, 3]);
        // The flag as QEMU would have it with three uses.
        image[at.entry] &= 0x7f;
    });
    mended(
        "leaks",
        Format::Qcow2,
        &leak,
        RepairMode::Leaks,
        &["refcounts", "copied-flags"],
    );
    mended(
        "leaks",
        Format::Qcow2,
        &leak,
        RepairMode::Safe,
        &["refcounts", "copied-flags"],
    );
    let low = damaged(&image, |image| {
        image[at.refcount_block..at.refcount_block + 512].fill(0);
    });
    untouched(
        "too low, and only leaks are mended",
        Format::Qcow2,
        &low,
        RepairMode::Leaks,
    );
    mended("too low", Format::Qcow2, &low, RepairMode::Safe, &["refcounts"]);
    let flags = damaged(&image, |image| {
        image[at.l1] &= 0x7f;
        image[at.entry] &= 0x7f;
    });
    mended(
        "flags that are missing",
        Format::Qcow2,
        &flags,
        RepairMode::Safe,
        &["copied-flags"],
    );
    let marked = damaged(&low, |image| put(image, 79, &[3]));
    mended(
        "marks",
        Format::Qcow2,
        &marked,
        RepairMode::Safe,
        &["refcounts", "mark-cleared", "mark-cleared"],
    );
}

/// Other entries of the first L2 table that lead to data, behind [`Places::entry`].
fn other_entries(image: &[u8], at: &Places, step: usize) -> Vec<usize> {
    let others = (at.entry + step..at.l2 + 512).step_by(step);
    others
        .filter(|other| be64(image, *other) & 0x00ff_ffff_ffff_fe00 != 0)
        .collect()
}

/// A repair once counted two uses, was content with that, and gave back the cluster that nobody led to any more: it had the data.
#[test]
fn what_two_parts_of_a_qcow2_share_is_copied_only_by_request() {
    for (bits, extended_l2) in [(1, false), (16, false), (16, true)] {
        let image = sample_qcow2(&Qcow2Options {
            cluster_bytes: if extended_l2 { 16_384 } else { 512 },
            refcount_bits: bits,
            extended_l2,
            ..Qcow2Options::default()
        });
        let at = places(&image);
        let name = format!("one cluster, twice, with refcounts of {bits} bits, {extended_l2}");
        let other = other_entries(&image, &at, if extended_l2 { 16 } else { 8 })[0];
        let orphan = be64(&image, other) & 0x00ff_ffff_ffff_fe00;
        let shared = damaged(&image, |image| image.copy_within(at.entry..at.entry + 8, other));
        untouched(&name, Format::Qcow2, &shared, RepairMode::Leaks);
        // Two uses do not fit into one bit.
        let expected: &[&str] = if bits == 1 { &[] } else { &["refcounts", "copied-flags"] };
        let (actions, report) = survive(&name, Format::Qcow2, &shared, RepairMode::Safe);
        assert_eq!(names(&actions), expected, "{name}");
        let is_shared = |kind: &ProblemKind| matches!(kind, ProblemKind::Shared { what: "cluster", .. });
        let shared_count = report
            .problems
            .iter()
            .filter(|problem| is_shared(&problem.kind))
            .count();
        assert_eq!(shared_count, 1, "{name}: {:?}", report.problems);
        let kept = ProblemKind::Refcount {
            offset: orphan,
            stored: 1,
            counted: 0,
        };
        assert!(report.problems.iter().any(|problem| problem.kind == kept), "{name}");
        // From where that left it, too.
        let file = memory(shared.clone());
        let plan = Repair::plan(target(Format::Qcow2, &file).unwrap(), RepairMode::Safe).unwrap();
        plan.execute().unwrap();
        for start in [shared, bytes_of(&*file)] {
            let (actions, report) = survive(&name, Format::Qcow2, &start, RepairMode::All);
            assert_eq!(names(&actions)[..2], ["separated", "refcounts"], "{name}");
            assert_eq!(report.problems, [], "{name}");
            let file = memory(start);
            let before = sectors(Format::Qcow2, &file);
            let plan = Repair::plan(target(Format::Qcow2, &file).unwrap(), RepairMode::All).unwrap();
            plan.execute().unwrap();
            assert!(
                sectors(Format::Qcow2, &file) == before,
                "{name}: it reads as another disk"
            );
        }
    }
}

#[test]
fn reserved_bits_of_a_qcow2_are_cleared_only_by_request() {
    let image = sample(Format::Qcow2);
    let at = places(&image);
    let flipped = damaged(&image, |image| {
        image[at.l1 + 7] ^= 8;
        image[at.entry] ^= 0x10;
        image[at.entry + 7] ^= 8;
    });
    untouched("reserved bits", Format::Qcow2, &flipped, RepairMode::Safe);
    mended(
        "reserved bits",
        Format::Qcow2,
        &flipped,
        RepairMode::All,
        &["reserved-bits"],
    );
    assert!(sectors(Format::Qcow2, &memory(flipped)) == sectors(Format::Qcow2, &memory(image)));
}

#[test]
fn a_table_that_two_parts_of_a_qcow2_share_is_copied_with_what_it_leads_to() {
    let image = sample(Format::Qcow2);
    let at = places(&image);
    let shared = damaged(&image, |image| image.copy_within(at.l1..at.l1 + 8, at.l1 + 8));
    untouched("one table, twice", Format::Qcow2, &shared, RepairMode::Leaks);
    let (_, report) = survive("one table, twice", Format::Qcow2, &shared, RepairMode::Safe);
    assert!(report.corruption_count > 0 && report.leak_count > 0);
    let (actions, report) = survive("one table, twice", Format::Qcow2, &shared, RepairMode::All);
    assert_eq!(names(&actions), ["separated", "separated", "refcounts"]);
    assert_eq!(report.problems, []);
    // Where the refcounts have no use, either.
    let both = damaged(&shared, |image| put(image, at.refcount_table, &[0; 8]));
    untouched("and no refcounts", Format::Qcow2, &both, RepairMode::Safe);
    let cluster = damaged(&image, |image| {
        let other = other_entries(image, &at, 8)[0];
        image.copy_within(at.entry..at.entry + 8, other);
        put(image, at.refcount_table, &[0; 8]);
    });
    untouched("and no refcounts", Format::Qcow2, &cluster, RepairMode::Safe);
    let (actions, report) = survive("and no refcounts", Format::Qcow2, &cluster, RepairMode::All);
    assert_eq!(names(&actions), ["refcounts-rebuilt", "separated"]);
    assert_eq!(report.problems, []);
}

#[test]
fn refcounts_that_cannot_be_used_are_written_anew() {
    for bits in [1, 2, 16, 64] {
        let image = sample_qcow2(&Qcow2Options {
            cluster_bytes: 512,
            refcount_bits: bits,
            ..Qcow2Options::default()
        });
        let at = places(&image);
        let file_bytes = image.len() as u64;
        let cases: [(&str, Damage<'_>); 5] = [
            ("no block", Box::new(|image| put(image, at.refcount_table, &[0; 8]))),
            (
                "a block past the end",
                Box::new(|image| put(image, at.refcount_table, &(file_bytes * 8).to_be_bytes())),
            ),
            (
                "a block over data",
                Box::new(|image| put(image, at.refcount_table, &(at.data as u64 * 512).to_be_bytes())),
            ),
            ("no table", Box::new(|image| put(image, 48, &[0; 12]))),
            (
                "a table past the end",
                Box::new(|image| put(image, 48, &(file_bytes * 8).to_be_bytes())),
            ),
        ];
        for (name, damage) in cases {
            let broken = damaged(&image, damage);
            let name = format!("{name}, refcounts of {bits} bits");
            untouched(&name, Format::Qcow2, &broken, RepairMode::Leaks);
            mended(&name, Format::Qcow2, &broken, RepairMode::Safe, &["refcounts-rebuilt"]);
        }
    }
}

#[test]
fn what_leads_nowhere_in_a_qcow2_is_given_up_only_by_request() {
    let image = sample(Format::Qcow2);
    let at = places(&image);
    let flag = 1_u64 << 63;
    for (name, entry) in [
        ("past the end", flag | 1 << 40),
        ("in the l1 table", flag | at.l1 as u64),
        ("compressed, past the end", 1 << 62 | 1 << 40),
    ] {
        let broken = damaged(&image, |image| put(image, at.entry, &entry.to_be_bytes()));
        if name == "in the l1 table" {
            // From now on a write goes elsewhere, and not over what is there.
            let (actions, report) = survive(name, Format::Qcow2, &broken, RepairMode::Safe);
            assert_eq!(names(&actions), ["refcounts", "copied-flags"], "{name}");
            assert!(report.corruption_count > 0, "{name}");
        } else {
            untouched(name, Format::Qcow2, &broken, RepairMode::Leaks);
            untouched(name, Format::Qcow2, &broken, RepairMode::Safe);
        }
        mended(
            name,
            Format::Qcow2,
            &broken,
            RepairMode::All,
            &["given-up", "refcounts"],
        );
    }
    // Refcounts can go elsewhere, and then the data is alone.
    let entry = (flag | at.refcount_table as u64).to_be_bytes();
    let broken = damaged(&image, |image| put(image, at.entry, &entry));
    mended(
        "in the refcount table",
        Format::Qcow2,
        &broken,
        RepairMode::Safe,
        &["refcounts-rebuilt"],
    );
    let broken = damaged(&image, |image| put(image, at.l1, &(flag | 1 << 40).to_be_bytes()));
    untouched("a table past the end", Format::Qcow2, &broken, RepairMode::Safe);
    mended(
        "a table past the end",
        Format::Qcow2,
        &broken,
        RepairMode::All,
        &["given-up", "refcounts"],
    );
    // What is certain is mended also where something else is not; nothing is lowered there.
    let both = damaged(&broken, |image| image[at.refcount_block..at.refcount_block + 8].fill(0));
    let (actions, report) = survive(
        "a table past the end, and low counts",
        Format::Qcow2,
        &both,
        RepairMode::Safe,
    );
    let RepairAction::Refcounts {
        raised_count,
        lowered_count: 0,
    } = actions[0]
    else {
        panic!("{actions:?}");
    };
    assert!(raised_count > 0 && report.corruption_count > 0);
}

/// The footer lies over the table: that blocks are given up makes an end of it, which is mended in the same repair.
#[test]
fn what_a_repair_brings_to_light_is_mended_with_it() {
    let damaged = include_bytes!("fixtures/footer-in-table.vhd");
    let expected = ["rewritten", "given-up", "rewritten"];
    mended(
        "a footer in the table",
        Format::Vhd,
        damaged,
        RepairMode::All,
        &expected,
    );
}

#[test]
fn footers_of_a_vhd_are_written_from_their_copies() {
    let image = sample(Format::Vhd);
    let end = image.len();
    let safe = RepairMode::Safe;
    let no_end = damaged(&image, |image| image.truncate(end - 512));
    mended("no footer", Format::Vhd, &no_end, safe, &["rewritten"]);
    let bad_end = damaged(&image, |image| image[end - 300] ^= 1);
    mended("a damaged footer", Format::Vhd, &bad_end, safe, &["rewritten"]);
    let half = damaged(&image, |image| image.truncate(end - 100));
    mended("half a footer", Format::Vhd, &half, safe, &["rewritten"]);
    let bad_copy = damaged(&image, |image| image[70] ^= 1);
    mended("a damaged copy", Format::Vhd, &bad_copy, safe, &["rewritten"]);
    let sums = damaged(&image, |image| {
        image[64] ^= 1;
        image[end - 512 + 64] ^= 1;
    });
    untouched("both checksums", Format::Vhd, &sums, RepairMode::Leaks);
    mended("both checksums", Format::Vhd, &sums, safe, &["rewritten", "rewritten"]);
    let short = damaged(&image, |image| image.truncate(end - 1));
    mended("a footer of 511 bytes", Format::Vhd, &short, safe, &["number"]);
    let both = damaged(&image, |image| {
        image[100..300].fill(0xff);
        image[..8].fill(0);
        image[end - 512..].fill(0);
    });
    untouched("no footer at all", Format::Vhd, &both, RepairMode::All);
    let file = MemoryFile::default();
    vhd::create::write_empty(&file, &new_vhd(ImageKind::Fixed)).unwrap();
    let fixed = bytes_of(&file);
    let end = fixed.len();
    let short = damaged(&fixed, |image| image.truncate(end - 1));
    mended("fixed, 511 bytes", Format::Vhd, &short, safe, &["number"]);
    let sum = damaged(&fixed, |image| image[end - 512 + 64] ^= 1);
    mended("fixed, the checksum", Format::Vhd, &sum, safe, &["rewritten"]);
    let both = damaged(&short, |image| image[end - 512 + 64] ^= 1);
    mended("fixed, both", Format::Vhd, &both, safe, &["rewritten", "number"]);
    // What else is wrong is not hidden by a new checksum.
    let size = damaged(&fixed, |image| image[end - 512 + 54] ^= 1);
    untouched("fixed, the size", Format::Vhd, &size, RepairMode::All);
}

#[test]
fn blocks_of_a_vhd_are_given_up_or_copied_only_by_request() {
    let image = sample(Format::Vhd);
    let table = to_usize(be64(&image, 512 + 16));
    let stored: Vec<usize> = (table..table + 25 * 4)
        .step_by(4)
        .filter(|at| image[*at..*at + 4] != [0xff; 4])
        .collect();
    let (first, second) = (stored[0], stored[1]);
    let all = RepairMode::All;
    let past = damaged(&image, |image| put(image, first, &[0x10, 0, 0, 0]));
    untouched("past the end", Format::Vhd, &past, RepairMode::Safe);
    let (actions, report) = survive("past the end", Format::Vhd, &past, all);
    assert_eq!((names(&actions), report.corruption_count), (vec!["given-up"], 0));
    let twice = damaged(&image, |image| image.copy_within(first..first + 4, second));
    untouched("twice", Format::Vhd, &twice, RepairMode::Safe);
    let (actions, report) = survive("twice", Format::Vhd, &twice, all);
    assert_eq!((names(&actions), report.corruption_count), (vec!["separated"], 0));
    let cut = damaged(&image, |image| image.truncate(image.len() - 1536));
    let (actions, report) = survive("cut off", Format::Vhd, &cut, all);
    assert_eq!(
        (names(&actions), report.corruption_count),
        (vec!["rewritten", "given-up"], 0)
    );
}

#[test]
fn what_a_vhdx_has_twice_is_mended_from_its_twin() {
    let image = sample(Format::Vhdx);
    let kib = 1 << 10;
    for (name, at) in [
        ("the first header", 64),
        ("the second header", 128),
        ("the first regions", 192),
        ("the second regions", 256),
    ] {
        let broken = damaged(&image, |image| image[at * kib + 100] ^= 0x40);
        untouched(name, Format::Vhdx, &broken, RepairMode::Leaks);
        mended(name, Format::Vhdx, &broken, RepairMode::Safe, &["rewritten"]);
    }
    let both = damaged(&image, |image| {
        image[64 * kib + 100] ^= 0x40;
        image[128 * kib + 100] ^= 0x40;
    });
    untouched("both headers", Format::Vhdx, &both, RepairMode::All);
    // A log that the headers tell of, and that has nothing.
    let log = damaged(&image, |image| {
        for at in [64 * kib, 128 * kib] {
            image[at + 48..at + 64].fill(7);
        }
        vhdx::seal_all(image);
    });
    untouched("an unreadable log", Format::Vhdx, &log, RepairMode::Safe);
    mended(
        "an unreadable log",
        Format::Vhdx,
        &log,
        RepairMode::All,
        &["log-given-up"],
    );
    let opened = vhdx::header::Opened::load(memory(image.clone()), Access::Read, "image").unwrap();
    let entry = to_usize(opened.bat.offset);
    let past = damaged(&image, |image| put(image, entry, &(1_u64 << 40 | 6).to_le_bytes()));
    let (actions, report) = survive("a block past the end", Format::Vhdx, &past, RepairMode::All);
    assert_eq!((names(&actions), report.is_clean()), (vec!["given-up"], true));
    let strange = damaged(&image, |image| image[entry] = image[entry] & !7 | 5);
    untouched("a state that there is not", Format::Vhdx, &strange, RepairMode::Safe);
    mended(
        "a state that there is not",
        Format::Vhdx,
        &strange,
        RepairMode::All,
        &["given-up"],
    );
}

#[test]
fn a_vdi_counts_its_blocks_and_its_map_is_mended_by_request() {
    let image = sample(Format::Vdi);
    let map = u32::from_le_bytes(image[0x154..0x158].try_into().unwrap()) as usize;
    let stored: Vec<usize> = (map..map + 25 * 4)
        .step_by(4)
        .filter(|at| image[*at + 3] != 0xff)
        .collect();
    let low = damaged(&image, |image| put(image, 0x184, &[1, 0, 0, 0]));
    untouched("a low count", Format::Vdi, &low, RepairMode::Leaks);
    mended("a low count", Format::Vdi, &low, RepairMode::Safe, &["number"]);
    // VirtualBox does not open a disk with more of them than it has blocks; with fewer, it stores the next one far behind the end.
    for high in [24_u8, 200] {
        let image = damaged(&image, |image| put(image, 0x184, &[high, 0, 0, 0]));
        mended("a high count", Format::Vdi, &image, RepairMode::Safe, &["number"]);
    }
    let twice = damaged(&image, |image| image.copy_within(stored[0]..stored[0] + 4, stored[1]));
    untouched("twice", Format::Vdi, &twice, RepairMode::Safe);
    let (actions, report) = survive("twice", Format::Vdi, &twice, RepairMode::All);
    assert_eq!(
        (names(&actions), report.corruption_count),
        (vec!["number", "separated"], 0)
    );
    let past = damaged(&image, |image| put(image, stored[0], &[0, 0, 0, 0x10]));
    let (actions, report) = survive("past the end", Format::Vdi, &past, RepairMode::All);
    assert_eq!((names(&actions), report.corruption_count), (vec!["given-up"], 0));
}

#[test]
fn directories_of_a_vmdk_are_mended_from_each_other() {
    let image = sample(Format::Vmdk);
    let extent = vmdk::extent::SparseExtent::load(&MemoryFile::new(image.clone()), "image").unwrap();
    let safe = RepairMode::Safe;
    let (first, second) = (to_usize(extent.directory), to_usize(extent.second_directory.unwrap()));
    let le32 = |at: usize| u32::from_le_bytes(image[at..at + 4].try_into().unwrap());
    let tables = [first, second].map(|directory| to_usize(u64::from(le32(directory)) * 512));
    let entry = (0..25).find(|index| le32(tables[0] + index * 4) != 0).unwrap() * 4;
    let open = damaged(&image, |image| image[72] = 1);
    mended("not closed", Format::Vmdk, &open, safe, &["mark-cleared"]);
    // What lies in a grain is guest data: it is no table, and is not written over as one.
    let grain = le32(tables[0] + entry).to_le_bytes();
    for (name, directory) in [("the first", first), ("the second", second)] {
        let inside = damaged(&image, |image| put(image, directory, &grain));
        mended(
            &format!("{name}, in a grain"),
            Format::Vmdk,
            &inside,
            safe,
            &["from-twin"],
        );
    }
    let inside = damaged(&image, |image| put(image, 0x30, &grain));
    for mode in [safe, RepairMode::All] {
        untouched("the second directory in a grain", Format::Vmdk, &inside, mode);
    }
    for (name, side) in [("the first", 0), ("the second", 1)] {
        let directory = [first, second][side];
        let past = damaged(&image, |image| put(image, directory, &[0, 0, 0, 0x10]));
        mended(
            &format!("{name}, past the end"),
            Format::Vmdk,
            &past,
            safe,
            &["from-twin"],
        );
        let none = damaged(&image, |image| put(image, directory, &[0; 4]));
        let (actions, report) = repair(Format::Vmdk, &none, safe);
        assert_eq!(
            (names(&actions), report.is_clean()),
            (vec!["from-twin"], true),
            "{name}"
        );
        let lost = damaged(&image, |image| put(image, tables[side] + entry, &[0, 0, 0, 0x10]));
        mended(&format!("{name}, an entry"), Format::Vmdk, &lost, safe, &["from-twin"]);
    }
    let wiped = damaged(&image, |image| image[tables[0]..tables[0] + 512].fill(0));
    let (actions, report) = repair(Format::Vmdk, &wiped, safe);
    assert_eq!((names(&actions), report.is_clean()), (vec!["from-twin"], true));
    let both = damaged(&image, |image| {
        for table in tables {
            put(image, table + entry, &[0, 0, 0, 0x10]);
        }
    });
    untouched("an entry of both", Format::Vmdk, &both, safe);
    mended("an entry of both", Format::Vmdk, &both, RepairMode::All, &["given-up"]);
    let both = damaged(&image, |image| {
        put(image, first, &[0, 0, 0, 0x10]);
        put(image, second, &[0, 0, 0, 0x10]);
    });
    mended("both directories", Format::Vmdk, &both, RepairMode::All, &["given-up"]);
}

/// What was absent and is found again reads otherwise: this one does not ask.
fn repair(format: Format, damaged: &[u8], mode: RepairMode) -> (Vec<RepairAction>, CheckReport) {
    let file = memory(damaged.to_vec());
    let plan = Repair::plan(target(format, &file).unwrap(), mode).unwrap();
    let actions = plan.actions().to_vec();
    let report = plan.execute().unwrap();
    let sound = memory(sample(format));
    assert!(
        sectors(format, &file) == sectors(format, &sound),
        "something is still lost"
    );
    (actions, report)
}

#[test]
fn a_delta_is_closed_cut_and_mended_by_request() {
    let image = sample(Format::Parallels);
    let open = damaged(&image, |image| put(image, 44, &0x746f_6e59_u32.to_le_bytes()));
    untouched("not closed", Format::Parallels, &open, RepairMode::Leaks);
    mended(
        "not closed",
        Format::Parallels,
        &open,
        RepairMode::Safe,
        &["mark-cleared"],
    );
    let long = damaged(&image, |image| image.resize(image.len() + 3 * 4096, 9));
    mended("room at the end", Format::Parallels, &long, RepairMode::Leaks, &["cut"]);
    let extended = damaged(&long, |image| put(image, 56, &[1, 0, 0, 0, 0, 0, 0, 0]));
    untouched(
        "an extension, which may be there",
        Format::Parallels,
        &extended,
        RepairMode::Safe,
    );
    let stored: Vec<usize> = (64..64 + 25 * 4)
        .step_by(4)
        .filter(|at| image[*at..*at + 4] != [0; 4])
        .collect();
    let twice = damaged(&image, |image| image.copy_within(stored[0]..stored[0] + 4, stored[1]));
    untouched("twice", Format::Parallels, &twice, RepairMode::Safe);
    let (actions, report) = survive("twice", Format::Parallels, &twice, RepairMode::All);
    assert_eq!((names(&actions), report.corruption_count), (vec!["separated"], 0));
    let past = damaged(&image, |image| put(image, stored[0], &[0, 0, 0, 0x10]));
    let (actions, report) = survive("past the end", Format::Parallels, &past, RepairMode::All);
    assert_eq!((actions[0].name(), report.corruption_count), ("given-up", 0));
}

/// Bytes of the metadata become anything: nothing gets worse, what could be read still can, and there is nothing left to do.
#[test]
fn random_damage_never_gets_worse() {
    for format in FORMATS {
        let image = sample(format);
        let mut random = Random(format as u64);
        let mut mended_count = 0;
        for round in 0..250 {
            let broken = damaged(&image, |image| {
                for _ in 0..=random.below(3) {
                    let near = if random.below(3) == 0 { image.len() as u64 } else { 6000 };
                    let at = match (format, random.below(3)) {
                        // The headers, the table of blocks and the metadata.
                        (Format::Vhdx, 0) => (64 << 10) * (1 + random.below(4)) + random.below(200),
                        (Format::Vhdx, _) => (1 << 20) * (1 + random.below(3)) + random.below(200),
                        _ => random.below(near),
                    };
                    if let Some(byte) = image.get_mut(to_usize(at)) {
                        *byte = [0, 0xff, *byte ^ 1 << random.below(8)][to_usize(random.below(3))];
                    }
                }
                match format {
                    Format::Vhd if round % 2 == 0 => vhd::seal_all(image),
                    Format::Vhdx if round % 2 == 0 => vhdx::seal_all(image),
                    _ => {}
                }
            });
            for mode in [RepairMode::Leaks, RepairMode::Safe, RepairMode::All] {
                let what = format!("{format}, round {round}, {mode:?}");
                let file = memory(broken.clone());
                let Ok(opened) = target(format, &file) else { continue };
                let readable = sectors(format, &file);
                let plan = match Repair::plan(opened, mode) {
                    Ok(plan) => plan,
                    Err(error) => {
                        assert!(bytes_of(&*file) == broken, "{what}: {error}");
                        continue;
                    }
                };
                let (before, actions) = (plan.before().corruption_count, plan.actions().to_vec());
                let after = plan.execute().unwrap_or_else(|error| panic!("{what}: {error}"));
                assert!(after.corruption_count <= before, "{what}: {:?}", after.problems);
                assert!(
                    !actions.is_empty() || bytes_of(&*file) == broken,
                    "{what}: changed without a word"
                );
                mended_count += u64::from(!actions.is_empty());
                let again = Repair::plan(target(format, &file).unwrap(), mode).unwrap();
                assert_eq!(again.actions(), [], "{what}: once more, after {actions:?}");
                let is_changed = |action: &RepairAction| {
                    // What was lost is found again, and a footer that counts again may say another size.
                    action.loses_data() || matches!(action, RepairAction::FromTwin { .. })
                };
                if actions.iter().any(is_changed) || readable.is_empty() {
                    continue;
                }
                for (number, (before, now)) in readable.iter().zip(sectors(format, &file)).enumerate() {
                    assert!(
                        before.is_none() || *before == now,
                        "{what}: sector {number} after {actions:?}"
                    );
                }
            }
        }
        assert!(
            mended_count > 2,
            "{format}: {mended_count} of the damaged ones were mended"
        );
    }
}
