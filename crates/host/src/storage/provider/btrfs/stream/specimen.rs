//! Streams as a sender encodes them, command by command, for tests and fuzzers.

use super::command::{Key, MAGIC, Verb, raw};

/// The UUID of the subvolume in the test streams.
pub(crate) const IDENTITY: [u8; 16] = [0x11; 16];
/// The UUID of the parent of increments, in the stream.
pub(crate) const PARENT: [u8; 16] = [0x22; 16];
/// The UUID of the parent on this host.
pub(crate) const PARENT_HERE: [u8; 16] = [0x33; 16];
/// The announced name.
pub(crate) const NAME: &str = "daily-1";

/// Encodes a stream.
pub(crate) struct StreamWriter(pub(crate) Vec<u8>);

impl StreamWriter {
    /// A stream without commands.
    pub(crate) fn empty() -> Self {
        Self([&MAGIC[..], &1_u32.to_le_bytes()].concat())
    }

    /// A stream with a whole subvolume.
    pub(crate) fn full() -> Self {
        Self::empty().subvolume(NAME, IDENTITY)
    }

    /// A stream with the changes since the parent.
    pub(crate) fn increment() -> Self {
        let count = 7_u64.to_le_bytes();
        Self::empty().command(
            Verb::Snapshot,
            &[
                (Key::Path, NAME.as_bytes()),
                (Key::Uuid, &IDENTITY),
                (Key::Transaction, &count),
                (Key::CloneUuid, &PARENT),
                (Key::CloneTransaction, &count),
            ],
        )
    }

    pub(crate) fn command(mut self, verb: Verb, values: &[(Key, &[u8])]) -> Self {
        let values: Vec<(u16, &[u8])> = values.iter().map(|(key, value)| (*key as u16, *value)).collect();
        self.0.extend(raw(verb as u16, &values));
        self
    }

    pub(crate) fn subvolume(self, name: &str, identity: [u8; 16]) -> Self {
        let values: [(Key, &[u8]); 3] = [
            (Key::Path, name.as_bytes()),
            (Key::Uuid, &identity),
            (Key::Transaction, &7_u64.to_le_bytes()),
        ];
        self.command(Verb::Subvolume, &values)
    }

    /// A file or folder.
    pub(crate) fn make(self, verb: Verb, path: &str) -> Self {
        self.command(verb, &[(Key::Path, path.as_bytes()), (Key::Inode, &[1; 8])])
    }

    /// A device, FIFO or socket.
    pub(crate) fn node(self, verb: Verb, path: &str) -> Self {
        let mode = 0o60_600_u64.to_le_bytes();
        let values: [(Key, &[u8]); 4] = [
            (Key::Path, path.as_bytes()),
            (Key::Inode, &[1; 8]),
            (Key::Device, &[8; 8]),
            (Key::Mode, &mode),
        ];
        self.command(verb, &values)
    }

    pub(crate) fn symlink(self, path: &str, target: &str) -> Self {
        let values: [(Key, &[u8]); 3] = [
            (Key::Path, path.as_bytes()),
            (Key::Inode, &[1; 8]),
            (Key::PathLink, target.as_bytes()),
        ];
        self.command(Verb::Symlink, &values)
    }

    pub(crate) fn rename(self, from: &str, to: &str) -> Self {
        self.command(
            Verb::Rename,
            &[(Key::Path, from.as_bytes()), (Key::PathTo, to.as_bytes())],
        )
    }

    pub(crate) fn link(self, from: &str, to: &str) -> Self {
        self.command(
            Verb::Link,
            &[(Key::Path, to.as_bytes()), (Key::PathLink, from.as_bytes())],
        )
    }

    /// `Unlink`, `RemoveFolder`.
    pub(crate) fn of_path(self, verb: Verb, path: &str) -> Self {
        self.command(verb, &[(Key::Path, path.as_bytes())])
    }

