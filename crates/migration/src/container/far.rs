//! Requests about containers to the `holdfast` of the other host.

use std::path::{Path, PathBuf};

use holdfast_block::{BlockDevice, to_usize};
use holdfast_engine::DiskTransport;
use holdfast_host::StreamTools;
use serde::{Deserialize, Serialize};

use crate::command_host::CommandHost;
use crate::error::{Error, Result};
use crate::request_link::RequestLink;
use crate::socket_host::SocketHost;

/// Words after which the program answers: `holdfast receive-container 1`.
pub const RECEIVE_CONTAINER_COMMAND: [&str; 2] = ["receive-container", "1"];

/// The file beside the received ones by which a sender sees whether it is on its own storage.
pub(super) const TOKEN_FILE: &str = "migration.token";
const HASH_BYTES: u64 = 1 << 20;

/// What is asked of the other host. `folder` is that of the container there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum ContainerRequest {
    /// What it is.
    Describe {},
    /// What prevents the container from being there.
    Check(ContainerCheck),
    /// Begin to receive its files, or continue.
    Prepare {
        folder: PathBuf,
        id: String,
        /// Is stored beside the files.
        token: String,
    },
    /// Make a folder for the memory of a snapshot.
    MakeFolder { folder: PathBuf, name: String },
    /// Store a small file, or an empty one.
    Store {
        folder: PathBuf,
        name: String,
        text: String,
    },
    /// The digest of a file that was received.
    Digest { folder: PathBuf, name: String },
    /// All files are there: give the folder its name.
    Complete {
        folder: PathBuf,
        id: String,
        files: Vec<ExpectedFile>,
    },
    /// Put the files back to where they were received, and `former` to where it was.
    Revert {
        folder: PathBuf,
        id: String,
        former: Option<PathBuf>,
    },
    /// Whether the container is there.
    State { folder: PathBuf, id: String },
    /// Mount its file system.
    Mount { folder: PathBuf, mount: MountTarget },
    /// Call a command.
    Run { command: String },
    /// Delete the former container.
    DeleteFormer { folder: PathBuf, id: String },
    /// The report of the migration, for the user at that host.
    Report { document: serde_json::Value },
}

/// A container that may come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ContainerCheck {
    pub(crate) folder: PathBuf,
    pub(crate) id: String,
    /// Bytes that its files are expected to take.
    pub(crate) expected_bytes: u64,
    /// None if it will not be mounted.
    pub(crate) mount: Option<MountTarget>,
}

/// Where a container is mounted, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MountTarget {
    /// An empty folder.
    pub point: PathBuf,
    /// What makes a block device of its disk.
    pub transport: DiskTransport,
}

/// A file that must be there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExpectedFile {
    /// Relative to the folder.
    pub(crate) name: String,
    pub(crate) bytes: u64,
}

/// The content of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ContainerDigest {
    pub(crate) bytes: u64,
    /// In hexadecimal digits.
    pub(crate) blake3: String,
}

impl ContainerDigest {
    /// Reads a file.
    pub(crate) fn of(device: &dyn BlockDevice) -> holdfast_block::Result<Self> {
        let mut hasher = blake3::Hasher::new();
        let size = device.size_bytes();
        let mut buffer = vec![0; to_usize(HASH_BYTES)];
        let mut offset = 0;
        while offset < size {
            let bytes = &mut buffer[..to_usize(HASH_BYTES.min(size - offset))];
            device.read_at(bytes, offset)?;
            hasher.update(bytes);
            offset += bytes.len() as u64;
        }
        Ok(Self {
            bytes: size,
            blake3: hasher.finalize().to_hex().to_string(),
        })
    }
}

/// The answer of the other host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum ContainerAnswer {
    Described {
        program: String,
        /// The folder for containers that come; none for that of the sender.
        folder: Option<PathBuf>,
    },
    Checked {
        obstacles: Vec<String>,
        notes: Vec<String>,
    },
    Prepared {
        /// The folder for the files.
        staging: PathBuf,
        /// Files that have the same name as one that comes, and probably a similar content.
        seeds: Vec<SeedFile>,
    },
    Digest(ContainerDigest),
    Completed {
        /// The folder that was in its place, under its new name.
        former: Option<PathBuf>,
    },
    State {
        state: ArrivalState,
    },
    Done {},
    Refused {
        reason: String,
    },
}

/// A file with a content similar to that of one that comes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SeedFile {
    /// Relative to the folder of the container.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// Length of the file.
    pub(crate) bytes: u64,
}

/// How much of a container is at the other host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ArrivalState {
    /// It is not there, or not complete.
    Absent,
    /// It was there before, and was migrated to another host.
    Former,
    Complete,
    /// It is complete, and in use.
    InUse,
}

impl std::fmt::Display for ArrivalState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Absent => "is not complete",
            Self::Former => "was migrated to another host",
            Self::Complete => "is complete",
            Self::InUse => "is in use",
        })
    }
}

/// The `holdfast` of the other host, for containers.
pub struct FarContainers(RequestLink);

/// The files that were received before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Prepared {
    pub(crate) staging: PathBuf,
    pub(crate) seeds: Vec<SeedFile>,
}

