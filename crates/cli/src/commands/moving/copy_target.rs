//! Where a disk is copied to: a path of this host, one of a host that ssh or a command reaches, or an export of an NBD server.

use std::ffi::OsStr;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::error_text;
use holdfast_host::{LocalTools, StreamTools};
use holdfast_image::Format;
use holdfast_live_copy::{Connector, ExportTarget, LocalConnector, ProgramConnector, Seed, export_identity};
use holdfast_serve::nbd::client::{Endpoint, Error as NbdError, NbdOptions, NbdUri};

use super::copy_advice::copy_error;
use super::far::{SCHEME, SshHost, path_behind_command, receive_tools};
use crate::context::Context;
use crate::errors::Error;
use crate::machines::datasets::TOOL_TIME_OUT;

/// Schemes of addresses of exports. TLS is known, to be refused with a reason.
const EXPORT_SCHEMES: [&str; 4] = ["nbd://", "nbds://", "nbd+unix://", "nbds+unix://"];

/// An export of an NBD server, as it is written on the command line.
#[derive(Debug, Clone)]
pub(super) struct ExportAddress {
    pub(super) text: String,
    pub(super) uri: NbdUri,
}

impl ExportAddress {
    /// The address that a word is; none if it is something else.
    pub(super) fn of(word: &OsStr) -> Result<Option<Self>, Error> {
        let text = word.to_str().unwrap_or_default();
        if !EXPORT_SCHEMES.iter().any(|scheme| text.starts_with(scheme)) {
            return Ok(None);
        }
        let uri = text.parse().map_err(|error: NbdError| {
            Error::usage(
                error_text(&error),
                "write nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH",
            )
        })?;
        Ok(Some(Self {
            text: text.to_owned(),
            uri,
        }))
    }

    /// Whether both are the same export, also by another name or address of its host.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        if export_identity(&self.uri) == export_identity(&other.uri) {
            return true;
        }
        let (Endpoint::Tcp(host, port), Endpoint::Tcp(other_host, other_port)) =
            (&self.uri.endpoint, &other.uri.endpoint)
        else {
            return false;
        };
        let addresses = |host: &str, port: u16| -> Vec<SocketAddr> {
            let found = (host, port).to_socket_addrs();
            found.map(Iterator::collect).unwrap_or_default()
        };
        let ours = addresses(host, *port);
        let is_same_server = addresses(other_host, *other_port)
            .iter()
            .any(|address| ours.contains(address));
        is_same_server && self.uri.export == other.uri.export
    }
}

/// A target as it is written on the command line.
#[derive(Debug, Clone)]
pub(super) struct CopyTarget {
    pub(super) place: TargetPlace,
    /// The format of a new file.
    pub(super) format: Format,
}

/// Where a target is.
#[derive(Debug, Clone)]
pub(super) enum TargetPlace {
    Path {
        /// None for this host.
        host: Option<TargetHost>,
        /// An absolute path.
        path: PathBuf,
    },
    Export(ExportAddress),
}

/// Another host, and how it is reached.
#[derive(Debug, Clone)]
pub(super) enum TargetHost {
    Ssh(SshHost),
    /// A shell command whose standard input and output reach a receiver there.
    Command(String),
}

impl CopyTarget {
    /// A path of the host that a shell command reaches.
    pub(super) fn behind_command(word: &OsStr, format: Option<Format>, command: &str) -> Result<Self, Error> {
        let path = path_behind_command(word, "write the whole path: /srv/copies/web1.raw")?;
        let host = TargetHost::Command(command.to_owned());
        Self::of_path(Some(host), path, format)
    }

    fn of_path(host: Option<TargetHost>, path: PathBuf, format: Option<Format>) -> Result<Self, Error> {
        let is_device = path.starts_with("/dev") || (host.is_none() && holdfast_engine::is_device(&path));
        let format = match format {
            Some(format) => format,
            None if is_device => Format::Raw,
            None => Format::of_new_file(&path).map_err(holdfast_engine::Error::from)?,
        };
        Ok(Self {
            place: TargetPlace::Path { host, path },
            format,
        })
    }

    /// `PATH`, `ssh://[USER@]HOST[:PORT]/PATH`, or the address of an export. Without a format, the name of a file decides.
    pub(super) fn parse(word: &OsStr, format: Option<Format>) -> Result<Self, Error> {
        if let Some(export) = ExportAddress::of(word)? {
            return match format {
                None | Some(Format::Raw) => Ok(Self {
                    place: TargetPlace::Export(export),
                    format: Format::Raw,
                }),
                Some(_) => Err(Error::usage(
                    "an export gets the content of the disk, without a format",
                    "remove the option --to",
                )),
            };
        }
        let (host, path) = match word.to_str().and_then(|text| text.strip_prefix(SCHEME)) {
            None => (None, absolute(Path::new(word))?),
            Some(rest) => far_place(rest)?,
        };
        Self::of_path(host, path, format)
    }

