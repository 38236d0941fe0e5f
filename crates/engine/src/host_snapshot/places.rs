//! Finds the datasets that hold the disks of machines.

use std::collections::BTreeMap;
use std::path::Path;

use holdfast_host::provider::{Dataset, DatasetPath, HostSnapshotScope, Located, ProviderKind, locate};
use holdfast_host::{Decision, Description, DiskChoice, DiskSource, MachineDisk};

use crate::restore::machine::chain_of;

/// Where the disks of a machine are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachinePlaces {
    /// Each disk, by its name in the machine.
    pub disks: Vec<(String, DatasetPath)>,
    /// Disks without a provider of host snapshots, and why.
    pub nowhere: Vec<(String, String)>,
    /// Disks that are excluded, and why.
    pub left_out: Vec<(String, String)>,
    /// The backing images of disks, each with the name of the disk. The machine does not write to them.
    pub bases: Vec<(String, DatasetPath)>,
    /// Backing images without a provider of host snapshots, and why.
    pub bases_nowhere: Vec<(String, String)>,
}

impl MachinePlaces {
    /// The datasets that hold the disks of the machine.
    pub fn wanted(&self) -> Vec<HostSnapshotScope> {
        wanted_of(self.disks.iter().map(|(_, place)| place))
    }

    /// The datasets with the disks and their backing images: everything needed to read the disks. Shared datasets occur once.
    pub fn wanted_with_bases(&self) -> Vec<HostSnapshotScope> {
        let places = self.disks.iter().chain(&self.bases);
        wanted_of(places.map(|(_, place)| place))
    }

    /// Whether any disk is in the dataset, or below it if it is a folder or has descendants.
    fn is_in(&self, wanted: &HostSnapshotScope) -> bool {
        self.disks.iter().any(|(_, place)| is_in(place, wanted))
    }
}

fn wanted_of<'p>(places: impl Iterator<Item = &'p DatasetPath>) -> Vec<HostSnapshotScope> {
    let mut wanted: BTreeMap<&Dataset, HostSnapshotScope> = BTreeMap::new();
    for place in places {
        let one = wanted
            .entry(&place.dataset)
            .or_insert_with(|| HostSnapshotScope::all_of(place.dataset.clone()));
        if place.dataset.provider == ProviderKind::Reflink && !one.files.contains(&place.path) {
            one.files.push(place.path.clone());
        }
    }
    wanted.into_values().collect()
}

fn is_in(place: &DatasetPath, wanted: &HostSnapshotScope) -> bool {
    let (dataset, of) = (&wanted.dataset, &place.dataset);
    let is_below = match dataset.provider {
        // A folder of clones contains everything below it.
        ProviderKind::Reflink => Path::new(&of.name).starts_with(&dataset.name),
        ProviderKind::Zfs if wanted.is_tree => {
            let below = of.name.strip_prefix(&dataset.name);
            below.is_some_and(|rest| rest.starts_with('/'))
        }
        _ => false,
    };
    let is_of_it = dataset.provider == of.provider && (dataset.name == of.name || is_below);
    // The same folder may be both a subvolume and a folder of clones.
    let are_folders = dataset.provider.has_folders() && of.provider.has_folders();
    // A btrfs snapshot does not include nested subvolumes, and neither do clones of a folder.
    let is_nested = of.provider == ProviderKind::Btrfs && !Path::new(&dataset.name).starts_with(&of.name);
    is_of_it || are_folders && !is_nested && Path::new(&of.name).join(&place.path).starts_with(&dataset.name)
}

/// Path of the image of a disk; empty if it has none.
pub(crate) fn image_path(disk: &MachineDisk) -> &Path {
    match &disk.source {
        holdfast_host::DiskSource::File(path) | holdfast_host::DiskSource::Device(path) => path,
        _ => Path::new(""),
    }
}

/// The datasets of the disks that a machine can write.
pub fn places_of(description: &Description, choice: &DiskChoice, run: u32) -> MachinePlaces {
    let label = format!("{run:08x}");
    let mut places = MachinePlaces::default();
    for (disk, decision) in description.disks.iter().zip(description.decide(choice)) {
        match (decision, path_of(disk)) {
            (Decision::Leave(why), _) => places.left_out.push((disk.target.clone(), why)),
            (Decision::Take, Err(why)) => places.nowhere.push((disk.target.clone(), why)),
            (Decision::Take, Ok(path)) => match locate(path, &label) {
                Ok(Located::In(place)) => {
                    places.disks.push((disk.target.clone(), place));
                    places.add_bases(disk, path, &label);
                }
                Ok(Located::Nowhere(why)) => places.nowhere.push((disk.target.clone(), why)),
                // A missing file must not hide the other disks.
                Err(error) => places.nowhere.push((disk.target.clone(), error.to_string())),
            },
        }
    }
    places
}

impl MachinePlaces {
    /// Adds the backing images of a disk, as far as they can be read.
    fn add_bases(&mut self, disk: &MachineDisk, path: &Path, label: &str) {
        // A guest can write any bytes to a raw image: it may look like qcow2 and name any file.
        if disk.format.as_deref() != Some("qcow2") {
            return;
        }
        for base in chain_of(path, disk.format.as_deref()).into_iter().skip(1) {
            let found = match locate(&base, label) {
                Ok(Located::In(place)) if is_read_only(&place) => {
                    Err("its file system is mounted read-only, where none can be made".to_owned())
                }
                Ok(Located::In(place)) => Ok(place),
                Ok(Located::Nowhere(why)) => Err(why),
                Err(error) => Err(error.to_string()),
            };
            match found {
                Ok(place) => self.bases.push((disk.target.clone(), place)),
                Err(why) => {
                    let why = format!("its base {}: {why}", base.display());
                    self.bases_nowhere.push((disk.target.clone(), why));
                }
            }
        }
    }
}

