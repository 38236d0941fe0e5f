//! The server with clients: correct ones, hostile ones, and those of other projects.

use std::sync::Arc;

use holdfast_serve::nbd::{Export, ExportDevice};

mod clients;
mod comparison;
mod devices;
mod exports;
mod limits;
mod option_cases;
mod registry;
mod request_cases;
mod tls;

const SIZE: u64 = 1_000_003;

fn writable(device: impl holdfast_block::BlockDeviceMut + 'static) -> Export {
    Export::new("disk", ExportDevice::Writable(Arc::new(device)))
}
