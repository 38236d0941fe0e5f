//! Jobs: each has a kind, its own settings, the settings of the defaults, and those of a retention.

use std::time::Duration;

use super::document::Section;
use super::error::{ConfigError, ConfigWarning};
use super::form::{Form, Value};
use super::kinds::{Claim, JobKind, JobOption, KEEP, KINDS};
use super::{ConfigSetting, ConfiguredPool, ConfiguredRepository, keys, pools};
use crate::config::values::{Values, place, values};
use crate::nearest::nearest;
use crate::sanoid::Origin;
use crate::schedule::{Claims, Resource, Timing, own_delay};
use crate::{Calendar, FixedDuration, Glob};

/// A recurring job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// The name.
    pub name: String,
    /// The line of its section.
    pub line: u32,
    /// The command that the job runs.
    pub kind: &'static JobKind,
    /// Whether the job is enabled.
    pub is_enabled: bool,
    /// The calendar expressions.
    pub when: Vec<Calendar>,
    /// The maximum random delay.
    pub jitter: FixedDuration,
    /// Whether a missed run is caught up.
    pub is_caught_up: bool,
    /// The timeout of a run.
    pub timeout: FixedDuration,
    /// Maximum number of retries of a failed run.
    pub retry_count_max: u32,
    /// The delay before the first retry.
    pub retry_delay: FixedDuration,
    /// The name of the repository that the job uses.
    pub repository: Option<String>,
    /// The name of the retention that the job uses.
    pub retention: Option<String>,
    /// The names of the recipients; all recipients if empty.
    pub notify: Vec<String>,
    /// All effective settings, for display.
    pub settings: Vec<ConfigSetting>,
    /// The resources that the job uses while it runs.
    pub claims: Claims,
    /// The pool of the job's machines, if that pool is configured.
    pub(super) pool: Option<String>,
    pub(super) options: Vec<String>,
    pub(super) positional: Vec<String>,
}

impl Job {
    /// The schedule on a host.
    pub fn timing(&self, host: &str) -> Timing {
        Timing {
            when: self.when.clone(),
            delay: own_delay(self.jitter.duration(), host, &self.name),
            is_caught_up: self.is_caught_up,
            retry_count_max: self.retry_count_max,
            retry_delay: self.retry_delay.duration(),
        }
    }

    /// The setting that becomes a command line option such as `--bwlimit`.
    pub fn setting_of(&self, option: &str) -> Option<&ConfigSetting> {
        let key = option.trim_start_matches('-').replace('-', "_");
        self.settings.iter().find(|setting| setting.key == key)
    }
}

/// The sections that jobs may refer to.
pub(super) struct ConfigContext<'a> {
    pub(super) repositories: &'a [ConfiguredRepository],
    pub(super) pools: &'a [ConfiguredPool],
    pub(super) retentions: &'a [(&'a Section, Values)],
    pub(super) notify_names: &'a [String],
    pub(super) defaults: &'a Values,
}

struct ResolvedSetting {
    key: &'static str,
    value: Value,
    origin: Origin,
}

