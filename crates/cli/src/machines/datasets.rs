//! The datasets and host snapshots that the words of a command line select.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_engine::Providers;
use holdfast_host::provider::{Dataset, HostSnapshotName, Located, ProviderKind, locate};
use holdfast_host::{Answer, LocalTools, ToolError, Tools};
use holdfast_repo::{Processes as _, SystemProcesses};

use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::machines::MachineWord;
use crate::machines::runs;

/// Time limit of a program like `zfs`: a pool with tens of thousands of snapshots needs minutes, and a suspended pool
/// hangs.
pub const TOOL_TIME_OUT: Duration = Duration::from_secs(120);

/// The providers of this host.
pub fn providers(context: &Context) -> Providers {
    providers_of(&tools(context), context)
}

/// Programs of this host, each with its own time limit.
pub fn tools(context: &Context) -> Arc<dyn Tools> {
    Arc::new(LocalTools::new(Arc::clone(context.clock()), TOOL_TIME_OUT))
}

/// The providers that use `tools`.
pub fn providers_of(tools: &Arc<dyn Tools>, context: &Context) -> Providers {
    Providers::new(
        tools,
        context.runtime_folder().join("views"),
        Arc::clone(context.clock()),
    )
    .made_by(SystemProcesses.this())
}

/// Programs of this host, with a common time limit for all calls.
pub fn tools_until(context: &Context, time_out: Duration) -> Arc<dyn Tools> {
    let clock = Arc::clone(context.clock());
    let until = clock.now() + time_out;
    Arc::new(ToolsUntil { clock, time_out, until })
}

struct ToolsUntil {
    clock: Arc<dyn Clock>,
    time_out: Duration,
    until: Duration,
}

impl Tools for ToolsUntil {
    fn ask(&self, program: &str, arguments: &[&str]) -> Result<Answer, ToolError> {
        let left = self.until.saturating_sub(self.clock.now());
        if left.is_zero() {
            // A process that hangs in the kernel needs this time even to be abandoned.
            return Err(ToolError::TimedOut {
                command_line: format!("{program} {}", arguments.join(" ")),
                waited: self.time_out,
            });
        }
        LocalTools::new(Arc::clone(&self.clock), left).ask(program, arguments)
    }
}

/// The dataset that a word names; `None` if it may be a machine.
///
/// `zfs:tank/vm`, `btrfs:/srv/vms`, `reflink:/srv/vms` and `lvm:vg0/web1` give the provider. A path, or the name of an
/// existing folder, is the dataset of that folder or device; any other word with a `/` is a ZFS dataset.
pub fn parse(word: &OsStr) -> Result<Option<Dataset>, Error> {
    let Some(text) = word.to_str() else {
        return Err(Error::usage(
            format!("{} is not valid UTF-8", word.display()),
            "name a dataset, or its folder",
        ));
    };
    for provider in ProviderKind::ALL {
        let name = text
            .strip_prefix(provider.word())
            .and_then(|rest| rest.strip_prefix(':'));
        if let Some(name) = name {
            let name = match provider {
                ProviderKind::Zfs => name.to_owned(),
                ProviderKind::Lvm => volume(name)?,
                ProviderKind::Btrfs | ProviderKind::Reflink => whole(name)?,
            };
            return Ok(Some(Dataset { provider, name }));
        }
    }
    if MachineWord::is_explicit(text) {
        return Ok(None);
    }
    if text.starts_with(['/', '.']) || Path::new(text).is_dir() {
        return in_folder(text).map(Some);
    }
    Ok(text.contains('/').then(|| Dataset {
        provider: ProviderKind::Zfs,
        name: text.to_owned(),
    }))
}

/// The absolute path of a folder, without links and dots, as in its dataset's name.
fn whole(path: &str) -> Result<String, Error> {
    let folder = Path::new(path).canonicalize().map_err(|source| Error::File {
        action: "look at",
        path: path.into(),
        source,
    })?;
    Ok(folder.display().to_string())
}

/// `vg0/web1`; also accepts the path of its device.
fn volume(name: &str) -> Result<String, Error> {
    if !name.starts_with('/') {
        return Ok(name.to_owned());
    }
    let dataset = in_folder(name)?;
    if dataset.provider == ProviderKind::Lvm {
        return Ok(dataset.name);
    }
    Err(Error::refused(
        Kind::Unsupported,
        format!("{name} is of {dataset}, and not of LVM"),
        "name a volume: lvm:GROUP/VOLUME",
    ))
}

