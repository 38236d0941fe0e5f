//! Tests of the gate.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::path::Path;

use super::command::{Command, CommandHead, HEAD_LENGTH, Key, MAGIC, Verb, raw};
use super::gate::{Arrival, BtrfsAnnouncement, BtrfsGate, ParentSnapshot};
use super::replay::{Files, ReplayedKind, replay};
use super::specimen::{IDENTITY, NAME, PARENT, PARENT_HERE, StreamWriter, valid_full, valid_increment};
use crate::Uuid;
use crate::storage::provider::incoming::{Incoming, Notes, StreamCheck, StreamRefusal};

const HIDDEN: &str = ".incoming+";

/// A parent snapshot on the disk: `disk`, `link` to it, and `folder` with `file`, `link` and `out`, a link to a path
/// outside.
fn parent() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::File::create(at("disk")).unwrap();
    std::fs::create_dir(at("folder")).unwrap();
    std::fs::File::create(at("folder/file")).unwrap();
    for (name, target) in [("link", "disk"), ("folder/link", "/etc/passwd"), ("folder/out", "/etc")] {
        std::os::unix::fs::symlink(target, at(name)).unwrap();
    }
    folder
}

struct GateOutput {
    commands: Vec<Command>,
    arrived: Option<Arrival>,
    notes: Vec<String>,
}

impl GateOutput {
    fn verbs(&self) -> Vec<Verb> {
        self.commands.iter().map(|command| command.verb).collect()
    }

    /// The paths in all commands of a type.
    fn paths(&self, verb: Verb) -> Vec<String> {
        let commands = self.commands.iter().filter(|command| command.verb == verb);
        commands
            .map(|command| String::from_utf8(command.value(Key::Path).to_vec()).unwrap())
            .collect()
    }
}

fn announced(parent: Option<&Path>) -> BtrfsAnnouncement {
    let folder = parent.map(|path| std::fs::File::open(path).unwrap());
    let known = Uuid::from_bytes(PARENT).to_string();
    BtrfsAnnouncement {
        snapshot: Some((NAME.to_owned(), Uuid::from_bytes(IDENTITY).to_string())),
        names: vec!["daily-0".to_owned()],
        parent: Box::new(move |identity| {
            let folder = folder.as_ref().filter(|_| identity == known)?;
            Some(ParentSnapshot {
                uuid: Uuid::from_bytes(PARENT_HERE),
                folder: OwnedFd::from(folder.try_clone().ok()?),
            })
        }),
        hidden_prefix: HIDDEN,
    }
}

fn commands_of(bytes: &[u8]) -> Vec<Command> {
    if bytes.is_empty() {
        return Vec::new();
    }
    let mut rest = bytes
        .strip_prefix(MAGIC)
        .unwrap()
        .strip_prefix(&1_u32.to_le_bytes())
        .unwrap();
    let mut commands = Vec::new();
    while !rest.is_empty() {
        let (head, after) = rest.split_first_chunk::<HEAD_LENGTH>().unwrap();
        let head = CommandHead::parse(head).unwrap();
        let (body, after) = after.split_at(head.body_length);
        commands.push(Command::parse(&head, body).unwrap());
        rest = after;
    }
    commands
}

fn pass(stream: &[u8], parent: Option<&Path>) -> Result<GateOutput, String> {
    pass_as(stream, announced(parent)).map_err(|(reason, _)| reason)
}

/// The output of the gate; or the reason of a refusal, and the output before it.
fn pass_as(stream: &[u8], announced: BtrfsAnnouncement) -> Result<GateOutput, (String, Vec<Command>)> {
    let notes = Notes::default();
    let (gate, arrived) = BtrfsGate::new(announced, Notes::clone(&notes));
    let mut passed = Vec::new();
    let read = StreamCheck::of(Box::new(gate))
        .guard(Box::new(std::io::Cursor::new(stream.to_vec())))
        .read_to_end(&mut passed);
    if let Err(error) = read {
        let refusal = StreamRefusal::of(&error).expect("memory can be read");
        return Err((refusal.reason.clone(), commands_of(&passed)));
    }
    let notes = std::mem::take(&mut *notes.lock().unwrap());
    let arrived = arrived.lock().unwrap().take();
    Ok(GateOutput {
        commands: commands_of(&passed),
        arrived,
        notes,
    })
}

fn reason(stream: &[u8]) -> String {
    let parent = parent();
    match pass(stream, Some(parent.path())) {
        Ok(passed) => panic!("{:?} has passed the gate", passed.verbs()),
        Err(reason) => reason,
    }
}

