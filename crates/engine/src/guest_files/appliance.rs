//! The appliance of a snapshot: its disks over NBD, with writes that are thrown away.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use holdfast_appliance::{
    ApplianceDisk, ApplianceError, ApplianceMachine, ApplianceMachineOptions, ApplianceProgram, build_initrd,
    find_kernel,
};
use holdfast_block::{BackingId, BlockDevice, Clock, ExtentList, FileDeviceMut, IoMode, OverlayDevice, OverlayOptions};
use holdfast_guest_files::protocol::{Appliance, RemoteFileSystem, ScanReport, ScanRequest};
use holdfast_guest_files::{
    DirectoryEntry, DiskSource, Error as ReadError, ExtendedAttribute, FilePiece, FileSystem, Metadata, NodeId,
    Result as ReadResult,
};
use holdfast_host::StreamTools;
use holdfast_serve::nbd::{
    Event, Export, ExportDevice, FixedExports, Limits, Server, ServerOptions, ServerResources, Socket, TlsPolicy,
};

use crate::job::error::GuestFilesError;
use crate::job::{Error, Result};

/// Most disks of an appliance: each has a slot on its bus.
const DISK_COUNT_MAX: usize = 24;
/// Memory of an appliance.
const MEMORY_BYTES: u64 = 512 << 20;
/// Memory for LUKS, which wants up to 1 GiB to derive a key from a passphrase.
const MEMORY_BYTES_FOR_LUKS: u64 = 2304 << 20;
/// Seconds without an answer and without a read of a disk.
const IDLE_SECONDS_MAX: u64 = 180;
/// The derivation of a key reads nothing, and is slow in emulation.
const IDLE_SECONDS_MAX_FOR_LUKS: u64 = 600;
/// Seconds without an answer.
const ANSWER_SECONDS_MAX: u64 = 900;

/// How the appliance of a snapshot is made.
pub struct ApplianceOptions<'a> {
    /// The kernel; a kernel of this host if none is named.
    pub kernel: Option<PathBuf>,
    /// The passphrases of encrypted volumes, which are asked for if there is one; an error says why there are none.
    pub passphrases: &'a dyn Fn() -> std::result::Result<Vec<Vec<u8>>, String>,
    /// The argument of this program by which it becomes QEMU.
    pub launcher: OsString,
    /// The folder of files without a name, which take what the appliance writes.
    pub scratch: PathBuf,
    /// Programs of this host.
    pub tools: &'a dyn StreamTools,
    /// The clock of the servers.
    pub clock: Arc<dyn Clock>,
}

/// What a snapshot needs of an appliance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ApplianceNeeds {
    /// A volume is encrypted, or can be inside what only the appliance sees.
    pub(super) luks: bool,
    /// A disk has a physical volume of LVM.
    pub(super) lvm: bool,
}

/// A running appliance and its volumes.
pub(super) struct StartedAppliance {
    // The machine ends before its disks.
    appliance: Appliance,
    pub(super) report: ScanReport,
    watch: Arc<DiskWatch>,
    _servers: Vec<Server>,
}

/// What the appliance does with its disks.
#[derive(Debug, Default)]
struct DiskWatch {
    read_count: AtomicU64,
    /// The first error of a disk. The kernel of the appliance reports it as an error of a file.
    error: Mutex<Option<holdfast_block::Error>>,
}

struct WatchedDevice {
    device: Arc<dyn BlockDevice>,
    watch: Arc<DiskWatch>,
}

impl BlockDevice for WatchedDevice {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        self.watch.read_count.fetch_add(1, Ordering::Relaxed);
        let read = self.device.read_at(buffer, offset);
        if let Err(error) = &read {
            let mut kept = self.watch.error.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.is_none() {
                let text = holdfast_block::error_text(error);
                *kept = Some(holdfast_block::Error::io("read", offset, io::Error::other(text)));
                // Read again for an error that keeps its kind.
                if let Err(again) = self.device.read_at(buffer, offset) {
                    *kept = Some(again);
                }
            }
        }
        read
    }

    fn extents(&self, range: std::ops::Range<u64>, extent_count_max: usize) -> holdfast_block::Result<ExtentList> {
        self.device.extents(range, extent_count_max)
    }
}

