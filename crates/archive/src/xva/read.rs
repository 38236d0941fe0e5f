//! Reading an XVA.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::io::Read;

use holdfast_hardware::xen::XenRecords;

use crate::checksum::{sha1_hex, xxh64};
use crate::reader::{ArchiveDisk, ArchiveReader, DiskContent, Document, DocumentKind, Piece};
use crate::tar::{Member, TarReader, corrupt};
use crate::{Error, Result};

const RECORDS: &str = "ova.xml";
const RECORDS_BYTES_MAX: u64 = 8 << 20;
/// XAPI writes blocks of 1 MiB.
const BLOCK_BYTES_MAX: u64 = 64 << 20;
const CHECKSUM_BYTES_MAX: u64 = 128;

/// Reads an XVA from a decompressed stream.
pub struct XvaReader<R> {
    tar: TarReader<R>,
    documents: Vec<Document>,
    disks: Vec<ArchiveDisk>,
    /// Ids of images in drives, which may be missing.
    drives: Vec<String>,
    has_checksums: bool,
    /// The disk that is being read.
    current: Option<DiskProgress>,
    block: Vec<u8>,
    /// The member that was read ahead.
    ahead: Option<Member>,
    /// Whether each disk has ended.
    ended: Vec<bool>,
    is_finished: bool,
}

/// The progress of reading a disk.
#[derive(Debug, Clone, Copy)]
struct DiskProgress {
    disk: usize,
    block_bytes: u64,
    number: u64,
    /// The offset of the next block, if no number is skipped.
    offset: u64,
}

impl<R: Read> XvaReader<R> {
    /// Reads the machine's records.
    ///
    /// # Errors
    /// The stream is not an XVA: it must begin with its records.
    pub fn open(stream: R) -> Result<Self> {
        let mut tar = TarReader::new(stream);
        let member = tar.next()?;
        if member.as_ref().is_none_or(|member| member.name != RECORDS) {
            let found = member.map_or("nothing".to_owned(), |member| format!("{:?}", member.name));
            return Err(corrupt(
                "archive",
                0,
                format!("an XVA begins with {RECORDS}; this begins with {found}"),
            ));
        }
        Self::open_at_records(tar)
    }

    /// Opens an archive whose first member is `ova.xml`.
    pub(crate) fn open_at_records(mut tar: TarReader<R>) -> Result<Self> {
        let content = tar.read_whole(RECORDS_BYTES_MAX)?;
        let text = std::str::from_utf8(&content).map_err(|_| corrupt(RECORDS, 0, "it is not UTF-8"))?;
        let records = XenRecords::parse(text)?;
        let disks = records.disks()?.into_iter().map(|disk| ArchiveDisk {
            key: disk.id,
            size_bytes: disk.size_bytes,
            content: DiskContent::Stored,
        });
        let disks: Vec<ArchiveDisk> = disks.collect();
        Ok(Self {
            ended: vec![false; disks.len()],
            disks,
            drives: records.drives(),
            has_checksums: records.export_version() > 0,
            documents: vec![Document {
                name: RECORDS.to_owned(),
                kind: DocumentKind::XenRecords,
                content,
            }],
            tar,
            current: None,
            block: Vec::new(),
            ahead: None,
            is_finished: false,
        })
    }

    fn next_member(&mut self) -> Result<Option<Member>> {
        match self.ahead.take() {
            Some(member) => Ok(Some(member)),
            None => self.tar.next(),
        }
    }

    /// Reads and checks the next block; returns its disk and offset, or `None` when the disk or the archive has ended.
    fn next_block(&mut self) -> Result<Option<(usize, u64)>> {
        loop {
            let Some(member) = self.next_member()? else {
                return Ok(None);
            };
            let (id, number) = split(&member)?;
            if self.drives.iter().any(|drive| drive == id) {
                self.read_block(&member)?;
                continue;
            }
            let place = self.disks.iter().position(|disk| disk.key == id);
            let disk = place.ok_or_else(|| {
                let detail = format!("{:?} is of a disk that {RECORDS} does not have", member.name);
                corrupt("member", member.offset, detail)
            })?;
            let at = match self.current {
                None if self.ended.get(disk).copied().unwrap_or_default() => {
                    let detail = format!("{:?} comes after the end of its disk", member.name);
                    return Err(corrupt("member", member.offset, detail));
                }
                None => DiskProgress {
                    disk,
                    block_bytes: member.size_bytes,
                    number: 0,
                    offset: 0,
                },
                Some(current) if current.disk == disk => current.after(&member, number)?,
                // The end of a disk is returned before the next one begins.
                Some(_) => {
                    self.ahead = Some(member);
                    return Ok(None);
                }
            };
            if self.current.is_none() && number != 0 {
                let detail = format!("the first block of {id} has the number {number}");
                return Err(corrupt("member", member.offset, detail));
            }
            let size_bytes = self.disks.get(disk).map_or(0, |disk| disk.size_bytes);
            let end = at
                .offset
                .checked_add(member.size_bytes)
                .filter(|end| *end <= size_bytes);
            let Some(end) = end.filter(|_| member.size_bytes <= BLOCK_BYTES_MAX) else {
                let detail = format!(
                    "{:?} reaches beyond the end of the disk at {size_bytes} bytes",
                    member.name
                );
                return Err(corrupt("member", member.offset, detail));
            };
            self.read_block(&member)?;
            self.current = Some(DiskProgress { offset: end, ..at });
            if member.size_bytes > 0 {
                return Ok(Some((disk, at.offset)));
            }
        }
    }

