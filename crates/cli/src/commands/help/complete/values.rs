//! Completion values: from the help, the repository, and the host.

use clap::Arg;
use holdfast_engine::{ListRequest, Providers, SnapshotSizes, list, list_host_snapshots, time_of};
use holdfast_host::Hypervisor as _;
use holdfast_host::provider::{Dataset, ProviderKind};
use holdfast_repo::Manifest;

use super::cursor::Cursor;
use crate::args::{PasswordArgs, RepositoryArgs, SharedOptions};
use crate::context::Context;
use crate::context::holdfast_file::HoldfastFileArgs;
use crate::machines::{Hypervisors, datasets};

/// A word and its description.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CompletionValue {
    pub(super) word: String,
    pub(super) about: String,
}

impl CompletionValue {
    pub(super) fn new(word: &str, about: &str) -> Self {
        Self {
            word: word.to_owned(),
            about: about.to_owned(),
        }
    }
}

/// Whether the shell adds file names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Files {
    None,
    Any,
    Folders,
}

impl Files {
    /// The word that the completion scripts expect.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Any => "files",
            Self::Folders => "folders",
        }
    }
}

/// A longer list of ids is useless without the first digit.
const IDS_MAX: usize = 50;

/// The values of an option or argument, selected by the name of its value in the help.
pub(super) fn values_of(arg: &Arg, cursor: &Cursor<'_>, context: &Context) -> (Files, Vec<CompletionValue>) {
    let possible = arg.get_possible_values();
    if !possible.is_empty() {
        let shown = possible.iter().filter(|value| !value.is_hide_set());
        let about = |help: Option<&clap::builder::StyledStr>| help.map(ToString::to_string).unwrap_or_default();
        return (
            Files::None,
            shown
                .map(|value| CompletionValue::new(value.get_name(), &about(value.get_help())))
                .collect(),
        );
    }
    let name = arg
        .get_value_names()
        .and_then(|names| names.first())
        .map_or("", |name| name.as_str());
    let found = FoundValues {
        context: context.silent(repository_of(cursor)),
        cursor,
    };
    match name {
        "MACHINE" if found.is_about_repository() => (Files::None, found.stored_machines()),
        "NAME" if matches!(arg.get_id().as_str(), "machine" | "machines") => (Files::None, found.stored_machines()),
        "MACHINE" | "MACHINE@SNAPSHOT" => (Files::None, found.machines()),
        "SOURCE" | "MACHINE[@SNAPSHOT]|IMAGE" => (Files::Any, found.machines()),
        "MACHINE|DATASET" | "DATASET|MACHINE" => (Files::None, [found.machines(), found.datasets()].concat()),
        "SNAPSHOT" | "SNAPSHOT|all" | "SNAPSHOT|MACHINE" => (Files::None, found.snapshots()),
        "SNAPSHOT[:DISK]"
        | "OLD[:DISK]"
        | "NEW[:DISK]"
        | "SNAPSHOT[:DISK][:VOLUME][:/PATH]"
        | "SNAPSHOT[:DISK][:VOLUME]:/PATH" => (Files::None, [found.snapshots(), found.stored_disks()].concat()),
        "SNAPSHOT[:DISK]|IMAGE" => (Files::Any, [found.snapshots(), found.stored_disks()].concat()),
        "IMAGE|SNAPSHOT|MACHINE" => (Files::Any, found.snapshots()),
        "DISK" => (Files::None, found.disks()),
        "TAG" => (Files::None, found.tags()),
        "JOB" => (Files::None, found.jobs()),
        "LOCATION" => (Files::Folders, found.repositories()),
        "DATASET" | "[[USER@]HOST:]SOURCE" | "[[USER@]HOST:]TARGET" => (Files::None, found.datasets()),
        "DATASET@NAME" => (Files::None, found.host_snapshots()),
        "FOLDER" | "DIR" => (Files::Folders, Vec::new()),
        "FILE" | "IMAGE" | "OTHER" | "ARCHIVE" | "PATH" | "SOCKET" | "TARGET" | "CLONE" | "KEY" => {
            (Files::Any, Vec::new())
        }
        _ => (Files::None, Vec::new()),
    }
}

