//! libvirt's description of a machine.
//!
//! Source: <https://libvirt.org/formatdomain.html>. Unknown elements and attributes are ignored: the text is stored
//! unchanged.

mod needs;
mod rewrite;
mod snapshot_xml;

use std::path::PathBuf;

use roxmltree::{Document, Node, ParsingOptions};

pub use needs::HostNeeds;
pub use rewrite::{
    DiskChange, DiskPlace, Emulator, Identity, Medium, NewIdentity, PulledDisk, Rewrite, Rewritten, ServedDisks,
    disk_element, overlays_document, pulled_disks, rewrite, served_folder, with_links_down, with_name, with_own_disks,
    with_own_policies, with_pulled_disks, with_served_disks,
};
pub use snapshot_xml::{SnapshotFile, files_of_snapshot, snapshot_sources, with_moved_files};

use crate::hypervisor::machine::{BackupMark, DiskKind, DiskSource, MachineDisk};
use crate::hypervisor::tpm::{TpmStore, TpmVersion};

/// The XML namespace of Holdfast's elements in a machine's `<metadata>`.
pub const MARK_NAMESPACE: &str = "urn:holdfast:domain:1";
const AGENT_CHANNEL: &str = "org.qemu.guest_agent.0";
/// Limit on the nodes of a document. A machine with hundreds of devices has some thousands.
const NODE_COUNT_MAX: u32 = 1 << 20;

/// The parts of a machine's XML that Holdfast uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainXml {
    /// The name.
    pub name: Option<String>,
    /// The UUID, as text.
    pub uuid: Option<String>,
    /// The addresses of the network cards.
    pub macs: Vec<String>,
    /// The disks, in their order.
    pub disks: Vec<MachineDisk>,
    /// The configured emulator binary.
    pub emulator: Option<PathBuf>,
    /// The file with the firmware's variables.
    pub nvram: Option<String>,
    /// Whether the firmware stores variables.
    pub has_variables: bool,
    /// The emulated TPM.
    pub tpm: Option<DomainTpm>,
    /// Whether the machine has a channel for the guest agent.
    pub has_agent_channel: bool,
    /// The settings about backups.
    pub mark: BackupMark,
}

/// The description of an emulated TPM in the XML.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DomainTpm {
    /// The version, which libvirt always writes.
    pub version: Option<TpmVersion>,
    /// The folder or file of the state, if configured (libvirt 10.10 and later).
    pub source: Option<(TpmStore, PathBuf)>,
    /// The socket of the swtpm, if libvirt does not start it itself.
    pub socket: Option<PathBuf>,
    /// The UUID of libvirt's secret with which the state is encrypted.
    pub secret: Option<String>,
}

impl DomainXml {
    /// Parses the XML of a domain.
    ///
    /// # Errors
    /// A description of what is wrong with the XML.
    pub fn parse(text: &str) -> Result<Self, String> {
        let document = document_of(text)?;
        let domain = document.root_element();
        if !domain.has_tag_name("domain") {
            return Err(format!("it is a <{}>, not a <domain>", domain.tag_name().name()));
        }
        let devices = child(domain, "devices");
        let disks = devices.into_iter().flat_map(|devices| children(devices, "disk"));
        let text_of = |name| child(domain, name).and_then(|node| node.text()).map(str::trim);
        let os = child(domain, "os");
        let loader = os.and_then(|os| attribute(child(os, "loader"), "type"));
        let cards = devices.into_iter().flat_map(|devices| children(devices, "interface"));
        Ok(Self {
            name: text_of("name").map(str::to_owned),
            uuid: text_of("uuid").map(str::to_owned),
            macs: cards
                .filter_map(|card| attribute(child(card, "mac"), "address"))
                .collect(),
            disks: disks.map(disk).collect::<Result<_, _>>()?,
            emulator: devices
                .and_then(|devices| child(devices, "emulator"))
                .and_then(|emulator| emulator.text())
                .map(|path| path.trim().into()),
            nvram: os.and_then(|os| child(os, "nvram")).and_then(nvram_path),
            has_variables: attribute(os, "firmware").as_deref() == Some("efi") || loader.as_deref() == Some("pflash"),
            tpm: devices.and_then(tpm),
            has_agent_channel: devices.is_some_and(has_agent_channel),
            mark: child(domain, "metadata").map(mark).unwrap_or_default(),
        })
    }
}

/// Parses the text, with a limit on its size.
fn document_of(text: &str) -> Result<Document<'_>, String> {
    let options = ParsingOptions {
        nodes_limit: NODE_COUNT_MAX,
        ..ParsingOptions::default()
    };
    Document::parse_with_options(text, options).map_err(|error| error.to_string())
}

