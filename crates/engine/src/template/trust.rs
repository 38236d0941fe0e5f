//! Which signers are trusted.

use holdfast_host::{AllowedSigners, Signed, SshSignatures, Verdict};
use jiff::Timestamp;

use super::TEMPLATE_NAMESPACE;
use super::entry::Entry;
use crate::job::Result;
use crate::job::error::TemplateError;

/// The signature verifier and the trusted signers.
pub struct Trust<'a> {
    /// Verifies signatures.
    pub signatures: &'a SshSignatures<'a>,
    /// The trusted signers; if no list was given, no signature is trusted.
    pub allowed: Option<AllowedSigners>,
}

/// The signer of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SignedBy {
    /// It has no signature.
    Unsigned,
    /// It has a signature, with this result.
    Signed(Verdict),
}

/// What to do with an unsigned template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsigned {
    /// It is refused.
    Refuse,
    /// It is accepted; its content must still match its statement.
    Accept,
}

impl Trust<'_> {
    pub(super) fn judge(&self, entry: &Entry) -> Result<SignedBy> {
        let Some(signature) = &entry.signature else {
            return Ok(SignedBy::Unsigned);
        };
        // Encoding returns the original text: a statement has exactly one form.
        let text = entry.statement.encode();
        let signed = signed(&text, signature, entry.statement.time);
        let verdict = self.signatures.verify(&signed, self.allowed.as_ref());
        Ok(SignedBy::Signed(verdict.map_err(TemplateError::from)?))
    }

    /// Verifies that a trusted signer has signed the template.
    ///
    /// # Errors
    /// The signer is not trusted.
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
