//! The requests to a running server, and their answers: one line of JSON each. `docs/serving.md` describes them.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Version of the requests and answers.
const CONTROL_VERSION: u32 = 1;
/// Longest request in bytes.
pub(super) const REQUEST_BYTES_MAX: usize = 256 << 10;
/// Exports that one request can add.
const ADDED_COUNT_MAX: usize = 1024;

/// A request to a running server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case")]
pub enum ControlRequest {
    /// Describe the server, its exports and their clients.
    List,
    /// Add exports.
    Add(AddedExports),
    /// Remove an export.
    Remove {
        /// Its name.
        export: String,
        /// Whether the sessions of its clients are ended.
        #[serde(default)]
        force: bool,
    },
    /// End the server as by an interrupt.
    Stop,
}

/// Exports to add.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddedExports {
    /// What to serve.
    pub exports: Vec<AddedExport>,
    /// How writes of clients are treated.
    #[serde(default)]
    pub writes: AddedWrites,
    /// The machine that images belong to.
    #[serde(default)]
    pub machine: Option<String>,
}

/// An export to add.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AddedExport {
    /// The disks of a snapshot of the server's repository.
    Snapshot {
        /// The name of the snapshot, or of a disk of it.
        name: String,
    },
    /// An image.
    Image {
        /// Its absolute path.
        path: PathBuf,
        /// The name of the disk; by default, that of the file.
        #[serde(default)]
        name: Option<String>,
        /// Its format; by default, its content decides.
        #[serde(default)]
        format: Option<String>,
        /// Files and folders that it may refer to.
        #[serde(default)]
        allow: Vec<PathBuf>,
    },
}

/// How writes to added exports are treated.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AddedWrites {
    /// They are refused.
    #[default]
    Refuse,
    /// They change images. Writes to snapshots are discarded at the end.
    InPlace,
    /// They are discarded at the end.
    Discard,
    /// They are kept in this folder.
    Keep(PathBuf),
}

/// The line of a request.
#[derive(Debug, Serialize, Deserialize)]
struct RequestLine {
    version: u32,
    #[serde(flatten)]
    request: ControlRequest,
}

/// The line of an answer.
#[derive(Debug, Serialize, Deserialize)]
struct AnswerLine {
    version: u32,
    #[serde(flatten)]
    answer: ControlAnswer,
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ControlAnswer {
    /// The server, for `list`.
    Server(Box<ServerStatus>),
    /// The added exports, for `add`.
    Added(Vec<ExportStatus>),
    /// For `remove`.
    Removed {
        /// Clients whose sessions were ended.
        ended_clients: usize,
        /// Whether the device still has a request in progress.
        busy: bool,
    },
    /// For `stop`: the server ends.
    Stopping,
    /// The request failed.
    Error(ControlError),
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlError {
    /// The kind of the error.
    pub kind: ControlErrorKind,
    /// The error, from the outermost cause to the innermost.
    pub messages: Vec<String>,
}

/// The kind of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ControlErrorKind {
    /// The request is not valid.
    Invalid,
    /// The server does not know this version.
    Version,
    /// There is no such export, snapshot or disk.
    NotFound,
    /// More than one snapshot matches.
    Ambiguous,
    /// A snapshot is to be added, and the server has no repository.
    NoRepository,
    /// The name is in use.
    Exists,
    /// Clients are connected.
    InUse,
    /// Another program uses an image, an overlay or the repository.
    Locked,
    /// Stored data or an image is damaged.
    Damage,
    /// An export was removed, and its last writes may be lost.
    WritesLost,
    /// Another error.
    Failed,
}

/// A server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStatus {
    /// The process.
    pub pid: u32,
    /// How long it runs.
    pub up_ms: u64,
    /// Addresses at which NBD clients connect.
    pub nbd: Vec<String>,
    /// Addresses at which iSCSI initiators connect.
    pub iscsi: Vec<String>,
    /// The socket, or the folder of sockets, of vhost-user.
    #[serde(default)]
    pub vhost_user: Vec<String>,
    /// Connections now, of all protocols.
    pub connections: usize,
    /// The maximum number of connections.
    pub connections_max: usize,
    /// Its exports.
    pub exports: Vec<ExportStatus>,
}