/// Child elements in libvirt's vocabulary; elements of other programs have a namespace.
fn children<'a, 'input: 'a>(
    node: Node<'a, 'input>,
    name: &'static str,
) -> impl Iterator<Item = Node<'a, 'input>> + use<'a, 'input> {
    node.children()
        .filter(move |child| child.has_tag_name(name) && child.tag_name().namespace().is_none())
}

pub(crate) fn child<'a, 'input: 'a>(node: Node<'a, 'input>, name: &'static str) -> Option<Node<'a, 'input>> {
    children(node, name).next()
}

fn attribute(node: Option<Node<'_, '_>>, name: &str) -> Option<String> {
    node?.attribute(name).map(str::to_owned)
}

fn disk(node: Node<'_, '_>) -> Result<MachineDisk, String> {
    let target = attribute(child(node, "target"), "dev").ok_or("a disk has no target")?;
    let kind = match node.attribute("device") {
        None | Some("disk") => DiskKind::Disk,
        Some("lun") => DiskKind::Lun,
        Some("cdrom") => DiskKind::Cdrom,
        Some("floppy") => DiskKind::Floppy,
        Some(other) => return Err(format!("the disk {target} has the unknown device type {other:?}")),
    };
    Ok(MachineDisk {
        source: source(node),
        kind,
        // libvirt treats a missing format as raw. The format is never probed: the guest of a raw disk could write a
        // fake header.
        format: Some(attribute(child(node, "driver"), "type").unwrap_or_else(|| "raw".to_owned())),
        is_read_only: child(node, "readonly").is_some(),
        is_shared: child(node, "shareable").is_some(),
        alias: attribute(child(node, "alias"), "name"),
        target,
    })
}

fn source(disk: Node<'_, '_>) -> DiskSource {
    let Some(source) = child(disk, "source") else {
        return DiskSource::Empty;
    };
    if let Some(file) = source.attribute("file") {
        return DiskSource::File(file.into());
    }
    if let Some(device) = source.attribute("dev") {
        return DiskSource::Device(device.into());
    }
    let kind = disk.attribute("type").unwrap_or("unknown");
    let words = ["protocol", "pool", "volume", "name"]
        .into_iter()
        .filter_map(|key| source.attribute(key));
    let words: Vec<&str> = words.collect();
    if words.is_empty() && kind == "file" {
        return DiskSource::Empty;
    }
    DiskSource::Other(format!("{kind} {}", words.join(" ")).trim_end().to_owned())
}

/// The path is the text of the element; since libvirt 8.5 it may be in a `<source>` child instead.
fn nvram_path(nvram: Node<'_, '_>) -> Option<String> {
    let text = nvram.text().map(str::trim).filter(|text| !text.is_empty());
    let source = || attribute(child(nvram, "source"), "file");
    text.map(str::to_owned).or_else(source)
}

/// <https://libvirt.org/formatdomain.html#tpm-device>
fn tpm(devices: Node<'_, '_>) -> Option<DomainTpm> {
    let backend = children(devices, "tpm").find_map(|tpm| child(tpm, "backend"))?;
    let source = child(backend, "source");
    let path = attribute(source, "path").map(PathBuf::from);
    let mut tpm = DomainTpm {
        version: attribute(Some(backend), "version").and_then(|number| TpmVersion::from_number(&number)),
        secret: attribute(child(backend, "encryption"), "secret"),
        ..DomainTpm::default()
    };
    match backend.attribute("type") {
        Some("emulator") => {
            let store = match source.and_then(|source| source.attribute("type")) {
                Some("dir") => Some(TpmStore::Folder),
                Some("file") => Some(TpmStore::Single),
                _ => None,
            };
            tpm.source = store.zip(path);
        }
        Some("external") => tpm.socket = path,
        _ => return None,
    }
    Some(tpm)
}

fn has_agent_channel(devices: Node<'_, '_>) -> bool {
    children(devices, "channel")
        .filter_map(|channel| child(channel, "target"))
        .any(|target| target.attribute("name") == Some(AGENT_CHANNEL))
}

/// `<holdfast:backup enabled='no' exclude='vdb vdc' tags='db prod'/>`
fn mark(metadata: Node<'_, '_>) -> BackupMark {
    let Some(backup) = metadata
        .children()
        .find(|node| node.has_tag_name((MARK_NAMESPACE, "backup")))
    else {
        return BackupMark::default();
    };
    let words = |name: &str| {
        let text = backup.attribute(name).unwrap_or_default();
        text.split_whitespace().map(str::to_owned).collect()
    };
    BackupMark {
        is_left_out: backup.attribute("enabled") == Some("no"),
        left_out_disks: words("exclude"),
        tags: words("tags"),
    }
}

#[cfg(test)]
mod tests {
    use super::{DomainTpm, DomainXml};
    use crate::hypervisor::machine::{DiskKind, DiskSource};
    use crate::hypervisor::tpm::{TpmStore, TpmVersion};

