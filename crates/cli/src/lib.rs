//! The program `holdfast`: parse, call the engine, print.
//!
//! The rooms, each of which uses only those above it:
//!
//! | room | what is in it |
//! |---|---|
//! | [`process`] | the program as a process: environment, signals, clock, terminal |
//! | [`exit`], [`units`] | exit codes; sizes and durations as people read and write them |
//! | [`errors`] | any failure, with its exit code, a word for scripts, and a hint what to do next |
//! | [`args`] | options that several verbs have, and the verbs as data |
//! | [`output`] | how answers, progress, notes and errors reach people and scripts |
//! | [`context`] | what a verb gets: options, passwords, configuration, streams, the ways to ask and to answer |
//! | [`machines`] | which machines and datasets the words of a command line mean, and the way to them |
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

/// What snapshots name as the program that made them.
const PROGRAM: &str = concat!("holdfast ", env!("CARGO_PKG_VERSION"));
