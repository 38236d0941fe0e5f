//! Operations of a store, for logs of tests and simulations.

use std::fmt;

use crate::store::{ObjectKind, ObjectName};

/// One call of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// `put`, with the length in bytes.
    Put(ObjectName, u64),
    /// `create`.
    Create(ObjectName),
    /// `append`, with the length in bytes.
    Append(ObjectName, u64),
    /// `commit`.
    Commit(ObjectName),
    /// `get`.
    Get(ObjectName),
    /// `get_range`, with offset and length in bytes.
    GetRange(ObjectName, u64, u64),
    /// `length`.
    Length(ObjectName),
    /// `list`.
    List(ObjectKind),
    /// `delete`.
    Delete(ObjectName),
    /// `foreign_files`.
    ForeignFiles,
    /// `clean`.
    Clean,
}

impl Operation {
    /// Whether it takes space.
    pub fn is_growing(&self) -> bool {
        matches!(
            self,
            Self::Put(..) | Self::Create(_) | Self::Append(..) | Self::Commit(_)
        )
    }

    /// Whether other processes can observe it.
    pub fn is_change(&self) -> bool {
        matches!(self, Self::Put(..) | Self::Commit(_) | Self::Delete(_))
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Put(name, length) => write!(f, "put {name} ({length} bytes)"),
            Self::Create(name) => write!(f, "create {name}"),
            Self::Append(name, length) => write!(f, "append {name} ({length} bytes)"),
            Self::Commit(name) => write!(f, "commit {name}"),
            Self::Get(name) => write!(f, "get {name}"),
            Self::GetRange(name, offset, length) => write!(f, "get {name} ({length} bytes at {offset})"),
            Self::Length(name) => write!(f, "length of {name}"),
            Self::List(kind) => write!(f, "list {kind}"),
            Self::Delete(name) => write!(f, "delete {name}"),
            Self::ForeignFiles => f.write_str("look for foreign files"),
            Self::Clean => f.write_str("clean"),
        }
    }
}