    /// The file or device of this host; none for another place.
    pub(super) fn local_path(&self) -> Option<&Path> {
        match &self.place {
            TargetPlace::Path { host: None, path } => Some(path),
            TargetPlace::Path { .. } | TargetPlace::Export(_) => None,
        }
    }

    /// What a receiver is asked for.
    pub(super) fn path(&self) -> PathBuf {
        match &self.place {
            TargetPlace::Path { path, .. } => path.clone(),
            TargetPlace::Export(export) => PathBuf::from(&export.text),
        }
    }

    /// What identifies it, so that an interrupted copy is continued, or refused if it has another format.
    pub(super) fn identity(&self) -> String {
        let place = match &self.place {
            TargetPlace::Export(export) => return export_identity(&export.uri),
            // Another command may reach the same receiver.
            TargetPlace::Path {
                host: Some(TargetHost::Command(_)),
                path,
            } => format!("{} behind a command", path.display()),
            TargetPlace::Path { .. } => self.to_string(),
        };
        match self.format {
            Format::Raw => place,
            format => format!("{format} {place}"),
        }
    }

    /// An image on the host of the target. A relative path is of this host.
    pub(super) fn seed(&self, path: &Path) -> Result<Seed, Error> {
        let path = match &self.place {
            TargetPlace::Export(export)
                if ExportAddress::of(path.as_os_str())?.is_some_and(|it| it.is_same(export)) =>
            {
                self.path()
            }
            TargetPlace::Path { host: Some(_), .. } if path.is_absolute() => path.to_owned(),
            TargetPlace::Path { host: Some(_), .. } => {
                let reason = format!("{} is not an absolute path of the other host", path.display());
                return Err(Error::usage(
                    reason,
                    "write the whole path: --seed /srv/copies/web1.raw",
                ));
            }
            TargetPlace::Path { host: None, .. } | TargetPlace::Export(_) => absolute(path)?,
        };
        Ok(Seed { path, format: None })
    }

    /// The connector to receivers there. The connection of ssh, or to the server of an export, is opened.
    pub(super) fn connector(&self, options: &[String], context: &Context) -> Result<Arc<dyn Connector>, Error> {
        let host = match &self.place {
            TargetPlace::Path { host: None, .. } => {
                return Ok(Arc::new(LocalConnector::new(receive_tools(context))));
            }
            TargetPlace::Export(export) => {
                let nbd_options = NbdOptions {
                    is_stopped: Some(context.interrupt()?.question()),
                    ..NbdOptions::default()
                };
                let connected = ExportTarget::connect(&export.text, &export.uri, nbd_options).map_err(copy_error)?;
                return Ok(Arc::new(LocalConnector::to_export(receive_tools(context), connected)));
            }
            TargetPlace::Path { host: Some(host), .. } => host,
        };
        let clock = Arc::clone(context.clock());
        let host = match host {
            TargetHost::Ssh(host) => host,
            TargetHost::Command(command) => {
                let tools = Arc::new(LocalTools::new(Arc::clone(&clock), TOOL_TIME_OUT));
                return Ok(Arc::new(ProgramConnector::by_command(tools, command.clone(), clock)));
            }
        };
        let tools: Arc<dyn StreamTools> = Arc::new(host.connect(options, context)?);
        Ok(Arc::new(ProgramConnector::new(tools, "holdfast".to_owned(), clock)))
    }
}

/// `[USER@]HOST[:PORT]/PATH`, of a file or device of another host.
fn far_place(rest: &str) -> Result<(Option<TargetHost>, PathBuf), Error> {
    let wrong = |what: String| Error::usage(what, "write ssh://HOST/PATH or ssh://USER@HOST:PORT/PATH");
    let (host, path) = rest
        .split_once('/')
        .ok_or_else(|| wrong(format!("{rest:?} has no path")))?;
    let host = SshHost::parse(host).map_err(wrong)?;
    if path.is_empty() {
        return Err(wrong(format!("{rest:?} does not name a file")));
    }
    Ok((Some(TargetHost::Ssh(host)), Path::new("/").join(path)))
}

/// A path of this host. Its folder must exist.
fn absolute(path: &Path) -> Result<PathBuf, Error> {
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
    Ok(found.join(name))
}

impl std::fmt::Display for CopyTarget {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.place {
            TargetPlace::Path { host, path } => {
                if let Some(TargetHost::Ssh(host)) = host {
                    write!(formatter, "{SCHEME}{host}")?;
                }
                write!(formatter, "{}", path.display())?;
                match host {
                    Some(TargetHost::Command(command)) => write!(formatter, " behind `{command}`"),
                    Some(TargetHost::Ssh(_)) | None => Ok(()),
                }
            }
            TargetPlace::Export(export) => formatter.write_str(&export.text),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::path::Path;

