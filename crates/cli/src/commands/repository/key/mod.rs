//! `holdfast key`: manages the keys that open the repository.

mod change;
mod list;
mod paper;

use crate::args::{Example, NO_HEADING, NewPasswordArgs, VerbEntry};
use crate::commands::verb::{Verb, VerbSet, verbs};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `key`.
#[derive(Debug, clap::Args)]
pub(crate) struct KeyArgs {
    #[command(subcommand)]
    verb: KeyVerb,
}

verbs! {
    enum KeyVerb {
        /// List the keys, without opening any
        "list" => List(KeyListArgs),
        /// Add a password; the others stay
        "add" => Add(AddArgs),
        /// Replace the password that opened the repository with a new one
        "rotate" => Rotate(RotateArgs),
        /// Remove a key; the last one cannot be removed
        "remove" => Remove(KeyRemoveArgs),
        /// Print the paper key, which opens the repository when all passwords are lost
        "paper" => Paper(PaperArgs),
    }
}

#[derive(Debug, clap::Args)]
struct KeyListArgs {}

#[derive(Debug, clap::Args)]
struct PaperArgs {}

#[derive(Debug, clap::Args)]
struct AddArgs {
    /// Check both passwords; add nothing
    #[arg(short = 'n', long, help_heading = NO_HEADING)]
    dry_run: bool,
    #[command(flatten)]
    new_password: NewPasswordArgs,
    /// Label of the new password in `key list`
    #[arg(long, value_name = "TEXT", default_value = "", help_heading = NO_HEADING)]
    label: String,
}

#[derive(Debug, clap::Args)]
struct RotateArgs {
    /// Check both passwords, and show which key would be replaced; change nothing
    #[arg(short = 'n', long, help_heading = NO_HEADING)]
    dry_run: bool,
    #[command(flatten)]
    new_password: NewPasswordArgs,
    /// Label of the new password [default: that of the old one]
    #[arg(long, value_name = "TEXT", help_heading = NO_HEADING)]
    label: Option<String>,
}

#[derive(Debug, clap::Args)]
struct KeyRemoveArgs {
    /// The key's id, as `key list` shows it
    #[arg(value_name = "KEY")]
    key: String,
    /// Check that the key can be removed; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

impl Verb for KeyArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See which keys there are",
            line: "holdfast key list -r /backup/vms",
        },
        Example {
            wish: "Change the password",
            line: "holdfast key rotate -r /backup/vms",
        },
    ];
    const BELOW: &'static [VerbEntry] = KeyVerb::TABLE;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        self.verb.run(context)
    }
}

impl Verb for KeyListArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "See which keys there are",
        line: "holdfast key list --repository /backup/vms",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        list::run(context)
    }
}

impl Verb for AddArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Add a password for a colleague",
            line: "holdfast key add -r /backup/vms --label alice",
        },
        Example {
            wish: "Do it from a script",
            line: "holdfast key add -r /backup/vms --password-file old --new-password-file new --label host7",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        change::add(self, context)
    }
}

impl Verb for RotateArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Change the password; nothing is stored again",
        line: "holdfast key rotate -r /backup/vms",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        change::rotate(self, context)
    }
}

impl Verb for KeyRemoveArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Remove a colleague's password",
        line: "holdfast key remove -r /backup/vms 0123456789abcdef",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        change::remove(self, context)
    }
}

impl Verb for PaperArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Print the paper key for the safe",
        line: "holdfast key paper -r /backup/vms | lpr",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        paper::run(context)
    }
}
