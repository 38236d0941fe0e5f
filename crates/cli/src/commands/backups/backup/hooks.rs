//! Options of `backup` for the administrator's hook programs.

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_engine::{HookFailure, Hooks, MachineName};
use holdfast_host::Machine;

use crate::errors::Error;
use crate::process::environment;

/// Which programs are called on the way, and what they may do.
#[derive(Debug, clap::Args)]
pub(crate) struct HookArgs {
    /// Call this program at job-start, pre-freeze, post-thaw, and job-end or job-abort; the event is its argument
    #[arg(long, value_name = "FILE")]
    hook: Option<PathBuf>,
    /// Call all programs in this folder, in the order of their names, after those of --hook
    #[arg(long, value_name = "FOLDER")]
    hook_folder: Option<PathBuf>,
    /// Time limit of each call; the program is killed after it
    #[arg(long, value_name = "SECONDS", default_value = "30")]
    hook_timeout: NonZeroU64,
    /// What to do when a hook fails before the machine is touched
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = Failure::Abort)]
    hook_failure: Failure,
}

/// What a failing call means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Failure {
    /// Do not back up the machine
    Abort,
    /// Back up with a warning
    Warn,
}

impl HookArgs {
    /// The first of these options that was given.
    pub(super) fn given(&self) -> Option<&'static str> {
        let given = [
            (self.hook.is_some(), "--hook"),
            (self.hook_folder.is_some(), "--hook-folder"),
        ];
        given.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name)
    }

    /// The hooks for machines of `hypervisor`.
    ///
    /// # Errors
    /// The folder cannot be read; otherwise its programs would be skipped silently.
    pub(super) fn hooks(&self, hypervisor: &str) -> Result<Hooks, Error> {
        let mut programs: Vec<PathBuf> = self.hook.iter().cloned().collect();
        if let Some(folder) = &self.hook_folder {
            programs.extend(programs_in(folder).map_err(|source| Error::File {
                action: "read the folder",
                path: folder.clone(),
                source,
            })?);
        }
        // A name without a slash would be searched in PATH.
        let programs = programs
            .into_iter()
            .map(|path| std::path::absolute(&path).unwrap_or(path));
        Ok(Hooks {
            programs: programs.collect(),
            time_out: Duration::from_secs(self.hook_timeout.get()),
            on_failure: match self.hook_failure {
                Failure::Abort => HookFailure::Abort,
                Failure::Warn => HookFailure::Warn,
            },
            withheld: vec![environment::PASSWORD.to_owned()],
            hypervisor: hypervisor.to_owned(),
        })
    }
}

/// The arguments that the watchdog needs to call the hooks.
pub(super) fn words(hooks: &Hooks, listed: &MachineName, machine: &dyn Machine) -> Result<Vec<OsString>, Error> {
    if hooks.programs.is_empty() {
        return Ok(Vec::new());
    }
    let uuid = machine.describe().map_err(holdfast_engine::Error::from)?.summary.uuid;
    let mut words: Vec<OsString> = ["--listed", &listed.to_string(), "--uuid", &uuid]
        .map(OsString::from)
        .into();
    words.extend(["--hook-timeout".into(), hooks.time_out.as_secs().to_string().into()]);
    words.extend(
        hooks
            .programs
            .iter()
            .flat_map(|program| ["--hook".into(), program.into()]),
    );
    Ok(words)
}

/// The executable files of a folder, sorted by name, without hidden files and backup files of editors.
fn programs_in(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut programs = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let metadata = std::fs::metadata(entry.path())?;
        let is_executable = metadata.is_file() && metadata.permissions().mode() & 0o111 != 0;
        if is_executable && !name.starts_with('.') && !name.ends_with('~') {
            programs.push(entry.path());
        }
    }
    programs.sort();
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::programs_in;

    #[test]
    fn the_programs_of_a_folder_are_called_by_name_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        for (name, mode) in [
            ("20-b", 0o700),
            ("10-a", 0o755),
            (".hidden", 0o700),
            ("10-a~", 0o700),
            ("README", 0o600),
        ] {
            let path = folder.path().join(name);
            std::fs::File::create(&path).unwrap();
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        std::fs::create_dir(folder.path().join("30-folder")).unwrap();
        let names = ["10-a", "20-b"].map(|name| folder.path().join(name));
        assert_eq!(programs_in(folder.path()).unwrap(), names);
        assert!(programs_in(&folder.path().join("missing")).is_err());
    }
}
