//! Repairs of VHD, VHDX, VDI, VMDK and Parallels images.

use holdfast_block::to_usize;

use super::super::Repair;
use super::samples::{
    assert_not_repairable, assert_repairs, be64, bytes_of, damaged, memory, names, new_vhd, put, repair, sample,
    survive, target,
};
use crate::Format;
use crate::file::Access;
use crate::file::memory::MemoryFile;
use crate::formats::{vhd, vhdx, vmdk};
use crate::model::info::ImageKind;
use crate::model::repair_action::RepairMode;

#[test]
fn vhd_footers_are_restored_from_their_copies() {
    let image = sample(Format::Vhd);
    let end = image.len();
    let safe = RepairMode::Safe;
    let no_end = damaged(&image, |image| image.truncate(end - 512));
    assert_repairs("no footer", Format::Vhd, &no_end, safe, &["rewritten"]);
    let bad_end = damaged(&image, |image| image[end - 300] ^= 1);
    assert_repairs("a damaged footer", Format::Vhd, &bad_end, safe, &["rewritten"]);
    let half = damaged(&image, |image| image.truncate(end - 100));
    assert_repairs("half a footer", Format::Vhd, &half, safe, &["rewritten"]);
    let bad_copy = damaged(&image, |image| image[70] ^= 1);
    assert_repairs("a damaged copy", Format::Vhd, &bad_copy, safe, &["rewritten"]);
    let sums = damaged(&image, |image| {
        image[64] ^= 1;
        image[end - 512 + 64] ^= 1;
    });
    assert_not_repairable("both checksums", Format::Vhd, &sums, RepairMode::Leaks);
    assert_repairs("both checksums", Format::Vhd, &sums, safe, &["rewritten", "rewritten"]);
    let short = damaged(&image, |image| image.truncate(end - 1));
    assert_repairs("a footer of 511 bytes", Format::Vhd, &short, safe, &["number"]);
    let both = damaged(&image, |image| {
        image[100..300].fill(0xff);
        image[..8].fill(0);
        image[end - 512..].fill(0);
    });
    assert_not_repairable("no footer at all", Format::Vhd, &both, RepairMode::All);
    let file = MemoryFile::default();
    vhd::create::write_empty(&file, &new_vhd(ImageKind::Fixed)).unwrap();
    let fixed = bytes_of(&file);
    let end = fixed.len();
    let short = damaged(&fixed, |image| image.truncate(end - 1));
    assert_repairs("fixed, 511 bytes", Format::Vhd, &short, safe, &["number"]);
    let sum = damaged(&fixed, |image| image[end - 512 + 64] ^= 1);
    assert_repairs("fixed, the checksum", Format::Vhd, &sum, safe, &["rewritten"]);
    let both = damaged(&short, |image| image[end - 512 + 64] ^= 1);
    assert_repairs("fixed, both", Format::Vhd, &both, safe, &["rewritten", "number"]);
    // A corrected checksum must not hide other damage.
    let size = damaged(&fixed, |image| image[end - 512 + 54] ^= 1);
    assert_not_repairable("fixed, the size", Format::Vhd, &size, RepairMode::All);
}

#[test]
fn vhd_blocks_are_discarded_or_copied_in_mode_all_only() {
    let image = sample(Format::Vhd);
    let table = to_usize(be64(&image, 512 + 16));
    let stored: Vec<usize> = (table..table + 25 * 4)
        .step_by(4)
        .filter(|at| image[*at..*at + 4] != [0xff; 4])
        .collect();
    let (first, second) = (stored[0], stored[1]);
    let all = RepairMode::All;
    let past = damaged(&image, |image| put(image, first, &[0x10, 0, 0, 0]));
    assert_not_repairable("past the end", Format::Vhd, &past, RepairMode::Safe);
    let (actions, report) = survive("past the end", Format::Vhd, &past, all);
    assert_eq!(
        (names(&actions), report.corruption_count),
        (vec!["entries-discarded"], 0)
    );
    let twice = damaged(&image, |image| image.copy_within(first..first + 4, second));
    assert_not_repairable("twice", Format::Vhd, &twice, RepairMode::Safe);
    let (actions, report) = survive("twice", Format::Vhd, &twice, all);
    assert_eq!((names(&actions), report.corruption_count), (vec!["separated"], 0));
    let cut = damaged(&image, |image| image.truncate(image.len() - 1536));
    let (actions, report) = survive("cut off", Format::Vhd, &cut, all);
    assert_eq!(
        (names(&actions), report.corruption_count),
        (vec!["rewritten", "entries-discarded"], 0)
    );
}

