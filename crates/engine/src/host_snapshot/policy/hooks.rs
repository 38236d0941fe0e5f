//! The scripts of a policy: run by the shell like sanoid does, with sanoid's variables and those of Holdfast.

use std::path::Path;
use std::time::Duration;

use holdfast_host::{Call, ProcessOutcome};
use holdfast_policy::sanoid::DatasetPolicy;

use super::PolicyRun;

const SHELL: &str = "/bin/sh";
/// Timeout of a script without its own limit.
const DEADLINE_MAX: Duration = Duration::from_secs(24 * 3600);

/// The event for which a script is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    PreSnapshot,
    PostSnapshot,
    PrePruning,
    Pruning,
}

impl Event {
    /// The key of the script in the configuration, and sanoid's word for the event.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::PreSnapshot => ("pre_snapshot_script", "pre"),
            Self::PostSnapshot => ("post_snapshot_script", "post"),
            Self::PrePruning => ("pre_pruning_script", "pre-prune"),
            Self::Pruning => ("pruning_script", "prune"),
        }
    }
}

/// Values for the environment of a script.
#[derive(Debug, Clone, Default)]
pub(super) struct ScriptCall {
    /// Names of snapshots, without the dataset.
    pub(super) snapshots: Vec<String>,
    /// Their types.
    pub(super) types: Vec<String>,
    /// After the snapshots: whether the script before them failed.
    pub(super) has_pre_failed: Option<bool>,
    /// Why the snapshot failed.
    pub(super) error: Option<String>,
}

impl ScriptCall {
    fn variables(&self, event: Event, dataset: &str) -> Vec<(&'static str, String)> {
        let (key, word) = event.words();
        let first = self.snapshots.first().cloned().unwrap_or_default();
        let all = self.snapshots.join(",");
        let mut variables = vec![
            ("SANOID_SCRIPT", word.to_owned()),
            ("SANOID_TARGET", dataset.to_owned()),
            ("SANOID_SNAPNAME", first),
            ("HOLDFAST_EVENT", key.trim_end_matches("_script").replace('_', "-")),
            ("HOLDFAST_DATASET", dataset.to_owned()),
            ("HOLDFAST_SNAPSHOTS", all.clone()),
        ];
        if !self.types.is_empty() {
            variables.extend([
                ("SANOID_TARGETS", dataset.to_owned()),
                ("SANOID_SNAPNAMES", all),
                ("SANOID_TYPES", self.types.join(",")),
            ]);
        }
        if let Some(has_failed) = self.has_pre_failed {
            variables.push(("SANOID_PRE_FAILURE", u8::from(has_failed).to_string()));
            variables.push(("HOLDFAST_ERROR", self.error.clone().unwrap_or_default()));
        }
        variables
    }
}

impl PolicyRun<'_> {
    /// Calls a script of a dataset, if it has one; returns why it failed.
    pub(super) fn call(
        &self,
        policy: &DatasetPolicy,
        event: Event,
        occasion: &ScriptCall,
    ) -> std::result::Result<(), String> {
        let hooks = policy.hooks();
        let script = match event {
            Event::PreSnapshot => &hooks.pre_snapshot,
            Event::PostSnapshot => &hooks.post_snapshot,
            Event::PrePruning => &hooks.pre_pruning,
            Event::Pruning => &hooks.pruning,
        };
        let Some(script) = script else { return Ok(()) };
        let key = event.words().0;
        let is_before = matches!(event, Event::PreSnapshot | Event::PrePruning);
        let was_stopped = !is_before && self.job.interrupt.is_requested();
        let call = Call {
            program: Path::new(SHELL),
            arguments: &["-c", script],
            variables: &occasion.variables(event, &policy.dataset),
            withheld: &self.request.withheld,
            input: &[],
            time_out: hooks.deadline.unwrap_or(DEADLINE_MAX),
            // A script that runs after the stop request undoes what an earlier script did, and must not be stopped.
            is_stopped: &|| !was_stopped && self.job.interrupt.is_requested(),
        };
        let failed = match call.run(self.job.clock) {
            Ok(called) => {
                for line in &called.lines {
                    self.job.progress.note(&format!("{key} of {}: {line}", policy.dataset));
                }
                match called.outcome {
                    ProcessOutcome::Success => return Ok(()),
                    other => other.to_string(),
                }
            }
            Err(error) => error.to_string(),
        };
        let reason = format!("{key} of {}: {failed}", policy.dataset);
        self.job.progress.warning(&reason);
        Err(reason)
    }
}
