//! The configuration file `holdfast.toml`: jobs, their schedules, and notifications.
//!
//! [`Config::parse`] reads the text and reports all errors at once, each with its line. It checks only the text:
//! whether a repository or a machine exists is checked when a job runs. The kinds of jobs are a table in `kinds.rs`,
//! the settings of sections are in `keys.rs`. `docs/configuration.md` describes the file for users.

mod document;
mod error;
mod form;
mod jobs;
mod keys;
mod kinds;
mod notify;
mod pools;
mod sections;

use crate::FixedDuration;
use crate::sanoid::Origin;

pub use error::{ConfigError, ConfigWarning};
pub use jobs::Job;
pub use kinds::{ExitCodeScheme, JobKind};
pub use notify::{Channel, Event, Recipient};
pub use pools::ConfiguredPool;

/// A validated `holdfast.toml`: all values are valid, and all references exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Settings of the scheduler.
    pub daemon: DaemonSettings,
    /// In the order of the file.
    pub repositories: Vec<ConfiguredRepository>,
    /// In the order of the file.
    pub pools: Vec<ConfiguredPool>,
    /// In the order of the file.
    pub jobs: Vec<Job>,
    /// In the order of the file.
    pub recipients: Vec<Recipient>,
    warnings: Vec<ConfigWarning>,
}

/// Settings of the scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonSettings {
    /// Maximum number of jobs that run at once.
    pub jobs_at_once: usize,
    /// How long a stopping job may take before it is killed.
    pub stop_within: FixedDuration,
    /// After a notification of a lasting failure, the time until a reminder is sent.
    pub remind_after: FixedDuration,
    /// All settings, for display.
    pub settings: Vec<ConfigSetting>,
}

/// A repository for snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfiguredRepository {
    /// The name that jobs use.
    pub name: String,
    /// The line of its section.
    pub line: u32,
    /// The path of the repository's folder.
    pub path: String,
    /// The file whose first line is the password.
    pub password_file: Option<String>,
    /// The command whose first line of output is the password.
    pub password_command: Option<String>,
    /// Maximum number of jobs that use it at once.
    pub jobs_at_once: usize,
}

/// A setting for display.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigSetting {
    /// The key.
    pub key: &'static str,
    /// The value.
    pub value: String,
    /// Where the value was set.
    pub origin: Origin,
}

impl Config {
    /// Parses a `holdfast.toml`.
    ///
    /// # Errors
    /// All errors of the file, in the order of its lines.
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

    /// The values of `do =`.
    pub fn kind_names() -> impl Iterator<Item = &'static str> {
        kinds::KINDS.iter().map(|kind| kind.name)
    }

    /// The names of all settings of all sections.
    pub fn key_names() -> impl Iterator<Item = &'static str> {
        keys::all_names()
    }

    /// A command line for each setting of each kind of job, to be checked against the command line parser.
    pub fn every_command() -> impl Iterator<Item = Vec<String>> {
        kinds::KINDS
            .iter()
            .flat_map(|kind| kind.options.iter().map(|option| option.line(kind)))
    }

    /// Legal but suspicious settings.
    pub fn warnings(&self) -> &[ConfigWarning] {
        &self.warnings
    }

    /// The job of this name.
    pub fn job(&self, name: &str) -> Option<&Job> {
        self.jobs.iter().find(|job| job.name == name)
    }

    /// The repository of this name.
    pub fn repository(&self, name: &str) -> Option<&ConfiguredRepository> {
        self.repositories.iter().find(|repository| repository.name == name)
    }

    /// The pool of this name.
    pub fn pool(&self, name: &str) -> Option<&ConfiguredPool> {
        self.pools.iter().find(|pool| pool.name == name)
    }

    /// The arguments that run a job, without the program's name.
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
            // An operand that begins with `-` is not an option.
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
    /// The options that open the repository.
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

#[cfg(test)]
mod reference_tests;
mod section_names;
#[cfg(test)]
mod tests;
mod values;
