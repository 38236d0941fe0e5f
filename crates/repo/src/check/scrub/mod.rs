//! Reads everything at rest, to find damage before the data is needed.
//!
//! Verify follows the references of snapshots; scrub reads everything: every section of every pack, every page of the
//! index, every small object. Packs are read sequentially, each by one of several threads, so that one reads while
//! others decode; everything that does not need a pack's bytes is compared meanwhile. A partial scrub reads the packs
//! that were not read for the longest time. Read times and damaged packs are recorded in the repository ([`record`],
//! `damage`). Memory: about 100 bytes for each pack and a few MiB for each thread.
//!
//! Concurrent changes by other writers are not reported as damage, and scrub needs no lease, because it deletes
//! nothing.

mod index;
mod pack;
pub(crate) mod record;
mod small;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crossbeam_channel::{Sender, bounded};

pub(crate) use self::index::IndexSurvey;
use self::pack::{PackOutcome, PackScratch, scrub_pack};
use self::record::{read_records, replace_records};
pub(crate) use self::small::check_relocations;
use self::small::check_small_objects;
use crate::check::finding::{DamagedPart, Finding, FindingKind, Findings, TouchedDisk};
use crate::check::impact::{add_impact, needed_packs};
use crate::error::{Error, Result};
use crate::format::manifest::{Manifest, snapshot_name};
use crate::format::pack::pack_name;
use crate::id::PackId;
use crate::progress::job::JobProgress;
use crate::repository::Repository;
use crate::repository::damage_records::{DamageRecord, clear_damage, damage_names, put_damage, read_damage};
use crate::store::StoreError;
pub(crate) use crate::vault::exists;
use crate::writers::lease::writer_name;
pub(crate) use crate::writers::manifest_copies::{ManifestCopies, copied_manifest};

/// Options of a scrub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScrubRequest {
    /// Share of the stored bytes to read, in percent; packs that were not read for the longest time come first, and
    /// packs with known damage are always read. 100 reads everything.
    pub percent: u8,
    /// Number of threads that read and check; with 0 the caller does everything, in a fixed order.
    pub thread_count: usize,
}

/// The result of a scrub.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScrubReport {
    /// Number of packs in the repository.
    pub pack_count: u64,
    /// Total bytes of all packs.
    pub pack_bytes: u64,
    /// Number of packs that were read.
    pub read_pack_count: u64,
    /// Bytes of the packs that were read.
    pub read_bytes: u64,
    /// Number of packs that were read and are damaged.
    pub damaged_pack_count: u64,
    /// Whether the read times were recorded; they are not if the store is read-only or full.
    pub is_remembered: bool,
    /// The problems; at most 4096.
    pub findings: Vec<Finding>,
    /// Number of problems that are not listed.
    pub unlisted_finding_count: u64,
}

impl ScrubReport {
    /// Whether there is damage, and not only untidiness.
    pub fn has_damage(&self) -> bool {
        self.unlisted_finding_count > 0 || self.findings.iter().any(|finding| finding.kind.is_damage())
    }
}

/// The results of a scrub on which a repair is based.
pub(crate) struct Survey {
    pub(crate) findings: Findings,
    pub(crate) manifests: Vec<Manifest>,
    /// The manifests of lost snapshots, from their copies: the data they need must be kept.
    pub(crate) lost: Vec<Manifest>,
    /// All packs that existed at the start, with their lengths.
    pub(crate) packs: BTreeMap<PackId, u64>,
    pub(crate) index: IndexSurvey,
    pub(crate) copies: ManifestCopies,
    /// Packs that this run found damaged, or that were known to be.
    pub(crate) damage: BTreeMap<PackId, DamageRecord>,
    /// Packs that do not exist but are listed in the index, or are known to be missing.
    pub(crate) absent: HashSet<PackId>,
    /// Damaged or missing packs that a snapshot needs.
    pub(crate) needed: HashSet<PackId>,
    pub(crate) report: ScrubReport,
}

impl Repository {
    /// Reads packs, or some of them, and everything else, and checks them. Damage is reported in the result.
    pub fn scrub(&self, request: ScrubRequest, progress: &dyn JobProgress) -> Result<ScrubReport> {
        let mut survey = self.survey(request, progress)?;
        add_impact(&self.packs, &survey.manifests, &mut survey.findings)?;
        let mut report = survey.report;
        (report.findings, report.unlisted_finding_count) = survey.findings.finish();
        Ok(report)
    }

    /// All steps of scrub except the search for disks that are affected by damaged packs.
    fn survey(&self, request: ScrubRequest, progress: &dyn JobProgress) -> Result<Survey> {
        let mut survey = self.survey_packs(request, progress)?;
        let known = survey.damage.keys().copied().collect();
        self.absent_packs(&known, &mut survey)?;
        self.add_lost_snapshots(&mut survey)?;
        Ok(survey)
    }