fn in_folder(text: &str) -> Result<Dataset, Error> {
    let is_file = Path::new(text)
        .metadata()
        .is_ok_and(|found| !found.is_dir() && !found.file_type().is_block_device());
    if is_file {
        return Err(Error::refused(
            Kind::Unsupported,
            format!("{text} is a file, and host snapshots are made of datasets"),
            "name its folder, or the machine whose disk it is",
        ));
    }
    let label = format!("{:08x}", runs::new_run()?);
    match locate(Path::new(text), &label).map_err(holdfast_engine::Error::from)? {
        Located::In(place) if place.path.as_os_str().is_empty() => Ok(place.dataset),
        Located::In(place) => Err(Error::refused(
            Kind::Unsupported,
            format!("{text} is a folder inside of {}", place.dataset),
            format!(
                "name all of it, {}, or reflink:{text} for clones of the files in this folder",
                place.dataset
            ),
        )),
        Located::Nowhere(why) => Err(Error::refused(
            Kind::Unsupported,
            format!("there can be no host snapshots of {text}: {why}"),
            "holdfast backup needs no such file system",
        )),
    }
}

/// The datasets that all words name.
pub fn parse_all(words: &[OsString]) -> Result<Vec<Dataset>, Error> {
    words.iter().map(|word| parse_one(word)).collect()
}

fn parse_one(word: &OsStr) -> Result<Dataset, Error> {
    Ok(parse(word)?.unwrap_or_else(|| Dataset {
        // The root of a pool.
        provider: ProviderKind::Zfs,
        name: word.to_string_lossy().into_owned(),
    }))
}

/// The host snapshot that a word names: `tank/vm@NAME`.
pub fn parse_snapshot(word: &OsStr) -> Result<HostSnapshotName, Error> {
    let text = word.to_string_lossy();
    let Some((dataset, name)) = text.rsplit_once('@') else {
        return Err(Error::refused(
            Kind::NotFound,
            format!("{text} is not the name of a host snapshot"),
            "host snapshots are named DATASET@NAME; holdfast host list shows them",
        ));
    };
    Ok(HostSnapshotName {
        dataset: parse_one(OsStr::new(dataset))?,
        name: name.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use std::sync::Arc;
    use std::time::Duration;

    use holdfast_block::SystemClock;
    use holdfast_host::{ToolError, Tools as _};

    use super::{ToolsUntil, parse, parse_snapshot};

    fn said(word: &str) -> String {
        match parse(OsStr::new(word)) {
            Ok(Some(dataset)) => dataset.to_string(),
            Ok(None) => "a machine".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn words_mean_datasets_or_machines() {
        assert_eq!(said("zfs:tank"), "zfs:tank");
        assert_eq!(said("tank/vm"), "zfs:tank/vm");
        for machine in ["web1", "qmp:/run/web1.qmp", "libvirt:a/b", "tag:a/b"] {
            assert_eq!(said(machine), "a machine");
        }
        assert_eq!(said("btrfs:/"), "btrfs:/");
        assert_eq!(said("reflink:/usr/../"), "reflink:/");
        assert!(
            said("/proc").starts_with("there can be no host snapshots of /proc"),
            "{}",
            said("/proc")
        );
        assert!(said("/etc/passwd").contains("is a file"));
        assert!(said("reflink:/does/not/exist").contains("/does/not/exist"));
    }

    #[test]
    fn no_command_starts_after_the_deadline() {
        let tools = |until| ToolsUntil {
            clock: Arc::new(SystemClock::new()),
            time_out: Duration::from_secs(5),
            until,
        };
        assert!(tools(Duration::from_secs(30)).ask("true", &[]).unwrap().is_success);
        let asked = tools(Duration::ZERO).ask("true", &[]);
        assert!(matches!(asked, Err(ToolError::TimedOut { waited, .. }) if waited.as_secs() == 5));
    }

    #[test]
    fn snapshots_have_a_dataset_and_a_name() {
        let name = |word: &str| parse_snapshot(OsStr::new(word)).map(|name| name.to_string());
        assert_eq!(name("tank/vm@a").unwrap(), "zfs:tank/vm@a");
        assert_eq!(name("tank@a").unwrap(), "zfs:tank@a");
        assert_eq!(name("zfs:tank@a").unwrap(), "zfs:tank@a");
        assert!(name("tank/vm").is_err());
    }
}
