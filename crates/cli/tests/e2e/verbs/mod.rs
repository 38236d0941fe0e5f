//! The verbs from end to end, on small images.

mod backups;
mod crashes;
mod keys;
mod refusals;
mod restores;
mod retention;
