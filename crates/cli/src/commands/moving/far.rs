//! Other hosts, and what both sides of a copy need of this one.

use std::ffi::OsStr;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_host::{Ssh, SshAddress, ToolError};
use holdfast_live_copy::{CopyCompression, ReceiveTools, SendRate};
use holdfast_repo::key::SystemRandomness;

use crate::args::parse_rate;
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::machines::datasets::TOOL_TIME_OUT;
use crate::machines::runs;

/// How disks are sent to another host.
#[derive(Debug, clap::Args)]
pub(super) struct SendingArgs {
    /// An option for ssh, as in its -o: ConnectTimeout=10; may be repeated
    #[arg(long, value_name = "OPTION")]
    pub(super) ssh_option: Vec<String>,
    /// Do not compress data for another host; otherwise it is compressed while the connection is slower than that
    #[arg(long)]
    pub(super) no_compression: bool,
    /// Send at most this many bytes per second, except while the source is stopped or frozen (50M)
    #[arg(long, value_name = "SIZE", value_parser = parse_send_rate)]
    pub(super) bwlimit: Option<NonZeroU64>,
}

/// With less, a frame takes so long that the connection counts as lost.
const SEND_RATE_MIN: u64 = 256 << 10;

fn parse_send_rate(text: &str) -> Result<NonZeroU64, String> {
    let rate = parse_rate(text)?;
    if rate.get() < SEND_RATE_MIN {
        return Err("it must be at least 256K: a slower connection counts as lost".to_owned());
    }
    Ok(rate)
}

impl SendingArgs {
    pub(super) fn compression(&self) -> CopyCompression {
        if self.no_compression {
            CopyCompression::Off
        } else {
            CopyCompression::Adaptive
        }
    }

    pub(super) fn rate(&self, context: &Context) -> Arc<SendRate> {
        Arc::new(SendRate::at_most(self.bwlimit, Arc::clone(context.clock())))
    }
}

pub(super) const SCHEME: &str = "ssh://";
const SOCKET_SCHEME: &str = "unix://";
/// The name of a host that a command reaches.
const OTHER_HOST: &str = "the other host";

/// A host that ssh reaches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SshHost {
    /// `host`, or `user@host`.
    pub(super) name: String,
    port: Option<u16>,
}

impl SshHost {
    /// `[USER@]HOST[:PORT]`.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (name, port) = match text.rsplit_once(':') {
            Some((name, port)) if !port.ends_with(']') => {
                let number = port.parse().map_err(|_| format!("{port:?} is not a port"))?;
                (name, Some(number))
            }
            _ => (text, None),
        };
        let is_host = !name.is_empty()
            && !name.starts_with('-')
            && name
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"@._-%[]:".contains(&byte));
        if !is_host {
            return Err(format!("{text:?} does not name a host"));
        }
        Ok(Self {
            name: name.to_owned(),
            port,
        })
    }

    /// Opens the connection of ssh that all programs there share.
    pub(super) fn connect(&self, options: &[String], context: &Context) -> Result<Ssh, Error> {
        let port = self.port.map(|port| format!("Port={port}"));
        let address = SshAddress {
            destination: self.name.clone(),
            options: options.iter().cloned().chain(port).collect(),
        };
        let folder = format!("holdfast-ssh-{:08x}", runs::new_run()?);
        let folder = context.runtime_folder().join(folder);
        Ssh::connect(address, folder, Arc::clone(context.clock()), TOOL_TIME_OUT).map_err(ssh_error)
    }
}

impl std::fmt::Display for SshHost {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.port {
            None => formatter.write_str(&self.name),
            Some(port) => write!(formatter, "{}:{port}", self.name),
        }
    }
}

/// A failure of ssh.
pub(super) fn ssh_error(error: ToolError) -> Error {
    let error = holdfast_host::provider::ProviderError::from(error);
    holdfast_engine::Error::from(error).into()
}

/// How a host is reached to which a machine moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MoveRoute {
    Ssh(SshHost),
    /// A shell command whose standard input and output reach it.
    Command(String),
    /// At this socket, the host serves this migration. The name of the host is for people.
    Socket {
        name: String,
        path: PathBuf,
    },
}

/// A host to which a machine moves, and the folder of its disks there: `ssh://[USER@]HOST[:PORT][/FOLDER]`, or, between two
/// holdfasts, `unix://HOST/SOCKET`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MoveTarget {
    pub(super) route: MoveRoute,
    /// None for the default of its hypervisor.
    pub(super) folder: Option<PathBuf>,
}

impl MoveTarget {
    pub(super) fn parse(word: &OsStr) -> Result<Self, Error> {
        let wrong = |what: String| Error::usage(what, "write ssh://HOST, or ssh://USER@HOST:PORT/FOLDER");
        let text = word.to_str().unwrap_or_default();
        if let Some((name, path)) = text.strip_prefix(SOCKET_SCHEME).and_then(|rest| rest.split_once('/')) {
            return Ok(Self {
                route: MoveRoute::Socket {
                    name: name.to_owned(),
                    path: Path::new("/").join(path),
                },
                folder: None,
            });
        }
        let rest = text.strip_prefix(SCHEME);
        let rest = rest.ok_or_else(|| wrong(format!("{} is not the address of a host", word.display())))?;
        let (host, folder) = match rest.split_once('/') {
            Some((host, folder)) if !folder.is_empty() => (host, Some(Path::new("/").join(folder))),
            Some((host, _)) => (host, None),
            None => (rest, None),
        };
        Ok(Self {
            route: MoveRoute::Ssh(SshHost::parse(host).map_err(wrong)?),
            folder,
        })
    }
}