/// Whether nothing can be written beside the files of the dataset; only some providers need that.
fn is_read_only(place: &DatasetPath) -> bool {
    let is_so = || {
        let found = rustix::fs::statvfs(&place.dataset.name);
        found.is_ok_and(|found| found.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY))
    };
    place.dataset.provider.has_folders() && is_so()
}

fn path_of(disk: &MachineDisk) -> std::result::Result<&Path, String> {
    match &disk.source {
        DiskSource::File(path) | DiskSource::Device(path) => Ok(path),
        DiskSource::Other(place) => Err(format!("it is elsewhere: {place}")),
        DiskSource::Empty => Err("the drive is empty".to_owned()),
    }
}

/// Indexes of the machines that have disks in `wanted`.
pub fn machines_in<'m>(
    machines: impl IntoIterator<Item = &'m MachinePlaces>,
    wanted: &[HostSnapshotScope],
) -> Vec<bool> {
    let is_there = |places: &MachinePlaces| wanted.iter().any(|one| places.is_in(one));
    machines.into_iter().map(is_there).collect()
}

#[cfg(test)]
mod tests {
    use holdfast_host::provider::{Dataset, DatasetPath, HostSnapshotScope, ProviderKind};

    use super::{MachinePlaces, machines_in};

    fn place(provider: ProviderKind, dataset: &str, path: &str) -> DatasetPath {
        DatasetPath {
            dataset: Dataset {
                provider,
                name: dataset.to_owned(),
            },
            path: path.into(),
        }
    }

    fn machine(disks: &[DatasetPath]) -> MachinePlaces {
        MachinePlaces {
            disks: disks.iter().map(|place| ("vda".to_owned(), place.clone())).collect(),
            ..MachinePlaces::default()
        }
    }

    fn wanted(provider: ProviderKind, name: &str, is_tree: bool) -> HostSnapshotScope {
        HostSnapshotScope {
            is_tree,
            ..HostSnapshotScope::all_of(place(provider, name, "").dataset)
        }
    }

    #[test]
    fn several_disks_of_a_dataset_are_one_snapshot_and_clones_name_their_files() {
        let zfs = |path| place(ProviderKind::Zfs, "t/vm", path);
        let clone = |path| place(ProviderKind::Reflink, "/x", path);
        let wanted = machine(&[zfs("a"), clone("b"), zfs("c"), clone("d")]).wanted();
        assert_eq!(wanted.len(), 2);
        assert!(wanted[0].files.is_empty());
        assert_eq!(wanted[1].files, ["b", "d"].map(std::path::PathBuf::from));
    }

    /// Fifty disks may share one backing image: it is cut once.
    #[test]
    fn what_disks_are_based_on_is_wanted_once_and_does_not_make_a_machine_be_there() {
        let base = place(ProviderKind::Zfs, "t/templates", "debian.qcow2");
        let disks: Vec<_> = (0..50)
            .map(|number| place(ProviderKind::Zfs, "t/vm", &format!("{number}")))
            .collect();
        let places = MachinePlaces {
            bases: (0..50).map(|number| (format!("vd{number}"), base.clone())).collect(),
            ..machine(&disks)
        };
        let names = |wanted: Vec<HostSnapshotScope>| wanted.into_iter().map(|one| one.dataset.name).collect::<Vec<_>>();
        assert_eq!(names(places.wanted_with_bases()), ["t/templates", "t/vm"]);
        assert_eq!(names(places.wanted()), ["t/vm"]);
        assert_eq!(
            machines_in([&places], &[wanted(ProviderKind::Zfs, "t/templates", false)]),
            [false]
        );
    }

    #[test]
    fn a_machine_is_in_the_datasets_of_its_disks() {
        let in_zfs = machine(&[place(ProviderKind::Zfs, "t/vm/web", "a")]);
        let in_folder = machine(&[place(ProviderKind::Reflink, "/srv/vms/web", "a")]);
        let found = |wanted: HostSnapshotScope| machines_in([&in_zfs, &in_folder], &[wanted]);
        assert_eq!(found(wanted(ProviderKind::Zfs, "t/vm/web", false)), [true, false]);
        assert_eq!(found(wanted(ProviderKind::Zfs, "t/vm", false)), [false, false]);
        assert_eq!(found(wanted(ProviderKind::Zfs, "t/vm", true)), [true, false]);
        assert_eq!(found(wanted(ProviderKind::Zfs, "t/v", true)), [false, false]);
        assert_eq!(found(wanted(ProviderKind::Reflink, "/srv/vms", false)), [false, true]);
        assert_eq!(found(wanted(ProviderKind::Btrfs, "/srv", false)), [false, true]);
        assert_eq!(found(wanted(ProviderKind::Reflink, "/srv/vm", false)), [false, false]);
        let nested = machine(&[place(ProviderKind::Btrfs, "/srv/vms", "web/a")]);
        let found = |kind, name: &str| machines_in([&nested], &[wanted(kind, name, false)]);
        assert_eq!(found(ProviderKind::Btrfs, "/srv/vms"), [true]);
        assert_eq!(found(ProviderKind::Reflink, "/srv/vms/web"), [true]);
        assert_eq!(found(ProviderKind::Btrfs, "/srv"), [false]);
        assert_eq!(found(ProviderKind::Reflink, "/srv"), [false]);
    }
}
