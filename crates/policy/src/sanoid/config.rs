//! Reads and checks a `sanoid.conf`.

use super::ini::{IniSection, sections};
use super::keys::{KEYS, find};
use crate::nearest::nearest;
use crate::sanoid::error::{SanoidError, did_you_mean};

/// Prefix of sections that are templates.
const TEMPLATE: &str = "template_";
/// The template that applies to every section.
const DEFAULT_TEMPLATE: &str = "template_default";

/// A suspicious setting that sanoid accepts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SanoidWarning {
    /// A key occurs twice in a section: the first one counts.
    #[error("line {line}: {key} is already set in [{section}] on line {first_line}, which takes precedence")]
    Duplicate {
        /// The line.
        line: u32,
        /// The line that counts.
        first_line: u32,
        /// The section.
        section: String,
        /// The key.
        key: &'static str,
    },
    /// A key that has an effect only in datasets, not in templates.
    #[error("line {line}: {key} has no effect in a template ([{section}])")]
    NotInTemplates {
        /// The line.
        line: u32,
        /// The section.
        section: String,
        /// The key.
        key: &'static str,
    },
    /// An undefined template.
    #[error("line {line}: there is no [template_{name}], which [{section}] uses{}", did_you_mean(nearest.as_deref()))]
    NoTemplate {
        /// The line.
        line: u32,
        /// The section.
        section: String,
        /// The template's name.
        name: String,
        /// The most similar template.
        nearest: Option<String>,
    },
    /// A dataset with its own settings in a tree whose snapshots are taken at once.
    #[error("[{section}] has no snapshots of its own: it is part of a tree with recursive = zfs")]
    PartOfTree {
        /// The section.
        section: String,
    },
    /// The dataset does not exist.
    #[error("there is no dataset {dataset}, which [{section}] is about")]
    NoDataset {
        /// The section.
        section: String,
        /// The dataset.
        dataset: String,
    },
}

/// A `sanoid.conf` with valid keys and values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SanoidConfig {
    pub(super) sections: Vec<CheckedSection>,
    warnings: Vec<SanoidWarning>,
}

/// A section with known keys, each occurring once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CheckedSection {
    pub(super) name: String,
    pub(super) entries: Vec<CheckedEntry>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CheckedEntry {
    pub(super) key: &'static str,
    pub(super) value: String,
    pub(super) line: u32,
}

impl CheckedSection {
    pub(super) fn is_template(&self) -> bool {
        self.name.starts_with(TEMPLATE)
    }

    /// The dataset that the section configures.
    pub(super) fn dataset(&self) -> &str {
        self.get("path").map_or(&self.name, |entry| &entry.value)
    }

    pub(super) fn get(&self, key: &str) -> Option<&CheckedEntry> {
        self.entries.iter().find(|entry| entry.key == key)
    }
}

/// Whether a key has an effect in a template.
pub(super) fn is_for_templates(key: &str) -> bool {
    !key.contains("template") && !key.contains("recursive")
}

impl SanoidConfig {
    /// Parses a `sanoid.conf`.
    ///
    /// # Errors
    /// All errors of the file, in the order of its lines.
    pub fn parse(text: &str) -> Result<Self, Vec<SanoidError>> {
        let (mut errors, mut warnings) = (Vec::new(), Vec::new());
        let sections = sections(text, &mut errors);
        let sections: Vec<CheckedSection> = sections
            .into_iter()
            .map(|section| checked(section, &mut errors, &mut warnings))
            .collect();
        if !errors.is_empty() {
            errors.sort_by_key(line_of);
            return Err(errors);
        }
        for section in &sections {
            warn_of_templates(section, &sections, &mut warnings);
        }
        Ok(Self { sections, warnings })
    }

    /// Suspicious settings.
    pub fn warnings(&self) -> &[SanoidWarning] {
        &self.warnings
    }

    /// The datasets that have a section, in the order of the file.
    pub fn datasets(&self) -> impl Iterator<Item = &str> {
        let sections = self.sections.iter().filter(|section| !section.is_template());
        sections.map(CheckedSection::dataset)
    }

    /// The template of this name, without "template_".
    pub(super) fn template(&self, name: &str) -> Option<&CheckedSection> {
        let of_name = |section: &&CheckedSection| section.name.strip_prefix(TEMPLATE) == Some(name);
        self.sections.iter().find(of_name)
    }

    /// The template that applies to every section.
    pub(super) fn default_template(&self) -> Option<&CheckedSection> {
        self.sections.iter().find(|section| section.name == DEFAULT_TEMPLATE)
    }
}

