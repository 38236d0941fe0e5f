//! The findings of a check, and their impact on disks.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;

use crate::error::{Error, Result};
use crate::format::pack::pack_name;
use crate::id::{PackId, SnapshotId};
use crate::key::KeyError;
use crate::store::{ObjectName, StoreError};

/// Maximum number of findings that are listed; more are only counted.
pub(crate) const FINDING_COUNT_MAX: usize = 4096;
/// Maximum number of ranges of a disk that are listed for a finding; more are only counted.
const RANGE_COUNT_MAX: usize = 64;

/// The kind of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum FindingKind {
    /// Its bytes are not those that were written.
    Damaged,
    /// It does not exist, but should.
    Missing,
    /// The medium cannot read it.
    Unreadable,
    /// Its name is taken by something that is not an object: a folder, a link, a pipe.
    Obstructed,
    /// Reading it is not permitted; it may be intact.
    Refused,
    /// It claims to be of a later version; or the version byte is damaged.
    LaterVersion,
    /// A disk of a snapshot differs from the device that it is compared with.
    Differs,
    /// A pack that no index segment lists: its chunks are not found for deduplication.
    Unlisted,
    /// An index segment lists a pack that does not exist.
    Dangling,
    /// One of two copies is missing: nothing is lost yet.
    Single,
    /// It does not belong in the repository.
    Stranger,
}

impl FindingKind {
    /// Whether stored data is lost or wrong, rather than merely untidy.
    pub fn is_damage(self) -> bool {
        match self {
            Self::Damaged
            | Self::Missing
            | Self::Unreadable
            | Self::Obstructed
            | Self::LaterVersion
            | Self::Differs => true,
            Self::Refused | Self::Unlisted | Self::Dangling | Self::Single | Self::Stranger => false,
        }
    }
}

/// Bytes of a snapshot's disk that a finding affects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TouchedDisk {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// Its machine.
    pub machine: String,
    /// Its point in time, in milliseconds since 1970-01-01 UTC.
    pub time_ms: i64,
    /// The disk; empty if the whole snapshot is affected.
    pub disk: String,
    /// Ranges of the disk in bytes, ascending, neighbours joined; at most 64 of them.
    pub ranges: Vec<Range<u64>>,
    /// Further ranges that are not listed.
    pub unlisted_range_count: u64,
    /// Total bytes of all ranges.
    pub bytes: u64,
}

/// A problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The object's name in the store; the path of a foreign file.
    pub object: String,
    /// Byte offset in the object, if known.
    pub offset: Option<u64>,
    /// The kind of the problem.
    pub kind: FindingKind,
    /// A description of the problem.
    pub detail: String,
    /// The disks that need these bytes. Only filled for damage.
    pub touches: Vec<TouchedDisk>,
}

/// A part of a pack that is unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum DamagedPart {
    /// The whole pack: it is missing, or its directory is unreadable.
    Pack(PackId),
    /// A frame.
    Frame(PackId, u32),
}

impl DamagedPart {
    pub(crate) fn pack(self) -> PackId {
        match self {
            Self::Pack(pack) | Self::Frame(pack, _) => pack,
        }
    }
}

/// The finding in an error about a single object; the error itself if it is not about one object.
pub(crate) fn classify(error: Error) -> Result<(Option<ObjectName>, Option<u64>, FindingKind, String)> {
    let detail = error.to_string();
    Ok(match error {
        Error::Damaged { object, offset, detail } => (Some(object), Some(offset), FindingKind::Damaged, detail),
        Error::MissingPack { pack } => (
            Some(pack_name(pack)),
            None,
            FindingKind::Missing,
            "it does not exist".to_owned(),
        ),
        Error::FutureVersion { object, .. } => (Some(object), Some(0), FindingKind::LaterVersion, detail),
        Error::Store(StoreError::ShortObject { name, actual, .. }) => {
            (Some(name), Some(actual), FindingKind::Damaged, detail)
        }
        Error::Store(StoreError::NotFound { name }) => (Some(name), None, FindingKind::Missing, detail),
        Error::Store(StoreError::NotAnObject { name, .. }) => (Some(name), None, FindingKind::Obstructed, detail),
        Error::Store(ref store @ StoreError::Io { ref source, .. }) if store.is_of_medium() => {
            let detail = format!("{detail}: {source}");
            (None, None, FindingKind::Unreadable, detail)
        }
        Error::Store(StoreError::Permission { .. }) => (None, None, FindingKind::Refused, detail),
        Error::Key(KeyError::Version { name, .. }) => (Some(name), Some(0), FindingKind::LaterVersion, detail),
        Error::Store(StoreError::TooLarge { name, .. })
        | Error::Key(
            KeyError::Damaged { name, .. } | KeyError::WrongKeyOrDamaged { name } | KeyError::WrongPurpose { name, .. },
        ) => (Some(name), None, FindingKind::Damaged, detail),
        other => return Err(other),
    })
}

