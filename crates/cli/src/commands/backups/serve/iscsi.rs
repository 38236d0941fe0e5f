//! `holdfast serve iscsi`: serves disks as logical units of iSCSI targets.

use std::io::Read as _;
use std::net::SocketAddr;
use std::num::NonZero;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_engine::{IscsiOptions, ServeAddress, UnitRules};
use holdfast_repo::key::{Randomness as _, SystemRandomness};
use holdfast_serve::iscsi::{
    Authentication, ChapSecret, ChapUser, InitiatorAccess, SectorSize, TargetEvent, is_iscsi_name,
};
use zeroize::Zeroizing;

use super::document::address_lines;
use super::run::{RepositoryUse, ServerPlan, readers, run_server};
use super::sources::SourceArgs;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::units;

/// Longest file with secrets.
const SECRETS_BYTES_MAX: u64 = 64 << 10;

/// Arguments of `serve iscsi`.
#[derive(Debug, clap::Args)]
pub(super) struct IscsiArgs {
    /// Snapshots and images; each snapshot, machine or single image is a target, and each of its disks a LUN
    #[arg(value_name = "SNAPSHOT[:DISK]|IMAGE", required = true)]
    exports: Vec<String>,
    /// Serve on this address and port (127.0.0.1:3260); may be repeated
    #[arg(long, value_name = "ADDRESS", required = true)]
    listen: Vec<SocketAddr>,
    #[command(flatten)]
    sources: SourceArgs,
    #[command(flatten)]
    initiators: InitiatorArgs,
    /// Maximum number of connections; one address gets at most half of them
    #[arg(long, value_name = "COUNT", default_value = "256")]
    max_connections: NonZero<usize>,
}

/// Initiators, and how disks appear to them.
#[derive(Debug, clap::Args)]
pub(super) struct InitiatorArgs {
    /// First part of the targets' names, before the machine
    #[arg(long, value_name = "IQN", default_value = "iqn.2026-01.org.holdfast", value_parser = parse_authority)]
    authority: String,
    /// Serve only this initiator; may be repeated
    #[arg(long, value_name = "IQN")]
    initiator: Vec<String>,
    /// Require CHAP: each line of this file has the name and the secret of an initiator
    #[arg(long, value_name = "FILE")]
    chap_file: Option<PathBuf>,
    /// Authenticate to initiators, too: the line of this file has the name and the secret of the target
    #[arg(long, value_name = "FILE", requires = "chap_file")]
    chap_target_file: Option<PathBuf>,
    /// Size of sectors of iSCSI in bytes
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = ["512", "4096"])]
    sector_size: String,
    /// Largest size that initiators see, for those that cannot use larger disks (2T)
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    max_size: Option<u64>,
}

impl Verb for IscsiArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Serve the newest snapshot of a machine to initiators on this host",
            line: "holdfast serve iscsi -r /backup/vms web1 --listen 127.0.0.1:3260",
        },
        Example {
            wish: "Boot another host from it, with a password, and keep what the host writes",
            line: "holdfast serve iscsi -r /backup/vms web1 --listen 10.0.0.5:3260 --overlay /srv/web1 --chap-file chap",
        },
        Example {
            wish: "Serve two images as LUNs of one target",
            line: "holdfast serve iscsi -m web1 vda=a.qcow2 vdb=b.vmdk --listen 127.0.0.1:3260",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Json];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        context.output().refuse_json("serve iscsi")?;
        let doors = self.listen.iter().copied().map(ServeAddress::Tcp).collect();
        let plan = ServerPlan {
            choice: self.sources.choice(&self.exports)?,
            nbd: None,
            iscsi: Some(self.initiators.options(doors, context)?),
            vhost_user: None,
            lines: address_lines,
            max_connections: self.max_connections,
            control: None,
            repository: RepositoryUse::IfNeeded,
        };
        run_server(plan, context)
    }
}

fn parse_authority(text: &str) -> Result<String, String> {
    if is_iscsi_name(text) {
        Ok(text.to_owned())
    } else {
        Err("not a valid iSCSI name, such as iqn.2026-01.org.example".to_owned())
    }
}

