//! Converts domain XML to a machine.

use roxmltree::Node;

use crate::libvirt::unsupported::unsupported_features;
use crate::xml::{attribute, child, children};
use crate::{
    Bus, CardModel, Clock, Disk, DiskKind, Error, Firmware, Machine, NetworkCard, Result, Topology, Translated, xml,
};

const FORM: &str = "domain XML of libvirt";

/// Reads the domain XML of a machine.
pub fn read(text: &str) -> Result<Translated<Machine>> {
    let document = xml::parse(text, FORM)?;
    let domain = document.root_element();
    if domain.tag_name().name() != "domain" {
        return Err(wrong(format!("the root element is {:?}", domain.tag_name().name())));
    }
    let devices = child(domain, "devices");
    let machine = Machine {
        name: xml::text(domain, "name").unwrap_or_default().to_owned(),
        uuid: xml::text(domain, "uuid").map(str::to_owned),
        description: xml::text(domain, "description").unwrap_or_default().to_owned(),
        processor_count: processors(domain)?,
        topology: topology(domain)?,
        memory_bytes: memory(domain)?,
        firmware: firmware(domain),
        clock: clock(domain),
        disks: devices
            .map(|devices| disks(devices, domain))
            .transpose()?
            .unwrap_or_default(),
        cards: devices
            .map(|devices| children(devices, "interface").map(card).collect())
            .unwrap_or_default(),
        has_tpm: devices.is_some_and(|devices| child(devices, "tpm").is_some()),
    };
    let value = machine.checked(FORM)?;
    Ok(Translated {
        value,
        dropped: unsupported_features(domain),
    })
}

fn wrong(detail: impl Into<String>) -> Error {
    Error::Malformed {
        form: FORM,
        detail: detail.into(),
    }
}

fn number<T: std::str::FromStr>(text: &str, what: &str) -> Result<T> {
    text.trim().parse().map_err(|_| wrong(format!("{what} is {text:?}")))
}

fn processors(domain: Node<'_, '_>) -> Result<u32> {
    match child(domain, "vcpu") {
        Some(count) => {
            // The processors that are plugged in; the maximum may be higher.
            let now = count.attribute("current").or(count.text()).unwrap_or("1");
            number(now, "the number of processors")
        }
        None => Ok(1),
    }
}

fn topology(domain: Node<'_, '_>) -> Result<Option<Topology>> {
    let Some(topology) = child(domain, "cpu").and_then(|cpu| child(cpu, "topology")) else {
        return Ok(None);
    };
    let count = |name: &str| match topology.attribute(name) {
        Some(text) => number::<u32>(text, name),
        None => Ok(1),
    };
    let in_die = count("cores")?.checked_mul(count("clusters")?);
    let dies = count("dies")?;
    let cores = in_die.and_then(|cores| cores.checked_mul(dies));
    Ok(Some(Topology {
        socket_count: count("sockets")?,
        core_count: cores.ok_or_else(|| wrong("too many cores"))?,
        thread_count: count("threads")?,
    }))
}

/// In bytes; libvirt's default unit is KiB.
fn memory(domain: Node<'_, '_>) -> Result<u64> {
    let Some(memory) = child(domain, "memory") else {
        return Err(wrong("the memory size is missing"));
    };
    let amount: u64 = number(memory.text().unwrap_or_default(), "the memory")?;
    let unit = match memory.attribute("unit").unwrap_or("KiB") {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "K" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        other => return Err(wrong(format!("memory is counted in {other:?}"))),
    };
    amount.checked_mul(unit).ok_or_else(|| wrong("too much memory"))
}

fn firmware(domain: Node<'_, '_>) -> Firmware {
    let Some(os) = child(domain, "os") else {
        return Firmware::Bios;
    };
    let loader = child(os, "loader");
    // UEFI firmware that is loaded as a ROM has no variable store; only its file name shows what it is.
    let is_called_so = |loader: Node<'_, '_>| {
        let path = loader.text().unwrap_or_default().to_ascii_uppercase();
        loader.attribute("type") == Some("pflash") || path.contains("OVMF") || path.contains("EDK2")
    };
    let is_uefi = os.attribute("firmware") == Some("efi") || loader.is_some_and(is_called_so);
    let is_named = |feature: Node<'_, '_>| {
        feature.attribute("name") == Some("secure-boot") && feature.attribute("enabled") == Some("yes")
    };
    let is_secure = loader.is_some_and(|loader| loader.attribute("secure") == Some("yes"))
        || child(os, "firmware").is_some_and(|firmware| children(firmware, "feature").any(is_named));
    match (is_uefi, is_secure) {
        (true, true) => Firmware::UefiSecure,
        (true, false) => Firmware::Uefi,
        (false, _) => Firmware::Bios,
    }
}

