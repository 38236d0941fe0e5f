//! `holdfast template`: prepared disks and machines, shared by name and tag.

mod document;
mod list;
mod pull;
mod push;
mod remove;
mod signers;

use crate::args::Example;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `template`.
#[derive(Debug, clap::Args)]
pub struct TemplateArgs {
    #[command(subcommand)]
    verb: TemplateVerb,
}

#[derive(Debug, clap::Subcommand)]
enum TemplateVerb {
    /// Put images, or a machine of a snapshot, into the repository under a name and tag, signed
    Push(push::PushArgs),
    /// Write a template into an image or a folder, if somebody who is trusted has signed it
    Pull(pull::PullArgs),
    /// List templates: what their tags mean now, and who vouches for it
    List(list::ListArgs),
    /// Show everything about a template: its disks, its signatures, and what its tag meant before
    Show(list::ShowArgs),
    /// Give a template another tag or name, with a signature of its own
    Tag(push::TagArgs),
    /// Remove templates; those of others, and all snapshots of machines, stay
    Remove(remove::RemoveArgs),
}

/// What a person may want of all of them.
const EXAMPLES: &[Example] = &[
    Example {
        wish: "Share a prepared image",
        line: "holdfast template push -r /srv/templates debian12 debian12.qcow2 --sign ~/.ssh/id_ed25519",
    },
    Example {
        wish: "Use one that a colleague has prepared",
        line: "holdfast template pull -r /srv/templates debian12 web7.qcow2",
    },
];

/// Examples of the verb at `path`, which is `template` or begins with `template `.
pub(in crate::commands) fn examples_of(path: &str) -> &'static [Example] {
    match path {
        "template" => EXAMPLES,
        "template push" => push::EXAMPLES,
        "template pull" => pull::EXAMPLES,
        "template list" => list::EXAMPLES,
        "template show" => list::EXAMPLES_SHOW,
        "template tag" => push::EXAMPLES_TAG,
        "template remove" => remove::EXAMPLES,
        _ => &[],
    }
}

/// Does what the second word says.
pub(in crate::commands) fn run(args: &TemplateArgs, context: &Context) -> Result<Exit, Error> {
    match &args.verb {
        TemplateVerb::Push(args) => push::run(args, context),
        TemplateVerb::Pull(args) => pull::run(args, context),
        TemplateVerb::List(args) => list::run(args, context),
        TemplateVerb::Show(args) => list::run_show(args, context),
        TemplateVerb::Tag(args) => push::run_tag(args, context),
        TemplateVerb::Remove(args) => remove::run(args, context),
    }
}
