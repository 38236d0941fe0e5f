//! The emulated TPM of a QEMU without a management layer.
//!
//! QEMU reports only the name of a channel. QEMU's command line has the socket of the channel, and the command line
//! of the swtpm at the other end has the path of the state.

use std::path::PathBuf;

use serde_json::Value;

use crate::hypervisor::swtpm::at_socket;
use crate::hypervisor::tpm::{Tpm, TpmPlace};
use crate::qemu::qom::text;
use crate::system::processes::Process;

/// Finds the emulated TPM in QEMU's answer to `query-tpm`.
pub(super) fn find(answer: &Value, qemu: Option<&Process>) -> Option<Tpm> {
    let channel = emulator_channel(answer)?;
    let arguments = qemu.and_then(|qemu| Some((qemu, qemu.command_line()?)));
    let socket = arguments.and_then(|(qemu, arguments)| Some(qemu.resolve(&socket_of(&arguments, &channel)?)));
    let Some(socket) = socket else {
        return Some(Tpm {
            version: None,
            place: TpmPlace::Unknown(format!(
                "QEMU does not report its path, and the target of the channel {channel} is unknown"
            )),
        });
    };
    Some(match at_socket(&socket) {
        Some((version, place)) => Tpm {
            version: Some(version),
            place,
        },
        None => Tpm {
            version: None,
            place: TpmPlace::Unknown(format!(
                "QEMU does not report its path, and no swtpm listens at {}",
                socket.display()
            )),
        },
    })
}

fn emulator_channel(answer: &Value) -> Option<String> {
    let mut tpms = answer.as_array()?.iter();
    let options = tpms.find_map(|tpm| tpm.get("options").filter(|options| options["type"] == "emulator"))?;
    Some(text(options.get("data")?, "chardev").unwrap_or_default())
}

/// The socket of a channel in QEMU's command line: `-chardev socket,id=tpm,path=/run/tpm.sock`. A comma in a path is
/// doubled.
fn socket_of(arguments: &[String], channel: &str) -> Option<PathBuf> {
    let values = arguments
        .windows(2)
        .filter(|pair| pair[0] == "-chardev" || pair[0] == "--chardev");
    let sockets = values.filter_map(|pair| pair[1].strip_prefix("socket,"));
    sockets.map(parts).find_map(|parts| {
        let value = |name: &str| parts.iter().find(|(key, _)| key == name).map(|(_, value)| value);
        (value("id")? == channel).then(|| value("path").map(PathBuf::from))?
    })
}

/// Splits an option of QEMU into its key and value pairs, and replaces doubled commas by single ones.
fn parts(text: &str) -> Vec<(String, String)> {
    // An option cannot contain a zero byte.
    let text = text.replace(",,", "\0");
    let parts = text.split(',').filter_map(|part| part.split_once('='));
    parts
        .map(|(key, value)| (key.to_owned(), value.replace('\0', ",")))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::{find, socket_of};
    use crate::hypervisor::tpm::TpmPlace;

    #[test]
    fn only_an_emulated_tpm_is_found() {
        let of = |kind: &str| {
            find(
                &json!([{ "id": "t", "model": "tpm-tis", "options": { "type": kind, "data": {} } }]),
                None,
            )
        };
        assert!(of("passthrough").is_none() && find(&json!([]), None).is_none());
        assert!(matches!(of("emulator").unwrap().place, TpmPlace::Unknown(_)));
    }

    #[test]
    fn the_socket_of_a_channel_is_found_in_the_command_line() {
        let arguments = "qemu -chardev socket,id=a,path=/a -chardev socket,path=/run/x,,y,id=tpm,reconnect=1 -chardev pty,id=p -chardev";
        let arguments: Vec<String> = arguments.split(' ').map(str::to_owned).collect();
        assert_eq!(socket_of(&arguments, "tpm"), Some(PathBuf::from("/run/x,y")));
        assert_eq!(socket_of(&arguments, "p"), None);
        assert_eq!(socket_of(&arguments, ""), None);
    }
}
