//! Internal snapshots: earlier states of the disk in the same file.
//!
//! Each row of the snapshot table, padded to 8 bytes:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | offset of the L1 table |
//! | 8 | 4 | entries of it |
//! | 12 | 2 | length of the id |
//! | 14 | 2 | length of the name |
//! | 16 | 8 | time taken: seconds, nanoseconds |
//! | 24 | 8 | run time of the machine in nanoseconds |
//! | 32 | 4 | bytes of machine state (old) |
//! | 36 | 4 | length of extra data |
//! | 40 | … | extra data: machine state bytes u64, disk size u64, instruction count i64; id; name |

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use holdfast_block::{Record, to_usize};

use super::header::{L1_BYTES_MAX, Qcow2Header};
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::rows;
use crate::model::qcow2_info::{InternalSnapshot, TableLocation};
use crate::{Error, Result};

const ROW_BYTES: u64 = 40;
/// QEMU's limits.
const SNAPSHOT_COUNT_MAX: u32 = 65_536;
const EXTRA_BYTES_MAX: u64 = 1024;
const TABLE_BYTES_MAX: u64 = 64 << 20;

/// Reads the snapshot table; returns its length in bytes, too.
pub(crate) fn load(file: &dyn ImageFile, header: &Qcow2Header, image: &str) -> Result<(Vec<InternalSnapshot>, u64)> {
    let table_at = header.snapshot_table_offset;
    let damaged = |offset: u64, detail: String| corrupt(image, "snapshot table", offset, detail);
    if header.snapshot_count == 0 {
        return Ok((Vec::new(), 0));
    }
    let file_bytes = file.length_bytes()?;
    if header.snapshot_count > SNAPSHOT_COUNT_MAX {
        return Err(damaged(60, format!("{} snapshots", header.snapshot_count)));
    }
    if !header.geometry.is_aligned(table_at) || table_at == 0 {
        return Err(damaged(table_at, "not at the start of a cluster".to_owned()));
    }
    let mut snapshots = Vec::new();
    let mut at = table_at;
    for _ in 0..header.snapshot_count {
        let mut row = [0; to_usize(ROW_BYTES)];
        // Each row is checked against the file: the count alone must not cause an allocation.
        let fits = |length: u64| at.checked_add(length).is_some_and(|end| end <= file_bytes);
        if !fits(ROW_BYTES) {
            return Err(damaged(at, "it extends past the end of the file".to_owned()));
        }
        file.read_at(&mut row, at)?;
        let fields = Record::new(&row);
        let id_bytes = u64::from(fields.be_u16::<12>());
        let name_bytes = u64::from(fields.be_u16::<14>());
        let extra_bytes = u64::from(fields.be_u32::<36>());
        let row_bytes = ROW_BYTES + extra_bytes + id_bytes + name_bytes;
        if extra_bytes > EXTRA_BYTES_MAX || !fits(row_bytes) || at - table_at + row_bytes > TABLE_BYTES_MAX {
            return Err(damaged(at, format!("row of {row_bytes} bytes")));
        }
        let mut rest = vec![0; to_usize(row_bytes - ROW_BYTES)];
        file.read_at(&mut rest, at + ROW_BYTES)?;
        let snapshot = parse_row(fields, &rest, header);
        check_row(&snapshot, header, file_bytes, image)?;
        snapshots.push(snapshot);
        at += row_bytes.next_multiple_of(8);
    }
    Ok((snapshots, at - table_at))
}

/// Parses a row; `rest` has its extra data, id and name.
fn parse_row(row: Record<'_, { to_usize(ROW_BYTES) }>, rest: &[u8], header: &Qcow2Header) -> InternalSnapshot {
    let (extra, names) = rest.split_at(row.be_u32::<36>() as usize);
    let (id, name) = names.split_at(usize::from(row.be_u16::<12>()));
    let mut numbers = rows(extra, 0).iter().map(|number| u64::from_be_bytes(*number));
    let (state_bytes, disk_bytes) = (numbers.next(), numbers.next());
    InternalSnapshot {
        id: String::from_utf8_lossy(id).into_owned(),
        name: String::from_utf8_lossy(name).into_owned(),
        created_seconds: row.be_u32::<16>(),
        created_nanoseconds: row.be_u32::<20>(),
        machine_time_ns: row.be_u64::<24>(),
        machine_state_bytes: state_bytes.unwrap_or_else(|| u64::from(row.be_u32::<32>())),
        disk_bytes: disk_bytes.unwrap_or(header.size_bytes),
        l1: TableLocation {
            offset: row.be_u64::<0>(),
            entries: u64::from(row.be_u32::<8>()),
        },
    }
}

fn check_row(snapshot: &InternalSnapshot, header: &Qcow2Header, file_bytes: u64, image: &str) -> Result<()> {
    // A snapshot without clusters may have no table.
    if snapshot.l1.entries * 8 > L1_BYTES_MAX || i64::try_from(snapshot.disk_bytes).is_err() {
        let detail = format!("snapshot {} of {} entries", snapshot.id, snapshot.l1.entries);
        return Err(corrupt(image, "l1 table", snapshot.l1.offset, detail));
    }
    header.check_l1(snapshot.l1, snapshot.disk_bytes, file_bytes, image)
}

/// The snapshot with the id `wanted`, or else with that name.
pub(crate) fn find<'a>(snapshots: &'a [InternalSnapshot], wanted: &str, image: &str) -> Result<&'a InternalSnapshot> {
    snapshots
        .iter()
        .find(|snapshot| snapshot.id == wanted)
        .or_else(|| snapshots.iter().find(|snapshot| snapshot.name == wanted))
        .ok_or_else(|| Error::NotFound {
            image: image.to_owned(),
            what: "snapshot",
            name: wanted.to_owned(),
        })
}
