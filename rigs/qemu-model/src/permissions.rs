//! Permissions of the users of a node to write to it at the same time.
//!
//! Each user of a node needs some permissions, and shares some with the other users. A change of the graph is refused
//! if a user would then need a permission that another user does not share. This determines the order in which filters
//! must be inserted and removed.
//!
//! Source: `bdrv_default_perms` and `bdrv_filter_default_perms` in QEMU's `block.c`, `cbw_child_perm` in
//! `block/copy-before-write.c`, `snapshot_access_child_perm` in `block/snapshot-access.c`,
//! `blkconf_apply_backend_options` in `hw/block/block.c`.

use crate::node::Driver;
use crate::refusal::{Answer, Refusal};
use crate::state::State;

const READ: u8 = 1;
const WRITE: u8 = 2;
const WRITE_UNCHANGED: u8 = 4;
const RESIZE: u8 = 8;
const ALL: u8 = READ | WRITE | WRITE_UNCHANGED | RESIZE;

/// The permissions that a user of a node needs, and those that it allows others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Permissions {
    needed: u8,
    shared: u8,
}

const NONE: Permissions = Permissions { needed: 0, shared: ALL };
/// A disk of the guest without `share-rw`.
const DEVICE: Permissions = Permissions {
    needed: READ | WRITE,
    shared: READ | WRITE_UNCHANGED | RESIZE,
};

impl State {
    /// Checks that no user of a node needs a permission that another user does not share.
    pub(crate) fn check_permissions(&self) -> Answer<()> {
        let conflict = |name: &&String| {
            let users = self.users(name);
            let mut pairs = users.iter().enumerate();
            pairs.any(|(at, user)| {
                let mut others = users.iter().enumerate().filter(|(other, _)| *other != at);
                others.any(|(_, other)| user.needed & !other.shared != 0)
            })
        };
        match self.nodes.keys().find(conflict) {
            None => Ok(()),
            Some(name) => Err(Refusal::generic(format!("Permission conflict on node '{name}'"))),
        }
    }

    fn users(&self, name: &str) -> Vec<Permissions> {
        let devices = self.devices.iter().filter(|device| device.node == name);
        let mut users: Vec<Permissions> = devices.map(|_| DEVICE).collect();
        let exports = self.exports.iter().filter(|export| export.node == name);
        users.extend(exports.map(|export| Permissions {
            needed: if export.is_writable { READ | WRITE } else { READ },
            shared: ALL & !RESIZE,
        }));
        users.extend(self.parents(name).map(|(parent, edge)| self.of_edge(parent, edge)));
        users
    }

    /// The permissions that a node needs from a child, which depend on those that its own users need.
    fn of_edge(&self, parent: &str, edge: &str) -> Permissions {
        let users = self.users(parent);
        let passed = users.iter().fold(NONE, |sum, user| Permissions {
            needed: sum.needed | user.needed,
            shared: sum.shared & user.shared,
        });
        match (&self.nodes[parent].driver, edge) {
            (Driver::CopyBeforeWrite(_), "target") => Permissions {
                needed: WRITE,
                shared: ALL,
            },
            (Driver::CopyBeforeWrite(_), _) if users.is_empty() => NONE,
            (Driver::CopyBeforeWrite(_), _) => Permissions {
                needed: passed.needed | if passed.needed & WRITE == 0 { 0 } else { READ },
                shared: passed.shared & !(WRITE | RESIZE),
            },
            (Driver::SnapshotAccess, _) => NONE,
            (Driver::Qcow2(_), _) => Permissions {
                needed: READ | WRITE | RESIZE,
                shared: READ | WRITE_UNCHANGED,
            },
            (Driver::Raw | Driver::File(_) | Driver::NullCo, _) => passed,
        }
    }
}
