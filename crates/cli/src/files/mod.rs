//! Files of this host that tell the program what to do, and those where it keeps what it knows from run to run.

pub mod holdfast_file;
pub mod runs;
pub mod sanoid_file;
