//! Determines the settings of each dataset.

use std::collections::BTreeMap;
use std::time::Duration;

use super::SnapshotType;
use super::config::{CheckedEntry, CheckedSection, SanoidConfig, SanoidWarning, is_for_templates, used_templates};
use super::keys::{KEYS, number, parse_seconds, toggle};

/// The origin of a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The built-in default.
    Default,
    /// A line of the file.
    Line {
        /// The section.
        section: String,
        /// The line, from 1.
        line: u32,
    },
}

/// A setting of a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The text of the value.
    pub value: String,
    /// Its origin.
    pub origin: Origin,
}

/// Shell commands around snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hooks {
    /// Before snapshots are taken.
    pub pre_snapshot: Option<String>,
    /// After snapshots were taken.
    pub post_snapshot: Option<String>,
    /// Before a snapshot is removed; if it fails, the snapshot is kept.
    pub pre_pruning: Option<String>,
    /// After a snapshot was removed.
    pub pruning: Option<String>,
    /// The timeout of each command.
    pub deadline: Option<Duration>,
    /// Whether no snapshot is taken if `pre_snapshot` fails.
    pub needs_pre_snapshot: bool,
    /// Whether `post_snapshot` is also run if `pre_snapshot` has failed.
    pub always_post_snapshot: bool,
}

/// The settings of a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetPolicy {
    /// The dataset.
    pub dataset: String,
    settings: Settings,
    /// Whether the dataset is the root of a tree whose snapshots are taken atomically, or is in such a tree.
    is_in_tree: bool,
}

type Settings = BTreeMap<&'static str, Setting>;

/// The settings of the existing datasets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedDatasets {
    /// The configured datasets, by name.
    pub datasets: Vec<DatasetPolicy>,
    /// Suspicious settings.
    pub warnings: Vec<SanoidWarning>,
}

impl SanoidConfig {
    /// Applies the file to the existing file systems and volumes.
    ///
    /// Sections are applied in the order of the file. A section with `recursive` replaces all settings of the datasets
    /// below it. A later section of one of those datasets changes only the settings that it names.
    pub fn resolve(&self, datasets: &[String]) -> ResolvedDatasets {
        let mut resolution = Resolution {
            config: self,
            datasets,
            found: BTreeMap::new(),
            warnings: Vec::new(),
        };
        for section in self.sections.iter().filter(|section| !section.is_template()) {
            resolution.section(section);
        }
        ResolvedDatasets {
            datasets: resolution.found.into_values().collect(),
            warnings: resolution.warnings,
        }
    }
}

struct Resolution<'c> {
    config: &'c SanoidConfig,
    datasets: &'c [String],
    found: BTreeMap<String, DatasetPolicy>,
    warnings: Vec<SanoidWarning>,
}

impl Resolution<'_> {
    fn section(&mut self, section: &CheckedSection) {
        let dataset = section.dataset();
        if self.datasets.iter().all(|other| other != dataset) {
            self.warnings.push(SanoidWarning::NoDataset {
                section: section.name.clone(),
                dataset: dataset.to_owned(),
            });
        }
        let inherited = self.found.remove(dataset);
        let mut policy = inherited.unwrap_or_else(|| self.initial_policy(dataset));
        let templates = section.get("use_template").map_or("", |entry| &entry.value);
        for template in used_templates(templates).filter_map(|name| self.config.template(name)) {
            policy.apply_section(template, is_for_templates);
        }
        policy.apply_section(section, |key| is_for_templates(key) && key != "skip_children");
        if policy.is_in_tree && policy.is_on("autosnap") {
            self.warnings.push(SanoidWarning::PartOfTree {
                section: section.name.clone(),
            });
            policy.disable("autosnap", Origin::Default);
        }
        let recursion = section.get("recursive");
        let tree = recursion.filter(|entry| entry.value.eq_ignore_ascii_case("zfs"));
        policy.is_in_tree |= tree.is_some();
        let is_on = |entry: &CheckedEntry| toggle(&entry.value) == Some(true);
        let skips = section.get("skip_children").is_some_and(is_on);
        if let Some(entry) = tree {
            let origin = origin(section, entry);
            self.children(&policy, |child| child.disable("autosnap", origin.clone()));
        } else if skips {
            let prefix = prefix_of(dataset);
            self.found.retain(|other, _| !other.starts_with(&prefix));
        } else if recursion.is_some_and(is_on) {
            self.children(&policy, |_| {});
        }
        self.found.insert(dataset.to_owned(), policy);
    }

    /// The settings of a dataset before any section applies.
    fn initial_policy(&self, dataset: &str) -> DatasetPolicy {
        let default = |key: &super::keys::SanoidKey| {
            let setting = Setting {
                value: key.default.to_owned(),
                origin: Origin::Default,
            };
            (key.name, setting)
        };
        let mut policy = DatasetPolicy {
            dataset: dataset.to_owned(),
            settings: KEYS.iter().map(default).collect(),
            is_in_tree: false,
        };
        if let Some(template) = self.config.default_template() {
            policy.apply_section(template, is_for_templates);
        }
        policy
    }

    /// Applies the settings of a dataset to the datasets below it.
    fn children(&mut self, parent: &DatasetPolicy, but: impl Fn(&mut DatasetPolicy)) {
        let prefix = prefix_of(&parent.dataset);
        for dataset in self.datasets.iter().filter(|dataset| dataset.starts_with(&prefix)) {
            let before = self.found.remove(dataset);
            let mut child = DatasetPolicy {
                dataset: dataset.clone(),
                is_in_tree: parent.is_in_tree || before.as_ref().is_some_and(|before| before.is_in_tree),
                settings: parent.settings.clone(),
            };
            // This setting is never inherited.
            let own = before.and_then(|mut before| before.settings.remove("process_children_only"));
            match own {
                Some(setting) => drop(child.settings.insert("process_children_only", setting)),
                None => child.disable("process_children_only", Origin::Default),
            }
            but(&mut child);
            self.found.insert(dataset.clone(), child);
        }
    }
}

