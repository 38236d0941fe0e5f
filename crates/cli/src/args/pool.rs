//! Options about pools of XenServer.

use std::ffi::OsString;
use std::path::PathBuf;

use holdfast_host::xapi::Fingerprint;

use crate::errors::Error;

/// Options about pools.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Options for pools of XenServer and XCP-ng")]
pub struct PoolArgs {
    /// File whose first line is the password of the pool user [env: HOLDFAST_POOL_PASSWORD_FILE]
    #[arg(long, value_name = "FILE", conflicts_with = "pool_password_command")]
    pub pool_password_file: Option<PathBuf>,
    /// Shell command whose first line of output is that password [env: HOLDFAST_POOL_PASSWORD_COMMAND]
    #[arg(long, value_name = "COMMAND")]
    pub pool_password_command: Option<OsString>,
    /// Trust the host certificate with this SHA-256 fingerprint; may be repeated [env: HOLDFAST_POOL_CERTIFICATE]
    #[arg(long = "pool-certificate", value_name = "SHA256")]
    pub certificates: Vec<Fingerprint>,
    /// Trust host certificates signed by an authority in this file (PEM)
    #[arg(long = "pool-authorities", value_name = "FILE")]
    pub authorities: Option<PathBuf>,
}

impl PoolArgs {
    /// The name of the first of these options that was given, for error messages.
    pub fn given(&self) -> Option<&'static str> {
        let given = [
            (self.pool_password_file.is_some(), "--pool-password-file"),
            (self.pool_password_command.is_some(), "--pool-password-command"),
            (!self.certificates.is_empty(), "--pool-certificate"),
            (self.authorities.is_some(), "--pool-authorities"),
        ];
        given.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name)
    }

    /// Returns an error if one of these options was given, although `what` has nothing to do with pools.
    pub fn refuse(&self, what: &str) -> Result<(), Error> {
        match self.given() {
            None => Ok(()),
            Some(option) => Err(Error::usage(
                format!("{option} is about pools of XenServer, and {what} is not"),
                "remove the option, or name a pool: xen://HOST",
            )),
        }
    }
}
