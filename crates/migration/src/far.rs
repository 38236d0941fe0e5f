//! Requests to the `holdfast` of the other host, a line of JSON each, and how that answers them.

mod disk_socket;
mod file_checks;
mod file_users;
mod named_copies;
mod overlay_files;
mod overlays;
mod serve;
mod services;

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use holdfast_engine::StoppedTpm;
use holdfast_host::{MachineHistory, StreamTools, TpmStore};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::request_link::RequestLink;
pub use serve::{FarTools, MovingHypervisor, serve_far};
pub(crate) use services::HostService;
pub use services::{HostRequests, HostServices, RequestSubject, serve_connection, serve_host};

/// Words after which the program answers: `holdfast receive-machine 1`.
pub const RECEIVE_MACHINE_COMMAND: [&str; 2] = ["receive-machine", "1"];
/// The name of the variables of the firmware among the disks of a machine.
pub(crate) const NVRAM: &str = "nvram";

/// The name of backing files that neither a disk nor a snapshot names. They may be templates of other machines.
pub(crate) const BACKING: &str = "backing";

/// What is asked of the other host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum FarRequest {
    /// What it is.
    Describe {},
    /// The disks of a definition of the machine there, which is shut off: it ran there before.
    FormerDisks { uuid: String },
    /// The files of such a definition, with those of its snapshots.
    FormerFiles { uuid: String },
    /// Whether a new disk can have this path.
    Path { path: PathBuf },
    /// The same for an image that is pulled: it may replace one that a failed attempt left.
    OverlayPath { path: PathBuf },
    /// What prevents a machine from running there.
    Check(CheckRequest),
    /// Give the files of incomplete copies their names.
    NameDisks { paths: Vec<PathBuf> },
    /// Remove these names again.
    UnnameDisks { paths: Vec<PathBuf> },
    /// Make empty images whose backing files are exports of the source.
    MakeOverlays { disks: Vec<OverlayDisk> },
    /// Delete such images, which nothing has used.
    DeleteOverlays { paths: Vec<PathBuf> },
    /// The disks of the machine that depend on the source.
    PullState { uuid: String },
    /// Pull what these disks need, and resume the machine if it waits for that.
    Pull { uuid: String },
    /// All disks are complete: the machine reacts to I/O errors again as in this configuration, and these files are deleted.
    EndPull {
        uuid: String,
        configuration: String,
        obsolete_files: Vec<PathBuf>,
    },
    /// Start the hypervisor of a machine, which waits for its memory at this socket.
    ReceiveMemory {
        uuid: String,
        configuration: String,
        socket: PathBuf,
    },
    /// Start the machine, which has all of its memory.
    Start { uuid: String },
    /// Delete the socket of a migration that has failed.
    RemoveSocket { path: PathBuf },
    /// Whether the hypervisor has exactly these files open for the machine.
    VerifyDisks { uuid: String, paths: Vec<PathBuf> },
    /// Whether the machine runs there.
    State { uuid: String },
    /// Answer when the machine runs there.
    AwaitStart { uuid: String },
    /// Define the machine, which is shut off.
    Define {
        uuid: String,
        configuration: String,
        /// Its snapshots and checkpoints, which are in the files that have come.
        #[serde(default, skip_serializing_if = "MachineHistory::is_empty")]
        history: MachineHistory,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tpm: Option<TpmContent>,
    },
    /// The machine is there, in this state: do what is left to do, and delete these files.
    Complete {
        uuid: String,
        state: FarState,
        starts_with_host: bool,
        obsolete_files: Vec<PathBuf>,
    },
    /// Switch the machine off: it runs at the source.
    PowerOff { uuid: String },
    /// The report of the migration, for the user at that host.
    Report { document: serde_json::Value },
}

/// The state of the emulated TPM of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TpmContent {
    /// How swtpm stores it: `folder` or `single`.
    store: String,
    /// The file, in base64.
    state: String,
}

impl TpmContent {
    pub(crate) fn of(tpm: &StoppedTpm) -> Self {
        Self {
            store: tpm.store.word().to_owned(),
            state: STANDARD.encode(&tpm.bytes),
        }
    }

