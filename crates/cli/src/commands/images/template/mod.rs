//! `holdfast template`: prepared disks and machines, shared by name and tag.

mod document;
mod list;
mod pull;
mod push;
mod remove;
mod signers;

use crate::args::{Example, VerbEntry};
use crate::commands::verb::{Verb, VerbSet, verbs};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `template`.
#[derive(Debug, clap::Args)]
pub(crate) struct TemplateArgs {
    #[command(subcommand)]
    verb: TemplateVerb,
}

verbs! {
    enum TemplateVerb {
        /// Put images, or a machine of a snapshot, into the repository under a name and tag, signed
        "push" => Push(push::PushArgs),
        /// Write a template into an image or a folder, if somebody who is trusted has signed it
        "pull" => Pull(pull::PullArgs),
        /// List templates: what their tags mean now, and who vouches for it
        "list" => List(list::ListArgs),
        /// Show everything about a template: its disks, its signatures, and what its tag meant before
        "show" => Show(list::ShowArgs),
        /// Give a template another tag or name, with a signature of its own
        "tag" => Tag(push::TagArgs),
        /// Remove templates; those of others, and all snapshots of machines, stay
        "remove" => Remove(remove::RemoveArgs),
    }
}

impl Verb for TemplateArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Share a prepared image",
            line: "holdfast template push -r /srv/templates debian12 debian12.qcow2 --sign ~/.ssh/id_ed25519",
        },
        Example {
            wish: "Use one that a colleague has prepared",
            line: "holdfast template pull -r /srv/templates debian12 web7.qcow2",
        },
    ];
    const BELOW: &'static [VerbEntry] = TemplateVerb::TABLE;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        self.verb.run(context)
    }
}
