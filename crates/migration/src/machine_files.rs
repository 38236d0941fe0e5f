//! The files of a machine of which its hypervisor keeps snapshots or checkpoints. These states are in the images, so the files
//! move as they are.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use holdfast_block::error_text;
use holdfast_engine::chain_of;
use holdfast_host::domain_xml::files_of_snapshot;
use holdfast_host::{DiskKind, DiskSource, MachineDisk, MachineHistory};
use holdfast_image::{Format, LayerInfo, OpenOptions};

/// A file of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MachineFile {
    pub(crate) path: PathBuf,
    /// The target of the disk whose image it is; none for backing files, other branches of snapshots, and saved memory.
    pub(crate) disk: Option<String>,
    /// Whether a disk or a snapshot names it. Other files are backing files, which may be templates of other machines.
    pub(crate) is_named: bool,
    /// The backing file of an image, if it has one.
    pub(crate) backing: Option<BackingReference>,
}

/// How an image names its backing file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackingReference {
    /// As the image stores it.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
}

/// All files of a machine.
#[derive(Debug, Default)]
pub(crate) struct MachineFiles {
    pub(crate) files: Vec<MachineFile>,
    /// Files that snapshots name and that do not exist.
    pub(crate) missing: Vec<PathBuf>,
    /// Why files cannot be moved as they are.
    pub(crate) obstacles: Vec<String>,
    /// The place in `files` for every path that names one of them.
    places: BTreeMap<PathBuf, usize>,
}

impl MachineFiles {
    /// The files of these disks, with their backing files, and those of all snapshots.
    pub(crate) fn find(disks: &[MachineDisk], history: &MachineHistory) -> Self {
        let mut found = Self::default();
        for disk in disks {
            match &disk.source {
                DiskSource::File(path) => {
                    let format = disk.format.as_deref().unwrap_or(Format::Raw.name());
                    if let Some(file) = found.add_chain(path, format) {
                        file.disk = Some(disk.target.clone());
                    }
                }
                DiskSource::Device(path) => found.obstacles.push(format!(
                    "{} is a device: with snapshots or checkpoints, only disks in files move",
                    path.display()
                )),
                DiskSource::Empty | DiskSource::Other(_) => {}
            }
        }
        for snapshot in &history.snapshots {
            match files_of_snapshot(&snapshot.text) {
                Ok(files) => files
                    .iter()
                    .for_each(|file| found.add_of_snapshot(&file.path, &file.format)),
                Err(reason) => found
                    .obstacles
                    .push(format!("the description of a snapshot cannot be read: {reason}")),
            }
        }
        found
    }

    fn add_of_snapshot(&mut self, path: &Path, format: &str) {
        if path.exists() {
            self.add_chain(path, format);
        } else if !self.missing.iter().any(|missing| missing == path) {
            self.missing.push(path.to_owned());
        }
    }

    /// Adds a file that is named, and its backing files. Returns it, unless there are obstacles.
    fn add_chain(&mut self, path: &Path, format: &str) -> Option<&mut MachineFile> {
        if !self.places.contains_key(path) {
            self.open_chain(path, format);
        }
        let file = &mut self.files[*self.places.get(path)?];
        file.is_named = true;
        Some(file)
    }

    fn open_chain(&mut self, path: &Path, format: &str) {
        let options = OpenOptions {
            format: Format::from_name(format),
            allow: chain_of(path, Some(format)),
            ..OpenOptions::default()
        };
        match holdfast_image::open(path, &options) {
            Ok(image) => {
                let layers = image.layers();
                for (depth, layer) in layers.iter().enumerate() {
                    self.add(layer, layers.get(depth + 1));
                }
            }
            Err(error) => self.obstacles.push(error_text(&error)),
        }
    }

    fn add(&mut self, layer: &LayerInfo, below: Option<&LayerInfo>) {
        let path = layer.path.display();
        if self.places.contains_key(&layer.path) {
            return;
        }
        let is_supported = matches!(layer.format, Format::Raw | Format::Qcow2) && layer.files().len() == 1;
        if !is_supported {
            self.obstacles.push(format!(
                "{path} is a {} image{}: with snapshots or checkpoints, only raw and qcow2 images in one file move",
                layer.format.name(),
                if layer.files().len() > 1 {
                    " of several files"
                } else {
                    ""
                },
            ));
            return;
        }
        if !layer.path.is_file() {
            self.obstacles.push(format!(
                "{path} is not a file: with snapshots or checkpoints, only disks in files move"
            ));
            return;
        }
        let place = self.place_of_same(&layer.path).unwrap_or_else(|| {
            let name = layer.qcow2.as_ref().and_then(|qcow2| qcow2.backing_file.clone());
            self.files.push(MachineFile {
                path: layer.path.clone(),
                disk: None,
                is_named: false,
                backing: name.zip(below).map(|(name, below)| BackingReference {
                    name,
                    path: below.path.clone(),
                }),
            });
            self.files.len() - 1
        });
        self.places.insert(layer.path.clone(), place);
    }

    /// The place of a file that is known by another path.
    fn place_of_same(&self, path: &Path) -> Option<usize> {
        let identity = identity_of(path)?;
        let is_it = |file: &MachineFile| identity_of(&file.path) == Some(identity);
        self.files.iter().position(is_it)
    }

    /// The new paths by the old ones, for files that get `new_paths` in their order.
    pub(crate) fn moved(&self, new_paths: &[PathBuf]) -> BTreeMap<PathBuf, PathBuf> {
        let places = self.places.iter();
        places
            .filter_map(|(path, place)| Some((path.clone(), new_paths.get(*place)?.clone())))
            .collect()
    }
}

