//! Looks up other programs in PATH.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::context::Context;
use crate::process::environment;

/// The path of the program with this name.
pub fn find(name: &str, context: &Context) -> Option<PathBuf> {
    let path = context.variable(environment::PATH)?;
    let is_program = |path: &Path| {
        path.metadata()
            .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(path)
        .map(|folder| folder.join(name))
        .find(|path| path.is_absolute() && is_program(path))
}