#[test]
fn vhdx_structures_are_restored_from_their_copies() {
    let image = sample(Format::Vhdx);
    let kib = 1 << 10;
    for (name, at) in [
        ("the first header", 64),
        ("the second header", 128),
        ("the first regions", 192),
        ("the second regions", 256),
    ] {
        let broken = damaged(&image, |image| image[at * kib + 100] ^= 0x40);
        assert_not_repairable(name, Format::Vhdx, &broken, RepairMode::Leaks);
        assert_repairs(name, Format::Vhdx, &broken, RepairMode::Safe, &["rewritten"]);
    }
    let both = damaged(&image, |image| {
        image[64 * kib + 100] ^= 0x40;
        image[128 * kib + 100] ^= 0x40;
    });
    assert_not_repairable("both headers", Format::Vhdx, &both, RepairMode::All);
    // The headers refer to an empty log.
    let log = damaged(&image, |image| {
        for at in [64 * kib, 128 * kib] {
            image[at + 48..at + 64].fill(7);
        }
        vhdx::seal_all(image);
    });
    assert_not_repairable("an unreadable log", Format::Vhdx, &log, RepairMode::Safe);
    assert_repairs(
        "an unreadable log",
        Format::Vhdx,
        &log,
        RepairMode::All,
        &["log-discarded"],
    );
    let opened = vhdx::opened::OpenedVhdx::load(memory(image.clone()), Access::Read, "image").unwrap();
    let entry = to_usize(opened.bat.offset);
    let past = damaged(&image, |image| put(image, entry, &(1_u64 << 40 | 6).to_le_bytes()));
    let (actions, report) = survive("a block past the end", Format::Vhdx, &past, RepairMode::All);
    assert_eq!((names(&actions), report.is_clean()), (vec!["entries-discarded"], true));
    let bad_state = damaged(&image, |image| image[entry] = image[entry] & !7 | 5);
    assert_not_repairable("a state that there is not", Format::Vhdx, &bad_state, RepairMode::Safe);
    assert_repairs(
        "a state that there is not",
        Format::Vhdx,
        &bad_state,
        RepairMode::All,
        &["entries-discarded"],
    );
}

#[test]
fn vdi_repairs() {
    let image = sample(Format::Vdi);
    let map = u32::from_le_bytes(image[0x154..0x158].try_into().unwrap()) as usize;
    let stored: Vec<usize> = (map..map + 25 * 4)
        .step_by(4)
        .filter(|at| image[*at + 3] != 0xff)
        .collect();
    let low = damaged(&image, |image| put(image, 0x184, &[1, 0, 0, 0]));
    assert_not_repairable("a low count", Format::Vdi, &low, RepairMode::Leaks);
    assert_repairs("a low count", Format::Vdi, &low, RepairMode::Safe, &["number"]);
    // VirtualBox does not open a disk with a count above the number of blocks; with a lower one, it stores the next
    // block far past the end.
    for high in [24_u8, 200] {
        let image = damaged(&image, |image| put(image, 0x184, &[high, 0, 0, 0]));
        assert_repairs("a high count", Format::Vdi, &image, RepairMode::Safe, &["number"]);
    }
    let twice = damaged(&image, |image| image.copy_within(stored[0]..stored[0] + 4, stored[1]));
    assert_not_repairable("twice", Format::Vdi, &twice, RepairMode::Safe);
    let (actions, report) = survive("twice", Format::Vdi, &twice, RepairMode::All);
    assert_eq!(
        (names(&actions), report.corruption_count),
        (vec!["number", "separated"], 0)
    );
    let past = damaged(&image, |image| put(image, stored[0], &[0, 0, 0, 0x10]));
    let (actions, report) = survive("past the end", Format::Vdi, &past, RepairMode::All);
    assert_eq!(
        (names(&actions), report.corruption_count),
        (vec!["entries-discarded"], 0)
    );
}

