//! The messages of an appliance: another machine, which has the disks of a guest and mounts their volumes.
//!
//! The parent first asks for the volumes, then mounts some of them, and then sends the requests of a file system, which
//! mean the volume that was mounted or named last.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};

use super::child::{ParentChannel, SharedChannel, answer, guarded, receive, send};
use super::message::{self, Message, OpenedFileSystem};
use super::parent::{Link, ReaderProcess, RemoteFileSystem, SharedLink};
use crate::{Content, Error, FileSystem, Result};

/// Most volumes of an appliance.
const VOLUME_COUNT_MAX: usize = 4096;
/// Most notes of an appliance.
const NOTE_COUNT_MAX: usize = 64;
/// Longest passphrase.
const PASSPHRASE_BYTES_MAX: usize = 1 << 20;

/// The contents that an appliance can report, by their numbers in messages.
const CONTENTS: [Content; 28] = [
    Content::Unknown,
    Content::Ext2,
    Content::Ext3,
    Content::Ext4,
    Content::Ntfs,
    Content::Fat,
    Content::ExFat,
    Content::Xfs,
    Content::Btrfs,
    Content::Zfs,
    Content::F2fs,
    Content::Apfs,
    Content::Swap,
    Content::Luks,
    Content::BitLocker,
    Content::Refs,
    Content::LvmMember,
    Content::MdMember,
    Content::Squashfs,
    Content::Iso9660,
    Content::Udf,
    Content::ReiserFs,
    Content::Jfs,
    Content::Nilfs2,
    Content::Erofs,
    Content::HfsPlus,
    Content::Bcachefs,
    Content::Empty,
];

/// What an appliance is asked to search.
#[derive(Clone, Default)]
pub struct ScanRequest {
    /// The names of its disks, in their order.
    pub disks: Vec<String>,
    /// Passphrases to try on encrypted volumes.
    pub passphrases: Vec<Vec<u8>>,
}

/// Passphrases are not shown.
impl fmt::Debug for ScanRequest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = formatter.debug_struct("ScanRequest");
        text.field("disks", &self.disks).finish_non_exhaustive()
    }
}

/// A volume that an appliance found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApplianceVolume {
    /// Its name as a user can name it: `vda:1`, `GROUP/VOLUME`, `md/NAME`.
    pub name: String,
    /// What it holds; of an encrypted volume that was opened, what is inside.
    pub content: Content,
    /// The label of its file system.
    pub label: Option<String>,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Why it cannot be mounted.
    pub problem: Option<String>,
}

/// The volumes of an appliance.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScanReport {
    /// The volumes; the number of one is its place in this list.
    pub volumes: Vec<ApplianceVolume>,
    /// What could not be assembled, and why.
    pub notes: Vec<String>,
}

/// The work of an appliance.
pub trait ApplianceVolumes {
    /// Assembles and searches the disks.
    fn scan(&mut self, request: &ScanRequest) -> Result<ScanReport>;

    /// Mounts a volume of the last report.
    fn mount(&mut self, volume: u32) -> Result<Box<dyn FileSystem>>;
}

/// An appliance as its parent sees it. Clones are the same appliance.
#[derive(Clone)]
pub struct Appliance {
    link: SharedLink<'static>,
}

impl Appliance {
    /// An appliance whose connection is `process`.
    pub fn new(process: Box<dyn ReaderProcess>) -> Self {
        Self {
            link: Arc::new(Mutex::new(Link::new(process, None))),
        }
    }

    /// Has the appliance assemble and search its disks.
    pub fn scan(&self, request: &ScanRequest) -> Result<ScanReport> {
        let mut link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = link.request(&scan_message(request), message::VOLUMES, &mut |_| Ok(()))?;
        report_of(&answer)
    }

    /// Has the appliance mount a volume.
    pub fn mount(&self, volume: u32) -> Result<RemoteFileSystem<'static>> {
        RemoteFileSystem::mount(Arc::clone(&self.link), volume)
    }
}

