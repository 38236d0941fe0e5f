//! Which settings each section has, beside those of the kinds of jobs.

use super::form::Form;
use super::kinds::{KEEP, KINDS};

/// A setting that the program itself understands.
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) form: Form,
}

const fn key(name: &'static str, form: Form) -> Key {
    Key { name, form }
}

/// When somebody is told.
pub(super) const EVENTS: [&str; 4] = ["failure", "silence", "warnings", "success"];
/// Ways to tell somebody.
pub(super) const CHANNELS: [&str; 3] = ["mail", "webhook", "ntfy"];

pub(super) const DAEMON: &[Key] = &[
    key("jobs_at_once", Form::Count { min: 1, max: 1000 }),
    key("stop_within", Form::Lapse),
    key("remind_after", Form::Lapse),
];

pub(super) const REPOSITORY: &[Key] = &[
    key("path", Form::Path),
    key("password_file", Form::Path),
    key("password_command", Form::Text),
    key("jobs_at_once", Form::Count { min: 1, max: 1000 }),
];

pub(super) const POOL: &[Key] = &[
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

pub(super) const NOTIFY: &[Key] = &[
    key("by", Form::OneOf(&CHANNELS)),
    key("on", Form::SomeOf(&EVENTS)),
    key("to", Form::Texts),
    key("from", Form::Text),
    key("sendmail", Form::Path),
    key("url", Form::Text),
    key("token_file", Form::Path),
    key("priority", Form::Count { min: 1, max: 5 }),
];

/// What every job has. Where nobody sets one, it is as in the last column.
pub(super) const JOB: &[(Key, &str)] = &[
    (key("do", Form::Text), ""),
    (key("enabled", Form::Flag), "true"),
    (key("when", Form::Calendars), "daily"),
    (key("jitter", Form::Lapse), "0s"),
    (key("catch_up", Form::Flag), "true"),
    (key("timeout", Form::Lapse), "1d"),
    (key("retries", Form::Count { min: 0, max: 100 }), "3"),
    (key("retry_delay", Form::Lapse), "5min"),
    (key("repository", Form::Text), ""),
    (key("retention", Form::Text), ""),
    (key("notify", Form::Texts), ""),
];

/// Settings of jobs that say what a job is, and not how it goes about it.
const NOT_FOR_DEFAULTS: [&str; 3] = ["do", "when", "retention"];

/// The form of a job's own setting.
pub(super) fn of_job(name: &str) -> Option<Form> {
    JOB.iter().find(|(key, _)| key.name == name).map(|(key, _)| key.form)
}

/// The forms that a setting in `[defaults]` may have: with some names, kinds of jobs mean the same.
pub(super) fn of_defaults(name: &str) -> Option<Form> {
    let common = of_job(name).filter(|_| !NOT_FOR_DEFAULTS.contains(&name));
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

/// The form of a rule of retention.
pub(super) fn of_retention(name: &str) -> Option<Form> {
    KEEP.iter().find(|rule| rule.key == name).map(|rule| rule.form)
}

pub(super) fn names_of_retention() -> impl Iterator<Item = &'static str> {
    KEEP.iter().map(|rule| rule.key)
}

pub(super) fn of(keys: &[Key], name: &str) -> Option<Form> {
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
