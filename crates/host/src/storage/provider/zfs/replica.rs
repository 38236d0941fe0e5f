//! ZFS as one side of a replication, on this host or on another host through its shell.
//!
//! Features that ZFS before 0.8 lacks (bookmarks, resuming an interrupted stream, blocks as stored) are not used with
//! such a version. It discards a partially received stream.
//!
//! Source: zfs-send(8), zfs-receive(8), zfs-bookmark(8), zfs-hold(8); OpenZFS 2.1, zfs-fuse 0.7.0.

mod arrival;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use holdfast_block::Clock;

use super::super::incoming::{Incoming, Notes};
use super::super::replica::{
    KeepMethod, KeepRequest, PartialReceive, ReceiveRequest, ReplicaAbilities, ReplicaDataset, ReplicaScope,
    ReplicaSide, ReplicaSnapshot, SendRequest, SenderTrust, StreamCompression, StreamForm, check_tag,
};
use super::super::{Dataset, HostSnapshotName, Provider as _, ProviderError, ProviderKind, ProviderResult};
use super::error_messages::refusal;
use super::stream::{Joining, ZfsAnnouncement, ZfsGate};
use super::table::Properties;
use super::{ZFS, Zfs, any_full_name, full_name};
use crate::system::process::{Piped, StreamTools};
use crate::system::ssh::shell_line;

const PROPERTIES: &str = "type,creation,userrefs,readonly,canmount,guid";
const NEWER_PROPERTIES: &str =
    "type,creation,userrefs,readonly,canmount,createtxg,guid,encryption,receive_resume_token";

/// ZFS on one host.
#[derive(Clone)]
pub struct ZfsSide {
    zfs: Zfs,
    programs: Arc<dyn StreamTools>,
}

impl ZfsSide {
    /// Uses ZFS through `programs`.
    pub fn new(programs: Arc<dyn StreamTools>, clock: Arc<dyn Clock>) -> Self {
        Self {
            zfs: Zfs::new(Arc::clone(&programs) as _, PathBuf::new(), clock),
            programs,
        }
    }

    fn found(&self, name: &str, scope: ReplicaScope) -> ProviderResult<BTreeMap<String, Properties>> {
        full_name(name, "check")?;
        let mut filter = vec!["-r"];
        if scope == ReplicaScope::Dataset {
            filter.extend(["-d", "1"]);
        }
        let properties = if self.zfs.is_newer()? {
            filter.extend(["-t", "filesystem,volume,snapshot,bookmark"]);
            NEWER_PROPERTIES
        } else {
            PROPERTIES
        };
        match self.zfs.get(&filter, properties, name) {
            Err(ProviderError::NotFound { .. }) => Ok(BTreeMap::new()),
            other => other,
        }
    }

    fn records(&self, name: &str, scope: ReplicaScope) -> ProviderResult<BTreeMap<String, String>> {
        let mut filter = vec!["-r"];
        if scope == ReplicaScope::Dataset {
            filter.extend(["-d", "1"]);
        }
        if self.zfs.is_newer()? {
            filter.extend(["-t", "snapshot"]);
        }
        self.zfs.records(&filter, name)
    }

    /// The arguments of `zfs send`.
    fn send_arguments(sending: &SendRequest) -> ProviderResult<Vec<String>> {
        if let Some(token) = &sending.token {
            check_token(token)?;
            return Ok(vec!["-t".to_owned(), token.clone()]);
        }
        let form: &[&str] = match sending.form {
            StreamForm::Plain => &[],
            StreamForm::AsStored => &["-L", "-c", "-e"],
            StreamForm::Raw => &["-w"],
        };
        let mut arguments: Vec<String> = form.iter().map(|word| (*word).to_owned()).collect();
        if let Some(base) = &sending.base {
            arguments.push(if sending.has_intermediates { "-I" } else { "-i" }.to_owned());
            let full = any_full_name(&sending.dataset, &base.name)?;
            arguments.push(if base.is_bookmark { full.replace('@', "#") } else { full });
        }
        arguments.push(any_full_name(&sending.dataset, &sending.to)?);
        Ok(arguments)
    }