/// The finding of a part of a pack.
#[derive(Debug, Clone, Copy)]
struct PlaceFinding {
    /// Its index in the list; past the end if it was only counted.
    index: usize,
    kind: FindingKind,
}

/// Collects findings, each part of a pack once.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    list: Vec<Finding>,
    places: HashMap<DamagedPart, PlaceFinding>,
    unlisted_count: u64,
}

impl Findings {
    /// Records `error` as a finding about `object`, or returns it if it does not concern a single object.
    pub(crate) fn object(&mut self, object: &ObjectName, error: Error) -> Result<()> {
        let (name, offset, kind, detail) = classify(error)?;
        self.push(name.as_ref().unwrap_or(object), offset, kind, detail);
        Ok(())
    }

    /// Adds an error that names its object.
    pub(crate) fn error(&mut self, error: Error) -> Result<()> {
        let subject = match &error {
            Error::Store(StoreError::Io { subject, .. } | StoreError::Permission { subject, .. }) => subject.clone(),
            _ => String::new(),
        };
        let (name, offset, kind, detail) = classify(error)?;
        let path = name.map_or(subject, |name| name.to_string());
        self.push_path(path, offset, kind, detail);
        Ok(())
    }

    pub(crate) fn push(&mut self, object: &ObjectName, offset: Option<u64>, kind: FindingKind, detail: String) {
        self.push_path(object.to_string(), offset, kind, detail);
    }

    pub(crate) fn push_path(&mut self, object: String, offset: Option<u64>, kind: FindingKind, detail: String) {
        if self.list.len() >= FINDING_COUNT_MAX {
            self.unlisted_count += 1;
            return;
        }
        self.list.push(Finding {
            object,
            offset,
            kind,
            detail,
            touches: Vec::new(),
        });
    }

    /// Records `error` as a finding about a part of a pack.
    pub(crate) fn place(&mut self, place: DamagedPart, error: Error) -> Result<()> {
        let (name, offset, kind, detail) = classify(error)?;
        // A missing pack is one finding, however many of its frames are needed.
        let place = match kind {
            FindingKind::Missing => DamagedPart::Pack(place.pack()),
            _ => place,
        };
        let known = self.places.contains_key(&place) || self.places.contains_key(&DamagedPart::Pack(place.pack()));
        if !known {
            let index = self.list.len().min(FINDING_COUNT_MAX);
            self.places.insert(place, PlaceFinding { index, kind });
            self.push(&name.unwrap_or_else(|| pack_name(place.pack())), offset, kind, detail);
        }
        Ok(())
    }

