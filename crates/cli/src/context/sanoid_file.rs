//! Reads the sanoid.conf for verbs that use it.

use std::path::{Path, PathBuf};

use holdfast_host::why_untrusted;
use holdfast_policy::sanoid::{SanoidConfig, SanoidError};

use crate::errors::{Error, Kind};

/// Default path of sanoid's configuration.
pub const SANOID_CONF: &str = "/etc/sanoid/sanoid.conf";

/// Which file.
#[derive(Debug, clap::Args)]
pub struct SanoidFileArgs {
    /// The policy file: a sanoid.conf
    #[arg(value_name = "FILE", default_value = SANOID_CONF)]
    pub file: PathBuf,
}

/// Reads the text of a file.
pub fn read(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::File {
        action: "read",
        path: path.to_owned(),
        source,
    })
}

/// Reads the text of a file whose settings are executed.
///
/// # Errors
/// Users other than root and the current user can change it.
pub fn read_obeyed(path: &Path) -> Result<String, Error> {
    refuse_written_by_others(path)?;
    read(path)
}

/// Returns an error if other users can change the file.
pub fn refuse_written_by_others(path: &Path) -> Result<(), Error> {
    let why = why_untrusted(path).map_err(|source| Error::File {
        action: "look at",
        path: path.to_owned(),
        source,
    })?;
    match why {
        None => Ok(()),
        Some(why) => Err(Error::NotObeyed {
            path: path.to_owned(),
            why,
        }),
    }
}

/// Parses the policy in a file.
///
/// # Errors
/// The file contains any error: a partial policy must not be used.
pub fn parse(args: &SanoidFileArgs) -> Result<SanoidConfig, Error> {
    let text = read_obeyed(&args.file)?;
    SanoidConfig::parse(&text).map_err(|errors| {
        let first = errors.first().map(SanoidError::to_string).unwrap_or_default();
        Error::refused(
            Kind::Refused,
            format!("{}: {first}", args.file.display()),
            "holdfast config check lists everything that is wrong with it",
        )
    })
}
