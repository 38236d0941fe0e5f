//! Plans the restore of an existing machine in place.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use holdfast_host::domain_xml::{DiskChange, DiskPlace, DomainXml, Emulator, Identity, Rewrite, rewrite};
use holdfast_host::{DiskSource, KeptStates, Machine, MachineDisk, MachineState};
use holdfast_image::Format;
use holdfast_repo::{DiskRecord, Manifest};

use super::draft::{Definition, Draft, PlannedMachine, Planner, unfit};
use super::existing_image::{ExistingImage, followed, name_to_keep};
use super::neighbours::Neighbours;
use super::places::{data_bytes, folder_of};
use super::planned_file::{FileContent, FileWay, PlannedFile};
use super::request::{ConfigurationChoice, InPlaceOptions, Presence};
use super::stored;
use super::stored::StoredMachine;
use super::tpm;
use crate::job::error::Refusal;
use crate::job::{Error, Result};

pub(super) fn draft(planner: &Planner<'_>, snapshot: &Manifest, wish: &InPlaceOptions) -> Result<Draft> {
    let machine = find(planner, snapshot, wish)?;
    let description = machine.describe()?;
    let name = description.summary.name.clone();
    let is_off = description.summary.state == MachineState::ShutOff;
    if !is_off && wish.presence == Presence::ShutOff {
        return Err(Refusal::NotShutOff {
            machine: name,
            state: description.summary.state,
        }
        .into());
    }
    let uuid = description.summary.uuid.clone();
    refuse_kept_states(planner, &name, &uuid, description.summary.state)?;
    let text = configuration_of(&*machine)?;
    let mut draft = Draft::new(PlannedMachine {
        name: name.clone(),
        uuid: uuid.clone(),
        is_new: false,
    });
    let place = InPlace {
        planner,
        snapshot,
        present: DomainXml::parse(&text).map_err(|detail| unfit(&name, detail))?,
        neighbours: Neighbours::of(planner.hypervisor)?.without(&uuid),
        name: &name,
        is_off,
    };
    place.warn_of_other_machine(&mut draft, &uuid);
    let places = place.disks(&mut draft)?;
    match wish.configuration {
        ConfigurationChoice::Keep => {
            let path = place.present.nvram.as_ref().map(PathBuf::from);
            place.nvram(&mut draft, path.or_else(|| place.own_nvram()))?;
            let own = place.own_tpm().map(PathBuf::as_path);
            tpm::plan(planner, snapshot, &place.neighbours, &text, own, &mut draft)?;
            place.keep_configuration(&mut draft, text)?;
        }
        ConfigurationChoice::Restore => place.restore_configuration(&mut draft, &uuid, text, places)?,
    }
    Ok(draft)
}

/// The machine that was named, or the one that the snapshot is of.
fn find(planner: &Planner<'_>, snapshot: &Manifest, wish: &InPlaceOptions) -> Result<Box<dyn Machine>> {
    if let Some(name) = &wish.machine {
        return Ok(planner.hypervisor.machine(name)?);
    }
    let uuid = stored::uuid(snapshot);
    if let Some(machine) = uuid.and_then(|uuid| planner.hypervisor.machine(uuid).ok()) {
        return Ok(machine);
    }
    let machine = planner.hypervisor.machine(&snapshot.machine)?;
    match uuid {
        None => Ok(machine),
        // Another machine has the same name; overwriting it was not requested.
        Some(uuid) => Err(Refusal::AnotherMachine {
            machine: snapshot.machine.clone(),
            uuid: machine.describe()?.summary.uuid,
            snapshot_uuid: uuid.to_owned(),
        }
        .into()),
    }
}

