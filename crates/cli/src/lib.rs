//! The program `holdfast`: parse, call the engine, print.

pub mod exit;
pub mod time;
pub mod units;