    /// The same, including the copies of manifests in packs that are not read.
    pub(crate) fn survey_with_copies(&self, request: ScrubRequest, progress: &dyn JobProgress) -> Result<Survey> {
        let mut survey = self.survey_packs(request, progress)?;
        let mut unread = Vec::new();
        for pack in survey.packs.keys() {
            match self.packs.reader(*pack) {
                Ok(reader) => {
                    survey.copies.add(*pack, &reader.directory);
                    survey.index.compare(*pack, &reader.directory, &mut survey.findings);
                }
                Err(Error::MissingPack { .. }) => {}
                Err(error) if error.is_about_one_object() || error.is_unreadable() => unread.push((*pack, error)),
                Err(error) => return Err(error),
            }
        }
        let known = survey.damage.keys().copied().collect();
        for (pack, error) in unread {
            let outcome = PackOutcome {
                pack,
                reader: self.packs.frame_reader(pack).ok(),
                errors: vec![(None, error)],
                refused: Vec::new(),
                is_gone: false,
            };
            self.take_in(outcome, 0, &known, &mut survey, |_| ())?;
        }
        self.add_lost_snapshots(&mut survey)?;
        self.absent_packs(&known, &mut survey)?;
        Ok(survey)
    }

    fn survey_packs(&self, request: ScrubRequest, progress: &dyn JobProgress) -> Result<Survey> {
        self.refresh()?;
        let mut findings = Findings::default();
        check_small_objects(&self.vault, &mut findings)?;
        // Packs are listed before the segments that list them: a pack that appears meanwhile is not checked in
        // this run.
        let packs: BTreeMap<PackId, u64> = self.pack_sizes()?.into_iter().collect();
        let (manifests, errors) = self.snapshots()?;
        errors.into_iter().try_for_each(|error| findings.error(error))?;
        let index = IndexSurvey::read(&self.vault, &mut findings)?;
        let mut survey = Survey {
            findings,
            manifests,
            lost: Vec::new(),
            index,
            copies: ManifestCopies::default(),
            damage: BTreeMap::new(),
            absent: HashSet::new(),
            needed: HashSet::new(),
            report: ScrubReport {
                pack_count: packs.len() as u64,
                pack_bytes: packs.values().sum(),
                ..ScrubReport::default()
            },
            packs,
        };
        let known = self.known_damage(&mut survey)?;
        self.read_packs(request, &known, &mut survey, progress)?;
        self.unlisted_packs(&mut survey)?;
        Ok(survey)
    }

    /// Packs with damage records.
    fn known_damage(&self, survey: &mut Survey) -> Result<HashSet<PackId>> {
        let names = damage_names(&self.vault)?;
        for (pack, names) in &names {
            // Errors of records were already reported with the small objects.
            if let (Some(record), _) = read_damage(&self.vault, names)? {
                survey.damage.insert(*pack, record);
            }
        }
        Ok(names.into_keys().collect())
    }

    fn read_packs(
        &self,
        request: ScrubRequest,
        known: &HashSet<PackId>,
        survey: &mut Survey,
        progress: &dyn JobProgress,
    ) -> Result<()> {
        let (mut record, sources) = read_records(&self.vault)?;
        let mut order: Vec<(bool, u64, PackId, u64)> = survey
            .packs
            .iter()
            .map(|(pack, length)| {
                let seconds = record.packs.get(pack).copied().unwrap_or_default();
                (!known.contains(pack), seconds, *pack, *length)
            })
            .collect();
        order.sort_unstable();
        let budget = u128::from(survey.report.pack_bytes) * u128::from(request.percent.min(100)) / 100;
        let mut chosen_bytes = 0u128;
        let chosen: Vec<(PackId, u64)> = order
            .into_iter()
            .take_while(|(is_fresh, _, _, length)| {
                let is_taken = !is_fresh || request.percent >= 100 || chosen_bytes < budget;
                chosen_bytes += u128::from(*length);
                is_taken
            })
            .map(|(_, _, pack, length)| (pack, length))
            .collect();

        progress.total(chosen.iter().map(|(_, length)| *length).sum());
        let seconds = u64::try_from((self.vault.environment.now_ms)() / 1000).unwrap_or_default();
        let mut recordable = true;
        let result = self.read_in_parallel(&chosen, request.thread_count, progress, &mut |outcome, length| {
            recordable &= self.take_in(outcome, length, known, survey, |pack| record.add(pack, seconds))?;
            Ok(())
        });
        // Packs that were read before a cancellation are recorded as well.
        if matches!(result, Ok(()) | Err(Error::Cancelled)) {
            record.packs.retain(|pack, _| survey.packs.contains_key(pack));
            survey.report.is_remembered = recordable && is_written(replace_records(&self.vault, &record, &sources))?;
        }
        result
    }

