//! `holdfast serve vhost-user`: serves disks to virtual machines of this host.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_engine::{DiskSocket, ExportStatus, SocketPlace, VhostUserOptions};
use holdfast_hardware::xml::Element;
use holdfast_repo::key::{Randomness as _, SystemRandomness};
use holdfast_serve::vhost_user::{FrontEndGone, QUEUE_COUNT_MAX, ReachedLimit, VhostSectorSize, VhostUserEvent};

use super::run::{RepositoryUse, ServerPlan, run_server};
use super::sources::SourceArgs;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::units;

/// Arguments of `serve vhost-user`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("place").required(true).args(["socket", "sockets"]))]
pub(super) struct VhostUserArgs {
    /// Snapshots and images; each disk has a socket of its own
    #[arg(value_name = "SNAPSHOT[:DISK]|IMAGE", required = true)]
    exports: Vec<String>,
    /// Serve one disk on this Unix socket, which only this user can open
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Serve each disk on a Unix socket of its own in this folder
    #[arg(long, value_name = "FOLDER")]
    sockets: Option<PathBuf>,
    #[command(flatten)]
    sources: SourceArgs,
    /// Maximum number of connections of machines; a disk that can be written has one
    #[arg(long, value_name = "COUNT", default_value = "256")]
    max_connections: NonZero<usize>,
    /// Maximum number of queues of a machine; QEMU uses one for each processor
    #[arg(long, value_name = "COUNT", default_value = "64", value_parser = parse_queues)]
    queues: NonZero<u16>,
    /// Size of sectors in bytes
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = ["512", "4096"])]
    sector_size: String,
}

impl Verb for VhostUserArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Start a machine from a snapshot, and discard what it writes",
            line: "holdfast serve vhost-user -r /backup/vms web1:vda --socket /run/web1.sock --writable",
        },
        Example {
            wish: "Use an image as the disk of a machine",
            line: "holdfast serve vhost-user ./web1.vdi --socket /run/web1.sock --writable",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Json];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        context.output().refuse_json("serve vhost-user")?;
        let plan = ServerPlan {
            choice: self.sources.choice(&self.exports)?,
            nbd: None,
            iscsi: None,
            vhost_user: Some(self.options(context)?),
            lines,
            max_connections: self.max_connections,
            control: None,
            repository: RepositoryUse::IfNeeded,
        };
        run_server(plan, context)
    }
}

impl VhostUserArgs {
    fn options(&self, context: &Context) -> Result<VhostUserOptions, Error> {
        let capacity = match self.sockets {
            Some(_) => DiskCapacity::Several,
            None => DiskCapacity::One,
        };
        let mut server_number = [0; 8];
        SystemRandomness.fill(&mut server_number)?;
        let console = context.shared_console();
        let events = move |event: &VhostUserEvent<'_>| {
            if let Some(warning) = warning_of(event, capacity) {
                console.warning(&warning);
            }
        };
        Ok(VhostUserOptions {
            sockets: match (&self.socket, &self.sockets) {
                (Some(path), _) => SocketPlace::File(path.clone()),
                (None, folder) => SocketPlace::Folder(folder.clone().unwrap_or_default()),
            },
            sector_size: match self.sector_size.as_str() {
                "4096" => VhostSectorSize::Bytes4096,
                _ => VhostSectorSize::Bytes512,
            },
            queue_count: self.queues,
            events: Arc::new(events),
            server_number: u64::from_ne_bytes(server_number),
        })
    }
}

/// How many disks the process can serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DiskCapacity {
    One,
    Several,
}

fn parse_queues(text: &str) -> Result<NonZero<u16>, String> {
    let count: Option<NonZero<u16>> = text.parse().ok();
    let count = count.filter(|count| count.get() <= QUEUE_COUNT_MAX);
    count.ok_or_else(|| format!("a number from 1 to {QUEUE_COUNT_MAX}"))
}

/// The lines of the exports: their sockets, and what QEMU and libvirt need to use them.
fn lines(exports: &[ExportStatus]) -> String {
    let with_socket = exports
        .iter()
        .filter_map(|export| Some((export, export.socket.as_ref()?)));
    with_socket.map(|(export, socket)| lines_of(export, socket)).collect()
}

fn lines_of(export: &ExportStatus, socket: &DiskSocket) -> String {
    let path = std::path::absolute(&socket.path).unwrap_or_else(|_| socket.path.clone());
    let (description, size) = (&export.description, units::bytes(export.size_bytes));
    // A machine that connects again after its writes were discarded is refused anyway.
    let reconnect = if socket.reconnect { ",reconnect=1" } else { "" };
    let read_only = if export.writable {
        ""
    } else {
        "  (the guest cannot write)"
    };
    let (memory, xml) = (memory_element(), disk_element(&path, socket));
    let path = path.display();
    format!(
        "{path}  {description}, {size}{read_only}\n  \
         QEMU:     -object memory-backend-memfd,id=mem,size=2G,share=on -machine memory-backend=mem \
         -chardev socket,id=disk,path={path}{reconnect} -device vhost-user-blk-pci,chardev=disk\n  \
         libvirt:  {memory}\n            {xml}\n"
    )
}

