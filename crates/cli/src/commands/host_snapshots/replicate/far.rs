//! The meaning of the words for source and target, and the connections to them.

use std::path::Path;
use std::sync::Arc;

use holdfast_host::provider::{BtrfsSide, Located, ProviderKind, ReplicaSide, ZfsSide, locate};
use holdfast_host::{LocalTools, Ssh, SshAddress, StreamTools};
use holdfast_replicate::PeerSide;

use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::machines::datasets::TOOL_TIME_OUT;
use crate::machines::runs;

/// A dataset, optionally on another host, as given on the command line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) host: Option<String>,
    kind: ProviderKind,
    dataset: String,
}

/// A dataset, and the side that holds it.
pub(super) struct Reached {
    pub(super) side: Box<dyn ReplicaSide>,
    pub(super) dataset: String,
}

impl Word {
    /// `tank/vm`, `zfs:tank`, `/srv/vms`, `btrfs:/srv/vms`, each optionally after `HOST:` or `USER@HOST:`.
    pub(super) fn parse(text: &str) -> Result<Self, Error> {
        let kinds = [ProviderKind::Zfs, ProviderKind::Btrfs];
        let kind_of = |text: &str| kinds.into_iter().find(|kind| kind.word() == text);
        let (host, rest) = match text.split_once(':') {
            // A ZFS dataset may contain colons after the name of its pool.
            Some((before, rest)) if kind_of(before).is_none() && !before.contains('/') => (Some(before), rest),
            _ => (None, text),
        };
        let (kind, dataset) = match rest
            .split_once(':')
            .and_then(|(kind, rest)| Some((kind_of(kind)?, rest)))
        {
            Some(said) => said,
            None if rest.starts_with(['/', '.']) => (ProviderKind::Btrfs, rest),
            None if host.is_none() && is_subvolume_here(rest) => (ProviderKind::Btrfs, rest),
            None => (ProviderKind::Zfs, rest),
        };
        let wrong = |what: String| Err(Error::usage(what, "say DATASET, or HOST:DATASET: root@backup:tank/vm"));
        if dataset.is_empty() || dataset.contains('@') {
            return wrong(format!("{text:?} names no dataset"));
        }
        if let Some(host) = host {
            let is_host = !host.is_empty()
                && !host.starts_with('-')
                && host
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"@._-%[]".contains(&byte));
            if !is_host {
                return wrong(format!("{host:?} is no host"));
            }
            if kind == ProviderKind::Btrfs && !dataset.starts_with('/') {
                return wrong(format!("{dataset:?} is no path from the root on"));
            }
        }
        Ok(Self {
            host: host.map(str::to_owned),
            kind,
            dataset: dataset.trim_end_matches('/').to_owned(),
        })
    }

    /// The path of a local folder, with links resolved; if it does not exist yet, its parent must exist.
    fn here(&self) -> Result<String, Error> {
        if self.kind != ProviderKind::Btrfs {
            return Ok(self.dataset.clone());
        }
        let path = Path::new(&self.dataset);
        let failed = |source| Error::File {
            action: "look at",
            path: path.to_owned(),
            source,
        };
        if path.symlink_metadata().is_ok() {
            return Ok(path.canonicalize().map_err(failed)?.display().to_string());
        }
        let above = path
            .parent()
            .filter(|above| !above.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        let above = above.canonicalize().map_err(failed)?;
        Ok(above.join(path.file_name().unwrap_or_default()).display().to_string())
    }
}

/// Whether a word is the path of a local btrfs subvolume: such a path may look like the name of a ZFS
/// dataset.
fn is_subvolume_here(word: &str) -> bool {
    match locate(Path::new(word), "replicate") {
        Ok(Located::In(place)) => place.dataset.provider == ProviderKind::Btrfs && place.path.as_os_str().is_empty(),
        _ => false,
    }
}

/// The local side for datasets of this kind.
pub(crate) fn local_side(kind: ProviderKind, context: &Context) -> Box<dyn ReplicaSide> {
    let programs: Arc<dyn StreamTools> = Arc::new(LocalTools::new(Arc::clone(context.clock()), TOOL_TIME_OUT));
    match kind {
        ProviderKind::Zfs => Box::new(ZfsSide::new(programs, Arc::clone(context.clock()))),
        // Reflink clones and LVM volumes cannot be sent: the btrfs side reports that no such subvolume
        // exists.
        ProviderKind::Btrfs | ProviderKind::Reflink | ProviderKind::Lvm => Box::new(BtrfsSide::new(programs)),
    }
}

