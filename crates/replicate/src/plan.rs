//! Plans the streams of a dataset, and describes its state before they are sent.

use holdfast_host::provider::{
    PartialReceive, ProviderKind, ReplicaBase, ReplicaDataset, ReplicaSnapshot, SendRequest, StreamForm,
};
use holdfast_host::shell_line;
use holdfast_policy::{
    Divergence, Idle, PointKind, ReplicaPlan, ReplicaPoint, ReplicaRules, ReplicaStep, Replication, Streams,
    TargetOrder, plan_replication,
};

use super::{RawChoice, ReplicaOutcome, ReplicatedDataset, ReplicatedStream, ReplicationSides};

/// The shell command that renames a dataset.
fn set_aside(dataset: &str) -> String {
    shell_line(["zfs", "rename", dataset, &format!("{dataset}-old")])
}

impl ReplicationSides<'_> {
    fn points(&self, dataset: &ReplicaDataset) -> Vec<ReplicaPoint> {
        let point = |snapshot: &ReplicaSnapshot| ReplicaPoint {
            name: snapshot.name.clone(),
            identity: snapshot.identity.clone(),
            time_s: snapshot.time_s,
            kind: if snapshot.is_bookmark {
                PointKind::Bookmark
            } else {
                PointKind::Snapshot
            },
            is_wanted: !snapshot.is_bookmark && (self.request.is_wanted)(&snapshot.name),
        };
        dataset.snapshots.iter().map(point).collect()
    }

    pub(super) fn plan(&self, source: &ReplicaDataset, there: Option<&ReplicaDataset>) -> Replication {
        let rules = ReplicaRules {
            order: if self.request.target.side.kind() == ProviderKind::Zfs {
                TargetOrder::Linear
            } else {
                TargetOrder::Free
            },
            choice: self.request.choice,
            // A stream of several snapshots contains properties, which are not accepted from another host.
            streams: if self.source.sends_intermediates
                && self.target.sends_intermediates
                && self.request.source.side.host().is_none()
            {
                Streams::Many
            } else {
                Streams::One
            },
        };
        // A dataset whose first snapshot was only partly received counts as missing.
        let is_begun = |there: &&ReplicaDataset| !there.snapshots.is_empty() || there.partial.is_none();
        let received = there.filter(is_begun).map(|there| {
            let mut points = self.points(there);
            points.retain(|point| point.kind == PointKind::Snapshot);
            points
        });
        plan_replication(&self.points(source), received.as_deref(), rules)
    }

    pub(super) fn described(
        &self,
        source: &ReplicaDataset,
        target: &str,
        there: Option<&ReplicaDataset>,
        plan: &Replication,
    ) -> ReplicatedDataset {
        let newest = |dataset: &ReplicaDataset, is_source: bool| {
            let mut snapshots = dataset.snapshots.iter().rev().filter(|one| !one.is_bookmark);
            let found = snapshots.find(|one| !is_source || (self.request.is_wanted)(&one.name));
            found.map(|one| (one.name.clone(), one.time_s))
        };
        let notes = plan.name_conflicts.iter().map(|name| {
            format!(
                "{target} has another snapshot {name}: that of {} is left out; rename one of them",
                source.name
            )
        });
        ReplicatedDataset {
            source: source.name.clone(),
            target: target.to_owned(),
            newest_here: newest(source, true),
            newest_there: there.and_then(|there| newest(there, false)),
            common: plan.common.clone(),
            behind_count: plan.behind_count,
            behind_s: plan.behind_s,
            is_resumable: there.is_some_and(|there| matches!(there.partial, Some(PartialReceive::Token(_)))),
            streams: Vec::new(),
            outcome: self.outcome(target, plan),
            notes: notes.collect(),
        }
    }

    /// The outcome if nothing is sent.
    pub(super) fn outcome(&self, target: &str, plan: &Replication) -> ReplicaOutcome {
        let at = self
            .request
            .target
            .side
            .host()
            .map(|host| format!("at {host}: "))
            .unwrap_or_default();
        let diverged = |reason: String, advice: String| ReplicaOutcome::Diverged {
            reason,
            advice: format!("{at}{advice}"),
        };
        match &plan.plan {
            ReplicaPlan::Idle(Idle::UpToDate) => ReplicaOutcome::UpToDate,
            ReplicaPlan::Idle(_) => ReplicaOutcome::Nothing,
            ReplicaPlan::Send(_) => ReplicaOutcome::Planned,
            ReplicaPlan::Diverged(Divergence::NoCommonSnapshot) => diverged(
                format!("{target} has snapshots, none of which the source has any more"),
                format!(
                    "{} keeps the existing content, and everything is sent again",
                    set_aside(target)
                ),
            ),
            ReplicaPlan::Diverged(Divergence::TargetIsNoReplica) => diverged(
                format!("{target} is there, and has no snapshot: it is no copy"),
                format!("name another target, or {}", set_aside(target)),
            ),
            ReplicaPlan::Diverged(Divergence::TargetHasNewer { common, own }) => diverged(
                format!("{target} has snapshots of its own since {common}: {}", own.join(", ")),
                format!(
                    "{} gives them up; {} keeps them",
                    shell_line(["zfs", "rollback", "-r", &format!("{target}@{common}")]),
                    set_aside(target)
                ),
            ),
        }
    }

    /// The report for a dataset whose replica has another name at the target.
    pub(super) fn diverged_by_rename(&self, source: &ReplicaDataset, target: &str, was: &str) -> ReplicatedDataset {
        let plan = self.plan(source, None);
        let mut done = self.described(source, target, None, &plan);
        let at = self
            .request
            .target
            .side
            .host()
            .map(|host| format!("at {host}: "))
            .unwrap_or_default();
        done.outcome = ReplicaOutcome::Diverged {
            reason: format!("{was} has the snapshots of {}: it was renamed", source.name),
            advice: format!("{at}{}", shell_line(["zfs", "rename", was, target])),
        };
        done
    }

    /// Adds the streams that would be sent.
    pub(super) fn add_planned_streams(
        &self,
        source: &ReplicaDataset,
        there: Option<&ReplicaDataset>,
        plan: &Replication,
        done: &mut ReplicatedDataset,
    ) {
        let ReplicaPlan::Send(steps) = &plan.plan else { return };
        for step in steps {
            let sending = self.sending(source, there, step);
            done.streams.push(ReplicatedStream {
                base: step.base.as_ref().map(|(name, _)| name.clone()),
                to: Some(step.to.clone()),
                count: step.count,
                is_resumed: false,
                stream_bytes: self.request.source.side.estimate(&sending).ok().flatten(),
                link_bytes: None,
            });
        }
    }

    pub(super) fn sending(
        &self,
        source: &ReplicaDataset,
        there: Option<&ReplicaDataset>,
        step: &ReplicaStep,
    ) -> SendRequest {
        let is_raw = match self.request.raw {
            RawChoice::Raw => true,
            RawChoice::Plain => false,
            // A target that was started unencrypted stays unencrypted.
            RawChoice::Auto => source.is_encrypted && there.is_none_or(|there| there.is_encrypted),
        };
        SendRequest {
            dataset: source.name.clone(),
            base: step.base.as_ref().map(|(name, kind)| ReplicaBase {
                name: name.clone(),
                is_bookmark: *kind == PointKind::Bookmark,
            }),
            to: step.to.clone(),
            has_intermediates: step.count > 1,
            form: match () {
                () if is_raw => StreamForm::Raw,
                () if self.source.sends_as_stored && self.target.sends_as_stored => StreamForm::AsStored,
                () => StreamForm::Plain,
            },
            token: None,
            compression: self.sender_compression,
        }
    }
}
