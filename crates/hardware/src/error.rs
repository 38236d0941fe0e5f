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
    /// The machine that the text describes is encrypted.
    #[error("the machine in this {form} is encrypted")]
    Encrypted {
        /// What it is: "settings of VirtualBox".
        form: &'static str,
    },
    /// The text describes more machines than one.
    #[error("this {form} has {count} machines, not one: {names}")]
    SeveralMachines {
        /// What it is: "OVF descriptor"...
        form: &'static str,
        /// How many there are.
        count: usize,
        /// What they are called: the first ones, if there are many.
        names: String,
    },
}
