//! Where a disk is copied to: a path of this host, or one of a host that ssh reaches.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_host::{Ssh, SshAddress, StreamTools, ToolError};
use holdfast_live_copy::{Connector, LocalConnector, ProgramConnector, ReceiveTools, Seed};
use holdfast_repo::key::SystemRandomness;

use crate::context::Context;
use crate::errors::Error;
use crate::machines::datasets::TOOL_TIME_OUT;
use crate::machines::runs;

const SCHEME: &str = "ssh://";
const SOCKET_SCHEME: &str = "unix://";

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
    /// The address of a folder of this host, for people.
    pub(super) fn address_of(&self, folder: &Path) -> String {
        match &self.route {
            MoveRoute::Ssh(host) => format!("{SCHEME}{host}{}", folder.display()),
            MoveRoute::Socket { name, .. } => format!("{name}:{}", folder.display()),
        }
    }
}

impl std::fmt::Display for MoveTarget {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.route {
            MoveRoute::Ssh(host) => write!(formatter, "{SCHEME}{host}")?,
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

/// A target as it is written on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CopyTarget {
    /// None for this host.
    pub(super) host: Option<SshHost>,
    /// An absolute path.
    pub(super) path: PathBuf,
}

impl CopyTarget {
    /// `PATH`, or `ssh://[USER@]HOST[:PORT]/PATH`.
    pub(super) fn parse(word: &OsStr) -> Result<Self, Error> {
        let Some(rest) = word.to_str().and_then(|text| text.strip_prefix(SCHEME)) else {
            return Self::here(Path::new(word));
        };
        let wrong = |what: String| Error::usage(what, "write ssh://HOST/PATH or ssh://USER@HOST:PORT/PATH");
        let (host, path) = rest
            .split_once('/')
            .ok_or_else(|| wrong(format!("{rest:?} has no path")))?;
        let host = SshHost::parse(host).map_err(wrong)?;
        if path.is_empty() {
            return Err(wrong(format!("{rest:?} does not name a file")));
        }
        Ok(Self {
            host: Some(host),
            path: Path::new("/").join(path),
        })
    }

    fn here(path: &Path) -> Result<Self, Error> {
        let folder = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        let found = folder.canonicalize().map_err(|source| Error::File {
            action: "find the folder",
            path: folder.to_owned(),
            source,
        })?;
        let name = path
            .file_name()
            .ok_or_else(|| Error::usage(format!("{} does not name a file", path.display()), "name a file"))?;
        Ok(Self {
            host: None,
            path: found.join(name),
        })
    }

    /// An image on the host of the target. A relative path is of this host.
    pub(super) fn seed(&self, path: &Path) -> Result<Seed, Error> {
        let path = match &self.host {
            None => Self::here(path)?.path,
            Some(_) if path.is_absolute() => path.to_owned(),
            Some(_) => {
                let reason = format!("{} is not an absolute path of the other host", path.display());
                return Err(Error::usage(
                    reason,
                    "write the whole path: --seed /srv/copies/web1.raw",
                ));
            }
        };
        Ok(Seed { path, format: None })
    }

    /// The connector to receivers there. For another host, the connection of ssh is opened.
    pub(super) fn connector(&self, options: &[String], context: &Context) -> Result<Arc<dyn Connector>, Error> {
        let Some(host) = &self.host else {
            return Ok(Arc::new(LocalConnector::new(receive_tools(context))));
        };
        let tools: Arc<dyn StreamTools> = Arc::new(host.connect(options, context)?);
        let clock = Arc::clone(context.clock());
        Ok(Arc::new(ProgramConnector::new(tools, "holdfast".to_owned(), clock)))
    }
}

impl std::fmt::Display for CopyTarget {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(host) = &self.host {
            write!(formatter, "{SCHEME}{host}")?;
        }
        write!(formatter, "{}", self.path.display())
    }
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

    use super::{CopyTarget, MoveRoute, MoveTarget, socket_address};

    #[test]
    fn a_target_is_a_path_here_or_on_a_host() {
        let far = CopyTarget::parse(OsStr::new("ssh://root@backup:2222/srv/web 1.raw")).unwrap();
        let host = |target: &CopyTarget| target.host.as_ref().map(|host| (host.name.clone(), host.port));
        assert_eq!(host(&far), Some(("root@backup".to_owned(), Some(2222))));
        assert_eq!(far.path, Path::new("/srv/web 1.raw"));
        assert_eq!(far.to_string(), "ssh://root@backup:2222/srv/web 1.raw");
        let far = CopyTarget::parse(OsStr::new("ssh://[fe80::1]/srv/a")).unwrap();
        assert_eq!(host(&far), Some(("[fe80::1]".to_owned(), None)));
        let here = CopyTarget::parse(OsStr::new("/tmp/web1.raw")).unwrap();
        assert_eq!((host(&here), here.path.as_path()), (None, Path::new("/tmp/web1.raw")));
        for wrong in [
            "ssh://host",
            "ssh:///srv/a",
            "ssh://host/",
            "ssh://-oProxy/a",
            "ssh://host:x/a",
            "/tmp/..",
        ] {
            CopyTarget::parse(OsStr::new(wrong)).unwrap_err();
        }
    }

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
}
