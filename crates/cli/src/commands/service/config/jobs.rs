//! Shows the jobs of a holdfast.toml.

use std::path::PathBuf;

use holdfast_policy::config::{Config, ConfigSetting, Job};
use serde::Serialize;

use super::{SettingDocument, SettingsShown};
use crate::context::Context;
use crate::context::holdfast_file::{self, HoldfastFileArgs};
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Column, Page, Report, Style, Table};
use crate::process::time;

/// Number of future run times that are shown for a job.
const NEXT_COUNT: usize = 3;

/// Report of `config show` about a holdfast.toml.
#[derive(Debug, Serialize)]
struct JobsShown {
    file: String,
    /// Settings of the daemon itself.
    daemon: Vec<SettingDocument>,
    jobs: Vec<ConfiguredJob>,
    /// Settings that are probably mistakes.
    doubts: Vec<String>,
}

#[derive(Debug, Serialize)]
struct ConfiguredJob {
    name: String,
    kind: &'static str,
    enabled: bool,
    /// The command line of the job, quoted for a shell.
    command: String,
    /// The next run times, including this host's delay.
    next: Vec<String>,
    #[serde(skip)]
    next_local: Vec<String>,
    settings: Vec<SettingDocument>,
}

impl Report for JobsShown {
    fn command(&self) -> &'static str {
        "config show"
    }

    fn exit(&self) -> Exit {
        super::exit_of(&self.doubts)
    }

    fn human(&self, page: &mut Page) {
        for job in &self.jobs {
            let state = if job.enabled { "" } else { "  (disabled)" };
            page.styled(Style::Heading, &format!("{}{state}", job.name));
            page.fields(&[("does", job.command.clone()), ("next", job.next_local.join(", "))]);
            settings(&job.settings, page);
            page.gap();
        }
        if !self.daemon.is_empty() {
            page.styled(Style::Heading, "all jobs together");
            settings(&self.daemon, page);
            page.gap();
        }
        super::list_doubts(&self.file, &self.doubts, page);
    }
}

fn settings(settings: &[SettingDocument], page: &mut Page) {
    let mut table = Table::new([
        Column::text("KEY"),
        Column::long_text("VALUE"),
        Column::long_text("FROM"),
    ]);
    for setting in settings {
        table.row(setting.row());
    }
    page.table(&table);
}

pub(super) fn show(path: PathBuf, shown: SettingsShown, context: &Context) -> Result<Exit, Error> {
    let file = path.display().to_string();
    let config = HoldfastFileArgs { config: Some(path) }.load(context)?;
    context.report(&JobsShown {
        doubts: holdfast_file::doubts(&config, context),
        file,
        daemon: documents(&config.daemon.settings, shown),
        jobs: config
            .jobs
            .iter()
            .map(|job| document(&config, job, shown, context))
            .collect(),
    })
}

fn document(config: &Config, job: &Job, shown: SettingsShown, context: &Context) -> ConfiguredJob {
    let timing = job.timing(&crate::process::kernel::host_name());
    let first = timing.next_after(time::now(), context.zone());
    let times = std::iter::successors(first, |last| timing.next_after(*last, context.zone())).take(NEXT_COUNT);
    let times = times.map(|time| time.saturating_add(timing.delay).unwrap_or(time));
    let times: Vec<_> = times.filter(|_| job.is_enabled).collect();
    let words = config.command(job).into_iter().map(|word| quoted(&word));
    ConfiguredJob {
        name: job.name.clone(),
        kind: job.kind.name,
        enabled: job.is_enabled,
        command: std::iter::once("holdfast".to_owned())
            .chain(words)
            .collect::<Vec<_>>()
            .join(" "),
        next: times.iter().map(ToString::to_string).collect(),
        next_local: times.iter().map(|time| time::local(*time, context.zone())).collect(),
        settings: documents(&job.settings, shown),
    }
}

fn documents(settings: &[ConfigSetting], shown: SettingsShown) -> Vec<SettingDocument> {
    let is_shown = |setting: &&ConfigSetting| shown.has(&setting.origin);
    let document = |setting: &ConfigSetting| SettingDocument::new(setting.key, &setting.value, &setting.origin);
    settings.iter().filter(is_shown).map(document).collect()
}

/// A word, quoted for a shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}