/// Refuses a machine with snapshots or saved memory at its hypervisor: they depend on the current content of the disks.
fn refuse_kept_states(planner: &Planner<'_>, name: &str, uuid: &str, state: MachineState) -> Result<()> {
    let KeptStates {
        snapshot_count,
        checkpoint_count,
        has_saved_memory,
        is_transient,
    } = planner.hypervisor.kept_states(uuid)?;
    if state != MachineState::ShutOff && is_transient {
        return Err(Refusal::Transient {
            machine: name.to_owned(),
        }
        .into());
    }
    let kept = [
        (snapshot_count > 0).then(|| format!("{snapshot_count} snapshots")),
        (checkpoint_count > 0).then(|| format!("{checkpoint_count} checkpoints")),
        has_saved_memory.then(|| "the saved memory".to_owned()),
    ];
    let kept: Vec<String> = kept.into_iter().flatten().collect();
    if kept.is_empty() {
        return Ok(());
    }
    Err(Refusal::KeptStates {
        hypervisor: planner.hypervisor.title().to_owned(),
        what: kept.join(" and "),
        machine: name.to_owned(),
    }
    .into())
}

/// The configuration that the hypervisor stores for a machine.
fn configuration_of(machine: &dyn Machine) -> Result<String> {
    let mut files = machine.configuration()?;
    let (_, bytes) = files.swap_remove(0);
    String::from_utf8(bytes).map_err(|_| unfit(machine.name(), "it is not valid UTF-8".to_owned()))
}

struct InPlace<'a> {
    planner: &'a Planner<'a>,
    snapshot: &'a Manifest,
    present: DomainXml,
    neighbours: Neighbours,
    name: &'a str,
    is_off: bool,
}