/// Reads a job; `None` if it has errors.
pub(super) fn read(section: &Section, context: &ConfigContext<'_>, errors: &mut Vec<ConfigError>) -> Option<Job> {
    let kind = kind(section, errors)?;
    let is_fit = |name: &str| match name {
        "retention" => has_rules(kind),
        "repository" => kind.needs_repository,
        _ => true,
    };
    let known = || keys::JOB.iter().map(|(key, _)| key.name).filter(|name| is_fit(name));
    let form_of = |name: &str| match kind.option(name) {
        Some(option) => Some(option.form),
        None => keys::job_form(name).filter(|_| known().any(|known| known == name)),
    };
    let names = known().chain(kind.options.iter().map(|option| option.key));
    let own = values(section, form_of, names, errors);
    let settings = resolve_settings(section, kind, &own, context, errors);
    let get = |key: &str| value_of(&settings, key);
    let text = |key: &str| get(key).and_then(|value| value.texts().first().cloned());
    let duration = |key: &str| match get(key) {
        Some(Value::Duration(duration)) => *duration,
        _ => FixedDuration::default(),
    };
    let is = |key: &str| get(key) == Some(&Value::Flag(true));
    if kind.needs_repository {
        check_repository(section, &own, text("repository"), context, errors);
    }
    check_needs(section, kind, |key| form_of(key).is_some(), errors);
    check_together(section, &own, errors);
    let pool = pools::of_job(section, kind, &own, context.pools, errors);
    check_notify(section, &own, context, errors);
    let (mut options, mut positional) = (Vec::new(), Vec::new());
    for option in kind.options {
        if let Some(value) = get(option.key) {
            option.put(value, &mut options, &mut positional);
        }
    }
    let repository = text("repository").filter(|_| kind.needs_repository);
    let limit = |name: &String| {
        let repository = context.repositories.iter().find(|repository| repository.name == *name);
        repository.map(|repository| (name.clone(), repository.jobs_at_once))
    };
    Some(Job {
        name: section.name.clone().unwrap_or_default(),
        line: section.line,
        kind,
        is_enabled: is("enabled"),
        when: match get("when") {
            Some(Value::Calendars(calendars)) => calendars.clone(),
            _ => Vec::new(),
        },
        jitter: duration("jitter"),
        is_caught_up: is("catch_up"),
        timeout: duration("timeout"),
        retry_count_max: match get("retries") {
            Some(Value::Count(count)) => u32::try_from(*count).unwrap_or(u32::MAX),
            _ => 0,
        },
        retry_delay: duration("retry_delay"),
        claims: Claims {
            repository: repository.as_ref().and_then(limit),
            resources: resources(kind, &get),
        },
        repository,
        retention: text("retention"),
        notify: get("notify").map(|value| value.texts().to_vec()).unwrap_or_default(),
        settings: settings.iter().map(ResolvedSetting::shown).collect(),
        pool,
        options,
        positional,
    })
}

fn value_of<'s>(settings: &'s [ResolvedSetting], key: &str) -> Option<&'s Value> {
    let setting = settings.iter().find(|setting| setting.key == key)?;
    Some(&setting.value)
}

fn kind(section: &Section, errors: &mut Vec<ConfigError>) -> Option<&'static JobKind> {
    let names = KINDS.iter().map(|kind| kind.name);
    let wanted = || format!("one of {}", names.clone().collect::<Vec<_>>().join(", "));
    let Some(entry) = section.get("do") else {
        errors.push(ConfigError::Missing {
            line: section.line,
            place: place(section),
            what: format!("do = {}", wanted()),
        });
        return None;
    };
    let word = match Form::Text.read(&entry.value) {
        Ok(Value::Text(word)) => word,
        _ => String::new(),
    };
    let kind = JobKind::find(&word);
    if kind.is_none() {
        let meant = nearest(&word, names.clone()).map(|meant| format!("; did you mean {meant}?"));
        errors.push(ConfigError::Value {
            line: entry.line,
            place: place(section),
            key: "do".to_owned(),
            wanted: wanted() + &meant.unwrap_or_default(),
        });
    }
    kind
}

/// Whether a kind uses retention rules.
fn has_rules(kind: &JobKind) -> bool {
    kind.option(KEEP[0].key).is_some()
}

/// All effective settings of a job: from its section, its retention, the defaults, or built in.
fn resolve_settings(
    section: &Section,
    kind: &JobKind,
    own: &Values,
    context: &ConfigContext<'_>,
    errors: &mut Vec<ConfigError>,
) -> Vec<ResolvedSetting> {
    let rules = retention(section, own, context, errors);
    let common = keys::JOB.iter().map(|(key, built_in)| (key.name, key.form, *built_in));
    let options = kind.options.iter().map(|option| (option.key, option.form, ""));
    let is_pool_job = pools::is_pool_job(own);
    let mut found = Vec::new();
    for (key, form, built_in) in common.chain(options) {
        if (key == "repository" && !kind.needs_repository) || (key == "retention" && !has_rules(kind)) {
            continue;
        }
        let from_retention = rules.and_then(|(title, values)| Some((title, values.get(key)?)));
        let from_defaults = context.defaults.get(key).map(|entry| ("defaults".to_owned(), entry));
        let written = own.get(key).map(|entry| (section.title(), entry));
        let written = written.or_else(|| from_retention.map(|(title, entry)| (title.to_owned(), entry)));
        // Some kinds use a name for a setting of another form than that of the defaults. Pools ignore some settings.
        let is_fit =
            kind.option(key).is_none_or(JobOption::is_for_defaults) && !(is_pool_job && pools::is_guest_setting(key));
        match written.or_else(|| from_defaults.filter(|_| is_fit)) {
            Some((section, (line, value))) => found.push(ResolvedSetting {
                key,
                value: value.clone(),
                origin: Origin::Line { section, line: *line },
            }),
            None => found.extend(form_default(form, built_in).map(|value| ResolvedSetting {
                key,
                value,
                origin: Origin::Default,
            })),
        }
    }
    found
}

