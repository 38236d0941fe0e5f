//! What a guest believes itself to be: its name, and the keys and numbers that it made when it was first started.
//!
//! Two machines with one `/etc/machine-id` get one address by DHCP, and two with one SSH host key cannot be distinguished. virt-sysprep knows
//! the systems and their files; it starts a small machine of its own for that, and has to be on this host.

use std::fs::File;
use std::path::{Path, PathBuf};

use holdfast_host::{ToolError, Tools};
use holdfast_image::Format;

use crate::job::error::CloneError;
use crate::job::{Error, Result};

/// What is made anew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestIdentity {
    /// What the guest is to call itself; none where it keeps its name.
    pub host_name: Option<String>,
    /// The path of virt-sysprep; its name where that is not known.
    pub program: PathBuf,
}

/// The program that knows guests.
pub const SYSPREP: &str = "virt-sysprep";
/// What identifies a guest, and nothing else of all that virt-sysprep can do: no accounts, no logs, no configuration. `customize` gives it
/// its name, and a random seed of its own.
const OPERATIONS: &str = "machine-id,ssh-hostkeys,net-hwaddr,udev-persistent-net,dhcp-client-state,customize";

/// What is done in the guest when its keys are gone: Debian and its like make no new ones by themselves, and sshd does not start without. Where others
/// do, ours would have the wrong labels for SELinux.
const NEW_KEYS: &str = "if [ -e /etc/debian_version ] && command -v ssh-keygen >/dev/null; then ssh-keygen -A; fi";

/// Has virt-sysprep make a guest's identity anew, in its images, which no process uses; durably. Errors call it `name`.
///
/// # Errors
/// virt-sysprep is not on this host, finds no system that it knows in the images, or does not get to its end.
pub(crate) fn renew_guest(
    name: &Path,
    images: &[(&Path, Format)],
    identity: &GuestIdentity,
    tools: &dyn Tools,
) -> Result<()> {
    let wrong = |reason: String| CloneError::GuestIdentity {
        path: name.to_owned(),
        reason,
    };
    let mut added = Vec::new();
    for (path, format) in images {
        let path = path
            .to_str()
            .ok_or_else(|| wrong("its path is not valid UTF-8".to_owned()))?;
        added.extend(["--format", format.qemu_name(), "--add", path]);
    }
    let mut words = vec!["--quiet", "--operations", OPERATIONS, "--run-command", NEW_KEYS];
    if let Some(name) = &identity.host_name {
        words.extend(["--hostname", name]);
    }
    words.extend(added);
    let program = identity.program.to_str().unwrap_or(SYSPREP);
    let reason = match tools.ask(program, &words) {
        Ok(answer) if answer.is_success => return sync(images),
        // What comes after an empty line is how to report bugs.
        Ok(answer) => answer.stderr.trim().split("\n\n").next().unwrap_or_default().to_owned(),
        Err(ToolError::NotFound { .. }) => format!("there is no {SYSPREP} on this host"),
        Err(error) => error.to_string(),
    };
    Err(wrong(reason).into())
}

fn sync(images: &[(&Path, Format)]) -> Result<()> {
    for (path, _) in images {
        let synced = File::open(path).and_then(|file| file.sync_all());
        synced.map_err(|source| Error::File {
            action: "sync",
            path: (*path).to_owned(),
            source,
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Mutex;

    use holdfast_host::{Answer, ToolError, Tools};
    use holdfast_image::Format;

    use super::{GuestIdentity, SYSPREP, renew_guest};

    /// Records each call, and gives the prepared answers.
    struct Scribe {
        asked: Mutex<Vec<String>>,
        answer: fn() -> Result<Answer, ToolError>,
    }

    impl Tools for Scribe {
        fn ask(&self, program: &str, arguments: &[&str]) -> Result<Answer, ToolError> {
            let line = format!("{program} {}", arguments.join(" "));
            self.asked.lock().unwrap().push(line);
            (self.answer)()
        }
    }

    fn identity(host_name: Option<&str>) -> GuestIdentity {
        GuestIdentity {
            host_name: host_name.map(str::to_owned),
            program: SYSPREP.into(),
        }
    }

    fn ask(identity: &GuestIdentity, answer: fn() -> Result<Answer, ToolError>) -> (String, Result<(), String>) {
        let scribe = Scribe {
            asked: Mutex::default(),
            answer,
        };
        // Files that are there, since they are synced; nothing writes to them.
        let (system, data) = (Path::new("Cargo.toml"), Path::new("src/lib.rs"));
        let images = [(system, Format::Qcow2), (data, Format::Raw)];
        let outcome = renew_guest(Path::new("web2"), &images, identity, &scribe);
        let asked = scribe.asked.into_inner().unwrap().remove(0);
        (asked, outcome.map_err(|error| error.to_string()))
    }

    #[test]
    fn only_what_identifies_a_guest_is_made_anew() {
        let well = || {
            Ok(Answer {
                is_success: true,
                output: String::new(),
                stderr: String::new(),
            })
        };
        let (asked, outcome) = ask(&identity(None), well);
        outcome.unwrap();
        assert!(
            asked.starts_with("virt-sysprep --quiet --operations machine-id,ssh-hostkeys,"),
            "{asked}"
        );
        assert!(
            !asked.contains("--hostname")
                && asked.ends_with("--format qcow2 --add Cargo.toml --format raw --add src/lib.rs"),
            "{asked}"
        );
        let (asked, outcome) = ask(&identity(Some("web2")), well);
        outcome.unwrap();
        assert!(
            asked.contains(",customize --run-command ") && asked.contains(" --hostname web2 --format qcow2 --add"),
            "{asked}"
        );
    }

    #[test]
    fn its_complaints_are_reported() {
        let badly = || {
            Ok(Answer {
                is_success: false,
                output: String::new(),
                stderr: "virt-sysprep: error: no operating systems were found\n\nIf reporting bugs...\n".to_owned(),
            })
        };
        let (_, outcome) = ask(&identity(None), badly);
        assert!(outcome.unwrap_err().ends_with("no operating systems were found"));
        let missing = || {
            Err(ToolError::NotFound {
                program: "virt-sysprep".to_owned(),
            })
        };
        let (_, outcome) = ask(&identity(None), missing);
        assert!(outcome.unwrap_err().contains("there is no virt-sysprep"));
    }
}
