//! Valid names of machines and disks.
//!
//! Users give machines names in any script, with spaces and punctuation, and Holdfast keeps them unchanged. A name is
//! refused only if it could not be typed back: the characters that separate the parts of a snapshot's name (`@`, `:`),
//! the one that separates folders (`/`), control characters, and names that already have another meaning.

use std::fmt;

/// Longest name of a machine or a disk, in bytes of UTF-8: the limit for file names on every Linux file system.
const NAME_BYTES_MAX: usize = 255;

/// Hexadecimal digits of a whole snapshot id (16 bytes).
pub(crate) const SNAPSHOT_ID_DIGITS: usize = 32;

/// Word that means the newest snapshot.
pub(crate) const LATEST: &str = "latest";

/// Why a name is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// The name is empty.
    #[error("a name cannot be empty")]
    Empty,
    /// The name is too long.
    #[error("the name has {length_bytes} bytes, more than the {NAME_BYTES_MAX} allowed")]
    TooLong {
        /// Bytes of UTF-8 in the name.
        length_bytes: usize,
    },
    /// The name has a character that separates parts of a name, or that cannot be typed.
    #[error("the name {name:?} contains {character:?}; names contain no '@', ':', '/' and no control characters")]
    Character {
        /// The name as given.
        name: String,
        /// The first character that is refused.
        character: char,
    },
    /// The name starts or ends with white space, which is invisible.
    #[error("the name {name:?} starts or ends with white space")]
    WhiteSpace {
        /// The name as given.
        name: String,
    },
    /// The name starts like an option.
    #[error("the name {name:?} starts with '-', like an option")]
    LeadingDash {
        /// The name as given.
        name: String,
    },
    /// The name already has another meaning.
    #[error("the name {name:?} is reserved: it means {meaning}")]
    Reserved {
        /// The name as given.
        name: String,
        /// That meaning.
        meaning: &'static str,
    },
    /// The text after the `@` is not a time.
    #[error(
        "{text:?} is no time; use {LATEST}, a date (2026-11-20) or a time (2026-11-20T10:00, 2026-11-20T10:00:00+01:00)"
    )]
    Time {
        /// The text after the `@`.
        text: String,
    },
}

/// Name of a machine: what its snapshots are listed under.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MachineName(String);