/// The prefix of the names of datasets below `dataset`.
fn prefix_of(dataset: &str) -> String {
    format!("{dataset}/")
}

fn origin(section: &CheckedSection, entry: &CheckedEntry) -> Origin {
    Origin::Line {
        section: section.name.clone(),
        line: entry.line,
    }
}

impl DatasetPolicy {
    fn apply_section(&mut self, section: &CheckedSection, is_meant: impl Fn(&str) -> bool) {
        let entries = section.entries.iter().filter(|entry| is_meant(entry.key));
        self.settings.extend(entries.map(|entry| {
            let setting = Setting {
                value: entry.value.clone(),
                origin: origin(section, entry),
            };
            (entry.key, setting)
        }));
    }

    fn disable(&mut self, key: &'static str, origin: Origin) {
        let value = "no".to_owned();
        self.settings.insert(key, Setting { value, origin });
    }

    /// All effective settings of the dataset, by key, with their origins.
    pub fn settings(&self) -> impl Iterator<Item = (&'static str, &Setting)> {
        let is_about_others = |key: &str| !is_for_templates(key) || key == "path" || key == "skip_children";
        let settings = self.settings.iter().filter(move |(key, _)| !is_about_others(key));
        settings.map(|(key, setting)| (*key, setting))
    }

    fn text(&self, key: &str) -> &str {
        &self.settings[key].value
    }

    pub(super) fn is_on(&self, key: &str) -> bool {
        toggle(self.text(key)) == Some(true)
    }

    pub(super) fn number(&self, key: &str) -> u32 {
        number(self.text(key)).expect("numbers were checked when they were read")
    }

    /// A setting that is a duration, in seconds.
    pub(super) fn duration_seconds(&self, key: &str, unit_seconds: u64) -> u64 {
        parse_seconds(self.text(key), unit_seconds).unwrap_or(u64::MAX)
    }

    /// The number of snapshots of a type to keep. If it is 0, none is taken, and existing ones are removed.
    pub fn count(&self, kind: SnapshotType) -> u32 {
        self.number(kind.name())
    }

    /// Whether snapshots of the dataset are taken.
    pub fn takes(&self) -> bool {
        self.is_on("autosnap") && !self.is_for_children_only()
    }

    /// Whether snapshots of the dataset are removed.
    pub fn prunes(&self) -> bool {
        self.is_on("autoprune") && !self.is_for_children_only()
    }

    /// Whether the dataset is monitored for fresh snapshots.
    pub fn is_monitored(&self) -> bool {
        self.is_on("monitor") && !self.is_for_children_only()
    }

    /// Whether only the datasets below it are monitored for fresh snapshots.
    pub fn is_monitored_below(&self) -> bool {
        self.is_on("monitor") && self.is_for_children_only()
    }

    /// Whether snapshots of the dataset and of all datasets below it are taken atomically.
    pub fn is_tree(&self) -> bool {
        self.is_in_tree && self.takes()
    }

    fn is_for_children_only(&self) -> bool {
        self.is_on("process_children_only")
    }

