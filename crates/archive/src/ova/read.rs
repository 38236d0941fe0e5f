//! Reading an OVA.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::collections::BTreeSet;
use std::io::Read;

use holdfast_hardware::ovf::OvfPackage;
use holdfast_hardware::xml_text;

use super::described::{DescribedFile, described_disks};
use super::disk::{DiskMember, ImageReading, MemberImage, OvaImage};
use super::manifest::{Digested, Digests, Manifest, equals_ignoring_case};
use crate::reader::{ArchiveDisk, ArchiveReader, DiskContent, Document, DocumentKind, Piece};
use crate::tar::{Member, TarReader, corrupt, split_folder};
use crate::{Error, Result};

const TEXT_BYTES_MAX: u64 = 8 << 20;
const FILE_COUNT_MAX: usize = 10_000;
/// Reads an OVA from a decompressed stream.
pub struct OvaReader<R> {
    state: OvaReadState<R>,
    documents: Vec<Document>,
    disks: Vec<ArchiveDisk>,
    /// The file of each disk, as the descriptor describes it.
    files: Vec<DescribedFile>,
    corrections: Vec<String>,
    ended: Vec<bool>,
    manifest: Option<Manifest>,
    /// Digests of files that were read before the manifest.
    digested: Vec<Digested>,
    /// Names of all files that were read, except the manifest.
    names: BTreeSet<String>,
    reading: ImageReading,
    buffer: Vec<u8>,
}

enum OvaReadState<R> {
    /// Between members; the next one may have been read ahead.
    Between(TarReader<R>, Option<Member>),
    /// Within the image of a disk.
    Disk(usize, OvaImage<R>),
    Finished,
}

impl<R: Read + Send> OvaReader<R> {
    /// Opens a package whose first member is the descriptor; names of the others are relative to its folder.
    pub(crate) fn open_at_descriptor(mut tar: TarReader<R>, first: &Member, reading: ImageReading) -> Result<Self> {
        let (folder, descriptor) = split_folder(&first.name);
        tar.set_base_folder(folder);
        let content = tar.read_whole(TEXT_BYTES_MAX)?;
        let text = xml_text(&content)
            .ok_or_else(|| corrupt("descriptor", first.offset, "it is not in the encoding that it says"))?;
        let package = OvfPackage::parse(&text)?;
        let mut digests = Digests::new(descriptor, None);
        digests.update(&content);
        let (disks, files) = described_disks(package)?;
        let mut reader = Self {
            state: OvaReadState::Finished,
            documents: vec![Document {
                name: descriptor.to_owned(),
                kind: DocumentKind::Ovf,
                content,
            }],
            ended: vec![false; disks.len()],
            disks,
            files,
            corrections: Vec::new(),
            manifest: None,
            digested: vec![digests.finish()],
            names: BTreeSet::from([descriptor.to_owned()]),
            reading,
            buffer: Vec::new(),
        };
        let next = reader.texts(&mut tar)?;
        reader.state = OvaReadState::Between(tar, next);
        Ok(reader)
    }

    /// Reads members up to the next image or the end.
    fn texts(&mut self, tar: &mut TarReader<R>) -> Result<Option<Member>> {
        while let Some(member) = tar.next()? {
            let extension = member.name.rsplit_once('.').map_or("", |(_, extension)| extension);
            if extension.eq_ignore_ascii_case("mf") {
                let manifest = Manifest::parse(&tar.read_whole(TEXT_BYTES_MAX)?, member.offset)?;
                for file in &self.digested {
                    manifest.check(file, member.offset)?;
                }
                self.manifest = Some(manifest);
            } else if self.disk_of(&member)?.is_some() {
                return Ok(Some(member));
            } else {
                // Certificates, documents, media of drives: not needed for the machine.
                let mut digests = Digests::new(&member.name, self.manifest.as_ref());
                let mut buffer = vec![0; 1 << 16];
                loop {
                    let offset = tar.offset();
                    let count = tar.read(&mut buffer).map_err(|source| Error::Read { offset, source })?;
                    if count == 0 {
                        break;
                    }
                    digests.update(buffer.get(..count).unwrap_or_default());
                }
                tar.check_read()?;
                self.compare_with_manifest(digests.finish(), member.offset)?;
            }
        }
        Ok(None)
    }

