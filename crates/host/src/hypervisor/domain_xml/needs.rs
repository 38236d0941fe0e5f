//! The resources that a host must provide before a machine can start: networks, devices, files. They do not include
//! disks of the snapshot, and files that libvirt creates itself.

use std::path::{Path, PathBuf};

use roxmltree::Node;

use super::{child, children, document_of};

/// Elements of character devices, which have a file or socket on the host.
const CHARACTER_DEVICES: [&str; 6] = ["serial", "parallel", "console", "channel", "redirdev", "smartcard"];
/// Folders that libvirt creates itself.
const OWN_FOLDERS: &str = "/libvirt/qemu/";

/// Prefix of the description of a disk's image file.
const IMAGE: &str = "image of ";

/// The host resources that a configuration needs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostNeeds {
    /// Files and sockets that are created when the machine starts. Their folders must exist.
    pub made_files: Vec<PathBuf>,
    /// Files, sockets and devices that must exist: a description, and the path.
    pub files: Vec<(String, PathBuf)>,
    /// Networks of libvirt.
    pub networks: Vec<String>,
    /// Bridges and network interfaces of the host.
    pub links: Vec<String>,
    /// Storage pools of libvirt.
    pub pools: Vec<String>,
    /// Addresses of PCI devices that are passed through.
    pub pci_devices: Vec<String>,
}

impl HostNeeds {
    /// Collects the needs of a configuration.
    ///
    /// # Errors
    /// A description of what is wrong with the XML.
    pub fn of(text: &str) -> Result<Self, String> {
        let document = document_of(text)?;
        let domain = document.root_element();
        let mut needs = Self::default();
        if let Some(os) = child(domain, "os") {
            for name in ["loader", "kernel", "initrd", "dtb"] {
                let path = child(os, name).and_then(|node| node.text()).map(str::trim);
                needs.file(name, path.filter(|path| path.starts_with('/')));
            }
        }
        for device in child(domain, "devices")
            .iter()
            .flat_map(Node::children)
            .filter(Node::is_element)
        {
            needs.device(device);
        }
        Ok(needs)
    }

    /// A description of each resource, without duplicates.
    pub fn descriptions(&self) -> Vec<String> {
        let folders = self.made_files.iter().filter_map(|file| file.parent());
        let folders = folders.map(|folder| format!("the folder {}", folder.display()));
        let files = self.files.iter();
        // Images are stored with the configuration, or reported separately.
        let files = files.filter(|(what, _)| !what.starts_with(IMAGE));
        let files = files.map(|(what, path)| format!("{} ({what})", path.display()));
        let networks = self.networks.iter().map(|name| format!("the network {name}"));
        let links = self.links.iter().map(|name| format!("the network device {name}"));
        let pools = self.pools.iter().map(|name| format!("the storage pool {name}"));
        let pci = self
            .pci_devices
            .iter()
            .map(|address| format!("the PCI device {address}"));
        let mut descriptions: Vec<String> = folders
            .chain(files)
            .chain(networks)
            .chain(links)
            .chain(pools)
            .chain(pci)
            .collect();
        let mut seen = std::collections::BTreeSet::new();
        descriptions.retain(|word| seen.insert(word.clone()));
        descriptions
    }

    /// Whether the description of a file in [`files`](Self::files) is that of a disk image.
    pub fn is_image(what: &str) -> bool {
        what.starts_with(IMAGE)
    }

    fn device(&mut self, device: Node<'_, '_>) {
        let source = child(device, "source");
        let of_source = |name| source.and_then(|source| source.attribute(name));
        match device.tag_name().name() {
            kind if CHARACTER_DEVICES.contains(&kind) => self.character_device(device, kind),
            "disk" => self.disk(device, source),
            "interface" => match device.attribute("type") {
                Some("network") => self.networks.extend(of_source("network").map(str::to_owned)),
                Some("bridge") => self.links.extend(of_source("bridge").map(str::to_owned)),
                Some("direct") => self.links.extend(of_source("dev").map(str::to_owned)),
                _ => {}
            },
            "graphics" => {
                let sockets = children(device, "listen").chain([device]);
                for path in sockets.filter_map(|node| node.attribute("socket")) {
                    self.made(path);
                }
            }
            "filesystem" => {
                let is_mount = device.attribute("type").is_none_or(|kind| kind == "mount");
                self.file("shared folder", of_source("dir").filter(|_| is_mount));
                self.file("socket of a shared folder", of_source("socket"));
            }
            "rng" => self.file("source of random numbers", text_of(device, "backend")),
            "tpm" => {
                let node = child(device, "backend").and_then(|backend| child(backend, "device"));
                self.file("TPM", node.and_then(|node| node.attribute("path")));
            }
            "hostdev" if device.attribute("type") == Some("pci") => {
                let address = source.and_then(|source| child(source, "address"));
                self.pci_devices.extend(address.and_then(pci_address));
            }
            _ => {}
        }
    }

    fn disk(&mut self, disk: Node<'_, '_>, source: Option<Node<'_, '_>>) {
        let Some(source) = source else { return };
        // With this startup policy, the machine starts even without the medium.
        if matches!(source.attribute("startupPolicy"), Some("optional" | "requisite")) {
            return;
        }
        let target = child(disk, "target").and_then(|target| target.attribute("dev"));
        let path = source.attribute("file").or_else(|| source.attribute("dev"));
        self.file(&format!("{IMAGE}{}", target.unwrap_or("a disk")), path);
        self.pools.extend(source.attribute("pool").map(str::to_owned));
    }

