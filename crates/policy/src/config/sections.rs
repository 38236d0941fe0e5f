//! Builds the configuration from sections: checks keys, values and references.

use super::document::{RawValue, Section};
use super::form::Value;
use super::jobs::ConfigContext;
use super::{
    Config, ConfigError, ConfigSetting, ConfigWarning, ConfiguredPool, ConfiguredRepository, DaemonSettings, jobs,
    keys, notify,
};
use crate::FixedDuration;
use crate::config::section_names::{NAMED, ROOT};
use crate::config::values::{count, place, text, values, values_of};
use crate::nearest::nearest;
use crate::sanoid::Origin;

/// The version of the file format.
const VERSION: i64 = 1;
/// Default maximum number of jobs that run at once.
const JOBS_AT_ONCE: usize = 2;
const STOP_WITHIN: FixedDuration = FixedDuration::from_secs(60);
const REMIND_AFTER: FixedDuration = FixedDuration::from_secs(86_400);
const NAME_LENGTH_MAX: usize = 64;

/// Reads all sections. The configuration is valid only if `errors` stays empty.
pub(super) fn read(sections: &[Section], errors: &mut Vec<ConfigError>) -> Config {
    let of = |group: &'static str| sections.iter().filter(move |section| section.group == group);
    of(ROOT).for_each(|root| version(root, errors));
    for section in sections.iter().filter(|section| NAMED.contains(&&section.group[..])) {
        name(section, errors);
    }
    let daemon = daemon(of("daemon").next(), errors);
    let repositories: Vec<_> = of("repositories").map(|section| repository(section, errors)).collect();
    let pools: Vec<_> = of("pools")
        .map(|section| ConfiguredPool::read(section, errors))
        .collect();
    let retentions = of("retention").map(|section| {
        let values = values(section, keys::retention_form, keys::names_of_retention(), errors);
        (section, values)
    });
    let retentions: Vec<_> = retentions.collect();
    let recipients: Vec<_> = of("notify")
        .filter_map(|section| notify::read(section, errors))
        .collect();
    let defaults = of("defaults").next();
    let defaults = defaults.map(|section| values(section, keys::default_form, keys::names_of_defaults(), errors));
    let surroundings = ConfigContext {
        repositories: &repositories,
        pools: &pools,
        retentions: &retentions,
        notify_names: &of("notify")
            .filter_map(|section| section.name.clone())
            .collect::<Vec<_>>(),
        defaults: &defaults.unwrap_or_default(),
    };
    let jobs: Vec<_> = of("jobs")
        .filter_map(|section| jobs::read(section, &surroundings, errors))
        .collect();
    let mut warnings = Vec::new();
    if jobs.is_empty() {
        warnings.push(ConfigWarning::NoJob);
    }
    if recipients.is_empty() {
        warnings.push(ConfigWarning::NoNotification);
    }
    jobs::job_warnings(&jobs, &mut warnings);
    let is_used = |section: &&Section| {
        let name = section.name.as_deref();
        jobs.iter().any(|job| {
            let used = if section.group == "retention" {
                &job.retention
            } else {
                &job.repository
            };
            used.as_deref() == name
        })
    };
    let usable = of("repositories").chain(of("retention"));
    warnings.extend(
        usable
            .filter(|section| !is_used(section))
            .map(|section| ConfigWarning::Unused {
                line: section.line,
                place: place(section),
            }),
    );
    Config {
        daemon,
        repositories,
        pools,
        jobs,
        recipients,
        warnings,
    }
}

fn version(root: &Section, errors: &mut Vec<ConfigError>) {
    for entry in root.entries.iter().filter(|entry| entry.key != "version") {
        errors.push(ConfigError::UnknownKey {
            line: entry.line,
            place: place(root),
            key: entry.key.clone(),
            nearest: nearest(&entry.key, ["version"]).map(str::to_owned),
        });
    }
    match root.get("version") {
        Some(entry) if entry.value == RawValue::Number(Ok(VERSION)) => {}
        Some(entry) => errors.push(ConfigError::Value {
            line: entry.line,
            place: place(root),
            key: "version".to_owned(),
            wanted: format!("{VERSION}, the only supported version"),
        }),
        None => errors.push(ConfigError::Missing {
            line: 1,
            place: "the file".to_owned(),
            what: format!("version = {VERSION} as its first line"),
        }),
    }
}

fn name(section: &Section, errors: &mut Vec<ConfigError>) {
    let name = section.name.as_deref().unwrap_or_default();
    let starts_well = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    let is_plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    if !(starts_well && is_plain && name.len() <= NAME_LENGTH_MAX) {
        errors.push(ConfigError::Name {
            line: section.line,
            name: name.to_owned(),
        });
    }
}

fn daemon(section: Option<&Section>, errors: &mut Vec<ConfigError>) -> DaemonSettings {
    let values = section
        .map(|section| values_of(section, keys::DAEMON, errors))
        .unwrap_or_default();
    let duration = |key: &str, default| match values.get(key) {
        Some((_, Value::Duration(duration))) => *duration,
        _ => default,
    };
    let mut settings = DaemonSettings {
        jobs_at_once: count(&values, "jobs_at_once").unwrap_or(JOBS_AT_ONCE),
        stop_within: duration("stop_within", STOP_WITHIN),
        remind_after: duration("remind_after", REMIND_AFTER),
        settings: Vec::new(),
    };
    let shown = [
        ("jobs_at_once", settings.jobs_at_once.to_string()),
        ("stop_within", settings.stop_within.to_string()),
        ("remind_after", settings.remind_after.to_string()),
    ];
    settings
        .settings
        .extend(shown.into_iter().map(|(key, value)| ConfigSetting {
            key,
            value,
            origin: match values.get(key) {
                Some((line, _)) => Origin::Line {
                    section: "daemon".to_owned(),
                    line: *line,
                },
                None => Origin::Default,
            },
        }));
    settings
}

fn repository(section: &Section, errors: &mut Vec<ConfigError>) -> ConfiguredRepository {
    let values = values_of(section, keys::REPOSITORY, errors);
    let text = |key: &str| text(&values, key);
    if section.get("path").is_none() {
        errors.push(ConfigError::Missing {
            line: section.line,
            place: place(section),
            what: "the path of its folder".to_owned(),
        });
    }
    if let (Some(_), Some((line, _))) = (values.get("password_file"), values.get("password_command")) {
        errors.push(ConfigError::Together {
            line: *line,
            place: place(section),
            what: "password_file and password_command are both given, and only one can hold the password".to_owned(),
        });
    }
    ConfiguredRepository {
        name: section.name.clone().unwrap_or_default(),
        line: section.line,
        path: text("path").unwrap_or_default(),
        password_file: text("password_file"),
        password_command: text("password_command"),
        jobs_at_once: count(&values, "jobs_at_once").unwrap_or(usize::MAX),
    }
}
