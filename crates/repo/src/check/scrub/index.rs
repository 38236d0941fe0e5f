//! Reads the whole index, and compares it with the directories of packs.
//!
//! Entries are sorted by chunk, directories by position. Both are therefore summed up per pack, independent of order:
//! if sums and counts agree, so do the entries. A sum is 64 bits over keyed hashes: it detects accidents; the seals of
//! entries protect against tampering.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::check::finding::{FindingKind, Findings};
use crate::error::{Error, Result};
use crate::format::index::{IndexEntry, SegmentReader, entries_of, segment_name};
use crate::format::pack::{Directory, encode_frame_table};
use crate::id::{PackId, SegmentId};
use crate::store::{ObjectKind, ObjectName, StoreError};
use crate::vault::Vault;

/// The sum over the entries of one pack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct PackTotals {
    count: u64,
    mixed: u64,
    /// The start of the hash of the frame table; `None` if the segment has none.
    table: Option<u64>,
}

fn table_sum(table: &[u8]) -> u64 {
    let hash = blake3::hash(table);
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("eight bytes"))
}

impl PackTotals {
    fn add(&mut self, entry: &IndexEntry) {
        let half = |at: usize| u64::from_le_bytes(entry.prefix[at..at + 8].try_into().expect("eight bytes"));
        let place =
            u64::from(entry.location.offset) | u64::from(entry.length) << 21 | u64::from(entry.location.frame) << 42;
        // The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): every bit of the entry moves every bit of the sum.
        let mut mixed = half(0) ^ half(8).rotate_left(17) ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.count += 1;
        self.mixed = self.mixed.wrapping_add(mixed ^ (mixed >> 31));
    }
}

/// A summary of the index per pack: 60 bytes of memory for each.
#[derive(Default)]
pub(crate) struct IndexSurvey {
    sums: HashMap<PackId, Vec<(SegmentId, PackTotals)>>,
    /// Segments that are completely or partly unreadable.
    damaged: Vec<ObjectName>,
    /// Segments that contradict the directory of a pack.
    wrong: HashSet<SegmentId>,
}

impl IndexSurvey {
    /// Reads the whole index.
    pub(crate) fn read(vault: &Vault, findings: &mut Findings) -> Result<Self> {
        let mut survey = Self::default();
        let keys = vault.segment_keys();
        for name in vault.names(ObjectKind::Index)? {
            let Ok(id) = name.name().parse::<SegmentId>() else {
                continue;
            };
            let read =
                SegmentReader::open(&*vault.store, &keys, id).and_then(|segment| survey.segment(vault, &segment));
            match read {
                Ok(()) => {}
                // It was merged into another segment meanwhile.
                Err(Error::Store(StoreError::NotFound { .. })) => survey.forget(id),
                Err(error) => {
                    findings.object(&name, error)?;
                    survey.forget(id);
                    survey.damaged.push(segment_name(id));
                }
            }
        }
        Ok(survey)
    }

    fn segment(&mut self, vault: &Vault, segment: &SegmentReader) -> Result<()> {
        let mut sums: HashMap<PackId, PackTotals> = segment
            .packs()
            .iter()
            .map(|pack| (*pack, PackTotals::default()))
            .collect();
        for (pack, sum) in &mut sums {
            sum.table = segment.frame_table(&*vault.store, *pack)?.as_deref().map(table_sum);
        }
        let mut last = None;
        for page in 0..segment.page_count() {
            for entry in segment.page(&*vault.store, page)? {
                if last.is_some_and(|last| last > entry) {
                    let detail = format!("page {page} is not in order");
                    return Err(Error::damaged(&segment_name(segment.segment), 0, detail));
                }
                sums.entry(entry.location.pack).or_default().add(&entry);
                last = Some(entry);
            }
        }
        for (pack, sum) in sums {
            self.sums.entry(pack).or_default().push((segment.segment, sum));
        }
        Ok(())
    }

    fn forget(&mut self, segment: SegmentId) {
        self.sums.retain(|_, sums| {
            sums.retain(|(known, _)| *known != segment);
            !sums.is_empty()
        });
    }

    /// Segments that must be rewritten.
    pub(crate) fn bad_segments(&self) -> BTreeSet<ObjectName> {
        let wrong = self.wrong.iter().map(|segment| segment_name(*segment));
        self.damaged.iter().cloned().chain(wrong).collect()
    }

    /// Whether any readable segment lists `pack`.
    pub(crate) fn lists(&self, pack: PackId) -> bool {
        self.sums.contains_key(&pack)
    }

    /// Whether any readable segment lists chunks of `pack`.
    pub(crate) fn lists_chunks(&self, pack: PackId) -> bool {
        let sums = self.sums.get(&pack);
        sums.is_some_and(|sums| sums.iter().any(|(_, sum)| sum.count > 0))
    }

    /// The packs that are listed.
    pub(crate) fn packs(&self) -> impl Iterator<Item = PackId> + '_ {
        self.sums.keys().copied()
    }

    /// Compares the index entries of `pack` with its directory.
    pub(crate) fn compare(&mut self, pack: PackId, directory: &Directory, findings: &mut Findings) {
        let Some(sums) = self.sums.get(&pack) else { return };
        let mut expected = PackTotals::default();
        entries_of(pack, directory).for_each(|entry| expected.add(&entry));
        let table = table_sum(&encode_frame_table(directory));
        for (segment, sum) in sums {
            // A segment of an earlier release has no table.
            expected.table = sum.table.map(|_| table);
            if *sum != expected && self.wrong.insert(*segment) {
                let detail = format!("its entries for pack {pack} differ from the directory of the pack");
                findings.push(&segment_name(*segment), None, FindingKind::Damaged, detail);
            }
        }
    }
}
