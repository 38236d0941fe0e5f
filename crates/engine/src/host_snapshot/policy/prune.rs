//! Removes expired snapshots.

use std::collections::BTreeMap;

use holdfast_host::provider::{HostSnapshot, HostSnapshotName, Provider as _, is_in_transfer};
use holdfast_policy::sanoid::{DatasetPolicy, TypedSnapshot};

use super::hooks::{Event, ScriptCall};
use super::{PolicyRun, PolicyRunReport, RemovedByPolicy, Snapshots, dataset, typed};
use crate::repository::forget::Execution;

/// Removes the snapshots that no count of the policy keeps, of all datasets.
pub(super) fn prune(
    run: &PolicyRun<'_>,
    policies: &[&DatasetPolicy],
    snapshots: &Snapshots,
    report: &mut PolicyRunReport,
) {
    let mut pools: BTreeMap<String, Option<u8>> = BTreeMap::new();
    for policy in policies {
        let Some(present) = snapshots.get(&policy.dataset) else {
            continue;
        };
        let pool = policy.dataset.split('/').next().unwrap_or_default().to_owned();
        let used_percent = *pools.entry(pool.clone()).or_insert_with(|| {
            let used = run.request.providers.zfs().used_percent(&pool);
            used.map_err(|error| report.unreadable.push((pool, error.to_string())))
                .ok()
        });
        // The used space decides whether anything is removed, if pruning depends on it.
        let Some(used_percent) = used_percent else { continue };
        // As in sanoid: a snapshot that is being sent may be the last one that both sides share.
        let in_transfer = is_in_transfer(&policy.dataset);
        let ours: Vec<TypedSnapshot> = present.iter().filter_map(typed).collect();
        for expired in policy.expired(&ours, used_percent, run.now.timestamp()) {
            if run.job.interrupt.is_requested() {
                report.is_interrupted = true;
                return;
            }
            let name = HostSnapshotName {
                dataset: dataset(&policy.dataset),
                name: expired.snapshot.name.clone(),
            };
            let known = present.iter().find(|snapshot| snapshot.name == name);
            let obstacle = match run.request.execution {
                _ if in_transfer => {
                    Some("zfs send or zfs receive works on the dataset; the next run looks again".to_owned())
                }
                Execution::DryRun => None,
                Execution::Execute => match held(known) {
                    // Scripts are not called for a snapshot that is kept.
                    Some(reason) => Some(reason),
                    None => remove(run, policy, known, &name).err(),
                },
            };
            report.removed.push(RemovedByPolicy {
                obstacle: obstacle.or_else(|| held(known)),
                used_bytes: known.and_then(|snapshot| snapshot.used_bytes),
                reason: expired.reason.to_string(),
                snapshot: name,
            });
        }
    }
}

/// Why a snapshot is held; for dry runs.
fn held(snapshot: Option<&HostSnapshot>) -> Option<String> {
    snapshot
        .filter(|snapshot| snapshot.hold_count > 0)
        .map(|_| "it has a hold".to_owned())
}

/// Removes one snapshot, with its scripts before and after; returns why it was kept. Only the examined snapshot is
/// removed, since a script may take long.
fn remove(
    run: &PolicyRun<'_>,
    policy: &DatasetPolicy,
    known: Option<&HostSnapshot>,
    name: &HostSnapshotName,
) -> std::result::Result<(), String> {
    let known = known.ok_or_else(|| "it no longer exists".to_owned())?;
    let occasion = ScriptCall {
        snapshots: vec![name.name.clone()],
        ..ScriptCall::default()
    };
    run.call(policy, Event::PrePruning, &occasion)?;
    run.request.providers.zfs().destroy_this(known).map_err(|error| {
        let reason = error.to_string();
        run.job.progress.warning(&reason);
        reason
    })?;
    // A failure of the script was reported; the snapshot is removed.
    run.call(policy, Event::Pruning, &occasion).ok();
    Ok(())
}
