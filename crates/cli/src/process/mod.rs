//! The program as a process: its environment, signals, clock, terminal and streams.

pub mod command;
pub mod environment;
pub mod interrupt;
pub mod kernel;
pub mod search_path;
pub mod service;
pub mod standard_streams;
pub mod terminal;
pub mod time;
