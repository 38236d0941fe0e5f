//! NTFS.
//!
//! Everything is a file: record 0 of the master file table (MFT) describes the table itself, record 5 is the root
//! directory. A record holds attributes; an attribute is stored in the record or in runs of clusters. Compressed
//! attributes are decompressed. Content that only Windows can read is refused: encrypted files, files compressed by
//! WOF, deduplicated files, and files whose content is in a cloud.
//!
//! $LogFile is not replayed: a volume that was not unmounted cleanly is read as it is, and says so in a note.

mod attribute;
mod compression;
mod index;
mod record;
mod reparse;
mod stream;

use std::sync::Arc;

use holdfast_block::BlockDevice;

use self::attribute::Attribute;
use self::record::{FileRecord, RecordTable};
use self::reparse::ReparsePoint;
use self::stream::AttributeStream;
use crate::fields::Fields;
use crate::{
    DirectoryEntry, Error, FileKind, FilePiece, FileSystem, Metadata, ModifiedTime, NodeId, PIECE_BYTES_MAX, Result,
};

const RECORD_ROOT: u64 = 5;
const RECORD_LOG: u64 = 2;
/// Records below this one describe the file system.
const RECORD_FIRST_USER: u64 = 24;

/// Types of attributes.
mod kind {
    pub(super) const STANDARD_INFORMATION: u32 = 0x10;
    pub(super) const ATTRIBUTE_LIST: u32 = 0x20;
    pub(super) const FILE_NAME: u32 = 0x30;
    pub(super) const DATA: u32 = 0x80;
    pub(super) const INDEX_ROOT: u32 = 0x90;
    pub(super) const INDEX_ALLOCATION: u32 = 0xa0;
    pub(super) const BITMAP: u32 = 0xb0;
    pub(super) const REPARSE_POINT: u32 = 0xc0;
}

/// A flag of $STANDARD_INFORMATION: files of Interix, which ntfs-3g uses for links and devices, have it.
const FILE_FLAG_SYSTEM: u32 = 4;

/// Sizes from the boot sector.
#[derive(Debug, Clone, Copy)]
struct Geometry {
    cluster_bytes: u64,
    record_bytes: u64,
    index_bytes: u64,
    table_start: u64,
    volume_bytes: u64,
}

/// A file that was read last, opened.
struct OpenedFile {
    node: NodeId,
    stream: AttributeStream,
}

/// A file system of Windows.
pub(crate) struct NtfsFileSystem {
    device: Arc<dyn BlockDevice>,
    geometry: Geometry,
    records: RecordTable,
    opened: Option<OpenedFile>,
    notes: Vec<String>,
}

impl NtfsFileSystem {
    pub(crate) fn open(device: Arc<dyn BlockDevice>) -> Result<Self> {
        let geometry = geometry(&*device)?;
        let records = RecordTable::open(Arc::clone(&device), geometry)?;
        let mut file_system = Self {
            device,
            geometry,
            records,
            opened: None,
            notes: Vec::new(),
        };
        if file_system.is_dirty().unwrap_or(true) {
            file_system.notes.push(
                "NTFS was not unmounted cleanly, and its log is not replayed: the newest changes may be missing"
                    .to_owned(),
            );
        }
        Ok(file_system)
    }

    /// Whether the log has open clients: Windows would replay it.
    fn is_dirty(&mut self) -> Result<bool> {
        const NO_CLIENT: u16 = 0xffff;
        const FLAG_CLEAN: u16 = 2;
        let record = self.records.read(RECORD_LOG)?;
        let mut stream = self.stream(&record, kind::DATA, b"")?;
        let FilePiece::Data(page) = stream.piece(&*self.device, 0, 4096)? else {
            return Ok(false);
        };
        // An emptied log is filled with FF.
        if page.iter().all(|byte| *byte == 0xff) {
            return Ok(false);
        }
        let fields = Fields::new("NTFS log", &page);
        if fields.bytes(0, 4)? != b"RSTR" {
            return Ok(true);
        }
        let area = fields.from(usize::from(fields.u16(0x18)?))?;
        Ok(area.u16(0xc)? != NO_CLIENT && area.u16(0xe)? & FLAG_CLEAN == 0)
    }

