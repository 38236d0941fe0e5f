//! Every kind of object, damaged in every way, and what a user does next.
//!
//! The matrix of kinds and damages is in `matrix.rs`. Old states that are put back are in `../put_back.rs`.
//!
//! For each case: open, list, restore, verify, scrub, back up again, repair, heal. Damage is always found; a restore gives exactly
//! the right bytes or an error; and where the data existed somewhere, everything is whole in the end.

#![allow(clippy::print_stdout, reason = "it prints the case that fails")]

mod base;
mod directory;
mod found;
mod healed;
mod kinds;
mod matrix;

const KIB: u64 = 1024;