/// Parses the built-in default by its form.
fn form_default(form: Form, text: &str) -> Option<Value> {
    match form {
        _ if text.is_empty() => None,
        Form::Flag => Some(Value::Flag(text == "true")),
        Form::Count { .. } => text.parse().ok().map(Value::Count),
        Form::Duration => text.parse().ok().map(Value::Duration),
        Form::Calendars => text.parse().ok().map(|calendar| Value::Calendars(vec![calendar])),
        _ => Some(Value::Text(text.to_owned())),
    }
}

/// The retention rules that a job names, with their section.
fn retention<'a>(
    section: &Section,
    own: &Values,
    context: &'a ConfigContext<'_>,
    errors: &mut Vec<ConfigError>,
) -> Option<(&'a str, &'a Values)> {
    let (line, value) = own.get("retention")?;
    let name = value.texts().first()?;
    let named = context
        .retentions
        .iter()
        .find(|(rules, _)| rules.name.as_ref() == Some(name));
    if let Some((rules, values)) = named {
        return Some((rules.name.as_deref()?, values));
    }
    let known = context.retentions.iter().filter_map(|(rules, _)| rules.name.as_deref());
    errors.push(no_such(section, *line, "retention", name, known));
    None
}

fn no_such<'k>(
    section: &Section,
    line: u32,
    group: &'static str,
    name: &str,
    known: impl Iterator<Item = &'k str>,
) -> ConfigError {
    ConfigError::NoSuch {
        line,
        place: place(section),
        group,
        name: name.to_owned(),
        nearest: nearest(name, known).map(str::to_owned),
    }
}

fn check_repository(
    section: &Section,
    own: &Values,
    name: Option<String>,
    context: &ConfigContext<'_>,
    errors: &mut Vec<ConfigError>,
) {
    let line = own.get("repository").map_or(section.line, |(line, _)| *line);
    match name {
        Some(name) if context.repositories.iter().any(|repository| repository.name == name) => {}
        Some(name) => {
            let known = context.repositories.iter().map(|repository| &repository.name[..]);
            errors.push(no_such(section, line, "repositories", &name, known));
        }
        None if section.get("repository").is_some() || is_misspelt(section, &["repository"], |_| false) => {}
        None => errors.push(ConfigError::Missing {
            line,
            place: place(section),
            what: "repository = the name of a section [repositories.NAME]".to_owned(),
        }),
    }
}

fn check_needs(section: &Section, kind: &JobKind, is_known: impl Fn(&str) -> bool, errors: &mut Vec<ConfigError>) {
    let needs = kind.needs_one_of;
    let is_there = needs.is_empty() || needs.iter().any(|key| section.get(key).is_some());
    // A misspelt key is reported as misspelt, and not also as missing.
    if !is_there && !is_misspelt(section, needs, is_known) {
        errors.push(ConfigError::Missing {
            line: section.line,
            place: place(section),
            what: needs.join(" or "),
        });
    }
}

/// Whether an unknown key resembles one of these.
fn is_misspelt(section: &Section, keys: &[&str], is_known: impl Fn(&str) -> bool) -> bool {
    let mut unknown = section.entries.iter().filter(|entry| !is_known(&entry.key));
    unknown.any(|entry| nearest(&entry.key, keys.iter().copied()).is_some())
}

/// Checks for settings that the command would accept but interpret differently.
fn check_together(section: &Section, own: &Values, errors: &mut Vec<ConfigError>) {
    for (one, other) in [("machines", "images"), ("machines", "all"), ("images", "all")] {
        let are_both = own.contains_key(one) && own.get(other).is_some_and(|(_, value)| *value != Value::Flag(false));
        if let Some((line, _)) = own.get(other).filter(|_| are_both) {
            errors.push(ConfigError::Together {
                line: *line,
                place: place(section),
                what: format!("{one} and {other} cannot be in one job: use two jobs"),
            });
        }
    }
}

