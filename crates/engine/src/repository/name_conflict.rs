//! Which machine the snapshots of a name belong to.
//!
//! Names are reused: on another host, by a machine that was created anew, by an archive. Snapshots are compared with
//! one another, and counted together by retention, only if they have the same name *and* the same machine. A machine is
//! identified by its UUID.
//!
//! A backup under a name whose newest snapshot is of another machine is refused, unless the user states that it is the same
//! one. Such a statement is kept as a note of the snapshot ([`NOTE_CONTINUES`]), and later snapshots repeat it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use holdfast_host::WITHOUT_UUID;
use holdfast_repo::Manifest;

use super::calendar::Calendar;
use super::calendar::time_of;
use crate::job::error::NameTaken;
use crate::job::{Progress, Result};
use crate::notes::{NOTE_CONSISTENCY, NOTE_CONTINUES, NOTE_HYPERVISOR, NOTE_METHOD, NOTE_POOL, NOTE_UUID, note};

const WORD_IMAGES: &str = "images";
const WORD_UNIDENTIFIED: &str = "unidentified";
const UUID_DIGITS: usize = 32;

/// The identity of a machine.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MachineIdentity {
    /// Its UUID: lower case, with hyphens. A QEMU without a UUID is identified by a word made of its host and socket
    /// instead ([`WITHOUT_UUID`]).
    Uuid(String),
    /// A machine without a UUID.
    Unidentified,
    /// It was backed up as images, which have no UUID.
    Images,
}

impl MachineIdentity {
    /// The identity of the machine that a snapshot is of.
    pub fn of(manifest: &Manifest) -> Self {
        let has = |key: &str| note(&manifest.notes, key).is_some();
        if let Some(uuid) = manifest.notes.get(NOTE_UUID) {
            return Self::of_uuid(uuid);
        }
        if [NOTE_METHOD, NOTE_CONSISTENCY, NOTE_HYPERVISOR].into_iter().any(has) {
            return Self::Unidentified;
        }
        Self::Images
    }

    /// The identity of a machine with this UUID, in any of the usual spellings. QEMU reports a UUID of zeroes if none was set.
    pub(crate) fn of_uuid(text: &str) -> Self {
        let text = text.trim().to_ascii_lowercase();
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
        let is_usual = text
            .chars()
            .all(|character| character.is_ascii_hexdigit() || matches!(character, '-' | '{' | '}'))
            && digits.len() == UUID_DIGITS;
        if digits.chars().all(|digit| digit == '0')
            && text
                .chars()
                .all(|character| !character.is_alphanumeric() || character == '0')
        {
            return Self::Unidentified;
        }
        if !is_usual {
            return Self::Uuid(text.split_whitespace().collect());
        }
        let part = |from: usize, to: usize| &digits[from..to];
        Self::Uuid(format!(
            "{}-{}-{}-{}-{}",
            part(0, 8),
            part(8, 12),
            part(12, 16),
            part(16, 20),
            part(20, UUID_DIGITS)
        ))
    }

    /// Whether this is the host and socket of a machine without a UUID.
    fn is_without_uuid(&self) -> bool {
        matches!(self, Self::Uuid(word) if word.starts_with(WITHOUT_UUID))
    }

    fn word(&self) -> &str {
        match self {
            Self::Uuid(uuid) => uuid,
            Self::Unidentified => WORD_UNIDENTIFIED,
            Self::Images => WORD_IMAGES,
        }
    }

    fn of_word(word: &str) -> Self {
        match word {
            WORD_IMAGES => Self::Images,
            WORD_UNIDENTIFIED => Self::Unidentified,
            uuid => Self::of_uuid(uuid),
        }
    }
}

impl fmt::Display for MachineIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uuid(uuid) => match uuid.strip_prefix(WITHOUT_UUID) {
                Some(place) => write!(formatter, "a machine without a UUID at {place}"),
                None => write!(formatter, "UUID {uuid}"),
            },
            Self::Unidentified => formatter.write_str("a machine without a UUID"),
            Self::Images => formatter.write_str("images"),
        }
    }
}

/// The identities that the snapshot notes as the same machine as its own.
fn continued(manifest: &Manifest) -> impl Iterator<Item = MachineIdentity> {
    let words = manifest.notes.get(NOTE_CONTINUES).map_or("", String::as_str);
    words.split_whitespace().map(MachineIdentity::of_word)
}