    /// Starts a program, with zstd before or after it if requested. A stream passes the gate before it is compressed
    /// for the other host.
    fn start(&self, arguments: &[&str], filter: Option<ZstdFilter>) -> ProviderResult<Piped> {
        let line = shell_line([ZFS].into_iter().chain(arguments.iter().copied()));
        let line = match filter {
            None => return Ok(self.programs.start(ZFS, arguments)?),
            Some(ZstdFilter::Decompress) => format!("zstd -qdc | {line}"),
            Some(ZstdFilter::Compress) => format!("{line} | zstd -qc"),
        };
        Ok(self.programs.start("sh", &["-c", &line])?)
    }

    /// Creates the parent datasets, which are never mounted automatically.
    fn make_above(&self, dataset: &str) -> ProviderResult<()> {
        let slashes = dataset.match_indices('/').skip(1).map(|(at, _)| at);
        let mut missing: Vec<&str> = Vec::new();
        for above in slashes.map(|at| &dataset[..at]).collect::<Vec<_>>().into_iter().rev() {
            match self.zfs.get(&[], "type", above) {
                Ok(_) => break,
                Err(ProviderError::NotFound { .. }) => missing.push(above),
                Err(error) => return Err(error),
            }
        }
        for above in missing.into_iter().rev() {
            match self.zfs.ask("create", above, &["create", "-o", "canmount=off", above]) {
                // Another process has created the dataset.
                Err(ProviderError::Exists { .. }) => {}
                other => drop(other?),
            }
        }
        Ok(())
    }

    fn name(dataset: &str, name: &str) -> HostSnapshotName {
        HostSnapshotName {
            dataset: Dataset {
                provider: ProviderKind::Zfs,
                name: dataset.to_owned(),
            },
            name: name.to_owned(),
        }
    }

    fn hold(&self, keeping: &KeepRequest) -> ProviderResult<()> {
        match self
            .zfs
            .hold(&Self::name(&keeping.dataset, &keeping.snapshot), &keeping.tag)
        {
            Err(ProviderError::Held { reason, .. }) if reason.contains("tag already exists") => Ok(()),
            other => other,
        }
    }

    /// Releases the hold with this tag from all snapshots of a dataset but one. Only newer versions list holds, so
    /// the release is tried on all held snapshots.
    fn release(&self, keeping: &KeepRequest, held: &ReplicaDataset, but: Option<&str>) -> ProviderResult<()> {
        let others = held.snapshots.iter().filter(|snapshot| {
            let is_held = snapshot.hold_count > 0 && !snapshot.is_bookmark;
            is_held && Some(&snapshot.name[..]) != but
        });
        for other in others {
            match self
                .zfs
                .release(&Self::name(&keeping.dataset, &other.name), &keeping.tag)
            {
                Err(ProviderError::NotFound { .. }) => {}
                other => other?,
            }
        }
        Ok(())
    }

