//! The policy: which commands of a stream pass, and in which form.

use std::io;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use super::super::super::incoming::{Flow, Notes, StreamGate, StreamRefusal, fill, is_at_end};
use super::command::{Command, CommandHead, HEAD_LENGTH, Key, MAGIC, Result, VERSION, Verb};
use super::tree::{PathKind, StreamPath, Tree};
use crate::Uuid;
use crate::storage::provider::folder::check_name;

/// Mode bits that make a program run as another user or group.
const SET_ID_BITS: u64 = 0o6000;
const MODE_BITS: u64 = 0o7777;
/// Accepted extended attributes: data of users, properties of btrfs, and access lists. Others (`security.*`,
/// `trusted.*`) give rights to files, or control other parts of the kernel.
const XATTRS: [&[u8]; 4] = [
    b"user.",
    b"btrfs.",
    b"system.posix_acl_access",
    b"system.posix_acl_default",
];
/// Limit on the names in a note.
const NAMES_MAX: usize = 3;

/// A read-only host snapshot of the dataset that a stream may be based on.
pub(in super::super) struct ParentSnapshot {
    /// The UUID on this host.
    pub(in super::super) uuid: Uuid,
    pub(in super::super) folder: OwnedFd,
}

type FindParent = Box<dyn Fn(&str) -> Option<ParentSnapshot> + Send>;

/// The expected content of a stream.
pub(in super::super) struct BtrfsAnnouncement {
    /// The name and identity; none if nothing was announced.
    pub(in super::super) snapshot: Option<(String, String)>,
    /// Existing names.
    pub(in super::super) names: Vec<String>,
    /// Opens the snapshot of the dataset with this identity.
    pub(in super::super) parent: FindParent,
    /// Prefix of the name of the subvolume while it is being received.
    pub(in super::super) hidden_prefix: &'static str,
}

/// The content of a stream that was received completely.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct Arrival {
    /// The final name.
    pub(in super::super) name: String,
    /// The UUID of the sent subvolume.
    pub(in super::super) identity: Uuid,
    /// The parent's UUID on this host.
    pub(in super::super) parent: Option<Uuid>,
}

pub(in super::super) struct BtrfsGate {
    announced: BtrfsAnnouncement,
    notes: Notes,
    arrived: Arc<Mutex<Option<Arrival>>>,
    state: BtrfsGateState,
    left_out: Tally,
    cleared: Tally,
    xattrs: Tally,
}

enum BtrfsGateState {
    /// Nothing was read.
    Start,
    /// The first command must be that of the subvolume.
    Begun,
    InProgress(Box<StreamInProgress>),
    Over,
}

struct StreamInProgress {
    tree: Tree,
    arrival: Arrival,
    identity: [u8; 16],
    /// The parent's UUIDs: in the stream, and on this host.
    parent: Option<([u8; 16], Uuid)>,
}

/// Counts changed or omitted files, with the first names.
#[derive(Default)]
struct Tally {
    count: u64,
    names: Vec<String>,
}

impl Tally {
    fn add(&mut self, name: String) {
        self.count += 1;
        if self.names.len() < NAMES_MAX {
            self.names.push(name);
        }
    }

    /// Follows the rename of a file.
    fn rename(&mut self, from: &str, to: &str) {
        if let Some(known) = self.names.iter_mut().find(|known| *known == from) {
            to.clone_into(known);
        }
    }

    fn note(&self, what: &str, notes: &Notes) {
        if self.count > 0 {
            let more = if self.count > self.names.len() as u64 {
                ", ..."
            } else {
                ""
            };
            let note = format!("{what}: {} ({}{more})", self.count, self.names.join(", "));
            notes.lock().unwrap_or_else(PoisonError::into_inner).push(note);
        }
    }
}

fn refused<T>(reason: impl Into<String>) -> Result<T> {
    Err(StreamRefusal::new(reason))
}

/// The decision on a command.
enum CommandAction {
    Pass(Command),
    LeaveOut,
}

