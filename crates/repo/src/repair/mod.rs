//! Repairs a repository: first a plan, then its execution.
//!
//! | object | how it is repaired |
//! |---|---|
//! | configuration | from the copy in the key slots |
//! | index | from the directories of packs; the old segments are deleted when the new ones are durable |
//! | one replica of a relocation | from the other replica |
//! | a snapshot | from the copy of its manifest in the last of its map packs |
//! | intact frames of a damaged pack | stored again, and found through relocations |
//! | chunks of damaged frames, or of missing packs | through relocations, if they are stored elsewhere or once a backup
//! has stored them again ([`heal`]) |
//! | pages of maps | not at all: they have no identity but their location. The next snapshot has its own
//! pages |
//! | unreadable markers and records | removed, or rewritten if their name contains all information |
//!
//! Losses are listed by snapshot, disk and byte range. Nothing that may still be useful is deleted: a damaged pack is
//! deleted only when every byte of it is stored elsewhere. Therefore: repair, back up the same machines again, and
//! repair once more. A backup also heals the chunks that it stores again.

mod execute;
mod heal;
mod index;
mod rebuild;
mod salvage;

use std::collections::BTreeSet;

use crate::check::finding::{Finding, FindingKind};
use crate::check::impact::add_impact;
use crate::check::scrub::{ScrubRequest, Survey};
use crate::error::{Error, Result};
use crate::format::manifest::snapshot_name;
use crate::id::{PackId, SnapshotId};
use crate::progress::job::JobProgress;
use crate::repository::Repository;
use crate::repository::relocations::{RelocationId, read_replica};
use crate::store::{ObjectKind, ObjectName};
use crate::writers::lease;
use crate::writers::lease::{Lease, Work};

/// Options of the search for damage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RepairRequest {
    /// Percentage of the packs to read first: 100 finds everything, 0 only repairs damage found earlier.
    pub percent: u8,
    /// Number of threads that read; with 0 the caller does everything, in a fixed order.
    pub thread_count: usize,
}

/// One action of a repair.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum RepairAction {
    /// Rewrite the configuration.
    RestoreConfig,
    /// Rewrite the manifest of a snapshot from the copy in a pack.
    RestoreSnapshot {
        /// The snapshot.
        snapshot: SnapshotId,
        /// The pack with the copy.
        copy: PackId,
    },
    /// Rewrite one replica of a relocation from the other.
    RestoreRelocation {
        /// The object to write.
        object: String,
    },
    /// Remove an unreadable object; markers whose name contains all information are rewritten.
    Replace {
        /// The object.
        object: String,
    },
    /// Rewrite the index if it is damaged or incomplete.
    RebuildIndex {
        /// Segments to delete afterwards.
        segments: Vec<String>,
    },
    /// Record what the index contains about a missing pack, or a pack with a lost directory, so that it can be healed.
    RecordLoss {
        /// The pack.
        pack: PackId,
    },
    /// Store the intact data of a damaged pack again, and search for lost data elsewhere; delete the pack if nothing is
    /// left in it.
    Salvage {
        /// The pack.
        pack: PackId,
    },
    /// Delete a damaged pack that no snapshot needs any more.
    DeletePack {
        /// The pack.
        pack: PackId,
    },
    /// Delete the damage record of a missing pack that is not needed any more.
    ForgetDamage {
        /// The pack.
        pack: PackId,
    },
}

/// The plan of a repair.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RepairPlan {
    /// The actions in order, each with its reason.
    pub actions: Vec<(RepairAction, String)>,
    /// The present problems, with the affected disks.
    pub findings: Vec<Finding>,
    /// Number of problems that are not listed.
    pub unlisted_finding_count: u64,
}

/// The result of a repair.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RepairReport {
    /// The completed actions, each with its reason.
    pub done: Vec<(RepairAction, String)>,
    /// Bytes of damaged packs that were found elsewhere.
    pub healed_bytes: u64,
    /// Damaged packs that were deleted because nothing was left in them.
    pub deleted_packs: Vec<PackId>,
    /// Bytes of lost data in chunks whose id is known: a backup of the same data can restore them.
    pub lost_bytes: u64,
    /// The remaining problems with the affected disks, i.e. the losses.
    pub findings: Vec<Finding>,
    /// Number of remaining problems that are not listed.
    pub unlisted_finding_count: u64,
}