impl MachineName {
    /// Accepts `name` if it follows the rules: 1 to 255 bytes; no `@`, `:`, `/` or control characters; no white space at
    /// either end; no `-` at the start; not `.`, `..`, `latest` or the 32 digits of a snapshot id.
    pub fn new(name: impl Into<String>) -> Result<Self, NameError> {
        let name = name.into();
        check_shape(&name)?;
        if name == LATEST {
            return Err(NameError::Reserved {
                name,
                meaning: "the newest snapshot",
            });
        }
        if name.len() == SNAPSHOT_ID_DIGITS && name.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(NameError::Reserved {
                name,
                meaning: "the snapshot with this id",
            });
        }
        Ok(Self(name))
    }

    /// A valid name similar to `name`: unchanged if it is valid, otherwise without the refused characters.
    pub fn near(name: &str) -> Self {
        if let Ok(same) = Self::new(name) {
            return same;
        }
        let replaced = |character| if is_refused(character) { '-' } else { character };
        let text: String = name.chars().map(replaced).collect();
        let text = text.trim().trim_start_matches('-');
        let end = (0..=text.len().min(NAME_BYTES_MAX - NEAR_PREFIX.len()))
            .rev()
            .find(|end| text.is_char_boundary(*end));
        let text = text[..end.unwrap_or_default()].trim_end();
        Self::new(text).unwrap_or_else(|_| Self(format!("{NEAR_PREFIX}{text}").trim_end_matches('-').to_owned()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Prefix that makes a valid name from a reserved word.
const NEAR_PREFIX: &str = "machine-";

/// Name of a disk within its machine: `vda`, `system`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskName(String);

impl DiskName {
    /// Accepts `name` if it follows the rules: 1 to 255 bytes; no `@`, `:`, `/` or control characters; no white space at
    /// either end; no `-` at the start; not `.` or `..`.
    pub fn new(name: impl Into<String>) -> Result<Self, NameError> {
        let name = name.into();
        check_shape(&name)?;
        Ok(Self(name))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

macro_rules! text_of_name {
    ($($name:ty),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.pad(&self.0)
            }
        }
        impl std::str::FromStr for $name {
            type Err = NameError;
            fn from_str(text: &str) -> Result<Self, NameError> {
                Self::new(text)
            }
        }
    )*};
}

text_of_name!(MachineName, DiskName);

/// Rules for all names.
fn check_shape(name: &str) -> Result<(), NameError> {
    let given = || name.to_owned();
    if name.is_empty() {
        return Err(NameError::Empty);
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(NameError::TooLong {
            length_bytes: name.len(),
        });
    }
    if let Some(character) = name.chars().find(|&character| is_refused(character)) {
        return Err(NameError::Character {
            name: given(),
            character,
        });
    }
    if name.trim() != name {
        return Err(NameError::WhiteSpace { name: given() });
    }
    if name.starts_with('-') {
        return Err(NameError::LeadingDash { name: given() });
    }
    if name == "." || name == ".." {
        return Err(NameError::Reserved {
            name: given(),
            meaning: "a folder",
        });
    }
    Ok(())
}

/// Separators, control characters, and invisible characters that change the direction of text: with them a name can
/// look like another name.
fn is_refused(character: char) -> bool {
    matches!(character, '@' | ':' | '/')
        || character.is_control()
        || matches!(character, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{2028}' | '\u{2029}')
}

#[cfg(test)]
mod tests {
    use super::{DiskName, MachineName, NameError};

    #[test]
    fn machines_keep_the_names_people_gave_them() {
        for name in [
            "web1",
            "Büro-Server (alt)",
            "データベース",
            "a",
            "10.0.0.1",
            "build #3, x86",
            "...",
        ] {
            assert_eq!(MachineName::new(name).unwrap().as_str(), name);
        }
        assert!(MachineName::new("m".repeat(255)).is_ok());
    }

    #[test]
    fn names_that_could_not_be_typed_back_are_refused() {
        assert_eq!(MachineName::new(""), Err(NameError::Empty));
        assert_eq!(
            MachineName::new("m".repeat(256)),
            Err(NameError::TooLong { length_bytes: 256 })
        );
        for (name, character) in [
            ("a@b", '@'),
            ("a:b", ':'),
            ("a/b", '/'),
            ("a\nb", '\n'),
            ("\u{1b}[1m", '\u{1b}'),
            ("a\u{202e}b", '\u{202e}'),
        ] {
            assert_eq!(
                MachineName::new(name),
                Err(NameError::Character {
                    name: name.to_owned(),
                    character
                })
            );
        }
        assert!(matches!(MachineName::new(" web"), Err(NameError::WhiteSpace { .. })));
        assert!(matches!(
            MachineName::new("web\u{a0}"),
            Err(NameError::WhiteSpace { .. })
        ));
        assert!(matches!(MachineName::new("-r"), Err(NameError::LeadingDash { .. })));
        assert!(matches!(MachineName::new("-"), Err(NameError::LeadingDash { .. })));
        for name in [".", "..", "latest", &"0f".repeat(16)] {
            assert!(
                matches!(MachineName::new(name), Err(NameError::Reserved { .. })),
                "{name}"
            );
        }
    }

    #[test]
    fn a_name_that_is_refused_has_one_that_is_near() {
        for (name, near) in [
            ("web1", "web1"),
            ("a@b", "a-b"),
            ("web:vda", "web-vda"),
            ("-x", "x"),
            ("latest", "machine-latest"),
            ("..", "machine-.."),
            (" web ", "web"),
            ("", "machine"),
            ("--", "machine"),
        ] {
            assert_eq!(MachineName::near(name).as_str(), near);
        }
        for name in [
            "ä".repeat(300),
            "0f".repeat(16),
            "@".repeat(300),
            format!("{}@", "m".repeat(254)),
        ] {
            let near = MachineName::near(&name);
            assert_eq!(MachineName::new(near.as_str()), Ok(near));
        }
    }

    #[test]
    fn a_disk_may_be_called_latest() {
        assert_eq!(DiskName::new("latest").unwrap().to_string(), "latest");
        assert!(DiskName::new("a:b").is_err());
    }

    #[test]
    fn errors_say_what_is_wrong() {
        assert_eq!(
            MachineName::new("a\tb").unwrap_err().to_string(),
            r#"the name "a\tb" contains '\t'; names contain no '@', ':', '/' and no control characters"#
        );
        assert_eq!(
            MachineName::new("latest").unwrap_err().to_string(),
            r#"the name "latest" is reserved: it means the newest snapshot"#
        );
    }
}