    /// The content of a file that is stored in this way.
    pub(crate) fn bytes_for(&self, store: TpmStore) -> std::result::Result<Vec<u8>, String> {
        if self.store != store.word() {
            return Err(format!(
                "the state of its TPM is stored as {} there, and as {} here",
                store.word(),
                self.store
            ));
        }
        STANDARD
            .decode(&self.state)
            .map_err(|error| format!("the state of its TPM: {error}"))
    }
}

/// A machine that may come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CheckRequest {
    pub(crate) name: String,
    pub(crate) uuid: String,
    /// With the paths of that host.
    pub(crate) configuration: String,
    pub(crate) disks: Vec<CheckedDisk>,
}

/// A disk that may come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CheckedDisk {
    pub(crate) path: PathBuf,
    pub(crate) size_bytes: u64,
    /// Bytes that it is expected to take.
    pub(crate) expected_bytes: u64,
    /// Whether it is copied or pulled.
    #[serde(default, skip_serializing_if = "DiskForm::is_copy")]
    pub(crate) form: DiskForm,
}

/// How the disk of a machine comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DiskForm {
    /// A copy, before the machine runs there.
    #[default]
    Copy,
    /// An overlay, which gets its content while the machine runs there.
    Overlay,
}

impl DiskForm {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
    fn is_copy(&self) -> bool {
        *self == Self::Copy
    }
}

/// An image whose backing file is an export of the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OverlayDisk {
    pub(crate) path: PathBuf,
    pub(crate) size_bytes: u64,
    /// At that host.
    pub(crate) socket: PathBuf,
    pub(crate) export: String,
}

/// A disk that depends on the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PullingDisk {
    /// Its target in the machine.
    pub(crate) disk: String,
    pub(crate) path: PathBuf,
    /// At that host.
    pub(crate) socket: PathBuf,
    pub(crate) export: String,
    /// 0 if nothing is being pulled.
    pub(crate) done_bytes: u64,
    pub(crate) total_bytes: u64,
}

/// A disk that the machine had there before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FormerDisk {
    /// Its target in the machine.
    pub(crate) disk: String,
    pub(crate) path: PathBuf,
    /// None if it is to be detected.
    pub(crate) format: Option<String>,
}

/// The answer of the other host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum FarAnswer {
    Described {
        program: String,
        /// The socket of its hypervisor.
        socket: Option<PathBuf>,
        /// The default folder for images.
        image_folder: Option<PathBuf>,
    },
    FormerDisks {
        disks: Vec<FormerDisk>,
    },
    Path {
        is_free: bool,
    },
    Checked {
        obstacles: Vec<String>,
        notes: Vec<String>,
    },
    Done {},
    State {
        state: FarState,
    },
    Pulling {
        state: FarState,
        disks: Vec<PullingDisk>,
        /// Why a disk is not pulled now.
        problem: Option<String>,
    },
    Refused {
        reason: String,
    },
}

/// The state of a machine at the other host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FarState {
    /// It is not defined there.
    Absent,
    ShutOff,
    Running,
    /// It is paused, or waits for its memory.
    Paused,
}

impl std::fmt::Display for FarState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Absent => "not defined",
            Self::ShutOff => "shut off",
            Self::Running => "running",
            Self::Paused => "paused",
        })
    }
}

/// A machine whose disks are being pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pulling {
    pub(crate) state: FarState,
    /// Those that are not complete.
    pub(crate) disks: Vec<PullingDisk>,
    /// Why a disk is not pulled now.
    pub(crate) problem: Option<String>,
}

/// The `holdfast` of the other host.
pub struct FarHost(RequestLink);

impl FarHost {
    /// Starts it by `tools`. `uri` is the address of its hypervisor.
    pub fn start(tools: &dyn StreamTools, uri: &str) -> Result<Self> {
        let [verb, version] = RECEIVE_MACHINE_COMMAND;
        RequestLink::start(tools, &[verb, version, "--connect", uri]).map(Self)
    }

    pub(crate) fn of_link(link: RequestLink) -> Self {
        Self(link)
    }

    /// Its name.
    pub fn host(&self) -> &str {
        self.0.host()
    }

    /// # Errors
    /// The host refuses, or does not answer.
    pub(crate) fn ask(&self, request: &FarRequest) -> Result<FarAnswer> {
        match self.0.ask(request)? {
            FarAnswer::Refused { reason } => Err(Error::Refused {
                host: self.host().to_owned(),
                reason,
            }),
            answer => Ok(answer),
        }
    }

