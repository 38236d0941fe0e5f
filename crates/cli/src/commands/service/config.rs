//! `holdfast config`: checks and shows configuration files.
//!
//! This file checks both kinds of files and shows a sanoid.conf; `jobs.rs` shows a holdfast.toml.

mod jobs;

use std::path::PathBuf;

use holdfast_policy::sanoid::{DatasetPolicy, Origin, SanoidConfig, SanoidError, SanoidWarning};
use serde::Serialize;

use crate::args::{Example, SharedOptions, VerbEntry};
use crate::commands::verb::{Verb, VerbSet, verbs};
use crate::context::Context;
use crate::context::holdfast_file;
use crate::context::sanoid_file::{self, SanoidFileArgs};
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Column, Page, Report, Style, Table};

/// Arguments of `config`.
#[derive(Debug, clap::Args)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    verb: ConfigVerb,
}

verbs! {
    enum ConfigVerb {
        /// Check a holdfast.toml or a sanoid.conf, and list all mistakes
        "check" => Check(ConfigCheckArgs),
        /// Show the settings of each job or dataset, and the line that sets them
        "show" => Show(ConfigShowArgs),
    }
}

#[derive(Debug, clap::Args)]
struct ConfigCheckArgs {
    #[command(flatten)]
    file: FileArgs,
}

/// Which file.
#[derive(Debug, clap::Args)]
struct FileArgs {
    /// The file: a holdfast.toml, or a sanoid.conf. Where none is given, /etc/holdfast/holdfast.toml, else /etc/sanoid/sanoid.conf
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
}

impl FileArgs {
    fn path(&self, context: &Context) -> PathBuf {
        let own = || Some(holdfast_file::path(context)).filter(|path| path.exists());
        let sanoid = || PathBuf::from(sanoid_file::SANOID_CONF);
        self.file.clone().or_else(own).unwrap_or_else(sanoid)
    }
}

#[derive(Debug, clap::Args)]
struct ConfigShowArgs {
    #[command(flatten)]
    file: FileArgs,
    /// For a sanoid.conf: also show this existing dataset; may be repeated
    #[arg(short, long = "dataset", value_name = "DATASET")]
    datasets: Vec<String>,
    /// Also show settings with their default values
    #[arg(long)]
    effective: bool,
}

impl Verb for ConfigArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See whether the daemon could use its configuration",
            line: "holdfast config check /etc/holdfast/holdfast.toml",
        },
        Example {
            wish: "See whether a sanoid.conf can be used as it is",
            line: "holdfast config check /etc/sanoid/sanoid.conf",
        },
        Example {
            wish: "See what it means for a dataset that its parent hands settings down to",
            line: "holdfast config show /etc/sanoid/sanoid.conf --dataset tank/vm/web1",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];
    const BELOW: &'static [VerbEntry] = ConfigVerb::TABLE;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        self.verb.run(context)
    }
}

impl Verb for ConfigCheckArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "See whether a sanoid.conf can be used as it is",
        line: "holdfast config check /etc/sanoid/sanoid.conf",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        check(self, context)
    }
}

impl Verb for ConfigShowArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See everything that holds for each job, where it comes from, and when it is due",
            line: "holdfast config show /etc/holdfast/holdfast.toml --effective",
        },
        Example {
            wish: "See everything that holds for a dataset, and where it comes from",
            line: "holdfast config show /etc/sanoid/sanoid.conf --dataset tank/vm/web1 --effective",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        show(self, context)
    }
}

/// Report of `config check`.
#[derive(Debug, Serialize)]
struct ConfigChecked {
    file: String,
    /// Errors in words, ordered by line.
    errors: Vec<String>,
    /// Settings that are probably mistakes.
    doubts: Vec<String>,
}

/// Report of `config show`.
#[derive(Debug, Serialize)]
struct ConfigShown {
    file: String,
    datasets: Vec<DatasetPolicyDocument>,
    /// Settings that are probably mistakes.
    doubts: Vec<String>,
}

#[derive(Debug, Serialize)]
struct DatasetPolicyDocument {
    name: String,
    /// Whether snapshots of it are taken.
    takes: bool,
    /// Whether its snapshots include all datasets below it, at one point in time.
    is_tree: bool,
    /// Whether its expired snapshots are removed.
    prunes: bool,
    settings: Vec<SettingDocument>,
}

#[derive(Debug, Serialize)]
struct SettingDocument {
    key: &'static str,
    value: String,
    /// The section with the setting; null if it has its default.
    section: Option<String>,
    /// The line with the setting, from 1; null if it has its default.
    line: Option<u32>,
}

impl SettingDocument {
    /// A setting that `origin` set.
    fn new(key: &'static str, value: &str, origin: &Origin) -> Self {
        let (section, line) = match origin {
            Origin::Default => (None, None),
            Origin::Line { section, line } => (Some(section.clone()), Some(*line)),
        };
        Self {
            key,
            value: value.to_owned(),
            section,
            line,
        }
    }

    /// The setting, its value, and its origin.
    fn row(&self) -> [String; 3] {
        let from = match (&self.section, self.line) {
            (Some(section), Some(line)) => format!("line {line}, [{section}]"),
            _ => String::new(),
        };
        [self.key.to_owned(), self.value.clone(), from]
    }
}

/// The exit code if there are at most doubts.
fn exit_of(doubts: &[String]) -> Exit {
    if doubts.is_empty() { Exit::Ok } else { Exit::Warnings }
}

