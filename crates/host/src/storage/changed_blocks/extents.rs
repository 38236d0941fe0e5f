//! Changes of a file, by the physical addresses of its extents (FIEMAP).
//!
//! # Correctness
//!
//! At one point in time, a block of the file system has one content. If both files map the same byte to the same
//! address *at one point in time*, that byte is equal in both. Both files are snapshots, which are never written, so
//! it stays equal. Nothing else is concluded. The two files need not have a common history.
//!
//! So a byte counts as unchanged only if it is a hole in both files (or allocated and never written, which reads as
//! zero), or if both files map it to the same address in a form in which the address determines the content.
//!
//! # When addresses mislead
//!
//! | case | what the kernel reports | what is done |
//! |---|---|---|
//! | data still in memory | `DELALLOC`, `UNKNOWN`, address 0; or the old address, before the write | `FIEMAP_FLAG_SYNC` writes it first; what still has these flags is changed |
//! | compressed (btrfs) | `ENCODED`; the address of the whole compressed extent, whatever part of it is used | changed: two parts of one extent look the same |
//! | inline, tails | `INLINE`, `NOT_ALIGNED`, `DATA_TAIL`, address 0 | changed |
//! | encrypted | `DATA_ENCRYPTED` | changed: the address determines the content only together with a key |
//! | allocated, not written | `UNWRITTEN`; the same address later, when written in place | reads as zero, whatever the address; against a written one it is changed |
//! | any unknown flag | | changed |
//! | the file has grown | | the part after the old end is changed |
//! | moved during the comparison (balance, defragmentation) | one file is queried before, the other after the move, and the old address is in use again | each window is queried in the order before, after, before; if the first and third answer differ, it is repeated, and finally changed |
//! | moved earlier, deduplicated | other addresses, or shared ones | nothing special: other addresses are changed, shared ones are equal |
//! | blocks reused after the removal of a snapshot | | impossible: both files are open, and keep their blocks |
//! | overwritten in place (nodatacow; a reflink whose clone was removed) | | impossible: blocks shared by two files are never written in place; the live file must not be passed |
//! | several devices | btrfs has one address space over all of them; XFS begins at 0 again on its realtime device | files of the realtime device are refused |
//! | other file systems | | refused, by their type: they were not examined |
//!
//! The kernel does not report that a file is a snapshot. A change of its size or of one of its times is noticed.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;

use rustix::io::Errno;

use super::error::{ExtentError, Result};
use super::fiemap;
use super::fiemap::{EXTENT_COUNT_MAX, Extent};
use super::ranges::{ChangedRanges, Collector};
use crate::storage::file_system;

/// Allocated but not written; reads as zero.
const UNWRITTEN: u32 = 0x800;
/// Flags without a meaning for the content: last extent, merged extent, shared extent.
const IGNORED_FLAGS: u32 = 0x1 | 0x1000 | 0x2000;

/// Attempts for a window whose extents move.
const TRY_COUNT: usize = 4;

/// The changes between two files, by their extents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtentChanges {
    /// The ranges in which the files may differ.
    pub ranges: ChangedRanges,
    /// Bytes of the newer file that are neither holes nor unwritten extents.
    pub mapped_bytes: u64,
    /// Bytes of either file whose address does not determine the content, mainly compressed ones; they count as
    /// changed.
    pub ambiguous_bytes: u64,
}

/// Compares the extents of two snapshots of a file, `before` being the older one.
///
/// Both must be snapshots that are never written, on one file system, and must stay open and unmodified until the
/// function returns.
pub fn by_extents(before: &File, after: &File) -> Result<ExtentChanges> {
    check_comparable(before, after)?;
    let stamps = (stamp(before)?, stamp(after)?);
    let mapped = |map, stamp: &FileTimes| MappedFile {
        map,
        size_bytes: stamp.size_bytes,
    };
    let changes = compare(&mapped(before, &stamps.0), &mapped(after, &stamps.1))?;
    for (file, stamp_then, which) in [(before, &stamps.0, "older"), (after, &stamps.1, "newer")] {
        if stamp(file)? != *stamp_then {
            return Err(ExtentError::Written { which });
        }
    }
    Ok(changes)
}

