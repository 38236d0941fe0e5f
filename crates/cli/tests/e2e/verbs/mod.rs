//! The verbs from end to end, on small images.

mod backups;
mod clones;
mod configurations;
mod conversions;
mod copies;
mod copy_mishaps;
mod crashes;
mod cut_images;
pub(crate) mod exchanges;
mod full_disks;
mod images;
mod interruptions;
mod kept_images;
mod keys;
mod monitoring;
mod packed_streams;
mod pool_copies;
mod pool_doctor;
mod pool_memory;
mod pool_names;
mod pool_namesakes;
pub(crate) mod pools;
mod refusals;
mod restores;
mod retention;
mod serving;
pub(crate) mod virtualbox;
