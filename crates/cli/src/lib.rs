//! The program `holdfast`: parse, call the engine, print.
//!
//! A verb is a file in [`commands`]: its arguments, its examples, and a function that turns them into a typed report.
//! Everything around that is here once: the options that all verbs share ([`args`]), passwords, errors with a hint what
//! to do next ([`errors`]), exit codes ([`exit`]), and the three ways in which a report reaches a person or a script
//! ([`output`]).

pub mod args;
pub mod commands;
pub mod context;
pub mod errors;
pub mod exit;
pub mod files;
pub mod machines;
pub mod output;
pub mod process;
pub mod program;

/// What snapshots name as the program that made them.
const PROGRAM: &str = concat!("holdfast ", env!("CARGO_PKG_VERSION"));
