//! `holdfast template`: shares prepared disks and machines by name and tag.

mod document;
mod list;
mod pull;
mod push;
mod remove;
mod signers;

pub(super) use document::SignedDocument;
pub(super) use signers::{TrustArgs, signatures};

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
        /// Store images, or the machine of a snapshot, as a signed template
        "push" => Push(push::PushArgs),
        /// Write a template to an image or a folder, if a trusted signer has signed it
        "pull" => Pull(pull::PullArgs),
        /// List templates, their tags and signers
        "list" => List(list::TemplateListArgs),
        /// Show a template: its disks, its signatures, and earlier versions of its tag
        "show" => Show(list::TemplateShowArgs),
        /// Give a template another tag or name, and sign it
        "tag" => Tag(push::TagArgs),
        /// Remove templates
        "remove" => Remove(remove::TemplateRemoveArgs),
    }
}

impl Verb for TemplateArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Share a prepared image",
            line: "holdfast template push -r /srv/templates debian12 debian12.qcow2 --sign ~/.ssh/id_ed25519",
        },
        Example {
            wish: "Use a template that a colleague has prepared",
            line: "holdfast template pull -r /srv/templates debian12 web7.qcow2",
        },
    ];
    const BELOW: &'static [VerbEntry] = TemplateVerb::TABLE;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        self.verb.run(context)
    }
}
