//! The existing machines of a hypervisor, and the files they use.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use holdfast_host::domain_xml::{DomainXml, served_folder};
use holdfast_host::{DiskSource, Error as HostError, Hypervisor};
use holdfast_image::{Backing, Format, OpenOptions};

use crate::job::Result;
use crate::restore::instant_job::InstantJob;

/// The maximum number of base images of an image; QEMU allows 200.
const CHAIN_LENGTH_MAX: usize = 200;

/// An existing machine of the hypervisor.
pub(super) struct Neighbour {
    pub(super) name: String,
    pub(super) uuid: String,
    /// Its configurations: the persistent one, and the current one if it runs.
    configurations: Vec<DomainXml>,
    /// Images of an instant restore, which the machine will use when they are filled.
    awaited: Vec<PathBuf>,
}

/// All machines of the hypervisor.
pub(super) struct Neighbours(Vec<Neighbour>);

impl Neighbours {
    pub(super) fn of(hypervisor: &dyn Hypervisor) -> Result<Self> {
        let mut found = Vec::new();
        for summary in hypervisor.machines()? {
            let configuration = hypervisor
                .machine(&summary.uuid)
                .and_then(|machine| machine.configuration());
            let files = match configuration {
                // A transient machine may end meanwhile.
                Err(HostError::NoSuchMachine { .. }) => continue,
                other => other?,
            };
            let texts: Vec<&str> = files
                .iter()
                .filter_map(|(_, bytes)| std::str::from_utf8(bytes).ok())
                .collect();
            let folders = texts.iter().filter_map(|text| served_folder(text));
            let jobs = folders.filter_map(|folder| InstantJob::read(&folder).ok());
            found.push(Neighbour {
                // If a machine's configuration cannot be parsed, the files it uses are unknown.
                configurations: texts.iter().filter_map(|text| DomainXml::parse(text).ok()).collect(),
                awaited: jobs.flat_map(|job| job.disks).map(|disk| disk.target).collect(),
                name: summary.name,
                uuid: summary.uuid,
            });
        }
        Ok(Self(found))
    }

    /// All machines but one.
    pub(super) fn without(mut self, uuid: &str) -> Self {
        self.0.retain(|neighbour| !neighbour.uuid.eq_ignore_ascii_case(uuid));
        self
    }

    pub(super) fn named(&self, name: &str) -> Option<&Neighbour> {
        self.0.iter().find(|neighbour| neighbour.name == name)
    }

    pub(super) fn with_uuid(&self, uuid: &str) -> Option<&Neighbour> {
        self.0
            .iter()
            .find(|neighbour| neighbour.uuid.eq_ignore_ascii_case(uuid))
    }

    /// MAC addresses of network cards, in lower case.
    pub(super) fn macs(&self) -> HashSet<String> {
        let configurations = self.0.iter().flat_map(|neighbour| &neighbour.configurations);
        configurations
            .flat_map(|xml| &xml.macs)
            .map(|mac| mac.to_ascii_lowercase())
            .collect()
    }

    /// The machine that uses the file as a disk, as a base image, for firmware variables or for the state of its TPM.
    pub(super) fn user_of(&self, path: &Path) -> Option<&str> {
        let wanted = Identity::of(path);
        let uses = |neighbour: &&Neighbour| neighbour.files().any(|file| Identity::of(&file) == wanted);
        self.0.iter().find(uses).map(|neighbour| &neighbour.name[..])
    }

    /// The machine that has a disk at a place that is not a file.
    pub(super) fn user_of_place(&self, place: &str) -> Option<&str> {
        let is_there = |source: &DiskSource| matches!(source, DiskSource::Other(other) if other == place);
        let uses = |neighbour: &&Neighbour| {
            let disks = neighbour.configurations.iter().flat_map(|xml| &xml.disks);
            disks.map(|disk| &disk.source).any(is_there)
        };
        self.0.iter().find(uses).map(|neighbour| &neighbour.name[..])
    }
}

impl Neighbour {
    fn files(&self) -> impl Iterator<Item = PathBuf> {
        let present = self.configurations.iter().flat_map(|xml| {
            let disks = xml.disks.iter().flat_map(|disk| match &disk.source {
                DiskSource::File(path) | DiskSource::Device(path) => chain_of(path, disk.format.as_deref()),
                _ => Vec::new(),
            });
            let tpm = xml.tpm.iter().flat_map(|tpm| &tpm.source);
            let beside = xml
                .nvram
                .iter()
                .map(PathBuf::from)
                .chain(tpm.map(|(_, path)| path.clone()));
            disks.chain(beside)
        });
        present.chain(self.awaited.iter().cloned())
    }
}

/// An image and its base images, as far as they can be read. No file is changed.
///
/// Without a given format the image is raw, as for libvirt: a guest may have written any header into it.
pub fn chain_of(path: &Path, format: Option<&str>) -> Vec<PathBuf> {
    let mut chain = vec![path.to_owned()];
    let mut format = format.and_then(Format::from_name);
    while let Some(said) = format.filter(|format| *format != Format::Raw)
        && chain.len() < CHAIN_LENGTH_MAX
    {
        let above = &chain[chain.len() - 1];
        let options = OpenOptions {
            format: Some(said),
            backing: Backing::Ignore,
            ..OpenOptions::default()
        };
        let Ok(image) = holdfast_image::open(above, &options) else {
            break;
        };
        let Some(qcow2) = image.layers().first().and_then(|layer| layer.qcow2.as_ref()) else {
            break;
        };
        let folder = above.parent().unwrap_or(Path::new("/"));
        let Some(below) = qcow2.backing_file.as_ref().map(|below| folder.join(below)) else {
            break;
        };
        format = qcow2.backing_format.as_deref().and_then(Format::from_name);
        chain.push(below);
    }
    chain
}

/// Whether two paths lead to the same file.
pub(crate) fn is_same(left: &Path, right: &Path) -> bool {
    left == right || Identity::of(left) == Identity::of(right)
}

/// The identity of a file, whatever path leads to it.
#[derive(PartialEq, Eq)]
enum Identity {
    File {
        device: u64,
        inode: u64,
    },
    BlockDevice(u64),
    /// The file does not exist.
    Name(PathBuf),
}

impl Identity {
    fn of(path: &Path) -> Self {
        use std::os::unix::fs::FileTypeExt as _;
        match path.metadata() {
            Ok(found) if found.file_type().is_block_device() => Self::BlockDevice(found.rdev()),
            Ok(found) => Self::File {
                device: found.dev(),
                inode: found.ino(),
            },
            Err(_) => Self::Name(path.to_owned()),
        }
    }
}
