//! The files of an image layout, in a folder or in a tar archive, and streams of archives.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek as _, SeekFrom};
use std::num::NonZero;
use std::path::{Path, PathBuf};

use aws_lc_rs::digest::{Context, SHA256};
use holdfast_archive::{EndMarker, Packing, TreeEntryKind, TreeTarReader, Unpacked};
use holdfast_block::{Threads, open_past_leases};

use super::next_entry;
use super::root_path::components;
use crate::ContainerContentError;
use crate::job::{Job, Result};

/// Limit of a document: an index, a manifest or a configuration. Registries have the same limit.
const DOCUMENT_BYTES_MAX: u64 = 4 << 20;
/// Files in an archive of images.
const MEMBER_COUNT_MAX: usize = 100_000;
/// Bytes of their names, and of the targets of links.
const MEMBER_NAME_BYTES_MAX: usize = 32 << 20;
const COPY_BYTES: usize = 1 << 20;

/// Compressions that have to be unpacked by their program.
const OTHER_PACKERS: &[(&[u8], &str)] = &[
    (b"BZh", "bzip2"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"LZIP", "lzip"),
    (b"\x89LZO", "lzop"),
];

/// Unpacks an archive if it is compressed.
pub(super) fn unpacked(
    stream: Box<dyn Read + Send>,
    thread_count: usize,
    origin: &str,
) -> Result<Box<dyn Read + Send>> {
    let failed = |source| ContainerContentError::Archive {
        origin: origin.to_owned(),
        source: holdfast_archive::Error::Read { offset: 0, source },
    };
    let threads = Threads {
        count: NonZero::new(thread_count).unwrap_or(NonZero::<usize>::MIN),
        load_max: None,
    };
    let mut stream = Unpacked::new(stream, threads).map_err(failed)?;
    let mut start = Vec::new();
    stream.by_ref().take(4).read_to_end(&mut start).map_err(failed)?;
    if let Some((_, name)) = OTHER_PACKERS.iter().find(|(magic, _)| start.starts_with(magic)) {
        return Err(ContainerContentError::Archive {
            origin: origin.to_owned(),
            source: holdfast_archive::Error::Unsupported {
                feature: format!("compression by {name}"),
                detail: format!("unpack it on the way: {name} -dc FILE, and give the output as the archive"),
            },
        }
        .into());
    }
    Ok(Box::new(std::io::Cursor::new(start).chain(stream)))
}

/// A SHA-256 in its usual form: `sha256:` and 64 hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BlobDigest {
    hex: String,
}

impl BlobDigest {
    /// Parses a digest.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let hex = text.strip_prefix("sha256:").filter(|hex| is_hex(hex));
        let hex = hex.ok_or_else(|| ContainerContentError::BadBlob {
            digest: text.chars().take(100).collect(),
            reason: "the digest is not sha256: and 64 digits".to_owned(),
        })?;
        Ok(Self { hex: hex.to_owned() })
    }

    pub(super) fn text(&self) -> String {
        format!("sha256:{}", self.hex)
    }

    fn file_name(&self) -> String {
        format!("blobs/sha256/{}", self.hex)
    }

    pub(super) fn bad(&self, reason: impl Into<String>) -> crate::Error {
        ContainerContentError::BadBlob {
            digest: self.text(),
            reason: reason.into(),
        }
        .into()
    }

    pub(super) fn matches(&self, context: Context) -> bool {
        let hash = context.finish();
        let digits = hash.as_ref().iter().flat_map(|byte| [byte >> 4, byte & 0xf]);
        let hex = digits.filter_map(|digit| char::from_digit(u32::from(digit), 16));
        hex.eq(self.hex.chars())
    }
}