impl Repository {
    /// Plans what [`repair`](Self::repair) would do now. Nothing is repaired; damaged packs are recorded as by scrub.
    pub fn plan_repair(&self, request: RepairRequest, progress: &dyn JobProgress) -> Result<RepairPlan> {
        let mut survey = self.survey_all(request, progress)?;
        let actions = self.actions(&survey)?;
        add_impact(&self.packs, &survey.manifests, &mut survey.findings)?;
        let (findings, unlisted_finding_count) = survey.findings.finish();
        Ok(RepairPlan {
            actions,
            findings,
            unlisted_finding_count,
        })
    }

    /// Carries out `plan`, as far as its actions are still needed; nothing else. Repairs are exclusive, also with gc.
    pub fn repair(&self, plan: &RepairPlan, thread_count: usize, progress: &dyn JobProgress) -> Result<RepairReport> {
        let lease = Lease::take(&self.vault, Work::Repair, None)?;
        let result = self.repair_under(&lease, plan, thread_count, progress);
        match &result {
            Err(_) => drop(lease.release()),
            Ok(_) => lease.release()?,
        }
        result
    }

    fn repair_under(
        &self,
        lease: &Lease<'_>,
        plan: &RepairPlan,
        thread_count: usize,
        progress: &dyn JobProgress,
    ) -> Result<RepairReport> {
        let request = RepairRequest {
            percent: 0,
            thread_count,
        };
        self.supersede(lease)?;
        // Packs are deleted under the same conditions as in gc: the damage was recorded durably, and all writers
        // that began before have ended.
        let is_only_writer = lease::is_only_writer(&self.vault, lease.record.writer)?;
        let survey = self.survey_all(request, progress)?;
        let planned: BTreeSet<&RepairAction> = plan.actions.iter().map(|(action, _)| action).collect();
        let mut report = RepairReport::default();
        let mut losses = BTreeSet::new();
        for (action, reason) in self.actions(&survey)? {
            let is_due = match &action {
                RepairAction::DeletePack { .. } => is_only_writer,
                _ => true,
            };
            if !planned.contains(&action) || !is_due {
                continue;
            }
            if progress.cancelled().load(std::sync::atomic::Ordering::Relaxed) {
                return Err(Error::Cancelled);
            }
            // A process that was considered dead stops here.
            lease.renew()?;
            lease.check()?;
            if let RepairAction::RecordLoss { pack } = &action {
                losses.insert(*pack);
            } else {
                // All losses are recorded together, before the index is changed.
                self.record_loss(&std::mem::take(&mut losses))?;
                self.execute(&action, lease, thread_count, &mut report)?;
            }
            report.done.push((action, reason));
        }
        self.record_loss(&losses)?;
        report.healed_bytes += self.heal(lease)?;
        if !report.deleted_packs.is_empty() {
            self.rebuild_index(&[])?;
        }
        let mut after = self.survey_all(request, progress)?;
        report.lost_bytes = salvage::lost_bytes(self, &after.damage)?.values().sum();
        add_impact(&self.packs, &after.manifests, &mut after.findings)?;
        (report.findings, report.unlisted_finding_count) = after.findings.finish();
        Ok(report)
    }

    /// A survey with all copies of manifests.
    fn survey_all(&self, request: RepairRequest, progress: &dyn JobProgress) -> Result<Survey> {
        let scrub = ScrubRequest {
            percent: request.percent,
            thread_count: request.thread_count,
        };
        self.survey_with_copies(scrub, progress)
    }

    /// The needed actions, ordered so that nothing is deleted before its replacement exists.
    fn actions(&self, survey: &Survey) -> Result<Vec<(RepairAction, String)>> {
        let mut actions = self.actions_for_objects(survey)?;
        actions.extend(actions_for_packs(survey));
        let mut refused = BTreeSet::new();
        for (action, _) in &actions {
            // An unreadable pack may contain the only copy of a lost snapshot's manifest.
            if let RepairAction::DeletePack { pack } = action
                && !self.is_free_of_lost_copies(*pack)?
            {
                refused.insert(action.clone());
            }
        }
        let mut seen = refused;
        actions.retain(|(action, _)| seen.insert(action.clone()));
        Ok(actions)
    }

