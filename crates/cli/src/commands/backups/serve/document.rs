//! The reports about running servers.

use std::path::Path;
use std::time::Duration;

use holdfast_block::error_messages;
use holdfast_engine::{CacheStatus, ClientStatus, ExportStatus, ServerStatus, TrafficStatus};
use serde::Serialize;

use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Column, Page, Report, Style, Table};
use crate::units;

/// Report of `serve list`.
#[derive(Debug, Serialize)]
pub(super) struct ServersListed {
    pub(super) servers: Vec<ServerDocument>,
}

#[derive(Debug, Serialize)]
pub(super) struct ServerDocument {
    /// The path of its control socket.
    socket: String,
    pid: u32,
    up_ms: u64,
    nbd: Vec<String>,
    iscsi: Vec<String>,
    vhost_user: Vec<String>,
    connections: usize,
    connections_max: usize,
    exports: Vec<ExportDocument>,
}

#[derive(Debug, Serialize)]
pub(super) struct ExportDocument {
    name: String,
    description: String,
    size_bytes: u64,
    writable: bool,
    addresses: Vec<String>,
    clients: Vec<ClientStatus>,
    /// Null if it was not measured.
    rates: Option<RatesDocument>,
    traffic: TrafficStatus,
    cache: Option<CacheStatus>,
}

/// Rates between two samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[expect(clippy::struct_field_names, reason = "the unit is part of the documented keys")]
struct RatesDocument {
    reads_per_second: u64,
    read_bytes_per_second: u64,
    writes_per_second: u64,
    write_bytes_per_second: u64,
}

impl RatesDocument {
    fn between(before: &TrafficStatus, now: &TrafficStatus, elapsed: Duration) -> Self {
        let rate = |before: u64, now: u64| units::rate(now.saturating_sub(before), elapsed).unwrap_or(0);
        Self {
            reads_per_second: rate(before.reads, now.reads),
            read_bytes_per_second: rate(before.read_bytes, now.read_bytes),
            writes_per_second: rate(before.writes, now.writes),
            write_bytes_per_second: rate(before.write_bytes, now.write_bytes),
        }
    }
}

impl ServerDocument {
    /// The second of two samples, with the rates between them.
    pub(super) fn between(socket: &Path, before: &ServerStatus, now: ServerStatus) -> Self {
        let elapsed = Duration::from_millis(now.up_ms.saturating_sub(before.up_ms));
        let exports = now.exports.into_iter().map(|export| {
            let earlier = before.exports.iter().find(|other| other.name == export.name);
            let rates = earlier.map(|earlier| RatesDocument::between(&earlier.traffic, &export.traffic, elapsed));
            ExportDocument::new(export, rates)
        });
        Self {
            socket: socket.display().to_string(),
            pid: now.pid,
            up_ms: now.up_ms,
            nbd: now.nbd,
            iscsi: now.iscsi,
            vhost_user: now.vhost_user,
            connections: now.connections,
            connections_max: now.connections_max,
            exports: exports.collect(),
        }
    }

    fn human(&self, page: &mut Page) {
        let addresses = [&self.nbd[..], &self.iscsi, &self.vhost_user].concat().join(", ");
        let up = units::duration(Duration::from_millis(self.up_ms));
        page.line(&format!(
            "server {}: {addresses}, up {up}, {} of {} connections",
            self.pid, self.connections, self.connections_max
        ));
        if self.exports.is_empty() {
            page.line("no exports");
            return;
        }
        page.gap();
        page.table(&self.export_table());
        if self.exports.iter().any(|export| !export.clients.is_empty()) {
            page.gap();
            page.table(&self.client_table());
        }
    }