impl StartedAppliance {
    /// Starts an appliance with `disks`, and has it search them.
    pub(super) fn start(disks: &[DiskSource], needs: ApplianceNeeds, options: &ApplianceOptions<'_>) -> Result<Self> {
        if disks.len() > DISK_COUNT_MAX {
            return Err(GuestFilesError::TooManyDisks { limit: DISK_COUNT_MAX }.into());
        }
        let failed = |source: ApplianceError| GuestFilesError::Appliance(source);
        ApplianceMachine::require_qemu().map_err(failed)?;
        let mut programs = BTreeSet::new();
        for (program, is_needed) in [
            (ApplianceProgram::Lvm, needs.lvm),
            (ApplianceProgram::Cryptsetup, needs.luks),
        ] {
            if is_needed {
                program.require().map_err(failed)?;
            }
            programs.insert(program);
        }
        let passphrases = if needs.luks {
            (options.passphrases)().map_err(|reason| GuestFilesError::Passphrase { reason })?
        } else {
            Vec::new()
        };
        if !needs.luks {
            programs.remove(&ApplianceProgram::Cryptsetup);
        }
        let kernel = find_kernel(options.kernel.as_deref()).map_err(failed)?;
        let initrd = build_initrd(&kernel, &programs, options.tools).map_err(failed)?;
        let watch = Arc::new(DiskWatch::default());
        let served = disks.iter().map(|disk| serve_disk(disk, &watch, options));
        let (servers, sockets): (Vec<Server>, Vec<ApplianceDisk>) =
            served.collect::<Result<Vec<_>>>()?.into_iter().unzip();
        let reads = Arc::clone(&watch);
        let machine = ApplianceMachine::start(ApplianceMachineOptions {
            kernel: &kernel,
            initrd: &initrd,
            disks: sockets,
            memory_bytes: if needs.luks {
                MEMORY_BYTES_FOR_LUKS
            } else {
                MEMORY_BYTES
            },
            launcher: options.launcher.clone(),
            idle_seconds_max: if needs.luks {
                IDLE_SECONDS_MAX_FOR_LUKS
            } else {
                IDLE_SECONDS_MAX
            },
            answer_seconds_max: ANSWER_SECONDS_MAX,
            reads: Box::new(move || reads.read_count.load(Ordering::Relaxed)),
        });
        let appliance = Appliance::new(Box::new(machine.map_err(failed)?));
        let request = ScanRequest {
            disks: disks.iter().map(|disk| disk.name.clone()).collect(),
            passphrases,
        };
        let report = appliance.scan(&request).map_err(|error| GuestFilesError::Read {
            volume: "appliance".to_owned(),
            path: String::new(),
            source: watch.cause(error),
        })?;
        Ok(Self {
            appliance,
            report,
            watch,
            _servers: servers,
        })
    }

    /// Mounts a volume of the report.
    pub(super) fn mount(self: &Arc<Self>, volume: u32) -> ReadResult<Box<dyn FileSystem>> {
        let remote = self.appliance.mount(volume).map_err(|error| self.watch.cause(error))?;
        Ok(Box::new(ApplianceFileSystem {
            remote,
            appliance: Arc::clone(self),
        }))
    }
}

/// A server of one disk, and the connection to it.
fn serve_disk(
    disk: &DiskSource,
    watch: &Arc<DiskWatch>,
    options: &ApplianceOptions<'_>,
) -> Result<(Server, ApplianceDisk)> {
    let scratch = |source: io::Error| Error::File {
        action: "create a file in",
        path: options.scratch.clone(),
        source,
    };
    let device = WatchedDevice {
        device: Arc::clone(&disk.device),
        watch: Arc::clone(watch),
    };
    let overlay = OverlayOptions::new(BackingId([0; 16]));
    let file = tempfile::tempfile_in(&options.scratch).map_err(scratch)?;
    file.set_len(overlay.store_size_bytes(device.size_bytes())?)
        .map_err(scratch)?;
    let store = FileDeviceMut::of_file(file, &options.scratch, IoMode::Buffered)?;
    let device = OverlayDevice::create(device, store, overlay)?;
    let server = Server::new(ServerOptions {
        exports: Arc::new(FixedExports::new([Export::new(
            "",
            ExportDevice::Writable(Arc::new(device)),
        )])),
        resources: ServerResources::new(Limits::default()),
        tls: TlsPolicy::Off,
        clock: Arc::clone(&options.clock),
        events: Arc::new(|_: &Event<'_>| {}),
    });
    let (ours, theirs) = UnixStream::pair().map_err(scratch)?;
    server.serve(Socket::Unix(ours)).map_err(Error::Serve)?;
    Ok((server, ApplianceDisk { socket: theirs }))
}

impl DiskWatch {
    /// The error of the disk that caused an error of the file system, or that error.
    fn cause(&self, error: ReadError) -> ReadError {
        if !matches!(error, ReadError::Damaged { .. } | ReadError::Reader(_)) {
            return error;
        }
        let kept = self.error.lock().unwrap_or_else(PoisonError::into_inner).take();
        kept.map_or(error, ReadError::Device)
    }
}

/// A file system that the appliance has mounted.
struct ApplianceFileSystem {
    remote: RemoteFileSystem<'static>,
    appliance: Arc<StartedAppliance>,
}

impl ApplianceFileSystem {
    fn caused<T>(&self, result: ReadResult<T>) -> ReadResult<T> {
        result.map_err(|error| self.appliance.watch.cause(error))
    }
}

impl FileSystem for ApplianceFileSystem {
    fn root(&self) -> NodeId {
        self.remote.root()
    }

    fn ignores_case(&self) -> bool {
        self.remote.ignores_case()
    }

    fn notes(&self) -> Vec<String> {
        self.remote.notes()
    }

    fn metadata(&mut self, node: NodeId) -> ReadResult<Metadata> {
        let result = self.remote.metadata(node);
        self.caused(result)
    }

    fn read_directory(
        &mut self,
        node: NodeId,
        visit: &mut dyn FnMut(DirectoryEntry) -> ReadResult<()>,
    ) -> ReadResult<()> {
        let result = self.remote.read_directory(node, visit);
        self.caused(result)
    }

    fn read_file(&mut self, node: NodeId, offset: u64, length_max: usize) -> ReadResult<FilePiece> {
        let result = self.remote.read_file(node, offset, length_max);
        self.caused(result)
    }

    fn read_link(&mut self, node: NodeId) -> ReadResult<Vec<u8>> {
        let result = self.remote.read_link(node);
        self.caused(result)
    }

    fn attributes(&mut self, node: NodeId) -> ReadResult<Vec<ExtendedAttribute>> {
        let result = self.remote.attributes(node);
        self.caused(result)
    }
}
