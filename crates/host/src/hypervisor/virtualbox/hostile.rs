//! Fuzz target for answers of `VBoxManage`: see [`holdfast_block::hostile`].

use holdfast_block::hostile::Outcome;

use super::answers::{ErrorMessage, info_of, machines_of, snapshot_of};
use crate::MachineState;

const RUNNING: &str = include_str!("../../../tests/transcripts/virtualbox/showvminfo-running.txt");
const LIST: &str = include_str!("../../../tests/transcripts/virtualbox/list-vms.txt");
const TAKE: &str = include_str!("../../../tests/transcripts/virtualbox/snapshot-take.txt");
const LOCKED: &str = include_str!("../../../tests/transcripts/virtualbox/error-locked.txt");

/// Valid bytes.
pub(crate) fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let seed = |name, text: &str| ("vboxmanage", name, text.as_bytes().to_vec());
    vec![
        seed("running", RUNNING),
        seed("list", LIST),
        seed("snapshot", TAKE),
        seed("locked", LOCKED),
        seed("without-words", "VBoxManage: error: \n"),
    ]
}

/// Parses an answer with every parser.
pub(crate) fn answer(bytes: &[u8]) -> Outcome {
    let text = String::from_utf8_lossy(bytes);
    assert!(!ErrorMessage::of(&text).message.is_empty(), "an error without words");
    let machines = machines_of(&text).unwrap_or_default();
    assert!(
        machines.iter().all(|machine| machine.uuid.len() == 36),
        "a UUID that is none"
    );
    let snapshot = snapshot_of(&text);
    match info_of(&text) {
        Ok(info) => {
            let states: Vec<&str> = text.lines().filter(|line| line.starts_with("VMState=\"")).collect();
            let is_said = states.iter().all(|line| *line == states[0]);
            assert!(
                is_said || info.state.state() == MachineState::Between,
                "two states, and one is believed"
            );
            Outcome::Decoded
        }
        Err(_) if snapshot.is_some() || !machines.is_empty() => Outcome::Decoded,
        Err(_) if text.contains(": error: ") => Outcome::Decoded,
        Err(_) => Outcome::Refused,
    }
}
