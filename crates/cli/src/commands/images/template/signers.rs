//! The key that signs templates, and the trusted signers.

use std::ffi::OsStr;
use std::fs::File;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};

use holdfast_engine::{TEMPLATE_NAMESPACE, TemplateError, Trust, Unsealed, Unsigned};
use holdfast_host::{AllowedSigners, PassphraseFrom, SshSignatures};

use crate::args::Switch as _;
use crate::context::Context;
use crate::errors::Error;
use crate::process::environment;

/// System-wide folder of signer files.
const SYSTEM_FOLDER: &str = "/etc/holdfast";
/// File of public keys and the signers they belong to.
const SIGNERS: &str = "allowed_signers";
/// File of revoked keys.
const REVOKED: &str = "revoked_signers";

/// Whose signatures count.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Signatures")]
pub(in crate::commands::images) struct TrustArgs {
    /// Allowed signers file, as of ssh-keygen(1) and git [default: /etc/holdfast/allowed_signers or
    /// ~/.config/holdfast/allowed_signers] [env: HOLDFAST_ALLOWED_SIGNERS]
    #[arg(long, value_name = "FILE")]
    allowed_signers: Option<PathBuf>,
    /// Revoked keys: a KRL, or one public key per line [default: revoked_signers beside the default
    /// allowed_signers] [env: HOLDFAST_REVOKED_SIGNERS]
    #[arg(long, value_name = "FILE")]
    revoked_signers: Option<PathBuf>,
}

/// The key that signs.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Signatures")]
pub(super) struct SignArgs {
    /// Sign with this SSH key: a private key, or the public one of a key in an agent [env: HOLDFAST_TEMPLATE_KEY]
    #[arg(long = "sign", value_name = "KEY", conflicts_with = "unsigned")]
    key: Option<PathBuf>,
    /// Do not sign: nothing proves who made the template
    #[arg(long)]
    unsigned: bool,
}

impl TrustArgs {
    /// The first of these options that is given.
    pub(in crate::commands::images) fn given_option(&self) -> Option<&'static str> {
        let options = [
            ("--allowed-signers", &self.allowed_signers),
            ("--revoked-signers", &self.revoked_signers),
        ];
        let mut given = options.into_iter().filter(|(_, file)| file.is_some());
        given.next().map(|(option, _)| option)
    }

    /// The verifier of signatures, and the trusted signers.
    pub(in crate::commands::images) fn trust<'a>(
        &self,
        signatures: &'a SshSignatures<'a>,
        context: &Context,
    ) -> Trust<'a> {
        let file = |option: &Option<PathBuf>, variable, name| {
            let given = option.clone().or_else(|| context.variable(variable).map(PathBuf::from));
            given.or_else(|| found(name, context))
        };
        let signers = file(&self.allowed_signers, environment::ALLOWED_SIGNERS, SIGNERS);
        let revoked = file(&self.revoked_signers, environment::REVOKED_SIGNERS, REVOKED);
        Trust {
            signatures,
            allowed: signers.map(|signers| AllowedSigners { signers, revoked }),
        }
    }
}

/// The system-wide file if it exists, otherwise the user's file. A file that cannot be read counts as
/// existing.
fn found(name: &str, context: &Context) -> Option<PathBuf> {
    let own = context.configuration_folder().map(|folder| folder.join("holdfast"));
    let folders = [Some(PathBuf::from(SYSTEM_FOLDER)), own];
    let mut paths = folders.into_iter().flatten().map(|folder| folder.join(name));
    paths.find(|path| path.symlink_metadata().is_ok())
}

/// Creates and verifies signatures.
pub(in crate::commands::images) fn signatures(context: &Context) -> SshSignatures<'_> {
    SshSignatures::new(&**context.clock(), context.runtime_folder())
}

impl SignArgs {
    pub(super) fn unsigned(&self) -> Unsigned {
        self.unsigned.acceptance()
    }

    /// The signing key; `None` if no signature is wanted. A missing key is an error.
    pub(super) fn key(&self, context: &Context) -> Result<Option<PathBuf>, Error> {
        if self.unsigned {
            return Ok(None);
        }
        let of_environment = || context.variable(environment::TEMPLATE_KEY).map(PathBuf::from);
        let key = self.key.clone().or_else(of_environment).ok_or_else(|| {
            let hint = format!(
                "use --sign KEY or set {}; ssh-keygen -t ed25519 makes a key; --unsigned stores the template without a signature",
                environment::TEMPLATE_KEY
            );
            Error::usage("there is no key to sign with", hint)
        })?;
        // Checked early: a mistyped name must not fail a push after hours.
        File::open(&key).map_err(|source| Error::File {
            action: "read",
            path: key.clone(),
            source,
        })?;
        Ok(Some(key))
    }

    /// Signs a template. No progress is shown meanwhile, since ssh-keygen may ask for a passphrase.
    pub(super) fn sign(
        key: &Path,
        unsealed: &Unsealed<'_>,
        signatures: &SshSignatures<'_>,
        context: &Context,
    ) -> Result<String, Error> {
        let is_asked = context.variable(environment::JOB).is_none()
            && std::io::stderr().is_terminal()
            && File::open("/dev/tty").is_ok();
        let passphrase = if is_asked {
            PassphraseFrom::Terminal
        } else {
            PassphraseFrom::AgentOnly
        };
        let text = unsealed.text();
        let signed = signatures.sign(key, TEMPLATE_NAMESPACE, text.as_bytes(), passphrase);
        Ok(signed.map_err(|error| holdfast_engine::Error::from(TemplateError::from(error)))?)
    }
}

/// Whether a word is the path of a file, not of a snapshot or a machine.
pub(super) fn is_file(word: &OsStr) -> bool {
    let text = word.to_string_lossy();
    text.contains(['/', '='])
        || holdfast_engine::SourceName::is_called_like_an_image(word)
        || Path::new(word).symlink_metadata().is_ok()
}