fn line_of(error: &SanoidError) -> u32 {
    match error {
        SanoidError::Malformed { line, .. }
        | SanoidError::OutsideSection { line, .. }
        | SanoidError::UnknownKey { line, .. }
        | SanoidError::Value { line, .. } => *line,
    }
}

fn checked(section: IniSection, errors: &mut Vec<SanoidError>, warnings: &mut Vec<SanoidWarning>) -> CheckedSection {
    let mut result = CheckedSection {
        name: section.name,
        entries: Vec::new(),
    };
    for entry in section.entries {
        let Some(key) = find(&entry.key) else {
            errors.push(SanoidError::UnknownKey {
                line: entry.line,
                section: result.name.clone(),
                nearest: nearest(&entry.key, KEYS.iter().map(|key| key.name)),
                key: entry.key,
            });
            continue;
        };
        if let Some(first) = result.get(key.name) {
            warnings.push(SanoidWarning::Duplicate {
                line: entry.line,
                first_line: first.line,
                section: result.name.clone(),
                key: key.name,
            });
            continue;
        }
        if key.form.has(&entry.value) {
            result.entries.push(CheckedEntry {
                key: key.name,
                value: entry.value,
                line: entry.line,
            });
        } else {
            errors.push(SanoidError::Value {
                line: entry.line,
                section: result.name.clone(),
                key: key.name,
                value: entry.value,
                wanted: key.form.wanted(),
            });
        }
    }
    result
}

/// The names of the templates in the value of `use_template`.
pub(super) fn used_templates(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').map(str::trim).filter(|name| !name.is_empty())
}

fn warn_of_templates(section: &CheckedSection, all: &[CheckedSection], warnings: &mut Vec<SanoidWarning>) {
    if section.is_template() {
        let without_effect = section.entries.iter().filter(|entry| !is_for_templates(entry.key));
        warnings.extend(without_effect.map(|entry| SanoidWarning::NotInTemplates {
            line: entry.line,
            section: section.name.clone(),
            key: entry.key,
        }));
        return;
    }
    let Some(entry) = section.get("use_template") else {
        return;
    };
    let known: Vec<&str> = all
        .iter()
        .filter_map(|other| other.name.strip_prefix(TEMPLATE))
        .collect();
    // The default template always applies, whether it is named or not.
    let missing = used_templates(&entry.value).filter(|name| *name != "default" && !known.contains(name));
    warnings.extend(missing.map(|name| SanoidWarning::NoTemplate {
        line: entry.line,
        section: section.name.clone(),
        name: name.to_owned(),
        nearest: nearest(name, known.iter().copied()).map(str::to_owned),
    }));
}

#[cfg(test)]
mod tests {
    use super::{SanoidConfig, SanoidWarning};

    fn errors(text: &str) -> Vec<String> {
        let errors = SanoidConfig::parse(text).unwrap_err();
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn everything_that_is_wrong_is_reported_with_its_line() {
        let text = "daily = 1\n[tank]\nhorly = 3\nnonsense_of_mine = 4\nhourly = some\nautosnap = perhaps\nweekly_wday = 8\nno sign\nrecursive = all\nhourly_warn = soon";
        assert_eq!(
            errors(text),
            [
                "line 1: daily is before the first [SECTION]",
                "line 3: there is no setting \"horly\" (in [tank]): did you mean hourly?",
                "line 4: there is no setting \"nonsense_of_mine\" (in [tank])",
                "line 5: hourly = \"some\" (in [tank]): it should be a number from 0 to 1000000",
                "line 6: autosnap = \"perhaps\" (in [tank]): it should be yes or no",
                "line 7: weekly_wday = \"8\" (in [tank]): it should be a number from 0 to 7",
                "line 8: \"no sign\" is neither [SECTION], nor KEY = VALUE, nor a comment",
                "line 9: recursive = \"all\" (in [tank]): it should be yes, no or zfs",
                "line 10: hourly_warn = \"soon\" (in [tank]): it should be a number, or one with a unit: 90m, 28h, 32d, 2w",
            ]
        );
    }

    #[test]
    fn settings_without_effect_are_warnings() {
        let text = "[template_a]\nrecursive = yes\ndaily = 1\ndaily = 2\n[tank]\nuse_template = a, production,default\n[template_produktion]";
        let config = SanoidConfig::parse(text).unwrap();
        let said: Vec<String> = config.warnings().iter().map(SanoidWarning::to_string).collect();
        assert_eq!(
            said,
            [
                "line 4: daily is already set in [template_a] on line 3, which takes precedence",
                "line 2: recursive has no effect in a template ([template_a])",
                "line 6: there is no [template_production], which [tank] uses: did you mean produktion?",
            ]
        );
        assert_eq!(SanoidConfig::parse("").unwrap().warnings(), []);
    }
}