/// The repository options on the line.
fn repository_of(cursor: &Cursor<'_>) -> RepositoryArgs {
    RepositoryArgs {
        repository: given(cursor, "repository").map(Into::into),
        password: PasswordArgs {
            password_file: given(cursor, "password_file").map(Into::into),
            ..PasswordArgs::default()
        },
    }
}

/// The last value of an option on the line.
fn given<'c>(cursor: &'c Cursor<'_>, id: &str) -> Option<&'c str> {
    let mut given = cursor.given.iter().rev();
    given
        .find(|(arg, _)| arg.get_id() == id)
        .map(|(_, value)| value.as_str())
}

/// The sources of values.
struct FoundValues<'c> {
    context: Context,
    cursor: &'c Cursor<'c>,
}

impl FoundValues<'_> {
    /// Whether the verb refers to machines in the repository.
    fn is_about_repository(&self) -> bool {
        let verb = self.context.command_line().verb(&self.cursor.path);
        self.cursor.path != "resume" && verb.is_some_and(|verb| !verb.unused.contains(&SharedOptions::Repository))
    }

    /// Machines of libvirt. A connection that may ask for a password is not opened.
    fn machines(&self) -> Vec<CompletionValue> {
        let hypervisors = Hypervisors::new(given(self.cursor, "connect"), &self.context);
        if hypervisors.is_remote() {
            return Vec::new();
        }
        let machines = hypervisors.libvirt().ok().and_then(|libvirt| libvirt.machines().ok());
        let machines = machines.unwrap_or_default();
        machines
            .iter()
            .map(|machine| CompletionValue::new(&machine.name, "machine"))
            .collect()
    }

    /// Disks of the machines on the line.
    fn disks(&self) -> Vec<CompletionValue> {
        let hypervisors = Hypervisors::new(given(self.cursor, "connect"), &self.context);
        if hypervisors.is_remote() {
            return Vec::new();
        }
        let Ok(libvirt) = hypervisors.libvirt() else {
            return Vec::new();
        };
        let words = self.cursor.given.iter().filter(|(arg, _)| arg.is_positional());
        let machines = words.filter_map(|(_, word)| libvirt.machine(word).ok()?.describe().ok());
        let disks = machines.flat_map(|machine| {
            let name = machine.summary.name.clone();
            machine
                .disks
                .into_iter()
                .map(move |disk| CompletionValue::new(&disk.target, &format!("disk of {name}")))
        });
        sorted(disks.collect())
    }

    /// The snapshots of the repository, the newest first; none if a password prompt would be needed.
    fn manifests(&self) -> Vec<Manifest> {
        if !self.context.opens_without_question() {
            return Vec::new();
        }
        let listed = self
            .context
            .open_repository()
            .ok()
            .and_then(|repository| list(&repository, &ListRequest::default()).ok());
        let mut snapshots = listed.map(|listed| listed.snapshots).unwrap_or_default();
        snapshots.reverse();
        snapshots
    }

    fn stored_machines(&self) -> Vec<CompletionValue> {
        let snapshots = self.manifests();
        sorted(
            snapshots
                .iter()
                .map(|snapshot| CompletionValue::new(&snapshot.machine, "machine in the repository"))
                .collect(),
        )
    }

    fn tags(&self) -> Vec<CompletionValue> {
        let snapshots = self.manifests();
        let tags = snapshots.iter().flat_map(|snapshot| &snapshot.tags);
        sorted(
            tags.map(|tag| CompletionValue::new(tag, "tag in the repository"))
                .collect(),
        )
    }

    /// Machines of the repository; after `@` the times of one machine; and ids.
    fn snapshots(&self) -> Vec<CompletionValue> {
        let snapshots = self.manifests();
        let time = |snapshot: &Manifest| {
            let zoned = time_of(snapshot).to_zoned(self.context.zone().clone());
            zoned.strftime("%Y-%m-%dT%H:%M:%S").to_string()
        };
        if let Some((machine, _)) = self.cursor.typed.split_once('@') {
            let of_machine = snapshots.iter().filter(|snapshot| snapshot.machine == machine);
            let times = of_machine
                .map(|snapshot| CompletionValue::new(&format!("{machine}@{}", time(snapshot)), &snapshot.id.short()));
            return [
                vec![CompletionValue::new(&format!("{machine}@latest"), "the newest")],
                times.collect(),
            ]
            .concat();
        }
        let names = snapshots
            .iter()
            .map(|snapshot| CompletionValue::new(&snapshot.machine, "the newest snapshot of the machine"));
        let mut found = sorted(names.collect());
        if !self.cursor.typed.is_empty() || snapshots.len() <= IDS_MAX {
            let about = |snapshot: &Manifest| format!("{} {}", snapshot.machine, time(snapshot));
            found.extend(
                snapshots
                    .iter()
                    .map(|snapshot| CompletionValue::new(&snapshot.id.short(), &about(snapshot))),
            );
        }
        found
    }

    /// The disks of the snapshot before the colon: an id, a machine, or MACHINE@latest.
    fn stored_disks(&self) -> Vec<CompletionValue> {
        let Some((name, _)) = self.cursor.typed.rsplit_once(':') else {
            return Vec::new();
        };
        let machine = name.strip_suffix("@latest").unwrap_or(name);
        let snapshots = self.manifests();
        let is_it = |snapshot: &&Manifest| snapshot.machine == machine || snapshot.id.to_string().starts_with(name);
        let disks = snapshots.iter().find(is_it).map(|snapshot| snapshot.disks.iter());
        let disks = disks.into_iter().flatten();
        disks
            .map(|disk| CompletionValue::new(&format!("{name}:{}", disk.name), "disk"))
            .collect()
    }

    fn jobs(&self) -> Vec<CompletionValue> {
        let config = self.configuration();
        let jobs = config.iter().flat_map(|config| &config.jobs);
        jobs.map(|job| CompletionValue::new(&job.name, job.kind.name)).collect()
    }

    fn repositories(&self) -> Vec<CompletionValue> {
        let config = self.configuration();
        let repositories = config.iter().flat_map(|config| &config.repositories);
        repositories
            .map(|repository| CompletionValue::new(&repository.name, &repository.path))
            .collect()
    }

    fn configuration(&self) -> Option<holdfast_policy::config::Config> {
        let file = HoldfastFileArgs {
            config: given(self.cursor, "config").map(Into::into),
        };
        file.load(&self.context).ok()
    }

    fn known_datasets(providers: &Providers) -> Vec<Dataset> {
        let of = |kind| providers.of(kind).datasets().unwrap_or_default();
        let states = ProviderKind::ALL.into_iter().flat_map(of);
        states.map(|state| state.dataset).collect()
    }

    fn datasets(&self) -> Vec<CompletionValue> {
        let known = Self::known_datasets(&datasets::providers(&self.context));
        sorted(
            known
                .iter()
                .map(|dataset| CompletionValue::new(&typed_as(dataset), "dataset"))
                .collect(),
        )
    }

    /// Datasets; after `@` the host snapshots of one dataset.
    fn host_snapshots(&self) -> Vec<CompletionValue> {
        let providers = datasets::providers(&self.context);
        let known = Self::known_datasets(&providers);
        let Some((dataset, _)) = self.cursor.typed.split_once('@') else {
            return sorted(
                known
                    .iter()
                    .map(|dataset| CompletionValue::new(&format!("{}@", typed_as(dataset)), "dataset"))
                    .collect(),
            );
        };
        let Some(known) = known
            .into_iter()
            .find(|known| typed_as(known) == dataset || known.to_string() == dataset)
        else {
            return Vec::new();
        };
        let lists = list_host_snapshots(&providers, &[known], SnapshotSizes::Unknown).unwrap_or_default();
        let snapshots = lists.iter().flat_map(|list| &list.snapshots);
        snapshots
            .map(|state| CompletionValue::new(&format!("{dataset}@{}", state.snapshot.name.name), "host snapshot"))
            .collect()
    }
}

/// A dataset as users type it: without `zfs:` if the rest cannot be a machine.
fn typed_as(dataset: &Dataset) -> String {
    let name = dataset.to_string();
    match name.strip_prefix("zfs:") {
        Some(short) if short.contains('/') => short.to_owned(),
        _ => name,
    }
}

fn sorted(mut values: Vec<CompletionValue>) -> Vec<CompletionValue> {
    values.sort();
    values.dedup();
    values
}
