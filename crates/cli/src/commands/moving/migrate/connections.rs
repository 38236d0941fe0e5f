//! Connections to the hypervisor of this host.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_engine::{memory_socket, plain_memory_socket};
use holdfast_host::{BareHost, Machine};
use holdfast_migration::MovingHypervisor;

use crate::context::Context;
use crate::errors::Error;
use crate::machines::{MachineWord, connect_libvirt, libvirt_address, monitor_address, way};

/// Connections to a hypervisor. Calls on one connection to libvirt wait for each other: a migration takes minutes, and others
/// must be answered in milliseconds. The monitor of a QEMU serves one connection, whose answers do not wait.
pub(super) struct Connections {
    /// As the watchdog finds it.
    address: OsString,
    /// The name by which it knows the machine.
    machine: String,
    /// Waits until the machine has moved.
    pub(super) moving: Arc<dyn MovingHypervisor>,
    pub(super) control: Arc<dyn MovingHypervisor>,
    /// Asks whether the machine is stopped.
    watching: Arc<dyn MovingHypervisor>,
    /// Records its writes.
    tracking: Arc<dyn MovingHypervisor>,
    /// The sockets for memory at other hosts, by the number of the run.
    memory_socket_of: fn(u32) -> PathBuf,
    has_libvirt: bool,
}

impl Connections {
    /// To the QEMU of a machine, or to the libvirt at an address of the user.
    pub(super) fn open(word: &MachineWord, connect: Option<&str>, context: &Context) -> Result<Self, Error> {
        if let MachineWord::Qmp(path) = word {
            let host = BareHost::new(path, Arc::clone(context.clock()));
            let host: Arc<dyn MovingHypervisor> = Arc::new(host);
            return Ok(Self {
                address: monitor_address(path),
                machine: path.display().to_string(),
                moving: Arc::clone(&host),
                control: Arc::clone(&host),
                watching: Arc::clone(&host),
                tracking: host,
                memory_socket_of: plain_memory_socket,
                has_libvirt: false,
            });
        }
        let MachineWord::Libvirt(name) = word else {
            return Err(Error::usage(
                "only machines of libvirt, machines of QEMU (qmp:PATH) and containers can be migrated",
                "holdfast export and import move machines between hypervisors",
            ));
        };
        let uri = libvirt_address(connect, context);
        let libvirt = || connect_libvirt(&uri, context).map(|libvirt| Arc::new(libvirt) as Arc<dyn MovingHypervisor>);
        Ok(Self {
            machine: name.clone(),
            moving: libvirt()?,
            control: libvirt()?,
            watching: libvirt()?,
            tracking: libvirt()?,
            address: uri.into(),
            memory_socket_of: memory_socket,
            has_libvirt: true,
        })
    }

    /// The machine that the user has named.
    pub(super) fn named(&self) -> Result<Box<dyn Machine>, Error> {
        self.watched(&self.machine)
    }

    /// A machine, to ask for its state.
    pub(super) fn watched(&self, machine: &str) -> Result<Box<dyn Machine>, Error> {
        let found = self.watching.machine(machine);
        Ok(found.map_err(holdfast_engine::Error::from)?)
    }

    /// A machine, to record its writes.
    pub(super) fn tracked(&self, machine: &str) -> Result<Box<dyn Machine>, Error> {
        let found = self.tracking.machine(machine);
        Ok(found.map_err(holdfast_engine::Error::from)?)
    }

    /// The words by which the watchdog finds a machine.
    pub(super) fn way_to(&self, machine: &str) -> Vec<OsString> {
        way(&self.address, machine)
    }

    /// The socket for the memory at the other host.
    pub(super) fn memory_socket(&self, run: u32) -> PathBuf {
        (self.memory_socket_of)(run)
    }

    /// The socket for the memory here, which libvirt expects at the path of the one at the other host.
    pub(super) fn relay_socket(&self, run: u32, folder: &Path) -> PathBuf {
        if self.has_libvirt {
            self.memory_socket(run)
        } else {
            folder.join("relay")
        }
    }
}