    /// Reads a block and its checksum.
    fn read_block(&mut self, member: &Member) -> Result<()> {
        self.block = self
            .tar
            .read_whole_into(std::mem::take(&mut self.block), BLOCK_BYTES_MAX)?;
        if self.has_checksums {
            self.check_block(member)
        } else {
            Ok(())
        }
    }

    /// Reads the checksum after a block and compares it.
    fn check_block(&mut self, block: &Member) -> Result<()> {
        let cut_off = || Error::CutOff {
            what: "a checksum",
            offset: block.offset,
        };
        let member = self.tar.next()?.ok_or_else(cut_off)?;
        let kind = member.name.strip_prefix(&block.name);
        let actual = match kind {
            Some(".xxhash") => format!("{:016X}", xxh64(&self.block)),
            Some(".checksum") => sha1_hex(&self.block),
            _ => {
                let detail = format!("behind {:?} comes {:?} and not its checksum", block.name, member.name);
                return Err(corrupt("member", member.offset, detail));
            }
        };
        let expected = self.tar.read_whole(CHECKSUM_BYTES_MAX)?;
        let expected = String::from_utf8_lossy(&expected);
        if actual.eq_ignore_ascii_case(expected.trim()) {
            return Ok(());
        }
        Err(corrupt(
            "block",
            block.offset,
            format!(
                "the checksum of {} is {actual}, and should be {}",
                block.name,
                expected.trim()
            ),
        ))
    }

    /// Ends the current disk, which must be complete.
    fn end_disk(&mut self) -> Result<Option<usize>> {
        let Some(current) = self.current.take() else {
            let mut missing = self
                .disks
                .iter()
                .zip(&self.ended)
                .filter(|(disk, has_ended)| !**has_ended && disk.size_bytes > 0);
            return match missing.next() {
                None => Ok(None),
                Some((disk, _)) => {
                    let detail = format!("the archive has nothing of {}", disk.key);
                    Err(corrupt("disk", self.tar.offset(), detail))
                }
            };
        };
        let ended = self.disks.get(current.disk).zip(self.ended.get_mut(current.disk));
        let (disk, has_ended) = ended.expect("the disk was found among those that there are");
        if current.offset != disk.size_bytes {
            return Err(corrupt(
                "disk",
                self.tar.offset(),
                format!("{} ends at {} of {} bytes", disk.key, current.offset, disk.size_bytes),
            ));
        }
        *has_ended = true;
        Ok(Some(current.disk))
    }
}

impl DiskProgress {
    /// The progress at the block with this number: each skipped number is a block of zeroes.
    fn after(self, member: &Member, number: u64) -> Result<Self> {
        let left_out = number.checked_sub(self.number + 1);
        let offset = left_out
            .and_then(|count| count.checked_mul(self.block_bytes))
            .and_then(|bytes| bytes.checked_add(self.offset));
        let offset = offset.ok_or_else(|| {
            let detail = format!("{:?} comes after the block {}", member.name, self.number);
            corrupt("member", member.offset, detail)
        })?;
        Ok(Self {
            number,
            offset,
            // The first members may be empty if the connection was slow from the start.
            block_bytes: if self.block_bytes == 0 {
                member.size_bytes
            } else {
                self.block_bytes
            },
            ..self
        })
    }
}

/// Splits `Ref:7/00000012` into the disk and the number.
fn split(member: &Member) -> Result<(&str, u64)> {
    let parts = member.name.split_once('/').and_then(|(id, number)| {
        let is_number = !number.is_empty() && number.len() <= 18 && number.bytes().all(|byte| byte.is_ascii_digit());
        Some((id, number.parse().ok().filter(|_| is_number)?))
    });
    parts.ok_or_else(|| {
        let detail = format!("{:?} is no block of a disk", member.name);
        corrupt("member", member.offset, detail)
    })
}

impl<R: Read + Send> ArchiveReader for XvaReader<R> {
    fn documents(&self) -> &[Document] {
        &self.documents
    }

    fn disks(&self) -> &[ArchiveDisk] {
        &self.disks
    }

    fn next(&mut self) -> Result<Option<Piece<'_>>> {
        if self.is_finished {
            return Ok(None);
        }
        if let Some((disk, offset)) = self.next_block()? {
            return Ok(Some(Piece::Data {
                disk,
                offset,
                bytes: &self.block,
            }));
        }
        let ended = self.end_disk()?;
        self.is_finished = ended.is_none();
        Ok(ended.map(|disk| Piece::End { disk }))
    }

    fn is_in_order(&self) -> bool {
        true
    }
}
