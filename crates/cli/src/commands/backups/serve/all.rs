//! `holdfast serve all`: one server for all protocols, whose exports change while it runs.

use std::net::SocketAddr;
use std::num::NonZero;
use std::path::PathBuf;

use holdfast_engine::ServeAddress;

use super::document::address_lines;
use super::iscsi::InitiatorArgs;
use super::nbd::TlsArgs;
use super::run::{RepositoryUse, ServerPlan, run_server};
use super::sources::SourceArgs;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::activation::{ActivatedSockets, SocketPurpose};
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `serve all`.
#[derive(Debug, clap::Args)]
pub(super) struct AllArgs {
    /// Snapshots and images; more can be added while the server runs
    #[arg(value_name = "SNAPSHOT[:DISK]|IMAGE")]
    exports: Vec<String>,
    /// Serve NBD on this address and port, or unix:PATH; may be repeated
    #[arg(long, value_name = "ADDRESS", value_parser = parse_door)]
    nbd: Vec<Door>,
    /// Serve iSCSI on this address and port; may be repeated
    #[arg(long, value_name = "ADDRESS")]
    iscsi: Vec<SocketAddr>,
    #[command(flatten)]
    sources: SourceArgs,
    /// Maximum number of connections of both protocols; one address gets at most half of them
    #[arg(long, value_name = "COUNT", default_value = "256")]
    max_connections: NonZero<usize>,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    initiators: InitiatorArgs,
}

/// An address of NBD.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Door {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

fn parse_door(text: &str) -> Result<Door, String> {
    match text.strip_prefix("unix:") {
        Some("") => Err("the path of the socket is missing".to_owned()),
        Some(path) => Ok(Door::Unix(path.into())),
        None => text
            .parse()
            .map(Door::Tcp)
            .map_err(|_| "neither an address and a port, such as 127.0.0.1:10809, nor unix:PATH".to_owned()),
    }
}

impl Verb for AllArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Serve a snapshot over both protocols",
            line: "holdfast serve all -r /backup/vms web1 --nbd unix:/run/web1.sock --iscsi 127.0.0.1:3260",
        },
        Example {
            wish: "Serve two images as LUNs of one target, and let initiators change them",
            line: "holdfast serve all --iscsi 10.0.0.5:3260 -m web1 vda=a.qcow2 vdb=b.qcow2 --writable --chap-file chap",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Json];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        context.output().refuse_json("serve all")?;
        let mut sockets = ActivatedSockets::of(context)?;
        let mut nbd: Vec<ServeAddress> = self.nbd.iter().map(Door::address).collect();
        nbd.extend(
            sockets
                .take(SocketPurpose::Nbd)
                .into_iter()
                .map(ServeAddress::Inherited),
        );
        let mut iscsi: Vec<ServeAddress> = self.iscsi.iter().copied().map(ServeAddress::Tcp).collect();
        iscsi.extend(
            sockets
                .take(SocketPurpose::Iscsi)
                .into_iter()
                .map(ServeAddress::Inherited),
        );
        if nbd.is_empty() && iscsi.is_empty() {
            return Err(Error::usage(
                "no address is given",
                "give at least one with --nbd or --iscsi, or let systemd open it (ListenStream=)",
            ));
        }
        let control = sockets.take_control()?;
        let plan = ServerPlan {
            choice: self.sources.choice(&self.exports)?,
            nbd: (!nbd.is_empty()).then(|| self.tls.options(nbd, context)).transpose()?,
            iscsi: (!iscsi.is_empty())
                .then(|| self.initiators.options(iscsi, context))
                .transpose()?,
            vhost_user: None,
            lines: address_lines,
            max_connections: self.max_connections,
            control,
            repository: RepositoryUse::IfNamed,
        };
        run_server(plan, context)
    }
}

impl Door {
    fn address(&self) -> ServeAddress {
        match self {
            Self::Unix(path) => ServeAddress::Unix(path.clone()),
            Self::Tcp(address) => ServeAddress::Tcp(*address),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Door, parse_door};

    #[test]
    fn doors_are_sockets_or_addresses() {
        assert_eq!(parse_door("unix:/run/x"), Ok(Door::Unix("/run/x".into())));
        assert_eq!(parse_door("[::1]:10809"), Ok(Door::Tcp("[::1]:10809".parse().unwrap())));
        for text in ["unix:", "/run/x", "10809", "localhost"] {
            assert!(parse_door(text).is_err(), "{text}");
        }
    }
}