    pub(crate) fn write(self, path: &str, data: &[u8]) -> Self {
        let values: [(Key, &[u8]); 3] = [
            (Key::Path, path.as_bytes()),
            (Key::FileOffset, &[0; 8]),
            (Key::Data, data),
        ];
        self.command(Verb::Write, &values)
    }

    pub(crate) fn clone_range(self, path: &str, of: [u8; 16], from: &str) -> Self {
        let values: [(Key, &[u8]); 7] = [
            (Key::FileOffset, &[0; 8]),
            (Key::CloneLength, &[0; 8]),
            (Key::Path, path.as_bytes()),
            (Key::CloneUuid, &of),
            (Key::CloneTransaction, &[0; 8]),
            (Key::ClonePath, from.as_bytes()),
            (Key::CloneOffset, &[0; 8]),
        ];
        self.command(Verb::Clone, &values)
    }

    pub(crate) fn chmod(self, path: &str, mode: u64) -> Self {
        let values: [(Key, &[u8]); 2] = [(Key::Path, path.as_bytes()), (Key::Mode, &mode.to_le_bytes())];
        self.command(Verb::Chmod, &values)
    }

    pub(crate) fn chown(self, path: &str) -> Self {
        let values: [(Key, &[u8]); 3] = [(Key::Path, path.as_bytes()), (Key::Uid, &[0; 8]), (Key::Gid, &[0; 8])];
        self.command(Verb::Chown, &values)
    }

    pub(crate) fn utimes(self, path: &str) -> Self {
        let values: [(Key, &[u8]); 4] = [
            (Key::Path, path.as_bytes()),
            (Key::AccessTime, &[0; 12]),
            (Key::ModifyTime, &[0; 12]),
            (Key::ChangeTime, &[0; 12]),
        ];
        self.command(Verb::Utimes, &values)
    }

    pub(crate) fn xattr(self, path: &str, name: &str) -> Self {
        let values: [(Key, &[u8]); 3] = [
            (Key::Path, path.as_bytes()),
            (Key::XattrName, name.as_bytes()),
            (Key::XattrData, b"value"),
        ];
        self.command(Verb::SetXattr, &values)
    }

    pub(crate) fn end(self) -> Vec<u8> {
        self.command(Verb::End, &[]).0
    }
}

/// A stream with every command that normal senders use.
pub(crate) fn valid_full() -> Vec<u8> {
    StreamWriter::full()
        .utimes("")
        .make(Verb::MakeFolder, "o257-9-0")
        .rename("o257-9-0", "vms")
        .make(Verb::MakeFile, "o258-9-0")
        .rename("o258-9-0", "vms/disk.raw")
        .write("vms/disk.raw", b"some data")
        .clone_range("vms/disk.raw", IDENTITY, "vms/disk.raw")
        .chown("vms/disk.raw")
        .chmod("vms/disk.raw", 0o4755)
        .xattr("vms/disk.raw", "user.note")
        .xattr("vms/disk.raw", "security.capability")
        .symlink("o259-9-0", "/etc/passwd")
        .rename("o259-9-0", "vms/link")
        .chown("vms/link")
        .utimes("vms/link")
        .node(Verb::MakeSocket, "o260-9-0")
        .rename("o260-9-0", "vms/monitor.sock")
        .chmod("vms/monitor.sock", 0o600)
        .link("vms/disk.raw", "vms/other.raw")
        .of_path(Verb::Unlink, "vms/other.raw")
        .end()
}

/// The changes since a parent with a file `disk`, a folder `folder` and a link in it.
#[cfg(test)]
pub(crate) fn valid_increment() -> Vec<u8> {
    StreamWriter::increment()
        .rename("folder", "o258-7-0")
        .make(Verb::MakeFolder, "o300-9-0")
        .rename("o300-9-0", "folder")
        .rename("o258-7-0", "folder/old")
        .write("disk", b"new data")
        .clone_range("disk", PARENT, "disk")
        .of_path(Verb::Unlink, "folder/old/link")
        .of_path(Verb::Unlink, "gone.sock")
        .end()
}
