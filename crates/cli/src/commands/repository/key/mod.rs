//! `holdfast key`: who can open the repository.

mod change;
mod list;
mod paper;

use crate::args::{Example, NewPasswordArgs};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `key`.
#[derive(Debug, clap::Args)]
pub struct KeyArgs {
    #[command(subcommand)]
    verb: KeyVerb,
}

#[derive(Debug, clap::Subcommand)]
enum KeyVerb {
    /// List the keys, without opening any
    List,
    /// Add a password; the others stay
    Add(AddArgs),
    /// Put a new password in the place of the one that opens the repository
    Rotate(RotateArgs),
    /// Remove a key; never the last one
    Remove(RemoveArgs),
    /// Print the paper key: text that opens the repository when all passwords are lost
    Paper,
}

#[derive(Debug, clap::Args)]
struct AddArgs {
    #[command(flatten)]
    new_password: NewPasswordArgs,
    /// What to call the new password: whose it is, or where
    #[arg(long, value_name = "TEXT", default_value = "")]
    label: String,
}

#[derive(Debug, clap::Args)]
struct RotateArgs {
    #[command(flatten)]
    new_password: NewPasswordArgs,
    /// What to call the new password; like the old one where not given
    #[arg(long, value_name = "TEXT")]
    label: Option<String>,
}

#[derive(Debug, clap::Args)]
struct RemoveArgs {
    /// The key's id, as `key list` shows it
    #[arg(value_name = "KEY")]
    key: String,
}

/// What a person may want of it.
pub(in crate::commands) const EXAMPLES: &[Example] = &[
    Example {
        wish: "See which keys there are",
        line: "holdfast key list -r /backup/vms",
    },
    Example {
        wish: "Change the password",
        line: "holdfast key rotate -r /backup/vms",
    },
];

/// What a person may want of `key list`.
pub(in crate::commands) const EXAMPLES_LIST: &[Example] = &[Example {
    wish: "See which keys there are",
    line: "holdfast key list --repository /backup/vms",
}];

/// What a person may want of `key add`.
pub(in crate::commands) const EXAMPLES_ADD: &[Example] = &[
    Example {
        wish: "Give a colleague a password of her own",
        line: "holdfast key add -r /backup/vms --label alice",
    },
    Example {
        wish: "Do it from a script",
        line: "holdfast key add -r /backup/vms --password-file old --new-password-file new --label host7",
    },
];

/// What a person may want of `key rotate`.
pub(in crate::commands) const EXAMPLES_ROTATE: &[Example] = &[Example {
    wish: "Change the password; nothing is stored again",
    line: "holdfast key rotate -r /backup/vms",
}];

/// What a person may want of `key remove`.
pub(in crate::commands) const EXAMPLES_REMOVE: &[Example] = &[Example {
    wish: "Take a colleague's password away",
    line: "holdfast key remove -r /backup/vms 0123456789abcdef",
}];

/// What a person may want of `key paper`.
pub(in crate::commands) const EXAMPLES_PAPER: &[Example] = &[Example {
    wish: "Print the paper key for the safe",
    line: "holdfast key paper -r /backup/vms | lpr",
}];

/// Does what the second word says.
pub(in crate::commands) fn run(args: &KeyArgs, context: &Context) -> Result<Exit, Error> {
    match &args.verb {
        KeyVerb::List => list::run(context),
        KeyVerb::Add(args) => change::add(args, context),
        KeyVerb::Rotate(args) => change::rotate(args, context),
        KeyVerb::Remove(args) => change::remove(args, context),
        KeyVerb::Paper => paper::run(context),
    }
}
