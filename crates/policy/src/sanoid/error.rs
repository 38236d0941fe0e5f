//! Errors in a sanoid.conf.

/// An error in a `sanoid.conf`. Lines count from 1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SanoidError {
    /// A line that is neither a section, nor a key with its value, nor a comment.
    #[error("line {line}: {text:?} is neither [SECTION], nor KEY = VALUE, nor a comment")]
    Malformed {
        /// The line.
        line: u32,
        /// The beginning of the line.
        text: String,
    },
    /// A key before the first section.
    #[error("line {line}: {key} is before the first [SECTION]")]
    OutsideSection {
        /// The line.
        line: u32,
        /// The key.
        key: String,
    },
    /// An unknown key.
    #[error("line {line}: there is no setting {key:?} (in [{section}]){}", did_you_mean(*nearest))]
    UnknownKey {
        /// The line.
        line: u32,
        /// The section.
        section: String,
        /// The key.
        key: String,
        /// The most similar known key.
        nearest: Option<&'static str>,
    },
    /// An invalid value.
    #[error("line {line}: {key} = {value:?} (in [{section}]): it should be {wanted}")]
    Value {
        /// The line.
        line: u32,
        /// The section.
        section: String,
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// What is expected, in words.
        wanted: String,
    },
}

pub(crate) fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |nearest| format!(": did you mean {nearest}?"))
}
