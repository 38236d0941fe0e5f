//! Jobs: each a kind, with settings of its own, of the defaults, and of a retention.

use std::time::Duration;

use super::document::Section;
use super::error::{ConfigError, ConfigWarning};
use super::form::{Form, Value};
use super::kinds::{Claim, JobKind, JobOption, KEEP, KINDS};
use super::{ConfigSetting, ConfiguredPool, ConfiguredRepository, keys, pools};
use crate::config::values::{Values, place, values};
use crate::nearest::nearest;
use crate::sanoid::Origin;
use crate::schedule::{Claims, Thing, Timing, own_delay};
use crate::{Calendar, Glob, Lapse};

/// Something that is done again and again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// What it is called.
    pub name: String,
    /// The line of its section.
    pub line: u32,
    /// What it does.
    pub kind: &'static JobKind,
    /// Whether it is done at all.
    pub is_enabled: bool,
    /// When.
    pub when: Vec<Calendar>,
    /// How long after each time it may wait.
    pub jitter: Lapse,
    /// Whether a time that was missed is caught up.
    pub is_caught_up: bool,
    /// How long it may take.
    pub timeout: Lapse,
    /// How often a run that failed is tried again.
    pub retry_count_max: u32,
    /// How long to wait before the first of these.
    pub retry_delay: Lapse,
    /// The repository that it works on, by its name.
    pub repository: Option<String>,
    /// The retention that it goes by, by its name.
    pub retention: Option<String>,
    /// Who is told, by name; everybody where nobody is named.
    pub notify: Vec<String>,
    /// Everything that holds for it, as people read it.
    pub settings: Vec<ConfigSetting>,
    /// What it uses while it runs.
    pub claims: Claims,
    /// The pool of which its machines are, where that has a section.
    pub(super) pool: Option<String>,
    pub(super) options: Vec<String>,
    pub(super) positional: Vec<String>,
}

impl Job {
    /// When it is to run on a host.
    pub fn timing(&self, host: &str) -> Timing {
        Timing {
            when: self.when.clone(),
            delay: own_delay(self.jitter.duration(), host, &self.name),
            is_caught_up: self.is_caught_up,
            retry_count_max: self.retry_count_max,
            retry_delay: self.retry_delay.duration(),
        }
    }

    /// The setting that became this option of the command line: `--bwlimit`.
    pub fn setting_of(&self, option: &str) -> Option<&ConfigSetting> {
        let key = option.trim_start_matches('-').replace('-', "_");
        self.settings.iter().find(|setting| setting.key == key)
    }
}

/// What jobs may name.
pub(super) struct Surroundings<'a> {
    pub(super) repositories: &'a [ConfiguredRepository],
    pub(super) pools: &'a [ConfiguredPool],
    pub(super) retentions: &'a [(&'a Section, Values)],
    pub(super) notify_names: &'a [String],
    pub(super) defaults: &'a Values,
}

/// A setting's value, and where it is from.
struct Found {
    key: &'static str,
    value: Value,
    origin: Origin,
}

/// A job, where nothing is wrong with it.
pub(super) fn read(section: &Section, around: &Surroundings<'_>, errors: &mut Vec<ConfigError>) -> Option<Job> {
    let kind = kind(section, errors)?;
    let is_fit = |name: &str| match name {
        "retention" => has_rules(kind),
        "repository" => kind.needs_repository,
        _ => true,
    };
    let known = || keys::JOB.iter().map(|(key, _)| key.name).filter(|name| is_fit(name));
    let form_of = |name: &str| match kind.option(name) {
        Some(option) => Some(option.form),
        None => keys::of_job(name).filter(|_| known().any(|known| known == name)),
    };
    let names = known().chain(kind.options.iter().map(|option| option.key));
    let own = values(section, form_of, names, errors);
    let found = found(section, kind, &own, around, errors);
    let get = |key: &str| found.iter().find(|found| found.key == key).map(|found| &found.value);
    let text = |key: &str| get(key).and_then(|value| value.texts().first().cloned());
    let lapse = |key: &str| match get(key) {
        Some(Value::Lapse(lapse)) => *lapse,
        _ => Lapse::default(),
    };
    let is = |key: &str| get(key) == Some(&Value::Flag(true));
    if kind.needs_repository {
        check_repository(section, &own, text("repository"), around, errors);
    }
    check_needs(section, kind, |key| form_of(key).is_some(), errors);
    check_together(section, &own, errors);
    let pool = pools::of_job(section, kind, &own, around.pools, errors);
    check_notify(section, &own, around, errors);
    let (mut options, mut positional) = (Vec::new(), Vec::new());
    for option in kind.options {
        if let Some(value) = get(option.key) {
            option.put(value, &mut options, &mut positional);
        }
    }
    let repository = text("repository").filter(|_| kind.needs_repository);
    let limit = |name: &String| {
        let repository = around.repositories.iter().find(|repository| repository.name == *name);
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
        jitter: lapse("jitter"),
        is_caught_up: is("catch_up"),
        timeout: lapse("timeout"),
        retry_count_max: match get("retries") {
            Some(Value::Count(count)) => u32::try_from(*count).unwrap_or(u32::MAX),
            _ => 0,
        },
        retry_delay: lapse("retry_delay"),
        claims: Claims {
            repository: repository.as_ref().and_then(limit),
            things: things(kind, &get),
        },
        repository,
        retention: text("retention"),
        notify: get("notify").map(|value| value.texts().to_vec()).unwrap_or_default(),
        settings: found.iter().map(Found::shown).collect(),
        pool,
        options,
        positional,
    })
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