/// Connections to other hosts.
pub(super) struct Far<'a> {
    options: &'a [String],
    context: &'a Context,
}

impl<'a> Far<'a> {
    pub(super) fn new(options: &'a [String], context: &'a Context) -> Self {
        Self { options, context }
    }

    /// Both sides. If one word does not give the kind of dataset, the other decides: a path on one side means
    /// btrfs on the other.
    pub(super) fn both(&self, source: &Word, target: &Word) -> Result<(Reached, Reached), Error> {
        if source.kind != target.kind {
            return Err(Error::usage(
                format!(
                    "{} and {} are of different file systems",
                    source.dataset, target.dataset
                ),
                mixed(source, target),
            ));
        }
        Ok((self.reach(source)?, self.reach(target)?))
    }

    fn reach(&self, word: &Word) -> Result<Reached, Error> {
        let Some(host) = &word.host else {
            let dataset = word.here()?;
            return Ok(Reached {
                side: local_side(word.kind, self.context),
                dataset,
            });
        };
        let clock = self.context.clock();
        let address = SshAddress {
            destination: host.clone(),
            options: self.options.to_vec(),
        };
        let folder = format!("holdfast-ssh-{:08x}", runs::new_run()?);
        let folder = self.context.runtime_folder().join(folder);
        let engine = |error: holdfast_host::provider::ProviderError| Error::from(holdfast_engine::Error::from(error));
        let ssh =
            Ssh::connect(address, folder, Arc::clone(clock), TOOL_TIME_OUT).map_err(|error| engine(error.into()))?;
        let programs: Arc<dyn StreamTools> = Arc::new(ssh);
        let peer = PeerSide::find(word.kind, Arc::clone(&programs), Arc::clone(clock), TOOL_TIME_OUT);
        let side: Box<dyn ReplicaSide> = match (peer.map_err(engine)?, word.kind) {
            (Some(peer), _) => Box::new(peer),
            (None, ProviderKind::Zfs) => Box::new(ZfsSide::new(programs, Arc::clone(clock))),
            (None, _) => {
                return Err(Error::refused(
                    Kind::Unsupported,
                    format!("there is no holdfast at {host}, which btrfs needs at both ends"),
                    "install it there, where ssh finds it",
                ));
            }
        };
        Ok(Reached {
            side,
            dataset: word.dataset.clone(),
        })
    }
}

/// The hint for two words of different file systems: a relative path looks like the name of a ZFS dataset.
fn mixed(source: &Word, target: &Word) -> String {
    match [source, target].into_iter().find(|word| word.kind == ProviderKind::Zfs) {
        Some(Word {
            host: None, dataset, ..
        }) => format!(
            "{dataset} is taken for a dataset of ZFS; a folder here is ./{dataset}, or btrfs:./{dataset}, or its whole path"
        ),
        Some(Word { dataset, .. }) => {
            format!("{dataset} is taken for a dataset of ZFS; a folder on another host is given by its whole path")
        }
        None => "streams of ZFS go to ZFS, those of btrfs to btrfs".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::Word;

    fn said(text: &str) -> String {
        match Word::parse(text) {
            Ok(word) => format!(
                "{} {} {}",
                word.host.unwrap_or_else(|| "-".to_owned()),
                word.kind.word(),
                word.dataset
            ),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn words_mean_datasets_here_and_elsewhere() {
        assert_eq!(said("tank/vm"), "- zfs tank/vm");
        assert_eq!(said("tank"), "- zfs tank");
        assert_eq!(said("zfs:tank"), "- zfs tank");
        assert_eq!(said("tank/a:b"), "- zfs tank/a:b");
        assert_eq!(said("root@backup:tank/a:b"), "root@backup zfs tank/a:b");
        assert_eq!(said("backup:zfs:tank"), "backup zfs tank");
        assert_eq!(said("/srv/vms/"), "- btrfs /srv/vms");
        assert_eq!(said("backup:/srv/vms"), "backup btrfs /srv/vms");
        assert_eq!(said("backup:btrfs:/srv/vms"), "backup btrfs /srv/vms");
        for wrong in [
            "",
            "backup:",
            ":tank",
            "-oProxyCommand=x:tank",
            "a b:tank",
            "tank/vm@a",
            "h:btrfs:vms",
        ] {
            assert!(
                said(wrong).contains(" is no ") || said(wrong).contains("names no"),
                "{wrong}: {}",
                said(wrong)
            );
        }
    }
}
