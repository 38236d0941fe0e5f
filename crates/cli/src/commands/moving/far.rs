//! Where a disk is copied to: a path of this host, or one of a host that ssh reaches.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_host::{Ssh, SshAddress, StreamTools};
use holdfast_live_copy::{Connector, LocalConnector, ProgramConnector, ReceiveTools};
use holdfast_repo::key::SystemRandomness;

use crate::context::Context;
use crate::errors::Error;
use crate::machines::datasets::TOOL_TIME_OUT;
use crate::machines::runs;

const SCHEME: &str = "ssh://";

/// A target as it is written on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CopyTarget {
    /// `host`, or `user@host`; none for this host.
    pub(super) host: Option<String>,
    port: Option<u16>,
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
        let (host, port) = match host.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                let number = port.parse().map_err(|_| wrong(format!("{port:?} is not a port")))?;
                (host, Some(number))
            }
            _ => (host, None),
        };
        let is_host = !host.is_empty()
            && !host.starts_with('-')
            && host
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"@._-%[]:".contains(&byte));
        if !is_host || path.is_empty() {
            return Err(wrong(format!("{rest:?} does not name a host and a file")));
        }
        Ok(Self {
            host: Some(host.to_owned()),
            port,
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
            port: None,
            path: found.join(name),
        })
    }

    /// The connector to receivers there. For another host, the connection of ssh is opened.
    pub(super) fn connector(&self, options: &[String], context: &Context) -> Result<Arc<dyn Connector>, Error> {
        let Some(host) = &self.host else {
            return Ok(Arc::new(LocalConnector::new(receive_tools(context))));
        };
        let port = self.port.map(|port| format!("Port={port}"));
        let address = SshAddress {
            destination: host.clone(),
            options: options.iter().cloned().chain(port).collect(),
        };
        let folder = format!("holdfast-ssh-{:08x}", runs::new_run()?);
        let folder = context.runtime_folder().join(folder);
        let clock = Arc::clone(context.clock());
        let failed = |error| {
            Error::from(holdfast_engine::Error::from(
                holdfast_host::provider::ProviderError::from(error),
            ))
        };
        let ssh = Ssh::connect(address, folder, Arc::clone(&clock), TOOL_TIME_OUT).map_err(failed)?;
        let tools: Arc<dyn StreamTools> = Arc::new(ssh);
        Ok(Arc::new(ProgramConnector::new(tools, "holdfast".to_owned(), clock)))
    }
}

impl std::fmt::Display for CopyTarget {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.host, self.port) {
            (None, _) => write!(formatter, "{}", self.path.display()),
            (Some(host), None) => write!(formatter, "{SCHEME}{host}{}", self.path.display()),
            (Some(host), Some(port)) => write!(formatter, "{SCHEME}{host}:{port}{}", self.path.display()),
        }
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

    use super::CopyTarget;

    #[test]
    fn a_target_is_a_path_here_or_on_a_host() {
        let far = CopyTarget::parse(OsStr::new("ssh://root@backup:2222/srv/web 1.raw")).unwrap();
        assert_eq!((far.host.as_deref(), far.port), (Some("root@backup"), Some(2222)));
        assert_eq!(far.path, Path::new("/srv/web 1.raw"));
        assert_eq!(far.to_string(), "ssh://root@backup:2222/srv/web 1.raw");
        let far = CopyTarget::parse(OsStr::new("ssh://[fe80::1]/srv/a")).unwrap();
        assert_eq!((far.host.as_deref(), far.port), (Some("[fe80::1]"), None));
        let here = CopyTarget::parse(OsStr::new("/tmp/web1.raw")).unwrap();
        assert_eq!(
            (here.host.as_deref(), here.path.as_path()),
            (None, Path::new("/tmp/web1.raw"))
        );
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
}
