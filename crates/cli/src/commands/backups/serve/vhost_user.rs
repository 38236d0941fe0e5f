//! `holdfast serve vhost-user`: serves disks to virtual machines of this host.

use std::ffi::OsString;
use std::num::NonZero;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_engine::{ServeVhostUserRequest, ServedDisk, SnapshotName, SocketPlace, SourceName, serve_vhost_user};
use holdfast_hardware::xml::Element;
use holdfast_image::OpenOptions;
use holdfast_serve::vhost_user::{FrontEndGone, QUEUE_COUNT_MAX, SectorSize, VhostUserEvent};

use super::writes_of;
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
    /// Snapshots, and images: a word with a slash, or with an image's extension, is an image
    #[arg(value_name = "SNAPSHOT[:DISK]|IMAGE", required = true)]
    disks: Vec<OsString>,
    /// Serve one disk on this Unix socket, which only this user can open
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Serve each disk on a Unix socket of its own in this folder
    #[arg(long, value_name = "FOLDER")]
    sockets: Option<PathBuf>,
    /// Allow writes: they change images, and are discarded at the end for snapshots
    #[arg(long)]
    writable: bool,
    /// Allow writes: they change images, and are kept in files in this folder for snapshots
    #[arg(long, value_name = "FOLDER")]
    overlay: Option<PathBuf>,
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
        run(self, context)
    }
}

fn parse_queues(text: &str) -> Result<NonZero<u16>, String> {
    let count: Option<NonZero<u16>> = text.parse().ok();
    let count = count.filter(|count| count.get() <= QUEUE_COUNT_MAX);
    count.ok_or_else(|| format!("a number from 1 to {QUEUE_COUNT_MAX}"))
}

/// The disks of the command line.
#[derive(Debug, Default)]
struct ServedWords {
    snapshots: Vec<SnapshotName>,
    images: Vec<PathBuf>,
}

impl ServedWords {
    fn parse(words: &[OsString]) -> Result<Self, Error> {
        let mut parsed = Self::default();
        for word in words {
            if word.as_bytes().contains(&b'/') || SourceName::is_called_like_an_image(word) {
                parsed.images.push(word.into());
                continue;
            }
            let text = word.to_string_lossy();
            let name: Result<SnapshotName, _> = text.parse();
            parsed.snapshots.push(name?);
        }
        Ok(parsed)
    }
}

fn run(args: &VhostUserArgs, context: &Context) -> Result<Exit, Error> {
    context.output().refuse_json("serve vhost-user")?;
    let words = ServedWords::parse(&args.disks)?;
    let repository = if words.snapshots.is_empty() {
        None
    } else {
        Some(context.open_repository()?)
    };
    let sockets = match (&args.socket, &args.sockets) {
        (Some(path), _) => SocketPlace::File(path.clone()),
        (None, folder) => SocketPlace::Folder(folder.clone().unwrap_or_default()),
    };
    let is_shared = args.disks.len() > 1;
    let console = context.shared_console();
    let events = move |event: &VhostUserEvent<'_>| {
        if let Some(warning) = warning_of(event, is_shared) {
            console.warning(&warning);
        }
    };
    let request = ServeVhostUserRequest {
        names: words.snapshots,
        images: words.images,
        image_options: OpenOptions::default(),
        zone: context.zone().clone(),
        sockets,
        writes: writes_of(args.overlay.as_deref(), args.writable),
        sector_size: match args.sector_size.as_str() {
            "4096" => SectorSize::Bytes4096,
            _ => SectorSize::Bytes512,
        },
        queue_count: args.queues,
        events: Arc::new(events),
        clock: Arc::clone(context.clock()),
    };
    let mut printed = Ok(());
    context.work(1, |job| {
        serve_vhost_user(repository.as_ref(), &request, job, &mut |disks| {
            for disk in disks {
                if printed.is_ok() {
                    printed = context.output().data(lines(disk).as_bytes());
                }
            }
        })
    })?;
    printed?;
    Ok(Exit::Ok.with_warning_count(context.console().warnings().len()))
}

/// The lines of a disk: its socket, and what QEMU and libvirt need to use it.
fn lines(disk: &ServedDisk) -> String {
    let socket = std::path::absolute(&disk.socket).unwrap_or_else(|_| disk.socket.clone());
    let (description, size) = (&disk.description, units::bytes(disk.size_bytes));
    // A machine that connects again after its writes were discarded is refused anyway.
    let reconnect = if disk.can_reconnect { ",reconnect=1" } else { "" };
    let read_only = if disk.is_writable {
        ""
    } else {
        "  (the guest cannot write)"
    };
    let (memory, xml) = (memory_element(), disk_element(&socket, disk));
    let socket = socket.display();
    format!(
        "{socket}  {description}, {size}{read_only}\n  \
         QEMU:     -object memory-backend-memfd,id=mem,size=2G,share=on -machine memory-backend=mem \
         -chardev socket,id=disk,path={socket}{reconnect} -device vhost-user-blk-pci,chardev=disk\n  \
         libvirt:  {memory}\n            {xml}\n"
    )
}

/// The element of a domain that shares its memory.
fn memory_element() -> Element {
    let source = Element::new("source").attribute("type", "memfd");
    let access = Element::new("access").attribute("mode", "shared");
    Element::new("memoryBacking").child(source).child(access)
}

/// The element of a domain for a disk at a socket.
fn disk_element(socket: &Path, disk: &ServedDisk) -> Element {
    let path = socket.display();
    let mut source = Element::new("source").attribute("type", "unix").attribute("path", path);
    if disk.can_reconnect {
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

/// The warning of an event, if it needs one. `is_shared`: the process serves several disks.
fn warning_of(event: &VhostUserEvent<'_>, is_shared: bool) -> Option<String> {
    match event {
        VhostUserEvent::RequestFailed {
            export, action, error, ..
        } => Some(format!("{export}: {action}: {error}")),
        VhostUserEvent::TooMany { export, peer } => Some(format!(
            "{export}: refused {peer}: another machine uses the disk, and it can be written"
        )),
        VhostUserEvent::UnsealedMemory { export, peer } if is_shared => Some(format!(
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
    use std::ffi::OsString;

    use holdfast_engine::ServedDisk;

    use super::{ServedWords, lines, parse_queues};

    #[test]
    fn images_and_snapshots_are_told_apart() {
        let words = ["web1", "web1:vda", "./web1", "/srv/a.qcow2", "b.vdi"].map(OsString::from);
        let parsed = ServedWords::parse(&words).unwrap();
        assert_eq!(parsed.snapshots.len(), 2);
        assert_eq!(parsed.images.len(), 3);
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
        let disk = ServedDisk {
            socket: "/run/a'b.sock".into(),
            description: "vda of web1".to_owned(),
            size_bytes: 1 << 30,
            is_writable: true,
            can_reconnect: true,
        };
        let text = lines(&disk);
        assert!(text.contains("path=/run/a'b.sock,reconnect=1 "), "{text}");
        assert!(
            text.contains("path='/run/a&apos;b.sock'><reconnect enabled='yes' timeout='1'/></source>"),
            "{text}"
        );
        let once = ServedDisk {
            can_reconnect: false,
            ..disk
        };
        assert!(!lines(&once).contains("reconnect"));
    }
}
