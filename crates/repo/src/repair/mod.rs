//! Repairs a repository: first a plan, then its execution.
//!
//! | what | how it is restored |
//! |---|---|
//! | configuration | from the copy in the key slots |
//! | index | from the directories of packs; the old segments go when the new ones are durable |
//! | an object of a relocation | from the other one that says the same |
//! | a snapshot | from the copy of its manifest in the last of its packs of maps |
//! | whole frames of a damaged pack | stored again, found by relocations |
//! | chunks of damaged frames, or of missing packs | when they are stored elsewhere, or once a backup has stored them again, by relocations ([`heal`]) |
//! | pages of maps | not at all: they are named nowhere but by their place. The next snapshot has its own |
//! | markers and records that cannot be read | removed, or written again where their name says all |
//!
//! What is lost is named: which snapshots, which disks, which bytes. Nothing that may still be useful is deleted: a
//! damaged pack is deleted only when every byte of it is stored elsewhere. Therefore: repair, back up the same machines
//! again, and repair once more. A backup heals by itself what it stores again.

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

/// How to look for damage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RepairRequest {
    /// Share of the packs that is read first, in percent: 100 finds everything, 0 repairs what was found before.
    pub percent: u8,
    /// Threads that read; with none, everything is done by the caller, in a fixed order.
    pub thread_count: usize,
}

/// One thing that repair does.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum RepairAction {
    /// The configuration is written again.
    RestoreConfig,
    /// The manifest of a snapshot is written again, from the copy that a pack carries.
    RestoreSnapshot {
        /// The snapshot.
        snapshot: SnapshotId,
        /// The pack with the copy.
        copy: PackId,
    },
    /// One of the two objects of a relocation is written again from the other.
    RestoreRelocation {
        /// The object that is written.
        object: String,
    },
    /// An object that cannot be read is removed; markers whose name says all are written again.
    Replace {
        /// The object.
        object: String,
    },
    /// The index is written again where it is damaged, or does not list what there is.
    RebuildIndex {
        /// Segments that are deleted afterwards.
        segments: Vec<String>,
    },
    /// What the index knows of a pack that is missing, or whose directory is lost, is remembered, so that it can be healed.
    RecordLoss {
        /// The pack.
        pack: PackId,
    },
    /// What is whole of a damaged pack is stored again, and what is lost is looked for elsewhere; the pack is deleted if
    /// nothing is left in it.
    Salvage {
        /// The pack.
        pack: PackId,
    },
    /// A damaged pack that no snapshot needs any more is deleted.
    DeletePack {
        /// The pack.
        pack: PackId,
    },
    /// A missing pack is not needed any more, and what was recorded of it is deleted.
    ForgetDamage {
        /// The pack.
        pack: PackId,
    },
}

/// What repair is going to do, and why.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RepairPlan {
    /// What is going to be done, in this order, each with its reason.
    pub actions: Vec<(RepairAction, String)>,
    /// What is wrong now, with the disks that it touches.
    pub findings: Vec<Finding>,
    /// Further things that are wrong.
    pub unlisted_finding_count: u64,
}

/// What repair did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RepairReport {
    /// What was done, each with its reason.
    pub done: Vec<(RepairAction, String)>,
    /// Bytes of damaged packs that were found elsewhere.
    pub healed_bytes: u64,
    /// Damaged packs in which nothing was left, and that were deleted.
    pub deleted_packs: Vec<PackId>,
    /// Bytes of data that are lost for now, in chunks whose identity is known: a backup of the same data brings them back.
    pub lost_bytes: u64,
    /// What is still wrong, with the disks that it touches: what is lost.
    pub findings: Vec<Finding>,
    /// Further things that are still wrong.
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

    /// Does what `plan` says, as far as it is still called for; nothing else. Only one runs at a time, and none beside gc.
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
        // Packs are deleted as by gc: the damage was recorded durably, and all writers that began before have ended.
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
                // All losses stand together, before what is going to change the index.
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

    /// A survey with every copy of a manifest.
    fn survey_all(&self, request: RepairRequest, progress: &dyn JobProgress) -> Result<Survey> {
        let scrub = ScrubRequest {
            percent: request.percent,
            thread_count: request.thread_count,
        };
        self.survey_with_copies(scrub, progress)
    }

    /// What is called for, in an order in which everything that is needed is there before something goes.
    fn actions(&self, survey: &Survey) -> Result<Vec<(RepairAction, String)>> {
        let mut actions = self.actions_for_objects(survey)?;
        actions.extend(actions_for_packs(survey));
        let mut refused = BTreeSet::new();
        for (action, _) in &actions {
            // A pack that cannot be read may be the only one that knows of a lost snapshot.
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

    /// What damaged small objects call for.
    fn actions_for_objects(&self, survey: &Survey) -> Result<Vec<(RepairAction, String)>> {
        let mut actions = Vec::new();
        let mut add = |action, reason: &str| actions.push((action, reason.to_owned()));
        for finding in survey.findings.list() {
            // A file or folder under the name of an object belongs to the user, who has to move it away.
            let is_ours = finding.kind.is_damage() && finding.kind != FindingKind::Obstructed;
            if !is_ours && finding.kind != FindingKind::Single {
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
                    if relocation.is_some_and(|(id, twin)| {
                        read_replica(&*self.vault.store, &self.vault.keyring, &id, twin.other()).is_ok()
                    }) =>
                {
                    add(
                        RepairAction::RestoreRelocation {
                            object: finding.object.clone(),
                        },
                        &finding.detail,
                    );
                }
                // Where its old pack is gone and needed, a damaged relocation is all that is left, and kept.
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

    /// How a snapshot comes back; not at all when there is no copy, or when it was never committed and is not whole.
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

/// What missing and damaged packs, and an index that does not agree with the packs, call for.
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
    // Without a snapshot, the entries of the index may be the only evidence for gc that packs are lost, or not copied yet.
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
