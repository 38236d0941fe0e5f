//! Templates: prepared disks with a machine configuration, shared through a repository by name and tag, and signed.
//!
//! A template is a snapshot of a separate kind: its notes contain a [`Statement`] that describes it, and the signature
//! of the signer. The data is stored as in any snapshot, so that copies, checks, repairs and gc need no knowledge of
//! templates. Jobs that list the snapshots of machines skip templates ([`is_template`](crate::notes::is_template)).
//! Each template is protected, so that programs that do not know templates do not remove it.
//!
//! Trust: an attacker with the keys of the repository can write anything into it. So a template is not used before the
//! signature of its statement was verified, and its content is not renamed to its final name before it matches the
//! digests of the statement. The whole argument is in `docs/design/0013-templates.md`, and the format in
//! `docs/format/template.md`.

mod checked;
mod container;
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
pub use container::{TemplateContainer, TemplateContainerRequest, create_container_from_template};
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

/// The namespace of signatures of templates.
pub const TEMPLATE_NAMESPACE: &str = "holdfast-template";

/// Protects a template from removal by programs that treat it as a snapshot of a machine.
pub(crate) fn protect(repository: &Repository, manifest: &Manifest) -> Result<()> {
    Ok(repository.protect(manifest.id)?)
}

/// Fuzzing entry point: parses a statement.
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
