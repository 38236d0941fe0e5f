//! Whether QEMU interprets a name as a protocol instead of a file: `nbd:`, `json:`. A file with such a name
//! cannot be allowed.

use std::io::ErrorKind;

use holdfast_image::Error as ImageError;

use super::{Advice, HINT_PERMISSION, advice, device_advice, plain};
use crate::errors::Kind;
use crate::exit::Exit;

const HINT_BUSY: &str = "it is in use, by a mounted file system, an array or another program: end that first";

const HINT_NO_SPACE: &str = "make room on the target and try again";

pub(super) fn image_advice(error: &ImageError) -> Advice {
    match error {
        error if error.is_corrupt() => plain(Exit::Damage, Kind::Damage),
        ImageError::Backing { source, .. } if source.kind() == ErrorKind::NotFound => advice(
            Exit::Error,
            Kind::Io,
            "without the file below it the image is only a part of a disk: put it where the image names it",
        ),
        ImageError::Io { source, .. } | ImageError::Backing { source, .. } => io_advice(source),
        ImageError::Device(error) => device_advice(error),
        ImageError::UnsupportedFormat { .. } | ImageError::UnsupportedFeature { .. } => {
            plain(Exit::Error, Kind::Unsupported)
        }
        ImageError::WouldShrink { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "--shrink allows it; check first where the last partition and its file system end",
        ),
        ImageError::Refused { file, .. } if is_protocol(file) => advice(
            Exit::Error,
            Kind::Refused,
            "only files of this host are opened for an image",
        ),
        ImageError::Refused { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "if you trust the image, allow the file with --allow FILE",
        ),
        ImageError::GuessedFormat { .. } | ImageError::NameContradicts { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "say what it is: --format raw for the bytes of a disk, or the format of its content if you trust who could write to it",
        ),
        ImageError::UnknownExtension { .. } => advice(
            Exit::Usage,
            Kind::Usage,
            "correct the name, or say the format (--format FORMAT; --to FORMAT for image convert)",
        ),
        ImageError::OtherFormat { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "leave --format out, or give the format that it has",
        ),
        ImageError::ParentNotFound { .. } => advice(Exit::Error, Kind::NotFound, "say where it is with --allow FILE"),
        ImageError::ParentChanged { .. } => advice(
            Exit::Damage,
            Kind::Damage,
            "what was written to the parent is in its children too, in part: restore the parent as it was",
        ),
        ImageError::NoIdentity { .. } | ImageError::NotResizable { .. } => plain(Exit::Error, Kind::Unsupported),
        ImageError::HasChildren { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "make images of their own of those first (holdfast image convert); where the identity changes, name them with --child, or change all that lie beside it with --all-children",
        ),
        ImageError::NotAChild { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "if an earlier change was interrupted, continue with the identity that the image has for its parent: --set UUID",
        ),
        ImageError::InvalidOption { .. } => plain(Exit::Usage, Kind::Usage),
        ImageError::NotFound { .. } => plain(Exit::Error, Kind::NotFound),
        ImageError::Locked { .. } => advice(Exit::Locked, Kind::Locked, "try again when that has ended"),
        _ => plain(Exit::Error, Kind::Io),
    }
}

pub(super) fn io_advice(error: &std::io::Error) -> Advice {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => advice(Exit::Error, Kind::NoSpace, HINT_NO_SPACE),
        ErrorKind::PermissionDenied => advice(Exit::Error, Kind::Permission, HINT_PERMISSION),
        ErrorKind::ResourceBusy => advice(Exit::Error, Kind::Io, HINT_BUSY),
        ErrorKind::NotFound => advice(Exit::Error, Kind::Io, "check the spelling; folders must exist"),
        _ => plain(Exit::Error, Kind::Io),
    }
}

/// Advice about images and about the files and devices that contain them.
fn is_protocol(name: &str) -> bool {
    name.split_once(':').is_some_and(|(word, _)| {
        word.len() > 1
            && word
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"+-._".contains(&byte))
            && word != "file"
    })
}
