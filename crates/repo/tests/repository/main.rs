//! Tests of the public interface: committed snapshots survive crashes, damage, loss and concurrent processes.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

mod changes;
mod claims;
#[path = "../common/mod.rs"]
mod common;
mod copies;
mod crash;
mod damage;
mod diff;
mod forget;
mod kill;
mod loss;
mod lost_packs;
mod model;
mod put_back;
mod races;
mod relocations;
mod store_crash;
mod store_file_systems;
mod story;
mod streams;
mod unfinished;
mod world;
