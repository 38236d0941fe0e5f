//! The libvirt of this host: its address, the connection, and whether it is in use.

use std::path::Path;

use holdfast_host::Libvirt;

use crate::context::Context;
use crate::errors::Error;
use crate::process::environment;

/// The default address of libvirt.
const LIBVIRT_DEFAULT: &str = "qemu:///system";
/// The sockets of its daemons: the one for all drivers, and that of QEMU's driver.
const LIBVIRT_SOCKETS: [&str; 2] = ["/run/libvirt/libvirt-sock", "/run/libvirt/virtqemud-sock"];
/// Where it keeps the configurations of machines.
const LIBVIRT_MACHINES: &str = "/etc/libvirt/qemu";

/// The address of libvirt: from the user, otherwise from the environment, otherwise that of this host.
pub fn libvirt_address(given: Option<&str>, context: &Context) -> String {
    match (given, context.variable(environment::LIBVIRT_URI)) {
        (Some(uri), _) => uri.to_owned(),
        (None, Some(uri)) => uri.to_string_lossy().into_owned(),
        (None, None) => LIBVIRT_DEFAULT.to_owned(),
    }
}

/// Connects to the libvirt at `uri`, with the configuration folder of the current user.
pub fn connect_libvirt(uri: &str, context: &Context) -> Result<Libvirt, Error> {
    let libvirt = Libvirt::connect(uri).map_err(holdfast_engine::Error::from)?;
    Ok(match context.configuration_folder() {
        Some(folder) => libvirt.with_configurations(&folder),
        None => libvirt,
    })
}

/// Whether no daemon of libvirt listens on this host, and no machine is defined.
pub(super) fn is_absent() -> bool {
    LIBVIRT_SOCKETS.iter().all(|socket| !Path::new(socket).exists()) && !has_machines(Path::new(LIBVIRT_MACHINES))
}

/// Whether a folder has configurations of machines. One that cannot be read may have some.
fn has_machines(folder: &Path) -> bool {
    let is_configuration = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.is_ok_and(|entry| entry.path().extension().is_some_and(|ending| ending == "xml"))
    };
    match std::fs::read_dir(folder) {
        Ok(mut entries) => entries.any(is_configuration),
        Err(error) => error.kind() != std::io::ErrorKind::NotFound,
    }
}

#[cfg(test)]
mod tests {
    use super::has_machines;

    #[test]
    fn a_folder_of_libvirt_without_configurations_has_no_machines() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("networks")).unwrap();
        assert!(!has_machines(folder.path()) && !has_machines(&folder.path().join("absent")));
        std::fs::File::create(folder.path().join("web1.xml")).unwrap();
        assert!(has_machines(folder.path()));
        // It cannot be read.
        assert!(has_machines(&folder.path().join("web1.xml")));
    }
}
