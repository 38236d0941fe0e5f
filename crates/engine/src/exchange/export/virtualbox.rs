//! Writes a machine as a VirtualBox folder: settings, and images beside them.
//!
//! A machine that came from VirtualBox gets its own settings back, including those that no other hypervisor knows. Any
//! other machine gets new settings from what is known of it. The images and their UUIDs are new: VirtualBox refuses two
//! images with one UUID.

use std::collections::BTreeMap;

use holdfast_archive::Packed;
use holdfast_hardware::virtualbox::{
    Image, NetworkAttachment, RestoredIdentity, RestoredOptions, VirtualBoxOptions, read, restored, write,
};
use holdfast_hardware::{DiskKind, Translated, Untranslated};
use holdfast_host::Uuid;
use holdfast_image::{BlockOptions, Format, ImageId, OpenOptions, Qcow2Options, Storage};
use holdfast_repo::{Environment, Manifest, Repository};

use super::reads::DiskReads;
use super::{Exported, VirtualBoxIdentity};
use crate::capture::virtualbox::targets;
use crate::files::block_target::Overwrite;
use crate::image::convert::{ConvertRequest, ConvertSource, VerifyImage, convert};
use crate::image::new_folder::{NewFolder, write_file};
use crate::image::sectors::WholeSectors;
use crate::job::{Job, Result};
use crate::notes::{STREAM_VIRTUALBOX_NVRAM, STREAM_VIRTUALBOX_SAVED, STREAM_VIRTUALBOX_SETTINGS};
use crate::restore::small_stream::bytes_of;

/// Most characters of a file name: with four bytes each, and an extension, they fit the limit of file systems.
const NAME_LENGTH_MAX: usize = 60;

/// The VirtualBox streams in a snapshot of a machine.
#[derive(Default)]
pub(super) struct VirtualBoxStreams {
    /// The original settings.
    pub(super) settings: Option<String>,
    /// The variables of its firmware.
    pub(super) nvram: Option<Vec<u8>>,
    /// Whether the memory is in the snapshot.
    pub(super) has_memory: bool,
}

impl VirtualBoxStreams {
    pub(super) fn read(repository: &Repository, snapshot: &Manifest) -> Result<Self> {
        let stream = |name: &str| snapshot.disks.iter().find(|record| record.name == name);
        let bytes = |name| stream(name).map(|record| bytes_of(repository, record)).transpose();
        Ok(Self {
            settings: bytes(STREAM_VIRTUALBOX_SETTINGS)?.map(|text| String::from_utf8_lossy(&text).into_owned()),
            nvram: bytes(STREAM_VIRTUALBOX_NVRAM)?,
            has_memory: stream(STREAM_VIRTUALBOX_SAVED).is_some(),
        })
    }
}