fn check_notify(section: &Section, own: &Values, context: &ConfigContext<'_>, errors: &mut Vec<ConfigError>) {
    let entry = own.get("notify").or_else(|| context.defaults.get("notify"));
    let Some((line, value)) = entry else { return };
    for name in value.texts() {
        if !context.notify_names.contains(name) {
            let known = context.notify_names.iter().map(String::as_str);
            errors.push(no_such(section, *line, "notify", name, known));
        }
    }
}

/// The exclusive resources of a job.
fn resources<'v>(kind: &JobKind, get: &impl Fn(&str) -> Option<&'v Value>) -> Vec<Resource> {
    match kind.claim {
        Claim::Nothing => return Vec::new(),
        Claim::Kind => return vec![Resource::Other(format!("kind:{}", kind.name))],
        Claim::Machines => {}
    }
    let texts = |key: &str| get(key).map(Value::texts).unwrap_or_default().iter();
    let mut resources: Vec<Resource> = texts("machines").map(|word| machine(word)).collect();
    if get("all") == Some(&Value::Flag(true)) {
        resources.push(Resource::UnknownMachines);
    }
    resources.extend(
        texts("images")
            .chain(texts("datasets"))
            .map(|word| Resource::Other(word.clone())),
    );
    resources
}

/// The resource for a word that names machines.
fn machine(word: &str) -> Resource {
    let name = word.strip_prefix("libvirt:").unwrap_or(word);
    if let Some((host, machine)) = pools::pool_and_machine(word) {
        return Resource::PoolMachine { host, machine };
    }
    match Glob::parse(name) {
        _ if word.starts_with("tag:") => Resource::UnknownMachines,
        _ if word.starts_with("qmp:") => Resource::Other(word.to_owned()),
        Ok(glob) if Glob::is_one(name) => Resource::Machines(glob),
        _ => Resource::Machine(name.to_owned()),
    }
}

impl ResolvedSetting {
    fn shown(&self) -> ConfigSetting {
        ConfigSetting {
            key: self.key,
            value: self.value.shown(),
            origin: self.origin.clone(),
        }
    }
}

/// Warnings about jobs.
pub(super) fn job_warnings(jobs: &[Job], warnings: &mut Vec<ConfigWarning>) {
    for (index, job) in jobs.iter().enumerate() {
        let place = format!("[jobs.{}]", job.name);
        if has_rules(job.kind) && !job.options.iter().any(|word| word.starts_with("--keep-")) {
            warnings.push(ConfigWarning::KeepsAll {
                line: job.line,
                place: place.clone(),
            });
        }
        let is_duplicate = |other: &&Job| {
            let same_words = (&other.options, &other.positional) == (&job.options, &job.positional);
            other.kind == job.kind && same_words && other.repository == job.repository && other.when == job.when
        };
        if let Some(other) = jobs[..index].iter().find(is_duplicate) {
            warnings.push(ConfigWarning::DuplicateJob {
                line: job.line,
                place,
                other: other.name.clone(),
            });
        }
    }
}

impl Job {
    /// Warnings about the schedule, as of now.
    pub fn timing_warnings(&self, now: jiff::Timestamp, zone: &jiff::tz::TimeZone) -> Vec<ConfigWarning> {
        let place = format!("[jobs.{}]", self.name);
        let never = self
            .when
            .iter()
            .filter(|calendar| calendar.next_after(now, zone).is_none());
        let mut warnings: Vec<_> = never
            .map(|calendar| ConfigWarning::NeverDue {
                line: self.line,
                place: place.clone(),
                calendar: calendar.to_string(),
            })
            .collect();
        let shortest = self.when.iter().filter_map(|calendar| {
            let mut times = calendar.instants_after(now, zone);
            let (first, second) = (times.next()?, times.next()?);
            Duration::try_from(second.duration_since(first)).ok()
        });
        if let Some(period) = shortest.min().filter(|period| *period < self.jitter.duration()) {
            warnings.push(ConfigWarning::JitterBeyondPeriod {
                line: self.line,
                place,
                jitter: self.jitter.to_string(),
                period: FixedDuration::from_secs(period.as_secs()).to_string(),
            });
        }
        warnings
    }
}
