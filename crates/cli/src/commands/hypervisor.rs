//! The way to a hypervisor.

use holdfast_host::Libvirt;

use crate::context::Context;
use crate::environment;
use crate::errors::Error;

/// Where libvirt is, where nobody says.
const LIBVIRT_DEFAULT: &str = "qemu:///system";

/// The address that is given, or that of the environment.
pub(super) fn address(given: Option<&String>, context: &Context) -> String {
    match (given, context.variable(environment::LIBVIRT_URI)) {
        (Some(uri), _) => uri.clone(),
        (None, Some(uri)) => uri.to_string_lossy().into_owned(),
        (None, None) => LIBVIRT_DEFAULT.to_owned(),
    }
}

/// Connects.
pub(super) fn connect(uri: &str) -> Result<Libvirt, Error> {
    Ok(Libvirt::connect(uri).map_err(holdfast_engine::Error::from)?)
}
