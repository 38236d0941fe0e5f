//! Names of templates: `NAME`, `NAME:TAG`, `NAME@DIGEST`.

use std::fmt;
use std::str::FromStr;

use crate::job::error::TemplateError;

const NAME_BYTES_MAX: usize = 128;
const TAG_BYTES_MAX: usize = 128;
/// Fewest digits of a digest: with fewer, a typing error may select another one.
const DIGEST_DIGITS_MIN: usize = 8;
const DIGEST_DIGITS: usize = 64;
/// The default tag.
const LATEST: &str = "latest";

/// Name of a template: words of ASCII letters, digits, `.`, `_` and `-`, with `/` between them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TemplateName(String);

/// Tag of a template: ASCII letters, digits, `.`, `_` and `-`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TemplateTag(String);

/// Whether a word starts with a letter or digit, and continues with these, `.`, `_` and `-`.
fn is_word(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric();
    text.bytes().next().is_some_and(is_plain) && text.bytes().all(|byte| is_plain(byte) || b"._-".contains(&byte))
}

impl TemplateName {
    /// Accepts `text` if it follows the rules: 1 to 128 bytes, words that begin with a letter or digit.
    pub fn new(text: impl Into<String>) -> Result<Self, TemplateError> {
        let text = text.into();
        if text.len() > NAME_BYTES_MAX || !text.split('/').all(is_word) {
            return Err(TemplateError::Name { name: text });
        }
        Ok(Self(text))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TemplateTag {
    /// Accepts `text` if it follows the rules: 1 to 128 bytes, a letter or digit first.
    pub fn new(text: impl Into<String>) -> Result<Self, TemplateError> {
        let text = text.into();
        if text.len() > TAG_BYTES_MAX || !is_word(&text) {
            return Err(TemplateError::Tag { tag: text });
        }
        Ok(Self(text))
    }

    /// The tag as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for TemplateTag {
    fn default() -> Self {
        Self(LATEST.to_owned())
    }
}

impl fmt::Display for TemplateName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl fmt::Display for TemplateTag {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// A name and a tag, for a push.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TemplateLabel {
    /// The name.
    pub name: TemplateName,
    /// The tag.
    pub tag: TemplateTag,
}

impl fmt::Display for TemplateLabel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.name, self.tag)
    }
}

impl FromStr for TemplateLabel {
    type Err = TemplateError;

    /// Parses `NAME`, which means `NAME:latest`, or `NAME:TAG`.
    fn from_str(text: &str) -> Result<Self, TemplateError> {
        let (name, tag) = match text.split_once(':') {
            Some((name, tag)) => (name, TemplateTag::new(tag)?),
            None => (text, TemplateTag::default()),
        };
        let name = TemplateName::new(name)?;
        Ok(Self { name, tag })
    }
}

/// Selects one of the templates of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateVersion {
    /// The template that the tag refers to now.
    Tag(TemplateTag),
    /// The template whose digest starts with these lower-case digits.
    Digest(String),
}

/// Names an existing template, to pull, show or remove it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateReference {
    /// The name.
    pub name: TemplateName,
    /// Which template of the name.
    pub version: TemplateVersion,
}

impl fmt::Display for TemplateReference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.version {
            TemplateVersion::Tag(tag) => write!(formatter, "{}:{tag}", self.name),
            TemplateVersion::Digest(digest) => write!(formatter, "{}@{digest}", self.name),
        }
    }
}

impl FromStr for TemplateReference {
    type Err = TemplateError;

    /// Parses `NAME`, `NAME:TAG`, or `NAME@DIGEST` with at least the first 8 digits of the digest.
    fn from_str(text: &str) -> Result<Self, TemplateError> {
        let Some((name, digest)) = text.split_once('@') else {
            let TemplateLabel { name, tag } = text.parse()?;
            let version = TemplateVersion::Tag(tag);
            return Ok(Self { name, version });
        };
        let is_long_enough = (DIGEST_DIGITS_MIN..=DIGEST_DIGITS).contains(&digest.len());
        if !is_long_enough || !digest.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(TemplateError::Digest {
                digest: digest.to_owned(),
            });
        }
        Ok(Self {
            name: TemplateName::new(name)?,
            version: TemplateVersion::Digest(digest.to_ascii_lowercase()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{TemplateLabel, TemplateReference};

    #[test]
    fn labels_and_references_are_read_as_they_are_written() {
        for (text, shown) in [
            ("debian12", "debian12:latest"),
            ("team/debian-12:v1.0_a", "team/debian-12:v1.0_a"),
        ] {
            assert_eq!(text.parse::<TemplateLabel>().unwrap().to_string(), shown);
            assert_eq!(text.parse::<TemplateReference>().unwrap().to_string(), shown);
        }
        let reference: TemplateReference = "debian@0A1B2C3D".parse().unwrap();
        assert_eq!(reference.to_string(), "debian@0a1b2c3d");
        assert!("debian@0a1b2c3d".parse::<TemplateLabel>().is_err());
    }

    /// Names are used as file names and as words in a signed text.
    #[test]
    fn what_could_mean_something_else_is_refused() {
        let long = "a".repeat(129);
        for text in [
            "",
            ":",
            "a:",
            ":a",
            "-a",
            "a/",
            "/a",
            "a//b",
            "../a",
            "a/../b",
            "a/.b",
            "a b",
            "a\nb",
            "ä",
            "a:b:c",
            "a:-b",
            "a@",
            "a@12",
            "a@xyzxyzxy",
            "a@12345678:b",
            &long,
        ] {
            assert!(text.parse::<TemplateReference>().is_err(), "{text:?}");
        }
        assert!(format!("a@{}", "0".repeat(65)).parse::<TemplateReference>().is_err());
    }
}
