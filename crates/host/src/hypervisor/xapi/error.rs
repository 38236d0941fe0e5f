//! What can go wrong with a pool.

/// Result of asking a pool.
pub type XapiResult<T> = std::result::Result<T, XapiError>;

/// An error of a pool of XenServer or XCP-ng.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum XapiError {
    /// The text names no pool.
    #[error("{text:?} is no address of a pool: {detail}")]
    Address {
        /// The text.
        text: String,
        /// What is wrong with it.
        detail: &'static str,
    },
    /// A fingerprint or a file of certificates that cannot be used.
    #[error("cannot use {what}: {detail}")]
    Trust {
        /// What was given.
        what: String,
        /// What is wrong with it.
        detail: String,
    },
    /// No connection came about.
    #[error("connect to {host}")]
    Connect {
        /// Where to.
        host: String,
        /// The reason.
        source: std::io::Error,
    },
    /// The host has another certificate than expected, or an unknown one.
    #[error(
        "{host} proves itself by a certificate that is not trusted{reason}, with the SHA-256 fingerprint {fingerprint}"
    )]
    Untrusted {
        /// Which host.
        host: String,
        /// The fingerprint of its certificate.
        fingerprint: String,
        /// What the authorities that are trusted have against it: ` (...)`; empty where there are none.
        reason: String,
    },
    /// A connection broke, or made no progress for too long.
    #[error("{action} {host}")]
    Broken {
        /// What was under way: "ask", "read from".
        action: &'static str,
        /// Which host.
        host: String,
        /// The reason.
        source: std::io::Error,
    },
    /// An answer that is none.
    #[error("the answer of {host} to {request} makes no sense: {detail}")]
    Answer {
        /// Which host.
        host: String,
        /// What was asked.
        request: String,
        /// What is wrong with it.
        detail: String,
    },
    /// The user or the password is wrong, or the user may not do this.
    #[error("{host} does not let {user} in: {detail}")]
    Login {
        /// Which host.
        host: String,
        /// The user.
        user: String,
        /// In its words.
        detail: String,
    },
    /// The pool refuses, or fails.
    #[error("{request}: {}", words(code, details))]
    Refused {
        /// What was asked: `VM.snapshot`.
        request: String,
        /// Its word for the reason: `SR_BACKEND_FAILURE_44`.
        code: String,
        /// What it adds.
        details: Vec<String>,
    },
    /// A handler of HTTP refuses.
    #[error("{request}: {host} answers {status} {reason}")]
    Status {
        /// Which host.
        host: String,
        /// What was asked, without the session.
        request: String,
        /// The status.
        status: u16,
        /// Its words.
        reason: String,
    },
    /// There is no machine of this name.
    #[error("the pool {pool} has no machine {name:?}")]
    NoMachine {
        /// Where it was looked for.
        pool: String,
        /// The name, or UUID.
        name: String,
    },
    /// Several machines have this name.
    #[error("the pool {pool} has {} machines {name:?}: {}", uuids.len(), uuids.join(", "))]
    SeveralMachines {
        /// Where.
        pool: String,
        /// The name.
        name: String,
        /// Their UUIDs.
        uuids: Vec<String>,
    },
    /// There is no storage repository of this name.
    #[error("the pool {pool} has no storage repository {name:?}; it has {}", present.join(", "))]
    NoStorage {
        /// Where it was looked for.
        pool: String,
        /// The name, or UUID; empty where the pool's default was asked for.
        name: String,
        /// Those that there are.
        present: Vec<String>,
    },
    /// A record lacks what it must have.
    #[error("the record of the {class} {reference} has no {field} that makes sense")]
    Record {
        /// `VM`, `VDI`.
        class: &'static str,
        /// Which one.
        reference: String,
        /// What is missing.
        field: &'static str,
    },
    /// A stop was requested.
    #[error("interrupted")]
    Interrupted,
}

impl XapiError {
    /// Whether it is this refusal.
    pub fn is_refusal(&self, wanted: &str) -> bool {
        matches!(self, Self::Refused { code, .. } if code == wanted)
    }

    /// Whether it was waited for in vain.
    pub(super) fn has_timed_out(&self) -> bool {
        match self {
            Self::Broken { source, .. } | Self::Connect { source, .. } => source.kind() == std::io::ErrorKind::TimedOut,
            _ => false,
        }
    }

    /// Whether it may be over in a moment: a connection that broke, or a host that is too busy to answer. One that said nothing for long was
    /// waited for already.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Broken { source, .. } => source.kind() != std::io::ErrorKind::TimedOut,
            Self::Status { status, .. } => *status >= 500,
            _ => false,
        }
    }

    /// Whether no process listens there at this moment.
    pub(super) fn is_connection_refused(&self) -> bool {
        matches!(self, Self::Connect { source, .. } if source.kind() == std::io::ErrorKind::ConnectionRefused)
    }
}

/// A reason in words, where the common ones are concerned.
fn words(code: &str, details: &[String]) -> String {
    let known = match code {
        "SR_BACKEND_FAILURE_44" => "there is not enough room in the storage repository",
        "OTHER_OPERATION_IN_PROGRESS" => "another operation is under way",
        "VDI_IN_USE" => "the disk is in use",
        "VM_BAD_POWER_STATE" => "the machine is in another state",
        "LICENCE_RESTRICTION" => "the licence of the host does not cover it",
        "RBAC_PERMISSION_DENIED" => "the user may not do this",
        "HANDLE_INVALID" => "there is no such thing any more",
        "VDI_CBT_NOT_ENABLED" => "changed blocks are not tracked",
        "CANNOT_CONTACT_HOST" => "the host that has it cannot be reached",
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
