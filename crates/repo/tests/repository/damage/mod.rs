//! Every kind of object, damaged in every way, followed by the steps of a user.
//!
//! The matrix of kinds and damages is in `matrix.rs`. The return of old states is tested in `../put_back.rs`.
//!
//! For each case: open, list, restore, verify, scrub, back up again, repair, heal. Damage is always found; a restore
//! gives exactly the right bytes or an error; and if the data exists elsewhere, everything is restored in the end.

#![allow(clippy::print_stdout, reason = "it prints the case that fails")]

mod base;
mod directory;
mod found;
mod healed;
mod kinds;
mod matrix;

const KIB: u64 = 1024;
