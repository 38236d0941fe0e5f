//! `holdfast.toml`: what is done when, by which rules, and who is told.
//!
//! [`Config::parse`] reads the text, and lists everything that is wrong with it at once, each with its line. It looks at nothing else: whether
//! a repository or a machine is there is seen by those who act. What a job may be is in `kinds.rs`, a table; what settings sections
//! have is in `keys.rs`. `docs/configuration.md` describes the file for people.

mod document;
mod error;
mod form;
mod jobs;
mod keys;
mod kinds;
mod notify;
mod pools;
mod sections;

use crate::Lapse;
use crate::sanoid::Origin;

pub use error::{ConfigError, ConfigWarning};
pub use jobs::Job;
pub use kinds::{JobKind, Judgement};
pub use notify::{Channel, Event, Notify};
pub use pools::ConfiguredPool;

/// A `holdfast.toml` in which everything has its form, and everything that is named is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// What holds for all jobs together.
    pub daemon: DaemonSettings,
    /// By name, in their order in the file.
    pub repositories: Vec<ConfiguredRepository>,
    /// By name, in their order in the file.
    pub pools: Vec<ConfiguredPool>,
    /// In their order in the file.
    pub jobs: Vec<Job>,
    /// In their order in the file.
    pub notifies: Vec<Notify>,
    warnings: Vec<ConfigWarning>,
}

/// What holds for all jobs together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonSettings {
    /// How many jobs run at once, at most.
    pub jobs_at_once: usize,
    /// How long a job that is told to stop may take for it, before it is killed.
    pub stop_within: Lapse,
    /// How long after somebody was told of a failure that goes on he is told again.
    pub remind_after: Lapse,
    /// As people read them.
    pub settings: Vec<ConfigSetting>,
}

/// Where snapshots are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfiguredRepository {
    /// What jobs call it.
    pub name: String,
    /// The line of its section.
    pub line: u32,
    /// The folder.
    pub path: String,
    /// The file whose first line is the password.
    pub password_file: Option<String>,
    /// The command whose first line of output is the password.
    pub password_command: Option<String>,
    /// How many jobs work on it at once, at most.
    pub jobs_at_once: usize,
}

/// A setting as people read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigSetting {
    /// What it is called.
    pub key: &'static str,
    /// Its value.
    pub value: String,
    /// Where it comes from.
    pub origin: Origin,
}

impl Config {
    /// Reads the text of a `holdfast.toml`.
    ///
    /// # Errors
    /// All that is wrong with it, in the order of its lines.
    pub fn parse(text: &str) -> Result<Self, Vec<ConfigError>> {
        let mut errors = Vec::new();
        let sections = document::sections(text, &mut errors);
        let config = sections::read(&sections, &mut errors);
        if errors.is_empty() {
            return Ok(config);
        }
        errors.sort_by_key(ConfigError::line);
        Err(errors)
    }

    /// The words behind `do =`.
    pub fn kind_names() -> impl Iterator<Item = &'static str> {
        kinds::KINDS.iter().map(|kind| kind.name)
    }

    /// The names of all settings, of whatever section.
    pub fn key_names() -> impl Iterator<Item = &'static str> {
        keys::all_names()
    }

    /// For each setting of each kind of job, a command line with it: to be held against what the verbs take.
    pub fn every_command() -> impl Iterator<Item = Vec<String>> {
        kinds::KINDS
            .iter()
            .flat_map(|kind| kind.options.iter().map(|option| option.line(kind)))
    }

    /// What is hardly meant as it stands there.
    pub fn warnings(&self) -> &[ConfigWarning] {
        &self.warnings
    }

    /// The job of that name.
    pub fn job(&self, name: &str) -> Option<&Job> {
        self.jobs.iter().find(|job| job.name == name)
    }

    /// The repository of that name.
    pub fn repository(&self, name: &str) -> Option<&ConfiguredRepository> {
        self.repositories.iter().find(|repository| repository.name == name)
    }

    /// The pool of that name.
    pub fn pool(&self, name: &str) -> Option<&ConfiguredPool> {
        self.pools.iter().find(|pool| pool.name == name)
    }

    /// The words of the command line that does a job, without the program's name.
    pub fn command(&self, job: &Job) -> Vec<String> {
        let mut words: Vec<String> = job.kind.verb.iter().map(|word| (*word).to_owned()).collect();
        let repository = job.repository.as_deref().and_then(|name| self.repository(name));
        if let Some(repository) = repository {
            words.extend(repository.words());
        }
        words.extend(job.options.iter().cloned());
        let pool = job.pool.as_deref().and_then(|name| self.pool(name));
        let of_pool = match job.kind.name {
            "backup" => ConfiguredPool::words,
            _ => ConfiguredPool::login_words,
        };
        words.extend(pool.map(of_pool).unwrap_or_default());
        if !job.positional.is_empty() {
            // What is called like an option is none.
            words.push("--".to_owned());
            let addressed = |word: &String| {
                pool.and_then(|pool| pool.addressed(word))
                    .unwrap_or_else(|| word.clone())
            };
            words.extend(job.positional.iter().map(addressed));
        }
        words
    }
}

impl ConfiguredRepository {
    /// The words that open it.
    pub fn words(&self) -> Vec<String> {
        let mut words = vec!["--repository".to_owned(), self.path.clone()];
        let password = [
            ("--password-file", &self.password_file),
            ("--password-command", &self.password_command),
        ];
        for (option, value) in password {
            words.extend(value.iter().flat_map(|value| [option.to_owned(), value.clone()]));
        }
        words
    }
}

mod section_names;
#[cfg(test)]
mod tests;
mod values;
