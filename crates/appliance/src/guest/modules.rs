//! Modules of the appliance's kernel, from the initrd.

use std::fs::{self, File};
use std::io;

use rustix::io::Errno;
use rustix::system::finit_module;

use crate::initrd::MODULE_LIST;

/// Loads a module and those that it needs. A module that the kernel does not have is not an error: it may be built in.
pub(super) fn load(module: &str) -> io::Result<()> {
    let list = fs::read_to_string(format!("/{MODULE_LIST}"))?;
    let files = list.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(module)).then(|| words.map(str::to_owned).collect::<Vec<_>>())
    });
    for number in files.unwrap_or_default() {
        let file = File::open(format!("/modules/{number}"))?;
        match finit_module(&file, c"", 0) {
            Ok(()) | Err(Errno::EXIST) => {}
            // Code for a processor that this is not.
            Err(Errno::NODEV | Errno::NOENT) => return Ok(()),
            Err(error) => return Err(io::Error::other(format!("module {module}: {}", io::Error::from(error)))),
        }
    }
    Ok(())
}

/// Loads modules, whose absence shows later.
pub(super) fn try_load(modules: &[&str]) {
    for module in modules {
        if let Err(error) = load(module) {
            super::report(&error.to_string());
        }
    }
}
