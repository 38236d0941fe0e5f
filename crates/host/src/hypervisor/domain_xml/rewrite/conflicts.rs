//! Resources that a machine and its copy would share: sockets, logs, ports, devices of the host.

use roxmltree::Node;

use super::super::{child, children};
use super::Rewriter;

/// Elements of character devices, which have a file or socket on the host.
const CHARACTER_DEVICES: [&str; 6] = ["serial", "parallel", "console", "channel", "redirdev", "smartcard"];
/// Folders in which libvirt creates sockets of channels itself; each machine has a subfolder.
const OWN_SOCKETS: &str = "/libvirt/qemu/channel/";
/// Attributes of graphics that contain a port number.
const PORTS: [&str; 3] = ["port", "tlsPort", "websocket"];

/// The names of a machine and its copy.
#[derive(Debug, Clone, Copy)]
pub(super) struct Renaming<'a> {
    pub(super) old: &'a str,
    pub(super) new: &'a str,
}

impl Rewriter<'_> {
    /// Changes paths that contain the machine's name, and warns of other resources that both machines would use.
    pub(super) fn conflicts(&mut self, domain: Node<'_, '_>, devices: Node<'_, '_>, renaming: Renaming<'_>) {
        for device in devices.children().filter(Node::is_element) {
            let kind = device.tag_name().name();
            if CHARACTER_DEVICES.contains(&kind) {
                self.character_device(device, renaming);
            }
            match kind {
                "graphics" => self.graphics(device, renaming),
                "hostdev" => self.warn("a device of the host is passed through"),
                "vsock" if is_fixed(child(device, "cid"), "auto") => self.warn("the CID of its vsock is fixed"),
                "interface" if device.attribute("type") == Some("hostdev") => {
                    self.warn("a network card of the host is passed through");
                }
                "interface" => self.card(device),
                "tpm" if child(device, "backend").and_then(|backend| backend.attribute("type")) == Some("external") => {
                    self.warn("another program serves its TPM");
                }
                _ => {}
            }
        }
        if domain.children().any(|node| node.has_tag_name("commandline")) {
            self.warn("it has additional arguments for QEMU");
        }
    }

    fn warn(&mut self, what: &str) {
        self.warnings.push(format!(
            "{what}: this may conflict with the original machine while both run"
        ));
    }

    fn character_device(&mut self, device: Node<'_, '_>, renaming: Renaming<'_>) {
        for source in children(device, "source") {
            let Some(path) = source.attribute("path") else {
                continue;
            };
            if path.contains(OWN_SOCKETS) {
                self.edits.remove_element(source);
                continue;
            }
            let is_own = match device.attribute("type") {
                Some("unix") => source.attribute("mode") != Some("connect"),
                Some("file" | "pipe") => true,
                _ => false,
            };
            if is_own {
                self.path(source, "path", renaming);
            }
        }
        for log in children(device, "log") {
            self.path(log, "file", renaming);
        }
    }

    fn graphics(&mut self, graphics: Node<'_, '_>, renaming: Renaming<'_>) {
        let kind = graphics.attribute("type").unwrap_or_default();
        let is_automatic = graphics.attribute("autoport") == Some("yes");
        for name in PORTS {
            let port = graphics.attribute(name).filter(|port| !matches!(*port, "-1" | "0"));
            if let Some(port) = port.filter(|_| !is_automatic) {
                self.warn(&format!("port {port} of {kind} is fixed"));
            }
        }
        let sockets = children(graphics, "listen").chain([graphics]);
        for node in sockets.filter(|node| node.attribute("socket").is_some()) {
            self.path(node, "socket", renaming);
        }
    }

    fn card(&mut self, card: Node<'_, '_>) {
        if let Some(name) = child(card, "target").and_then(|target| target.attribute("dev")) {
            self.warn(&format!("the name {name} of a network device of the host is fixed"));
        }
    }

    /// Replaces the machine's name in a path.
    fn path(&mut self, node: Node<'_, '_>, attribute: &str, renaming: Renaming<'_>) {
        let Some(path) = node.attribute(attribute) else {
            return;
        };
        let changed = with_name(path, renaming.old, renaming.new);
        if changed == path {
            self.warn(&format!("the path {path} is fixed"));
        } else {
            self.notes.push(format!("{path} becomes {changed}"));
            self.edits.set_attribute(node, attribute, &changed);
        }
    }
}

fn is_fixed(node: Option<Node<'_, '_>>, automatic: &str) -> bool {
    node.is_some_and(|node| node.attribute(automatic) != Some("yes"))
}

/// Replaces the whole word `old` in a path by `new`: "vm" matches in "/run/vm.socket", but not in "/run/vms".
pub fn with_name(path: &str, old: &str, new: &str) -> String {
    let is_border = |character: Option<char>| !character.is_some_and(char::is_alphanumeric);
    let (mut result, mut rest) = (String::new(), path);
    while let Some(at) = rest.find(old).filter(|_| !old.is_empty()) {
        let (before, after) = (&rest[..at], &rest[at + old.len()..]);
        let previous = before.chars().next_back().or_else(|| result.chars().next_back());
        let is_word = is_border(previous) && is_border(after.chars().next());
        result.push_str(before);
        result.push_str(if is_word { new } else { old });
        rest = after;
    }
    result + rest
}
