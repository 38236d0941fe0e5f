//! The tidy rules and their shared types: the tree of files as text, and findings.

mod anchors;
mod banned;
mod directions;
mod foreign_bytes;
mod imports;
mod lengths;
mod links;
mod markup;
mod modules;
mod order;
mod parameters;
mod rust_text;
mod type_names;
mod words;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// A violation of a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    /// Relative to the root of the repository.
    path: String,
    /// The line, from 1; 0 if the finding concerns the whole file.
    line: usize,
    rule: &'static str,
    /// The violation, and how to fix it.
    advice: String,
}

impl Finding {
    fn new(path: &str, line: usize, rule: &'static str, advice: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line,
            rule,
            advice: advice.into(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}: {}", self.path, self.rule, self.advice),
            line => write!(f, "{}:{line}: {}: {}", self.path, self.rule, self.advice),
        }
    }
}

/// Every text file of the repository, by its path relative to the root, with `/` between the parts.
#[derive(Default)]
pub(crate) struct Tree {
    files: BTreeMap<String, String>,
}

impl Tree {
    /// Reads the files below `root`. Files that are not UTF-8 are included as empty.
    fn read(root: &Path) -> Result<Self, String> {
        let mut tree = Self::default();
        tree.read_directory(root, "")?;
        Ok(tree)
    }

    fn read_directory(&mut self, directory: &Path, prefix: &str) -> Result<(), String> {
        const SKIPPED: [&str; 5] = [".git", "target", "build", "node_modules", "proptest-regressions"];
        let explain = |error: std::io::Error| format!("{}: {error}", directory.display());
        for entry in std::fs::read_dir(directory).map_err(explain)? {
            let entry = entry.map_err(explain)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = format!("{prefix}{name}");
            let kind = entry.file_type().map_err(explain)?;
            if kind.is_dir() && !SKIPPED.contains(&name.as_str()) {
                self.read_directory(&entry.path(), &format!("{path}/"))?;
            } else if kind.is_file() && !SKIPPED.contains(&name.as_str()) {
                let bytes = std::fs::read(entry.path()).map_err(explain)?;
                self.files.insert(path, String::from_utf8(bytes).unwrap_or_default());
            }
        }
        Ok(())
    }

    fn get(&self, path: &str) -> Option<&str> {
        self.files.get(path).map(String::as_str)
    }

    /// Path and text of each file.
    fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// Whether `path` is a file or a directory.
    fn exists(&self, path: &str) -> bool {
        let directory = format!("{}/", path.trim_end_matches('/'));
        self.files.contains_key(path)
            || directory == "/"
            || self
                .files
                .range(directory.clone()..)
                .next()
                .is_some_and(|(next, _)| next.starts_with(&directory))
    }
}

#[cfg(test)]
impl Tree {
    fn of(files: &[(&str, &str)]) -> Self {
        Self {
            files: files
                .iter()
                .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
                .collect(),
        }
    }
}

/// All findings in the repository at `root`, sorted by file and line.
pub(crate) fn check(root: &Path) -> Result<Vec<Finding>, String> {
    let tree = Tree::read(root)?;
    let sources = modules::sources(&tree);
    let mut findings = modules::check(&tree, &sources);
    findings.extend(directions::check_crates(&tree, directions::LEVELS, directions::RIGS));
    findings.extend(directions::check_modules(&sources, directions::MODULE_RULES));
    findings.extend(order::check(&sources, order::ORDERS));
    findings.extend(parameters::check(&sources));
    findings.extend(type_names::check(&sources));
    findings.extend(banned::check(&sources, banned::BANS, banned::ALLOWED));
    findings.extend(lengths::check(&sources, lengths::RATCHET));
    findings.extend(foreign_bytes::check(&sources, foreign_bytes::EXCEPTIONS));
    findings.extend(markup::check(&sources));
    findings.extend(links::check(&tree));
    findings.extend(words::check(&tree));
    findings.sort();
    Ok(findings)
}