impl BtrfsGate {
    /// The second returned value gets the received subvolume at the end of the stream.
    pub(in super::super) fn new(announced: BtrfsAnnouncement, notes: Notes) -> (Self, Arc<Mutex<Option<Arrival>>>) {
        let arrived = Arc::default();
        let gate = Self {
            announced,
            notes,
            arrived: Arc::clone(&arrived),
            state: BtrfsGateState::Start,
            left_out: Tally::default(),
            cleared: Tally::default(),
            xattrs: Tally::default(),
        };
        (gate, arrived)
    }

    /// Handles the first command, which creates the subvolume.
    fn begin(&self, mut command: Command) -> Result<(StreamInProgress, Command)> {
        if !matches!(command.verb, Verb::Subvolume | Verb::Snapshot) {
            return refused(format!("it begins with {:?} instead of a subvolume", command.verb));
        }
        let name = std::str::from_utf8(command.value(Key::Path))
            .unwrap_or_default()
            .to_owned();
        if check_name(&name).is_err() {
            let path = String::from_utf8_lossy(command.value(Key::Path)).into_owned();
            return refused(format!("{path:?} cannot be the name of a host snapshot"));
        }
        let identity = command.uuid(Key::Uuid);
        let arrival = Arrival {
            identity: Uuid::from_bytes(identity),
            parent: None,
            name,
        };
        let Arrival {
            name, identity: uuid, ..
        } = &arrival;
        if identity == [0; 16] {
            return refused("the subvolume has no UUID");
        }
        if let Some((expected, of)) = &self.announced.snapshot
            && (expected != name || Uuid::parse(of) != Some(*uuid))
        {
            return refused(format!(
                "it contains {name} ({uuid}), but {expected} ({of}) was announced"
            ));
        }
        if self.announced.names.contains(name) {
            return refused(format!("the host snapshot {name} already exists"));
        }
        if (self.announced.parent)(&uuid.to_string()).is_some() {
            return refused(format!("the dataset already has a host snapshot with the UUID {uuid}"));
        }
        let mut receiving = StreamInProgress {
            tree: Tree::new(None),
            arrival,
            identity,
            parent: None,
        };
        let hidden = format!("{}{}", self.announced.hidden_prefix, receiving.arrival.name);
        command.set(Key::Path, hidden.as_bytes());
        if command.verb == Verb::Snapshot {
            let of = command.uuid(Key::CloneUuid);
            let shown = Uuid::from_bytes(of).to_string();
            let Some(parent) = (self.announced.parent)(&shown) else {
                return refused(format!(
                    "it is based on {shown}, which is not a host snapshot of this dataset"
                ));
            };
            // The UUID in the stream could match other subvolumes of the file system with the same source.
            command.set(Key::CloneUuid, parent.uuid.as_bytes());
            receiving.parent = Some((of, parent.uuid));
            receiving.arrival.parent = Some(parent.uuid);
            receiving.tree = Tree::new(Some(parent.folder));
        }
        Ok((receiving, command))
    }

