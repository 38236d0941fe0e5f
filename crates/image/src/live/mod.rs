//! A chain of images that changes while it is in use.
//!
//! A *container* is a folder with the layers of one disk, and a file that lists them ([`tree`]). [`LiveChain`] opens it
//! for writing. While the disk is read and written, a snapshot can be taken, layers can be merged, and the disk can
//! grow.
//!
//! A request passes a gate: the lock that a change of the top holds exclusively. The top refers to the layers below it
//! through a [`Seam`](stack::Seam), so layers below can be exchanged without the gate.
//!
//! Every change of the tree is one replacement of a file. What a process that was killed has left is either not listed,
//! and deleted when the container is opened, or a hidden layer, which is merged again: a merge only writes what the
//! layer above hides.

mod chain;
mod collapse;
mod duplicate;
mod folder;
mod grow;
mod layer;
mod merge;
mod mirror;
mod pinned;
mod point;
mod reader;
mod snapshot;
mod stack;
mod switch;
mod tree;

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;

pub use chain::{ChainStatus, LayerStatus, LiveChain, LiveOptions};
pub use collapse::{Collapse, MergeObserver, MergeProgress};
pub use duplicate::{ContainerDuplicate, DuplicateReport, duplicate_container};
pub use folder::{CONTAINER_FILE, ContainerLock};
pub use pinned::{PinnedLayer, PinnedLayers};
pub use point::{Changes, PointInTime};
pub use snapshot::{NewSnapshot, PreparedSnapshot};
pub use switch::{
    CurrentState, NewContainer, SwitchPlan, check_new_container, create_container, is_container, plan_switch, switch,
};
pub use tree::{
    ContainerTree, DESCRIPTOR_FILE, MEMORY_PARTIAL_SUFFIX, MEMORY_PROPERTY, SnapshotEntry, TreeLayer, is_memory_folder,
    new_memory_folder,
};
