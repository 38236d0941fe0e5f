//! Repairs of qcow2 images.

use super::super::{Repair, RepairAction};
use super::samples::{
    Damage, Places, assert_not_repairable, assert_repairs, be64, bytes_of, damaged, memory, names, places, put, sample,
    sample_qcow2, sectors, survive, target,
};
use crate::model::create_options::Qcow2Options;
use crate::model::repair_action::RepairMode;
use crate::{Format, ProblemKind};

#[test]
fn qcow2_refcounts_are_corrected() {
    let image = sample(Format::Qcow2);
    let at = places(&image);
    let count_of = |cluster: usize| at.refcount_block + cluster * 2;
    let end = image.len() / 512;
    let leak = damaged(&image, |image| {
        image.resize((end + 3) * 512, 0xaa);
        put(image, count_of(end + 1), &[0, 1]);
        put(image, count_of(at.data), &[0, 3]);
        // The flag that QEMU would set for three references.
        image[at.entry] &= 0x7f;
    });
    assert_repairs(
        "leaks",
        Format::Qcow2,
        &leak,
        RepairMode::Leaks,
        &["refcounts", "copied-flags"],
    );
    assert_repairs(
        "leaks",
        Format::Qcow2,
        &leak,
        RepairMode::Safe,
        &["refcounts", "copied-flags"],
    );
    let low = damaged(&image, |image| {
        image[at.refcount_block..at.refcount_block + 512].fill(0);
    });
    assert_not_repairable(
        "too low, and only leaks are repaired",
        Format::Qcow2,
        &low,
        RepairMode::Leaks,
    );
    assert_repairs("too low", Format::Qcow2, &low, RepairMode::Safe, &["refcounts"]);
    let flags = damaged(&image, |image| {
        image[at.l1] &= 0x7f;
        image[at.entry] &= 0x7f;
    });
    assert_repairs(
        "flags that are missing",
        Format::Qcow2,
        &flags,
        RepairMode::Safe,
        &["copied-flags"],
    );
    let marked = damaged(&low, |image| put(image, 79, &[3]));
    assert_repairs(
        "marks",
        Format::Qcow2,
        &marked,
        RepairMode::Safe,
        &["refcounts", "mark-cleared", "mark-cleared"],
    );
}

/// Further entries of the first L2 table with data, after [`Places::entry`].
fn other_entries(image: &[u8], at: &Places, step: usize) -> Vec<usize> {
    let others = (at.entry + step..at.l2 + 512).step_by(step);
    others
        .filter(|other| be64(image, *other) & 0x00ff_ffff_ffff_fe00 != 0)
        .collect()
}

/// A repair counted two references, stored that refcount, and freed the unreferenced cluster, which contained
/// the data.
#[test]
fn qcow2_shared_clusters_are_copied_in_mode_all_only() {
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
        assert_not_repairable(&name, Format::Qcow2, &shared, RepairMode::Leaks);
        // Two references do not fit into one bit.
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
        // The state after such a repair.
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
            assert!(sectors(Format::Qcow2, &file) == before, "{name}: the disk differs");
        }
    }
}

#[test]
fn qcow2_reserved_bits_are_cleared_in_mode_all_only() {
    let image = sample(Format::Qcow2);
    let at = places(&image);
    let flipped = damaged(&image, |image| {
        image[at.l1 + 7] ^= 8;
        image[at.entry] ^= 0x10;
        image[at.entry + 7] ^= 8;
    });
    assert_not_repairable("reserved bits", Format::Qcow2, &flipped, RepairMode::Safe);
    assert_repairs(
        "reserved bits",
        Format::Qcow2,
        &flipped,
        RepairMode::All,
        &["reserved-bits"],
    );
    assert!(sectors(Format::Qcow2, &memory(flipped)) == sectors(Format::Qcow2, &memory(image)));
}

#[test]
fn shared_l2_table_is_copied_with_its_clusters() {
    let image = sample(Format::Qcow2);
    let at = places(&image);
    let shared = damaged(&image, |image| image.copy_within(at.l1..at.l1 + 8, at.l1 + 8));
    assert_not_repairable("one table, twice", Format::Qcow2, &shared, RepairMode::Leaks);
    let (_, report) = survive("one table, twice", Format::Qcow2, &shared, RepairMode::Safe);
    assert!(report.corruption_count > 0 && report.leak_count > 0);
    let (actions, report) = survive("one table, twice", Format::Qcow2, &shared, RepairMode::All);
    assert_eq!(names(&actions), ["separated", "separated", "refcounts"]);
    assert_eq!(report.problems, []);
    // With unusable refcounts, too.
    let both = damaged(&shared, |image| put(image, at.refcount_table, &[0; 8]));
    assert_not_repairable("and no refcounts", Format::Qcow2, &both, RepairMode::Safe);
    let cluster = damaged(&image, |image| {
        let other = other_entries(image, &at, 8)[0];
        image.copy_within(at.entry..at.entry + 8, other);
        put(image, at.refcount_table, &[0; 8]);
    });
    assert_not_repairable("and no refcounts", Format::Qcow2, &cluster, RepairMode::Safe);
    let (actions, report) = survive("and no refcounts", Format::Qcow2, &cluster, RepairMode::All);
    assert_eq!(names(&actions), ["refcounts-rebuilt", "separated"]);
    assert_eq!(report.problems, []);
}

#[test]
fn unusable_refcounts_are_rebuilt() {
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
            assert_not_repairable(&name, Format::Qcow2, &broken, RepairMode::Leaks);
            assert_repairs(&name, Format::Qcow2, &broken, RepairMode::Safe, &["refcounts-rebuilt"]);
        }
    }
}

#[test]
fn qcow2_invalid_entries_are_discarded_in_mode_all_only() {
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
            // A write now uses another cluster.
            let (actions, report) = survive(name, Format::Qcow2, &broken, RepairMode::Safe);
            assert_eq!(names(&actions), ["refcounts", "copied-flags"], "{name}");
            assert!(report.corruption_count > 0, "{name}");
        } else {
            assert_not_repairable(name, Format::Qcow2, &broken, RepairMode::Leaks);
            assert_not_repairable(name, Format::Qcow2, &broken, RepairMode::Safe);
        }
        assert_repairs(
            name,
            Format::Qcow2,
            &broken,
            RepairMode::All,
            &["entries-discarded", "refcounts"],
        );
    }
    // Refcounts can be moved; then the data is not shared any more.
    let entry = (flag | at.refcount_table as u64).to_be_bytes();
    let broken = damaged(&image, |image| put(image, at.entry, &entry));
    assert_repairs(
        "in the refcount table",
        Format::Qcow2,
        &broken,
        RepairMode::Safe,
        &["refcounts-rebuilt"],
    );
    let broken = damaged(&image, |image| put(image, at.l1, &(flag | 1 << 40).to_be_bytes()));
    assert_not_repairable("a table past the end", Format::Qcow2, &broken, RepairMode::Safe);
    assert_repairs(
        "a table past the end",
        Format::Qcow2,
        &broken,
        RepairMode::All,
        &["entries-discarded", "refcounts"],
    );
    // Unambiguous damage is repaired even if other damage is ambiguous; no refcount is lowered then.
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
