//! The program as scripts and users see it: exit codes, streams, documents and help.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod answers;
mod completion;
mod documents;
mod help;
mod host;
mod interrupts;
mod live_copies;
mod machines;
mod migrations;
mod nbdkit;
mod packaging;
mod parsers;
mod program;
mod qemu_nbd;
mod replication;
mod rig;
mod schedules;
mod sysprep;
mod template_forgeries;
mod template_tags;
mod templates;
mod terminals;
mod tls_link;
mod verbs;
mod writing_guest;
