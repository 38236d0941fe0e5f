//! Errors of pools.

/// Result of a request to a pool.
pub type XapiResult<T> = std::result::Result<T, XapiError>;

/// An error of a pool of XenServer or XCP-ng.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum XapiError {
    /// The text is not the address of a pool.
    #[error("{text:?} is not the address of a pool: {detail}")]
    Address {
        /// The text.
        text: String,
        /// What is wrong with the text.
        detail: &'static str,
    },
    /// A fingerprint or a file of certificates is unusable.
    #[error("cannot use {what}: {detail}")]
    Trust {
        /// The value.
        what: String,
        /// What is wrong with the value.
        detail: String,
    },
    /// A connection could not be opened.
    #[error("cannot connect to {host}")]
    Connect {
        /// The host.
        host: String,
        /// The reason.
        source: std::io::Error,
    },
    /// The host has another certificate than expected, or an unknown one.
    #[error("the certificate of {host} is not trusted{reason}; its SHA-256 fingerprint is {fingerprint}")]
    Untrusted {
        /// The host.
        host: String,
        /// The fingerprint of its certificate.
        fingerprint: String,
        /// Why the trusted authorities reject it: ` (...)`; empty if there are none.
        reason: String,
    },
    /// The connection was lost, or made no progress for too long.
    #[error("cannot {action} {host}")]
    Broken {
        /// The action: "send a request to", "read from".
        action: &'static str,
        /// The host.
        host: String,
        /// The reason.
        source: std::io::Error,
    },
    /// An answer is invalid.
    #[error("the answer of {host} to {request} is invalid: {detail}")]
    Answer {
        /// The host.
        host: String,
        /// The request.
        request: String,
        /// What is wrong with the answer.
        detail: String,
    },
    /// The user or the password is wrong, or the user lacks the permission.
    #[error("{host} rejects the login of {user}: {detail}")]
    Login {
        /// The host.
        host: String,
        /// The user.
        user: String,
        /// The host's message.
        detail: String,
    },
    /// The pool refuses a request, or the request fails.
    #[error("{request}: {}", words(code, details))]
    Refused {
        /// The method: `VM.snapshot`.
        request: String,
        /// The error code: `SR_BACKEND_FAILURE_44`.
        code: String,
        /// The parameters of the error.
        details: Vec<String>,
    },
    /// An HTTP handler refuses a request.
    #[error("{request}: {host} answers {status} {reason}")]
    Status {
        /// The host.
        host: String,
        /// The request, without the session.
        request: String,
        /// The status.
        status: u16,
        /// The reason phrase.
        reason: String,
    },
    /// There is no machine of this name.
    #[error("the pool {pool} has no machine {name:?}")]
    NoMachine {
        /// The pool.
        pool: String,
        /// The name, or UUID.
        name: String,
    },
    /// Several machines have this name.
    #[error("the pool {pool} has {} machines {name:?}: {}", uuids.len(), uuids.join(", "))]
    SeveralMachines {
        /// The pool.
        pool: String,
        /// The name.
        name: String,
        /// The UUIDs of these machines.
        uuids: Vec<String>,
    },
    /// There is no storage repository of this name.
    #[error("the pool {pool} has no storage repository {name:?}; it has {}", present.join(", "))]
    NoStorage {
        /// The pool.
        pool: String,
        /// The name or UUID; empty for the pool's default.
        name: String,
        /// The existing ones.
        present: Vec<String>,
    },
    /// A record lacks a required field.
    #[error("the record of the {class} {reference} has no valid {field}")]
    Record {
        /// `VM`, `VDI`.
        class: &'static str,
        /// The object.
        reference: String,
        /// The field.
        field: &'static str,
    },
    /// A stop was requested.
    #[error("interrupted")]
    Interrupted,
}

impl XapiError {
    /// Whether it is a refusal with this code.
    pub fn is_refusal(&self, wanted: &str) -> bool {
        matches!(self, Self::Refused { code, .. } if code == wanted)
    }

    /// Whether a timeout expired.
    pub(super) fn has_timed_out(&self) -> bool {
        match self {
            Self::Broken { source, .. } | Self::Connect { source, .. } => source.kind() == std::io::ErrorKind::TimedOut,
            _ => false,
        }
    }

    /// Whether a retry may help: the connection was lost, or the host is too busy to answer. A timeout is not
    /// retried, since the host was already waited for.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Broken { source, .. } => source.kind() != std::io::ErrorKind::TimedOut,
            Self::Status { status, .. } => *status >= 500,
            _ => false,
        }
    }

    /// Whether no process listens at the address.
    pub(super) fn is_connection_refused(&self) -> bool {
        matches!(self, Self::Connect { source, .. } if source.kind() == std::io::ErrorKind::ConnectionRefused)
    }
}

/// A description of the common error codes.
fn words(code: &str, details: &[String]) -> String {
    let known = match code {
        "SR_BACKEND_FAILURE_44" => "the storage repository has not enough space",
        "OTHER_OPERATION_IN_PROGRESS" => "another operation is running",
        "VDI_IN_USE" => "the disk is in use",
        "VM_BAD_POWER_STATE" => "the machine is in the wrong state",
        "LICENCE_RESTRICTION" => "the licence of the host does not cover it",
        "RBAC_PERMISSION_DENIED" => "the user lacks the permission",
        "HANDLE_INVALID" => "the object does not exist any more",
        "VDI_CBT_NOT_ENABLED" => "changed blocks are not tracked",
        "CANNOT_CONTACT_HOST" => "its host cannot be reached",
        _ => "",
    };
    let parts: Vec<&str> = [code].into_iter().chain(details.iter().map(String::as_str)).collect();
    let parts = parts.join(", ");
    if known.is_empty() {
        parts
    } else {
        format!("{known} ({parts})")
    }
}