/// The machines behind each name.
#[derive(Debug, Clone, Default)]
pub struct MachinesByName {
    /// The machines of each name, in the order of their first snapshots; each with all its identities.
    machines: BTreeMap<String, Vec<BTreeSet<MachineIdentity>>>,
}

impl MachinesByName {
    /// Collects the machines of these snapshots.
    pub fn of<'m>(manifests: impl IntoIterator<Item = &'m Manifest>) -> Self {
        let mut all = Self::default();
        for manifest in manifests {
            let machines = all.machines.entry(manifest.machine.clone()).or_default();
            let mut same: BTreeSet<MachineIdentity> = continued(manifest).collect();
            same.insert(MachineIdentity::of(manifest));
            let place = machines.iter().position(|known| !known.is_disjoint(&same));
            machines.retain(|known| {
                let is_other = known.is_disjoint(&same);
                if !is_other {
                    same.extend(known.iter().cloned());
                }
                is_other
            });
            machines.insert(place.unwrap_or(machines.len()), same);
        }
        all
    }

    /// How many machines have this name.
    pub fn count(&self, name: &str) -> usize {
        self.machines.get(name).map_or(0, Vec::len)
    }

    /// Index of the snapshot's machine among the machines of its name.
    pub fn place(&self, manifest: &Manifest) -> Option<usize> {
        let identity = MachineIdentity::of(manifest);
        let machines = self.machines.get(&manifest.machine)?;
        machines.iter().position(|machine| machine.contains(&identity))
    }

    /// Whether two snapshots have one name and are of one machine.
    pub fn is_same(&self, first: &Manifest, second: &Manifest) -> bool {
        first.machine == second.machine && self.place(first) == self.place(second)
    }

    /// The identity that distinguishes the machine of a snapshot from others of its name; none if its name is unique.
    pub fn distinction(&self, manifest: &Manifest) -> Option<MachineIdentity> {
        (self.count(&manifest.machine) > 1).then(|| MachineIdentity::of(manifest))
    }

    /// For each name of several machines, the words that distinguish them, by index.
    pub(crate) fn distinctions(&self) -> BTreeMap<String, Vec<String>> {
        let shared = self.machines.iter().filter(|(_, machines)| machines.len() > 1);
        let words = |machine: &BTreeSet<MachineIdentity>| {
            let words: Vec<String> = machine.iter().map(ToString::to_string).collect();
            words.join(", ")
        };
        shared
            .map(|(name, machines)| (name.clone(), machines.iter().map(words).collect()))
            .collect()
    }

    /// The names that several machines have, and how many.
    pub fn shared(&self) -> impl Iterator<Item = (&str, usize)> {
        let counted = self
            .machines
            .iter()
            .map(|(name, machines)| (name.as_str(), machines.len()));
        counted.filter(|(_, count)| *count > 1)
    }
}

/// Whether the existing snapshots of a name may be of another machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Continuation {
    /// They must be of the same machine.
    #[default]
    SameIdentity,
    /// The user states that they are of the same machine, which got another UUID.
    Stated,
}

/// Where a new snapshot comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claimant<'c> {
    /// A machine at its hypervisor, with this UUID.
    Machine(&'c str),
    /// An archive of a machine, with its UUID if it has one.
    Archive(Option<&'c str>),
    /// Images.
    Images,
}

impl Claimant<'_> {
    fn identity(self) -> MachineIdentity {
        match self {
            Self::Machine(uuid) => MachineIdentity::of_uuid(uuid),
            Self::Archive(uuid) => uuid.map_or(MachineIdentity::Unidentified, MachineIdentity::of_uuid),
            Self::Images => MachineIdentity::Images,
        }
    }
}

/// A new snapshot, before it is stored under a name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NameClaim<'c> {
    pub(crate) name: &'c str,
    pub(crate) claimant: Claimant<'c>,
    pub(crate) continuation: Continuation,
}

/// Permission to use a name for a new snapshot.
#[derive(Debug)]
pub(crate) struct GrantedName<'m> {
    /// The snapshots of the same machine under this name.
    pub(crate) own: Vec<&'m Manifest>,
    /// The note to store with the new snapshot: key and value.
    pub(crate) note: Option<(String, String)>,
}