impl MoveTarget {
    /// The folder of a host that a shell command reaches.
    pub(super) fn behind_command(word: &OsStr, command: &str) -> Result<Self, Error> {
        let folder = path_behind_command(word, "write the whole path of the folder there: /srv/vm")?;
        Ok(Self {
            route: MoveRoute::Command(command.to_owned()),
            folder: Some(folder),
        })
    }

    /// The folder in a text of [`MoveTarget::address_of`].
    pub(super) fn folder_of_address(address: &str) -> Option<PathBuf> {
        match Self::parse(OsStr::new(address)) {
            Ok(target) => target.folder,
            Err(_) => address.split_once(":/").map(|(_, path)| Path::new("/").join(path)),
        }
    }

    /// The address of a folder of this host, for people.
    pub(super) fn address_of(&self, folder: &Path) -> String {
        match &self.route {
            MoveRoute::Ssh(host) => format!("{SCHEME}{host}{}", folder.display()),
            MoveRoute::Command(_) => format!("{OTHER_HOST}:{}", folder.display()),
            MoveRoute::Socket { name, .. } => format!("{name}:{}", folder.display()),
        }
    }
}

impl std::fmt::Display for MoveTarget {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.route {
            MoveRoute::Ssh(host) => write!(formatter, "{SCHEME}{host}")?,
            MoveRoute::Command(_) => write!(formatter, "{OTHER_HOST}:")?,
            MoveRoute::Socket { name, .. } => formatter.write_str(name)?,
        }
        match &self.folder {
            Some(folder) => write!(formatter, "{}", folder.display()),
            None => Ok(()),
        }
    }
}

/// The address of a host that serves a migration at a socket of the host that reads the address.
pub(super) fn socket_address(name: &str, path: &Path) -> String {
    format!("{SOCKET_SCHEME}{name}{}", path.display())
}

/// An absolute path of the host that `--connect-command` reaches. `advice` follows the error.
///
/// # Errors
/// It is not absolute.
pub(super) fn path_behind_command(word: &OsStr, advice: &'static str) -> Result<PathBuf, Error> {
    let path = Path::new(word);
    if path.is_absolute() {
        return Ok(path.to_owned());
    }
    Err(Error::usage(
        format!(
            "{} is not an absolute path of the host that --connect-command reaches",
            path.display()
        ),
        advice,
    ))
}

/// Refuses another version than that of `command`, the words by which the other host starts this program.
pub(super) fn require_protocol(version: &str, command: [&str; 2]) -> Result<(), Error> {
    if version == command[1] {
        return Ok(());
    }
    Err(Error::refused(
        Kind::Unsupported,
        format!("version {version} of the protocol is not known here"),
        "install the same version of holdfast on both hosts",
    ))
}

/// What a receiver needs of this host.
pub(super) fn receive_tools(context: &Context) -> ReceiveTools {
    ReceiveTools {
        clock: Arc::clone(context.clock()),
        randomness: Arc::new(SystemRandomness),
        journal_folder: runs::locks_folder(context).join("copies"),
        program: program(),
    }
}

/// Name and version, as the other side sees them.
pub(super) fn program() -> String {
    concat!("holdfast ", env!("CARGO_PKG_VERSION")).to_owned()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::path::Path;

    use super::{MoveRoute, MoveTarget, socket_address};

    #[test]
    fn a_machine_moves_to_a_host_and_maybe_a_folder() {
        let target = MoveTarget::parse(OsStr::new("ssh://root@host2:2222/srv/vm")).unwrap();
        assert_eq!(target.to_string(), "ssh://root@host2:2222/srv/vm");
        assert_eq!(target.folder.as_deref(), Some(Path::new("/srv/vm")));
        for without in ["ssh://host2", "ssh://host2/"] {
            assert_eq!(MoveTarget::parse(OsStr::new(without)).unwrap().folder, None);
        }
        let address = socket_address("host1", Path::new("/run/a.return"));
        let target = MoveTarget::parse(OsStr::new(&address)).unwrap();
        assert_eq!(target.to_string(), "host1");
        let route = MoveRoute::Socket {
            name: "host1".to_owned(),
            path: "/run/a.return".into(),
        };
        assert_eq!((target.route, target.folder), (route, None));
        let by_command = |folder| MoveTarget::behind_command(OsStr::new(folder), "ssh host2");
        assert_eq!(by_command("/srv/vm").unwrap().to_string(), "the other host:/srv/vm");
        by_command("vm").unwrap_err();
        by_command("ssh://host2").unwrap_err();
        for wrong in [
            "host2",
            "/srv/vm",
            "ssh://",
            "ssh://-x/srv",
            "qemu+ssh://host2/system",
            "unix://host1",
        ] {
            MoveTarget::parse(OsStr::new(wrong)).unwrap_err();
        }
    }

    #[test]
    fn an_address_for_people_has_the_folder() {
        let parsed = |word: &str| MoveTarget::parse(OsStr::new(word)).unwrap();
        let by_command = MoveTarget::behind_command(OsStr::new("/srv"), "ssh host2").unwrap();
        for target in [
            parsed("ssh://root@host2:2222"),
            parsed("unix://host1/run/a"),
            by_command,
        ] {
            let address = target.address_of(Path::new("/srv/a"));
            let folder = MoveTarget::folder_of_address(&address);
            assert_eq!(folder.as_deref(), Some(Path::new("/srv/a")), "{address}");
        }
        assert_eq!(MoveTarget::folder_of_address("ssh://host2"), None);
    }
}
