//! The program as a process: its environment, signals, clock and terminal.

pub mod command;
pub mod environment;
pub mod interrupt;
pub mod kernel;
pub mod log;
pub mod panic;
pub mod terminal;
pub mod time;