    fn export_table(&self) -> Table {
        let mut table = Table::new([
            Column::long_text("EXPORT"),
            Column::number("SIZE"),
            Column::text("ACCESS"),
            Column::number("CLIENTS"),
            Column::number("READS"),
            Column::number("WRITES"),
            Column::number("CACHE HITS"),
            Column::number("ERRORS"),
        ]);
        for export in &self.exports {
            let rate = |rate: fn(&RatesDocument) -> u64| {
                let bytes = export.rates.as_ref().map(rate);
                bytes.map(units::bytes_per_second).unwrap_or_default()
            };
            let hits = export.cache.map(|cache| match cache.hits + cache.misses {
                0 => String::new(),
                all => units::percent(cache.hits, all),
            });
            let errors = export.traffic.errors;
            let style = if errors > 0 { Style::Bad } else { Style::Plain };
            table.styled_row([
                (Style::Plain, export.name.clone()),
                (Style::Plain, units::bytes(export.size_bytes)),
                (Style::Plain, if export.writable { "write" } else { "read" }.to_owned()),
                (Style::Plain, units::count(export.clients.len() as u64)),
                (Style::Plain, rate(|rates| rates.read_bytes_per_second)),
                (Style::Plain, rate(|rates| rates.write_bytes_per_second)),
                (Style::Plain, hits.unwrap_or_default()),
                (style, units::count(errors)),
            ]);
        }
        table
    }

    fn client_table(&self) -> Table {
        let mut table = Table::new([
            Column::long_text("CLIENT"),
            Column::text("PROTOCOL"),
            Column::long_text("EXPORT"),
            Column::number("CONNECTED"),
        ]);
        for export in &self.exports {
            for client in &export.clients {
                let name = match &client.name {
                    Some(name) => format!("{} ({name})", client.peer),
                    None => client.peer.clone(),
                };
                table.row([
                    name,
                    client.protocol.clone(),
                    export.name.clone(),
                    units::duration(Duration::from_millis(client.connected_ms)),
                ]);
            }
        }
        table
    }
}

impl ExportDocument {
    fn new(export: ExportStatus, rates: Option<RatesDocument>) -> Self {
        Self {
            name: export.name,
            description: export.description,
            size_bytes: export.size_bytes,
            writable: export.writable,
            addresses: export.addresses,
            clients: export.clients,
            rates,
            traffic: export.traffic,
            cache: export.cache,
        }
    }
}

impl Report for ServersListed {
    fn command(&self) -> &'static str {
        "serve list"
    }

    fn human(&self, page: &mut Page) {
        if self.servers.is_empty() {
            page.line("no server runs");
        }
        for (number, server) in self.servers.iter().enumerate() {
            if number > 0 {
                page.gap();
            }
            server.human(page);
        }
    }
}

/// Report of `serve add`.
#[derive(Debug, Serialize)]
pub(super) struct ExportsAdded {
    exports: Vec<ExportDocument>,
    #[serde(skip)]
    lines: String,
}

impl ExportsAdded {
    pub(super) fn new(exports: Vec<ExportStatus>) -> Self {
        Self {
            lines: address_lines(&exports),
            exports: exports
                .into_iter()
                .map(|export| ExportDocument::new(export, None))
                .collect(),
        }
    }
}

impl Report for ExportsAdded {
    fn command(&self) -> &'static str {
        "serve add"
    }

    fn human(&self, page: &mut Page) {
        self.lines.lines().for_each(|line| page.line(line));
    }
}

/// Report of `serve remove`.
#[derive(Debug, Default, Serialize)]
pub(super) struct ExportsRemoved {
    pub(super) exports: Vec<RemovedDocument>,
    failed: Vec<RemovalFailed>,
    #[serde(skip)]
    exit: Option<Exit>,
}

/// An export that could not be removed.
#[derive(Debug, Serialize)]
struct RemovalFailed {
    name: String,
    error: String,
}

impl ExportsRemoved {
    /// Reports an error. The first one decides the exit code.
    pub(super) fn fail(&mut self, name: &str, error: &Error, context: &Context) {
        let causes = error_messages(error);
        let advice = error.advice();
        context.console().error(&causes, advice.hint.as_deref());
        self.exit.get_or_insert(advice.exit);
        self.failed.push(RemovalFailed {
            name: name.to_owned(),
            error: causes.join(": "),
        });
    }
}