impl InPlace<'_> {
    fn warn_of_other_machine(&self, draft: &mut Draft, uuid: &str) {
        let is_other = stored::uuid(self.snapshot).is_some_and(|before| !before.eq_ignore_ascii_case(uuid));
        if is_other {
            draft.warnings.push(format!(
                "the snapshot is of another machine than {}, which gets the content of its disks",
                self.name
            ));
        }
    }

    /// The image of every disk of the snapshot.
    fn disks(&self, draft: &mut Draft) -> Result<BTreeMap<String, DiskPlace>> {
        let mut places = BTreeMap::new();
        for record in stored::disks(self.snapshot) {
            let disk = self.present.disks.iter().find(|disk| disk.target == record.name);
            let path = disk.and_then(|disk| match &disk.source {
                DiskSource::File(path) | DiskSource::Device(path) => Some(path.clone()),
                DiskSource::Other(_) | DiskSource::Empty => None,
            });
            let (Some(disk), Some(path)) = (disk, path) else {
                return Err(Refusal::DiskMissing {
                    machine: self.name.to_owned(),
                    disk: record.name.clone(),
                    present: self.present.disks.iter().map(|disk| disk.target.clone()).collect(),
                }
                .into());
            };
            let file = self.disk(record, disk, path.clone(), draft)?;
            let place = DiskPlace {
                // A symbolic link that the configuration names is kept.
                path,
                medium: file.medium(),
                format: file.format.qemu_name().to_owned(),
            };
            places.insert(record.name.clone(), place);
            draft.files.push(file);
        }
        for disk in &self.present.disks {
            let is_left = !places.contains_key(&disk.target) && disk.source != DiskSource::Empty;
            if is_left {
                draft
                    .notes
                    .push(format!("{} is not in the snapshot, and stays as it is", disk.target));
            }
        }
        Ok(places)
    }

    fn disk(&self, record: &DiskRecord, disk: &MachineDisk, path: PathBuf, draft: &mut Draft) -> Result<PlannedFile> {
        if let Some(machine) = self.neighbours.user_of(&path) {
            return Err(Refusal::InUse {
                path,
                machine: machine.to_owned(),
            }
            .into());
        }
        // The guest writes the content of a raw disk. Without a format in the configuration the disk is raw, as for
        // libvirt.
        let name = disk.format.as_deref().unwrap_or("raw");
        let format = Format::from_name(name).filter(|format| Format::SUPPORTED.contains(format));
        let format = format.ok_or_else(|| Error::TargetFormat {
            path: path.clone(),
            format: name.to_owned(),
        })?;
        let presence = if self.is_off {
            Presence::ShutOff
        } else {
            Presence::SwitchedOffFirst
        };
        let planned = PlannedFile {
            content: FileContent::Disk(record.name.clone()),
            from: stored::path_of(record),
            to: path.clone(),
            format,
            way: FileWay::InPlace,
            kept_at: None,
            size_bytes: record.size_bytes,
            data_bytes: data_bytes(self.planner.contents, record)?,
        };
        if path.starts_with("/dev") && path.symlink_metadata().is_err() {
            return Err(Refusal::NoDevice {
                path,
                disk: record.name.clone(),
                size_bytes: record.size_bytes,
            }
            .into());
        }
        match ExistingImage::at(&path, format, presence)? {
            ExistingImage::Usable { size_bytes } if size_bytes >= record.size_bytes => Ok(planned),
            ExistingImage::Usable { size_bytes } if path.is_file() => {
                let reason = format!("it has {size_bytes} bytes, and the disk has {}", record.size_bytes);
                anew(planned, Some(reason), draft)
            }
            ExistingImage::Usable { size_bytes } => Err(Error::TargetTooSmall {
                path,
                target_bytes: size_bytes,
                disk_bytes: record.size_bytes,
            }),
            ExistingImage::Missing => anew(planned, None, draft),
            ExistingImage::Unusable(reason) => anew(planned, Some(reason), draft),
        }
    }

    /// Where libvirt keeps the variables of a machine whose configuration does not name a path: only the configuration
    /// of the running machine does.
    fn own_nvram(&self) -> Option<PathBuf> {
        let stored = StoredMachine::read(self.planner.repository, self.snapshot).ok()?;
        let path = stored.nvram_path?;
        (is_called_by_libvirt(&path, self.name) && path.is_file()).then_some(path)
    }

    /// The path of its TPM's state in the machine's current configuration.
    fn own_tpm(&self) -> Option<&PathBuf> {
        let source = self.present.tpm.as_ref()?.source.as_ref();
        source.map(|(_, path)| path)
    }

    /// Plans the firmware variables for `path`; returns the path if the snapshot contains them.
    fn nvram(&self, draft: &mut Draft, path: Option<PathBuf>) -> Result<Option<PathBuf>> {
        let Some(record) = stored::nvram(self.snapshot) else {
            if let Some(path) = &path {
                draft.notes.push(format!(
                    "the snapshot has no variables of its firmware: {} stays as it is",
                    path.display()
                ));
            }
            return Ok(path);
        };
        let Some(path) = path else {
            draft.warnings.push(
                "the machine has no file for the variables of its firmware, so those of the snapshot are not restored"
                    .to_owned(),
            );
            return Ok(None);
        };
        folder_of(&path)?;
        if let Some(machine) = self.neighbours.user_of(&path) {
            return Err(Refusal::InUse {
                path,
                machine: machine.to_owned(),
            }
            .into());
        }
        draft.files.push(PlannedFile {
            content: FileContent::FirmwareVariables,
            from: None,
            way: if path.exists() {
                FileWay::Replace
            } else {
                FileWay::NewFile
            },
            kept_at: None,
            // Replacing a symbolic link would not change the file that it points to.
            to: path.canonicalize().unwrap_or_else(|_| path.clone()),
            format: Format::Raw,
            size_bytes: record.size_bytes,
            data_bytes: record.size_bytes,
        });
        Ok(Some(path))
    }

    /// Changes only the generation ID, which informs the guest that it was rolled back.
    fn keep_configuration(&self, draft: &mut Draft, text: String) -> Result<()> {
        let wish = Rewrite::new(Identity::Keep, self.planner.uuid()?);
        let done = rewrite(&text, &wish).map_err(|detail| unfit(self.name, detail))?;
        draft.configuration = Some(done.text.clone());
        if done.text == text {
            draft
                .notes
                .push("the configuration stays as it is; its disks match those of the snapshot".to_owned());
            return Ok(());
        }
        draft.notes.push(
            "the configuration stays as it is but for its generation id; its disks match those of the snapshot"
                .to_owned(),
        );
        draft.definition = Some(Definition {
            before: text,
            text: done.text,
        });
        Ok(())
    }

    /// The snapshot's configuration, with the current paths of the images.
    fn restore_configuration(
        &self,
        draft: &mut Draft,
        uuid: &str,
        text: String,
        places: BTreeMap<String, DiskPlace>,
    ) -> Result<()> {
        let stored = StoredMachine::read(self.planner.repository, self.snapshot)?;
        let snapshot_uuid = stored.xml.uuid.clone().unwrap_or_default();
        // It would bring the network addresses of another machine.
        if !snapshot_uuid.eq_ignore_ascii_case(uuid) {
            return Err(Refusal::AnotherMachine {
                machine: self.name.to_owned(),
                uuid: uuid.to_owned(),
                snapshot_uuid,
            }
            .into());
        }
        let path = self.present.nvram.as_ref().map(PathBuf::from);
        let path = match (path, stored.nvram_path.clone()) {
            // An existing file may be anything: only the snapshot says that it belonged to the machine.
            (None, Some(path)) if path.symlink_metadata().is_ok() && !is_called_by_libvirt(&path, self.name) => {
                return Err(Refusal::PathTaken { path }.into());
            }
            (own, stored) => own.or(stored),
        };
        let nvram = self.nvram(draft, path)?;
        let mut disks = draft.disks_left_out(&stored, &self.neighbours);
        for (target, place) in places {
            if stored.xml.disks.iter().all(|disk| disk.target != target) {
                draft.warnings.push(format!(
                    "disk {target} was attached only as long as the machine ran: its content is restored, and the snapshot's \
                     configuration does not have it"
                ));
            }
            disks.insert(target, DiskChange::Place(place));
        }
        let wish = Rewrite {
            identity: if self.name == stored.name() {
                Identity::Keep
            } else {
                Identity::Named(self.name.to_owned())
            },
            generation: Some(self.planner.uuid()?),
            disks,
            nvram,
            // The machine's current path if it has one, else the one in the snapshot.
            tpm: self.own_tpm().cloned(),
            domain_type: None,
            emulator: Emulator::Keep,
        };
        let done = rewrite(&stored.text, &wish).map_err(|detail| unfit(self.name, detail))?;
        draft.notes.extend(done.notes);
        draft.warnings.extend(done.warnings);
        let own = self.own_tpm().map(PathBuf::as_path);
        tpm::plan(self.planner, self.snapshot, &self.neighbours, &done.text, own, draft)?;
        draft.configuration = Some(done.text.clone());
        draft.before = Some(stored.text.clone());
        draft.definition = Some(Definition {
            before: text,
            text: done.text,
        });
        Ok(())
    }
}

