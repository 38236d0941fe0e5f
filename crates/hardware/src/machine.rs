//! A machine, in terms that all hypervisors share.

use crate::{Error, Result};

/// Positions of disks that are kept when disks change their bus. Higher ones would need more controllers than a board
/// has slots for.
pub(crate) const POSITION_COUNT: u32 = 64;

/// The hardware of a machine, independent of its hypervisor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Machine {
    /// The display name.
    pub name: String,
    /// The UUID, if the configuration has one.
    pub uuid: Option<String>,
    /// The description: free text.
    pub description: String,
    /// Processors, at least 1.
    pub processor_count: u32,
    /// Sockets, cores and threads, if the configuration specifies them.
    pub topology: Option<Topology>,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// The firmware.
    pub firmware: Firmware,
    /// The clock.
    pub clock: Clock,
    /// Disks and drives, in the order of the configuration.
    pub disks: Vec<Disk>,
    /// Network cards, in the order of the configuration.
    pub cards: Vec<NetworkCard>,
    /// Whether the machine has a TPM. Its state cannot be moved to another hypervisor.
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

/// The firmware of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Firmware {
    /// A BIOS.
    #[default]
    Bios,
    /// UEFI.
    Uefi,
    /// UEFI with Secure Boot.
    UefiSecure,
    /// None: a paravirtual guest whose kernel is loaded by the hypervisor.
    Paravirtual,
}

/// The time zone that a machine's clock is set to when the machine starts.
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
    /// The configuration's or archive's reference to its content; empty for an empty drive.
    pub key: String,
    /// The display name; empty if there is none.
    pub label: String,
    /// Hard disk, CD drive or floppy drive.
    pub kind: DiskKind,
    /// The bus that the disk is attached to.
    pub bus: Bus,
    /// The position on the bus, from 0.
    pub position: u32,
    /// The size, if the configuration specifies it.
    pub size_bytes: Option<u64>,
    /// The position in the boot order: 1 is the first.
    pub boot_order: Option<u32>,
    /// Whether the disk is read-only.
    pub is_read_only: bool,
}

/// The kind of a disk or drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskKind {
    /// A hard disk.
    Disk,
    /// A CD or DVD drive.
    Cdrom,
    /// A floppy drive.
    Floppy,
}

/// The bus that a disk is attached to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bus {
    /// IDE (PATA).
    Ide,
    /// SATA.
    Sata,
    /// SCSI, by an emulated or VMware controller: LSI Logic, BusLogic, Paravirtual SCSI.
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
    /// The MAC address, in lower case with colons, if the card has one.
    pub mac: Option<String>,
    /// The name of the network or bridge that the card is connected to.
    pub network: Option<String>,
    /// The model that the guest sees.
    pub model: CardModel,
}

/// The model of a network card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CardModel {
    /// virtio-net.
    Virtio,
    /// Intel's 82540EM and compatible ones.
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
    /// Another model, by its name in the configuration.
    Other(String),
}

/// A feature that a translation dropped or changed, with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Untranslated {
    /// The feature: "graphics adapter", "disk bus virtio of vda".
    pub what: String,
    /// The reason, or what replaces it.
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

/// The result of reading or writing a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Translated<T> {
    /// The result.
    pub value: T,
    /// Features that could not be translated, in the order in which they were found.
    pub dropped: Vec<Untranslated>,
}

impl Bus {
    /// The usual name of the bus.
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
    /// The name in QEMU and most other hypervisors.
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

    /// The model with this name.
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

/// Limits above any real machine. A configuration that exceeds them is malformed or hostile.
pub(crate) mod bound {
    pub(crate) const PROCESSORS: u32 = 4096;
    pub(crate) const MEMORY_BYTES: u64 = 64 << 40;
    pub(crate) const DISKS: usize = 256;
    pub(crate) const CARDS: usize = 64;
    /// Bytes of a configuration.
    pub(crate) const TEXT_BYTES: usize = 8 << 20;
}

impl Machine {
    /// Refuses a machine that exceeds the limits in [`bound`].
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
