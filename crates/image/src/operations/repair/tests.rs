//! Damages and repairs images of every format; a crash at any point leaves them no worse, and they can be repaired
//! again.

mod blocks;
mod qcow2;
mod samples;

use holdfast_block::to_usize;

use super::{Repair, RepairAction};
use crate::Format;
use crate::file::memory::Random;
use crate::formats::{vhd, vhdx};
use crate::model::repair_action::RepairMode;
use samples::{FORMATS, assert_repairs, bytes_of, damaged, memory, sample, sectors, target};

#[test]
fn consistent_image_is_not_changed() {
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

/// The footer overlaps the table: discarding blocks completes it, so it is repaired in the same run.
#[test]
fn repair_continues_with_revealed_damage() {
    let damaged = include_bytes!("fixtures/footer-in-table.vhd");
    let expected = ["rewritten", "entries-discarded", "rewritten"];
    assert_repairs(
        "a footer in the table",
        Format::Vhd,
        damaged,
        RepairMode::All,
        &expected,
    );
}

/// Random bytes in the metadata: a repair must make nothing worse, keep everything readable, and leave nothing to do.
#[test]
fn repair_of_random_damage_never_makes_it_worse() {
    for format in FORMATS {
        let image = sample(format);
        let mut random = Random(format as u64);
        let mut repaired_count = 0;
        for round in 0..250 {
            let broken = damaged(&image, |image| {
                for _ in 0..=random.below(3) {
                    let near = if random.below(3) == 0 { image.len() as u64 } else { 6000 };
                    let at = match (format, random.below(3)) {
                        // Headers, block table and metadata.
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
                    "{what}: changed without a reported action"
                );
                repaired_count += u64::from(!actions.is_empty());
                let again = Repair::plan(target(format, &file).unwrap(), mode).unwrap();
                assert_eq!(again.actions(), [], "{what}: a second repair, after {actions:?}");
                let is_changed = |action: &RepairAction| {
                    // A restored structure may make lost data readable, and a restored footer may store another size.
                    action.loses_data() || matches!(action, RepairAction::FromSecondCopy { .. })
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
            repaired_count > 2,
            "{format}: {repaired_count} of the damaged images were repaired"
        );
    }
}