/// Refuses two files whose addresses are not comparable.
fn check_comparable(before: &File, after: &File) -> Result<()> {
    let failed = |action| move |errno: Errno| io(action, errno);
    let [first, second] = [before, after].map(|file| {
        let metadata = file.metadata().map_err(|source| ExtentError::Io {
            action: "read the metadata of a file",
            source,
        })?;
        let found = rustix::fs::fstatfs(file).map_err(failed("query the type of a file system"))?;
        Ok((metadata, file_system::number_of(&found)))
    });
    let ((first, magic), (second, other_magic)) = (first?, second?);
    if !first.is_file() || !second.is_file() {
        return Err(ExtentError::Unusable {
            reason: "one of them is not a regular file",
        });
    }
    if magic != other_magic {
        return Err(ExtentError::Unusable {
            reason: "they are on different file systems",
        });
    }
    if (first.dev(), first.ino()) == (second.dev(), second.ino()) {
        return Err(ExtentError::Unusable {
            reason: "they are the same file",
        });
    }
    let is_one_file_system = match magic {
        file_system::XFS => {
            let ask = failed("query the device of a file");
            if fiemap::is_realtime(before).map_err(ask)? || fiemap::is_realtime(after).map_err(ask)? {
                return Err(ExtentError::Unusable {
                    reason: "one of them is on a realtime device",
                });
            }
            first.dev() == second.dev()
        }
        file_system::BTRFS => {
            let ask = failed("query the UUID of a file system");
            fiemap::btrfs_id(before).map_err(ask)? == fiemap::btrfs_id(after).map_err(ask)?
        }
        magic => return Err(ExtentError::FileSystem { magic }),
    };
    if is_one_file_system {
        Ok(())
    } else {
        Err(ExtentError::Unusable {
            reason: "they are on different file systems",
        })
    }
}

pub(super) fn io(action: &'static str, errno: Errno) -> ExtentError {
    ExtentError::Io {
        action,
        source: errno.into(),
    }
}

/// Properties that change when a file is written.
#[derive(Debug, PartialEq, Eq)]
struct FileTimes {
    size_bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

fn stamp(file: &File) -> Result<FileTimes> {
    let metadata = file.metadata().map_err(|source| ExtentError::Io {
        action: "read the metadata of a file",
        source,
    })?;
    Ok(FileTimes {
        size_bytes: metadata.len(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
    })
}

/// A source of extents.
trait ExtentMap {
    /// The first extents that end after `start`, at most [`EXTENT_COUNT_MAX`]. If fewer are returned, there are no
    /// more.
    fn extents(&self, start: u64) -> Result<Vec<Extent>>;
}

impl ExtentMap for &File {
    fn extents(&self, start: u64) -> Result<Vec<Extent>> {
        fiemap::extents(self, start).map_err(|errno| io("query the extents of a file", errno))
    }
}

/// The address of a run of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExtentAddress {
    /// No address: the run reads as zero.
    Zero,
    /// The address of the first byte.
    At(u64),
    /// An address that does not determine the content.
    Ambiguous,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    end: u64,
    place: ExtentAddress,
}

/// The addresses of a file from `start` to the end of the last run: in order, without gaps.
#[derive(Debug, PartialEq, Eq)]
struct Window {
    start: u64,
    runs: Vec<Run>,
}

/// A file whose extents can be queried.
struct MappedFile<M> {
    map: M,
    size_bytes: u64,
}

fn compare(before: &MappedFile<impl ExtentMap>, after: &MappedFile<impl ExtentMap>) -> Result<ExtentChanges> {
    let (size_before, size_after) = (before.size_bytes, after.size_bytes);
    let (before, after) = (&before.map, &after.map);
    let mut differences = Differences {
        changed: Collector::new(size_after),
        mapped_bytes: 0,
        ambiguous_bytes: 0,
    };
    let common = size_before.min(size_after);
    let mut offset = 0;
    while offset < common {
        offset = differences.next_window(before, after, offset..common)?;
    }
    differences.changed.add(common..size_after);
    while offset < size_after {
        let rest = Window::ask(after, offset..size_after)?;
        offset = rest.end();
        differences.count(&rest);
    }
    Ok(ExtentChanges {
        ranges: differences.changed.finish(),
        mapped_bytes: differences.mapped_bytes,
        ambiguous_bytes: differences.ambiguous_bytes,
    })
}

struct Differences {
    changed: Collector,
    mapped_bytes: u64,
    ambiguous_bytes: u64,
}

impl Differences {
    /// Compares from the start of `range` as far as one query per file reaches, and returns the end.
    fn next_window(&mut self, before: &impl ExtentMap, after: &impl ExtentMap, range: Range<u64>) -> Result<u64> {
        let mut end = range.end;
        for _ in 0..TRY_COUNT {
            let mut old = Window::ask(before, range.clone())?;
            let mut new = Window::ask(after, range.clone())?;
            let mut again = Window::ask(before, range.clone())?;
            end = old.end().min(new.end()).min(again.end());
            old.cut(end);
            new.cut(end);
            again.cut(end);
            if old == again {
                self.count(&new);
                self.add(&old, &new);
                return Ok(end);
            }
        }
        self.changed.add(range.start..end);
        self.ambiguous_bytes += end - range.start;
        Ok(end)
    }

