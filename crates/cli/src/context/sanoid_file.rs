//! A sanoid.conf, read for the verbs that use it.

use std::path::{Path, PathBuf};

use holdfast_host::why_untrusted;
use holdfast_policy::sanoid::{SanoidConfig, SanoidError};

use crate::errors::{Error, Kind};

/// Where sanoid has its configuration.
pub const SANOID_CONF: &str = "/etc/sanoid/sanoid.conf";

/// Which file.
#[derive(Debug, clap::Args)]
pub struct SanoidFileArgs {
    /// The policy file: a sanoid.conf
    #[arg(value_name = "FILE", default_value = SANOID_CONF)]
    pub file: PathBuf,
}

/// The text of a file.
pub fn read(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::File {
        action: "read",
        path: path.to_owned(),
        source,
    })
}

/// The text of a file that is obeyed.
///
/// # Errors
/// Others than root, or the user that we are, have a say in it.
pub fn read_obeyed(path: &Path) -> Result<String, Error> {
    refuse_written_by_others(path)?;
    read(path)
}

/// Refuses a file in which others have a say.
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

/// The policy in a file.
///
/// # Errors
/// Anything in it is wrong: half of a policy must not be used.
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