impl<'m> GrantedName<'m> {
    /// The newest snapshot of the same machine under this name.
    pub(crate) fn newest(&self, calendar: Calendar<'_>) -> Option<&'m Manifest> {
        let past = newest(
            self.own
                .iter()
                .copied()
                .filter(|manifest| !calendar.is_future(manifest)),
        );
        newest(self.own.iter().copied()).map(|newest| calendar.choose(newest, past))
    }
}

impl NameClaim<'_> {
    /// Allows the name if it is unused or belongs to the same machine. A snapshot in the future counts only if the name has no others.
    ///
    /// # Errors
    /// Its newest snapshot is of another machine; or the new snapshot is an archive, and the existing one is of the machine itself.
    pub(crate) fn check<'m>(
        &self,
        manifests: &'m [Manifest],
        calendar: Calendar<'_>,
        progress: &dyn Progress,
    ) -> Result<GrantedName<'m>> {
        let identity = self.claimant.identity();
        let of_name = || manifests.iter().filter(|manifest| manifest.machine == self.name);
        let past = newest(of_name().filter(|manifest| !calendar.is_future(manifest)));
        let Some(holder) = past.or_else(|| newest(of_name())) else {
            self.note_other_names(&identity, manifests, progress);
            return Ok(GrantedName {
                own: Vec::new(),
                note: None,
            });
        };
        let is_beside = matches!(self.claimant, Claimant::Archive(_)) && !is_imported(holder);
        let present = MachineIdentity::of(holder);
        // Earlier versions stored no identity for a machine without a UUID.
        let is_earlier = present == MachineIdentity::Unidentified && identity.is_without_uuid();
        let is_same = (present == identity || is_earlier) && !is_beside;
        let mut others: BTreeSet<MachineIdentity> = of_name().map(MachineIdentity::of).collect();
        others.remove(&identity);
        let same: BTreeSet<MachineIdentity> = match (self.continuation, is_same) {
            (Continuation::Stated, _) => others,
            (Continuation::SameIdentity, true) => continued(holder)
                .chain(is_earlier.then_some(present))
                .filter(|other| others.contains(other))
                .collect(),
            (Continuation::SameIdentity, false) => return Err(self.refusal(holder).into()),
        };
        let is_own = |manifest: &&Manifest| {
            let other = MachineIdentity::of(manifest);
            other == identity || same.contains(&other)
        };
        let words: Vec<&str> = same.iter().map(MachineIdentity::word).collect();
        Ok(GrantedName {
            own: of_name().filter(is_own).collect(),
            note: (!words.is_empty()).then(|| (NOTE_CONTINUES.to_owned(), words.join(" "))),
        })
    }

    fn refusal(&self, holder: &Manifest) -> NameTaken {
        let place = holder
            .notes
            .get(NOTE_POOL)
            .or_else(|| note(&holder.notes, NOTE_HYPERVISOR));
        let place = place.map_or("libvirt or QEMU", String::as_str);
        let identity = self.claimant.identity();
        let present = match MachineIdentity::of(holder) {
            MachineIdentity::Images => "images".to_owned(),
            other if other == identity => format!("the machine itself ({other}, of {place})"),
            other if is_imported(holder) => format!("another machine, an import ({other}, from {place})"),
            other => format!("another machine ({other}, of {place})"),
        };
        let wanted = match self.claimant {
            Claimant::Images => "these are images".to_owned(),
            Claimant::Archive(_) => format!("this is an archive ({identity})"),
            Claimant::Machine(_) => format!("this is {identity}"),
        };
        NameTaken {
            name: self.name.to_owned(),
            newest: holder.id,
            present,
            wanted,
        }
    }

    /// Notes other names of the same machine: a renamed machine starts anew, but its user may want to continue under the old name.
    fn note_other_names(&self, identity: &MachineIdentity, manifests: &[Manifest], progress: &dyn Progress) {
        let (Claimant::Machine(_), MachineIdentity::Uuid(uuid)) = (self.claimant, identity) else {
            return;
        };
        let of_machine = manifests
            .iter()
            .filter(|manifest| MachineIdentity::of(manifest) == *identity);
        if let Some(other) = newest(of_machine) {
            progress.note(&format!(
                "a machine with the UUID {uuid} has snapshots under the name {old} (newest: {time}); --machine {old} continues them",
                old = other.machine,
                time = time_of(other),
            ));
        }
    }
}

/// Whether a snapshot comes from an archive rather than from the machine.
fn is_imported(manifest: &Manifest) -> bool {
    note(&manifest.notes, NOTE_HYPERVISOR).is_some() && !manifest.notes.contains_key(NOTE_METHOD)
}

fn newest<'m>(manifests: impl Iterator<Item = &'m Manifest>) -> Option<&'m Manifest> {
    manifests.max_by_key(|manifest| (manifest.time_ms, manifest.id))
}

#[cfg(test)]
mod tests;