#[test]
fn a_valid_subvolume_passes_without_special_files_and_rights() {
    let passed = pass(&valid_full(), None).unwrap();
    let arrived = passed.arrived.as_ref().unwrap();
    assert_eq!((&arrived.name[..], arrived.parent), (NAME, None));
    assert_eq!(arrived.identity, Uuid::from_bytes(IDENTITY));
    assert_eq!(passed.paths(Verb::Subvolume), [format!("{HIDDEN}{NAME}")]);
    // The socket is left out, with all later commands about it.
    assert!(!passed.verbs().contains(&Verb::MakeSocket));
    assert_eq!(passed.paths(Verb::Rename), ["o257-9-0", "o258-9-0", "o259-9-0"]);
    assert_eq!(passed.paths(Verb::Chmod), ["vms/disk.raw"]);
    let modes = passed.commands.iter().filter(|command| command.verb == Verb::Chmod);
    assert_eq!(
        modes.map(|command| command.number(Key::Mode)).collect::<Vec<_>>(),
        [0o755]
    );
    let names = passed.commands.iter().filter(|command| command.verb == Verb::SetXattr);
    assert_eq!(
        names.map(|command| command.value(Key::XattrName)).collect::<Vec<_>>(),
        [b"user.note"]
    );
    assert_eq!(passed.verbs().last(), Some(&Verb::End));
    let notes = passed.notes.join("\n");
    for part in ["vms/monitor.sock", "vms/disk.raw)", "vms/disk.raw: security.capability"] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
}

#[test]
fn a_valid_increment_passes_with_a_parent_of_this_dataset() {
    let parent = parent();
    let passed = pass(&valid_increment(), Some(parent.path())).unwrap();
    let first = &passed.commands[0];
    assert_eq!((first.verb, first.uuid(Key::CloneUuid)), (Verb::Snapshot, PARENT_HERE));
    assert_eq!(
        passed.arrived.as_ref().unwrap().parent,
        Some(Uuid::from_bytes(PARENT_HERE))
    );
    let clone = passed
        .commands
        .iter()
        .find(|command| command.verb == Verb::Clone)
        .unwrap();
    assert_eq!(clone.uuid(Key::CloneUuid), PARENT_HERE);
    // The socket was left out when the parent was received.
    assert_eq!(passed.paths(Verb::Unlink), ["folder/old/link"]);
    let reason = pass(&valid_increment(), None).map(|passed| passed.verbs()).unwrap_err();
    assert!(reason.contains("not a host snapshot of this dataset"), "{reason}");
}

/// A truncated stream has no end record, and every command that passes is complete.
#[test]
fn a_truncated_stream_never_reaches_its_end() {
    let stream = valid_full();
    for length in 0..stream.len() {
        let passed = pass(&stream[..length], None).unwrap();
        assert!(
            passed.arrived.is_none() && !passed.verbs().contains(&Verb::End),
            "{length}"
        );
    }
}

#[test]
fn a_flipped_bit_is_refused_or_has_no_effect() {
    let stream = valid_full();
    for at in 0..stream.len() {
        let mut changed = stream.clone();
        changed[at] ^= 1 << (at % 8);
        if let Ok(passed) = pass(&changed, None) {
            assert!(passed.arrived.is_none(), "{at}: a truncated stream has reached its end");
        }
    }
}

#[test]
fn only_one_subvolume_as_announced_is_received() {
    let other = [0x44; 16];
    for (stream, expected) in [
        (StreamWriter::empty().end(), "begins with End"),
        (
            StreamWriter::empty().make(Verb::MakeFile, "a").end(),
            "begins with MakeFile",
        ),
        (
            StreamWriter::empty().subvolume("daily-2", IDENTITY).end(),
            "was announced",
        ),
        (StreamWriter::empty().subvolume(NAME, other).end(), "was announced"),
        (
            StreamWriter::full().subvolume(NAME, IDENTITY).end(),
            "a second subvolume",
        ),
        (StreamWriter::full().subvolume("x", other).end(), "a second subvolume"),
        ([StreamWriter::full().end(), vec![0]].concat(), "data after its end"),
        (
            [StreamWriter::full().end(), StreamWriter::full().end()].concat(),
            "data after its end",
        ),
        (b"zfs stream or whatever it may be".to_vec(), "not a stream of btrfs"),
        ([&MAGIC[..], &2_u32.to_le_bytes(), &[0; 20]].concat(), "version 1"),
    ] {
        let reason = reason(&stream);
        assert!(reason.contains(expected), "{expected}: {reason}");
    }
    // Without an announcement, any single snapshot with a new name and identity is accepted.
    let unannounced = || BtrfsAnnouncement {
        snapshot: None,
        ..announced(None)
    };
    assert!(pass_as(&StreamWriter::full().end(), unannounced()).is_ok());
    for name in ["daily-0", "..", ".x", "a/b", "", "../daily-9", "/daily-9", "-x", "a\0b"] {
        let stream = StreamWriter::empty().subvolume(name, IDENTITY).end();
        let (_, before) = pass_as(&stream, unannounced()).err().expect("the stream is refused");
        assert!(before.is_empty(), "{name}: commands have passed the gate");
    }
    let parent = parent();
    let twice = BtrfsAnnouncement {
        snapshot: None,
        ..announced(Some(parent.path()))
    };
    let (reason, _) = pass_as(&StreamWriter::empty().subvolume("new", PARENT).end(), twice)
        .err()
        .unwrap();
    assert!(reason.contains("already"), "{reason}");
}

