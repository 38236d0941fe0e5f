//! Errors of requests as other commands see them.

use holdfast_block::error_messages;
use holdfast_image::Error as ImageError;
use holdfast_repo::Error as RepositoryError;
use holdfast_serve::registry::RegistryError;

use super::control::{ControlError, ControlErrorKind};
use crate::job::Error;
use crate::job::error::{ResolveError, ServingError};

/// The answer to a request that failed.
pub(super) fn control_error(error: &Error) -> ControlError {
    ControlError {
        kind: kind_of(error),
        messages: error_messages(error),
    }
}

fn kind_of(error: &Error) -> ControlErrorKind {
    match error {
        Error::Serving(error) => kind_of_serving(error),
        Error::Name(_) | Error::Resolve(ResolveError::PrefixTooShort { .. }) => ControlErrorKind::Invalid,
        Error::Resolve(ResolveError::Ambiguous { .. } | ResolveError::SeveralMachines { .. }) => {
            ControlErrorKind::Ambiguous
        }
        Error::Resolve(_)
        | Error::Repository(RepositoryError::NoSnapshot { .. } | RepositoryError::NoDisk { .. })
        | Error::Image(ImageError::NotFound { .. }) => ControlErrorKind::NotFound,
        Error::OverlayInUse { .. }
        | Error::Repository(RepositoryError::Locked { .. })
        | Error::Image(ImageError::Locked { .. }) => ControlErrorKind::Locked,
        Error::Image(error) if error.is_corrupt() => ControlErrorKind::Damage,
        Error::Repository(error) if error.is_damage() => ControlErrorKind::Damage,
        _ => ControlErrorKind::Failed,
    }
}

fn kind_of_serving(error: &ServingError) -> ControlErrorKind {
    match error {
        ServingError::NoRepository => ControlErrorKind::NoRepository,
        ServingError::UnknownFormat { .. }
        | ServingError::StandardInput
        | ServingError::Registry(RegistryError::InvalidName { .. }) => ControlErrorKind::Invalid,
        ServingError::NameInUse { .. } | ServingError::Registry(RegistryError::NameInUse { .. }) => {
            ControlErrorKind::Exists
        }
        ServingError::Registry(RegistryError::NotFound { .. }) => ControlErrorKind::NotFound,
        ServingError::Registry(RegistryError::InUse { .. }) => ControlErrorKind::InUse,
        ServingError::Registry(RegistryError::Flush { .. } | RegistryError::Busy { .. }) => {
            ControlErrorKind::WritesLost
        }
        ServingError::PullInProgress { .. } => ControlErrorKind::Locked,
        ServingError::Registry(_) => ControlErrorKind::Failed,
    }
}

#[cfg(test)]
mod tests {
    use holdfast_serve::registry::RegistryError;

    use super::control_error;
    use crate::job::Error;
    use crate::job::error::ServingError;
    use crate::restore::serve::control::ControlErrorKind as Kind;

    #[test]
    fn every_cause_has_its_kind() {
        let name = || "a".to_owned();
        for (error, kind) in [
            (ServingError::NoRepository, Kind::NoRepository),
            (ServingError::UnknownFormat { name: name() }, Kind::Invalid),
            (RegistryError::InvalidName { name: name() }.into(), Kind::Invalid),
            (RegistryError::NotFound { name: name() }.into(), Kind::NotFound),
            (RegistryError::NameInUse { name: name() }.into(), Kind::Exists),
            (RegistryError::Busy { name: name() }.into(), Kind::WritesLost),
            (RegistryError::TooMany.into(), Kind::Failed),
        ] {
            assert_eq!(control_error(&Error::Serving(error)).kind, kind);
        }
        let path = || "/overlays/a".into();
        assert_eq!(control_error(&Error::OverlayInUse { path: path() }).kind, Kind::Locked);
    }
}
