//! Where the disks of machines really live.

use std::collections::BTreeMap;
use std::path::Path;

use holdfast_host::provider::{Dataset, Located, Place, ProviderKind, Wanted, locate};
use holdfast_host::{Decision, Description, DiskChoice, DiskSource, MachineDisk};

/// Where the disks of a machine are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachinePlaces {
    /// Each disk, by its name in the machine.
    pub disks: Vec<(String, Place)>,
    /// Disks of which nobody makes host snapshots, and why.
    pub nowhere: Vec<(String, String)>,
    /// Disks that are not the machine's own, and why.
    pub left_out: Vec<(String, String)>,
}

impl MachinePlaces {
    /// What host snapshots of the machine are made of.
    pub fn wanted(&self) -> Vec<Wanted> {
        let mut wanted: BTreeMap<&Dataset, Wanted> = BTreeMap::new();
        for (_, place) in &self.disks {
            let one = wanted
                .entry(&place.dataset)
                .or_insert_with(|| Wanted::all_of(place.dataset.clone()));
            if place.dataset.provider == ProviderKind::Reflink && !one.files.contains(&place.path) {
                one.files.push(place.path.clone());
            }
        }
        wanted.into_values().collect()
    }

    /// Whether any disk is in a dataset, or below it where that is a folder or has others below it.
    fn is_in(&self, wanted: &Wanted) -> bool {
        self.disks.iter().any(|(_, place)| is_in(place, wanted))
    }
}

fn is_in(place: &Place, wanted: &Wanted) -> bool {
    let (dataset, of) = (&wanted.dataset, &place.dataset);
    let is_below = match dataset.provider {
        // A folder of clones holds all below it.
        ProviderKind::Reflink => Path::new(&of.name).starts_with(&dataset.name),
        ProviderKind::Zfs if wanted.is_tree => {
            let below = of.name.strip_prefix(&dataset.name);
            below.is_some_and(|rest| rest.starts_with('/'))
        }
        _ => false,
    };
    let is_of_it = dataset.provider == of.provider && (dataset.name == of.name || is_below);
    // The same folder may be looked at as a subvolume, and as one of clones.
    let are_folders = dataset.provider.has_folders() && of.provider.has_folders();
    is_of_it || are_folders && Path::new(&of.name).join(&place.path).starts_with(&dataset.name)
}

/// Where the disks of a machine are that it can write.
pub fn places_of(description: &Description, choice: &DiskChoice, run: u32) -> MachinePlaces {
    let label = format!("{run:08x}");
    let mut places = MachinePlaces::default();
    for (disk, decision) in description.disks.iter().zip(description.decide(choice)) {
        match (decision, path_of(disk)) {
            (Decision::Leave(why), _) => places.left_out.push((disk.target.clone(), why)),
            (Decision::Take, Err(why)) => places.nowhere.push((disk.target.clone(), why)),
            (Decision::Take, Ok(path)) => match locate(path, &label) {
                Ok(Located::In(place)) => places.disks.push((disk.target.clone(), place)),
                Ok(Located::Nowhere(why)) => places.nowhere.push((disk.target.clone(), why)),
                // One whose file is gone is no reason to know nothing of the others.
                Err(error) => places.nowhere.push((disk.target.clone(), error.to_string())),
            },
        }
    }
    places
}

fn path_of(disk: &MachineDisk) -> std::result::Result<&Path, String> {
    match &disk.source {
        DiskSource::File(path) | DiskSource::Device(path) => Ok(path),
        DiskSource::Other(place) => Err(format!("it is elsewhere: {place}")),
        DiskSource::Empty => Err("the drive is empty".to_owned()),
    }
}

/// Those of `machines` that have disks in what is wanted, by their places.
pub fn machines_in<'m>(machines: impl IntoIterator<Item = &'m MachinePlaces>, wanted: &[Wanted]) -> Vec<bool> {
    let is_there = |places: &MachinePlaces| wanted.iter().any(|one| places.is_in(one));
    machines.into_iter().map(is_there).collect()
}

#[cfg(test)]
mod tests {
    use holdfast_host::provider::{Dataset, Place, ProviderKind, Wanted};

    use super::{MachinePlaces, machines_in};

    fn place(provider: ProviderKind, dataset: &str, path: &str) -> Place {
        Place {
            dataset: Dataset {
                provider,
                name: dataset.to_owned(),
            },
            path: path.into(),
        }
    }

    fn machine(disks: &[Place]) -> MachinePlaces {
        MachinePlaces {
            disks: disks.iter().map(|place| ("vda".to_owned(), place.clone())).collect(),
            ..MachinePlaces::default()
        }
    }

    fn wanted(provider: ProviderKind, name: &str, is_tree: bool) -> Wanted {
        Wanted {
            is_tree,
            ..Wanted::all_of(place(provider, name, "").dataset)
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

    #[test]
    fn a_machine_is_in_the_datasets_of_its_disks() {
        let in_zfs = machine(&[place(ProviderKind::Zfs, "t/vm/web", "a")]);
        let in_folder = machine(&[place(ProviderKind::Reflink, "/srv/vms/web", "a")]);
        let found = |wanted: Wanted| machines_in([&in_zfs, &in_folder], &[wanted]);
        assert_eq!(found(wanted(ProviderKind::Zfs, "t/vm/web", false)), [true, false]);
        assert_eq!(found(wanted(ProviderKind::Zfs, "t/vm", false)), [false, false]);
        assert_eq!(found(wanted(ProviderKind::Zfs, "t/vm", true)), [true, false]);
        assert_eq!(found(wanted(ProviderKind::Zfs, "t/v", true)), [false, false]);
        assert_eq!(found(wanted(ProviderKind::Reflink, "/srv/vms", false)), [false, true]);
        assert_eq!(found(wanted(ProviderKind::Btrfs, "/srv", false)), [false, true]);
        assert_eq!(found(wanted(ProviderKind::Reflink, "/srv/vm", false)), [false, false]);
    }
}
