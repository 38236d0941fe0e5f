//! Finds and opens a repository.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File};
use std::io::Read as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_repo::key::{self, Credential, CredentialKind, KeyError, PaperKey, SlotChoice, SlotId};
use holdfast_repo::store::{DirectoryStore, ObjectName, Store, StoreError};
use holdfast_repo::{Environment, Manifest, Repository};
use jiff::tz::TimeZone;

use super::calendar::{Calendar, time_of};
use super::name_conflict::MachinesByName;
use super::resolve::resolve;
use crate::files::state_file::write_note;
use crate::job::error::TemplateError;
use crate::job::{Error, Progress, Result};
use crate::notes::{is_template, template_label};
use crate::{Candidate, SnapshotMoment, SnapshotReference};

/// Location of a repository: the path of a directory, optionally written `file:PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    path: PathBuf,
    key_slot: Option<SlotId>,
    slot_memory: Option<PathBuf>,
}

/// Largest note of the key slot, in bytes.
const SLOT_NOTE_BYTES_MAX: u64 = 64;

impl Location {
    /// Parses a location. A word and a colon at its start name a kind of repository: for a directory with such a name, write `./a:b`.
    pub fn parse(text: &OsStr) -> Result<Self> {
        let bytes = text.as_bytes();
        let Some(scheme) = scheme(bytes) else {
            return Ok(Self::at(text.into()));
        };
        let rest = &bytes[scheme.len() + 1..];
        match scheme {
            b"file" => {
                // Other programs write `file:///path`.
                let path = rest
                    .strip_prefix(b"//")
                    .filter(|rest| rest.starts_with(b"/"))
                    .unwrap_or(rest);
                Ok(Self::at(OsString::from_vec(path.to_vec()).into()))
            }
            _ => Err(Error::Scheme {
                location: text.to_string_lossy().into_owned(),
                scheme: String::from_utf8_lossy(scheme).into_owned(),
            }),
        }
    }

    fn at(path: PathBuf) -> Self {
        Self {
            path,
            key_slot: None,
            slot_memory: None,
        }
    }

    /// The same location, but only this key slot is tried.
    #[must_use]
    pub fn with_key_slot(self, key_slot: Option<SlotId>) -> Self {
        Self { key_slot, ..self }
    }

    /// The same location, with a folder that remembers which key slot opened it. That slot is tried first the next
    /// time, so that slots added to the store by others cost no time.
    #[must_use]
    pub fn with_slot_memory(self, folder: Option<&Path>) -> Self {
        let whole = whole_path(&self.path);
        let name = blake3::hash(whole.as_os_str().as_bytes()).to_hex();
        Self {
            slot_memory: folder.map(|folder| folder.join(&name[..32])),
            ..self
        }
    }

    /// Which key slots are tried.
    pub(crate) fn slot_choice(&self) -> SlotChoice {
        let noted = || {
            let mut text = String::new();
            let file = File::open(self.slot_memory.as_ref()?).ok()?;
            file.take(SLOT_NOTE_BYTES_MAX).read_to_string(&mut text).ok()?;
            text.trim().parse().ok()
        };
        match self.key_slot {
            Some(id) => SlotChoice::Only(id),
            None => noted().map_or(SlotChoice::Any, SlotChoice::First),
        }
    }

    /// Remembers which key slot opened. This only saves time, so a write error is ignored.
    fn note_slot(&self, slot: SlotId) {
        let Some(path) = &self.slot_memory else { return };
        if matches!(self.slot_choice(), SlotChoice::First(noted) if noted == slot) {
            return;
        }
        let folder = path.parent().unwrap_or(path);
        let half = path.with_extension(format!("{}.partial", std::process::id()));
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .and_then(|()| write_note(path, &half, format!("{slot}\n").as_bytes()))
            .ok();
    }

    /// Path of the file that records what this host has seen of the repository.
    pub(crate) fn sighting_path(&self) -> Option<PathBuf> {
        let slot = self.slot_memory.as_ref()?;
        Some(slot.parent()?.parent()?.join("repositories").join(slot.file_name()?))
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The store there, which must exist.
    pub fn open_store(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(DirectoryStore::open(&self.path)?))
    }

    /// Opens the store, and creates it if it does not exist.
    pub(crate) fn create_store(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(DirectoryStore::create(&self.path)?))
    }
}

/// The canonical path. If the path does not exist, its existing part is resolved, so that the result is the same after its creation.
fn whole_path(path: &Path) -> PathBuf {
    let mut existing = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut missing = Vec::new();
    loop {
        if let Ok(whole) = existing.canonicalize() {
            return missing.iter().rev().fold(whole, |whole, name| whole.join(name));
        }
        let Some(name) = existing.file_name() else {
            return path.to_owned();
        };
        missing.push(name.to_owned());
        existing.pop();
    }
}