    /// The unusable parts of packs.
    pub(crate) fn places(&self) -> impl Iterator<Item = DamagedPart> + '_ {
        self.places.keys().copied()
    }

    pub(crate) fn has_place(&self, place: DamagedPart) -> bool {
        self.places.contains_key(&place)
    }

    pub(crate) fn has_places(&self) -> bool {
        !self.places.is_empty()
    }

    /// Whether a pack that a map needs is missing.
    pub(crate) fn has_missing_places(&self) -> bool {
        self.places.values().any(|known| known.kind == FindingKind::Missing)
    }

    /// Removes findings about missing packs, except `needed` ones: only removed snapshots needed the others.
    pub(crate) fn retract_missing(&mut self, needed: &HashSet<DamagedPart>) {
        let mut retracted = BTreeSet::new();
        self.places.retain(|place, known| {
            let stays = known.kind != FindingKind::Missing || needed.contains(place);
            if !stays && known.index < self.list.len() {
                retracted.insert(known.index);
            } else if !stays {
                self.unlisted_count -= 1;
            }
            stays
        });
        let mut index = 0;
        self.list.retain(|_| {
            index += 1;
            !retracted.contains(&(index - 1))
        });
        for known in self.places.values_mut() {
            known.index -= retracted.range(..known.index).count();
        }
    }

    pub(crate) fn list(&self) -> &[Finding] {
        &self.list
    }

    /// Adds the affected disks of a part of a pack.
    pub(crate) fn touch(&mut self, place: DamagedPart, touched: Vec<TouchedDisk>) {
        let index = self.places.get(&place).map(|known| known.index);
        if let Some(finding) = index.and_then(|index| self.list.get_mut(index)) {
            finding.touches.extend(touched);
        }
    }

    /// Adds the affected snapshot to the last finding.
    pub(crate) fn touch_last(&mut self, touched: TouchedDisk) {
        if let Some(finding) = self.list.last_mut() {
            finding.touches.push(touched);
        }
    }

    /// The findings, and the number of those not listed.
    pub(crate) fn finish(self) -> (Vec<Finding>, u64) {
        (self.list, self.unlisted_count)
    }
}

/// Ranges of one disk; adjacent ones are joined.
#[derive(Debug, Default, Clone)]
pub(crate) struct RangeList {
    ranges: Vec<Range<u64>>,
    unlisted_count: u64,
    bytes: u64,
}

impl RangeList {
    /// Adds a range after all others.
    pub(crate) fn push(&mut self, range: Range<u64>) {
        self.bytes += range.end - range.start;
        let has_room = self.ranges.len() < RANGE_COUNT_MAX;
        match self.ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ if has_room => self.ranges.push(range),
            _ => self.unlisted_count += 1,
        }
    }

    pub(crate) fn into_touched_disk(self, manifest: &crate::format::manifest::Manifest, disk: &str) -> TouchedDisk {
        TouchedDisk {
            disk: disk.to_owned(),
            ranges: self.ranges,
            unlisted_range_count: self.unlisted_count,
            bytes: self.bytes,
            ..TouchedDisk::whole(manifest)
        }
    }
}

impl TouchedDisk {
    /// A whole snapshot.
    pub(crate) fn whole(manifest: &crate::format::manifest::Manifest) -> Self {
        Self {
            snapshot: manifest.id,
            machine: manifest.machine.clone(),
            time_ms: manifest.time_ms,
            disk: String::new(),
            ranges: Vec::new(),
            unlisted_range_count: 0,
            bytes: 0,
        }
    }
}

/// Parts of packs, grouped by pack, for comparison with maps.
#[derive(Debug, Default)]
pub(crate) struct PlaceSet {
    packs: BTreeMap<PackId, Option<BTreeSet<u32>>>,
}

impl PlaceSet {
    pub(crate) fn insert(&mut self, place: DamagedPart) {
        match place {
            DamagedPart::Pack(pack) => {
                self.packs.insert(pack, None);
            }
            DamagedPart::Frame(pack, frame) => {
                if let Some(frames) = self.packs.entry(pack).or_insert_with(|| Some(BTreeSet::new())) {
                    frames.insert(frame);
                }
            }
        }
    }

    /// The part that `frame` of `pack` belongs to, if it is in the set.
    pub(crate) fn find(&self, pack: PackId, frame: u32) -> Option<DamagedPart> {
        match self.packs.get(&pack)? {
            None => Some(DamagedPart::Pack(pack)),
            Some(frames) => frames.contains(&frame).then_some(DamagedPart::Frame(pack, frame)),
        }
    }
}

