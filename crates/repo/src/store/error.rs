//! Errors of a store.

use std::io::{Error as IoError, ErrorKind};

use super::{BadName, ObjectName};

/// Result of an operation on a store.
pub type Result<T> = std::result::Result<T, StoreError>;

/// An error of a store.
///
/// After an error of `put` or `commit` the object exists completely or not at all, and a crash may still change that; a
/// second call settles it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The object does not exist (any more).
    #[error("there is no object {name}")]
    NotFound {
        /// The object.
        name: ObjectName,
    },
    /// The name of an object is taken by something that is not a regular file: a folder, a link, a pipe. It is neither
    /// followed nor opened.
    #[error("{name} is {what}, not an object: the stored object was removed or moved")]
    NotAnObject {
        /// The object.
        name: ObjectName,
        /// The type of the file.
        what: &'static str,
    },
    /// A folder of the store is a link or not a folder.
    #[error("{action} of {subject} in {store}: a folder on the way to it is a link, or no folder")]
    NotAFolder {
        /// The store's description.
        store: String,
        /// The attempted action.
        action: &'static str,
        /// The object or folder.
        subject: String,
    },
    /// The object is longer than the caller accepts in memory.
    #[error("object {name} has {length} bytes, more than the {length_max} that such an object may have")]
    TooLarge {
        /// The object.
        name: ObjectName,
        /// Its length in bytes.
        length: u64,
        /// The maximum length, in bytes.
        length_max: u64,
    },
    /// The object is shorter than the requested range.
    #[error("object {name} has {actual} bytes where at least {expected} were expected")]
    ShortObject {
        /// The object.
        name: ObjectName,
        /// The required bytes.
        expected: u64,
        /// The existing bytes.
        actual: u64,
    },
    /// The text is not a valid object name.
    #[error(transparent)]
    BadName(#[from] BadName),
    /// The store does not exist.
    #[error("{store} does not exist")]
    NoStore {
        /// The store's description.
        store: String,
    },
    /// The store can be read but not written.
    #[error("{store} is read-only")]
    ReadOnly {
        /// The store's description.
        store: String,
    },
    /// The store is full, or a quota is used up.
    #[error("{store} is full")]
    NoSpace {
        /// The store's description.
        store: String,
    },
    /// Access to the store is denied.
    #[error("{action} of {subject} in {store} is not permitted")]
    Permission {
        /// The store's description.
        store: String,
        /// The attempted action.
        action: &'static str,
        /// The object or file.
        subject: String,
    },
    /// The medium lacks a required feature.
    #[error("{store} cannot be used: {detail}")]
    Unsupported {
        /// The store's description.
        store: String,
        /// The missing feature, and the solution.
        detail: &'static str,
    },
    /// The store is permanently unreachable, because its connection is closed. Pending calls may have taken effect or
    /// not.
    #[error("{store} no longer answers")]
    Closed {
        /// The store's description.
        store: String,
    },
    /// An error of the operating system or the network.
    #[error("{action} of {subject} in {store}")]
    Io {
        /// The store's description.
        store: String,
        /// The attempted action.
        action: &'static str,
        /// The object or file.
        subject: String,
        /// The reason.
        source: IoError,
    },
}

impl StoreError {
    /// Converts the operating system's error `source` of `action` on `subject`.
    pub(super) fn from_io(store: String, action: &'static str, subject: String, source: IoError) -> Self {
        match source.kind() {
            ErrorKind::ReadOnlyFilesystem => Self::ReadOnly { store },
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Self::NoSpace { store },
            ErrorKind::PermissionDenied => Self::Permission { store, action, subject },
            ErrorKind::NotADirectory => Self::NotAFolder { store, action, subject },
            _ if source.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
                Self::NotAFolder { store, action, subject }
            }
            _ => Self::Io {
                store,
                action,
                subject,
                source,
            },
        }
    }

    /// Whether the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Io { source, .. } if matches!(
            source.kind(),
            ErrorKind::Interrupted
                | ErrorKind::WouldBlock
                | ErrorKind::TimedOut
                | ErrorKind::ResourceBusy
                | ErrorKind::StaleNetworkFileHandle
                | ErrorKind::ConnectionRefused
                | ErrorKind::ConnectionReset
                | ErrorKind::ConnectionAborted
                | ErrorKind::NotConnected
                | ErrorKind::BrokenPipe
                | ErrorKind::HostUnreachable
                | ErrorKind::NetworkUnreachable
                | ErrorKind::NetworkDown
        ))
    }

    /// Whether the medium failed to read its data: retries do not help, and the cause is neither software nor
    /// permissions.
    pub(crate) fn is_of_medium(&self) -> bool {
        // EIO, ENXIO, ENODATA, EBADMSG, EILSEQ, EUCLEAN and EREMOTEIO: the errors of disks, and of file systems with
        // checksums.
        const CODES: [i32; 7] = [5, 6, 61, 74, 84, 117, 121];
        match self {
            Self::Io { source, .. } => match source.raw_os_error() {
                Some(code) => CODES.contains(&code),
                None => !self.is_retryable() && source.kind() == ErrorKind::Other,
            },
            _ => false,
        }
    }

    /// Whether the requested object does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_passing_troubles_are_retryable() {
        let error = |kind: ErrorKind| StoreError::from_io("memory".into(), "write", "config".into(), kind.into());
        assert!(error(ErrorKind::TimedOut).is_retryable());
        assert!(error(ErrorKind::StaleNetworkFileHandle).is_retryable());
        for kind in [
            ErrorKind::StorageFull,
            ErrorKind::PermissionDenied,
            ErrorKind::Other,
            ErrorKind::NotFound,
        ] {
            assert!(!error(kind).is_retryable(), "{kind:?}");
        }
        assert!(matches!(error(ErrorKind::QuotaExceeded), StoreError::NoSpace { .. }));
        assert!(matches!(
            error(ErrorKind::ReadOnlyFilesystem),
            StoreError::ReadOnly { .. }
        ));
    }
}