    fn character_device(&mut self, device: Node<'_, '_>, kind: &str) {
        for source in children(device, "source") {
            let path = source.attribute("path");
            match (device.attribute("type"), source.attribute("mode")) {
                (Some("unix"), Some("connect")) => self.file(&format!("socket of a {kind}"), path),
                (Some("unix" | "file"), _) => path.into_iter().for_each(|path| self.made(path)),
                (Some("dev"), _) => self.file(&format!("device of a {kind}"), path),
                (Some("pipe"), _) => self.pipe(path),
                _ => {}
            }
        }
        for path in children(device, "log").filter_map(|log| log.attribute("file")) {
            self.made(path);
        }
    }

    /// Adds a pipe. QEMU opens a pair of pipes, `PATH.in` and `PATH.out`, or a single pipe.
    fn pipe(&mut self, path: Option<&str>) {
        let is_pair = path.is_some_and(|path| Path::new(&format!("{path}.in")).exists());
        self.file("pipe", path.filter(|_| !is_pair));
    }

    fn made(&mut self, path: &str) {
        let is_known = self.made_files.iter().any(|known| known == Path::new(path));
        if path.starts_with('/') && !path.contains(OWN_FOLDERS) && !is_known {
            self.made_files.push(path.into());
        }
    }

    fn file(&mut self, what: &str, path: Option<&str>) {
        let Some(path) = path.filter(|path| path.starts_with('/') && !path.contains(OWN_FOLDERS)) else {
            return;
        };
        let file = (what.to_owned(), PathBuf::from(path));
        // A serial port and the console that libvirt derives from it have the same path.
        if self.files.iter().all(|(_, known)| *known != file.1) {
            self.files.push(file);
        }
    }
}

fn text_of<'a>(node: Node<'a, '_>, name: &'static str) -> Option<&'a str> {
    child(node, name)?.text().map(str::trim)
}

/// `0000:01:00.0`, as the kernel writes it.
fn pci_address(address: Node<'_, '_>) -> Option<String> {
    let number = |name: &str| {
        let text = address.attribute(name)?;
        u32::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok()
    };
    Some(format!(
        "{:04x}:{:02x}:{:02x}.{:x}",
        number("domain").unwrap_or(0),
        number("bus")?,
        number("slot")?,
        number("function").unwrap_or(0)
    ))
}

#[cfg(test)]
mod tests {
    use super::HostNeeds;

    #[test]
    fn all_needed_resources_are_found() {
        let text = "<domain><os><loader type='pflash'>/fw/code.fd</loader><nvram>/nv/a</nvram><kernel>/boot/k</kernel></os><devices>
            <disk type='file' device='cdrom'><source file='/iso/a.iso'/><target dev='sda'/></disk>
            <disk type='file' device='cdrom'><source file='/iso/b.iso' startupPolicy='optional'/><target dev='sdb'/></disk>
            <disk type='volume'><source pool='fast' volume='v'/><target dev='vda'/></disk>
            <serial type='file'><source path='/log/web1/console.log'/><log file='/log/web1/serial.log'/></serial>
            <console type='file'><source path='/log/web1/console.log'/></console>
            <channel type='unix'><source mode='bind' path='/var/lib/libvirt/qemu/channel/target/a/b'/></channel>
            <channel type='unix'><source mode='bind' path='/run/web1/agent'/></channel>
            <channel type='unix'><source mode='connect' path='/run/other'/></channel>
            <parallel type='dev'><source path='/dev/parport0'/></parallel>
            <serial type='pipe'><source path='/run/pipe'/></serial>
            <interface type='network'><source network='default'/></interface>
            <interface type='bridge'><source bridge='br0'/></interface>
            <interface type='direct'><source dev='eth0' mode='bridge'/></interface>
            <filesystem type='mount'><source dir='/srv/share'/><target dir='x'/></filesystem>
            <graphics type='vnc' socket='/run/vnc/web1'><listen type='socket' socket='/run/vnc/web1'/></graphics>
            <rng model='virtio'><backend model='random'>/dev/hwrng</backend></rng>
            <hostdev type='pci'><source><address domain='0x0000' bus='0x01' slot='0x1f' function='0x2'/></source></hostdev>
            </devices></domain>";
        let needs = HostNeeds::of(text).unwrap();
        let made: Vec<&str> = needs.made_files.iter().filter_map(|path| path.to_str()).collect();
        assert_eq!(
            made,
            [
                "/log/web1/console.log",
                "/log/web1/serial.log",
                "/run/web1/agent",
                "/run/vnc/web1"
            ]
        );
        let files: Vec<&str> = needs.files.iter().filter_map(|(_, path)| path.to_str()).collect();
        assert_eq!(
            files,
            [
                "/fw/code.fd",
                "/boot/k",
                "/iso/a.iso",
                "/run/other",
                "/dev/parport0",
                "/run/pipe",
                "/srv/share",
                "/dev/hwrng"
            ]
        );
        assert_eq!(needs.networks, ["default"]);
        assert_eq!(needs.links, ["br0", "eth0"]);
        assert_eq!(needs.pools, ["fast"]);
        assert_eq!(needs.pci_devices, ["0000:01:1f.2"]);
        assert_eq!(HostNeeds::of("<domain/>").unwrap(), HostNeeds::default());
        assert!(HostNeeds::of("<domain").is_err());
    }
}
