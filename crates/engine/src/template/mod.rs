//! Templates: prepared disks, and the configuration of their machine, that colleagues share through a repository by name and tag, signed.
//!
//! A template is a snapshot of a kind of its own: a [`Statement`] of what it is stands in its notes, with the signature of the signer that vouches
//! for it. Everything with bytes is that of any snapshot, so that copies, checks, repairs and gc need to know nothing of templates. What
//! walks the snapshots of machines does not see templates ([`is_template`](crate::notes::is_template)); and each is protected, so that programs that do not know
//! templates remove none.
//!
//! Trust: a holder of the repository's keys can write anything into it. So nothing of a template counts before its signature
//! was judged over the statement, and nothing of its content has a name before it was found to have the digests of the statement. The whole
//! argument is in `docs/design/0013-templates.md`, and every byte in `docs/format/template.md`.

mod checked;
mod digest;
mod entry;
mod folder;
mod index;
mod label;
mod list;
mod publish;
mod pull;
mod pull_content;
mod pull_request;
mod push;
mod remove;
mod statement;
mod trust;

use holdfast_repo::{Manifest, Repository};

use crate::job::Result;
pub use digest::Digest;
pub use label::{TemplateLabel, TemplateName, TemplateReference, TemplateTag, TemplateVersion};
pub use list::{ListedHistory, ListedTemplate, TemplateHistory, TemplateListing, list_templates, show_template};
pub use publish::{Publication, Published, Replace, TemplatePlan, Unsealed};
pub use pull::{PullReport, pull_template};
pub use pull_request::{KeepIdentity, PullRequest, PullTarget, PulledDisk, TemplateGuest};
pub use push::{PushRequest, PushSource, Vouching, plan_push, plan_tag, prepare_push, prepare_tag};
pub use remove::{RemovalSelection, TemplateRemoval, remove_templates};
pub use statement::{Piece, PieceKind, Statement};
pub use trust::{SignedBy, Trust, Unsigned};

/// What templates are signed for: the namespace of their signatures.
pub const TEMPLATE_NAMESPACE: &str = "holdfast-template";

/// Keeps a template from being removed by programs that take it for a snapshot of a machine.
pub(crate) fn protect(repository: &Repository, manifest: &Manifest) -> Result<()> {
    Ok(repository.protect(manifest.id)?)
}

/// A statement, laid open to hostile text.
#[cfg(feature = "hostile")]
pub(crate) fn hostile_statement(bytes: &[u8]) -> holdfast_block::hostile::Outcome {
    use holdfast_block::hostile::Outcome;
    let text = String::from_utf8_lossy(bytes);
    let Ok(statement) = Statement::decode(&text) else {
        return Outcome::Refused;
    };
    assert_eq!(statement.encode(), text, "it reads as another statement");
    assert!(statement.disks().next().is_some(), "a template without a disk");
    Outcome::Decoded
}