/// Serves the requests of a parent until it closes the connection.
///
/// # Errors
/// The connection breaks, or the parent sends what no parent sends.
pub fn serve_appliance(
    input: Box<dyn Read + Send>,
    output: Box<dyn Write + Send>,
    volumes: &mut dyn ApplianceVolumes,
) -> io::Result<()> {
    let channel = ParentChannel::shared(input, output);
    let mut mounted = BTreeMap::new();
    let mut current = None;
    while let Some(request) = receive(&channel)? {
        let result = match request.tag {
            message::USE => {
                current = request.fields().u32(0).ok();
                continue;
            }
            message::SCAN => guarded(|| Ok(report_message(&volumes.scan(&scan_of(&request)?)?))),
            message::MOUNT => guarded(|| {
                let volume = request.fields().u32(0)?;
                if let std::collections::btree_map::Entry::Vacant(place) = mounted.entry(volume) {
                    place.insert(volumes.mount(volume)?);
                }
                current = Some(volume);
                opened_message(mounted.get(&volume).map(|file_system| &**file_system))
            }),
            _ => match current.and_then(|volume| mounted.get_mut(&volume)) {
                Some(file_system) => answered(&channel, &mut **file_system, &request),
                None => Err(Error::Reader("has no such volume".to_owned())),
            },
        };
        send(&channel, &result.unwrap_or_else(|error| message::failed(&error)))?;
    }
    Ok(())
}

fn answered(channel: &SharedChannel, file_system: &mut dyn FileSystem, request: &Message) -> Result<Message> {
    guarded(|| answer(channel, file_system, request))
}

fn opened_message(file_system: Option<&dyn FileSystem>) -> Result<Message> {
    let file_system = file_system.ok_or_else(|| Error::Reader("has no such volume".to_owned()))?;
    Ok(message::opened(&OpenedFileSystem {
        root: file_system.root(),
        ignores_case: file_system.ignores_case(),
        notes: file_system.notes(),
    }))
}

fn count_of(list: usize) -> u32 {
    u32::try_from(list).unwrap_or(0)
}

fn scan_message(request: &ScanRequest) -> Message {
    let message = Message::new(message::SCAN).u32(count_of(request.disks.len()));
    let message = request.disks.iter().fold(message, |message, disk| message.text(disk));
    let message = message.u32(count_of(request.passphrases.len()));
    let passphrases = request.passphrases.iter();
    passphrases.fold(message, |message, passphrase| {
        message.u32(count_of(passphrase.len())).bytes(passphrase)
    })
}

fn scan_of(message: &Message) -> Result<ScanRequest> {
    let fields = message.fields();
    let mut request = ScanRequest::default();
    let mut at = 4;
    for _ in 0..fields.u32(0)? {
        request.disks.push(message::text_at(&fields, &mut at)?);
    }
    let count = fields.u32(at)?;
    at += 4;
    for _ in 0..count {
        let length = (fields.u32(at)? as usize).min(PASSPHRASE_BYTES_MAX);
        request.passphrases.push(fields.bytes(at + 4, length)?.to_vec());
        at += 4 + length;
    }
    Ok(request)
}

fn report_message(report: &ScanReport) -> Message {
    let volumes = report.volumes.iter().take(VOLUME_COUNT_MAX);
    let mut message = Message::new(message::VOLUMES).u32(count_of(volumes.len()));
    for volume in volumes {
        let number = CONTENTS.iter().position(|content| *content == volume.content);
        message = message
            .u8(number.and_then(|number| u8::try_from(number).ok()).unwrap_or(0))
            .u64(volume.size_bytes)
            .text(&volume.name)
            .text(volume.label.as_deref().unwrap_or_default())
            .text(volume.problem.as_deref().unwrap_or_default());
    }
    let notes = report.notes.iter().take(NOTE_COUNT_MAX);
    notes.fold(message, |message, note| message.text(note))
}

fn report_of(message: &Message) -> Result<ScanReport> {
    let fields = message.fields();
    let count = fields.u32(0)? as usize;
    if count > VOLUME_COUNT_MAX {
        return Err(fields.damaged("it has too many volumes"));
    }
    let mut report = ScanReport::default();
    let mut at = 4;
    for _ in 0..count {
        let content = CONTENTS.get(usize::from(fields.u8(at)?)).copied();
        let size_bytes = fields.u64(at + 1)?;
        at += 9;
        let mut text = || message::text_at(&fields, &mut at);
        let (name, label, problem) = (text()?, text()?, text()?);
        report.volumes.push(ApplianceVolume {
            name,
            content: content.ok_or_else(|| fields.damaged("it has an unknown content"))?,
            label: Some(label).filter(|label| !label.is_empty()),
            size_bytes,
            problem: Some(problem).filter(|problem| !problem.is_empty()),
        });
    }
    while at < fields.len() && report.notes.len() < NOTE_COUNT_MAX {
        report.notes.push(message::text_at(&fields, &mut at)?);
    }
    Ok(report)
}
