//! A machine in a model of QEMU: the interface for tests.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use holdfast_block::to_usize;
use serde_json::{Value, json};

use crate::fault::Fault;
use crate::node::{Driver, Node};
use crate::state::{Device, State};
use crate::wire::Shared;

/// A disk of the machine. Its name is `diskN`.
#[derive(Debug, Clone)]
pub struct ModelDisk {
    /// The format of the image.
    pub format: ModelFormat,
    /// The image. A qcow2 image must exist but is not read: the guest's content is zero at first, and is kept in
    /// memory.
    pub image: PathBuf,
    /// Size in bytes.
    pub size_bytes: u64,
    /// The iothread of the disk.
    pub iothread: Option<String>,
}

/// The format of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelFormat {
    /// The bytes of the image are those of the disk.
    Raw,
    /// The image can contain bitmaps.
    Qcow2,
}

/// The configuration of a model.
#[derive(Debug, Clone)]
pub struct ModelMachine {
    /// The version that the model reports.
    pub version: [u64; 3],
    /// The disks.
    pub disks: Vec<ModelDisk>,
    /// The file with the firmware variables.
    pub nvram: Option<PathBuf>,
}

/// A model that serves a monitor socket until it is dropped.
pub struct QemuModel {
    listener: Arc<UnixListener>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl QemuModel {
    /// Starts a machine with its monitor at `path`.
    ///
    /// # Errors
    /// The socket cannot be created, or an image cannot be opened.
    pub fn start(path: &Path, machine: &ModelMachine) -> std::io::Result<Self> {
        let mut state = State::new(machine.version);
        for (number, disk) in machine.disks.iter().enumerate() {
            state.plug(number, disk)?;
        }
        if let Some(nvram) = &machine.nvram {
            state.add_flash(nvram)?;
        }
        let shared = Arc::new(Shared {
            state: Arc::new(Mutex::new(state)),
            faults: Mutex::default(),
            connections: Mutex::default(),
        });
        let listener = Arc::new(UnixListener::bind(path)?);
        let theirs = (Arc::clone(&shared), Arc::clone(&listener));
        let accept = move || theirs.0.accept(&theirs.1);
        let thread = std::thread::Builder::new().name("model-qmp".to_owned()).spawn(accept)?;
        Ok(Self {
            listener,
            shared,
            thread: Some(thread),
        })
    }

    /// Arms a fault, or none, and starts to count commands. `qmp_capabilities` is not counted.
    pub fn arm(&self, fault: Option<Fault>) {
        let mut faults = self.shared.faults();
        faults.armed = fault;
        faults.commands.clear();
    }

    /// The commands since [`arm`](Self::arm), and whether the fault has not occurred.
    pub fn disarm(&self) -> (Vec<String>, bool) {
        let mut faults = self.shared.faults();
        let is_unreached = faults.armed.take().is_some();
        (faults.commands.clone(), is_unreached)
    }

    /// Writes to a disk like the guest, through the nodes of its device.
    ///
    /// # Errors
    /// The guest's write fails.
    pub fn guest_write(&self, disk: usize, bytes: &[u8], offset: u64) -> std::io::Result<()> {
        let mut state = self.shared.state();
        let node = state.devices[disk].node.clone();
        state.write(&node, bytes, offset)
    }

    /// The content of a disk that the guest sees.
    ///
    /// # Errors
    /// The guest cannot read the disk.
    pub fn guest_bytes(&self, disk: usize) -> std::io::Result<Vec<u8>> {
        let state = self.shared.state();
        let node = state.devices[disk].node.clone();
        let mut bytes = vec![0; to_usize(state.nodes[&node].size_bytes)];
        state.read(&node, &mut bytes, 0)?;
        Ok(bytes)
    }

    /// Whether the machine is running.
    pub fn is_running(&self) -> bool {
        self.shared.state().is_running
    }

    /// The reason for which QEMU has aborted, if it has.
    pub fn aborted(&self) -> Option<String> {
        self.shared.state().aborted.clone()
    }

    /// The names of everything that a backup could leave behind, sorted; bitmaps are listed with their nodes.
    pub fn inventory(&self) -> Value {
        let state = self.shared.state();
        let bitmaps = state.nodes.iter().flat_map(|(name, node)| {
            let bitmaps = node.bitmaps.iter();
            bitmaps.map(move |bitmap| format!("{name}: {}", bitmap.name))
        });
        json!({
            "running": state.is_running,
            "devices": state.devices.iter().map(|device| &device.node).collect::<Vec<_>>(),
            "nodes": state.nodes.keys().collect::<Vec<_>>(),
            "bitmaps": bitmaps.collect::<Vec<_>>(),
            "exports": state.exports.iter().map(|export| &export.id).collect::<Vec<_>>(),
            "server": state.server.is_some(),
            "jobs": state.jobs.iter().map(|job| &job.id).collect::<Vec<_>>(),
            "file sets": state.fd_sets.values().map(|set| &set.label).collect::<Vec<_>>(),
            "files": state.files.keys().collect::<Vec<_>>(),
        })
    }
}

impl Drop for QemuModel {
    fn drop(&mut self) {
        let connections = self.shared.connections();
        if let Some(stream) = &connections.current {
            // The client may have disconnected already.
            stream.shutdown(std::net::Shutdown::Both).ok();
        }
        drop(connections);
        // After the shutdown, the listener accepts no more clients.
        rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both).ok();
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was already reported.
            drop(thread.join());
        }
        let server = self.shared.state().server.take();
        drop(server);
    }
}

impl State {
    fn plug(&mut self, number: usize, disk: &ModelDisk) -> std::io::Result<()> {
        let (file, format) = (format!("file{number}"), format!("format{number}"));
        self.add_image(&file, &disk.image)?;
        let driver = match disk.format {
            ModelFormat::Raw => Driver::Raw,
            ModelFormat::Qcow2 => Driver::Qcow2(vec![0; to_usize(disk.size_bytes)]),
        };
        let mut node = Node::new(driver, disk.size_bytes);
        node.filename = disk.image.to_string_lossy().into_owned();
        node.children.push(("file", file));
        self.insert_node(format.clone(), node);
        self.devices.push(Device {
            path: format!("/machine/peripheral/disk{number}/virtio-backend"),
            kind: "virtio-blk-device",
            node: format,
            iothread: disk.iothread.clone(),
        });
        Ok(())
    }

    fn add_flash(&mut self, nvram: &Path) -> std::io::Result<()> {
        self.add_image("flash", nvram)?;
        self.devices.push(Device {
            path: "/machine/system.flash1".to_owned(),
            kind: "cfi.pflash01",
            node: "flash".to_owned(),
            iothread: None,
        });
        Ok(())
    }

    fn add_image(&mut self, node: &str, image: &Path) -> std::io::Result<()> {
        let opened = std::fs::File::options().read(true).write(true).open(image)?;
        let size_bytes = opened.metadata()?.len();
        let mut file = Node::new(Driver::File(opened), size_bytes);
        file.filename = image.to_string_lossy().into_owned();
        self.insert_node(node.to_owned(), file);
        Ok(())
    }
}
