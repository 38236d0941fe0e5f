//! The verbs from end to end, on small images.

mod backups;
mod conversions;
mod crashes;
mod interruptions;
mod keys;
mod refusals;
mod restores;
mod retention;