impl Exported<'_> {
    /// Writes the folder. The settings are last: if they exist, the folder is complete. Every image is read back and
    /// compared, if possible.
    pub(super) fn write_virtualbox(
        &mut self,
        made: &mut NewFolder,
        identity: VirtualBoxIdentity,
        environment: &Environment,
        job: Job<'_>,
    ) -> Result<Packed> {
        let base = base_name(&self.machine.name);
        let mut written = Packed::default();
        let mut images: BTreeMap<String, Image> = BTreeMap::new();
        for disk in &self.disks {
            let name = crate::DiskName::new(disk.name.as_str())?;
            let (file, id) = (format!("{base}-{name}.vdi"), ImageId::random()?);
            let device = WholeSectors(std::sync::Arc::clone(&disk.device));
            let report = made.file(&file, |target| {
                convert(
                    ConvertSource::Device(&device),
                    &ConvertRequest {
                        open: OpenOptions::default(),
                        target: target.to_owned(),
                        format: Format::Vdi,
                        qcow2: Qcow2Options::default(),
                        blocks: BlockOptions {
                            id: Some(id),
                            ..BlockOptions::default()
                        },
                        storage: Storage::Plain,
                        overwrite: Overwrite::Refuse,
                        verify: match self.reads {
                            DiskReads::Any => VerifyImage::Yes,
                            DiskReads::Once => VerifyImage::No,
                        },
                    },
                    environment,
                    job,
                )
            })?;
            written.unpacked_bytes += report.size_bytes;
            written.written_bytes += report.allocated_bytes.unwrap_or_default();
            self.names.push((disk.name.clone(), file.clone(), report.size_bytes));
            let image = Image {
                uuid: id.to_string(),
                location: file,
                format: "VDI".to_owned(),
            };
            images.insert(disk.name.clone(), image);
        }
        let mut random = [0; 16];
        environment.randomness.fill(&mut random)?;
        let text = self.settings(images, identity, Uuid::from_random(random), &base)?;
        if let Some(nvram) = &self.of_virtualbox.nvram {
            made.file(&format!("{base}.nvram"), |path| write_file(path, nvram, environment))?;
        }
        let settings = made.file(&format!("{base}.vbox"), |path| {
            write_file(path, text.as_bytes(), environment)?;
            Ok(path.to_owned())
        })?;
        self.settings_file = Some(settings);
        Ok(written)
    }

    /// The settings of a machine with these images, by disk name.
    fn settings(
        &mut self,
        images: BTreeMap<String, Image>,
        identity: VirtualBoxIdentity,
        uuid: Uuid,
        base: &str,
    ) -> Result<String> {
        let Some(text) = &self.of_virtualbox.settings else {
            if identity == VirtualBoxIdentity::New {
                self.machine.uuid = None;
                self.machine.cards.iter_mut().for_each(|card| card.mac = None);
            }
            let wish = VirtualBoxOptions {
                uuid: uuid.to_string(),
                disks: images,
                network: NetworkAttachment::Nat,
            };
            let Translated { value, dropped } = write(&self.machine, &wish);
            self.dropped.extend(dropped);
            return Ok(value);
        };
        // The settings identify a disk by its original image, and the snapshot by the name that libvirt would use.
        let then = read(text)?.value;
        let named = then.disks.iter().zip(targets(&then));
        let disks = named
            .filter(|(disk, _)| disk.kind == DiskKind::Disk)
            .filter_map(|(disk, name)| Some((disk.key.clone(), images.get(&name)?.clone())))
            .collect();
        let wish = RestoredOptions {
            name: self.machine.name.clone(),
            identity: match identity {
                VirtualBoxIdentity::Same => RestoredIdentity::Same,
                VirtualBoxIdentity::New => RestoredIdentity::New(uuid.to_string()),
            },
            disks,
            nvram: self.of_virtualbox.nvram.as_ref().map(|_| format!("{base}.nvram")),
        };
        let Translated { value, dropped } = restored(text, &wish)?;
        // Settings lost in the translation for other hypervisors are not lost here.
        self.dropped = dropped;
        if self.of_virtualbox.has_memory {
            self.dropped.push(Untranslated {
                what: "memory".to_owned(),
                why: "the machine starts; holdfast restore brings back saved-state.sav, and VBoxManage adoptstate takes it".to_owned(),
            });
        }
        Ok(value)
    }
}

/// File name prefix of a machine: its name without characters that a file system refuses or that separate folders.
fn base_name(name: &str) -> String {
    let is_refused = |character: char| character.is_control() || "/\\:*?\"<>|".contains(character);
    let safe = |character| if is_refused(character) { '_' } else { character };
    let name: String = name.trim().chars().map(safe).take(NAME_LENGTH_MAX).collect();
    if name.is_empty() || name.starts_with(['.', '-']) {
        format!("_{name}")
    } else {
        name
    }
}

#[cfg(test)]
mod tests {
    use super::base_name;

    #[test]
    fn files_are_called_like_their_machine_and_lead_nowhere() {
        for (name, expected) in [
            ("Windows 10 (old)", "Windows 10 (old)"),
            ("../../etc/x", "_.._.._etc_x"),
            ("a\"b\"\n:c", "a_b___c"),
            ("-rf", "_-rf"),
            ("  ", "_"),
        ] {
            assert_eq!(base_name(name), expected, "{name:?}");
        }
        assert_eq!(base_name(&"ä".repeat(300)).len(), 120);
    }
}