/// The element of a domain that shares its memory.
fn memory_element() -> Element {
    let source = Element::new("source").attribute("type", "memfd");
    let access = Element::new("access").attribute("mode", "shared");
    Element::new("memoryBacking").child(source).child(access)
}

/// The element of a domain for a disk with a socket at an absolute path.
fn disk_element(path: &Path, socket: &DiskSocket) -> Element {
    let path = path.display();
    let mut source = Element::new("source").attribute("type", "unix").attribute("path", path);
    if socket.reconnect {
        let reconnect = Element::new("reconnect");
        source = source.child(reconnect.attribute("enabled", "yes").attribute("timeout", 1));
    }
    let driver = Element::new("driver")
        .attribute("name", "qemu")
        .attribute("type", "raw");
    let target = Element::new("target")
        .attribute("dev", "vda")
        .attribute("bus", "virtio");
    let disk = Element::new("disk")
        .attribute("type", "vhostuser")
        .attribute("device", "disk");
    disk.child(driver).child(source).child(target)
}

/// The warning of an event, if it needs one.
fn warning_of(event: &VhostUserEvent<'_>, capacity: DiskCapacity) -> Option<String> {
    match event {
        VhostUserEvent::RequestFailed {
            export, action, error, ..
        } => Some(format!("{export}: {action}: {error}")),
        VhostUserEvent::TooMany { export, peer, limit } => Some(match limit {
            ReachedLimit::Server => {
                format!("{export}: refused {peer}: another machine uses the disk, and it can be written")
            }
            ReachedLimit::Process => {
                format!("{export}: refused {peer}: the maximum number of connections is reached (--max-connections)")
            }
        }),
        VhostUserEvent::UnsealedMemory { export, peer } if capacity == DiskCapacity::Several => Some(format!(
            "{export}: {peer} can shorten its memory and so end this server of several disks; memory-backend-memfd \
             with seal=on (the default) prevents that"
        )),
        VhostUserEvent::QueueFailed {
            export, queue, reason, ..
        } => Some(format!(
            "{export}: queue {queue} stops until the guest resets the disk: {reason}"
        )),
        VhostUserEvent::Disconnected {
            export,
            reason: FrontEndGone::WritesLost,
            ..
        } => Some(format!(
            "{export}: refused a machine that has written to an earlier server whose writes are lost; reset or restart \
             the machine"
        )),
        VhostUserEvent::Disconnected {
            export,
            reason: FrontEndGone::Malformed(reason),
            ..
        } => Some(format!("{export}: disconnected: {reason}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use holdfast_engine::{DiskSocket, ExportStatus, TrafficStatus};
    use holdfast_serve::vhost_user::{Peer, ReachedLimit, VhostUserEvent};

    use super::{DiskCapacity, lines, parse_queues, warning_of};

    #[test]
    fn a_refused_machine_learns_the_limit() {
        let peer = Peer {
            connection: 1,
            name: "uid 0 pid 7".to_owned(),
        };
        for (limit, reason) in [
            (ReachedLimit::Server, "another machine"),
            (ReachedLimit::Process, "--max-connections"),
        ] {
            let event = VhostUserEvent::TooMany {
                export: "web1/vda",
                peer: &peer,
                limit,
            };
            let warning = warning_of(&event, DiskCapacity::One).unwrap();
            assert!(warning.contains(reason), "{warning}");
        }
    }

    #[test]
    fn the_number_of_queues_is_bounded() {
        assert_eq!(parse_queues("256").unwrap().get(), 256);
        for text in ["0", "257", "65536", "-1", "many", ""] {
            assert!(parse_queues(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_lines_are_ready_for_use() {
        let mut disk = ExportStatus {
            name: "web1/vda".to_owned(),
            description: "vda of web1".to_owned(),
            size_bytes: 1 << 30,
            writable: true,
            addresses: vec!["/run/a'b.sock".to_owned()],
            socket: Some(DiskSocket {
                path: "/run/a'b.sock".into(),
                reconnect: true,
            }),
            clients: Vec::new(),
            traffic: TrafficStatus::default(),
            cache: None,
        };
        let text = lines(std::slice::from_ref(&disk));
        assert!(text.contains("path=/run/a'b.sock,reconnect=1 "), "{text}");
        assert!(
            text.contains("path='/run/a&apos;b.sock'><reconnect enabled='yes' timeout='1'/></source>"),
            "{text}"
        );
        disk.socket.as_mut().unwrap().reconnect = false;
        assert!(!lines(&[disk]).contains("reconnect"));
    }
}
