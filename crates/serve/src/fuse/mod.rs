//! The FUSE server: serves devices as files of a mounted file system.
//!
//! ```text
//! server ─► session ─► wire         pure: a message of the kernel is parsed, and its reply is encoded
//!              │  └──► handles      open files and directories
//!              └─────► tree         directories, files and symbolic links
//! ```
//! Mounting needs the rights of the system, and is not done here: the server gets an opened `/dev/fuse` that is mounted.

mod event;
mod handles;
#[cfg(feature = "hostile")]
pub(crate) mod hostile;
mod server;
mod session;
#[cfg(test)]
mod tests;
mod tree;
mod wire;

pub use event::MountEvents;
pub use server::FuseServer;
pub use session::{Negotiation, SessionStart};
pub use tree::{Directory, FileContent, FileOwner, FileTree, InvalidName, TreeEntry};
pub use wire::{FileAccess, NodeId};