/// An export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportStatus {
    /// Its name.
    pub name: String,
    /// A description.
    pub description: String,
    /// The size of its disk.
    pub size_bytes: u64,
    /// Whether clients can write.
    pub writable: bool,
    /// The addresses that clients open.
    pub addresses: Vec<String>,
    /// Its vhost-user socket, if it has one.
    #[serde(default)]
    pub socket: Option<DiskSocket>,
    /// The connected clients.
    pub clients: Vec<ClientStatus>,
    /// Requests since it was added.
    pub traffic: TrafficStatus,
    /// Look-ups in its cache, if it has one.
    pub cache: Option<CacheStatus>,
}

/// The vhost-user socket of an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSocket {
    /// Its path. In answers, bytes that are not UTF-8 are replaced.
    #[serde(serialize_with = "as_text")]
    pub path: PathBuf,
    /// Whether a machine can continue with the next server of the disk.
    pub reconnect: bool,
}

/// A connected client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// `nbd`, `iscsi`...
    pub protocol: String,
    /// Its address, or user and process.
    pub peer: String,
    /// The name of an initiator.
    pub name: Option<String>,
    /// How long it is connected.
    pub connected_ms: u64,
}

/// Requests to the device of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[expect(missing_docs, reason = "as in holdfast_serve::registry::Traffic")]
pub struct TrafficStatus {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub flushes: u64,
    pub discards: u64,
    pub discard_bytes: u64,
    pub errors: u64,
}

/// Look-ups in a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct CacheStatus {
    pub hits: u64,
    pub misses: u64,
}

/// JSON has no text that is not UTF-8.
fn as_text<S: serde::Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

impl ControlError {
    pub(super) fn new(kind: ControlErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            messages: vec![message.into()],
        }
    }
}

/// The request of a client, as untrusted bytes.
pub(crate) fn parse_request(line: &[u8]) -> Result<ControlRequest, ControlError> {
    let invalid = |error: String| ControlError::new(ControlErrorKind::Invalid, error);
    let value: serde_json::Value = serde_json::from_slice(line).map_err(|error| invalid(error.to_string()))?;
    let version = value.get("version").and_then(serde_json::Value::as_u64);
    if version != Some(CONTROL_VERSION.into()) {
        let message = format!("this server knows version {CONTROL_VERSION} of requests");
        return Err(ControlError::new(ControlErrorKind::Version, message));
    }
    let line: RequestLine = serde_json::from_value(value).map_err(|error| invalid(error.to_string()))?;
    if let ControlRequest::Add(added) = &line.request {
        check_added(added).map_err(invalid)?;
    }
    Ok(line.request)
}

/// Refuses relative paths, which would start at the folder of the server, and requests without a bound.
fn check_added(added: &AddedExports) -> Result<(), String> {
    if added.exports.is_empty() || added.exports.len() > ADDED_COUNT_MAX {
        return Err(format!("a request adds 1 to {ADDED_COUNT_MAX} exports"));
    }
    let mut paths = Vec::new();
    for export in &added.exports {
        if let AddedExport::Image { path, allow, .. } = export {
            paths.push(path);
            paths.extend(allow);
        }
    }
    if let AddedWrites::Keep(folder) = &added.writes {
        paths.push(folder);
    }
    match paths.into_iter().find(|path| !path.is_absolute()) {
        Some(path) => Err(format!("{} is not an absolute path", path.display())),
        None => Ok(()),
    }
}

/// Encodes a request without the end of the line.
pub(super) fn encode_request(request: &ControlRequest) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec(&RequestLine {
        version: CONTROL_VERSION,
        request: request.clone(),
    })
}

/// Encodes an answer without the end of the line.
pub(super) fn encode_answer(answer: ControlAnswer) -> Vec<u8> {
    let line = AnswerLine {
        version: CONTROL_VERSION,
        answer,
    };
    // Texts and numbers can always be encoded.
    serde_json::to_vec(&line).unwrap_or_default()
}