#[test]
fn no_path_leads_out_of_the_subvolume() {
    let bad = [
        "../a", "a/../b", "a/..", "/a", "a//b", "a/", "./a", "a/.", ".", "..", "a\0b", "/",
    ];
    let long = "a/".repeat(3000) + "a";
    let component = "a".repeat(256);
    for path in bad.into_iter().chain([&long[..], &component]) {
        let start = || StreamWriter::full().make(Verb::MakeFile, "file");
        for stream in [
            start().make(Verb::MakeFile, path),
            start().make(Verb::MakeFolder, path),
            start().node(Verb::MakeNode, path),
            start().symlink(path, "x"),
            start().rename(path, "b"),
            start().rename("file", path),
            start().link(path, "b"),
            start().link("file", path),
            start().of_path(Verb::Unlink, path),
            start().of_path(Verb::RemoveFolder, path),
            start().xattr(path, "user.a"),
            start().write(path, b"x"),
            start().clone_range(path, IDENTITY, "file"),
            start().clone_range("file", IDENTITY, path),
            start().chmod(path, 0o600),
            start().chown(path),
            start().utimes(path),
        ] {
            reason(&stream.end());
        }
    }
    // The empty path may only be used for attributes of the subvolume.
    for stream in [
        StreamWriter::full().write("", b"x"),
        StreamWriter::full().rename("", "a"),
        StreamWriter::full().make(Verb::MakeFile, ""),
        StreamWriter::full().of_path(Verb::RemoveFolder, ""),
        StreamWriter::full().rename("a", ""),
    ] {
        reason(&stream.end());
    }
    let passed = pass(&StreamWriter::full().chmod("", 0o6755).chown("").utimes("").end(), None).unwrap();
    assert_eq!(passed.commands[1].number(Key::Mode), 0o755);
}

/// However a link got its name, nothing is written to it or through it.
#[test]
fn nothing_is_written_through_a_link() {
    let link = || StreamWriter::full().symlink("o1", "/etc/passwd");
    let folder = || StreamWriter::full().make(Verb::MakeFolder, "f").symlink("f/l", "/etc");
    let before = StreamWriter::increment;
    for stream in [
        link().write("o1", b"x"),
        link().write("o1/shadow", b"x"),
        link().rename("o1", "a").write("a", b"x"),
        link().link("o1", "a").write("a", b"x"),
        link().clone_range("o1", IDENTITY, "f"),
        link().make(Verb::MakeFile, "f").clone_range("f", IDENTITY, "o1"),
        link().chmod("o1", 0o777),
        link().chmod("o1/shadow", 0o777),
        link().make(Verb::MakeFile, "o1"),
        link().make(Verb::MakeFile, "o1/x"),
        link().make(Verb::MakeFile, "x").rename("x", "o1/x"),
        link().make(Verb::MakeFile, "x").link("o1/x", "y"),
        link().make(Verb::MakeFile, "x").link("x", "o1/x"),
        link().of_path(Verb::Unlink, "o1/x"),
        link().symlink("o1/x", "y"),
        link().command(Verb::Truncate, &[(Key::Path, b"o1"), (Key::Size, &[0; 8])]),
        folder().write("f/l/x", b"x"),
        folder().rename("f", "g").write("g/l", b"x"),
        folder()
            .rename("f", "g")
            .make(Verb::MakeFolder, "f")
            .rename("g", "f/h")
            .write("f/h/l", b"x"),
        // The commands with links of the parent.
        before().write("link", b"x"),
        before().write("folder/link", b"x"),
        before().write("folder/out/shadow", b"x"),
        before().rename("folder", "f").write("f/link", b"x"),
        before()
            .rename("folder", "f")
            .make(Verb::MakeFolder, "g")
            .rename("f", "g/f")
            .write("g/f/out/x", b"x"),
        before().rename("folder/link", "l").write("l", b"x"),
        before().link("folder/link", "l").write("l", b"x"),
        before().make(Verb::MakeFile, "link"),
        before().make(Verb::MakeFile, "folder/link"),
        before().clone_range("disk", IDENTITY, "link"),
        before().clone_range("disk", PARENT, "link"),
        before().clone_range("disk", PARENT, "folder/link"),
        before().clone_range("disk", PARENT, "folder/out/passwd"),
        before().chmod("link", 0o777),
    ] {
        reason(&stream.end());
    }
    // The name of a removed link can be used again.
    let parent = parent();
    for stream in [
        link()
            .of_path(Verb::Unlink, "o1")
            .make(Verb::MakeFile, "o1")
            .write("o1", b"x"),
        before()
            .of_path(Verb::Unlink, "link")
            .make(Verb::MakeFile, "link")
            .write("link", b"x"),
        before()
            .rename("folder/link", "l")
            .make(Verb::MakeFile, "folder/link")
            .write("folder/link", b"x"),
        before()
            .rename("folder", "f")
            .make(Verb::MakeFolder, "folder")
            .write("folder/link", b"x"),
    ] {
        pass(&stream.end(), Some(parent.path())).unwrap_or_else(|reason| panic!("{reason}"));
    }
}