    /// Compares a file with the manifest, now or when the manifest has been read.
    fn compare_with_manifest(&mut self, file: Digested, offset: u64) -> Result<()> {
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

    /// The disk whose file a member is: by its name in the descriptor, or else by a name that differs only in case, since on Windows both name one
    /// file.
    fn disk_of(&self, member: &Member) -> Result<Option<(usize, &DescribedFile)>> {
        let is_exact = |file: &DescribedFile| file.names.contains(&member.name);
        let is_similar = |file: &DescribedFile| file.names.iter().any(|name| equals_ignoring_case(name, &member.name));
        let exact: Vec<_> = self
            .files
            .iter()
            .enumerate()
            .filter(|(_, file)| is_exact(file))
            .collect();
        let found: Vec<_> = if exact.is_empty() {
            self.files
                .iter()
                .enumerate()
                .filter(|(_, file)| is_similar(file))
                .collect()
        } else {
            exact
        };
        match found.as_slice() {
            [] => Ok(None),
            // The exact name exists: a name that differs in case is another file.
            [(_, file)] if !is_exact(file) && file.member.as_ref().is_some_and(|known| file.names.contains(known)) => {
                Ok(None)
            }
            [one] => Ok(Some(*one)),
            _ => Err(Error::Unsupported {
                feature: format!("the file {:?}, which several disks are made of", member.name),
                detail: "have each disk exported by itself".to_owned(),
            }),
        }
    }

    /// The error of an archive without the file of a disk: its name in the descriptor, and the files that exist.
    fn missing(&self, disk: usize, offset: u64) -> Error {
        const SHOWN_COUNT_MAX: usize = 5;
        let key = self.disks.get(disk).map_or("a disk", |disk| &disk.key);
        let named = self
            .files
            .get(disk)
            .map(|file| file.names.join(" or "))
            .unwrap_or_default();
        let there: Vec<String> = self
            .names
            .iter()
            .take(SHOWN_COUNT_MAX)
            .map(|name| format!("{name:?}"))
            .collect();
        let more = if self.names.len() > SHOWN_COUNT_MAX {
            ", ..."
        } else {
            ""
        };
        let detail = format!(
            "the descriptor names {named:?} for {key}, and the archive has {}{more}",
            there.join(", ")
        );
        corrupt("disk", offset, detail)
    }

    /// Begins a disk.
    fn begin(&mut self, tar: TarReader<R>, member: &Member) -> Result<(usize, OvaImage<R>)> {
        let Some((disk, file)) = self.disk_of(member)? else {
            return Err(corrupt("member", member.offset, "no disk is made of it"));
        };
        if let Some(known) = &file.member {
            let detail = if *known == member.name {
                format!("{known:?} comes twice")
            } else {
                let named = file.names.join(" or ");
                format!(
                    "{known:?} and {:?} are both there, and the descriptor names {named:?}",
                    member.name
                )
            };
            return Err(corrupt("member", member.offset, detail));
        }
        let unit_bytes = file.unit_bytes;
        let digests = Digests::new(&member.name, self.manifest.as_ref());
        let Some(described) = self.disks.get(disk) else {
            return Err(corrupt("member", member.offset, "no disk is made of it"));
        };
        let expected = described.size_bytes;
        let said = MemberImage {
            name: &member.name,
            is_raw: file.is_raw,
            // A capacity equal to the length of the file is not the size of the disk.
            disk_bytes: expected,
        };
        let image = OvaImage::open(DiskMember::new(tar, digests)?, said, self.reading)?;
        let size_bytes = image.size_bytes();
        if let Some(file) = self.files.get_mut(disk) {
            file.member = Some(member.name.clone());
        }
        // Some tools write the length of the file as the capacity.
        if expected == member.size_bytes && size_bytes != expected {
            if let Some(disk) = self.disks.get_mut(disk) {
                disk.size_bytes = size_bytes;
            }
            self.corrections.push(format!(
                "the descriptor says that {:?} holds a disk of {expected} bytes, which is the length of the file; the disk has {size_bytes} bytes by its image",
                member.name
            ));
            return Ok((disk, image));
        }
        // Either size may be rounded up; that the excess is zero is checked when it is read.
        if size_bytes.abs_diff(expected) >= unit_bytes {
            let detail = format!(
                "{:?} holds a disk of {size_bytes} bytes, and the descriptor says {expected}",
                member.name
            );
            return Err(corrupt("disk", member.offset, detail));
        }
        Ok((disk, image))
    }
}

/// The result of one step.
enum Step {
    Data(usize, u64),
    End(usize),
    Finished,
}

impl<R: Read + Send> OvaReader<R> {
    fn end(&mut self, disk: usize) {
        if let Some(has_ended) = self.ended.get_mut(disk) {
            *has_ended = true;
        }
    }