    fn decide(&mut self, command: Command) -> Result<CommandAction> {
        let BtrfsGateState::InProgress(receiving) = &mut self.state else {
            return refused("it continues after its end");
        };
        if command.value(Key::Path).is_empty() {
            return self.of_subvolume(command);
        }
        let tree = &mut receiving.tree;
        let path = StreamPath::parse(command.value(Key::Path))?;
        let pass_if = |is_passed| {
            if is_passed {
                CommandAction::Pass
            } else {
                |_| CommandAction::LeaveOut
            }
        };
        match command.verb {
            Verb::Subvolume | Verb::Snapshot => return refused("it contains a second subvolume"),
            Verb::UpdateExtent => return refused("it has no data (btrfs send --no-data)"),
            Verb::End => {}
            Verb::MakeFile | Verb::MakeFolder => tree.make(&path)?,
            Verb::MakeNode | Verb::MakeFifo | Verb::MakeSocket => {
                tree.leave_out(&path)?;
                self.left_out.add(path.shown());
                return Ok(CommandAction::LeaveOut);
            }
            Verb::Symlink => {
                check_target(&path, command.value(Key::PathLink))?;
                tree.make_link(&path)?;
            }
            Verb::Rename => {
                let to = StreamPath::parse(command.value(Key::PathTo))?;
                let found = tree.rename(&path, &to)?;
                if found == PathKind::LeftOut {
                    self.left_out.rename(&path.shown(), &to.shown());
                }
                return Ok(pass_if(found != PathKind::LeftOut)(command));
            }
            Verb::Link => {
                let from = StreamPath::parse(command.value(Key::PathLink))?;
                let found = tree.link(&from, &path)?;
                return Ok(pass_if(found != PathKind::LeftOut)(command));
            }
            Verb::Unlink => return Ok(pass_if(tree.remove(&path)? != PathKind::LeftOut)(command)),
            Verb::RemoveFolder => match tree.remove(&path)? {
                PathKind::Plain => {}
                _ => return refused(format!("it removes {:?}, which is not a folder", path.shown())),
            },
            Verb::Write | Verb::Truncate => check_data(&path, tree.find(&path)?)?,
            Verb::Clone => {
                check_data(&path, tree.find(&path)?)?;
                return receiving.of_clone(command).map(CommandAction::Pass);
            }
            Verb::Chmod | Verb::Chown | Verb::Utimes | Verb::SetXattr | Verb::RemoveXattr => {
                return match (tree.find(&path)?, command.verb) {
                    (PathKind::LeftOut, _) => Ok(CommandAction::LeaveOut),
                    // `chmod` would follow the link. A link itself has no mode.
                    (PathKind::Symlink, Verb::Chmod) => {
                        refused(format!("it sets the mode of the symbolic link {:?}", path.shown()))
                    }
                    (_, Verb::Chmod) => Ok(CommandAction::Pass(self.without_set_id(command, &path.shown()))),
                    (_, Verb::SetXattr | Verb::RemoveXattr) => self.of_xattr(command, &path.shown()),
                    _ => Ok(CommandAction::Pass(command)),
                };
            }
        }
        Ok(CommandAction::Pass(command))
    }

    /// A command about the subvolume itself, which has an empty path.
    fn of_subvolume(&mut self, command: Command) -> Result<CommandAction> {
        match command.verb {
            Verb::Chmod => Ok(CommandAction::Pass(self.without_set_id(command, "."))),
            Verb::Chown | Verb::Utimes => Ok(CommandAction::Pass(command)),
            Verb::SetXattr | Verb::RemoveXattr => self.of_xattr(command, "."),
            verb => refused(format!("{verb:?} of the subvolume itself")),
        }
    }

    fn without_set_id(&mut self, mut command: Command, shown: &str) -> Command {
        let mode = command.number(Key::Mode);
        if mode & SET_ID_BITS != 0 {
            self.cleared.add(shown.to_owned());
        }
        command.set(Key::Mode, &(mode & MODE_BITS & !SET_ID_BITS).to_le_bytes());
        command
    }

    fn of_xattr(&mut self, command: Command, shown: &str) -> Result<CommandAction> {
        let name = command.value(Key::XattrName);
        if name.contains(&0) {
            return refused(format!("an extended attribute of {shown:?} whose name contains a NUL"));
        }
        if XATTRS.iter().any(|known| name.starts_with(known)) {
            return Ok(CommandAction::Pass(command));
        }
        if command.verb == Verb::SetXattr {
            self.xattrs.add(format!("{shown}: {}", String::from_utf8_lossy(name)));
        }
        Ok(CommandAction::LeaveOut)
    }