    use holdfast_image::Format;

    use super::{CopyTarget, ExportAddress, TargetHost, TargetPlace};

    fn parsed(word: &str) -> CopyTarget {
        CopyTarget::parse(OsStr::new(word), None).unwrap()
    }

    fn place(target: &CopyTarget) -> (Option<String>, &Path) {
        match &target.place {
            TargetPlace::Path { host, path } => {
                let host = host.as_ref().map(|host| match host {
                    TargetHost::Ssh(host) => host.to_string(),
                    TargetHost::Command(command) => command.clone(),
                });
                (host, path)
            }
            TargetPlace::Export(export) => (None, Path::new(&export.text)),
        }
    }

    #[test]
    fn a_target_is_a_path_here_or_on_a_host() {
        let far = parsed("ssh://root@backup:2222/srv/web 1.raw");
        assert_eq!(
            place(&far),
            (Some("root@backup:2222".to_owned()), Path::new("/srv/web 1.raw"))
        );
        assert_eq!(far.to_string(), "ssh://root@backup:2222/srv/web 1.raw");
        let far = parsed("ssh://[fe80::1]/srv/a");
        assert_eq!(place(&far).0.as_deref(), Some("[fe80::1]"));
        let here = parsed("/tmp/web1.raw");
        assert_eq!(place(&here), (None, Path::new("/tmp/web1.raw")));
        for wrong in [
            "ssh://host",
            "ssh:///srv/a",
            "ssh://host/",
            "ssh://-oProxy/a",
            "ssh://host:x/a",
            "/tmp/..",
            "/tmp/web1.vmkd",
            "nbd+unix:///web1",
        ] {
            CopyTarget::parse(OsStr::new(wrong), None).unwrap_err();
        }
    }

    #[test]
    fn a_path_behind_a_command_is_absolute() {
        let behind = |word: &str| CopyTarget::behind_command(OsStr::new(word), None, "nc backup 7070");
        let target = behind("/srv/no/folder/here/web1.qcow2").unwrap();
        assert_eq!(
            place(&target),
            (
                Some("nc backup 7070".to_owned()),
                Path::new("/srv/no/folder/here/web1.qcow2")
            )
        );
        assert_eq!((target.format, target.local_path()), (Format::Qcow2, None));
        assert_eq!(
            target.to_string(),
            "/srv/no/folder/here/web1.qcow2 behind `nc backup 7070`"
        );
        for wrong in ["web1.raw", "ssh://backup/srv/web1.raw", "nbd://storage/web1"] {
            behind(wrong).unwrap_err();
        }
    }

    #[test]
    fn the_name_of_a_file_decides_its_format() {
        for (word, format) in [
            ("/tmp/web1.qcow2", Format::Qcow2),
            ("ssh://backup/srv/web1.vhdx", Format::Vhdx),
            ("ssh://backup/srv/web1", Format::Raw),
            ("ssh://backup/dev/mapper/vg-web.1", Format::Raw),
            ("nbd://storage/web1.qcow2", Format::Raw),
        ] {
            assert_eq!(parsed(word).format, format, "{word}");
        }
        let named = OsStr::new("/tmp/web1.qcow2");
        let raw = CopyTarget::parse(named, Some(Format::Raw)).unwrap();
        assert_eq!(raw.format, Format::Raw);
        assert_ne!(raw.identity(), parsed("/tmp/web1.qcow2").identity());
        CopyTarget::parse(OsStr::new("nbd://storage/web1"), Some(Format::Qcow2)).unwrap_err();
    }

    #[test]
    fn an_export_is_known_by_each_of_its_addresses() {
        let export = |text: &str| ExportAddress::of(OsStr::new(text)).unwrap();
        for other in ["/srv/nbd.raw", "nbd", "ssh://host/disk"] {
            assert!(export(other).is_none(), "{other}");
        }
        let is_same = |one: &str, other: &str| export(one).unwrap().is_same(&export(other).unwrap());
        for (one, other) in [
            ("nbd://127.0.0.1/a", "nbd://127.0.0.1:10809/a"),
            ("nbd://localhost/a", "nbd://LOCALHOST:10809/a"),
            ("nbd://localhost:99/a", "nbd://127.0.0.1:99/a"),
            ("nbd+unix:///a?socket=/tmp/../tmp", "nbd+unix:///a?socket=/tmp"),
        ] {
            assert!(is_same(one, other), "{one} {other}");
            assert!(!is_same(one, &other.replace("/a", "/b")), "{one} {other}");
        }
        assert!(!is_same("nbd://127.0.0.1/a", "nbd://127.0.0.1:10810/a"));
    }
}
