//! The datasets that this host's configurations name.

use std::ffi::OsStr;

use holdfast_host::provider::{Dataset, ProviderKind};
use holdfast_policy::config::Config;
use holdfast_policy::sanoid::SanoidConfig;

use crate::context::Context;
use crate::context::holdfast_file;
use crate::context::sanoid_file::SANOID_CONF;
use crate::machines::datasets;

/// The verbs of jobs that work on datasets, and of jobs that use a sanoid.conf.
const ON_DATASETS: [&str; 2] = ["snapshot", "replicate"];
const BY_POLICY: &str = "cron";

/// The datasets in the sanoid.conf files and the holdfast.toml of this host, as far as these can be read; `config
/// check` reports their errors.
pub(super) fn datasets(context: &Context) -> Vec<Dataset> {
    let (mut found, mut policies) = (Vec::new(), vec![SANOID_CONF.to_owned()]);
    let text = std::fs::read_to_string(holdfast_file::path(context)).unwrap_or_default();
    if let Ok(config) = holdfast_file::parse(&text, context.command_line()) {
        of_jobs(&config, &mut found, &mut policies);
    }
    for policy in policies {
        let text = std::fs::read_to_string(policy).unwrap_or_default();
        if let Ok(policy) = SanoidConfig::parse(&text) {
            found.extend(policy.datasets().map(|name| Dataset {
                provider: ProviderKind::Zfs,
                name: name.to_owned(),
            }));
        }
    }
    found.sort();
    found.dedup();
    found
}

fn of_jobs(config: &Config, found: &mut Vec<Dataset>, policies: &mut Vec<String>) {
    for job in &config.jobs {
        // The datasets of a job follow its options.
        let words = config.command(job).into_iter().skip_while(|word| word != "--").skip(1);
        match job.kind.verb.first() {
            Some(verb) if ON_DATASETS.contains(verb) => {
                let parsed = words.filter_map(|word| datasets::parse(OsStr::new(&word)).ok());
                found.extend(parsed.flatten());
            }
            Some(&verb) if verb == BY_POLICY => policies.extend(words),
            _ => {}
        }
    }
}