#[test]
fn vmdk_directories_are_restored_from_each_other() {
    let image = sample(Format::Vmdk);
    let extent = vmdk::extent::SparseExtent::load(&MemoryFile::new(image.clone()), "image").unwrap();
    let safe = RepairMode::Safe;
    let (first, second) = (to_usize(extent.directory), to_usize(extent.second_directory.unwrap()));
    let le32 = |at: usize| u32::from_le_bytes(image[at..at + 4].try_into().unwrap());
    let tables = [first, second].map(|directory| to_usize(u64::from(le32(directory)) * 512));
    let entry = (0..25).find(|index| le32(tables[0] + index * 4) != 0).unwrap() * 4;
    let open = damaged(&image, |image| image[72] = 1);
    assert_repairs("not closed", Format::Vmdk, &open, safe, &["mark-cleared"]);
    // Metadata that overlaps a grain is guest data: it is not a table, and must not be overwritten.
    let grain = le32(tables[0] + entry).to_le_bytes();
    for (name, directory) in [("the first", first), ("the second", second)] {
        let inside = damaged(&image, |image| put(image, directory, &grain));
        assert_repairs(
            &format!("{name}, in a grain"),
            Format::Vmdk,
            &inside,
            safe,
            &["from-second-copy"],
        );
    }
    let inside = damaged(&image, |image| put(image, 0x30, &grain));
    for mode in [safe, RepairMode::All] {
        assert_not_repairable("the second directory in a grain", Format::Vmdk, &inside, mode);
    }
    for (name, side) in [("the first", 0), ("the second", 1)] {
        let directory = [first, second][side];
        let past = damaged(&image, |image| put(image, directory, &[0, 0, 0, 0x10]));
        assert_repairs(
            &format!("{name}, past the end"),
            Format::Vmdk,
            &past,
            safe,
            &["from-second-copy"],
        );
        let none = damaged(&image, |image| put(image, directory, &[0; 4]));
        let (actions, report) = repair(Format::Vmdk, &none, safe);
        assert_eq!(
            (names(&actions), report.is_clean()),
            (vec!["from-second-copy"], true),
            "{name}"
        );
        let lost = damaged(&image, |image| put(image, tables[side] + entry, &[0, 0, 0, 0x10]));
        assert_repairs(
            &format!("{name}, an entry"),
            Format::Vmdk,
            &lost,
            safe,
            &["from-second-copy"],
        );
    }
    let wiped = damaged(&image, |image| image[tables[0]..tables[0] + 512].fill(0));
    let (actions, report) = repair(Format::Vmdk, &wiped, safe);
    assert_eq!((names(&actions), report.is_clean()), (vec!["from-second-copy"], true));
    let both = damaged(&image, |image| {
        for table in tables {
            put(image, table + entry, &[0, 0, 0, 0x10]);
        }
    });
    assert_not_repairable("an entry of both", Format::Vmdk, &both, safe);
    assert_repairs(
        "an entry of both",
        Format::Vmdk,
        &both,
        RepairMode::All,
        &["entries-discarded"],
    );
    let both = damaged(&image, |image| {
        put(image, first, &[0, 0, 0, 0x10]);
        put(image, second, &[0, 0, 0, 0x10]);
    });
    assert_repairs(
        "both directories",
        Format::Vmdk,
        &both,
        RepairMode::All,
        &["entries-discarded"],
    );
    // The file must not grow to where the header says that the second directory is, and no grain may be overwritten.
    for (name, place) in [
        ("past the end", 1_u64 << 51),
        ("in a grain", u64::from(le32(tables[0] + entry))),
    ] {
        let lost = damaged(&image, |image| {
            put(image, 0x30, &place.to_le_bytes());
            put(image, first, &[0, 0, 0, 0x10]);
        });
        let file = memory(lost.clone());
        let plan = Repair::plan(target(Format::Vmdk, &file).unwrap(), RepairMode::All).unwrap();
        assert_eq!(names(plan.actions()), ["entries-discarded"], "{name}");
        plan.execute().unwrap();
        let expected = damaged(&lost, |image| put(image, first, &[0; 4]));
        assert!(bytes_of(&*file) == expected, "a second directory {name} was written");
    }
}

#[test]
fn ploop_repairs() {
    let image = sample(Format::Parallels);
    let open = damaged(&image, |image| put(image, 44, &0x746f_6e59_u32.to_le_bytes()));
    assert_not_repairable("not closed", Format::Parallels, &open, RepairMode::Leaks);
    assert_repairs(
        "not closed",
        Format::Parallels,
        &open,
        RepairMode::Safe,
        &["mark-cleared"],
    );
    let long = damaged(&image, |image| image.resize(image.len() + 3 * 4096, 9));
    assert_repairs(
        "room at the end",
        Format::Parallels,
        &long,
        RepairMode::Leaks,
        &["truncated"],
    );
    let extended = damaged(&long, |image| put(image, 56, &[1, 0, 0, 0, 0, 0, 0, 0]));
    assert_not_repairable(
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
    assert_not_repairable("twice", Format::Parallels, &twice, RepairMode::Safe);
    let (actions, report) = survive("twice", Format::Parallels, &twice, RepairMode::All);
    assert_eq!((names(&actions), report.corruption_count), (vec!["separated"], 0));
    let past = damaged(&image, |image| put(image, stored[0], &[0, 0, 0, 0x10]));
    let (actions, report) = survive("past the end", Format::Parallels, &past, RepairMode::All);
    assert_eq!((actions[0].name(), report.corruption_count), ("entries-discarded", 0));
}
