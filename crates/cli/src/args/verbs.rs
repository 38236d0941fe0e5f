//! The verbs as data: the information that help, manual and completion need in addition to the arguments.

use clap::Command;

use super::Example;

/// Options that every verb accepts, although some verbs do not use them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharedOptions {
    /// The repository and its password.
    Repository,
    /// Output as a JSON document.
    Json,
    /// Display of progress.
    Progress,
}

impl SharedOptions {
    /// The ids of these options in clap.
    pub const fn ids(self) -> &'static [&'static str] {
        match self {
            Self::Repository => &["repository", "password_file", "password_command", "key_slot"],
            Self::Json => &["json"],
            Self::Progress => &["progress", "no_progress"],
        }
    }
}

/// A verb.
#[derive(Debug, Clone, Copy)]
pub struct VerbEntry {
    /// The name as typed on the command line.
    pub name: &'static str,
    /// Examples of its use.
    pub examples: &'static [Example],
    /// Shared options that have no effect on this verb.
    pub unused: &'static [SharedOptions],
    /// The verbs below this one.
    pub below: &'static [VerbEntry],
    /// Who starts it.
    pub audience: Audience,
}

/// What starts a verb: a user or another program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audience {
    /// Users and their scripts.
    People,
    /// The program itself.
    Program,
}

impl VerbEntry {
    /// The same verb, started by the program itself.
    #[must_use]
    pub const fn internal(mut self) -> Self {
        self.audience = Audience::Program;
        self
    }

    /// The verb at `path` below this one.
    fn at(&self, path: &[&str]) -> Option<&Self> {
        match path {
            [] => Some(self),
            [name, path @ ..] => find(self.below, name)?.at(path),
        }
    }
}

fn find<'v>(verbs: impl IntoIterator<Item = &'v VerbEntry>, name: &str) -> Option<&'v VerbEntry> {
    verbs.into_iter().find(|verb| verb.name == name)
}

/// Verbs that the help shows under one heading.
#[derive(Debug, Clone, Copy)]
pub struct VerbGroup {
    /// The heading in the help.
    pub title: &'static str,
    /// The verbs under the heading.
    pub verbs: &'static [VerbEntry],
}

/// The whole command line.
#[derive(Debug, Clone, Copy)]
pub struct CommandLine {
    /// Builds the clap command.
    pub tree: fn() -> Command,
    /// The verbs.
    pub groups: &'static [VerbGroup],
    /// Examples of the program as a whole.
    pub examples: &'static [Example],
}

impl CommandLine {
    /// Builds the clap command.
    pub fn tree(&self) -> Command {
        (self.tree)()
    }

    /// The verb at `path` (`list`, `image info`), if there is one.
    pub fn verb(&self, path: &str) -> Option<&'static VerbEntry> {
        let words: Vec<&str> = path.split_whitespace().collect();
        let (name, below) = words.split_first()?;
        find(self.groups.iter().flat_map(|group| group.verbs), name)?.at(below)
    }

    /// The verbs below `path`; all verbs if `path` is empty.
    fn below(&self, path: &str) -> Vec<&'static VerbEntry> {
        if path.is_empty() {
            return self.groups.iter().flat_map(|group| group.verbs).collect();
        }
        self.verb(path).map_or(&[][..], |verb| verb.below).iter().collect()
    }

    /// The verbs below `path` that users start.
    pub fn verbs_for_people(&self, path: &str) -> impl Iterator<Item = &'static VerbEntry> {
        let below = self.below(path).into_iter();
        below.filter(|verb| verb.audience == Audience::People)
    }

    /// Examples of the verb at `path`; of the program if `path` is empty.
    pub fn examples_of(&self, path: &str) -> &'static [Example] {
        if path.is_empty() {
            return self.examples;
        }
        self.verb(path).map_or(&[], |verb| verb.examples)
    }
}
