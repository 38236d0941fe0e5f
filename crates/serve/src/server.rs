//! What the servers of all protocols share: listeners, limits, the table of connections, memory, and worker threads.
//!
//! Several servers of a process can share their [`ServerResources`](resources::ServerResources): the limits then apply to
//! all of them together.
//!
//! ```text
//! listen ─► connections        one thread per client, within the limits
//!               ├─ receive     received bytes, and how long to wait for more
//!               ├─ dispatch    in the connection's thread, or in a worker
//!               ├─ workers     threads for slow requests, in turns
//!               ├─ budget      memory for requests, for the whole process
//!               └─ outbox      replies to send, batched in one call
//! ```

pub(crate) mod budget;
pub(crate) mod client;
pub(crate) mod client_key;
pub(crate) mod connections;
pub(crate) mod dispatch;
pub(crate) mod export_device;
pub(crate) mod limits;
pub(crate) mod listen;
pub(crate) mod outbox;
pub(crate) mod peer;
pub(crate) mod receive;
pub(crate) mod resources;
pub(crate) mod workers;