#[derive(Debug, Serialize)]
pub(super) struct RemovedDocument {
    pub(super) name: String,
    /// Clients whose sessions were ended.
    pub(super) ended_clients: usize,
    /// Whether a request or the last flush did not end in time.
    pub(super) busy: bool,
}

impl Report for ExportsRemoved {
    fn command(&self) -> &'static str {
        "serve remove"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn exit(&self) -> Exit {
        self.exit.unwrap_or(Exit::Ok)
    }

    fn human(&self, page: &mut Page) {
        for export in &self.exports {
            let clients = match export.ended_clients {
                0 => String::new(),
                count => format!(", disconnected {}", units::counted(count as u64, "client", "clients")),
            };
            page.line(&format!("removed {}{clients}", export.name));
        }
        if !self.failed.is_empty() {
            let names: Vec<&str> = self.failed.iter().map(|failed| &failed.name[..]).collect();
            page.styled(Style::Bad, &format!("not removed: {}", names.join(", ")));
        }
    }
}

/// Report of `serve stop`.
#[derive(Debug, Serialize)]
pub(super) struct ServerStopped {
    pub(super) pid: u32,
}

impl Report for ServerStopped {
    fn command(&self) -> &'static str {
        "serve stop"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        page.line(&format!("server {} stops", self.pid));
    }
}

/// A line for each address of each export: the address, as programs accept it, and a description.
pub(super) fn address_lines(exports: &[ExportStatus]) -> String {
    let line = |export: &ExportStatus, address: &String| {
        format!(
            "{address}  {}, {}\n",
            export.description,
            units::bytes(export.size_bytes)
        )
    };
    exports
        .iter()
        .flat_map(|export| export.addresses.iter().map(|address| line(export, address)))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use holdfast_engine::{CacheStatus, ClientStatus, ExportStatus, ServerStatus, TrafficStatus};

    use super::{ServerDocument, ServersListed};
    use crate::output::{Page, Paint, Report as _};

    fn status(up_ms: u64, traffic: TrafficStatus) -> ServerStatus {
        ServerStatus {
            pid: 42,
            up_ms,
            nbd: vec!["nbd://10.0.0.5:10809/".to_owned()],
            iscsi: vec!["iscsi://10.0.0.5:3260".to_owned()],
            vhost_user: vec!["vhost-user:/run/disks".to_owned()],
            connections: 1,
            connections_max: 256,
            exports: vec![ExportStatus {
                name: "web1/vda".to_owned(),
                description: "vda of web1".to_owned(),
                size_bytes: 20 << 30,
                writable: false,
                addresses: vec!["nbd://10.0.0.5:10809/web1/vda".to_owned()],
                socket: None,
                clients: vec![ClientStatus {
                    protocol: "iscsi".to_owned(),
                    peer: "10.0.0.7:4711".to_owned(),
                    name: Some("iqn.2026-01.org.example:host".to_owned()),
                    connected_ms: 61_000,
                }],
                traffic,
                cache: Some(CacheStatus { hits: 3, misses: 1 }),
            }],
        }
    }

    #[test]
    fn rates_are_the_difference_of_two_samples() {
        let before = TrafficStatus::default();
        let now = TrafficStatus {
            reads: 100,
            read_bytes: 20 << 20,
            ..before
        };
        let server = ServerDocument::between(Path::new("/run/x"), &status(5000, before), status(7000, now));
        let rates = server.exports[0].rates.unwrap();
        assert_eq!((rates.reads_per_second, rates.read_bytes_per_second), (50, 10 << 20));
        let mut page = Page::new(None, Paint::Plain);
        ServersListed { servers: vec![server] }.human(&mut page);
        let text = page.into_text();
        for part in [
            "server 42: nbd://10.0.0.5:10809/, iscsi://10.0.0.5:3260, vhost-user:/run/disks, up",
            "1 of 256 connections",
            "web1/vda",
            "20.0 GiB",
            "10.0 MiB/s",
            "75",
            "10.0.0.7:4711 (iqn.2026-01.org.example:host)",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
