//! What can go wrong with a configuration.

/// Result of reading a configuration.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not of the form that it claims.
    #[error("this is no {form}: {detail}")]
    Malformed {
        /// What it should be: "OVF descriptor"...
        form: &'static str,
        /// Where it is not, and how.
        detail: String,
    },
}
