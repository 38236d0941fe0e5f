//! What the records of a machine are written with.

use crate::xen::read::XenRecords;

pub(crate) const NULL: &str = "OpaqueRef:NULL";

/// What the records say beside the machine.
pub struct XenOptions<'a> {
    /// The host that writes them.
    pub host_name: &'a str,
    /// When, as `20261123T09:30:00Z`.
    pub time: &'a str,
    /// Gives a new UUID, as text, with each call.
    pub new_uuid: &'a mut dyn FnMut() -> String,
    /// The records that the machine comes from, if it was one of XenServer: what nobody else has a word for is in them.
    pub original: Option<&'a XenRecords>,
}