    /// Creates a bookmark of the snapshot, and removes earlier ones.
    fn bookmark(&self, keeping: &KeepRequest, target: &ReplicaDataset) -> ProviderResult<()> {
        let prefix = format!("{}_", keeping.tag);
        let name = format!("{prefix}{}", keeping.snapshot);
        let full = |name: &str| any_full_name(&keeping.dataset, name).map(|full| full.replace('@', "#"));
        if !target
            .snapshots
            .iter()
            .any(|known| known.is_bookmark && known.name == name)
        {
            let snapshot = any_full_name(&keeping.dataset, &keeping.snapshot)?;
            let bookmark = full(&name)?;
            self.zfs
                .ask("bookmark", &snapshot, &["bookmark", &snapshot, &bookmark])?;
        }
        for old in &target.snapshots {
            if old.is_bookmark && old.name.starts_with(&prefix) && old.name != name {
                let old = full(&old.name)?;
                // Only a bookmark is destroyed here.
                assert!(old.contains('#'), "{old} is no bookmark");
                self.zfs.ask("remove", &old, &["destroy", &old])?;
            }
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ZstdFilter {
    Compress,
    Decompress,
}

/// Checks a resume token, which comes from the other side and becomes an argument.
fn check_token(token: &str) -> ProviderResult<()> {
    let is_token = !token.is_empty()
        && token.len() < 64 << 10
        && token.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        && !token.starts_with('-');
    is_token.then_some(()).ok_or_else(|| ProviderError::Invalid {
        program: ZFS,
        detail: format!("{token:?} is not a resume token"),
    })
}

/// The transaction of a snapshot's creation, and its index in the answer.
type CreationOrder = (u64, usize);
/// A dataset with its snapshots before they are sorted.
type UnsortedDataset = (ReplicaDataset, Vec<(CreationOrder, ReplicaSnapshot)>);

/// Parses datasets and their snapshots in the answer of `zfs get`.
pub(super) fn datasets_of(
    found: &BTreeMap<String, Properties>,
    records: &BTreeMap<String, String>,
) -> ProviderResult<Vec<ReplicaDataset>> {
    let mut datasets: BTreeMap<&str, UnsortedDataset> = BTreeMap::new();
    for (full, properties) in found {
        if full.contains(['@', '#']) {
            continue;
        }
        let value = |property: &str| properties.value(property).filter(|value| !matches!(*value, "-" | ""));
        let dataset = ReplicaDataset {
            name: full.clone(),
            snapshots: Vec::new(),
            partial: value("receive_resume_token").map(|token| PartialReceive::Token(token.to_owned())),
            is_encrypted: value("encryption").is_some_and(|value| value != "off"),
        };
        datasets.insert(full, (dataset, Vec::new()));
    }
    for (full, properties) in found {
        let Some((of, name)) = full.split_once(['@', '#']) else {
            continue;
        };
        let time_s = properties.number("creation").and_then(|time| i64::try_from(time).ok());
        let snapshot = ReplicaSnapshot {
            name: name.to_owned(),
            identity: properties.value("guid").unwrap_or_default().to_owned(),
            time_s: time_s.ok_or_else(|| ProviderError::Invalid {
                program: ZFS,
                detail: format!("{full} has no valid creation time"),
            })?,
            is_bookmark: full.contains('#'),
            hold_count: properties.number("userrefs").unwrap_or_default(),
            record: records.get(full).cloned(),
        };
        let order = (
            properties.number("createtxg").unwrap_or_default(),
            properties.number_in_answer,
        );
        if let Some((_, snapshots)) = datasets.get_mut(of) {
            snapshots.push((order, snapshot));
        }
    }
    let complete = datasets.into_values().map(|(mut dataset, mut snapshots)| {
        snapshots.sort_by_key(|(order, _)| *order);
        dataset.snapshots = snapshots.into_iter().map(|(_, snapshot)| snapshot).collect();
        dataset
    });
    Ok(complete.collect())
}

/// The size in the output of `zfs send -nP`.
pub(super) fn size_in(answer: &str) -> Option<u64> {
    let size = answer
        .lines()
        .filter_map(|line| line.strip_prefix("size"))
        .next_back()?;
    size.trim().parse().ok()
}

impl ReplicaSide for ZfsSide {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Zfs
    }

    fn host(&self) -> Option<&str> {
        self.programs.host()
    }

    fn abilities(&self) -> ProviderResult<ReplicaAbilities> {
        let is_newer = self.zfs.is_newer()?;
        Ok(ReplicaAbilities {
            bookmarks: is_newer,
            sends_as_stored: is_newer,
            sends_intermediates: true,
        })
    }

    fn datasets(&self, name: &str, scope: ReplicaScope) -> ProviderResult<Vec<ReplicaDataset>> {
        let found = self.found(name, scope)?;
        if found.is_empty() {
            return Ok(Vec::new());
        }
        let mut datasets = datasets_of(&found, &self.records(name, scope)?)?;
        // The answer includes child datasets.
        datasets.retain(|dataset| scope == ReplicaScope::Tree || dataset.name == name);
        Ok(datasets)
    }

    fn estimate(&self, sending: &SendRequest) -> ProviderResult<Option<u64>> {
        if !self.zfs.is_newer()? {
            // A newer receiver keeps a partially received stream of an older sender, but the sender cannot resume it.
            return match sending.token {
                None => Ok(None),
                Some(_) => Err(ProviderError::Refused {
                    action: "resume a stream of",
                    what: sending.dataset.clone(),
                    reason: "ZFS before 0.8 cannot resume an interrupted stream".to_owned(),
                }),
            };
        }
        let mut arguments = vec!["send".to_owned(), "-nP".to_owned()];
        arguments.extend(Self::send_arguments(sending)?);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        Ok(size_in(&self.zfs.ask("send", &sending.dataset, &arguments)?))
    }

    fn send(&self, sending: &SendRequest) -> ProviderResult<Piped> {
        let mut arguments = vec!["send".to_owned()];
        arguments.extend(Self::send_arguments(sending)?);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        self.start(
            &arguments,
            (sending.compression != StreamCompression::Never).then_some(ZstdFilter::Compress),
        )
    }

    fn receive(&self, receiving: &ReceiveRequest, trust: SenderTrust) -> ProviderResult<Incoming> {
        full_name(&receiving.dataset, "check")?;
        self.make_above(&receiving.dataset)?;
        let mut arguments = vec!["receive", "-u"];
        if self.zfs.is_newer()? {
            arguments.push("-s");
        }
        arguments.push(&receiving.dataset);
        let piped = self.start(&arguments, receiving.is_compressed.then_some(ZstdFilter::Decompress))?;
        let announced = |one: &ReplicaSnapshot| (one.name.clone(), one.identity.clone());
        let (gate, arrived) = ZfsGate::new(ZfsAnnouncement {
            snapshots: receiving.snapshots.iter().map(announced).collect(),
            joining: match trust {
                SenderTrust::Full => Joining::Allowed,
                SenderTrust::AddOnly => Joining::Refused,
            },
        });
        let (side, receiving) = (self.clone(), receiving.clone());
        let finish = move || side.finish(&receiving, &arrived);
        Ok(Incoming::gated(piped, Box::new(gate), Notes::default(), finish))
    }

    fn settle(&self, receiving: &ReceiveRequest) -> ProviderResult<()> {
        self.guard(&receiving.dataset)?;
        let known: Vec<&ReplicaSnapshot> = receiving.snapshots.iter().collect();
        for snapshot in &known {
            let full = any_full_name(&receiving.dataset, &snapshot.name)?;
            if snapshot.identity.is_empty() {
                self.zfs.get(&[], "type", &full)?;
            } else {
                self.check_guid(&receiving.dataset, &snapshot.name, &snapshot.identity)?;
            }
        }
        self.note(&receiving.dataset, &known)
    }

    fn discard(&self, dataset: &str) -> ProviderResult<()> {
        full_name(dataset, "check")?;
        self.zfs
            .ask("discard the partial receive of", dataset, &["receive", "-A", dataset])
            .map(drop)
    }

    fn keep(&self, keeping: &KeepRequest) -> ProviderResult<()> {
        check_tag(&keeping.tag)?;
        if keeping.method == KeepMethod::AddHold {
            return self.hold(keeping);
        }
        let target = self.datasets(&keeping.dataset, ReplicaScope::Dataset)?.pop();
        let target = target.ok_or_else(|| ProviderError::NotFound {
            what: keeping.dataset.clone(),
        })?;
        if keeping.method == KeepMethod::Bookmark {
            self.bookmark(keeping, &target)?;
            return self.release(keeping, &target, None);
        }
        self.hold(keeping)?;
        self.release(keeping, &target, Some(&keeping.snapshot))
    }

    fn refusal(&self, action: &'static str, what: &str, stderr: &str) -> ProviderError {
        if stderr.contains("has been modified") {
            let why = stderr.trim().replace('\n', "; ");
            let why = format!(
                "{why}; the copy was modified: zfs rollback to its newest snapshot discards the changes, and readonly=on prevents them"
            );
            return refusal(action, what, &why);
        }
        // The received part is kept. ZFS's advice on how to resume by hand does not apply here.
        match stderr.split_once("Partially received snapshot is saved") {
            Some((why, _)) => {
                let why = format!(
                    "{}; the received part is kept, and the next run resumes it",
                    why.trim_end_matches([' ', ';', '\n'])
                );
                refusal(action, what, &why)
            }
            None => refusal(action, what, stderr),
        }
    }

    fn can_compress(&self, compression: StreamCompression) -> bool {
        match compression {
            StreamCompression::Never => true,
            // The speed of the link is unknown for a shell.
            StreamCompression::Adaptive => false,
            StreamCompression::Always => self.can_decompress(),
        }
    }

    fn can_decompress(&self) -> bool {
        let answer = self.programs.ask("zstd", &["-V"]);
        answer.is_ok_and(|answer| answer.is_success)
    }
}

#[cfg(test)]
mod tests;