    /// The record of a node, whose number includes the count of its uses.
    fn record(&self, node: NodeId) -> Result<FileRecord> {
        let record = self.records.read(node.0 & record::NUMBER_MASK)?;
        let uses = node.0 >> record::NUMBER_BITS;
        if uses != 0 && uses != u64::from(record.use_count) {
            return Err(Error::damaged(
                "NTFS directory",
                format!("an entry names a former file of record {}", record.number),
            ));
        }
        Ok(record)
    }

    fn stream(&self, record: &FileRecord, kind: u32, name: &[u8]) -> Result<AttributeStream> {
        let attributes = record.attributes_of(kind, name);
        AttributeStream::new(&attributes, self.geometry)
    }

    fn reparse_point(&self, record: &FileRecord) -> Result<Option<ReparsePoint>> {
        if record.attributes_of(kind::REPARSE_POINT, b"").is_empty() {
            return Ok(None);
        }
        let mut stream = self.stream(record, kind::REPARSE_POINT, b"")?;
        match stream.piece(&*self.device, 0, reparse::BYTES_MAX)? {
            FilePiece::Data(bytes) => ReparsePoint::parse(&bytes).map(Some),
            _ => Err(Error::damaged("NTFS reparse point", "it is empty")),
        }
    }

    /// What a regular record is for the guest. Links are reparse points, or files of Interix.
    fn kind_of(&self, record: &FileRecord, reparse: Option<&ReparsePoint>) -> Result<FileKind> {
        if let Some(reparse) = reparse
            && let Some(kind) = reparse.kind()
        {
            return Ok(kind);
        }
        if record.is_directory {
            return Ok(FileKind::Directory);
        }
        Ok(match self.interix(record)? {
            Some(special) => reparse::interix_kind(&special),
            None => FileKind::File,
        })
    }

    /// The content of a file of Interix, by which ntfs-3g stores links and devices.
    fn interix(&self, record: &FileRecord) -> Result<Option<Vec<u8>>> {
        if record.file_flags()? & FILE_FLAG_SYSTEM == 0 {
            return Ok(None);
        }
        let attributes = record.attributes_of(kind::DATA, b"");
        if attributes.is_empty() {
            return Ok(None);
        }
        let mut stream = AttributeStream::new(&attributes, self.geometry)?;
        if stream.size_bytes() > reparse::BYTES_MAX as u64 || stream.refuse_unreadable().is_err() {
            return Ok(None);
        }
        Ok(match stream.piece(&*self.device, 0, reparse::BYTES_MAX)? {
            FilePiece::Data(bytes) if bytes.starts_with(reparse::INTERIX_MAGIC) => Some(bytes),
            _ => None,
        })
    }
}

fn geometry(device: &dyn BlockDevice) -> Result<Geometry> {
    const CLUSTER_BYTES_MAX: u64 = 2 << 20;
    let mut sector = [0; 512];
    device.read_at(&mut sector, 0)?;
    let fields = Fields::new("NTFS boot sector", &sector);
    let sector_bytes = u64::from(fields.u16(0xb)?);
    let raw = fields.u8(0xd)?;
    // Above 128 it is a negative power of two.
    let cluster_sectors = if raw > 128 {
        1u64 << (256 - u32::from(raw)).min(32)
    } else {
        u64::from(raw)
    };
    let cluster_bytes = sector_bytes * cluster_sectors;
    let sectors = fields.u64(0x28)?;
    let volume_bytes = sectors.saturating_mul(sector_bytes);
    let is_valid = matches!(sector_bytes, 512 | 1024 | 2048 | 4096)
        && cluster_bytes.is_power_of_two()
        && (512..=CLUSTER_BYTES_MAX).contains(&cluster_bytes)
        && volume_bytes <= device.size_bytes();
    if !is_valid {
        return Err(fields.damaged(format!(
            "sectors of {sector_bytes} bytes, clusters of {cluster_bytes} bytes, {sectors} sectors"
        )));
    }
    let sized = |raw: u8, what: &str| -> Result<u64> {
        let value = raw.cast_signed();
        let bytes = if value < 0 {
            1u64 << u32::from(value.unsigned_abs()).min(63)
        } else {
            u64::from(raw) * cluster_bytes
        };
        if bytes.is_power_of_two() && (512..=65_536).contains(&bytes) {
            Ok(bytes)
        } else {
            Err(fields.damaged(format!("{what} of {bytes} bytes")))
        }
    };
    Ok(Geometry {
        cluster_bytes,
        record_bytes: sized(fields.u8(0x40)?, "records")?,
        index_bytes: sized(fields.u8(0x44)?, "index blocks")?,
        table_start: fields.u64(0x30)?,
        volume_bytes,
    })
}