/// Whether this is the path at which libvirt itself keeps the variables of the machine `name`.
fn is_called_by_libvirt(path: &Path, name: &str) -> bool {
    path.file_name().and_then(OsStr::to_str) == Some(&format!("{name}_VARS.fd"))
}

/// Plans the image as a new file, because it is missing, or because the existing one is unusable for `reason`.
fn anew(planned: PlannedFile, reason: Option<String>, draft: &mut Draft) -> Result<PlannedFile> {
    let to = followed(&planned.to);
    folder_of(&to)?;
    let Some(reason) = reason else {
        draft
            .notes
            .push(format!("{} is missing, and is written anew", planned.to.display()));
        return Ok(PlannedFile {
            to,
            way: FileWay::NewFile,
            ..planned
        });
    };
    let kept_at = name_to_keep(&to);
    draft.warnings.push(format!(
        "{} cannot be used, and is written anew; the file that is there now is kept as {}: {reason}",
        planned.to.display(),
        kept_at.display()
    ));
    Ok(PlannedFile {
        to,
        way: FileWay::SetAside,
        kept_at: Some(kept_at),
        ..planned
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::is_called_by_libvirt;

    #[test]
    fn variables_of_a_machine_that_was_renamed_are_not_those_of_this_one() {
        let path = Path::new("/var/lib/libvirt/qemu/nvram/web1_VARS.fd");
        assert!(is_called_by_libvirt(path, "web1"));
        assert!(!is_called_by_libvirt(path, "web") && !is_called_by_libvirt(path, "web2"));
    }
}
