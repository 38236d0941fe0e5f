//! Errors of reading a configuration.

/// Result of reading a configuration.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not valid in its format.
    #[error("this is no {form}: {detail}")]
    Malformed {
        /// The expected format: "OVF descriptor"...
        form: &'static str,
        /// The fault and its location.
        detail: String,
    },
    /// The machine that the text describes is encrypted.
    #[error("the machine in this {form} is encrypted")]
    Encrypted {
        /// The format: "settings of VirtualBox".
        form: &'static str,
    },
    /// The text describes more machines than one.
    #[error("this {form} has {count} machines, not one: {names}")]
    SeveralMachines {
        /// The format: "OVF descriptor"...
        form: &'static str,
        /// The number of machines.
        count: usize,
        /// Their names, at most the first few.
        names: String,
    },
}
