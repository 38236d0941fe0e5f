//! Whether QEMU interprets a name as a protocol instead of a file: `nbd:`, `json:`. A file with such a name
//! cannot be allowed.

use std::io::ErrorKind;

use holdfast_engine::CloneError;
use holdfast_image::Error as ImageError;

use super::{Advice, HINT_PERMISSION, advice, device_advice, plain};
use crate::errors::Kind;
use crate::exit::Exit;

const HINT_BUSY: &str = "it is in use, by a mounted file system, an array or another program: end that first";

const HINT_NO_SPACE: &str = "free space on the target and try again";

pub(super) fn image_advice(error: &ImageError) -> Advice {
    match error {
        error if error.is_corrupt() => plain(Exit::Damage, Kind::Damage),
        ImageError::Backing { source, .. } if source.kind() == ErrorKind::NotFound => advice(
            Exit::Error,
            Kind::Io,
            "without its backing file the image is only a part of a disk: put the backing file where the image expects it",
        ),
        ImageError::Io { source, .. } | ImageError::Backing { source, .. } => io_advice(source),
        ImageError::Device(error) => device_advice(error),
        ImageError::UnsupportedFormat { .. } | ImageError::UnsupportedFeature { .. } => {
            plain(Exit::Error, Kind::Unsupported)
        }
        ImageError::WouldShrink { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "--shrink permits it; check first where the last partition and its file system end",
        ),
        ImageError::Refused { file, .. } if is_protocol(file) => advice(
            Exit::Error,
            Kind::Refused,
            "an image may only refer to files of this host",
        ),
        ImageError::Refused { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "if you trust the image, allow the file with --allow FILE",
        ),
        ImageError::GuessedFormat { .. } | ImageError::NameContradicts { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "state the format: --format raw for the bytes of a disk, or the format of its content if you trust everyone who could write to it",
        ),
        ImageError::UnknownExtension { .. } => advice(
            Exit::Usage,
            Kind::Usage,
            "correct the name, or state the format (--format FORMAT; --to FORMAT for image convert and live-copy)",
        ),
        ImageError::OtherFormat { .. } => {
            advice(Exit::Error, Kind::Refused, "omit --format, or state the actual format")
        }
        ImageError::ParentNotFound { .. } => advice(Exit::Error, Kind::NotFound, "say where it is with --allow FILE"),
        ImageError::ParentChanged { .. } => advice(
            Exit::Damage,
            Kind::Damage,
            "the data written to the parent also appears in parts of its children: restore the parent to its old content",
        ),
        ImageError::NoIdentity { .. } | ImageError::NotResizable { .. } => plain(Exit::Error, Kind::Unsupported),
        ImageError::HasChildren { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "convert its children to standalone images first (holdfast image convert); to change an identity, name the children by --child, or change all in its folder by --all-children",
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

pub(super) fn clone_advice(error: &CloneError) -> Advice {
    match error {
        CloneError::NoClone { .. } => advice(Exit::Error, Kind::Unsupported, "copy all of it with --copy"),
        CloneError::Written { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "clone a host snapshot of the machine (MACHINE@SNAPSHOT), or shut it down first",
        ),
        CloneError::GuestIdentity { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "install it (guestfs-tools), or leave --sysprep out and do it in the guest",
        ),
        _ => plain(Exit::Error, Kind::Io),
    }
}
