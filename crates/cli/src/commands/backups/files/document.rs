//! Files and volumes in documents and on lines.

use std::borrow::Cow;

use holdfast_engine::{GuestVolume, ReaderChoice, UnreadableFile, WalkReport, WalkedFile};
use holdfast_guest_files::FileKind;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::Serialize;

use super::options::reader_word;
use crate::context::Context;
use crate::errors::advice_on_device;
use crate::exit::Exit;
use crate::output::printable;

/// A volume.
#[derive(Debug, Serialize)]
pub(super) struct VolumeDocument {
    pub(super) name: String,
    pub(super) disks: Vec<String>,
    pub(super) content: &'static str,
    pub(super) label: Option<String>,
    pub(super) size_bytes: u64,
    pub(super) is_readable: bool,
    /// What reads it.
    pub(super) reader: Option<&'static str>,
    /// Why it cannot be read, or not by a process.
    pub(super) reason: Option<String>,
}

impl VolumeDocument {
    pub(super) fn new(found: &GuestVolume, choice: ReaderChoice) -> Self {
        let volume = &found.volume;
        let reader = found.reader(choice);
        Self {
            name: volume.name.clone(),
            disks: volume.disks.clone(),
            content: volume.content.name(),
            label: volume.label.clone(),
            size_bytes: volume.size_bytes,
            is_readable: reader.is_some(),
            reader: reader.map(reader_word),
            reason: found.reason(),
        }
    }
}

/// A file or directory.
#[derive(Debug, Serialize)]
pub(super) struct FileDocument {
    pub(super) path: String,
    pub(super) kind: &'static str,
    pub(super) size_bytes: u64,
    pub(super) mode: Option<String>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) modified: Option<String>,
    pub(super) target: Option<String>,
}

impl From<&WalkedFile> for FileDocument {
    fn from(file: &WalkedFile) -> Self {
        let metadata = &file.metadata;
        let kind = match metadata.kind {
            FileKind::File => "file",
            FileKind::Directory => "directory",
            FileKind::Link => "link",
            FileKind::Special => "special",
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self {
            path: text(&file.path),
            kind,
            size_bytes: metadata.size_bytes,
            mode: metadata.mode.map(|mode| format!("{mode:04o}")),
            uid: metadata.uid,
            gid: metadata.gid,
            modified: modified(file).map(|time| time.to_string()),
            target: file.target.as_deref().map(text),
        }
    }
}

fn modified(file: &WalkedFile) -> Option<Timestamp> {
    let time = file.metadata.modified?;
    Timestamp::new(time.seconds, i32::try_from(time.nanoseconds).unwrap_or(0)).ok()
}

/// A file that could not be read.
#[derive(Debug, Serialize)]
pub(super) struct FailureDocument {
    pub(super) path: String,
    pub(super) reason: String,
}

impl From<&UnreadableFile> for FailureDocument {
    fn from(file: &UnreadableFile) -> Self {
        Self {
            path: file.path.clone(),
            reason: file.reason.clone(),
        }
    }
}

/// The exit code of a command that walked through files.
pub(super) fn walk_exit(walked: &WalkReport) -> Exit {
    match &walked.disk_error {
        Some(error) => advice_on_device(error).exit,
        None if walked.unreadable.is_empty() => Exit::Ok,
        None => Exit::Error,
    }
}

/// Warns of files that could not be read.
pub(super) fn warn_of(failures: &[UnreadableFile], context: &Context) {
    for failure in failures {
        context
            .console()
            .warning(&format!("{}: {}", failure.path, failure.reason));
    }
}

/// What a line shows beside the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LineDetail {
    Name,
    Long,
}

/// The line of a file. Its name is the path, or the part of it behind `folder`.
pub(super) fn line(file: &WalkedFile, folder: &[u8], detail: LineDetail, zone: &TimeZone) -> String {
    let name = file.path.strip_prefix(folder).unwrap_or(&file.path);
    let mut name = shown(name).into_owned();
    if file.metadata.kind == FileKind::Directory {
        name.push('/');
    }
    if detail == LineDetail::Name {
        return format!("{name}\n");
    }
    if let Some(target) = &file.target {
        name = format!("{name} -> {}", shown(target));
    }
    let owner = |id: Option<u32>| id.map_or_else(|| "-".to_owned(), |id| id.to_string());
    let time = modified(file).map(|time| time.to_zoned(zone.clone()).strftime("%Y-%m-%d %H:%M").to_string());
    format!(
        "{} {:>5} {:>5} {:>12}  {:16}  {name}\n",
        mode_text(file),
        owner(file.metadata.uid),
        owner(file.metadata.gid),
        file.metadata.size_bytes,
        time.unwrap_or_else(|| "-".to_owned()),
    )
}

fn shown(name: &[u8]) -> Cow<'_, str> {
    match String::from_utf8_lossy(name) {
        Cow::Borrowed(text) => printable(text),
        Cow::Owned(text) => Cow::Owned(printable(&text).into_owned()),
    }
}

/// Kind and permissions, as in `ls -l`.
fn mode_text(file: &WalkedFile) -> String {
    let kind = match file.metadata.kind {
        FileKind::File => '-',
        FileKind::Directory => 'd',
        FileKind::Link => 'l',
        FileKind::Special => 's',
    };
    let Some(mode) = file.metadata.mode else {
        return format!("{kind}---------");
    };
    let mut text = kind.to_string();
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (bits & 1 != 0, mode & special != 0) {
            (true, false) => 'x',
            (false, false) => '-',
            (true, true) => letter,
            (false, true) => letter.to_ascii_uppercase(),
        });
    }
    text
}
