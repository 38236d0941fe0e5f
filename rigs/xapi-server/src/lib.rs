//! A stand-in for a pool of XenServer or XCP-ng hosts: it speaks XAPI on the wire, for tests.
//!
//! **This is not XAPI.** XenServer does not run inside the machines that tests run in, and no server of its protocol can be had
//! by itself. What is here was written from public sources: the documents and the source of
//! <https://github.com/xapi-project/xen-api> (`doc/content/xen-api`, `ocaml/xapi`, `ocaml/libs/vhd`), and what its clients expect
//! (`@xen-orchestra/xapi`, the Python module XenAPI, `xs-cbt-samples`). No code was taken over. What passes here still has to be
//! tried on a real pool; what fails here would fail there.
//!
//! There is a pool of two hosts, 127.0.0.1 (the master) and 127.0.0.2, which answer
//!
//! - JSON-RPC 1.0 and 2.0 at `/jsonrpc`, XML-RPC at `/` and `/RPC2`;
//! - `/export`, `/import`, `/export_metadata`, `/import_metadata`, `/export_raw_vdi` and `/import_raw_vdi`, with tasks, redirects
//!   and answers that end where the connection does;
//! - NBD with TLS for disks, as `VDI.get_nbd_info` says, and changed blocks.
//!
//! VHD and XVA are written and read by code of its own (`vhd`, `xva`): an error in Holdfast's is not mirrored here. What can go
//! wrong in a pool is armed with [`Faults`]; how pools differ is set with [`Habits`].
//!
//! It differs from a pool, on purpose:
//!
//! - ports: both hosts listen on one port that the system chose instead of 443, so that a redirect names the port;
//! - an `Async.` call is done when it returns; its task shows it after [`Habits::pending_polls`] polls, so that nothing waits
//!   for a clock. A task that is stuck ([`Fault::TaskStuck`]) does its work when it is no longer stuck, or never;
//! - machines do not run: `VM.start` changes a word, and [`Server::write_disk`] is the guest;
//! - records have the fields that clients of backup read, with their types; not each field of each version.

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
