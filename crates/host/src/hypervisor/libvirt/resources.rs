//! Networks and storage pools of libvirt.

use std::path::PathBuf;

use roxmltree::Document;
use virt::error::ErrorNumber;

use super::{Libvirt, is_code};
use crate::hypervisor::domain_xml::{HostNeeds, child};

/// The pool that tools create by default.
const DEFAULT_POOL: &str = "default";

impl Libvirt {
    /// A resource that cannot be queried counts as present. If it is missing, the start of the machine reports that.
    pub(super) fn find_missing(&self, needs: &HostNeeds) -> Vec<String> {
        let mut missing = Vec::new();
        for name in &needs.networks {
            match self.connection().lookup_network_by_name(name) {
                Ok(network) if network.is_active() == Ok(false) => {
                    missing.push(format!(
                        "the network {name} of libvirt is not active: virsh net-start {name}"
                    ));
                }
                Err(error) if is_code(&error, ErrorNumber::NoNetwork) => {
                    missing.push(format!("libvirt has no network {name}"));
                }
                _ => {}
            }
        }
        for name in &needs.pools {
            match self.connection().lookup_storage_pool_by_name(name) {
                Ok(pool) if pool.is_active() == Ok(false) => {
                    missing.push(format!(
                        "the storage pool {name} of libvirt is not active: virsh pool-start {name}"
                    ));
                }
                Err(error) if is_code(&error, ErrorNumber::NoStoragePool) => {
                    missing.push(format!("libvirt has no storage pool {name}"));
                }
                _ => {}
            }
        }
        missing
    }

    /// The folder of the default pool.
    pub(super) fn default_folder(&self) -> Option<PathBuf> {
        let pool = self.connection().lookup_storage_pool_by_name(DEFAULT_POOL).ok()?;
        let text = pool.xml_desc(0).ok()?;
        let document = Document::parse(&text).ok()?;
        let pool = document.root_element();
        let is_folder = matches!(pool.attribute("type"), Some("dir" | "fs" | "netfs"));
        let path = child(child(pool, "target").filter(|_| is_folder)?, "path")?.text()?;
        Some(path.trim().into())
    }
}
