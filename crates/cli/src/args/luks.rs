//! Options about encrypted volumes of guests.

use std::ffi::OsString;
use std::path::PathBuf;

/// Where the passphrase of encrypted volumes comes from.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct LuksArgs {
    /// File whose first line is the passphrase of LUKS volumes [env: HOLDFAST_LUKS_PASSWORD_FILE]
    #[arg(long, value_name = "FILE", conflicts_with = "luks_password_command")]
    pub luks_password_file: Option<PathBuf>,
    /// Shell command whose first line of output is that passphrase [env: HOLDFAST_LUKS_PASSWORD_COMMAND]
    #[arg(long, value_name = "COMMAND")]
    pub luks_password_command: Option<OsString>,
}
