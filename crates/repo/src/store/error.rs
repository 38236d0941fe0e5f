//! Errors of a store.

use std::io::{Error as IoError, ErrorKind};

use super::{BadName, ObjectName};

/// Result of an operation on a store.
pub type Result<T> = std::result::Result<T, StoreError>;

/// An error of a store.
///
/// After an error of `put` or `commit` the object is there whole or not at all, and a crash may still change which; asking again
/// settles it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no such object (any more).
    #[error("there is no object {name}")]
    NotFound {
        /// The object.
        name: ObjectName,
    },
    /// Something that is no regular file has the name of an object: a folder, a link, a pipe. It is neither followed nor opened.
    #[error("{name} is {what}, not an object: the stored object was removed or moved")]
    NotAnObject {
        /// The object.
        name: ObjectName,
        /// What it is.
        what: &'static str,
    },
    /// A folder of the store is a link or no folder.
    #[error("{action} of {subject} in {store}: a folder on the way to it is a link, or no folder")]
    NotAFolder {
        /// The store, as it describes itself.
        store: String,
        /// What was tried.
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
        /// The longest answer that was asked for, in bytes.
        length_max: u64,
    },
    /// The object ends before the bytes that were asked for.
    #[error("object {name} has {actual} bytes where at least {expected} were expected")]
    ShortObject {
        /// The object.
        name: ObjectName,
        /// Bytes it must have to answer.
        expected: u64,
        /// Bytes it has.
        actual: u64,
    },
    /// A text that is no name of an object.
    #[error(transparent)]
    BadName(#[from] BadName),
    /// There is nothing where the store should be.
    #[error("{store} does not exist")]
    NoStore {
        /// The store, as it describes itself.
        store: String,
    },
    /// The store can be read but not written.
    #[error("{store} is read-only")]
    ReadOnly {
        /// The store, as it describes itself.
        store: String,
    },
    /// The store is full, or a quota is used up.
    #[error("{store} is full")]
    NoSpace {
        /// The store, as it describes itself.
        store: String,
    },
    /// The store refuses us.
    #[error("{action} of {subject} in {store} is not permitted")]
    Permission {
        /// The store, as it describes itself.
        store: String,
        /// What was tried.
        action: &'static str,
        /// The object or file.
        subject: String,
    },
    /// The medium lacks something that a store cannot do without.
    #[error("{store} cannot be used: {detail}")]
    Unsupported {
        /// The store, as it describes itself.
        store: String,
        /// What is missing, and what to do instead.
        detail: &'static str,
    },
    /// The store has stopped to answer for good: its connection is gone. What was under way may have happened or not.
    #[error("{store} no longer answers")]
    Closed {
        /// The store, as it describes itself.
        store: String,
    },
    /// The operating system or the network refused.
    #[error("{action} of {subject} in {store}")]
    Io {
        /// The store, as it describes itself.
        store: String,
        /// What was tried.
        action: &'static str,
        /// The object or file.
        subject: String,
        /// The reason.
        source: IoError,
    },
}

impl StoreError {
    /// The error for the answer `source` of the operating system to `action` on `subject`.
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

    /// Whether the same call may succeed if it is made again a little later.
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

    /// Whether the medium failed to give what it holds: asking again does not help, and neither does anything that is not the medium.
    pub(crate) fn is_of_medium(&self) -> bool {
        // EIO, ENXIO, ENODATA, EBADMSG, EILSEQ, EUCLEAN and EREMOTEIO: what disks, and file systems with checksums, answer.
        const CODES: [i32; 7] = [5, 6, 61, 74, 84, 117, 121];
        match self {
            Self::Io { source, .. } => match source.raw_os_error() {
                Some(code) => CODES.contains(&code),
                None => !self.is_retryable() && source.kind() == ErrorKind::Other,
            },
            _ => false,
        }
    }

    /// Whether the object that was asked for does not exist.
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