/// Whether a kind goes by rules of retention.
fn has_rules(kind: &JobKind) -> bool {
    kind.option(KEEP[0].key).is_some()
}

/// All that holds for a job: what stands in it, else in its retention, else in the defaults, else what is built in.
fn found(
    section: &Section,
    kind: &JobKind,
    own: &Values,
    around: &Surroundings<'_>,
    errors: &mut Vec<ConfigError>,
) -> Vec<Found> {
    let rules = retention(section, own, around, errors);
    let common = keys::JOB.iter().map(|(key, built_in)| (key.name, key.form, *built_in));
    let options = kind.options.iter().map(|option| (option.key, option.form, ""));
    let is_of_pools = pools::is_of_pools(own);
    let mut found = Vec::new();
    for (key, form, built_in) in common.chain(options) {
        if (key == "repository" && !kind.needs_repository) || (key == "retention" && !has_rules(kind)) {
            continue;
        }
        let of_rules = rules.and_then(|(title, values)| Some((title, values.get(key)?)));
        let of_defaults = around.defaults.get(key).map(|entry| ("defaults".to_owned(), entry));
        let written = own.get(key).map(|entry| (section.title(), entry));
        let written = written.or_else(|| of_rules.map(|(title, entry)| (title.to_owned(), entry)));
        // Some kinds mean something else by a name than the one that the defaults are checked by; and pools have no use for some.
        let is_fit =
            kind.option(key).is_none_or(JobOption::is_for_defaults) && !(is_of_pools && pools::is_of_guests(key));
        match written.or_else(|| of_defaults.filter(|_| is_fit)) {
            Some((section, (line, value))) => found.push(Found {
                key,
                value: value.clone(),
                origin: Origin::Line { section, line: *line },
            }),
            None => found.extend(form_default(form, built_in).map(|value| Found {
                key,
                value,
                origin: Origin::Default,
            })),
        }
    }
    found
}

/// What is built in, as its form reads it.
fn form_default(form: Form, text: &str) -> Option<Value> {
    match form {
        _ if text.is_empty() => None,
        Form::Flag => Some(Value::Flag(text == "true")),
        Form::Count { .. } => text.parse().ok().map(Value::Count),
        Form::Lapse => text.parse().ok().map(Value::Lapse),
        Form::Calendars => text.parse().ok().map(|calendar| Value::Calendars(vec![calendar])),
        _ => Some(Value::Text(text.to_owned())),
    }
}