    /// The actions for damaged small objects.
    fn actions_for_objects(&self, survey: &Survey) -> Result<Vec<(RepairAction, String)>> {
        let mut actions = Vec::new();
        let mut add = |action, reason: &str| actions.push((action, reason.to_owned()));
        for finding in survey.findings.list() {
            // A file or folder under the name of an object belongs to the user, who has to remove it.
            let is_removable = finding.kind.is_damage() && finding.kind != FindingKind::Obstructed;
            if !is_removable && finding.kind != FindingKind::Single {
                continue;
            }
            let Ok(object) = finding.object.parse::<ObjectName>() else {
                continue;
            };
            let relocation = RelocationId::of(&object);
            match object.kind() {
                ObjectKind::Config => add(RepairAction::RestoreConfig, &finding.detail),
                ObjectKind::Snapshot => {
                    if let Some(action) = self.restore_snapshot(survey, &object, finding.kind)? {
                        add(action, &finding.detail);
                    }
                }
                ObjectKind::Relocation
                    if relocation.is_some_and(|(id, replica)| {
                        read_replica(&*self.vault.store, &self.vault.keyring, &id, replica.other()).is_ok()
                    }) =>
                {
                    add(
                        RepairAction::RestoreRelocation {
                            object: finding.object.clone(),
                        },
                        &finding.detail,
                    );
                }
                // If its old pack is gone and needed, a damaged relocation is the only remaining record, and
                // is kept.
                ObjectKind::Relocation
                    if relocation.is_some_and(|(id, _)| {
                        survey.absent.contains(&id.pack) && survey.needed.contains(&id.pack)
                    }) => {}
                ObjectKind::Writer
                | ObjectKind::Condemned
                | ObjectKind::Forgotten
                | ObjectKind::Protected
                | ObjectKind::Relocation
                | ObjectKind::Scrub => add(
                    RepairAction::Replace {
                        object: finding.object.clone(),
                    },
                    &finding.detail,
                ),
                ObjectKind::Key | ObjectKind::Pack | ObjectKind::Index => {}
            }
        }
        Ok(actions)
    }

    /// The action that restores a snapshot; `None` if there is no copy, or if it was never committed and is
    /// incomplete.
    fn restore_snapshot(
        &self,
        survey: &Survey,
        object: &ObjectName,
        kind: FindingKind,
    ) -> Result<Option<RepairAction>> {
        let Ok(snapshot) = object.name().parse::<SnapshotId>() else {
            return Ok(None);
        };
        if kind == FindingKind::Differs || *object != snapshot_name(snapshot) {
            return Ok(None);
        }
        let Some(copy) = survey.copies.of(snapshot) else {
            return Ok(None);
        };
        if kind == FindingKind::Missing && !self.is_complete(copy)? {
            return Ok(None);
        }
        Ok(Some(RepairAction::RestoreSnapshot { snapshot, copy }))
    }
}

/// The actions for missing and damaged packs, and for an index that contradicts the packs.
fn actions_for_packs(survey: &Survey) -> Vec<(RepairAction, String)> {
    let mut actions = Vec::new();
    let mut add = |action, reason: &str| actions.push((action, reason.to_owned()));
    for pack in &survey.absent {
        let is_needed = survey.needed.contains(pack);
        if !is_needed && survey.damage.contains_key(pack) {
            add(
                RepairAction::ForgetDamage { pack: *pack },
                "it no longer exists, and nothing that snapshots need is missing",
            );
        }
        if is_needed && !survey.damage.contains_key(pack) {
            add(
                RepairAction::RecordLoss { pack: *pack },
                "it is missing, and snapshots need it",
            );
        }
    }
    for (pack, record) in &survey.damage {
        let is_needed = survey.needed.contains(pack);
        if is_needed && record.chunks.is_empty() && survey.index.lists_chunks(*pack) {
            add(
                RepairAction::RecordLoss { pack: *pack },
                "its directory is lost, and snapshots need it",
            );
        }
    }
    let segments = survey.index.bad_segments();
    let untidy = |kind| survey.findings.list().iter().any(|finding| finding.kind == kind);
    // Without snapshots, the index entries may be gc's only evidence that packs are lost, or not copied yet.
    let is_evidence = survey.manifests.is_empty() && untidy(FindingKind::Dangling);
    let is_untidy = !segments.is_empty() || untidy(FindingKind::Unlisted) || untidy(FindingKind::Dangling);
    if is_untidy && !is_evidence {
        let segments = segments.iter().map(ToString::to_string).collect();
        add(
            RepairAction::RebuildIndex { segments },
            "the index does not say what the packs say",
        );
    }
    for pack in survey.damage.keys().filter(|pack| survey.packs.contains_key(pack)) {
        if survey.needed.contains(pack) {
            add(RepairAction::Salvage { pack: *pack }, "it is damaged");
        } else {
            add(
                RepairAction::DeletePack { pack: *pack },
                "it is damaged, and no snapshot needs it any more",
            );
        }
    }
    actions
}
