//! The program `holdfast`: parse, call the engine, print.
//!
//! A verb is a file in [`commands`]: its arguments, its examples, and a function that turns them into a typed report.
//! Everything around that is here once: the options that all verbs share ([`args`]), passwords, errors with a hint what
//! to do next ([`errors`]), exit codes ([`exit`]), and the three ways in which a report reaches a person or a script
//! ([`output`]).

pub mod args;
pub mod command;
pub mod commands;
pub mod context;
pub mod datasets;
pub mod environment;
pub mod errors;
pub mod exit;
pub mod finding;
pub mod guests;
pub mod holdfast_file;
pub mod interrupt;
pub mod kernel;
pub mod machines;
mod no_image;
pub mod output;
pub mod password;
pub mod pools;
pub mod program;
pub mod prometheus;
pub mod runs;
pub mod sanoid_file;
pub mod search_path;
pub mod service;
pub mod snapshot;
pub mod standard_streams;
pub mod states;
pub mod terminal;
pub mod time;
pub mod units;
pub mod virtualbox;