#[test]
fn devices_and_sockets_are_left_out_with_commands_about_them() {
    for verb in [Verb::MakeNode, Verb::MakeFifo, Verb::MakeSocket] {
        let stream = StreamWriter::full()
            .node(verb, "o1")
            .chown("o1")
            .rename("o1", "sda")
            .link("sda", "sdb")
            .xattr("sda", "user.a")
            .utimes("sdb")
            .of_path(Verb::Unlink, "sdb");
        let passed = pass(&stream.end(), None).unwrap();
        assert_eq!(passed.verbs(), [Verb::Subvolume, Verb::End]);
        assert!(passed.notes[0].contains("sda"), "{:?}", passed.notes);
        for stream in [
            StreamWriter::full().node(verb, "x").write("x", b"x"),
            StreamWriter::full().node(verb, "x").rename("x", "y").write("y", b"x"),
            StreamWriter::full().node(verb, "x").link("x", "y").write("y", b"x"),
            StreamWriter::full().node(verb, "x").write("x/y", b"x"),
            StreamWriter::full()
                .node(verb, "x")
                .make(Verb::MakeFile, "f")
                .clone_range("f", IDENTITY, "x"),
            StreamWriter::full().node(verb, "../x"),
        ] {
            reason(&stream.end());
        }
    }
}

#[test]
fn data_is_cloned_only_from_this_subvolume_and_its_parent() {
    let other = [0x55; 16];
    for stream in [
        StreamWriter::full()
            .make(Verb::MakeFile, "f")
            .clone_range("f", other, "f"),
        StreamWriter::full()
            .make(Verb::MakeFile, "f")
            .clone_range("f", PARENT, "disk"),
        StreamWriter::increment().clone_range("disk", other, "disk"),
        StreamWriter::increment().clone_range("disk", PARENT_HERE, "disk"),
        StreamWriter::increment().clone_range("disk", PARENT, "folder"),
        StreamWriter::increment().clone_range("disk", PARENT, "nothing"),
        StreamWriter::increment().clone_range("disk", PARENT, "../disk"),
    ] {
        reason(&stream.end());
    }
}

