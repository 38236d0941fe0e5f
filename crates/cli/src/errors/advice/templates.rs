//! Advice on errors of templates.

use holdfast_engine::TemplateError;
use holdfast_host::SshSignatureError;

use super::Advice;
use super::advice;
use super::images::io_advice;
use crate::errors::Kind;
use crate::exit::Exit;
use crate::process::environment;

pub(super) fn template_advice(error: &TemplateError) -> Advice {
    let refused = |hint: &str| advice(Exit::Error, Kind::Refused, hint);
    let usage = |kind, hint: &str| advice(Exit::Usage, kind, hint);
    match error {
        TemplateError::Name { .. } | TemplateError::Tag { .. } | TemplateError::Digest { .. } => {
            usage(Kind::BadName, "a template is named as NAME, NAME:TAG or NAME@DIGEST")
        }
        TemplateError::Unsayable { .. } => usage(Kind::Usage, "holdfast template push --help shows what can be said"),
        TemplateError::FutureVersion { .. } => advice(
            Exit::Error,
            Kind::NewerFormat,
            "use the version of the program that pushed it, or a later one",
        ),
        TemplateError::Statement { .. } | TemplateError::Contradiction { .. } => advice(
            Exit::Damage,
            Kind::Damage,
            "another program has written to the repository: push the template again",
        ),
        TemplateError::Unknown { .. } => advice(
            Exit::Error,
            Kind::NotFound,
            "holdfast template list shows the templates",
        ),
        TemplateError::Ambiguous { .. } => advice(Exit::Error, Kind::Ambiguous, "use more digits of the digest"),
        TemplateError::IsTemplate { .. } => {
            refused("holdfast template show, pull and remove work on templates, and look at their signatures")
        }
        TemplateError::TagTaken { .. } => advice(
            Exit::Error,
            Kind::Exists,
            "use another tag, or --replace: the existing content remains accessible by its digest",
        ),
        TemplateError::FromTheFuture { .. } => {
            refused("set the clock; if that of the other host was wrong, remove the tag first")
        }
        TemplateError::IsCurrent { .. } => {
            refused("remove the tag with its whole history, or let it refer to other content first")
        }
        TemplateError::LostClaim => advice(Exit::Locked, Kind::Locked, "push again: what was stored is found again"),
        TemplateError::NoStream => usage(Kind::Usage, "write it to a file first, and push that"),
        TemplateError::StreamDisk { .. } => refused("restore it to a file, and push that"),
        TemplateError::Unsigned { .. } => {
            refused("push it again with --sign; --unsigned accepts it without a signature")
        }
        TemplateError::NoSigners { .. } => refused_without_signers(),
        TemplateError::NotAllowed { .. } => refused(
            "if you trust the owner of this key, add it to the allowed signers file: NAME namespaces=\"holdfast-template\" KEY",
        ),
        TemplateError::Revoked { .. } => refused("have it signed with another key: holdfast template tag does that"),
        TemplateError::BadSignature { .. } | TemplateError::OtherContent { .. } => advice(
            Exit::Damage,
            Kind::Damage,
            "it was changed without a new signature, or is damaged: do not use it, and check who can write to the repository",
        ),
        TemplateError::SeveralDisks { .. } => usage(Kind::Usage, "template pull writes all disks to a new folder"),
        TemplateError::Configuration { .. } => refused("of a template with one disk, an image as target leaves it out"),
        TemplateError::Signatures(error) => signature_advice(error),
        _ => refused("check the key with ssh-keygen -Y sign"),
    }
}

fn refused_without_signers() -> Advice {
    let hint = format!(
        "use --allowed-signers FILE, set {}, or create /etc/holdfast/allowed_signers: a line for each signer, with a name and the public key",
        environment::ALLOWED_SIGNERS
    );
    advice(Exit::Error, Kind::Refused, hint)
}

fn signature_advice(error: &SshSignatureError) -> Advice {
    match error {
        SshSignatureError::NoProgram => advice(
            Exit::Error,
            Kind::Unsupported,
            "install it: the package is openssh-client, or openssh-clients",
        ),
        SshSignatureError::Io(source) | SshSignatureError::Signers { source, .. } => io_advice(source),
        SshSignatureError::NotSigned { .. } => advice(
            Exit::Error,
            Kind::Key,
            "a key with a passphrase needs a terminal, or an agent: ssh-add KEY; the stored data is found again",
        ),
        _ => advice(Exit::Usage, Kind::Usage, "use a path that is text"),
    }
}