/// The rules that a job names, with the title of their section.
fn retention<'a>(
    section: &Section,
    own: &Values,
    around: &'a Surroundings<'_>,
    errors: &mut Vec<ConfigError>,
) -> Option<(&'a str, &'a Values)> {
    let (line, value) = own.get("retention")?;
    let name = value.texts().first()?;
    let named = around
        .retentions
        .iter()
        .find(|(rules, _)| rules.name.as_ref() == Some(name));
    if let Some((rules, values)) = named {
        return Some((rules.name.as_deref()?, values));
    }
    let known = around.retentions.iter().filter_map(|(rules, _)| rules.name.as_deref());
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
    around: &Surroundings<'_>,
    errors: &mut Vec<ConfigError>,
) {
    let line = own.get("repository").map_or(section.line, |(line, _)| *line);
    match name {
        Some(name) if around.repositories.iter().any(|repository| repository.name == name) => {}
        Some(name) => {
            let known = around.repositories.iter().map(|repository| &repository.name[..]);
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
    // A key that is misspelt is told as such, and is not missing beside.
    if !is_there && !is_misspelt(section, needs, is_known) {
        errors.push(ConfigError::Missing {
            line: section.line,
            place: place(section),
            what: needs.join(" or "),
        });
    }
}

/// Whether a key that is not known looks like one of these.
fn is_misspelt(section: &Section, keys: &[&str], is_known: impl Fn(&str) -> bool) -> bool {
    let mut unknown = section.entries.iter().filter(|entry| !is_known(&entry.key));
    unknown.any(|entry| nearest(&entry.key, keys.iter().copied()).is_some())
}

/// Settings that the verb would take, and understand otherwise than it is meant.
fn check_together(section: &Section, own: &Values, errors: &mut Vec<ConfigError>) {
    for (one, other) in [("machines", "images"), ("machines", "all"), ("images", "all")] {
        let are_both = own.contains_key(one) && own.get(other).is_some_and(|(_, value)| *value != Value::Flag(false));
        if let Some((line, _)) = own.get(other).filter(|_| are_both) {
            errors.push(ConfigError::Together {
                line: *line,
                place: place(section),
                what: format!("{one} and {other} are not done by one job: make two of it"),
            });
        }
    }
}

fn check_notify(section: &Section, own: &Values, around: &Surroundings<'_>, errors: &mut Vec<ConfigError>) {
    let entry = own.get("notify").or_else(|| around.defaults.get("notify"));
    let Some((line, value)) = entry else { return };
    for name in value.texts() {
        if !around.notify_names.contains(name) {
            let known = around.notify_names.iter().map(String::as_str);
            errors.push(no_such(section, *line, "notify", name, known));
        }
    }
}

/// What a job uses that only one may use.
fn things<'v>(kind: &JobKind, get: &impl Fn(&str) -> Option<&'v Value>) -> Vec<Thing> {
    match kind.claim {
        Claim::Nothing => return Vec::new(),
        Claim::Kind => return vec![Thing::Other(format!("kind:{}", kind.name))],
        Claim::Machines => {}
    }
    let texts = |key: &str| get(key).map(Value::texts).unwrap_or_default().iter();
    let mut things: Vec<Thing> = texts("machines").map(|word| machine(word)).collect();
    if get("all") == Some(&Value::Flag(true)) {
        things.push(Thing::SomeMachines);
    }
    things.extend(
        texts("images")
            .chain(texts("datasets"))
            .map(|word| Thing::Other(word.clone())),
    );
    things
}

/// What a word means that names machines.
fn machine(word: &str) -> Thing {
    let name = word.strip_prefix("libvirt:").unwrap_or(word);
    if let Some((host, machine)) = pools::meant_by(word) {
        return Thing::OfPool { host, machine };
    }
    match Glob::parse(name) {
        _ if word.starts_with("tag:") => Thing::SomeMachines,
        _ if word.starts_with("qmp:") => Thing::Other(word.to_owned()),
        Ok(glob) if Glob::is_one(name) => Thing::Machines(glob),
        _ => Thing::Machine(name.to_owned()),
    }
}

impl Found {
    fn shown(&self) -> ConfigSetting {
        ConfigSetting {
            key: self.key,
            value: self.value.shown(),
            origin: self.origin.clone(),
        }
    }
}

/// What is hardly meant by jobs.
pub(super) fn doubts(jobs: &[Job], warnings: &mut Vec<ConfigWarning>) {
    for (index, job) in jobs.iter().enumerate() {
        let place = format!("[jobs.{}]", job.name);
        if has_rules(job.kind) && !job.options.iter().any(|word| word.starts_with("--keep-")) {
            warnings.push(ConfigWarning::KeepsAll {
                line: job.line,
                place: place.clone(),
            });
        }
        let is_twin = |other: &&Job| {
            let same_words = (&other.options, &other.positional) == (&job.options, &job.positional);
            other.kind == job.kind && same_words && other.repository == job.repository && other.when == job.when
        };
        if let Some(other) = jobs[..index].iter().find(is_twin) {
            warnings.push(ConfigWarning::Twin {
                line: job.line,
                place,
                other: other.name.clone(),
            });
        }
    }
}

impl Job {
    /// What is hardly meant by its times, seen from now.
    pub fn doubts_at(&self, now: jiff::Timestamp, zone: &jiff::tz::TimeZone) -> Vec<ConfigWarning> {
        let place = format!("[jobs.{}]", self.name);
        let never = self
            .when
            .iter()
            .filter(|calendar| calendar.next_after(now, zone).is_none());
        let mut doubts: Vec<_> = never
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
            doubts.push(ConfigWarning::JitterBeyondPeriod {
                line: self.line,
                place,
                jitter: self.jitter.to_string(),
                period: Lapse::from_secs(period.as_secs()).to_string(),
            });
        }
        doubts
    }
}