#[test]
fn commands_have_known_types_and_each_attribute_once() {
    let path = (Key::Path as u16, &b"f"[..]);
    let mode = (Key::Mode as u16, &[0; 8][..]);
    for (verb, values) in [
        (0, vec![]),
        (23, vec![]),
        (25, vec![path]),
        (999, vec![]),
        (Verb::Chmod as u16, vec![path]),
        (Verb::Chmod as u16, vec![mode]),
        (Verb::Chmod as u16, vec![path, mode, mode]),
        (Verb::Chmod as u16, vec![path, path, mode]),
        (Verb::Chmod as u16, vec![path, mode, (Key::Uid as u16, &[0; 8])]),
        (Verb::Chmod as u16, vec![path, (Key::Mode as u16, &[0; 7])]),
        (Verb::Chmod as u16, vec![path, (Key::Mode as u16, &[0; 9])]),
        (Verb::End as u16, vec![path]),
        (
            Verb::UpdateExtent as u16,
            vec![path, (Key::FileOffset as u16, &[0; 8]), (Key::Size as u16, &[0; 8])],
        ),
    ] {
        let command = raw(verb, &values);
        reason(&[StreamWriter::full().0, command, StreamWriter::empty().0].concat());
    }
    // A truncated attribute, and a command of any length.
    for body in [&[1_u8, 0, 9][..], &[15, 0, 255, 255, 1]] {
        let length = u32::try_from(body.len()).unwrap().to_le_bytes();
        let head = [&length[..], &18_u16.to_le_bytes(), &[0; 4]].concat();
        reason(&[StreamWriter::full().0, head, body.to_vec()].concat());
    }
    let long = [&u32::MAX.to_le_bytes()[..], &[15, 0], &[0; 4]].concat();
    assert!(reason(&[StreamWriter::full().0, long].concat()).contains("4294967295 bytes"));
}

/// The input of a receiving program is available only together with the gate.
#[test]
fn the_input_of_a_program_comes_with_its_gate() {
    let tools = crate::LocalTools::new(
        std::sync::Arc::new(holdfast_block::SystemClock::new()),
        std::time::Duration::from_secs(60),
    );
    let piped = crate::StreamTools::start(&tools, "cat", &[]).unwrap();
    let (gate, _) = BtrfsGate::new(announced(None), Notes::default());
    let mut incoming = Incoming::gated(piped, Box::new(gate), Notes::default(), || Ok(()));
    assert!(incoming.take_input().is_some());
    assert!(incoming.take_input().is_none());
}

/// Streams of random commands with few names, so that the commands interact. The output is harmless in a model that
/// is independent of the gate's model.
#[test]
fn the_output_of_random_streams_is_harmless() {
    let parent = parent();
    let before: Files = [
        ("disk", ReplayedKind::File),
        ("link", ReplayedKind::Symlink),
        ("folder", ReplayedKind::Folder),
        ("folder/file", ReplayedKind::File),
        ("folder/link", ReplayedKind::Symlink),
        ("folder/out", ReplayedKind::Symlink),
    ]
    .map(|(path, kind)| (path.as_bytes().to_vec(), kind))
    .into();
    let mut random = holdfast_block::SeededRandom::new(23);
    let mut number = move |below: usize| {
        let mut bytes = [0; 4];
        random.fill(&mut bytes);
        u32::from_le_bytes(bytes) as usize % below
    };
    let (mut whole, mut written) = (0, 0);
    for round in 0..3000 {
        let is_full = round % 2 == 0;
        let mut writer = if is_full {
            StreamWriter::full()
        } else {
            StreamWriter::increment()
        };
        for _ in 0..=number(12) {
            let names = ["a", "b", "disk", "link", "folder", "file", "out"];
            let mut path = |depth: usize| {
                let names: Vec<&str> = (0..=number(depth)).map(|_| names[number(names.len())]).collect();
                names.join("/")
            };
            let (one, other) = (path(3), path(3));
            writer = match number(13) {
                0 => writer.make(Verb::MakeFile, &one),
                1 | 2 => writer.make(Verb::MakeFolder, &one),
                3 => writer.symlink(&one, "/etc"),
                4..=6 => writer.rename(&one, &other),
                7 => writer.link(&one, &other),
                8 => writer.of_path(Verb::Unlink, &one),
                9 => writer.node(Verb::MakeFifo, &one),
                10 => writer.clone_range(&one, if number(2) == 0 { IDENTITY } else { PARENT }, &other),
                11 => writer.chmod(&one, 0o7777),
                _ => writer.write(&one, b"x"),
            };
        }
        let (commands, is_whole) = match pass_as(&writer.end(), announced(Some(parent.path()))) {
            Ok(passed) => (passed.commands, true),
            Err((_, before)) => (before, false),
        };
        let of_parent = |command: &Command| command.verb == Verb::Clone && command.uuid(Key::CloneUuid) == PARENT_HERE;
        written += commands.iter().filter(|command| command.verb == Verb::Write).count();
        whole += usize::from(is_whole);
        let commands: Vec<Command> = commands.into_iter().filter(|command| !of_parent(command)).collect();
        replay(&commands, if is_full { Files::new() } else { before.clone() });
    }
    assert!(whole > 100 && written > 100, "{whole} whole, {written} writes");
}
