//! Templates as text and in JSON documents.

use holdfast_engine::{ListedTemplate, SignedBy, TemplatePieceKind, TemplateStatement};
use holdfast_host::Verdict;
use holdfast_repo::SnapshotId;
use serde::Serialize;

use crate::context::Context;
use crate::output::Style;
use crate::process::time;

/// The statement of a template.
#[derive(Debug, Clone, Serialize)]
pub(super) struct StatementDocument {
    pub(super) name: String,
    pub(super) tag: String,
    /// In UTC.
    pub(super) time: String,
    pub(super) description: String,
    /// The digest of its content.
    pub(super) content: String,
    /// The snapshot of the template. Null in a dry run.
    pub(super) snapshot: Option<String>,
    pub(super) size_bytes: u64,
    pub(super) disks: Vec<PieceDocument>,
    pub(super) files: Vec<PieceDocument>,
}

/// A disk or file of a template.
#[derive(Debug, Clone, Serialize)]
pub(super) struct PieceDocument {
    pub(super) name: String,
    pub(super) size_bytes: u64,
    pub(super) digest: String,
}

/// The signer of a template.
#[derive(Debug, Clone, Default, Serialize)]
pub(in crate::commands::images) struct SignedDocument {
    /// `good`, `not-allowed`, `revoked`, `bad` or `none`.
    pub(super) signature: &'static str,
    pub(in crate::commands::images) signer: Option<String>,
    pub(super) key: Option<String>,
    pub(super) reason: Option<String>,
}

/// A template of a list.
#[derive(Debug, Clone, Serialize)]
pub(super) struct ListedDocument {
    #[serde(flatten)]
    pub(super) statement: StatementDocument,
    #[serde(flatten)]
    pub(super) signed: SignedDocument,
    pub(super) is_current: bool,
    pub(super) data_bytes: u64,
    pub(super) own_bytes: Option<u64>,
    /// The host that pushed it.
    pub(super) host: String,
    #[serde(skip)]
    pub(super) local_time: String,
}

impl StatementDocument {
    pub(super) fn new(statement: &TemplateStatement, snapshot: Option<SnapshotId>) -> Self {
        let pieces = |kind: TemplatePieceKind| {
            let pieces = statement.pieces.iter().filter(move |piece| piece.kind == kind);
            pieces.map(|piece| PieceDocument {
                name: piece.name.to_string(),
                size_bytes: piece.size_bytes,
                digest: piece.digest.to_string(),
            })
        };
        Self {
            name: statement.label.name.to_string(),
            tag: statement.label.tag.to_string(),
            time: statement.time.to_string(),
            description: statement.description.clone(),
            content: statement.content().to_string(),
            snapshot: snapshot.map(|id| id.to_string()),
            size_bytes: statement.size_bytes(),
            disks: pieces(TemplatePieceKind::Disk).collect(),
            files: pieces(TemplatePieceKind::File).collect(),
        }
    }

    pub(super) fn label(&self) -> String {
        format!("{}:{}", self.name, self.tag)
    }

    /// The first digits of the content's digest, as in `NAME@DIGEST`.
    pub(super) fn short_content(&self) -> &str {
        &self.content[..12]
    }
}

impl SignedDocument {
    pub(in crate::commands::images) fn new(signed: &SignedBy) -> Self {
        let (signature, signer, key, reason) = match signed {
            SignedBy::Unsigned => ("none", None, None, None),
            SignedBy::Signed(Verdict::Good { signer, key }) => ("good", Some(signer), Some(key), None),
            SignedBy::Signed(Verdict::NotAllowed { key, reason }) => ("not-allowed", None, Some(key), Some(reason)),
            SignedBy::Signed(Verdict::Revoked { key }) => ("revoked", None, Some(key), None),
            SignedBy::Signed(Verdict::Bad { reason }) => ("bad", None, None, Some(reason)),
        };
        Self {
            signature,
            signer: signer.cloned(),
            key: key.cloned(),
            reason: reason.cloned(),
        }
    }

    /// The signer, or why there is none, for a table column.
    pub(super) fn brief(&self) -> String {
        match (self.signature, &self.signer) {
            ("good", Some(signer)) => signer.clone(),
            ("none", _) => "unsigned".to_owned(),
            ("not-allowed", _) => "not trusted".to_owned(),
            ("revoked", _) => "revoked key".to_owned(),
            _ => "bad signature".to_owned(),
        }
    }

    /// The full description of the signature.
    pub(in crate::commands::images) fn full(&self) -> String {
        let key = self.key.as_deref().unwrap_or_default();
        match (self.signature, &self.signer) {
            ("good", Some(signer)) => format!("signed by {signer} ({key})"),
            ("none", _) => "not signed".to_owned(),
            ("not-allowed", _) => {
                let reason = self.reason.as_deref().unwrap_or_default();
                format!("signed by {key}, which is not trusted: {reason}")
            }
            ("revoked", _) => format!("signed by {key}, which was revoked"),
            _ => format!("bad signature: {}", self.reason.as_deref().unwrap_or_default()),
        }
    }

    pub(in crate::commands::images) fn style(&self) -> Style {
        match self.signature {
            "good" => Style::Good,
            "none" | "not-allowed" => Style::Warning,
            _ => Style::Bad,
        }
    }
}

impl ListedDocument {
    pub(super) fn new(template: &ListedTemplate, context: &Context) -> Self {
        Self {
            statement: StatementDocument::new(&template.statement, Some(template.snapshot.id)),
            signed: SignedDocument::new(&template.signed),
            is_current: template.is_current,
            data_bytes: template.data_bytes,
            own_bytes: template.own_bytes,
            host: template.snapshot.host.clone(),
            local_time: time::local(template.statement.time, context.zone()),
        }
    }
}
