//! The datasets that the configurations of this host name.

use std::ffi::OsStr;

use holdfast_host::provider::{Dataset, ProviderKind};
use holdfast_policy::sanoid::SanoidConfig;

use crate::context::Context;
use crate::sanoid_file::SANOID_CONF;
use crate::{datasets, holdfast_file};

/// The verbs whose jobs work on datasets, and those whose jobs work by a sanoid.conf.
const ON_DATASETS: [&str; 2] = ["snapshot", "replicate"];
const BY_POLICY: &str = "cron";

/// The datasets of the sanoid.conf files and of the holdfast.toml of this host, as far as both can be read: what is wrong with them is said by
/// `config check`.
pub(super) fn datasets(context: &Context) -> Vec<Dataset> {
    let mut found = Vec::new();
    let mut policies = vec![SANOID_CONF.to_owned()];
    let config = std::fs::read_to_string(holdfast_file::path(context));
    let config = config.ok().and_then(|text| holdfast_file::parse(&text).ok());
    for config in &config {
        for job in &config.jobs {
            // What a job works on stands behind its options.
            let words = config.command(job);
            let words: Vec<&String> = words.iter().skip_while(|word| *word != "--").skip(1).collect();
            match job.kind.verb.first() {
                Some(verb) if ON_DATASETS.contains(verb) => {
                    let parsed = words.iter().filter_map(|word| datasets::parse(OsStr::new(word)).ok());
                    found.extend(parsed.flatten());
                }
                Some(&verb) if verb == BY_POLICY => policies.extend(words.into_iter().cloned()),
                _ => {}
            }
        }
    }
    for policy in policies {
        let text = std::fs::read_to_string(policy).unwrap_or_default();
        let policy = SanoidConfig::parse(&text);
        let names: Vec<String> = policy
            .iter()
            .flat_map(SanoidConfig::datasets)
            .map(str::to_owned)
            .collect();
        found.extend(names.into_iter().map(|name| Dataset {
            provider: ProviderKind::Zfs,
            name,
        }));
    }
    found.sort();
    found.dedup();
    found
}