fn is_hex(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// A blob that its reader has to check.
#[derive(Debug, Clone)]
pub(super) struct BlobName {
    pub(super) digest: BlobDigest,
    /// Its length, if it is known.
    pub(super) size_bytes: Option<u64>,
    /// Its file, if that is not the one of its digest.
    pub(super) file: Option<String>,
}

impl BlobName {
    fn file_name(&self) -> String {
        self.file.clone().unwrap_or_else(|| self.digest.file_name())
    }
}

/// The files of a layout.
pub(super) enum LayoutFiles {
    Folder(PathBuf),
    Archive(LayoutArchive),
}

/// A tar archive that is not compressed, with the places of its files.
pub(super) struct LayoutArchive {
    path: PathBuf,
    members: BTreeMap<Vec<u8>, ArchivedFile>,
}

enum ArchivedFile {
    Data { offset: u64, size_bytes: u64 },
    Link(Vec<u8>),
}

impl ArchivedFile {
    fn target_bytes(&self) -> usize {
        match self {
            Self::Data { .. } => 0,
            Self::Link(target) => target.len(),
        }
    }
}

impl LayoutFiles {
    pub(super) fn open(path: &Path, job: Job<'_>) -> Result<Self> {
        if path.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        LayoutArchive::open(path, job).map(Self::Archive)
    }

    /// Opens a file of the layout; `None` if it does not exist.
    pub(super) fn open_file(&self, name: &str) -> Result<Option<LayoutFile>> {
        match self {
            Self::Folder(folder) => {
                let path = folder.join(name);
                let file = match open_regular(&path) {
                    Ok(file) => file,
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                    Err(source) => return Err(unreadable(&path, source)),
                };
                let metadata = file.metadata().map_err(|source| unreadable(&path, source))?;
                let size_bytes = metadata.len();
                Ok(Some(LayoutFile {
                    stream: Box::new(file),
                    size_bytes,
                }))
            }
            Self::Archive(archive) => archive.open_file(name.as_bytes()),
        }
    }

    /// The text of a document; `None` if it does not exist.
    pub(super) fn document(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(file) = self.open_file(name)? else {
            return Ok(None);
        };
        let bad = |reason: String| ContainerContentError::BadDocument {
            document: name.to_owned(),
            reason,
        };
        if file.size_bytes > DOCUMENT_BYTES_MAX {
            return Err(bad(format!("it has {} bytes, more than 4 MiB", file.size_bytes)).into());
        }
        let mut bytes = Vec::new();
        let read = file.stream.take(DOCUMENT_BYTES_MAX).read_to_end(&mut bytes);
        read.map_err(|error| bad(error.to_string()))?;
        Ok(Some(bytes))
    }

    /// The text of a document that is a blob, after its digest was checked.
    pub(super) fn blob_document(&self, blob: &BlobName) -> Result<Vec<u8>> {
        let bytes = self.document(&blob.file_name())?;
        let bytes = bytes.ok_or_else(|| blob.digest.bad("it is missing"))?;
        check_size(blob, bytes.len() as u64)?;
        let mut context = Context::new(&SHA256);
        context.update(&bytes);
        if !blob.digest.matches(context) {
            return Err(blob.digest.bad("its content has another digest: it is damaged"));
        }
        Ok(bytes)
    }

    /// Opens a blob, whose content [`check_blob`](Self::check_blob) has checked.
    pub(super) fn open_blob(&self, blob: &BlobName) -> Result<LayoutFile> {
        let file = self.open_file(&blob.file_name())?;
        file.ok_or_else(|| blob.digest.bad("it is missing"))
    }

    /// Reads a blob and compares its length and digest.
    pub(super) fn check_blob(&self, blob: &BlobName, job: Job<'_>) -> Result<()> {
        let mut file = self.open_blob(blob)?;
        check_size(blob, file.size_bytes)?;
        let mut context = Context::new(&SHA256);
        let mut buffer = vec![0; COPY_BYTES];
        loop {
            job.interrupt.check()?;
            let read = file.stream.read(&mut buffer);
            let count = read.map_err(|error| blob.digest.bad(error.to_string()))?;
            if count == 0 {
                break;
            }
            context.update(buffer.get(..count).unwrap_or_default());
            job.progress.advance(count as u64);
        }
        if blob.digest.matches(context) {
            Ok(())
        } else {
            Err(blob.digest.bad("its content has another digest: it is damaged"))
        }
    }
}

fn check_size(blob: &BlobName, actual: u64) -> Result<()> {
    match blob.size_bytes {
        Some(expected) if expected != actual => {
            let reason = format!("it has {actual} bytes, the image says {expected}");
            Err(blob.digest.bad(reason))
        }
        _ => Ok(()),
    }
}

/// A file of a layout.
pub(super) struct LayoutFile {
    pub(super) stream: Box<dyn Read + Send>,
    pub(super) size_bytes: u64,
}

fn unreadable(path: &Path, source: std::io::Error) -> crate::Error {
    crate::Error::File {
        action: "read",
        path: path.to_owned(),
        source,
    }
}

/// Opens a regular file; a pipe does not block.
fn open_regular(path: &Path) -> std::io::Result<File> {
    let open = |flags| rustix::fs::open(path, flags, rustix::fs::Mode::empty());
    let file = File::from(open_past_leases(rustix::fs::OFlags::CLOEXEC, open)?);
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(std::io::Error::other("it is not a regular file"))
    }
}