    /// Handles the end of the stream. Any data after it is refused.
    fn end(&mut self) {
        self.left_out.note("devices, FIFOs and sockets left out", &self.notes);
        self.cleared.note(
            "files that are not set-user-id or set-group-id in the copy",
            &self.notes,
        );
        self.xattrs.note("extended attributes left out", &self.notes);
        if let BtrfsGateState::InProgress(receiving) = std::mem::replace(&mut self.state, BtrfsGateState::Over) {
            *self.arrived.lock().unwrap_or_else(PoisonError::into_inner) = Some(receiving.arrival);
        }
    }
}

/// Checks the target of a symbolic link: any path is accepted that the kernel can store completely.
fn check_target(path: &StreamPath, target: &[u8]) -> Result<()> {
    if target.is_empty() || target.contains(&0) {
        return refused(format!("{:?} is a symbolic link with an invalid target", path.shown()));
    }
    Ok(())
}

/// Checks a path to which data is written: `btrfs receive` opens it.
fn check_data(path: &StreamPath, found: PathKind) -> Result<()> {
    let what = match found {
        PathKind::Plain => return Ok(()),
        PathKind::Symlink => "a symbolic link",
        PathKind::Special => "a device, FIFO or socket",
        PathKind::LeftOut => "not a file of the copy",
    };
    refused(format!("data for {:?}, which is {what}", path.shown()))
}

impl StreamInProgress {
    /// Handles a clone of data from a file of this subvolume or of its parent.
    fn of_clone(&self, mut command: Command) -> Result<Command> {
        let of = command.uuid(Key::CloneUuid);
        let from = StreamPath::parse(command.value(Key::ClonePath))?;
        if of == self.identity {
            check_data(&from, self.tree.find(&from)?)?;
            return Ok(command);
        }
        let Some((_, here)) = self.parent.filter(|(parent, _)| *parent == of) else {
            let of = Uuid::from_bytes(of);
            return refused(format!(
                "it takes data from the subvolume {of}, which is not its parent"
            ));
        };
        if !self.tree.is_file_of_parent(&from)? {
            return refused(format!(
                "it takes data from {:?}, which is not a file of its parent",
                from.shown()
            ));
        }
        command.set(Key::CloneUuid, here.as_bytes());
        Ok(command)
    }
}

impl StreamGate for BtrfsGate {
    fn pass(&mut self, from: &mut dyn Read, passed: &mut Vec<u8>) -> io::Result<Flow> {
        if matches!(self.state, BtrfsGateState::Start) {
            let mut start = [0; MAGIC.len() + 4];
            if !fill(from, &mut start)? {
                return Ok(Flow::End);
            }
            let Some(version) = start.strip_prefix(MAGIC) else {
                return Err(StreamRefusal::new("it is not a stream of btrfs send").into());
            };
            if version != VERSION.to_le_bytes() {
                let reason = format!("it is not of version {VERSION} (btrfs send --proto {VERSION})");
                return Err(StreamRefusal::new(reason).into());
            }
            passed.extend(start);
            self.state = BtrfsGateState::Begun;
            return Ok(Flow::More);
        }
        let mut head = [0; HEAD_LENGTH];
        if !fill(from, &mut head)? {
            return Ok(Flow::End);
        }
        let head = CommandHead::parse(&head)?;
        let mut body = vec![0; head.body_length];
        if !fill(from, &mut body)? {
            return Ok(Flow::End);
        }
        let command = Command::parse(&head, &body)?;
        if matches!(self.state, BtrfsGateState::Begun) {
            let (receiving, command) = self.begin(command)?;
            command.encode(passed);
            self.state = BtrfsGateState::InProgress(Box::new(receiving));
            return Ok(Flow::More);
        }
        if command.verb == Verb::End {
            if !is_at_end(from)? {
                return Err(StreamRefusal::new("it has data after its end").into());
            }
            command.encode(passed);
            self.end();
            return Ok(Flow::End);
        }
        if let CommandAction::Pass(command) = self.decide(command)? {
            command.encode(passed);
        }
        Ok(Flow::More)
    }
}
