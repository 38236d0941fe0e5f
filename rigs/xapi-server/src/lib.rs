//! A test server that replaces a pool of XenServer or XCP-ng hosts: it implements XAPI over the network.
//!
//! **This is not XAPI.** XenServer does not run inside the virtual machines that run the tests, and no separate server
//! of its protocol is available. This one was written from public sources: the documents and the source of
//! <https://github.com/xapi-project/xen-api> (`doc/content/xen-api`, `ocaml/xapi`, `ocaml/libs/vhd`), and the
//! expectations of its clients (`@xen-orchestra/xapi`, the Python module XenAPI, `xs-cbt-samples`). No code was copied.
//! Code that passes here must still be tried on a real pool; code that fails here would fail there.
//!
//! The pool has two hosts, 127.0.0.1 (the master) and 127.0.0.2, which support
//!
//! - JSON-RPC 1.0 and 2.0 at `/jsonrpc`, XML-RPC at `/` and `/RPC2`;
//! - `/export`, `/import`, `/export_metadata`, `/import_metadata`, `/export_raw_vdi` and `/import_raw_vdi`, with tasks,
//!   redirects and answers that end with the connection;
//! - NBD with TLS for disks, at the addresses in `VDI.get_nbd_info`, and changed blocks.
//!
//! VHD and XVA are written and read by separate code (`vhd`, `xva`): an error in Holdfast's code is not repeated here.
//! [`Faults`] injects faults of a pool; [`Habits`] sets differences between pools.
//!
//! Intended differences from a pool:
//!
//! - ports: both hosts listen on one port that the system chose instead of 443, so a redirect includes the port;
//! - an `Async.` call is executed before it returns; its task reports that after [`Habits::pending_polls`] polls, so
//!   that no test waits for a clock. The call of a stuck task ([`Fault::TaskStuck`]) is executed when the task is no
//!   longer stuck, or never;
//! - machines do not run: `VM.start` changes a field, and [`Server::write_disk`] replaces the guest;
//! - records have the fields that backup clients read, with their types, but not every field of every version.

mod base64;
mod call;
mod database;
mod disk;
mod failure;
mod faults;
mod habits;
mod handlers;
mod http;
mod identity;
mod info;
mod nbd;
mod pool;
mod rpc;
mod schema;
mod server;
mod vhd;
mod xva;

pub use faults::{Fault, Faults};
pub use habits::{Checksum, Habits, NbdPurpose, VhdBitmaps, VhdOrder};
pub use info::{NewDisk, NewVm, SrPlace, TaskInfo, VdiInfo, VmInfo};
pub use server::Server;
