//! Clears reserved bits of table entries: other programs may give them a meaning, or refuse the image.

use holdfast_block::to_usize;

use super::check::Checker;
use super::clear_invalid::{L1Table, l1_tables};
use super::entry::L1_RESERVED;
use super::geometry::POINTER_BYTES;
use super::header::Qcow2Header;
use super::mapping::{entry_in, read_l2_as_is};
use crate::Result;
use crate::file::ImageFile;
use crate::model::bytes::to_words;
use crate::model::mapped_extent::KnownLength;
use crate::model::repair_action::RepairAction;

/// Clears the reserved bits of all L1 and L2 tables, including those of snapshots.
pub(super) fn clear(
    file: &dyn ImageFile,
    header: &Qcow2Header,
    uses: &Checker<'_>,
    image: &str,
    actions: &mut Vec<RepairAction>,
) -> Result<()> {
    let geometry = header.geometry;
    let mut count = 0;
    let mut clear = |word: u64, reserved: u64, place: u64| -> Result<()> {
        if reserved != 0 {
            file.write_at(&(word & !reserved).to_be_bytes(), place)?;
            count += 1;
        }
        Ok(())
    };
    for L1Table { location, .. } in l1_tables(file, header, image)? {
        let mut bytes = vec![0; to_usize(location.entries * POINTER_BYTES)];
        file.read_at(&mut bytes, location.offset)?;
        for (index, word) in (0..).zip(to_words(&bytes)) {
            clear(word, word & L1_RESERVED, location.offset + index * POINTER_BYTES)?;
        }
    }
    let known = KnownLength::default();
    for offset in uses.l2_tables.keys() {
        let table = read_l2_as_is(file, &known, geometry, *offset, image)?;
        for index in 0..geometry.l2_entries() {
            let entry = entry_in(&table, index, geometry);
            let place = offset + index * geometry.l2_entry_words() * POINTER_BYTES;
            clear(entry.word, entry.reserved(geometry), place)?;
        }
    }
    file.sync()?;
    if count > 0 {
        actions.push(RepairAction::ReservedBits { count });
    }
    Ok(())
}