    fn step(&mut self) -> Result<Step> {
        loop {
            match std::mem::replace(&mut self.state, OvaReadState::Finished) {
                OvaReadState::Finished => return Ok(Step::Finished),
                OvaReadState::Between(tar, None) => {
                    let Some(disk) = self.ended.iter().position(|has_ended| !has_ended) else {
                        return Ok(Step::Finished);
                    };
                    if self
                        .disks
                        .get(disk)
                        .is_some_and(|disk| disk.content == DiskContent::Stored)
                    {
                        return Err(self.missing(disk, tar.offset()));
                    }
                    self.end(disk);
                    self.state = OvaReadState::Between(tar, None);
                    return Ok(Step::End(disk));
                }
                OvaReadState::Between(tar, Some(member)) => {
                    let (disk, image) = self.begin(tar, &member)?;
                    self.state = OvaReadState::Disk(disk, image);
                }
                OvaReadState::Disk(disk, mut image) => {
                    if let Some(offset) = image.next(&mut self.buffer)? {
                        // An image may be rounded up to a whole block, which must be zero beyond the disk.
                        let (key, size_bytes) = self
                            .disks
                            .get(disk)
                            .map_or(("", 0), |disk| (disk.key.as_str(), disk.size_bytes));
                        let most = usize::try_from(size_bytes.saturating_sub(offset)).unwrap_or(usize::MAX);
                        if self.buffer.iter().skip(most).any(|byte| *byte != 0) {
                            let detail = format!(
                                "the image of {key} has data behind the {size_bytes} bytes that the descriptor says it has"
                            );
                            return Err(corrupt("disk", offset, detail));
                        }
                        self.buffer.truncate(most);
                        self.state = OvaReadState::Disk(disk, image);
                        if self.buffer.is_empty() {
                            continue;
                        }
                        return Ok(Step::Data(disk, offset));
                    }
                    let (mut tar, digested) = image.finish()?;
                    self.compare_with_manifest(digested, tar.offset())?;
                    self.end(disk);
                    let next = self.texts(&mut tar)?;
                    self.state = OvaReadState::Between(tar, next);
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

    fn is_size_certain(&self, disk: usize) -> bool {
        self.files
            .get(disk)
            .is_some_and(|file| file.member.is_some() || !file.may_count_file)
    }

    fn corrections(&self) -> Vec<String> {
        self.corrections.clone()
    }

    fn unverified(&self) -> Vec<String> {
        let Some(manifest) = &self.manifest else {
            return vec!["the archive has no manifest, so its files cannot be verified".to_owned()];
        };
        let listed = manifest.names();
        let found: BTreeSet<&str> = self.names.iter().map(|name| manifest.name_of(name)).collect();
        let missing = listed.iter().filter(|name| !found.contains(**name));
        let missing = missing.map(|name| format!("the manifest names {name:?}, which the archive does not have"));
        let not_compared = manifest.not_compared();
        let unlisted = self
            .names
            .iter()
            .filter(|name| !listed.contains(manifest.name_of(name)) && !not_compared.contains(name.as_str()));
        let unlisted = unlisted.map(|name| format!("{name:?} is not in the manifest, so it cannot be verified"));
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
            Step::Finished => None,
        })
    }

    fn is_in_order(&self) -> bool {
        true
    }
}