/// The letters before the first colon, if they have the form of a URL scheme (RFC 3986, 3.1).
fn scheme(location: &[u8]) -> Option<&[u8]> {
    let end = location.iter().position(|byte| *byte == b':')?;
    let scheme = &location[..end];
    let is_scheme = scheme.first().is_some_and(u8::is_ascii_alphabetic)
        && scheme
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.'));
    is_scheme.then_some(scheme)
}

/// The secret that opens a repository.
#[derive(Clone, Copy)]
pub enum Unlock<'a> {
    /// A password, or the text of a paper key.
    Password(&'a [u8]),
    /// Nothing: the repository is not encrypted.
    Nothing,
}

impl<'a> Unlock<'a> {
    /// What opens a key slot.
    pub(crate) fn credential(self) -> Credential<'a> {
        match self {
            Self::Password(password) => Credential::Password(password),
            Self::Nothing => Credential::Open,
        }
    }
}

/// Whether a repository requires a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protection {
    /// It requires a password.
    Encrypted,
    /// It opens without a password.
    Open,
}

/// Whether the repository at `location` requires a password; an error if there is no repository.
pub fn protection(location: &Location) -> Result<Protection> {
    let store = location.open_store()?;
    let listing = match key::list(&*store) {
        // An attacker may have added the slots; a given password takes precedence.
        Err(KeyError::TooManySlots { .. }) => return Ok(Protection::Encrypted),
        other => other?,
    };
    if listing.slots.is_empty() && listing.damaged.is_empty() {
        match store.length(&ObjectName::config()) {
            Err(StoreError::NotFound { .. }) => {
                return Err(Error::Repository(holdfast_repo::Error::NotARepository {
                    store: store.describe(),
                }));
            }
            other => other?,
        };
    }
    let opens_freely = !listing.slots.is_empty() && listing.slots.iter().all(|slot| slot.kind == CredentialKind::Open);
    Ok(if opens_freely {
        Protection::Open
    } else {
        Protection::Encrypted
    })
}

/// Opens the repository at `location`; damage that does not prevent this becomes warnings.
pub fn open(
    location: &Location,
    unlock: Unlock<'_>,
    environment: &Environment,
    progress: &dyn Progress,
) -> Result<Repository> {
    let store = location.open_store()?;
    let choice = location.slot_choice();
    if let Unlock::Password(password) = unlock
        && let Some(text) = paper_key_text(password)
    {
        return match PaperKey::decode(text) {
            Ok(master) => Ok(Repository::open_with_secret(store, master, environment.clone())?),
            // A password may look like a paper key. If it opens nothing, the error about the paper key is more helpful.
            Err(paper) => match Repository::open_by(store, unlock.credential(), choice, environment.clone()) {
                Err(holdfast_repo::Error::Key(_)) => Err(paper.into()),
                other => Ok(warned(other?, progress)),
            },
        };
    }
    let opened = Repository::open_by(store, unlock.credential(), choice, environment.clone())?;
    if matches!(unlock, Unlock::Password(_)) {
        location.note_slot(opened.slot);
    }
    Ok(warned(opened, progress))
}

fn warned(opened: holdfast_repo::OpenedRepository, progress: &dyn Progress) -> Repository {
    for warning in &opened.warnings {
        progress.warning(&warning.to_string());
    }
    opened.repository
}

/// The password as text, if it can be a paper key.
pub(crate) fn paper_key_text(password: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(password).ok()?;
    let start = text.trim_start().get(..3)?;
    start.eq_ignore_ascii_case("hf1").then_some(text)
}

/// All snapshots of machines, oldest first; those that cannot be read become warnings.
pub(crate) fn snapshots(repository: &Repository, progress: &dyn Progress) -> Result<Vec<Manifest>> {
    let mut manifests = all_snapshots(repository, progress)?;
    manifests.retain(|manifest| !is_template(manifest));
    Ok(manifests)
}

/// All snapshots including templates, oldest first; those that cannot be read become warnings.
pub(crate) fn all_snapshots(repository: &Repository, progress: &dyn Progress) -> Result<Vec<Manifest>> {
    let (manifests, errors) = repository.snapshots()?;
    for error in errors {
        progress.warning(&error.to_string());
    }
    Ok(manifests)
}

/// Finds the snapshot that the user named.
pub fn find_snapshot(
    repository: &Repository,
    reference: &SnapshotReference,
    zone: &TimeZone,
    progress: &dyn Progress,
) -> Result<Manifest> {
    let mut manifests = all_snapshots(repository, progress)?;
    let calendar = Calendar::new(repository, zone, progress);
    let index = find_of_machines(&manifests, reference, calendar)?;
    Ok(manifests.swap_remove(index))
}