/// A time of Windows: units of 100 ns since 1601.
fn modified(ticks: u64) -> ModifiedTime {
    const TICKS_PER_SECOND: u64 = 10_000_000;
    const SECONDS_TO_1970: i64 = 11_644_473_600;
    let seconds = i64::try_from(ticks / TICKS_PER_SECOND).unwrap_or(i64::MAX);
    ModifiedTime {
        seconds: seconds - SECONDS_TO_1970,
        nanoseconds: u32::try_from(ticks % TICKS_PER_SECOND * 100).unwrap_or(0),
    }
}

impl FileSystem for NtfsFileSystem {
    fn root(&self) -> NodeId {
        NodeId(RECORD_ROOT)
    }

    fn ignores_case(&self) -> bool {
        true
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn metadata(&mut self, node: NodeId) -> Result<Metadata> {
        let record = self.record(node)?;
        let reparse = self.reparse_point(&record)?;
        let kind = self.kind_of(&record, reparse.as_ref())?;
        let size_bytes = match kind {
            FileKind::File => {
                let attributes = record.attributes_of(kind::DATA, b"");
                attributes.first().map_or(Ok(0), Attribute::size_bytes)?
            }
            FileKind::Link => self.read_link(node)?.len() as u64,
            FileKind::Directory | FileKind::Special => 0,
        };
        Ok(Metadata {
            kind,
            size_bytes,
            mode: None,
            uid: None,
            gid: None,
            modified: Some(modified(record.modified_ticks()?)),
            // A short name counts too.
            shared_id: (kind == FileKind::File && record.attributes_of(kind::FILE_NAME, b"").len() > 1)
                .then_some(node.0),
        })
    }

    fn read_directory(&mut self, node: NodeId, visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>) -> Result<()> {
        let record = self.record(node)?;
        if !record.is_directory || self.reparse_point(&record)?.is_some_and(|point| point.kind().is_some()) {
            return Err(Error::NotADirectory);
        }
        let is_root = record.number == RECORD_ROOT;
        index::read(self, &record, &mut |entry| {
            let number = entry.node.0 & record::NUMBER_MASK;
            if is_root && number < RECORD_FIRST_USER {
                Ok(())
            } else {
                visit(entry)
            }
        })
    }

    fn read_file(&mut self, node: NodeId, offset: u64, length_max: usize) -> Result<FilePiece> {
        if self.opened.as_ref().is_none_or(|opened| opened.node != node) {
            let record = self.record(node)?;
            let reparse = self.reparse_point(&record)?;
            if self.kind_of(&record, reparse.as_ref())? != FileKind::File {
                return Err(Error::NotAFile);
            }
            if let Some(reparse) = reparse {
                return Err(reparse.refusal());
            }
            let stream = self.stream(&record, kind::DATA, b"")?;
            stream.refuse_unreadable()?;
            self.opened = Some(OpenedFile { node, stream });
        }
        match &mut self.opened {
            Some(opened) => opened
                .stream
                .piece(&*self.device, offset, length_max.min(PIECE_BYTES_MAX)),
            None => Err(Error::NotAFile),
        }
    }

    fn read_link(&mut self, node: NodeId) -> Result<Vec<u8>> {
        let record = self.record(node)?;
        if let Some(reparse) = self.reparse_point(&record)? {
            return reparse.target();
        }
        let special = self.interix(&record)?;
        special
            .as_deref()
            .and_then(reparse::interix_target)
            .ok_or(Error::NotAFile)
    }
}
