//! File systems made by the programs and the kernel that guests use, compared byte for byte with what was stored.
//!
//! A missing program fails its test. Tests that need root or a mount are skipped without it, and print why.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a test fails where its surroundings do, and they are programs of the system"
)]

mod compare;
mod exfat;
mod ext;
mod fat;
mod ntfs;
mod place;
mod process;
mod tree;
mod volumes;
mod xfs;
