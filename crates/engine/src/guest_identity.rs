//! What a guest believes itself to be: its name, and the keys and numbers that it made when it was first started.
//!
//! Two machines with one `/etc/machine-id` get one address by DHCP, and two with one SSH host key cannot be told apart. virt-sysprep knows
//! the systems and their files; it starts a small machine of its own for that, and has to be on this host.

use std::path::Path;

use holdfast_host::{ToolError, Tools};
use holdfast_image::Format;

use crate::clone_error::CloneError;
use crate::error::Result;

/// What is made anew.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GuestIdentity {
    /// What the guest is to call itself; none where it keeps its name.
    pub host_name: Option<String>,
}

const PROGRAM: &str = "virt-sysprep";
/// What identifies a guest, and nothing else of all that virt-sysprep can do: no accounts, no logs, no configuration.
const OPERATIONS: &str = "machine-id,ssh-hostkeys,net-hwaddr,udev-persistent-net,dhcp-client-state,random-seed";

/// Has virt-sysprep make a guest's identity anew, in the image at `path`, which nobody uses.
pub(crate) fn renew_guest(path: &Path, format: Format, identity: &GuestIdentity, tools: &dyn Tools) -> Result<()> {
    let path = path.to_str().ok_or_else(|| CloneError::GuestIdentity {
        path: path.to_owned(),
        reason: "its path is no text".to_owned(),
    })?;
    let operations = match identity.host_name {
        Some(_) => format!("{OPERATIONS},customize"),
        None => OPERATIONS.to_owned(),
    };
    let mut words = vec!["--quiet", "--format", format.qemu_name(), "--operations", &operations];
    if let Some(name) = &identity.host_name {
        words.extend(["--hostname", name]);
    }
    words.extend(["--add", path]);
    let reason = match tools.ask(PROGRAM, &words) {
        Ok(answer) if answer.is_well => return Ok(()),
        Ok(answer) => answer.complaint.trim().to_owned(),
        Err(ToolError::NotThere { .. }) => format!("there is no {PROGRAM} on this host"),
        Err(error) => error.to_string(),
    };
    let path = path.into();
    Err(CloneError::GuestIdentity { path, reason }.into())
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Mutex;

    use holdfast_host::{Answer, ToolError, Tools};
    use holdfast_image::Format;

    use super::{GuestIdentity, renew_guest};

    /// Writes down what it is asked, and answers as it was told.
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

    fn ask(identity: &GuestIdentity, answer: fn() -> Result<Answer, ToolError>) -> (String, Result<(), String>) {
        let scribe = Scribe {
            asked: Mutex::default(),
            answer,
        };
        let outcome = renew_guest(Path::new("/images/web2.qcow2"), Format::Qcow2, identity, &scribe);
        let asked = scribe.asked.into_inner().unwrap().remove(0);
        (asked, outcome.map_err(|error| error.to_string()))
    }

    #[test]
    fn only_what_identifies_a_guest_is_made_anew() {
        let well = || {
            Ok(Answer {
                is_well: true,
                output: String::new(),
                complaint: String::new(),
            })
        };
        let (asked, outcome) = ask(&GuestIdentity::default(), well);
        outcome.unwrap();
        assert!(
            asked.starts_with("virt-sysprep --quiet --format qcow2 --operations machine-id,ssh-hostkeys,"),
            "{asked}"
        );
        assert!(
            !asked.contains("customize") && asked.ends_with("--add /images/web2.qcow2"),
            "{asked}"
        );
        let named = GuestIdentity {
            host_name: Some("web2".to_owned()),
        };
        let (asked, outcome) = ask(&named, well);
        outcome.unwrap();
        assert!(asked.contains(",customize --hostname web2 --add"), "{asked}");
    }

    #[test]
    fn what_it_complains_of_is_told() {
        let badly = || {
            Ok(Answer {
                is_well: false,
                output: String::new(),
                complaint: "virt-sysprep: error: no operating systems were found\n".to_owned(),
            })
        };
        let (_, outcome) = ask(&GuestIdentity::default(), badly);
        assert!(outcome.unwrap_err().ends_with("no operating systems were found"));
        let missing = || {
            Err(ToolError::NotThere {
                program: "virt-sysprep".to_owned(),
            })
        };
        let (_, outcome) = ask(&GuestIdentity::default(), missing);
        assert!(outcome.unwrap_err().contains("there is no virt-sysprep"));
    }
}
