//! The server against clients: well-behaved ones, hostile ones, and those of other projects.

mod cases;
mod clients;
mod comparison;
mod tls;
mod whole;