/// The device and inode of a file.
fn identity_of(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt as _;
    let found = path.metadata().ok()?;
    Some((found.dev(), found.ino()))
}

/// The disks of a machine that only it writes.
pub(crate) fn own_disks(disks: Vec<MachineDisk>) -> Vec<MachineDisk> {
    let is_own = |disk: &MachineDisk| disk.kind == DiskKind::Disk && !disk.is_read_only && !disk.is_shared;
    disks.into_iter().filter(is_own).collect()
}

/// The name that an image stores for its backing file at the new place; none if the present one is right there.
pub(crate) fn new_backing_name(
    file: &MachineFile,
    new_path: &Path,
    moved: &BTreeMap<PathBuf, PathBuf>,
) -> Result<Option<String>, String> {
    let Some(backing) = &file.backing else {
        return Ok(None);
    };
    let Some(new_backing) = moved.get(&backing.path) else {
        return Ok(None);
    };
    let folder = new_path.parent().unwrap_or(Path::new("/"));
    if folder.join(&backing.name) == *new_backing {
        return Ok(None);
    }
    match new_backing.to_str() {
        Some(name) => Ok(Some(name.to_owned())),
        None => Err(format!("the path {} is not UTF-8", new_backing.display())),
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use holdfast_host::{DiskKind, DiskSource, MachineDisk, MachineHistory, SnapshotDescription};
    use holdfast_image::{BackingFile, CreateOptions, Format, create};

    use super::{MachineFiles, new_backing_name};

    fn image(path: &Path, backing: Option<&Path>) {
        let mut options = CreateOptions::new(Format::Qcow2, 1 << 20);
        options.qcow2.backing = backing.map(|backing| BackingFile {
            name: backing.to_str().unwrap().to_owned(),
            format: Format::Qcow2,
        });
        create(path, &options).unwrap();
    }

    fn disk(path: &Path) -> MachineDisk {
        MachineDisk {
            target: "vda".to_owned(),
            kind: DiskKind::Disk,
            source: DiskSource::File(path.to_owned()),
            format: Some("qcow2".to_owned()),
            is_read_only: false,
            is_shared: false,
            alias: None,
        }
    }

    #[test]
    fn files_are_found_by_disks_and_snapshots_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("bases")).unwrap();
        image(&path("bases/base"), None);
        image(&path("top"), Some(&path("bases/base")));
        image(&path("branch"), Some(Path::new("bases/base")));
        std::os::unix::fs::symlink(path("top"), path("link")).unwrap();
        let snapshot = |names: &[&str]| {
            let disk = |name: &&str| {
                format!(
                    "<disk><driver type='qcow2'/><source file='{}'/></disk>",
                    path(name).display()
                )
            };
            SnapshotDescription {
                text: format!(
                    "<domainsnapshot><disks>{}</disks></domainsnapshot>",
                    names.iter().map(disk).collect::<String>()
                ),
                is_current: false,
            }
        };
        let history = MachineHistory {
            snapshots: vec![snapshot(&["link", "branch"]), snapshot(&["gone", "bases/base"])],
            checkpoints: Vec::new(),
        };
        let found = MachineFiles::find(&[disk(&path("top"))], &history);
        let names: Vec<&Path> = found
            .files
            .iter()
            .map(|file| file.path.strip_prefix(folder.path()).unwrap())
            .collect();
        assert_eq!(names, ["top", "bases/base", "branch"].map(Path::new));
        assert_eq!(found.files[0].disk.as_deref(), Some("vda"));
        assert!(found.files.iter().all(|file| file.is_named));
        assert_eq!((found.missing, found.obstacles), (vec![path("gone")], Vec::new()));
    }

    #[test]
    fn backing_files_get_the_name_that_is_right_at_the_new_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        image(&path("base"), None);
        image(&path("relative"), Some(Path::new("base")));
        image(&path("absolute"), Some(&path("base")));
        let history = MachineHistory::default();
        let found = MachineFiles::find(&[disk(&path("relative")), disk(&path("absolute"))], &history);
        let new_name = |base: &str, file: usize| {
            let new_paths = ["/vm/relative", base, "/vm/absolute"].map(PathBuf::from);
            let moved = found.moved(&new_paths);
            new_backing_name(&found.files[file], &new_paths[file], &moved).unwrap()
        };
        assert_eq!(found.files[1].path, path("base"));
        assert!(found.files[0].is_named && !found.files[1].is_named);
        assert_eq!(new_name("/vm/base", 0), None);
        assert_eq!(new_name("/vm/base-2", 0).as_deref(), Some("/vm/base-2"));
        assert_eq!(new_name("/vm/base", 2).as_deref(), Some("/vm/base"));
        assert_eq!(new_name(path("base").to_str().unwrap(), 2), None);
        assert_eq!(new_name("/vm/base", 1), None);
    }

    #[test]
    fn images_of_other_formats_are_obstacles() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.vdi");
        create(&path, &CreateOptions::new(Format::Vdi, 1 << 20)).unwrap();
        let mut vdi = disk(&path);
        vdi.format = Some("vdi".to_owned());
        let device = MachineDisk {
            source: DiskSource::Device("/dev/vg/web1".into()),
            ..disk(&path)
        };
        let found = MachineFiles::find(&[vdi, device], &MachineHistory::default());
        assert_eq!(found.files, []);
        assert!(
            found.obstacles[0].contains("disk.vdi is a vdi image: "),
            "{:?}",
            found.obstacles
        );
        assert!(
            found.obstacles[1].contains("/dev/vg/web1 is a device: "),
            "{:?}",
            found.obstacles
        );
    }
}
