//! The settings of each section, apart from those of the kinds of jobs.

use super::form::Form;
use super::kinds::{KEEP, KINDS};

/// A setting that the program itself interprets.
pub(super) struct ConfigKey {
    pub(super) name: &'static str,
    pub(super) form: Form,
}

const fn key(name: &'static str, form: Form) -> ConfigKey {
    ConfigKey { name, form }
}

/// Events of notifications.
pub(super) const EVENTS: [&str; 4] = ["failure", "silence", "warnings", "success"];
/// Channels of notifications.
pub(super) const CHANNELS: [&str; 3] = ["mail", "webhook", "ntfy"];

pub(super) const DAEMON: &[ConfigKey] = &[
    key("jobs_at_once", Form::Count { min: 1, max: 1000 }),
    key("stop_within", Form::Duration),
    key("remind_after", Form::Duration),
];

pub(super) const REPOSITORY: &[ConfigKey] = &[
    key("path", Form::Path),
    key("password_file", Form::Path),
    key("password_command", Form::Text),
    key("jobs_at_once", Form::Count { min: 1, max: 1000 }),
];

pub(super) const POOL: &[ConfigKey] = &[
    key("address", Form::Text),
    key("user", Form::Text),
    key("password_file", Form::Path),
    key("password_command", Form::Text),
    key("certificate", Form::Texts),
    key("authorities", Form::Path),
    key("read", Form::OneOf(&["nbd", "vhd", "raw"])),
    key("connections", Form::Count { min: 1, max: 64 }),
    key("keep_nothing", Form::Flag),
];

pub(super) const NOTIFY: &[ConfigKey] = &[
    key("by", Form::OneOf(&CHANNELS)),
    key("on", Form::SomeOf(&EVENTS)),
    key("to", Form::Texts),
    key("from", Form::Text),
    key("sendmail", Form::Path),
    key("url", Form::Text),
    key("token_file", Form::Path),
    key("priority", Form::Count { min: 1, max: 5 }),
];

/// The settings of every job, with their defaults.
pub(super) const JOB: &[(ConfigKey, &str)] = &[
    (key("do", Form::Text), ""),
    (key("enabled", Form::Flag), "true"),
    (key("when", Form::Calendars), "daily"),
    (key("jitter", Form::Duration), "0s"),
    (key("catch_up", Form::Flag), "true"),
    (key("timeout", Form::Duration), "1d"),
    (key("retries", Form::Count { min: 0, max: 100 }), "3"),
    (key("retry_delay", Form::Duration), "5min"),
    (key("repository", Form::Text), ""),
    (key("retention", Form::Text), ""),
    (key("notify", Form::Texts), ""),
];

/// Settings that define a job and cannot be defaults.
const NOT_FOR_DEFAULTS: [&str; 3] = ["do", "when", "retention"];

/// The form of a setting in the section of a job.
pub(super) fn job_form(name: &str) -> Option<Form> {
    JOB.iter().find(|(key, _)| key.name == name).map(|(key, _)| key.form)
}

/// The forms that a setting in `[defaults]` may have. Several kinds of jobs may have a setting of the same name.
pub(super) fn default_form(name: &str) -> Option<Form> {
    let common = job_form(name).filter(|_| !NOT_FOR_DEFAULTS.contains(&name));
    common.or_else(|| {
        let options = KINDS.iter().flat_map(|kind| kind.options);
        let mut options = options.filter(|option| option.is_for_defaults());
        options.find(|option| option.key == name).map(|option| option.form)
    })
}

pub(super) fn names_of_defaults() -> impl Iterator<Item = &'static str> {
    let common = JOB.iter().map(|(key, _)| key.name);
    let options = KINDS
        .iter()
        .flat_map(|kind| kind.options)
        .filter(|option| option.is_for_defaults());
    let common = common.filter(|name| !NOT_FOR_DEFAULTS.contains(name));
    common.chain(options.map(|option| option.key))
}

/// The form of a retention rule.
pub(super) fn retention_form(name: &str) -> Option<Form> {
    KEEP.iter().find(|rule| rule.key == name).map(|rule| rule.form)
}

pub(super) fn names_of_retention() -> impl Iterator<Item = &'static str> {
    KEEP.iter().map(|rule| rule.key)
}

pub(super) fn form_in(keys: &[ConfigKey], name: &str) -> Option<Form> {
    keys.iter().find(|key| key.name == name).map(|key| key.form)
}

/// The names of all settings of all sections.
pub(super) fn all_names() -> impl Iterator<Item = &'static str> {
    let sections = DAEMON
        .iter()
        .chain(REPOSITORY)
        .chain(POOL)
        .chain(NOTIFY)
        .map(|key| key.name);
    let jobs = JOB.iter().map(|(key, _)| key.name);
    let options = KINDS.iter().flat_map(|kind| kind.options).map(|option| option.key);
    sections.chain(jobs).chain(options)
}
