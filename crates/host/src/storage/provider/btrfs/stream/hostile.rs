//! Fuzz target for streams of a hostile sender, with correct checksums.

use std::io::{Cursor, Read as _};
use std::os::fd::OwnedFd;

use holdfast_block::hostile::Outcome;

use super::command::{BODY_BYTES_MAX, Command, CommandHead, HEAD_LENGTH, MAGIC, Verb, put};
use super::gate::{BtrfsAnnouncement, BtrfsGate, ParentSnapshot};
use super::replay::{Files, replay};
use super::specimen::{PARENT, PARENT_HERE, StreamWriter, valid_full};
use crate::Uuid;
use crate::storage::provider::incoming::{Notes, StreamCheck};

const HIDDEN: &str = ".incoming+";
/// A folder that contains files, folders and links on every host.
const PARENT_FOLDER: &str = "/proc/self";

/// A btrfs stream. The output is harmless, and is complete only if the input is complete.
pub(crate) fn btrfs_stream(bytes: &[u8]) -> Outcome {
    let announced = BtrfsAnnouncement {
        snapshot: None,
        names: vec!["taken".to_owned()],
        parent: Box::new(|identity| {
            let folder = std::fs::File::open(PARENT_FOLDER).ok()?;
            (identity == Uuid::from_bytes(PARENT).to_string()).then(|| ParentSnapshot {
                uuid: Uuid::from_bytes(PARENT_HERE),
                folder: OwnedFd::from(folder),
            })
        }),
        hidden_prefix: HIDDEN,
    };
    let (gate, arrived) = BtrfsGate::new(announced, Notes::default());
    let mut passed = Vec::new();
    let stream = Cursor::new(with_checksums(bytes));
    let read = StreamCheck::of(Box::new(gate))
        .guard(Box::new(stream))
        .read_to_end(&mut passed);
    let commands = commands_of(&passed);
    let ends = commands.iter().filter(|command| command.verb == Verb::End).count();
    let arrived = arrived.lock().expect("no thread panics with it").take();
    assert_eq!(
        ends == 1,
        arrived.is_some() && read.is_ok(),
        "an end that passes is the end"
    );
    assert!(ends == 0 || commands.last().is_some_and(|command| command.verb == Verb::End));
    match commands.first().map(|command| command.verb) {
        None => {}
        Some(Verb::Subvolume) => replay(&commands, Files::new()),
        Some(Verb::Snapshot) => assert!(
            !passed.windows(16).any(|window| window == PARENT),
            "the parent is that of here"
        ),
        Some(other) => assert_eq!(other, Verb::Subvolume, "what a stream begins with"),
    }
    if arrived.is_some() {
        Outcome::Decoded
    } else {
        Outcome::Refused
    }
}

fn commands_of(bytes: &[u8]) -> Vec<Command> {
    let Some(mut rest) = bytes.get(MAGIC.len() + 4..) else {
        return Vec::new();
    };
    let mut commands = Vec::new();
    while let Some((head, after)) = rest.split_first_chunk::<HEAD_LENGTH>() {
        let head = CommandHead::parse(head).expect("what passes has a head");
        let (body, after) = after.split_at(head.body_length);
        commands.push(Command::parse(&head, body).expect("what passes is a command"));
        rest = after;
    }
    assert!(rest.is_empty(), "what passes is whole");
    commands
}

/// The stream with correct checksums in all commands, as an attacker would send it.
fn with_checksums(bytes: &[u8]) -> Vec<u8> {
    let Some((start, mut rest)) = bytes.split_at_checked(MAGIC.len() + 4) else {
        return bytes.to_vec();
    };
    let mut repaired = start.to_vec();
    while let Some((head, after)) = rest.split_first_chunk::<HEAD_LENGTH>() {
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        let body = usize::try_from(length).ok().and_then(|length| after.get(..length));
        let Some(body) = body.filter(|body| body.len() <= BODY_BYTES_MAX) else {
            break;
        };
        put(u16::from_le_bytes([head[4], head[5]]), body, &mut repaired);
        rest = &after[body.len()..];
    }
    repaired.extend(rest);
    repaired
}

/// Valid streams.
pub(crate) fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    vec![
        ("btrfs_stream", "full", valid_full()),
        ("btrfs_stream", "increment", increment_on_parent_folder()),
    ]
}

/// A valid increment on [`PARENT_FOLDER`], with paths of its files, folders and links.
fn increment_on_parent_folder() -> Vec<u8> {
    StreamWriter::increment()
        .rename("fd", "o258-7-0")
        .make(Verb::MakeFolder, "o300-9-0")
        .rename("o300-9-0", "fd")
        .rename("o258-7-0", "fd/old")
        .write("status", b"new data")
        .clone_range("status", PARENT, "status")
        .of_path(Verb::Unlink, "cwd")
        .end()
}
