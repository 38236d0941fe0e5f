//! Options for writing the records of a machine.

use crate::xen::read::XenRecords;

pub(crate) const NULL: &str = "OpaqueRef:NULL";

/// Data for the records besides the machine.
pub struct XenOptions<'a> {
    /// The name of the host that writes the records.
    pub host_name: &'a str,
    /// The time of writing, as `20261123T09:30:00Z`.
    pub time: &'a str,
    /// Returns a new UUID with each call.
    pub new_uuid: &'a mut dyn FnMut() -> String,
    /// The original records of a machine that was on XenServer, with fields that no other hypervisor has.
    pub original: Option<&'a XenRecords>,
}