impl InitiatorArgs {
    /// How iSCSI is served at `doors`. Warns if every initiator is accepted.
    pub(super) fn options(&self, doors: Vec<ServeAddress>, context: &Context) -> Result<IscsiOptions, Error> {
        let authentication = authentication(self)?;
        if matches!(authentication, Authentication::None) {
            for address in doors.iter().filter_map(ServeAddress::tcp_address) {
                context.console().warning(&self.without_authentication(address));
            }
        }
        let console = context.shared_console();
        let events = move |event: &TargetEvent<'_>| {
            if let TargetEvent::CommandFailed { target, error, .. } = event {
                console.warning(&format!("{target}: {error}"));
            }
        };
        Ok(IscsiOptions {
            doors,
            units: UnitRules {
                authority: self.authority.clone(),
                sector_size: match self.sector_size.as_str() {
                    "4096" => SectorSize::Bytes4096,
                    _ => SectorSize::Bytes512,
                },
                size_bytes_max: self.max_size,
                access: match self.initiator.as_slice() {
                    [] => InitiatorAccess::Anyone,
                    names => InitiatorAccess::Listed(names.to_vec()),
                },
            },
            authentication,
            events: Arc::new(events),
            randomness: Arc::new(|bytes: &mut [u8]| SystemRandomness.fill(bytes).map_err(std::io::Error::other)),
        })
    }

    /// The warning for a server without authentication.
    fn without_authentication(&self, address: SocketAddr) -> String {
        let names = if self.initiator.is_empty() {
            ""
        } else {
            "; the names of initiators are not secret"
        };
        format!(
            "{} can read these disks without authentication{names}; see --chap-file",
            readers(address)
        )
    }
}

fn authentication(args: &InitiatorArgs) -> Result<Authentication, Error> {
    let Some(path) = &args.chap_file else {
        return Ok(Authentication::None);
    };
    let users = chap_users(path)?;
    let target = match &args.chap_target_file {
        None => None,
        Some(path) => match chap_users(path)?.as_slice() {
            [one] => Some(one.clone()),
            _ => return Err(invalid_secrets(path, "it must have one line")),
        },
    };
    // With the same secret, the answer to the target's challenge could be got from the target itself.
    if let Some(target) = &target
        && users.iter().any(|user| user.secret == target.secret)
    {
        return Err(invalid_secrets(
            path,
            "the target's secret must differ from those of initiators",
        ));
    }
    Ok(Authentication::Chap { users, target })
}

/// Reads a file of names and secrets, which other users must not be able to access.
fn chap_users(path: &Path) -> Result<Vec<ChapUser>, Error> {
    let failed = |source: std::io::Error| Error::File {
        action: "read",
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(Error::usage(
            format!("{} is accessible by others (mode {mode:03o})", path.display()),
            format!("protect the secrets: chmod 600 {}", path.display()),
        ));
    }
    let mut text = Zeroizing::new(String::new());
    file.take(SECRETS_BYTES_MAX).read_to_string(&mut text).map_err(failed)?;
    let lines = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    let users = lines.map(|line| {
        let (name, secret) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        ChapSecret::new(secret.trim_start().as_bytes())
            .map(|secret| ChapUser {
                name: name.to_owned(),
                secret,
            })
            .ok_or_else(|| invalid_secrets(path, "each line needs a name, and a secret of 12 to 255 characters"))
    });
    let users: Vec<ChapUser> = users.collect::<Result<_, Error>>()?;
    if users.is_empty() {
        return Err(invalid_secrets(path, "it has no name and secret"));
    }
    Ok(users)
}

fn invalid_secrets(path: &Path, problem: &str) -> Error {
    Error::usage(
        format!("the secrets in {} are not valid: {problem}", path.display()),
        "write a line for each initiator: NAME SECRET",
    )
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::chap_users;

    #[test]
    fn secrets_are_read_from_private_files_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chap");
        let write = |text: &str, mode: u32| {
            std::fs::File::create(&path)
                .unwrap()
                .write_all(text.as_bytes())
                .unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            chap_users(&path).map(|users| users.into_iter().map(|user| user.name).collect::<Vec<_>>())
        };
        let names = write("# initiators\nmary  a secret with blanks\n\njohn 0123456789ab\n", 0o600).unwrap();
        assert_eq!(names, ["mary", "john"]);
        for (text, mode) in [
            ("mary 0123456789ab", 0o640),
            ("mary 0123456789ab", 0o604),
            ("mary short", 0o600),
            ("mary", 0o600),
            ("", 0o600),
        ] {
            assert!(write(text, mode).is_err(), "{text} {mode:o}");
        }
    }
}