impl FromIterator<DamagedPart> for PlaceSet {
    fn from_iter<I: IntoIterator<Item = DamagedPart>>(places: I) -> Self {
        let mut set = Self::default();
        places.into_iter().for_each(|place| set.insert(place));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::{DamagedPart, FINDING_COUNT_MAX, FindingKind, Findings, PlaceSet, RangeList, TouchedDisk};
    use crate::error::Error;
    use crate::format::pack::pack_name;
    use crate::id::{PackId, SnapshotId};

    const PACK: PackId = PackId::from_bytes([3; 16]);

    #[test]
    fn a_missing_pack_is_one_finding_and_frames_are_one_each() {
        let mut findings = Findings::default();
        let damaged = || Error::damaged(&pack_name(PackId::from_bytes([4; 16])), 9, "test");
        for frame in [1, 2, 1] {
            findings
                .place(DamagedPart::Frame(PACK, frame), Error::MissingPack { pack: PACK })
                .unwrap();
            findings
                .place(DamagedPart::Frame(PackId::from_bytes([4; 16]), frame), damaged())
                .unwrap();
        }
        assert!(findings.place(DamagedPart::Pack(PACK), Error::Cancelled).is_err());
        let places: PlaceSet = findings.places().collect();
        assert_eq!(places.find(PACK, 77), Some(DamagedPart::Pack(PACK)));
        assert_eq!(places.find(PackId::from_bytes([4; 16]), 3), None);
        let (list, unlisted) = findings.finish();
        assert_eq!((list.len(), unlisted), (3, 0));
        assert_eq!((list[0].kind, list[1].offset), (FindingKind::Missing, Some(9)));
    }

    #[test]
    fn findings_about_removed_snapshots_are_withdrawn() {
        let pack = |number| PackId::from_bytes([number; 16]);
        let mut findings = Findings::default();
        findings.push_path("x".to_owned(), None, FindingKind::Stranger, String::new());
        for number in 1..=3 {
            let missing = Error::MissingPack { pack: pack(number) };
            findings.place(DamagedPart::Frame(pack(number), 0), missing).unwrap();
        }
        let damaged = Error::damaged(&pack_name(pack(4)), 9, "test");
        findings.place(DamagedPart::Frame(pack(4), 0), damaged).unwrap();
        for number in 5..FINDING_COUNT_MAX {
            findings.push_path(number.to_string(), None, FindingKind::Stranger, String::new());
        }
        let missing = Error::MissingPack { pack: pack(5) };
        findings.place(DamagedPart::Pack(pack(5)), missing).unwrap();
        assert!(findings.has_missing_places());

        findings.retract_missing(&[DamagedPart::Pack(pack(2))].into());
        for place in [DamagedPart::Pack(pack(2)), DamagedPart::Frame(pack(4), 0)] {
            let touched = TouchedDisk {
                snapshot: SnapshotId::from_bytes([1; 16]),
                machine: String::new(),
                time_ms: 0,
                disk: String::new(),
                ranges: Vec::new(),
                unlisted_range_count: 0,
                bytes: 0,
            };
            findings.touch(place, vec![touched]);
        }
        let (list, unlisted) = findings.finish();
        assert_eq!((list.len(), unlisted), (FINDING_COUNT_MAX - 2, 0));
        let touched: Vec<_> = list.iter().filter(|one| !one.touches.is_empty()).collect();
        let found: Vec<_> = touched.iter().map(|one| (&one.object[..], one.kind)).collect();
        let names = [pack_name(pack(2)).to_string(), pack_name(pack(4)).to_string()];
        assert_eq!(
            found,
            [
                (&names[0][..], FindingKind::Missing),
                (&names[1][..], FindingKind::Damaged)
            ]
        );
    }

    #[test]
    fn lists_are_bounded_and_count_omitted_entries() {
        let mut findings = Findings::default();
        for _ in 0..FINDING_COUNT_MAX + 5 {
            findings.push_path("x".to_owned(), None, FindingKind::Stranger, String::new());
        }
        let (list, unlisted) = findings.finish();
        assert_eq!((list.len(), unlisted), (FINDING_COUNT_MAX, 5));
        let mut ranges = RangeList::default();
        ranges.push(0..5);
        ranges.push(5..10);
        for at in 10..100u64 {
            ranges.push(at * 10..at * 10 + 1);
        }
        assert_eq!((ranges.ranges[0].clone(), ranges.ranges.len()), (0..10, 64));
        assert_eq!((ranges.unlisted_count, ranges.bytes), (27, 100));
    }
}
