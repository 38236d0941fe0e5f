//! Advice on servers of disks, of this process and of others.

use holdfast_engine::{ControlErrorKind, ServingError};
use holdfast_serve::registry::RegistryError;

use super::{Advice, HINT_DAMAGE, advice};
use crate::errors::Kind;
use crate::exit::Exit;

const HINT_NAME: &str = "give an image another name with NAME=IMAGE or --machine; serve a snapshot once";
const HINT_NO_REPOSITORY: &str = "start the server with --repository, or serve an image";
const HINT_LIST: &str = "holdfast serve list shows the exports, and holdfast list the snapshots";
const HINT_IN_USE: &str = "disconnect the clients first, or use --force";
const HINT_WRITES_LOST: &str =
    "look at the messages of the system about its storage; check the file systems on the disk before it is used again";

/// The advice on an error of a server of this process.
pub(super) fn serving_advice(error: &ServingError) -> Advice {
    match error {
        ServingError::NameInUse { .. } | ServingError::Registry(RegistryError::NameInUse { .. }) => {
            advice(Exit::Error, Kind::Exists, HINT_NAME)
        }
        ServingError::PullInProgress { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "another command for this machine runs; it shows how far its disks are",
        ),
        ServingError::NoRepository => advice(Exit::Error, Kind::NoRepository, HINT_NO_REPOSITORY),
        ServingError::StandardInput | ServingError::UnknownFormat { .. } => advice(
            Exit::Usage,
            Kind::Usage,
            "give the path of an image, and one of the formats of image info",
        ),
        ServingError::Registry(RegistryError::InvalidName { .. }) => {
            advice(Exit::Usage, Kind::BadName, "give an image another name with NAME=IMAGE")
        }
        ServingError::Registry(RegistryError::Flush { .. } | RegistryError::Busy { .. }) => {
            advice(Exit::Error, Kind::Io, HINT_WRITES_LOST)
        }
        _ => advice(Exit::Error, Kind::Refused, HINT_LIST),
    }
}

/// The advice on an error of another server.
pub(super) fn server_advice(kind: ControlErrorKind) -> Advice {
    match kind {
        ControlErrorKind::Invalid => advice(Exit::Usage, Kind::Usage, "check the names and options"),
        ControlErrorKind::Version => advice(
            Exit::Error,
            Kind::NewerFormat,
            "use the same version of holdfast as the server",
        ),
        ControlErrorKind::NotFound => advice(Exit::Error, Kind::NotFound, HINT_LIST),
        ControlErrorKind::Ambiguous => advice(Exit::Error, Kind::Ambiguous, "name the snapshot by its id"),
        ControlErrorKind::NoRepository => advice(Exit::Error, Kind::NoRepository, HINT_NO_REPOSITORY),
        ControlErrorKind::Exists => advice(Exit::Error, Kind::Exists, HINT_NAME),
        ControlErrorKind::InUse => advice(Exit::Locked, Kind::Locked, HINT_IN_USE),
        ControlErrorKind::Locked => advice(Exit::Locked, Kind::Locked, "try again when that has ended"),
        ControlErrorKind::Damage => advice(Exit::Damage, Kind::Damage, HINT_DAMAGE),
        ControlErrorKind::WritesLost => advice(Exit::Error, Kind::Io, HINT_WRITES_LOST),
        ControlErrorKind::Failed => advice(Exit::Error, Kind::Io, "the messages of the server may show the reason"),
    }
}

#[cfg(test)]
mod tests {
    use holdfast_engine::{ControlErrorKind, Error as JobError};
    use holdfast_serve::registry::RegistryError;

    use super::server_advice;
    use crate::errors::{Error, Kind};
    use crate::exit::Exit;

    /// Lost writes were a warning.
    #[test]
    fn lost_writes_are_an_error_with_a_hint() {
        let lost = RegistryError::Busy { name: "a".to_owned() };
        let advice = Error::from(JobError::from(lost)).advice();
        assert_eq!((advice.exit, advice.kind), (Exit::Error, Kind::Io));
        assert!(advice.hint.is_some());
        assert_eq!(server_advice(ControlErrorKind::WritesLost), advice);
    }

    #[test]
    fn locks_of_servers_have_the_exit_code_of_locks() {
        for kind in [ControlErrorKind::InUse, ControlErrorKind::Locked] {
            let advice = server_advice(kind);
            assert_eq!((advice.exit, advice.kind), (Exit::Locked, Kind::Locked));
        }
    }
}
