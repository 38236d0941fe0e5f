//! Another repository is at a place.

/// Another repository is where one was known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{store} is not the repository that was here before: it is {found}, and {known} was known on this host")]
pub struct Exchanged {
    /// The place.
    pub store: String,
    /// What is there now.
    pub found: String,
    /// What was there.
    pub known: String,
}
