//! Reading an OVA.

use std::collections::BTreeSet;
use std::io::Read;
use std::num::NonZero;

use holdfast_hardware::ovf::OvfPackage;

use super::disk::{DiskMember, OvaImage};
use super::manifest::{Digested, Digests, Manifest};
use crate::reader::{ArchiveDisk, ArchiveReader, Document, DocumentKind, Piece};
use crate::tar::{Member, TarReader, corrupt, plain_name, split_folder};
use crate::{Error, Result};

const TEXT_BYTES_MAX: u64 = 8 << 20;
const FILE_COUNT_MAX: usize = 10_000;
/// A descriptor may tell a size that is larger than the disk by less than a unit of its own, and an image may be larger by what fills its last
/// block: so much of it, at least, is not looked at twice.
const UNIT_BYTES: u64 = 1 << 20;

/// An OVA that is read as a stream, unpacked already.
pub struct OvaReader<R> {
    state: State<R>,
    documents: Vec<Document>,
    disks: Vec<ArchiveDisk>,
    /// For each disk, what the descriptor says of its file.
    files: Vec<SaidFile>,
    ended: Vec<bool>,
    manifest: Option<Manifest>,
    /// Files that were read before the manifest.
    digested: Vec<Digested>,
    /// All files that were read but the manifest.
    names: BTreeSet<String>,
    threads: NonZero<usize>,
    buffer: Vec<u8>,
}

/// What a descriptor says of the file of a disk.
struct SaidFile {
    /// What it may be called.
    names: Vec<String>,
    is_raw: bool,
    /// In what its size is counted.
    unit_bytes: u64,
}

enum State<R> {
    /// Between members; the next one may be known.
    Between(TarReader<R>, Option<Member>),
    /// In the image of a disk.
    Disk(usize, OvaImage<R>),
    Over,
}

impl<R: Read + Send> OvaReader<R> {
    /// Goes on where the first member is the descriptor, from whose folder the others are called.
    pub(crate) fn open_at_descriptor(mut tar: TarReader<R>, first: &Member, threads: NonZero<usize>) -> Result<Self> {
        let (folder, descriptor) = split_folder(&first.name);
        tar.enter(folder);
        let content = tar.read_whole(TEXT_BYTES_MAX)?;
        let text = std::str::from_utf8(&content).map_err(|_| corrupt("descriptor", first.offset, "it is not UTF-8"))?;
        let package = OvfPackage::parse(text)?;
        let mut digests = Digests::new(descriptor, None);
        digests.update(&content);
        let (mut disks, mut files) = (Vec::new(), Vec::new());
        for disk in package.disks {
            let Some(file) = disk.file else { continue };
            let compression = file.compression.as_deref().unwrap_or_default();
            if file.chunk_bytes.is_some() || !matches!(compression, "" | "identity") {
                return Err(Error::Unsupported {
                    feature: format!("the file {:?} in chunks, or compressed by itself", file.href),
                    detail: "have it exported again without".to_owned(),
                });
            }
            if disk.parent_ref.is_some() {
                return Err(Error::Unsupported {
                    feature: format!("the disk {}, which is a difference to another one", disk.key),
                    detail: "have it exported as whole disks".to_owned(),
                });
            }
            // Media of drives are no disks of the package, and are passed over.
            if disk.format.is_empty() {
                continue;
            }
            let Some(size_bytes) = disk.capacity_bytes else {
                return Err(Error::Unsupported {
                    feature: format!(
                        "the disk {}, of which the descriptor does not say how large it is",
                        disk.key
                    ),
                    detail: "write its size into ovf:capacity of the descriptor".to_owned(),
                });
            };
            disks.push(ArchiveDisk {
                key: disk.key,
                size_bytes,
            });
            let names = file.names().into_iter().map(plain_name).collect();
            files.push(SaidFile {
                names,
                is_raw: disk.format.contains("raw"),
                unit_bytes: disk.capacity_unit_bytes.max(UNIT_BYTES),
            });
        }
        let mut reader = Self {
            state: State::Over,
            documents: vec![Document {
                name: descriptor.to_owned(),
                kind: DocumentKind::Ovf,
                content,
            }],
            ended: vec![false; disks.len()],
            disks,
            files,
            manifest: None,
            digested: vec![digests.finish()],
            names: BTreeSet::from([descriptor.to_owned()]),
            threads,
            buffer: Vec::new(),
        };
        let next = reader.texts(&mut tar)?;
        reader.state = State::Between(tar, next);
        Ok(reader)
    }

    /// Reads texts up to the next image, or the end.
    fn texts(&mut self, tar: &mut TarReader<R>) -> Result<Option<Member>> {
        while let Some(member) = tar.next()? {
            let extension = member.name.rsplit_once('.').map_or("", |(_, extension)| extension);
            if extension.eq_ignore_ascii_case("mf") {
                let manifest = Manifest::parse(&tar.read_whole(TEXT_BYTES_MAX)?, member.offset)?;
                for file in &self.digested {
                    manifest.check(file, member.offset)?;
                }
                self.manifest = Some(manifest);
            } else if self.files.iter().any(|file| file.names.contains(&member.name)) {
                return Ok(Some(member));
            } else {
                // Certificates, texts for people, media of drives: nothing that the machine is made of.
                let mut digests = Digests::new(&member.name, self.manifest.as_ref());
                let mut buffer = vec![0; 1 << 16];
                loop {
                    let offset = tar.offset();
                    let count = tar.read(&mut buffer).map_err(|source| Error::Read { offset, source })?;
                    if count == 0 {
                        break;
                    }
                    digests.update(&buffer[..count]);
                }
                tar.check_read()?;
                self.take_in(digests.finish(), member.offset)?;
            }
        }
        Ok(None)
    }

