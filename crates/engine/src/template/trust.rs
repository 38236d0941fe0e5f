//! Whose templates count.

use holdfast_host::{AllowedSigners, Signed, SshSignatures, Verdict};
use jiff::Timestamp;

use super::TEMPLATE_NAMESPACE;
use super::entry::Entry;
use crate::job::Result;
use crate::job::error::TemplateError;

/// The verifier of signatures, and the trusted signers.
pub struct Trust<'a> {
    /// Verifies signatures.
    pub signatures: &'a SshSignatures<'a>,
    /// Whose signatures count; none where no list was given: then none does.
    pub allowed: Option<AllowedSigners>,
}

/// The signer of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SignedBy {
    /// It has no signature.
    Unsigned,
    /// It has one, with this result.
    Signed(Verdict),
}

/// What happens to an unsigned template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsigned {
    /// It is refused.
    Refuse,
    /// It is taken all the same; its content must still be what it says of itself.
    Accept,
}

impl Trust<'_> {
    pub(super) fn judge(&self, entry: &Entry) -> Result<SignedBy> {
        let Some(signature) = &entry.signature else {
            return Ok(SignedBy::Unsigned);
        };
        // What was decoded is what was written, byte for byte: a statement has one form only.
        let text = entry.statement.encode();
        let signed = signed(&text, signature, entry.statement.time);
        let verdict = self.signatures.verify(&signed, self.allowed.as_ref());
        Ok(SignedBy::Signed(verdict.map_err(TemplateError::from)?))
    }

    /// The verdict on the signature of a trusted signer.
    ///
    /// # Errors
    /// No trusted signer.
    pub(super) fn demand(&self, entry: &Entry) -> Result<Verdict> {
        let label = entry.statement.label.to_string();
        let refused = match self.judge(entry)? {
            SignedBy::Unsigned => TemplateError::Unsigned { label },
            SignedBy::Signed(good @ Verdict::Good { .. }) => return Ok(good),
            SignedBy::Signed(Verdict::NotAllowed { key, .. }) if self.allowed.is_none() => {
                TemplateError::NoSigners { label, key }
            }
            SignedBy::Signed(Verdict::NotAllowed { key, reason }) => TemplateError::NotAllowed { label, key, reason },
            SignedBy::Signed(Verdict::Revoked { key }) => TemplateError::Revoked { label, key },
            SignedBy::Signed(Verdict::Bad { reason }) => TemplateError::BadSignature { label, reason },
        };
        Err(refused.into())
    }
}

pub(super) fn signed<'t>(text: &'t str, signature: &'t str, time: Timestamp) -> Signed<'t> {
    Signed {
        namespace: TEMPLATE_NAMESPACE,
        text: text.as_bytes(),
        signature,
        time_s: time.as_second(),
    }
}