/// Index in `manifests`, which include templates, of the snapshot that the user named.
///
/// # Errors
/// The name selects a template: other verbs, which check signatures, handle templates.
pub(crate) fn find_of_machines(
    manifests: &[Manifest],
    reference: &SnapshotReference,
    calendar: Calendar<'_>,
) -> Result<usize> {
    let error = match find_among(manifests, reference, calendar, |manifest| !is_template(manifest)) {
        Err(error) => error,
        found => return found,
    };
    match find_in(manifests, reference, calendar) {
        Ok(index) if is_template(&manifests[index]) && matches!(reference, SnapshotReference::Word(_)) => {
            Err(TemplateError::IsTemplate {
                id: manifests[index].id,
                name: template_label(&manifests[index]),
            }
            .into())
        }
        _ => Err(error),
    }
}

/// Index in `manifests` of the snapshot that the user named.
pub(crate) fn find_in(manifests: &[Manifest], reference: &SnapshotReference, calendar: Calendar<'_>) -> Result<usize> {
    find_among(manifests, reference, calendar, |_| true)
}

fn find_among(
    manifests: &[Manifest],
    reference: &SnapshotReference,
    calendar: Calendar<'_>,
    is_meant: impl Fn(&Manifest) -> bool,
) -> Result<usize> {
    let numbered = manifests.iter().enumerate().filter(|(_, manifest)| is_meant(manifest));
    let meant: Vec<(usize, &Manifest, String)> = numbered
        .map(|(index, manifest)| (index, manifest, manifest.id.to_string()))
        .collect();
    let named = MachinesByName::of(meant.iter().map(|(_, manifest, _)| *manifest));
    let distinctions = named.distinctions();
    let candidates: Vec<Candidate<'_>> = meant
        .iter()
        .map(|(_, manifest, id)| Candidate {
            id,
            machine: &manifest.machine,
            time: time_of(manifest),
            distinction: named
                .place(manifest)
                .and_then(|place| distinctions.get(&manifest.machine)?.get(place))
                .map(String::as_str),
        })
        .collect();
    let newest = resolve(reference, &candidates, calendar.zone)?;
    if !is_newest_wanted(reference, &candidates[newest]) || !calendar.is_future(meant[newest].1) {
        return Ok(meant[newest].0);
    }
    let past: Vec<usize> = (0..meant.len())
        .filter(|place| !calendar.is_future(meant[*place].1))
        .collect();
    let candidates: Vec<Candidate<'_>> = past.iter().map(|place| candidates[*place]).collect();
    let found = resolve(reference, &candidates, calendar.zone).ok();
    let other = found.map(|place| past[place]);
    let chosen = calendar.choose(meant[newest].1, other.map(|place| meant[place].1));
    Ok(match other {
        Some(place) if meant[place].1.id == chosen.id => meant[place].0,
        _ => meant[newest].0,
    })
}

/// Whether the newest snapshot was requested, rather than one of a certain time or id.
fn is_newest_wanted(reference: &SnapshotReference, found: &Candidate<'_>) -> bool {
    match reference {
        SnapshotReference::Latest => true,
        SnapshotReference::Machine { moment, .. } => matches!(moment, SnapshotMoment::Latest),
        SnapshotReference::Word(word) => found.machine == word,
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::path::Path;

    use super::{Location, whole_path};
    use crate::job::Error;

    #[test]
    fn a_place_is_the_same_before_and_after_it_was_made() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        let new = link.join("./a/b");
        let before = whole_path(&new);
        assert_eq!(before, folder.path().canonicalize().unwrap().join("a/b"));
        std::fs::create_dir_all(&new).unwrap();
        assert_eq!(whole_path(&new), before);
        let relative = Path::new("a folder that does not exist");
        assert_eq!(whole_path(relative), std::env::current_dir().unwrap().join(relative));
    }

    #[test]
    fn a_location_is_a_directory_with_or_without_its_kind() {
        for (text, path) in [
            ("/backup/repo", "/backup/repo"),
            ("backup", "backup"),
            ("./a:b", "./a:b"),
            ("file:backup", "backup"),
            ("file:/backup", "/backup"),
            ("file:///backup", "/backup"),
        ] {
            assert_eq!(
                Location::parse(OsStr::new(text)).unwrap().path(),
                Path::new(path),
                "{text}"
            );
        }
        for text in ["s3:bucket", "https://example.org/x", "sftp:host:/x"] {
            let scheme = text.split(':').next().unwrap();
            assert!(
                matches!(Location::parse(OsStr::new(text)), Err(Error::Scheme { scheme: found, .. }) if found == scheme)
            );
        }
    }
}