    const DOMAIN: &str = "<domain type='kvm' id='3'>
  <name>web1</name>
  <metadata>
    <other:thing xmlns:other='urn:other'/>
    <holdfast:backup xmlns:holdfast='urn:holdfast:domain:1' enabled='no' exclude='vdb  sda' tags='db prod'/>
  </metadata>
  <os><type arch='x86_64'>hvm</type>
    <loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader>
    <nvram template='/t'>/var/lib/libvirt/qemu/nvram/web1_VARS.fd</nvram></os>
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='none'/>
      <source file='/images/web1.qcow2' index='2'/>
      <backingStore type='file'><format type='raw'/><source file='/images/base.raw'/></backingStore>
      <target dev='vda' bus='virtio'/><alias name='virtio-disk0'/>
    </disk>
    <disk type='block' device='disk'><driver name='qemu' type='raw'/><source dev='/dev/vg/web1'/>
      <target dev='vdb' bus='virtio'/><shareable/></disk>
    <disk type='network'><source protocol='rbd' name='pool/image'/><target dev='vdc'/></disk>
    <disk type='file' device='cdrom'><target dev='sda' bus='sata'/><readonly/></disk>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0' state='connected'/></channel>
    <tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>
  </devices>
</domain>";

    #[test]
    fn a_configuration_is_parsed() {
        let domain = DomainXml::parse(DOMAIN).unwrap();
        let targets: Vec<&str> = domain.disks.iter().map(|disk| &disk.target[..]).collect();
        assert_eq!(targets, ["vda", "vdb", "vdc", "sda"]);
        assert_eq!(domain.disks[0].source, DiskSource::File("/images/web1.qcow2".into()));
        assert_eq!(domain.disks[0].format.as_deref(), Some("qcow2"));
        assert_eq!(domain.disks[0].alias.as_deref(), Some("virtio-disk0"));
        assert_eq!(domain.disks[1].source, DiskSource::Device("/dev/vg/web1".into()));
        assert!(domain.disks[1].is_shared && !domain.disks[0].is_shared);
        assert_eq!(
            domain.disks[2].source,
            DiskSource::Other("network rbd pool/image".to_owned())
        );
        assert_eq!(
            (domain.disks[3].kind, &domain.disks[3].source),
            (DiskKind::Cdrom, &DiskSource::Empty)
        );
        assert_eq!(
            domain.nvram.as_deref(),
            Some("/var/lib/libvirt/qemu/nvram/web1_VARS.fd")
        );
        assert_eq!(domain.tpm.unwrap().version, Some(TpmVersion::V2));
        assert!(domain.has_agent_channel && domain.mark.is_left_out);
        assert_eq!(domain.mark.left_out_disks, ["vdb", "sda"]);
        assert_eq!(domain.mark.tags, ["db", "prod"]);
    }

    #[test]
    fn variables_in_a_source_element_are_found() {
        let text = "<domain><os><nvram type='file'>\n<source file='/vars'/></nvram></os></domain>";
        assert_eq!(DomainXml::parse(text).unwrap().nvram.as_deref(), Some("/vars"));
    }

    #[test]
    fn the_configured_place_of_a_tpm_state_is_read() {
        let tpm = |backend: &str| {
            let text = format!("<domain><devices><tpm model='tpm-tis'>{backend}</tpm></devices></domain>");
            DomainXml::parse(&text).unwrap().tpm
        };
        let of = |version, source: Option<(TpmStore, &str)>| DomainTpm {
            version,
            source: source.map(|(store, path)| (store, path.into())),
            ..DomainTpm::default()
        };
        let found = tpm("<backend type='emulator' version='1.2'><encryption secret='a-b'/></backend>").unwrap();
        assert_eq!(found.secret.as_deref(), Some("a-b"));
        assert_eq!((found.version, found.source), (Some(TpmVersion::V1), None));
        for (kind, store) in [("dir", TpmStore::Folder), ("file", TpmStore::Single)] {
            let backend = format!("<backend type='emulator' version='2.0'><source type='{kind}' path='/t'/></backend>");
            assert_eq!(tpm(&backend), Some(of(Some(TpmVersion::V2), Some((store, "/t")))));
        }
        let found = tpm("<backend type='external'><source type='unix' mode='connect' path='/s'/></backend>").unwrap();
        assert_eq!((found.socket, found.source), (Some("/s".into()), None));
        assert_eq!(
            tpm("<backend type='passthrough'><device path='/dev/tpm0'/></backend>"),
            None
        );
    }

    #[test]
    fn invalid_xml_is_refused_with_a_reason() {
        let disk = "<domain><devices><disk><source file='/a'/></disk></devices></domain>";
        for text in [
            "",
            "<domain>",
            "<network/>",
            disk,
            "<!DOCTYPE a [<!ENTITY b 'c'>]><domain>&b;</domain>",
        ] {
            assert!(DomainXml::parse(text).is_err(), "{text}");
        }
    }
}