impl LayoutArchive {
    fn open(path: &Path, job: Job<'_>) -> Result<Self> {
        let mut file = open_regular(path).map_err(|source| unreadable(path, source))?;
        let no_layout = |reason: &str| ContainerContentError::NoLayout {
            path: path.to_owned(),
            reason: reason.to_owned(),
        };
        let mut start = Vec::new();
        let read = file.by_ref().take(4).read_to_end(&mut start);
        read.and_then(|_| file.rewind())
            .map_err(|source| unreadable(path, source))?;
        if Packing::sniff(&start) != Packing::None || OTHER_PACKERS.iter().any(|(magic, _)| start.starts_with(magic)) {
            return Err(no_layout("it is compressed; unpack it first, and give the tar archive or the folder").into());
        }
        let origin = path.display().to_string();
        let mut reader = TreeTarReader::new(BufReader::with_capacity(COPY_BYTES, file), EndMarker::Optional);
        let mut members = BTreeMap::new();
        let mut name_bytes = 0;
        while let Some(entry) = next_entry(&mut reader, &origin)? {
            job.interrupt.check()?;
            if members.len() >= MEMBER_COUNT_MAX {
                return Err(no_layout("it has more than 100000 files").into());
            }
            let parts = components(&entry.path)?;
            let name = parts.join(&b'/');
            let member = match entry.kind {
                // A file with holes is never written by programs for images.
                TreeEntryKind::File if entry.extents.len() <= 1 => ArchivedFile::Data {
                    offset: reader.offset(),
                    size_bytes: entry.size_bytes,
                },
                TreeEntryKind::HardLink(target) => ArchivedFile::Link(components(&target)?.join(&b'/')),
                TreeEntryKind::SymbolicLink(target) => match resolved(&parts, &target) {
                    Some(target) => ArchivedFile::Link(target),
                    None => continue,
                },
                _ => continue,
            };
            name_bytes += name.len() + member.target_bytes();
            if name_bytes > MEMBER_NAME_BYTES_MAX {
                return Err(no_layout("the names of its files have more than 32 MiB").into());
            }
            members.insert(name, member);
        }
        Ok(Self {
            path: path.to_owned(),
            members,
        })
    }

    fn open_file(&self, name: &[u8]) -> Result<Option<LayoutFile>> {
        const LINK_COUNT_MAX: usize = 8;
        let mut name = name;
        for _ in 0..LINK_COUNT_MAX {
            match self.members.get(name) {
                None => return Ok(None),
                Some(ArchivedFile::Link(target)) => name = target,
                Some(ArchivedFile::Data { offset, size_bytes }) => {
                    let failed = |source| unreadable(&self.path, source);
                    let mut file = open_regular(&self.path).map_err(failed)?;
                    file.seek(SeekFrom::Start(*offset)).map_err(failed)?;
                    return Ok(Some(LayoutFile {
                        stream: Box::new(file.take(*size_bytes)),
                        size_bytes: *size_bytes,
                    }));
                }
            }
        }
        Ok(None)
    }
}

/// The name that a relative link leads to; `None` if it leads out of the archive.
fn resolved(link: &[&[u8]], target: &[u8]) -> Option<Vec<u8>> {
    if target.starts_with(b"/") {
        return None;
    }
    let (_, parent) = link.split_last()?;
    let mut parts = parent.to_vec();
    for part in target.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join(&b'/'))
}