    /// The commands to run around the dataset's snapshots.
    pub fn hooks(&self) -> Hooks {
        let script = |key| Some(self.text(key)).filter(|text| !text.is_empty()).map(str::to_owned);
        let seconds = self.number("script_timeout");
        Hooks {
            pre_snapshot: script("pre_snapshot_script"),
            post_snapshot: script("post_snapshot_script"),
            pre_pruning: script("pre_pruning_script"),
            pruning: script("pruning_script"),
            deadline: (seconds > 0).then(|| Duration::from_secs(u64::from(seconds))),
            needs_pre_snapshot: self.is_on("no_inconsistent_snapshot"),
            always_post_snapshot: self.is_on("force_post_snapshot_script"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Origin, ResolvedDatasets};
    use crate::sanoid::{SanoidConfig, SnapshotType};

    fn resolved(text: &str) -> ResolvedDatasets {
        let datasets = ["tank", "tank/a", "tank/a/b", "tank/ab", "tank/c"].map(str::to_owned);
        SanoidConfig::parse(text).unwrap().resolve(&datasets)
    }

    fn daily(resolved: &ResolvedDatasets) -> Vec<(&str, u32)> {
        let datasets = resolved.datasets.iter();
        datasets
            .map(|policy| (&policy.dataset[..], policy.count(SnapshotType::Daily)))
            .collect()
    }

    #[test]
    fn templates_go_before_sections_and_the_default_one_before_all() {
        let text = "[tank/a]\nuse_template = one,two\nhourly = 7\n[template_one]\ndaily=1\nweekly=1\nhourly=1\n[template_two]\ndaily=2\n[template_default]\nyearly=9\ndaily=3\n[tank/c]\n";
        let resolved = resolved(text);
        assert_eq!(daily(&resolved), [("tank/a", 2), ("tank/c", 3)]);
        let policy = &resolved.datasets[0];
        let counts = SnapshotType::ALL.map(|kind| policy.count(kind));
        assert_eq!(counts, [9, 6, 1, 2, 7, 0]);
        let origin = |wanted| {
            policy
                .settings()
                .find(|(key, _)| *key == wanted)
                .unwrap()
                .1
                .origin
                .clone()
        };
        let line = |section: &str, line| Origin::Line {
            section: section.to_owned(),
            line,
        };
        assert_eq!(origin("daily"), line("template_two", 9));
        assert_eq!(origin("hourly"), line("tank/a", 3));
        assert_eq!(origin("monthly"), Origin::Default);
        assert!(resolved.warnings.is_empty());
    }

    #[test]
    fn children_inherit_from_their_parent_unless_a_later_section_overrides() {
        let text = "[tank/a]\ndaily=5\nrecursive=yes\nprocess_children_only=yes\nautoprune=no\n[tank/a/b]\nhourly=1";
        let resolved = resolved(text);
        assert_eq!(daily(&resolved), [("tank/a", 5), ("tank/a/b", 5)]);
        let [parent, child] = &resolved.datasets[..] else {
            panic!()
        };
        assert!(!parent.takes() && child.takes());
        assert!(!child.prunes());
        assert_eq!(child.count(SnapshotType::Hourly), 1);
    }

    #[test]
    fn a_tree_is_taken_at_its_root_and_pruned_everywhere() {
        let text = "[tank]\nrecursive = ZFS\ndaily=4\n[tank/a]\nautosnap = yes\ndaily=3\n[tank/c]\nskip_children=yes";
        let resolved = resolved(text);
        let wanted = [
            ("tank", 4),
            ("tank/a", 3),
            ("tank/a/b", 4),
            ("tank/ab", 4),
            ("tank/c", 4),
        ];
        assert_eq!(daily(&resolved), wanted);
        for policy in &resolved.datasets {
            assert_eq!(policy.takes(), policy.dataset == "tank");
            assert_eq!(policy.is_tree(), policy.dataset == "tank");
            assert!(policy.prunes());
        }
        assert_eq!(resolved.warnings.len(), 1);
    }

    #[test]
    fn skip_children_leaves_children_out() {
        let text = "[tank]\nrecursive=yes\n[tank/a]\nskip_children=yes\n[other]\npath = tank/none\n";
        let resolved = resolved(text);
        let names = resolved.datasets.iter().map(|policy| &policy.dataset[..]);
        assert_eq!(
            names.collect::<Vec<_>>(),
            ["tank", "tank/a", "tank/ab", "tank/c", "tank/none"]
        );
        assert_eq!(
            resolved.warnings[0].to_string(),
            "there is no dataset tank/none, which [other] is about"
        );
    }
}