    /// Reads each selected pack, and passes the result to `take`.
    fn read_in_turn(
        &self,
        chosen: &[(PackId, u64)],
        progress: &dyn JobProgress,
        take: &mut dyn FnMut(PackOutcome, u64) -> Result<()>,
    ) -> Result<()> {
        let keys = self.vault.fingerprint_keys();
        let mut scratch = PackScratch::new();
        for (pack, length) in chosen {
            if progress.cancelled().load(Ordering::Relaxed) {
                return Err(Error::Cancelled);
            }
            let outcome = scrub_pack(&self.packs, &keys, *pack, &mut scratch)?;
            progress.advance(*length);
            take(outcome, *length)?;
        }
        Ok(())
    }

    /// Reads the selected packs on several threads, and passes the results to `take`, in any order.
    fn read_in_parallel(
        &self,
        chosen: &[(PackId, u64)],
        thread_count: usize,
        progress: &dyn JobProgress,
        take: &mut dyn FnMut(PackOutcome, u64) -> Result<()>,
    ) -> Result<()> {
        if thread_count == 0 {
            return self.read_in_turn(chosen, progress, take);
        }
        let next = AtomicUsize::new(0);
        let keys = self.vault.fingerprint_keys();
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        let work = |send: Sender<(PackOutcome, u64)>| {
            let mut scratch = PackScratch::new();
            while let Some((pack, length)) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                let read = if progress.cancelled().load(Ordering::Relaxed) {
                    Err(Error::Cancelled)
                } else {
                    scrub_pack(&self.packs, &keys, *pack, &mut scratch)
                };
                match read {
                    Ok(outcome) => {
                        progress.advance(*length);
                        if send.send((outcome, *length)).is_err() {
                            return;
                        }
                    }
                    Err(error) => {
                        next.store(chosen.len(), Ordering::Relaxed);
                        failure
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .get_or_insert(error);
                        return;
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            let (send, outcomes) = bounded(thread_count);
            for _ in 0..thread_count {
                let (send, work) = (send.clone(), &work);
                scope.spawn(move || work(send));
            }
            drop(send);
            for (outcome, length) in outcomes {
                if let Err(error) = take(outcome, length) {
                    next.store(chosen.len(), Ordering::Relaxed);
                    return Err(error);
                }
            }
            Ok(())
        })?;
        failure
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
            .map_or(Ok(()), Err)
    }

    /// Processes the result of reading a pack; returns false if the store cannot record it.
    fn take_in(
        &self,
        outcome: PackOutcome,
        length: u64,
        known: &HashSet<PackId>,
        survey: &mut Survey,
        mut is_whole: impl FnMut(PackId),
    ) -> Result<bool> {
        let pack = outcome.pack;
        if outcome.is_gone {
            survey.packs.remove(&pack);
            return Ok(true);
        }
        survey.report.read_pack_count += 1;
        survey.report.read_bytes += length;
        if let Some(reader) = outcome.reader.as_ref().filter(|reader| reader.has_chunks()) {
            survey.index.compare(pack, &reader.directory, &mut survey.findings);
            survey.copies.add(pack, &reader.directory);
        }
        if !outcome.refused.is_empty() {
            for error in outcome.refused {
                survey.findings.object(&pack_name(pack), error)?;
            }
            return Ok(true);
        }
        let Some(damage) = outcome.damage() else {
            is_whole(pack);
            // The pack was restored, or the medium can read it again.
            if known.contains(&pack) {
                survey.damage.remove(&pack);
                return is_written(clear_damage(&self.vault, pack));
            }
            return Ok(true);
        };
        survey.report.damaged_pack_count += 1;
        let is_news = !known.contains(&pack)
            || survey
                .damage
                .get(&pack)
                .is_none_or(|known| has_further_damage(&damage, known));
        let has_reader = outcome.reader.is_some();
        for (frame, error) in outcome.errors {
            match frame {
                Some(frame) => survey.findings.place(DamagedPart::Frame(pack, frame), error)?,
                None if has_reader => survey.findings.object(&pack_name(pack), error)?,
                None => survey.findings.place(DamagedPart::Pack(pack), error)?,
            }
        }
        let is_remembered = !is_news || is_written(put_damage(&self.vault, pack, &damage))?;
        match survey.damage.entry(pack) {
            std::collections::btree_map::Entry::Occupied(mut entry) => entry.get_mut().merge(damage),
            std::collections::btree_map::Entry::Vacant(entry) => {
                entry.insert(damage);
            }
        }
        Ok(is_remembered)
    }

    /// Packs that no segment lists.
    fn unlisted_packs(&self, survey: &mut Survey) -> Result<()> {
        for pack in survey.packs.keys() {
            if survey.index.lists(*pack) {
                continue;
            }
            // A pack with an unreadable directory is damage, which was reported already.
            let Ok(reader) = self.packs.reader(*pack) else { continue };
            match self.vault.store.length(&writer_name(reader.directory.writer)) {
                // Its writer is going to list it.
                Ok(_) => {}
                Err(StoreError::NotFound { .. }) => {
                    let detail = "no segment of the index lists it; the next backup does".to_owned();
                    survey
                        .findings
                        .push(&pack_name(*pack), None, FindingKind::Unlisted, detail);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Packs that should exist: the index lists them, or a map needs them.
    fn absent_packs(&self, known: &HashSet<PackId>, survey: &mut Survey) -> Result<()> {
        let listed: Vec<PackId> = survey.index.packs().collect();
        for pack in listed.into_iter().chain(known.iter().copied()) {
            if !survey.packs.contains_key(&pack) && self.is_absent(pack)? {
                survey.absent.insert(pack);
            }
        }
        // The walk also finds packs that neither exist nor are listed.
        let (needed, missing) = self.needed_packs(survey)?;
        for pack in missing {
            survey.absent.insert(pack);
            survey
                .findings
                .place(DamagedPart::Pack(pack), Error::MissingPack { pack })?;
        }
        survey.needed = needed;
        for pack in survey.index.packs().filter(|pack| survey.absent.contains(pack)) {
            if !survey.findings.has_place(DamagedPart::Pack(pack)) {
                let detail = "the index lists it; it does not exist, and no snapshot needs it".to_owned();
                survey
                    .findings
                    .push(&pack_name(pack), None, FindingKind::Dangling, detail);
            }
        }
        Ok(())
    }

    /// The damaged or missing packs of which a snapshot needs bytes or pages; and those of them that are
    /// missing.
    fn needed_packs(&self, survey: &mut Survey) -> Result<(HashSet<PackId>, BTreeSet<PackId>)> {
        let (packs, damage) = (&survey.packs, &survey.damage);
        let is_suspect = |pack: PackId| !packs.contains_key(&pack) || damage.contains_key(&pack);
        let mut before = BTreeSet::new();
        loop {
            let mut needed = needed_packs(&self.packs, &survey.manifests, &is_suspect)?;
            let mut missing = BTreeSet::new();
            for pack in needed.iter().filter(|pack| !packs.contains_key(pack)) {
                if self.is_absent(*pack)? {
                    missing.insert(*pack);
                }
            }
            // Gc may have moved needed data meanwhile. A relocation exists before its pack is deleted: a pack that is
            // still missing when all relocations are loaded is lost, unless the snapshot that needed it was removed.
            let is_settled = missing.is_empty() || missing == before;
            if is_settled && (missing.is_empty() || self.exclude_removed(&mut survey.manifests)?.is_empty()) {
                // Packs that a lost snapshot misses are reported once that snapshot is restored.
                needed.extend(needed_packs(&self.packs, &survey.lost, &is_suspect)?);
                return Ok((needed, missing));
            }
            before = missing;
            self.refresh()?;
        }
    }

    pub(crate) fn is_absent(&self, pack: PackId) -> Result<bool> {
        match self.vault.store.length(&pack_name(pack)) {
            Ok(_) => Ok(false),
            Err(StoreError::NotFound { .. }) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    fn add_lost_snapshots(&self, survey: &mut Survey) -> Result<()> {
        for (snapshot, pack) in survey.copies.lost(&self.vault)? {
            let detail =
                format!("the snapshot is missing although it was not removed; pack {pack} has a copy of its manifest");
            survey
                .findings
                .push(&snapshot_name(snapshot), None, FindingKind::Missing, detail);
            if let Some(manifest) = self
                .packs
                .reader(pack)
                .ok()
                .and_then(|reader| copied_manifest(&reader.directory))
            {
                survey.findings.touch_last(TouchedDisk::whole(&manifest));
                survey.lost.push(manifest);
            }
        }
        Ok(())
    }
}

/// Whether `found` has damage that `known` does not have.
fn has_further_damage(found: &DamageRecord, known: &DamageRecord) -> bool {
    let mut merged = known.clone();
    merged.merge(found.clone());
    merged != *known
}

/// Whether a write succeeded; it may fail on a read-only or full store, where the check itself is still useful.
fn is_written(result: Result<()>) -> Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(Error::Store(StoreError::ReadOnly { .. } | StoreError::NoSpace { .. })) => Ok(false),
        Err(error) => Err(error),
    }
}
