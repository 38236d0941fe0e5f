//! `holdfast init`: creates a repository.

use std::ffi::{OsStr, OsString};

use holdfast_engine::{InitReport, InitRequest, Location, NewProtection, init, plan_init};
use holdfast_host::why_not_private;
use holdfast_repo::Repository;
use holdfast_repo::key::Cipher;
use serde::Serialize;

use crate::args::{Example, LikePasswordArgs};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::password::{PasswordSource, PasswordUse};
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};

/// Arguments of `init`.
#[derive(Debug, clap::Args)]
pub(crate) struct InitArgs {
    /// Do not encrypt: anyone who can read the files can read the backups
    #[arg(long)]
    no_encryption: bool,
    /// Also print the paper key, which opens the repository when all passwords are lost
    #[arg(long, conflicts_with = "no_encryption")]
    paper_key: bool,
    /// Label of the password in `key list`
    #[arg(long, value_name = "TEXT", default_value = "first")]
    label: String,
    /// Check the place and the password; make nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Use the same chunk ids as this repository, so that data that holdfast copy brings from there is deduplicated
    #[arg(long, value_name = "LOCATION")]
    like: Option<OsString>,
    #[command(flatten)]
    like_password: LikePasswordArgs,
}

impl Verb for InitArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Make an encrypted repository, asking for its new password",
            line: "holdfast init --repository /backup/vms",
        },
        Example {
            wish: "Take the password from a file, and print a paper key for the safe",
            line: "holdfast init -r /backup/vms --password-file /etc/holdfast/password --paper-key",
        },
        Example {
            wish: "Make one that deduplicates copies from another repository",
            line: "holdfast init -r /offsite/vms --like /backup/vms --like-password-file /etc/holdfast/password",
        },
        Example {
            wish: "Make one that is not encrypted",
            line: "holdfast init -r /backup/vms --no-encryption",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `init`.
#[derive(Debug, Serialize)]
struct Made {
    dry_run: bool,
    /// Null in a dry run.
    id: Option<String>,
    location: String,
    encrypted: bool,
    cipher: &'static str,
    like: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    paper_key: Option<String>,
}

impl Report for Made {
    fn command(&self) -> &'static str {
        "init"
    }

    fn is_confirmation(&self) -> bool {
        self.paper_key.is_none() && !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let Some(id) = &self.id else {
            let kind = if self.encrypted {
                "an encrypted"
            } else {
                "an unencrypted"
            };
            return page.line(&format!("would create {kind} repository in {}", self.location));
        };
        page.line(&format!("created repository {} in {}", &id[..8], self.location));
        if let Some(like) = &self.like {
            page.line(&format!("it recognises bytes as repository {} does", &like[..8]));
        }
        if !self.encrypted {
            page.line("not encrypted: anyone who can read its files can read the disks");
            return;
        }
        match &self.paper_key {
            None => page.line(
                "keep the password safe: without it the data cannot be recovered. holdfast key paper prints a recovery key",
            ),
            Some(paper_key) => {
                page.line("the paper key opens it without any password; print it and lock it away:");
                page.gap();
                page.line(&format!("  {paper_key}"));
            }
        }
    }
}

fn run(args: &InitArgs, context: &Context) -> Result<Exit, Error> {
    let location = context.new_location()?;
    if args.no_encryption && context.is_password_of_this_repository()? {
        return Err(Error::usage(
            "a password is given for a repository that is not to be encrypted",
            "remove --no-encryption, or the password",
        ));
    }
    let like = args.like.as_deref().map(|other| open_like(other, args, context));
    let like = like.transpose()?;
    let password = if args.no_encryption {
        None
    } else {
        Some(context.password(PasswordUse::New)?)
    };
    let protection = password.as_ref().map_or(NewProtection::Nothing, |password| {
        NewProtection::Password(password.as_bytes())
    });
    let request = InitRequest {
        location: &location,
        protection,
        label: &args.label,
        cipher: fastest_cipher(),
        like: like.as_ref(),
    };
    if args.dry_run {
        plan_init(&request)?;
        return context.report(&Made {
            dry_run: true,
            id: None,
            location: location.path().display().to_string(),
            encrypted: !args.no_encryption,
            cipher: cipher_name(request.cipher),
            like: like.map(|other| other.config().id.to_string()),
            paper_key: None,
        });
    }
    let InitReport {
        id,
        store,
        cipher,
        paper_key,
    } = init(&request, &context.environment())?;
    // Network and removable file systems may show any owner and mode, so this is only a warning.
    if let Ok(Some(why)) = why_not_private(location.path()) {
        context.console().warning(&format!(
            "others can change the repository, or put another one in its place: {why}; keep it in a folder that only you can write"
        ));
    }
    context.report(&Made {
        dry_run: false,
        id: Some(id.to_string()),
        location: store,
        encrypted: !args.no_encryption,
        cipher: cipher_name(cipher),
        like: like.map(|other| other.config().id.to_string()),
        paper_key: args.paper_key.then(|| paper_key.text().to_owned()),
    })
}

/// The repository given by `--like`.
fn open_like(other: &OsStr, args: &InitArgs, context: &Context) -> Result<Repository, Error> {
    let source = PasswordSource::choose_like(&args.like_password);
    let options = "--like-password-file FILE or --like-password-command COMMAND";
    let location = context.remembered(Location::parse(other)?);
    context.open_other(&location, &source, options)
}

fn cipher_name(cipher: Cipher) -> &'static str {
    match cipher {
        Cipher::Aes256Gcm => "aes-256-gcm",
        Cipher::ChaCha20Poly1305 => "chacha20-poly1305",
    }
}

/// AES if the processor has instructions for it; without them AES is slow, and its timing reveals the key.
#[cfg(target_arch = "x86_64")]
fn fastest_cipher() -> Cipher {
    if std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq") {
        Cipher::Aes256Gcm
    } else {
        Cipher::ChaCha20Poly1305
    }
}

/// AES if the processor has instructions for it; without them AES is slow, and its timing reveals the key.
#[cfg(target_arch = "aarch64")]
fn fastest_cipher() -> Cipher {
    if std::arch::is_aarch64_feature_detected!("aes") && std::arch::is_aarch64_feature_detected!("pmull") {
        Cipher::Aes256Gcm
    } else {
        Cipher::ChaCha20Poly1305
    }
}

/// The cipher that needs no special instructions.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn fastest_cipher() -> Cipher {
    Cipher::ChaCha20Poly1305
}
