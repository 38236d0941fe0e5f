//! The files of a machine that moves with its snapshots and checkpoints, and where they go.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use holdfast_host::{Description, MachineHistory};
use holdfast_live_copy::Seed;

use super::Findings;
use super::places::{
    DiskName, DiskPlaces, MovingForm, PlannedDisk, family_of, moving_disks, planned_variables, unknown_seeds,
};
use crate::error::Result;
use crate::far::NVRAM;
use crate::image_file::ImageFile;
use crate::machine_files::{MachineFile, MachineFiles, new_backing_name};

/// What moves of a machine with its snapshots.
pub(super) struct PlannedFiles {
    pub(super) disks: Vec<PlannedDisk>,
    /// The images of its disks, which nothing may write meanwhile.
    pub(super) images: Vec<ImageFile>,
    /// The new paths of all files by the old ones.
    pub(super) moved: BTreeMap<PathBuf, PathBuf>,
}

/// Plans the files of a machine that is shut off.
pub(super) fn plan_files(
    description: &Description,
    history: &MachineHistory,
    places: &DiskPlaces<'_>,
    findings: &mut Findings,
) -> Result<PlannedFiles> {
    let moving = moving_disks(description, &mut findings.obstacles);
    let found = MachineFiles::find(&moving, history);
    findings.obstacles.extend(found.obstacles.iter().cloned());
    let missing = found.missing.iter();
    findings.notes.extend(missing.map(|path| {
        format!(
            "{}, which a snapshot names, does not exist: that snapshot cannot be used",
            path.display()
        )
    }));
    let mut disks: Vec<PlannedDisk> = Vec::new();
    for file in &found.files {
        let disk = planned_file(file, places, &disks, &mut findings.notes)?;
        disks.push(disk);
    }
    let new_paths: Vec<PathBuf> = disks.iter().map(|disk| disk.path.clone()).collect();
    let mut moved = found.moved(&new_paths);
    for (file, disk) in found.files.iter().zip(&mut disks) {
        match new_backing_name(file, &disk.path, &moved) {
            Ok(backing_name) => disk.form = MovingForm::File { backing_name },
            Err(reason) => findings.obstacles.push(reason),
        }
        // What opens here can be copied later.
        match disk.open() {
            Ok(device) => disk.size_bytes = device.size_bytes(),
            Err(error) => findings.obstacles.push(holdfast_block::error_text(&error)),
        }
    }
    let images = disks
        .iter()
        .filter(|disk| moving.iter().any(|moving| moving.target == disk.target));
    let format = |target: &str| moving.iter().find(|disk| disk.target == target)?.format.clone();
    let images = images
        .map(|disk| ImageFile {
            path: disk.image.path.clone(),
            format: format(&disk.target),
        })
        .collect();
    if let Some(mut variables) = planned_variables(description, places, &mut findings.notes)? {
        variables.size_bytes = variables.image.size_bytes()?;
        moved.insert(variables.image.path.clone(), variables.path.clone());
        disks.push(variables);
    }
    findings.obstacles.extend(unknown_seeds(places.seeds, &disks));
    Ok(PlannedFiles { disks, images, moved })
}

fn planned_file(
    file: &MachineFile,
    places: &DiskPlaces<'_>,
    planned: &[PlannedDisk],
    notes: &mut Vec<String>,
) -> Result<PlannedDisk> {
    let (stem, extension) = parts_of(&file.path);
    let file_name = format!("{stem}{extension}");
    // Files of several folders may have the same name.
    let target = match &file.disk {
        Some(disk) => disk.clone(),
        None if planned.iter().any(|disk| disk.target == file_name) => file.path.display().to_string(),
        None => file_name.clone(),
    };
    let name = DiskName {
        stem: &stem,
        extension: &extension,
        target: file.disk.as_deref().unwrap_or("base"),
    };
    Ok(PlannedDisk {
        path: places.free_disk_path(&name, planned, notes)?,
        size_bytes: 0,
        // It is compared with the bytes of the file, whatever its format.
        seed: places
            .seed_of_user(&target)
            .or_else(|| former_seed(places, &stem, &extension))
            .map(|seed| Seed {
                format: Some("raw".to_owned()),
                ..seed
            }),
        target,
        image: ImageFile {
            path: file.path.clone(),
            format: Some("raw".to_owned()),
        },
        form: MovingForm::File { backing_name: None },
    })
}

/// A former file of the machine there with the same name, or with another number.
fn former_seed(places: &DiskPlaces<'_>, stem: &str, extension: &str) -> Option<Seed> {
    let family = family_of(stem, places.machine);
    let is_of_family = |path: &Path| {
        let (other, other_extension) = parts_of(path);
        other_extension == extension && family_of(&other, places.machine) == family
    };
    let files = places.former.iter().filter(|former| former.disk != NVRAM);
    let former = files.into_iter().find(|former| is_of_family(&former.path))?;
    Some(Seed {
        path: former.path.clone(),
        format: None,
    })
}

/// The name of a file, and its extension with the dot.
fn parts_of(path: &Path) -> (String, String) {
    let text = |part: Option<&std::ffi::OsStr>| part.unwrap_or_default().to_string_lossy().into_owned();
    let extension = text(path.extension());
    let extension = if extension.is_empty() {
        extension
    } else {
        format!(".{extension}")
    };
    (text(path.file_stem()), extension)
}
