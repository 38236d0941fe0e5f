//! A machine, in the words that all hypervisors share.

use crate::{Error, Result};

/// Places of disks, by number, that a machine keeps: more of them would want more controllers than a board has room for.
pub(crate) const PLACE_COUNT: u32 = 64;

/// A machine: what it consists of, whoever runs it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// Its UUID, where it has one.
    pub uuid: Option<String>,
    /// What its owner wrote about it.
    pub description: String,
    /// Processors, at least 1.
    pub processor_count: u32,
    /// Sockets, cores and threads, where they are laid down.
    pub topology: Option<Topology>,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// What starts it.
    pub firmware: Firmware,
    /// Its clock.
    pub clock: Clock,
    /// Its disks and drives, in the order of its configuration.
    pub disks: Vec<Disk>,
    /// Its network cards, in the order of its configuration.
    pub cards: Vec<NetworkCard>,
    /// Whether it has a TPM, which is another one on another hypervisor.
    pub has_tpm: bool,
}

/// How processors are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topology {
    /// Sockets.
    pub socket_count: u32,
    /// Cores of a socket.
    pub core_count: u32,
    /// Threads of a core.
    pub thread_count: u32,
}

/// What starts a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Firmware {
    /// A BIOS.
    #[default]
    Bios,
    /// UEFI.
    Uefi,
    /// UEFI that only starts what is signed.
    UefiSecure,
    /// None: a paravirtual guest whose kernel the hypervisor starts.
    Paravirtual,
}

/// What a machine's clock shows when it is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Clock {
    /// Coordinated universal time.
    #[default]
    Utc,
    /// The local time of the host, which Windows expects.
    LocalTime,
}

/// A disk or a drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// By what the configuration or the archive refers to its content; empty for an empty drive.
    pub key: String,
    /// What a person calls it, where it has a name.
    pub label: String,
    /// What it is to the machine.
    pub kind: DiskKind,
    /// What it hangs on.
    pub bus: Bus,
    /// Its place on the bus, from 0.
    pub position: u32,
    /// Its size, where the configuration says it.
    pub size_bytes: Option<u64>,
    /// Whether the machine is started from it before others: 1 is the first.
    pub boot_order: Option<u32>,
    /// Whether the machine cannot write it.
    pub is_read_only: bool,
}

/// What a disk is to its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskKind {
    /// A disk.
    Disk,
    /// A CD or DVD drive.
    Cdrom,
    /// A floppy drive.
    Floppy,
}

/// What a disk hangs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bus {
    /// IDE (PATA).
    Ide,
    /// SATA.
    Sata,
    /// SCSI, by a controller of the old kind: LSI Logic, BusLogic, Paravirtual SCSI of VMware.
    Scsi,
    /// virtio-scsi.
    VirtioScsi,
    /// virtio-blk.
    Virtio,
    /// NVMe.
    Nvme,
    /// Xen's paravirtual disks.
    Xen,
    /// USB.
    Usb,
    /// A floppy controller.
    Floppy,
}

/// A network card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkCard {
    /// Its address, in lower case with colons, where it has one.
    pub mac: Option<String>,
    /// The network or bridge that it is plugged into, by name.
    pub network: Option<String>,
    /// What it is to the guest.
    pub model: CardModel,
}

/// What a network card is to the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CardModel {
    /// virtio-net.
    Virtio,
    /// Intel's 82540EM and its like.
    E1000,
    /// Intel's 82574L.
    E1000e,
    /// Realtek's 8139.
    Rtl8139,
    /// AMD's PCnet.
    Pcnet,
    /// VMware's paravirtual card.
    Vmxnet3,
    /// Xen's paravirtual card.
    Xen,
    /// Another one, by the name that the configuration has for it.
    Other(String),
}

/// Something that a translation left behind, or changed, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Untranslated {
    /// What it was: "graphics adapter", "disk bus virtio of vda".
    pub what: String,
    /// Why, or what takes its place.
    pub why: String,
}

impl Untranslated {
    pub(crate) fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            why: why.into(),
        }
    }
}

impl std::fmt::Display for Untranslated {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}: {}", self.what, self.why)
    }
}

/// What came of reading or writing a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Translated<T> {
    /// The result.
    pub value: T,
    /// What has no meaning there, in the order in which it was met.
    pub dropped: Vec<Untranslated>,
}

impl Bus {
    /// What a person calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ide => "IDE",
            Self::Sata => "SATA",
            Self::Scsi => "SCSI",
            Self::VirtioScsi => "virtio-scsi",
            Self::Virtio => "virtio",
            Self::Nvme => "NVMe",
            Self::Xen => "Xen",
            Self::Usb => "USB",
            Self::Floppy => "floppy",
        }
    }
}

impl CardModel {
    /// What QEMU and most others call it.
    pub fn name(&self) -> &str {
        match self {
            Self::Virtio => "virtio",
            Self::E1000 => "e1000",
            Self::E1000e => "e1000e",
            Self::Rtl8139 => "rtl8139",
            Self::Pcnet => "pcnet",
            Self::Vmxnet3 => "vmxnet3",
            Self::Xen => "netfront",
            Self::Other(name) => name,
        }
    }

    /// The card of that name.
    pub fn from_name(name: &str) -> Self {
        match name.to_ascii_lowercase().as_str() {
            "virtio" | "virtio-net" | "virtio-net-pci" => Self::Virtio,
            "e1000" => Self::E1000,
            "e1000e" => Self::E1000e,
            "rtl8139" => Self::Rtl8139,
            "pcnet" | "pcnet32" => Self::Pcnet,
            "vmxnet3" => Self::Vmxnet3,
            "netfront" | "xen" => Self::Xen,
            _ => Self::Other(name.to_owned()),
        }
    }
}

/// More than any machine has; what a configuration says beyond is nonsense, or hostile.
pub(crate) mod bound {
    pub(crate) const PROCESSORS: u32 = 4096;
    pub(crate) const MEMORY_BYTES: u64 = 64 << 40;
    pub(crate) const DISKS: usize = 256;
    pub(crate) const CARDS: usize = 64;
    /// Bytes of a configuration.
    pub(crate) const TEXT_BYTES: usize = 8 << 20;
}

impl Machine {
    /// Refuses what is beyond any machine.
    pub(crate) fn checked(self, form: &'static str) -> Result<Self> {
        let wrong = |detail: String| Err(Error::Malformed { form, detail });
        if !(1..=bound::PROCESSORS).contains(&self.processor_count) {
            return wrong(format!("{} processors", self.processor_count));
        }
        if self.memory_bytes == 0 || self.memory_bytes > bound::MEMORY_BYTES {
            return wrong(format!("{} bytes of memory", self.memory_bytes));
        }
        if self.disks.len() > bound::DISKS {
            return wrong(format!("{} disks", self.disks.len()));
        }
        if self.cards.len() > bound::CARDS {
            return wrong(format!("{} network cards", self.cards.len()));
        }
        Ok(self)
    }
}