    fn count(&mut self, new: &Window) {
        let mut start = new.start;
        for run in &new.runs {
            self.mapped_bytes += if run.place == ExtentAddress::Zero {
                0
            } else {
                run.end - start
            };
            start = run.end;
        }
    }

    /// Compares two windows of the same range.
    fn add(&mut self, old: &Window, new: &Window) {
        let mut at = old.start;
        let (mut old_runs, mut new_runs) = (old.runs.iter().peekable(), new.runs.iter().peekable());
        let (mut old_start, mut new_start) = (at, at);
        while let (Some(old_run), Some(new_run)) = (old_runs.peek(), new_runs.peek()) {
            let end = old_run.end.min(new_run.end);
            let is_same = match (old_run.place, new_run.place) {
                (ExtentAddress::Zero, ExtentAddress::Zero) => true,
                // The sums were checked when the runs were created.
                (ExtentAddress::At(old), ExtentAddress::At(new)) => old + (at - old_start) == new + (at - new_start),
                _ => false,
            };
            if !is_same {
                self.changed.add(at..end);
            }
            if old_run.place == ExtentAddress::Ambiguous || new_run.place == ExtentAddress::Ambiguous {
                self.ambiguous_bytes += end - at;
            }
            at = end;
            if old_runs.next_if(|run| run.end == end).is_some() {
                old_start = end;
            }
            if new_runs.next_if(|run| run.end == end).is_some() {
                new_start = end;
            }
        }
    }
}

impl Window {
    /// Queries the addresses of `range`; the answer covers a part of it from its start.
    fn ask(places: &impl ExtentMap, range: Range<u64>) -> Result<Self> {
        let extents = places.extents(range.start)?;
        let is_all = extents.len() < EXTENT_COUNT_MAX;
        let mut window = Self {
            start: range.start,
            runs: Vec::with_capacity(extents.len()),
        };
        for extent in &extents {
            window.push(extent, range.end)?;
        }
        if is_all {
            window.fill(range.end);
        }
        if window.end() <= range.start {
            return Err(invalid(range.start, "an extent before the queried range"));
        }
        Ok(window)
    }

    fn end(&self) -> u64 {
        self.runs.last().map_or(self.start, |run| run.end)
    }

    /// Adds an extent, as far as it is in the window and before `limit`.
    fn push(&mut self, extent: &Extent, limit: u64) -> Result<()> {
        let at = self.end();
        let sums = (
            extent.logical.checked_add(extent.length),
            extent.physical.checked_add(extent.length),
        );
        let (Some(end), Some(_)) = sums else {
            return Err(invalid(extent.logical, "an extent without an end"));
        };
        // Only the first extent may begin before the queried range.
        if extent.logical < at && !self.runs.is_empty() && at < limit {
            return Err(invalid(extent.logical, "overlapping extents"));
        }
        let start = extent.logical.max(at);
        self.fill(start.min(limit));
        let end = end.min(limit);
        if start >= end {
            return Ok(());
        }
        let place = match extent.flags & !IGNORED_FLAGS {
            0 => ExtentAddress::At(extent.physical + (start - extent.logical)),
            UNWRITTEN => ExtentAddress::Zero,
            _ => ExtentAddress::Ambiguous,
        };
        self.extend(end, place);
        Ok(())
    }

    /// Adds a hole up to `end`.
    fn fill(&mut self, end: u64) {
        if end > self.end() {
            self.extend(end, ExtentAddress::Zero);
        }
    }

    /// Adds a run; a run that continues the last one is merged with it, so that windows with equal content are equal.
    fn extend(&mut self, end: u64, place: ExtentAddress) {
        let before_last = self.runs.len().checked_sub(2).map(|index| self.runs[index].end);
        let last_start = before_last.unwrap_or(self.start);
        match self.runs.last_mut() {
            Some(last) if continues(last_start, *last, place) => last.end = end,
            _ => self.runs.push(Run { end, place }),
        }
    }

    /// Removes everything from `end` on.
    fn cut(&mut self, end: u64) {
        let mut start = self.start;
        self.runs.retain_mut(|run| {
            let is_within = start < end;
            start = run.end;
            run.end = run.end.min(end);
            is_within
        });
    }
}

fn continues(start: u64, last: Run, place: ExtentAddress) -> bool {
    match (last.place, place) {
        (ExtentAddress::Zero, ExtentAddress::Zero) | (ExtentAddress::Ambiguous, ExtentAddress::Ambiguous) => true,
        (ExtentAddress::At(address), ExtentAddress::At(next)) => address + (last.end - start) == next,
        _ => false,
    }
}

fn invalid(offset: u64, detail: &'static str) -> ExtentError {
    ExtentError::Invalid { offset, detail }
}

#[cfg(test)]
mod tests;