    /// The disks that a machine had there before.
    pub(crate) fn former_disks(&self, uuid: &str) -> Result<Vec<FormerDisk>> {
        self.former(&FarRequest::FormerDisks { uuid: uuid.to_owned() })
    }

    /// The files that a machine had there before. Each is named by its file name, [`BACKING`] or [`NVRAM`].
    pub(crate) fn former_files(&self, uuid: &str) -> Result<Vec<FormerDisk>> {
        self.former(&FarRequest::FormerFiles { uuid: uuid.to_owned() })
    }

    fn former(&self, request: &FarRequest) -> Result<Vec<FormerDisk>> {
        match self.ask(request)? {
            FarAnswer::FormerDisks { disks } => Ok(disks),
            _ => Err(self.other_version()),
        }
    }

    /// Whether a new disk can have this path there: no file has it, or only that of an interrupted copy.
    pub(crate) fn is_free(&self, path: &Path) -> Result<bool> {
        match self.ask(&FarRequest::Path { path: path.to_owned() })? {
            FarAnswer::Path { is_free } => Ok(is_free),
            _ => Err(self.other_version()),
        }
    }

    /// Whether an image that is pulled can have this path there.
    pub(crate) fn is_free_for_overlay(&self, path: &Path) -> Result<bool> {
        match self.ask(&FarRequest::OverlayPath { path: path.to_owned() })? {
            FarAnswer::Path { is_free } => Ok(is_free),
            _ => Err(self.other_version()),
        }
    }

    /// Asks for the disks that depend on the source, by one of the requests about them.
    pub(crate) fn pulling(&self, request: &FarRequest) -> Result<Pulling> {
        match self.ask(request)? {
            FarAnswer::Pulling { state, disks, problem } => Ok(Pulling { state, disks, problem }),
            _ => Err(self.other_version()),
        }
    }

    /// The state of a machine there.
    pub(crate) fn state(&self, uuid: &str) -> Result<FarState> {
        match self.ask(&FarRequest::State { uuid: uuid.to_owned() })? {
            FarAnswer::State { state } => Ok(state),
            _ => Err(self.other_version()),
        }
    }

    /// Gives the host the report of a migration to it.
    ///
    /// # Errors
    /// The host does not answer.
    pub fn send_report(&self, document: serde_json::Value) -> Result<()> {
        self.ask(&FarRequest::Report { document }).map(drop)
    }

    pub(crate) fn other_version(&self) -> Error {
        self.0.other_version()
    }
}

#[cfg(test)]
mod tests {
    use holdfast_engine::StoppedTpm;
    use holdfast_host::TpmStore;

    use super::{FarAnswer, FarRequest, TpmContent};
    use crate::request_link::assert_lines_unchanged;

    /// Requests and answers of version 1, as docs/format/migration.md describes them.
    const REQUESTS: &str = include_str!("../tests/fixtures/requests-1.jsonl");
    const ANSWERS: &str = include_str!("../tests/fixtures/answers-1.jsonl");

    #[test]
    fn version_1_is_understood_and_written_as_it_was() {
        assert_lines_unchanged::<FarRequest>(REQUESTS);
        assert_lines_unchanged::<FarAnswer>(ANSWERS);
        assert_eq!([REQUESTS, ANSWERS].map(|lines| lines.lines().count()), [27, 11]);
    }

    #[test]
    fn the_state_of_a_tpm_is_stored_as_it_was() {
        let content = TpmContent::of(&StoppedTpm {
            store: TpmStore::Folder,
            bytes: vec![0, 255, 7],
        });
        assert_eq!(content.bytes_for(TpmStore::Folder), Ok(vec![0, 255, 7]));
        content.bytes_for(TpmStore::Single).unwrap_err();
    }

    #[test]
    fn unknown_requests_and_fields_are_refused() {
        for line in [
            r#"{"request":"format"}"#,
            r#"{"request":"state","uuid":"1","force":true}"#,
            r#"{"request":"state"}"#,
            "[]",
        ] {
            assert!(serde_json::from_str::<FarRequest>(line).is_err(), "{line}");
        }
    }
}
