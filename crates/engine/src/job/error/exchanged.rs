//! Another repository was found at a known location.

/// Another repository is at a location than the one that was seen there before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{store} is not the repository that was here before: it is {found}, and {known} was known on this host")]
pub struct Exchanged {
    /// The location.
    pub store: String,
    /// The repository that is there now.
    pub found: String,
    /// The repository that was there before.
    pub known: String,
}
