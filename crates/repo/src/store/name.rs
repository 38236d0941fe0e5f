//! Names of objects.

use std::fmt;
use std::str::FromStr;

/// The kinds of objects: each has its own flat namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectKind {
    /// The only object that makes a store a repository.
    Config,
    /// A key slot.
    Key,
    /// Sealed frames of chunks.
    Pack,
    /// A segment of the chunk index.
    Index,
    /// A committed snapshot.
    Snapshot,
    /// The record that a snapshot was removed.
    Forgotten,
    /// The announcement of an active writer.
    Writer,
    /// A list of packs that gc is going to delete.
    Condemned,
    /// New locations of the bytes of a rewritten or damaged pack.
    Relocation,
    /// The protection of a snapshot from removal.
    Protected,
    /// The records of scrub and repair.
    Scrub,
}

impl ObjectKind {
    /// Every kind.
    pub const ALL: [Self; 11] = [
        Self::Config,
        Self::Key,
        Self::Pack,
        Self::Index,
        Self::Snapshot,
        Self::Forgotten,
        Self::Writer,
        Self::Condemned,
        Self::Relocation,
        Self::Protected,
        Self::Scrub,
    ];

    /// The folder of the kind; for [`ObjectKind::Config`], which has no folder, the name of its only object.
    pub const fn folder(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Key => "keys",
            Self::Pack => "packs",
            Self::Index => "index",
            Self::Snapshot => "snapshots",
            Self::Forgotten => "forgotten",
            Self::Writer => "writers",
            Self::Condemned => "condemned",
            Self::Relocation => "relocations",
            Self::Protected => "protected",
            Self::Scrub => "scrub",
        }
    }
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.folder())
    }
}

/// The name of an object: its kind, and a name within the kind that every store supports.
///
/// A name has 1 to 80 characters out of `a-z`, `0-9`, `.` and `-`, and neither starts nor ends with a dot: so it is
/// valid on a file system that ignores case, in a URL and in a shell. A pack's name starts with two hexadecimal digits,
/// by which stores distribute packs over folders. The only object of the kind [`ObjectKind::Config`] is called
/// `config`.
///
/// Its text form is a path: `packs/3f/3fa9...`, `snapshots/17`, `config`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName {
    kind: ObjectKind,
    name: Box<str>,
}

/// The text is not a valid object name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no name of an object: {reason}")]
pub struct BadName {
    /// The text.
    pub text: String,
    /// The problem.
    pub reason: &'static str,
}

impl ObjectName {
    /// Maximum length of a name within a kind, in characters.
    pub const LENGTH_MAX: usize = 80;

    /// The object `name` of `kind`; [`BadName`] if the name is invalid.
    pub fn new(kind: ObjectKind, name: &str) -> Result<Self, BadName> {
        match flaw(kind, name.as_bytes()) {
            None => Ok(Self {
                kind,
                name: name.into(),
            }),
            Some(reason) => Err(BadName {
                text: name.to_owned(),
                reason,
            }),
        }
    }

    /// The object that makes a store a repository.
    pub fn config() -> Self {
        Self {
            kind: ObjectKind::Config,
            name: "config".into(),
        }
    }

    /// Its kind.
    pub fn kind(&self) -> ObjectKind {
        self.kind
    }

    /// Its name within the kind.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The subfolder within the kind's folder, if the kind has them.
    pub(super) fn fan_out(&self) -> Option<&str> {
        match self.kind {
            ObjectKind::Pack => Some(&self.name[..2]),
            _ => None,
        }
    }
}

/// Why `name` is not a valid name of `kind`.
fn flaw(kind: ObjectKind, name: &[u8]) -> Option<&'static str> {
    let allowed = |byte: &u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-');
    if name.is_empty() {
        Some("it is empty")
    } else if name.len() > ObjectName::LENGTH_MAX {
        Some("it has more than 80 characters")
    } else if !name.iter().all(allowed) {
        Some("it has a character other than a-z, 0-9, dot and dash")
    } else if name.first() == Some(&b'.') || name.last() == Some(&b'.') {
        Some("it starts or ends with a dot")
    } else if kind == ObjectKind::Config && name != b"config" {
        Some("the only name of its kind is config")
    } else if kind == ObjectKind::Pack && !name.get(..2).is_some_and(is_fan_out) {
        Some("the name of a pack starts with two hexadecimal digits")
    } else {
        None
    }
}

/// Whether `folder` is the name of a subfolder within the folder of packs.
pub(super) fn is_fan_out(folder: &[u8]) -> bool {
    folder.len() == 2 && folder.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.kind, self.fan_out()) {
            (ObjectKind::Config, _) => f.write_str(&self.name),
            (kind, None) => write!(f, "{kind}/{}", self.name),
            (kind, Some(fan_out)) => write!(f, "{kind}/{fan_out}/{}", self.name),
        }
    }
}

impl FromStr for ObjectName {
    type Err = BadName;

    /// Parses the output of `Display`.
    fn from_str(path: &str) -> Result<Self, BadName> {
        let bad = |reason| BadName {
            text: path.to_owned(),
            reason,
        };
        let Some((folder, rest)) = path.split_once('/') else {
            return Self::new(ObjectKind::Config, path);
        };
        let kind = ObjectKind::ALL
            .into_iter()
            .find(|kind| *kind != ObjectKind::Config && kind.folder() == folder)
            .ok_or_else(|| bad("there is no such kind of object"))?;
        let leaf = rest.rsplit_once('/').map_or(rest, |(_, leaf)| leaf);
        let name = Self::new(kind, leaf)?;
        if name.to_string() == path {
            Ok(name)
        } else {
            Err(bad("it is not in the folder where it belongs"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_store_could_keep_are_refused() {
        let longest = "a".repeat(80);
        for good in ["a", "0", "a-b.c", longest.as_str()] {
            assert_eq!(ObjectName::new(ObjectKind::Snapshot, good).unwrap().name(), good);
        }
        let long = "a".repeat(81);
        for bad in [
            "",
            ".",
            "..",
            ".a",
            "a.",
            "A",
            "a/b",
            "a b",
            "ä",
            "a\0",
            "a_b",
            long.as_str(),
        ] {
            assert!(
                matches!(ObjectName::new(ObjectKind::Snapshot, bad), Err(BadName { .. })),
                "{bad:?} was accepted"
            );
        }
        for bad in ["a", "ag00", "0.12", "-abc"] {
            assert!(ObjectName::new(ObjectKind::Pack, bad).is_err(), "{bad:?} was accepted");
        }
        assert!(ObjectName::new(ObjectKind::Config, "other").is_err());
    }

    #[test]
    fn a_name_is_its_path_and_back() {
        for kind in ObjectKind::ALL {
            let name = match kind {
                ObjectKind::Config => ObjectName::config(),
                _ => ObjectName::new(kind, "ab12.x").unwrap(),
            };
            assert_eq!(name.to_string().parse::<ObjectName>().unwrap(), name);
        }
        assert_eq!(
            ObjectName::new(ObjectKind::Pack, "3fa9").unwrap().to_string(),
            "packs/3f/3fa9"
        );
        for path in [
            "packs/3fa9",
            "packs/4f/3fa9",
            "keys/3f/3fa9",
            "config/config",
            "tmp/a",
            "keys/",
            "/keys/a",
            "keys//a",
            "packs/3f/../3fa9",
            "",
            "keys",
        ] {
            assert!(path.parse::<ObjectName>().is_err(), "{path:?} was accepted");
        }
    }
}