/// The answer of a server.
pub(super) fn parse_answer(line: &[u8]) -> serde_json::Result<ControlAnswer> {
    serde_json::from_slice::<AnswerLine>(line).map(|line| line.answer)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    use std::path::Path;

    use super::{
        AddedExport, AddedExports, AddedWrites, ControlAnswer, ControlErrorKind, ControlRequest, DiskSocket,
        ExportStatus, TrafficStatus, encode_answer, encode_request, parse_answer, parse_request,
    };

    #[test]
    fn requests_and_answers_are_read_as_they_were_written() {
        let added = AddedExports {
            exports: vec![
                AddedExport::Snapshot {
                    name: "web1@latest:vda".to_owned(),
                },
                AddedExport::Image {
                    path: "/vm/a.qcow2".into(),
                    name: Some("vda".to_owned()),
                    format: None,
                    allow: vec!["/base".into()],
                },
            ],
            writes: AddedWrites::Keep("/overlays".into()),
            machine: Some("web1".to_owned()),
        };
        let remove = ControlRequest::Remove {
            export: "a".to_owned(),
            force: true,
        };
        for request in [
            ControlRequest::List,
            ControlRequest::Add(added),
            remove,
            ControlRequest::Stop,
        ] {
            assert_eq!(parse_request(&encode_request(&request).unwrap()), Ok(request));
        }
        let answer = ControlAnswer::Removed {
            ended_clients: 2,
            busy: false,
        };
        let line = encode_answer(answer.clone());
        assert_eq!(line, br#"{"version":1,"removed":{"ended_clients":2,"busy":false}}"#);
        assert_eq!(parse_answer(&line).unwrap(), answer);
        assert_eq!(
            encode_answer(ControlAnswer::Stopping),
            br#"{"version":1,"stopping":null}"#
        );
        assert_eq!(
            parse_answer(br#"{"version":1,"stopping":null}"#).unwrap(),
            ControlAnswer::Stopping
        );
    }

    /// A path that was not UTF-8 made the whole answer an empty line.
    #[test]
    fn a_path_that_is_not_utf_8_is_answered() {
        let socket = DiskSocket {
            path: OsStr::from_bytes(b"/run/\xff.sock").into(),
            reconnect: true,
        };
        let export = ExportStatus {
            name: "a".to_owned(),
            description: String::new(),
            size_bytes: 0,
            writable: false,
            addresses: Vec::new(),
            socket: Some(socket),
            clients: Vec::new(),
            traffic: TrafficStatus::default(),
            cache: None,
        };
        let line = encode_answer(ControlAnswer::Added(vec![export]));
        let Ok(ControlAnswer::Added(added)) = parse_answer(&line) else {
            panic!("{}", String::from_utf8_lossy(&line));
        };
        let path = &added[0].socket.as_ref().unwrap().path;
        assert_eq!(path, Path::new("/run/\u{fffd}.sock"));
    }

    #[test]
    fn invalid_requests_are_refused() {
        let kind = |line: &str| parse_request(line.as_bytes()).unwrap_err().kind;
        for line in ["", "{}", r#"{"request":"list"}"#, r#"{"version":2,"request":"list"}"#] {
            let expected = if line.is_empty() {
                ControlErrorKind::Invalid
            } else {
                ControlErrorKind::Version
            };
            assert_eq!(kind(line), expected, "{line}");
        }
        for line in [
            r#"{"version":1}"#,
            r#"{"version":1,"request":"format"}"#,
            r#"{"version":1,"request":"remove"}"#,
            r#"{"version":1,"request":"add","exports":[]}"#,
            r#"{"version":1,"request":"add","exports":[{"image":{"path":"a.raw"}}]}"#,
            r#"{"version":1,"request":"add","exports":[{"snapshot":{"name":"a"}}],"writes":{"keep":"."}}"#,
        ] {
            assert_eq!(kind(line), ControlErrorKind::Invalid, "{line}");
        }
    }
}
