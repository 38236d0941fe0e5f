//! The accelerator and the emulator of a machine.

use holdfast_hardware::xml::Element;
use roxmltree::Node;

use super::super::child;
use super::{Emulator, Rewriter};

/// The domain type that needs no hardware virtualization.
const EMULATED: &str = "qemu";
/// CPU modes that need KVM.
const HOST_PROCESSORS: [&str; 2] = ["host-passthrough", "host-model"];

impl Rewriter<'_> {
    pub(super) fn domain_type(&mut self, domain: Node<'_, '_>, kind: &str) {
        let before = domain.attribute("type").unwrap_or_default();
        if before == kind {
            return;
        }
        self.notes.push(format!("its domain type {before} becomes {kind}"));
        self.edits.set_attribute(domain, "type", kind);
        if let Some(cpu) = child(domain, "cpu")
            && let Some(mode) = cpu.attribute("mode").filter(|mode| HOST_PROCESSORS.contains(mode))
            && kind == EMULATED
        {
            self.warnings.push(format!(
                "its CPU mode {mode} needs KVM: it becomes maximum, which can be emulated"
            ));
            let maximum = Element::new("cpu").attribute("mode", "maximum");
            self.edits.replace_element(cpu, &maximum);
        }
    }

    pub(super) fn emulator(&mut self, devices: Node<'_, '_>, choice: Emulator) {
        if let (Emulator::OfHypervisor, Some(emulator)) = (choice, child(devices, "emulator")) {
            let path = emulator.text().unwrap_or_default().trim();
            self.notes
                .push(format!("{path} does not exist: libvirt's default QEMU is used"));
            self.edits.remove_element(emulator);
        }
    }
}
