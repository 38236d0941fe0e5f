//! What a restored machine needs on its host to start. The plan checks this, so that missing parts are known before the
//! first byte is written.
//!
//! Folders for logs and sockets are created: a renamed machine has them under another name, and another host does not
//! have them. Anything else that is missing is reported, and is an error if the machine is to be started.

use std::path::{Path, PathBuf};

use holdfast_host::HypervisorMut;
use holdfast_host::domain_xml::HostNeeds;
use rustix::fs::{Access, access};

use super::planned_file::PlannedFile;
use super::planned_file::nearest_folder;

/// The folder in which the kernel lists network devices.
const LINKS: &str = "/sys/class/net";
/// The folder in which the kernel lists PCI devices.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// A folder that will be created, with its missing parents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFolder {
    /// The folder.
    pub path: PathBuf,
    /// The file or socket that the machine creates in it.
    pub of: PathBuf,
    /// The folder whose owner and mode it copies.
    pub like: PathBuf,
    /// Whether `like` contained the same file in the snapshot's configuration; otherwise it is only a parent folder.
    pub is_counterpart: bool,
}

/// What has to be prepared before the machine can start, and what cannot be.
#[derive(Debug, Default)]
pub(super) struct HostPreparations {
    pub(super) folders: Vec<PlannedFolder>,
    pub(super) unmet: Vec<String>,
}

impl HostPreparations {
    /// Checks what the configuration `text` needs. `before` is the same configuration with its original paths.
    pub(super) fn add(&mut self, text: &str, before: &str, hypervisor: &dyn HypervisorMut, files: &[PlannedFile]) {
        // A configuration that cannot be parsed was refused before.
        let (Ok(needs), Ok(had)) = (HostNeeds::of(text), HostNeeds::of(before)) else {
            return;
        };
        for (number, file) in needs.made_files.iter().enumerate() {
            let is_pair = needs.made_files.len() == had.made_files.len();
            let counterpart = had.made_files.get(number).filter(|_| is_pair);
            self.folder(file, counterpart.and_then(|file| file.parent()));
        }
        for (what, path) in &needs.files {
            if path.exists() || files.iter().any(|file| file.to == *path) {
                continue;
            }
            let way_out = if HostNeeds::is_image(what) {
                ": virsh change-media --eject, or detach-disk"
            } else {
                ""
            };
            self.lacks(format!("{} ({what}) is not there{way_out}", path.display()));
        }
        for link in &needs.links {
            if !Path::new(LINKS).join(link).exists() {
                self.lacks(format!("the host has no network device {link}"));
            }
        }
        for address in &needs.pci_devices {
            if !Path::new(PCI_DEVICES).join(address).exists() {
                self.lacks(format!("the host has no PCI device {address}"));
            }
        }
        for what in hypervisor.missing_resources(&needs) {
            self.lacks(what);
        }
    }

    pub(super) fn lacks(&mut self, what: String) {
        if !self.unmet.contains(&what) {
            self.unmet.push(what);
        }
    }

    fn folder(&mut self, file: &Path, counterpart: Option<&Path>) {
        let Some(folder) = file.parent().filter(|folder| !folder.is_dir()) else {
            return;
        };
        if self.folders.iter().any(|planned| planned.path == folder) {
            return;
        }
        let above = nearest_folder(file);
        let blocks = folder
            .ancestors()
            .any(|path| path.symlink_metadata().is_ok_and(|found| !found.is_dir()) && !path.is_dir());
        if blocks || access(above, Access::WRITE_OK | Access::EXEC_OK).is_err() {
            self.lacks(format!(
                "the folder of {} is not there, and cannot be made",
                file.display()
            ));
            return;
        }
        let counterpart = counterpart.filter(|folder| folder.is_dir());
        self.folders.push(PlannedFolder {
            path: folder.to_owned(),
            of: file.to_owned(),
            like: counterpart.unwrap_or(above).to_owned(),
            is_counterpart: counterpart.is_some(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::HostPreparations;

    #[test]
    fn a_folder_is_like_the_one_that_it_stands_for() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("web1")).unwrap();
        let mut found = HostPreparations::default();
        let new = root.path().join("web1-restored/deep/a.log");
        found.folder(&new, Some(&root.path().join("web1")));
        found.folder(&root.path().join("web1-restored/deep/b.log"), None);
        found.folder(&root.path().join("web1/c.log"), None);
        assert_eq!(found.folders.len(), 1);
        let folder = &found.folders[0];
        assert_eq!((&folder.like, folder.is_counterpart), (&root.path().join("web1"), true));
        found.folder(&root.path().join("other/c.log"), Some(&root.path().join("gone")));
        assert_eq!(found.folders[1].like, root.path());
        assert!(!found.folders[1].is_counterpart && found.unmet.is_empty());
        // A file in the place of a folder.
        std::fs::File::create(root.path().join("file")).unwrap();
        found.folder(&root.path().join("file/x/c.log"), None);
        assert!(found.unmet[0].contains("cannot be made") && found.folders.len() == 2);
    }
}