fn clock(domain: Node<'_, '_>) -> Clock {
    let clock = child(domain, "clock");
    let is_local = |name: &str| clock.and_then(|clock| clock.attribute(name)) == Some("localtime");
    if is_local("offset") || is_local("basis") {
        Clock::LocalTime
    } else {
        Clock::Utc
    }
}

fn disks(devices: Node<'_, '_>, domain: Node<'_, '_>) -> Result<Vec<Disk>> {
    let order: Vec<&str> = child(domain, "os")
        .map(|os| children(os, "boot").filter_map(|boot| boot.attribute("dev")).collect())
        .unwrap_or_default();
    let mut disks = Vec::new();
    for disk in children(devices, "disk") {
        let kind = match disk.attribute("device").unwrap_or("disk") {
            "cdrom" => DiskKind::Cdrom,
            "floppy" => DiskKind::Floppy,
            _ => DiskKind::Disk,
        };
        let target = attribute(disk, "target", "dev").unwrap_or_default();
        let is_empty = child(disk, "source").is_none_or(|source| source.attributes().len() == 0);
        let by_kind = || {
            let name = match kind {
                DiskKind::Disk => "hd",
                DiskKind::Cdrom => "cdrom",
                DiskKind::Floppy => "fd",
            };
            let place = order.iter().position(|device| *device == name)?;
            // `<boot>` means the first device of each kind.
            let is_first = disks.iter().all(|other: &Disk| other.kind != kind);
            is_first.then(|| u32::try_from(place).unwrap_or(u32::MAX) + 1)
        };
        let boot_order = match attribute(disk, "boot", "order") {
            Some(order) => Some(number(order, "the boot order")?),
            None => by_kind(),
        };
        disks.push(Disk {
            key: if is_empty { String::new() } else { target.to_owned() },
            label: target.to_owned(),
            kind,
            bus: bus(disk, target, devices),
            position: position(target),
            size_bytes: None,
            boot_order,
            is_read_only: child(disk, "readonly").is_some(),
        });
    }
    Ok(disks)
}

fn bus(disk: Node<'_, '_>, target: &str, devices: Node<'_, '_>) -> Bus {
    match attribute(disk, "target", "bus") {
        Some("virtio") => Bus::Virtio,
        Some("sata") => Bus::Sata,
        Some("scsi") => {
            let own = attribute(disk, "address", "controller").unwrap_or("0");
            let is_own = |controller: &Node<'_, '_>| {
                controller.attribute("type") == Some("scsi") && controller.attribute("index").unwrap_or("0") == own
            };
            let controller = children(devices, "controller").find(is_own);
            let model = controller.and_then(|controller| controller.attribute("model"));
            if model.is_some_and(|model| model.starts_with("virtio")) {
                Bus::VirtioScsi
            } else {
                Bus::Scsi
            }
        }
        Some("ide") => Bus::Ide,
        Some("usb") => Bus::Usb,
        Some("nvme") => Bus::Nvme,
        Some("xen") => Bus::Xen,
        Some("fdc") => Bus::Floppy,
        // libvirt derives the bus from the target's name.
        _ => match target.get(..2) {
            Some("vd") => Bus::Virtio,
            Some("sd") => Bus::Scsi,
            Some("xv") => Bus::Xen,
            Some("fd") => Bus::Floppy,
            _ => Bus::Ide,
        },
    }
}

/// `vdc` is at 2.
pub(super) fn position(target: &str) -> u32 {
    let letters = target.trim_end_matches(|character: char| character.is_ascii_digit());
    let letters = letters.strip_prefix("xvd").or(letters.get(2..)).unwrap_or_default();
    let mut number = 0_u32;
    for letter in letters.bytes().filter(u8::is_ascii_lowercase) {
        number = number.saturating_mul(26).saturating_add(u32::from(letter - b'a') + 1);
    }
    number.saturating_sub(1)
}

fn card(interface: Node<'_, '_>) -> NetworkCard {
    let source = child(interface, "source");
    let network = ["network", "bridge", "dev", "portgroup"]
        .iter()
        .find_map(|name| source.and_then(|source| source.attribute(*name)));
    NetworkCard {
        mac: attribute(interface, "mac", "address").map(str::to_ascii_lowercase),
        network: network.map(str::to_owned),
        model: CardModel::from_name(attribute(interface, "model", "type").unwrap_or("rtl8139")),
    }
}
