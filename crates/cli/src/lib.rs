//! The program `holdfast`: parse, call the engine, print.
//!
//! The modules. Each uses only those above it:
//!
//! | module | content |
//! |---|---|
//! | [`process`] | the program as a process: environment, signals, clock, terminal |
//! | [`exit`], [`units`] | exit codes; formatting and parsing of sizes and durations |
//! | [`errors`] | any failure, with its exit code, a word for scripts, and a hint what to do next |
//! | [`args`] | options that several verbs have, and the verbs as data |
//! | [`output`] | reports, progress, notes and errors, as text and as JSON |
//! | [`context`] | the context of a verb: options, passwords, configuration, streams, prompts and reports |
//! | [`machines`] | the machines and datasets that the words of a command line select, and the connections to
//! them |
//! | [`commands`] | the verbs: a folder for each group of the help, a file for each verb |
//! | [`program`] | from the command line to the exit code |

pub mod args;
pub mod commands;
pub mod context;
pub mod errors;
pub mod exit;
pub mod machines;
pub mod output;
pub mod process;
pub mod program;
pub mod units;

/// The program name and version that are recorded in snapshots.
const PROGRAM: &str = concat!("holdfast ", env!("CARGO_PKG_VERSION"));
