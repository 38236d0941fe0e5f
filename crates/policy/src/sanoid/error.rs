//! What is wrong with a sanoid.conf.

/// What is wrong with a `sanoid.conf`. Lines count from 1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SanoidError {
    /// A line that is neither a section, nor a key with its value, nor a comment.
    #[error("line {line}: {text:?} is neither [SECTION], nor KEY = VALUE, nor a comment")]
    Malformed {
        /// The line.
        line: u32,
        /// Its beginning.
        text: String,
    },
    /// A key before the first section.
    #[error("line {line}: {key} stands before the first [SECTION]")]
    OutsideSection {
        /// The line.
        line: u32,
        /// The key.
        key: String,
    },
    /// A key that sanoid does not know either.
    #[error("line {line}: there is no setting {key:?} (in [{section}]){}", did_you_mean(*nearest))]
    UnknownKey {
        /// The line.
        line: u32,
        /// The section.
        section: String,
        /// The key.
        key: String,
        /// What may have been meant.
        nearest: Option<&'static str>,
    },
    /// A value that makes no sense for its key.
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
        /// What it should be, in words.
        wanted: String,
    },
}

pub(crate) fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |nearest| format!(": did you mean {nearest}?"))
}
