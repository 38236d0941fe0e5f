//! What a request of a client counts for.

use crate::stream::Origin;

/// The share of workers and memory that a request counts for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClientKey {
    pub(crate) origin: Origin,
    pub(crate) connection: u64,
}