impl Report for ConfigChecked {
    fn command(&self) -> &'static str {
        "config check"
    }

    fn exit(&self) -> Exit {
        match (self.errors.is_empty(), self.doubts.is_empty()) {
            (false, _) => Exit::Error,
            (true, false) => Exit::Warnings,
            (true, true) => Exit::Ok,
        }
    }

    fn human(&self, page: &mut Page) {
        for error in &self.errors {
            page.styled(Style::Bad, &format!("{}: {error}", self.file));
        }
        list_doubts(&self.file, &self.doubts, page);
        if self.errors.is_empty() {
            page.line(&format!("{} can be used as it is", self.file));
        }
    }
}

impl Report for ConfigShown {
    fn command(&self) -> &'static str {
        "config show"
    }

    fn exit(&self) -> Exit {
        exit_of(&self.doubts)
    }

    fn human(&self, page: &mut Page) {
        if self.datasets.is_empty() {
            page.line("it is about no dataset");
        }
        for dataset in &self.datasets {
            let taken = match (dataset.takes, dataset.is_tree) {
                (true, true) => "snapshots are taken, with those of all datasets below",
                (true, false) => "snapshots are taken",
                (false, _) => "no snapshots are taken",
            };
            let removed = if dataset.prunes {
                "removed in time"
            } else {
                "never removed"
            };
            page.line(&format!("{}: {taken}, and {removed}", dataset.name));
            let mut table = Table::new([Column::text("KEY"), Column::text("VALUE"), Column::long_text("FROM")]);
            for setting in &dataset.settings {
                table.row(setting.row());
            }
            page.table(&table);
            page.gap();
        }
        list_doubts(&self.file, &self.doubts, page);
    }
}

fn list_doubts(file: &str, doubts: &[String], page: &mut Page) {
    for doubt in doubts {
        page.styled(Style::Warning, &format!("{file}: {doubt}"));
    }
}

fn check(args: &ConfigCheckArgs, context: &Context) -> Result<Exit, Error> {
    let path = args.file.path(context);
    let file = path.display().to_string();
    let text = sanoid_file::read(&path)?;
    let not_obeyed = sanoid_file::refuse_written_by_others(&path).err();
    let not_obeyed = not_obeyed.map(|error| match error {
        Error::NotObeyed { why, .. } => format!("it is not trusted: {why}"),
        other => other.to_string(),
    });
    if holdfast_file::is_holdfast_toml(&path, &text) {
        let parsed = holdfast_file::parse(&text, context.command_line());
        let doubts = parsed.as_ref().map(|config| holdfast_file::doubts(config, context));
        return context.report(&ConfigChecked {
            file,
            doubts: doubts.unwrap_or_default(),
            errors: parsed.err().unwrap_or_default().into_iter().chain(not_obeyed).collect(),
        });
    }
    context.report(&match SanoidConfig::parse(&text) {
        Ok(config) => ConfigChecked {
            file,
            errors: not_obeyed.into_iter().collect(),
            doubts: words(config.warnings()),
        },
        Err(errors) => ConfigChecked {
            file,
            errors: errors.iter().map(SanoidError::to_string).chain(not_obeyed).collect(),
            doubts: Vec::new(),
        },
    })
}

/// Which settings are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SettingsShown {
    /// Settings that the file contains.
    Given,
    /// Also default values.
    All,
}

impl SettingsShown {
    fn has(self, origin: &Origin) -> bool {
        self == Self::All || *origin != Origin::Default
    }
}

impl ConfigShowArgs {
    fn shown(&self) -> SettingsShown {
        if self.effective {
            SettingsShown::All
        } else {
            SettingsShown::Given
        }
    }
}

fn show(args: &ConfigShowArgs, context: &Context) -> Result<Exit, Error> {
    let path = args.file.path(context);
    let file = path.display().to_string();
    let text = sanoid_file::read(&path)?;
    if holdfast_file::is_holdfast_toml(&path, &text) {
        if !args.datasets.is_empty() {
            return Err(Error::usage(
                "--dataset is about a sanoid.conf, and this is a holdfast.toml",
                "remove the option",
            ));
        }
        return jobs::show(path, args.shown(), context);
    }
    let config = sanoid_file::parse(&SanoidFileArgs { file: path })?;
    let mut datasets: Vec<String> = config.datasets().map(str::to_owned).collect();
    datasets.extend(args.datasets.iter().cloned());
    let resolved = config.resolve(&datasets);
    let mut doubts = words(config.warnings());
    doubts.extend(words(&resolved.warnings));
    let document = |policy: &DatasetPolicy| document(policy, args.shown());
    context.report(&ConfigShown {
        file,
        datasets: resolved.datasets.iter().map(document).collect(),
        doubts,
    })
}

fn words(warnings: &[SanoidWarning]) -> Vec<String> {
    warnings.iter().map(SanoidWarning::to_string).collect()
}

fn document(policy: &DatasetPolicy, shown: SettingsShown) -> DatasetPolicyDocument {
    let settings = policy
        .settings()
        .filter(|(_, setting)| shown.has(&setting.origin))
        .map(|(key, setting)| SettingDocument::new(key, &setting.value, &setting.origin));
    DatasetPolicyDocument {
        name: policy.dataset.clone(),
        takes: policy.takes(),
        is_tree: policy.is_tree(),
        prunes: policy.prunes(),
        settings: settings.collect(),
    }
}