impl FarContainers {
    /// Starts it by `tools`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(tools: &dyn StreamTools) -> Result<Self> {
        RequestLink::start(tools, &RECEIVE_CONTAINER_COMMAND).map(Self)
    }

    /// A host that is reached by a socket.
    ///
    /// # Errors
    /// It does not serve.
    pub fn of_socket(host: &SocketHost) -> Result<Self> {
        host.container_link().map(Self)
    }

    /// A host that is reached by a command.
    ///
    /// # Errors
    /// The command cannot be started.
    pub fn of_command(host: &CommandHost) -> Result<Self> {
        host.container_link().map(Self)
    }

    /// Its name.
    pub fn host(&self) -> &str {
        self.0.host()
    }

    /// # Errors
    /// The host refuses, or does not answer.
    fn ask(&self, request: &ContainerRequest) -> Result<ContainerAnswer> {
        match self.0.ask(request)? {
            ContainerAnswer::Refused { reason } => Err(Error::Refused {
                host: self.host().to_owned(),
                reason,
            }),
            answer => Ok(answer),
        }
    }

    /// Asks for something that has no result.
    pub(crate) fn request(&self, request: &ContainerRequest) -> Result<()> {
        match self.ask(request)? {
            ContainerAnswer::Done {} => Ok(()),
            _ => Err(self.0.other_version()),
        }
    }

    /// The folder for containers that come there; none for that of this host.
    ///
    /// # Errors
    /// The host does not answer.
    pub fn folder(&self) -> Result<Option<PathBuf>> {
        match self.ask(&ContainerRequest::Describe {})? {
            ContainerAnswer::Described { folder, .. } => Ok(folder),
            _ => Err(self.0.other_version()),
        }
    }

    /// What prevents a container from being there, and what a user should know.
    pub(crate) fn check(&self, check: ContainerCheck) -> Result<[Vec<String>; 2]> {
        match self.ask(&ContainerRequest::Check(check))? {
            ContainerAnswer::Checked { obstacles, notes } => Ok([obstacles, notes]),
            _ => Err(self.0.other_version()),
        }
    }

    pub(crate) fn prepare(&self, folder: &Path, id: &str, token: &str) -> Result<Prepared> {
        let request = ContainerRequest::Prepare {
            folder: folder.to_owned(),
            id: id.to_owned(),
            token: token.to_owned(),
        };
        match self.ask(&request)? {
            ContainerAnswer::Prepared { staging, seeds } => Ok(Prepared { staging, seeds }),
            _ => Err(self.0.other_version()),
        }
    }

    /// The digest of a file that was received.
    pub(crate) fn digest(&self, folder: &Path, name: &str) -> Result<ContainerDigest> {
        let request = ContainerRequest::Digest {
            folder: folder.to_owned(),
            name: name.to_owned(),
        };
        match self.ask(&request)? {
            ContainerAnswer::Digest(digest) => Ok(digest),
            _ => Err(self.0.other_version()),
        }
    }

    /// Gives the folder its name. Returns the new name of a former one.
    pub(crate) fn complete(&self, folder: &Path, id: &str, files: Vec<ExpectedFile>) -> Result<Option<PathBuf>> {
        let request = ContainerRequest::Complete {
            folder: folder.to_owned(),
            id: id.to_owned(),
            files,
        };
        match self.ask(&request)? {
            ContainerAnswer::Completed { former } => Ok(former),
            _ => Err(self.0.other_version()),
        }
    }

    /// Gives the host the report of a migration to it.
    ///
    /// # Errors
    /// The host does not answer.
    pub fn send_report(&self, document: serde_json::Value) -> Result<()> {
        self.request(&ContainerRequest::Report { document })
    }

    pub(crate) fn state(&self, folder: &Path, id: &str) -> Result<ArrivalState> {
        let request = ContainerRequest::State {
            folder: folder.to_owned(),
            id: id.to_owned(),
        };
        match self.ask(&request)? {
            ContainerAnswer::State { state } => Ok(state),
            _ => Err(self.0.other_version()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ContainerAnswer, ContainerRequest};
    use crate::request_link::assert_lines_unchanged;

    /// Requests and answers of version 1, as docs/format/migration.md describes them.
    const REQUESTS: &str = include_str!("../../tests/fixtures/container-requests-1.jsonl");
    const ANSWERS: &str = include_str!("../../tests/fixtures/container-answers-1.jsonl");

    #[test]
    fn version_1_is_understood_and_written_as_it_was() {
        assert_lines_unchanged::<ContainerRequest>(REQUESTS);
        assert_lines_unchanged::<ContainerAnswer>(ANSWERS);
        assert_eq!([REQUESTS, ANSWERS].map(|lines| lines.lines().count()), [15, 12]);
    }

    #[test]
    fn unknown_requests_and_fields_are_refused() {
        for line in [
            r#"{"request":"delete"}"#,
            r#"{"request":"run"}"#,
            r#"{"request":"run","command":"true","shell":"zsh"}"#,
            r#"{"request":"mount","folder":"/srv/a","mount":{"point":"/mnt","transport":"iscsi"}}"#,
        ] {
            assert!(serde_json::from_str::<ContainerRequest>(line).is_err(), "{line}");
        }
    }
}
