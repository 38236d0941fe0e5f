//! The identity of a guest: its host name, and the keys and ids that it created at its first start.
//!
//! Two machines with one `/etc/machine-id` get the same address by DHCP, and two with one SSH host key cannot be
//! distinguished. virt-sysprep knows the operating systems and their files; it starts a small virtual machine for that,
//! and must be installed on this host.

use std::fs::File;
use std::path::{Path, PathBuf};

use holdfast_host::{ToolError, Tools};
use holdfast_image::Format;

use crate::job::error::CloneError;
use crate::job::{Error, Result};

/// The parts of the identity to renew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestIdentity {
    /// The new host name; none to keep the present one.
    pub host_name: Option<String>,
    /// Path of virt-sysprep; its name if the path is unknown.
    pub program: PathBuf,
}

/// The program that modifies guests.
pub const SYSPREP: &str = "virt-sysprep";
/// The operations of virt-sysprep that concern the identity, and no others: accounts, logs and configuration stay.
/// `customize` sets the host name, and a new random seed.
const OPERATIONS: &str = "machine-id,ssh-hostkeys,net-hwaddr,udev-persistent-net,dhcp-client-state,customize";

/// Creates SSH host keys in the guest after the old ones were removed: Debian and its derivatives do not create new
/// ones by themselves, and sshd does not start without them. On other systems, keys created here would have the wrong
/// SELinux labels.
const NEW_KEYS: &str = "if [ -e /etc/debian_version ] && command -v ssh-keygen >/dev/null; then ssh-keygen -A; fi";

/// Renews a guest's identity in its images by virt-sysprep, durably. No process may use the images. Errors contain `name`.
///
/// # Errors
/// virt-sysprep is not installed, finds no known operating system in the images, or fails.
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
        // The text after an empty line only explains how to report bugs.
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

    /// Records each call, and returns prepared answers.
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
        // Existing files, since they are synced; nothing writes to them.
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
