//! Advice on errors of the providers of host snapshots.

use holdfast_host::ToolError;
use holdfast_host::provider::ProviderError;

use super::images::io_advice;
use super::{Advice, advice, plain};
use crate::errors::Kind;
use crate::exit::Exit;

pub(super) fn provider_advice(error: &ProviderError) -> Advice {
    match error {
        ProviderError::NotFound { .. } => advice(
            Exit::Error,
            Kind::NotFound,
            "holdfast host datasets and holdfast host list show the existing ones",
        ),
        ProviderError::Exists { .. } => advice(
            Exit::Error,
            Kind::Exists,
            "choose another name, or remove the existing one first",
        ),
        ProviderError::Replaced { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "it is unchanged; holdfast host list shows the current snapshots",
        ),
        ProviderError::Held { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "release it with holdfast host release --tag TAG, or with the program that holds it",
        ),
        ProviderError::HasClones { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "remove its clones first, if they are not needed",
        ),
        ProviderError::Full { .. } => advice(
            Exit::Error,
            Kind::NoSpace,
            "remove snapshots that are not needed, or add space",
        ),
        ProviderError::Suspended { .. } => advice(
            Exit::Error,
            Kind::Io,
            "zpool status shows the devices; zpool clear resumes the pool",
        ),
        ProviderError::Name { .. } => advice(Exit::Usage, Kind::BadName, "take another name"),
        ProviderError::NoService { .. } => advice(Exit::Error, Kind::Unsupported, "start it, or load its module"),
        ProviderError::Refused { .. } => plain(Exit::Error, Kind::Refused),
        ProviderError::Tool(ToolError::NotFound { .. }) => advice(
            Exit::Error,
            Kind::Unsupported,
            "install it: zfsutils-linux, or btrfs-progs",
        ),
        ProviderError::Tool(ToolError::Io { source, .. }) | ProviderError::File { source, .. } => io_advice(source),
        ProviderError::Tool(ToolError::NoConnection { .. }) => advice(
            Exit::Error,
            Kind::Io,
            "check that ssh HOST works without a password; set keys, users and ports in ~/.ssh/config",
        ),
        ProviderError::Tool(_) => advice(Exit::Error, Kind::Io, "see whether it answers when you ask it yourself"),
        _ => advice(
            Exit::Error,
            Kind::Io,
            "check that its programs and its kernel module have the same version",
        ),
    }
}
