//! The ends of a session: an initiator's port, and its relation to a target.

/// The port of an initiator: its name, and the identifier of its session. Persistent reservations belong to ports.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct InitiatorPort {
    pub(crate) name: String,
    pub(crate) session_id: [u8; 6],
}

impl InitiatorPort {
    /// The TransportID of SPC-4 (iSCSI initiator port): the text `NAME,i,0xISID`, zero-padded to a multiple of four.
    pub(crate) fn transport_id(&self) -> Vec<u8> {
        use std::fmt::Write as _;
        let mut text = format!("{},i,0x", self.name);
        for byte in self.session_id {
            // Writing to a string cannot fail.
            write!(text, "{byte:02x}").unwrap_or_default();
        }
        let mut text = text.into_bytes();
        text.push(0);
        text.resize(text.len().next_multiple_of(4).max(20), 0);
        let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
        let mut id = vec![0x45, 0];
        id.extend(length.to_be_bytes());
        id.extend(text);
        id
    }
}

/// A relation between an initiator's port and a target: it lasts as long as the session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Nexus {
    /// Unique in the process.
    pub(crate) id: u64,
    pub(crate) port: InitiatorPort,
}