    /// Compares a file with the manifest, now or when that comes.
    fn take_in(&mut self, file: Digested, offset: u64) -> Result<()> {
        if self.names.len() == FILE_COUNT_MAX {
            let detail = format!("it has more than {FILE_COUNT_MAX} files");
            return Err(corrupt("archive", offset, detail));
        }
        self.names.insert(file.name.clone());
        let Some(manifest) = &self.manifest else {
            self.digested.push(file);
            return Ok(());
        };
        manifest.check(&file, offset)
    }

    /// Begins a disk.
    fn begin(&self, tar: TarReader<R>, member: &Member) -> Result<(usize, OvaImage<R>)> {
        let mut places = self
            .files
            .iter()
            .enumerate()
            .filter(|(_, file)| file.names.contains(&member.name));
        let place = places.next();
        let Some((disk, file)) = place.filter(|(disk, _)| !self.ended[*disk]) else {
            return Err(corrupt(
                "member",
                member.offset,
                format!("{:?} comes twice", member.name),
            ));
        };
        if places.next().is_some() {
            return Err(Error::Unsupported {
                feature: format!("the file {:?}, which several disks are made of", member.name),
                detail: "have each disk exported by itself".to_owned(),
            });
        }
        let digests = Digests::new(&member.name, self.manifest.as_ref());
        let image = OvaImage::open(DiskMember::new(tar, digests)?, &member.name, file.is_raw, self.threads)?;
        let (size_bytes, expected) = (image.size_bytes(), self.disks[disk].size_bytes);
        // Either may be larger by what fills its last unit; that nothing is there is looked at when it comes.
        if size_bytes.abs_diff(expected) >= file.unit_bytes {
            let detail = format!(
                "{:?} holds a disk of {size_bytes} bytes, and the descriptor says {expected}",
                member.name
            );
            return Err(corrupt("disk", member.offset, detail));
        }
        Ok((disk, image))
    }
}

/// What a step has found.
enum Step {
    Data(usize, u64),
    End(usize),
    Over,
}

impl<R: Read + Send> OvaReader<R> {
    fn step(&mut self) -> Result<Step> {
        loop {
            match std::mem::replace(&mut self.state, State::Over) {
                State::Over => return Ok(Step::Over),
                State::Between(_, None) => {
                    let missing = self.ended.iter().position(|has_ended| !has_ended);
                    return missing.map_or(Ok(Step::Over), |disk| {
                        let detail = format!("the archive has nothing of {}", self.disks[disk].key);
                        Err(corrupt("disk", 0, detail))
                    });
                }
                State::Between(tar, Some(member)) => {
                    let (disk, image) = self.begin(tar, &member)?;
                    self.state = State::Disk(disk, image);
                }
                State::Disk(disk, mut image) => {
                    if let Some(offset) = image.next(&mut self.buffer)? {
                        // An image may be larger by what fills its last block, which is nothing.
                        let size_bytes = self.disks[disk].size_bytes;
                        let most = usize::try_from(size_bytes.saturating_sub(offset)).unwrap_or(usize::MAX);
                        if self.buffer.iter().skip(most).any(|byte| *byte != 0) {
                            let detail = format!(
                                "the image of {} has data behind the {size_bytes} bytes that the descriptor says it has",
                                self.disks[disk].key
                            );
                            return Err(corrupt("disk", offset, detail));
                        }
                        self.buffer.truncate(most);
                        self.state = State::Disk(disk, image);
                        if self.buffer.is_empty() {
                            continue;
                        }
                        return Ok(Step::Data(disk, offset));
                    }
                    let (mut tar, digested) = image.finish()?;
                    self.take_in(digested, tar.offset())?;
                    self.ended[disk] = true;
                    let next = self.texts(&mut tar)?;
                    self.state = State::Between(tar, next);
                    return Ok(Step::End(disk));
                }
            }
        }
    }
}

impl<R: Read + Send> ArchiveReader for OvaReader<R> {
    fn documents(&self) -> &[Document] {
        &self.documents
    }

    fn disks(&self) -> &[ArchiveDisk] {
        &self.disks
    }

    fn doubts(&self) -> Vec<String> {
        let Some(manifest) = &self.manifest else {
            return vec![
                "the archive has no manifest: nothing tells whether its files are as they were sent".to_owned(),
            ];
        };
        let listed = manifest.names();
        let missing = listed.iter().filter(|name| !self.names.contains(**name));
        let missing = missing.map(|name| format!("the manifest names {name:?}, which the archive does not have"));
        let not_compared = manifest.not_compared();
        let unlisted = self
            .names
            .iter()
            .filter(|name| !listed.contains(&name[..]) && !not_compared.contains(&name[..]));
        let unlisted =
            unlisted.map(|name| format!("{name:?} is not in the manifest: nothing tells whether it is as it was sent"));
        let unknown = not_compared.iter().map(|name| {
            format!("the manifest has a digest of {name:?} by an algorithm that is not known: it was not compared")
        });
        missing.chain(unlisted).chain(unknown).collect()
    }

    fn next(&mut self) -> Result<Option<Piece<'_>>> {
        Ok(match self.step()? {
            Step::Data(disk, offset) => Some(Piece::Data {
                disk,
                offset,
                bytes: &self.buffer,
            }),
            Step::End(disk) => Some(Piece::End { disk }),
            Step::Over => None,
        })
    }

    fn is_in_order(&self) -> bool {
        true
    }
}
