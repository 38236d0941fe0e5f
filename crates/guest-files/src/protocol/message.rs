//! Messages and their bytes.

use std::io::{self, Read, Write};

use crate::fields::Fields;
use crate::{
    Content, DirectoryEntry, Error, ExtendedAttribute, FileKind, FilePiece, Metadata, ModifiedTime, NodeId,
    PIECE_BYTES_MAX, Result,
};

/// Most bytes that the child reads at once.
pub(super) const READ_BYTES_MAX: usize = PIECE_BYTES_MAX;
/// Entries of a directory are sent in messages of about this length.
pub(super) const ENTRIES_BYTES: usize = 64 << 10;
/// Most bytes of the attributes of a node.
const ATTRIBUTE_BYTES_MAX: usize = 1 << 20;
const MESSAGE_BYTES_MAX: usize = PIECE_BYTES_MAX + 4096;
/// Most bytes of a text in an error or a note.
const TEXT_BYTES_MAX: usize = 1024;
const NOTE_COUNT_MAX: usize = 16;
const NONE: u32 = u32::MAX;

/// A kind of messages. Numbers are part of no stored format: both sides are the same program.
macro_rules! tags {
    ($($name:ident = $number:literal),+ $(,)?) => { $( pub(super) const $name: u8 = $number; )+ };
}

tags! {
    OPEN = 1, METADATA = 2, DIRECTORY = 3, FILE = 4, LINK = 5, BYTES = 6, NO_BYTES = 7,
    ATTRIBUTES = 8, SCAN = 9, MOUNT = 10, USE = 11,
    READ = 16, ENTRIES = 17, OPENED = 18, METADATA_IS = 19, END = 20, PIECE = 21, TARGET = 22, FAILED = 23,
    ATTRIBUTES_ARE = 24, VOLUMES = 25,
}

/// A message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) tag: u8,
    pub(super) body: Vec<u8>,
}

impl Message {
    pub(super) fn new(tag: u8) -> Self {
        Self { tag, body: Vec::new() }
    }

    pub(super) fn u8(mut self, number: u8) -> Self {
        self.body.push(number);
        self
    }

    pub(super) fn u32(mut self, number: u32) -> Self {
        self.body.extend_from_slice(&number.to_le_bytes());
        self
    }

    pub(super) fn u64(mut self, number: u64) -> Self {
        self.body.extend_from_slice(&number.to_le_bytes());
        self
    }

    pub(super) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.body.extend_from_slice(bytes);
        self
    }

    pub(super) fn text(self, text: &str) -> Self {
        let end = (0..=text.len().min(TEXT_BYTES_MAX))
            .rev()
            .find(|end| text.is_char_boundary(*end));
        let text = text.get(..end.unwrap_or(0)).unwrap_or_default();
        let length = u32::try_from(text.len()).unwrap_or(0);
        self.u32(length).bytes(text.as_bytes())
    }

    pub(super) fn fields(&self) -> Fields<'_> {
        Fields::new("message of the reader", &self.body)
    }

    pub(super) fn send(&self, output: &mut dyn Write) -> io::Result<()> {
        let length = u32::try_from(self.body.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut bytes = Vec::with_capacity(self.body.len() + 5);
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.push(self.tag);
        bytes.extend_from_slice(&self.body);
        output.write_all(&bytes)?;
        output.flush()
    }

    /// Receives the next message; none if the other side has ended between two messages.
    pub(super) fn receive(input: &mut dyn Read) -> io::Result<Option<Self>> {
        let mut head = [0; 5];
        let mut filled = 0;
        while let Some(rest) = head.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match input.read(rest) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let [a, b, c, d, tag] = head;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if length > MESSAGE_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message is too long"));
        }
        let mut body = vec![0; length];
        input.read_exact(&mut body)?;
        Ok(Some(Self { tag, body }))
    }
}

/// The contents that have readers, by their numbers in messages.
const READABLE: [Content; 7] = [
    Content::Ext2,
    Content::Ext3,
    Content::Ext4,
    Content::Ntfs,
    Content::Fat,
    Content::ExFat,
    Content::Xfs,
];

pub(super) fn open(content: Content, size_bytes: u64) -> Message {
    let number = READABLE.iter().position(|other| *other == content);
    let number = number.and_then(|number| u8::try_from(number).ok()).unwrap_or(u8::MAX);
    Message::new(OPEN).u8(number).u64(size_bytes)
}

/// What to open, and the size of its volume.
pub(super) struct OpenRequest {
    pub(super) content: Content,
    pub(super) size_bytes: u64,
}

pub(super) fn opened_request(message: &Message) -> Result<OpenRequest> {
    let fields = message.fields();
    let content = READABLE.get(usize::from(fields.u8(0)?)).copied();
    Ok(OpenRequest {
        content: content.ok_or_else(|| fields.damaged("it opens an unknown file system"))?,
        size_bytes: fields.u64(1)?,
    })
}

pub(super) fn metadata(metadata: &Metadata) -> Message {
    let kind = match metadata.kind {
        FileKind::File => 0,
        FileKind::Directory => 1,
        FileKind::Link => 2,
        FileKind::Special => 3,
    };
    let modified = metadata.modified.unwrap_or(ModifiedTime {
        seconds: 0,
        nanoseconds: NONE,
    });
    Message::new(METADATA_IS)
        .u8(kind)
        .u64(metadata.size_bytes)
        .u32(metadata.mode.unwrap_or(NONE))
        .u8(u8::from(metadata.uid.is_some()))
        .u32(metadata.uid.unwrap_or(0))
        .u8(u8::from(metadata.gid.is_some()))
        .u32(metadata.gid.unwrap_or(0))
        .u64(modified.seconds.cast_unsigned())
        .u32(modified.nanoseconds)
        .u8(u8::from(metadata.shared_id.is_some()))
        .u64(metadata.shared_id.unwrap_or(0))
}

pub(super) fn metadata_of(message: &Message) -> Result<Metadata> {
    let fields = message.fields();
    let kind = match fields.u8(0)? {
        0 => FileKind::File,
        1 => FileKind::Directory,
        2 => FileKind::Link,
        3 => FileKind::Special,
        _ => return Err(fields.damaged("it has an unknown kind of file")),
    };
    let mode = fields.u32(9)?;
    let nanoseconds = fields.u32(31)?;
    Ok(Metadata {
        kind,
        size_bytes: fields.u64(1)?,
        mode: (mode != NONE).then_some(mode & 0o7777),
        uid: (fields.u8(13)? != 0).then_some(fields.u32(14)?),
        gid: (fields.u8(18)? != 0).then_some(fields.u32(19)?),
        modified: (nanoseconds != NONE).then_some(ModifiedTime {
            seconds: fields.u64(23)?.cast_signed(),
            nanoseconds: nanoseconds.min(999_999_999),
        }),
        shared_id: (fields.u8(35)? != 0).then_some(fields.u64(36)?),
    })
}

pub(super) fn piece(piece: &FilePiece) -> Message {
    match piece {
        FilePiece::Data(bytes) => Message::new(PIECE).u8(0).bytes(bytes),
        FilePiece::Hole(length) => Message::new(PIECE).u8(1).u64(*length),
        FilePiece::End => Message::new(PIECE).u8(2),
    }
}

pub(super) fn piece_of(message: &Message, length_max: usize) -> Result<FilePiece> {
    let fields = message.fields();
    match fields.u8(0)? {
        0 => {
            let bytes = fields.from(1)?.as_slice();
            if bytes.is_empty() || bytes.len() > length_max {
                return Err(fields.damaged("a piece of a file has the wrong length"));
            }
            Ok(FilePiece::Data(bytes.to_vec()))
        }
        1 => Ok(FilePiece::Hole(fields.u64(1)?.max(1))),
        2 => Ok(FilePiece::End),
        _ => Err(fields.damaged("it has an unknown kind of piece")),
    }
}

/// Adds an entry to a message of entries.
pub(super) fn add_entry(message: Message, entry: &DirectoryEntry) -> Message {
    let length = u32::try_from(entry.name.len()).unwrap_or(0);
    message.u64(entry.node.0).u32(length).bytes(&entry.name)
}

/// The entries of a message; all names are valid.
pub(super) fn entries_of(message: &Message) -> Result<Vec<DirectoryEntry>> {
    let fields = message.fields();
    let mut entries = Vec::new();
    let mut at = 0;
    while at < fields.len() {
        let node = NodeId(fields.u64(at)?);
        let length = fields.u32(at + 8)? as usize;
        let name = fields.bytes(at + 12, length)?;
        if !DirectoryEntry::is_valid_name(name) {
            return Err(fields.damaged("it has an invalid name"));
        }
        entries.push(DirectoryEntry {
            name: name.to_vec(),
            node,
        });
        at += 12 + length;
    }
    Ok(entries)
}

/// What the parent learns about an opened file system.
#[derive(Debug)]
pub(super) struct OpenedFileSystem {
    pub(super) root: NodeId,
    pub(super) ignores_case: bool,
    pub(super) notes: Vec<String>,
}

pub(super) fn opened(opened: &OpenedFileSystem) -> Message {
    let message = Message::new(OPENED)
        .u64(opened.root.0)
        .u8(u8::from(opened.ignores_case));
    opened
        .notes
        .iter()
        .take(NOTE_COUNT_MAX)
        .fold(message, |message, note| message.text(note))
}

pub(super) fn opened_of(message: &Message) -> Result<OpenedFileSystem> {
    let fields = message.fields();
    let mut notes = Vec::new();
    let mut at = 9;
    while at < fields.len() && notes.len() < NOTE_COUNT_MAX {
        notes.push(text_at(&fields, &mut at)?);
    }
    Ok(OpenedFileSystem {
        root: NodeId(fields.u64(0)?),
        ignores_case: fields.u8(8)? != 0,
        notes,
    })
}

/// The attributes of a node.
///
/// # Errors
/// They are larger than a message.
pub(super) fn attributes(attributes: &[ExtendedAttribute]) -> Result<Message> {
    let mut message = Message::new(ATTRIBUTES_ARE);
    for attribute in attributes {
        for part in [&attribute.name, &attribute.value] {
            message = message.u32(u32::try_from(part.len()).unwrap_or(u32::MAX)).bytes(part);
        }
    }
    if message.body.len() > ATTRIBUTE_BYTES_MAX {
        return Err(Error::TooLarge {
            what: "the extended attributes of a file".into(),
            limit: ATTRIBUTE_BYTES_MAX as u64,
        });
    }
    Ok(message)
}

/// The attributes of a message; all names are valid.
pub(super) fn attributes_of(message: &Message) -> Result<Vec<ExtendedAttribute>> {
    let fields = message.fields();
    let mut attributes = Vec::new();
    let mut at = 0;
    while at < fields.len() {
        let mut part = || -> Result<Vec<u8>> {
            let length = fields.u32(at)? as usize;
            let bytes = fields.bytes(at + 4, length)?;
            at += 4 + length;
            Ok(bytes.to_vec())
        };
        let attribute = ExtendedAttribute {
            name: part()?,
            value: part()?,
        };
        if !attribute.is_valid() {
            return Err(fields.damaged("it has an invalid attribute"));
        }
        attributes.push(attribute);
    }
    Ok(attributes)
}

pub(super) fn text_at(fields: &Fields<'_>, at: &mut usize) -> Result<String> {
    let length = (fields.u32(*at)? as usize).min(TEXT_BYTES_MAX);
    let text = fields.bytes(*at + 4, length)?;
    *at += 4 + length;
    Ok(String::from_utf8_lossy(text).into_owned())
}

/// An error of the child. An error of the device is known to the parent.
pub(super) fn failed(error: &Error) -> Message {
    let message = Message::new(FAILED);
    match error {
        Error::Device(error) => message.u8(0).text(&error.to_string()).text(""),
        Error::Damaged { what, detail } => message.u8(1).text(what).text(detail),
        Error::Unsupported { what, detail } => message.u8(2).text(what).text(detail),
        Error::NotFound => message.u8(3).text("").text(""),
        Error::NotADirectory => message.u8(4).text("").text(""),
        Error::NotAFile => message.u8(5).text("").text(""),
        Error::LinkLoop => message.u8(6).text("").text(""),
        Error::TooLarge { what, limit } => message.u8(7).text(what).text(&limit.to_string()),
        Error::Reader(reason) => message.u8(8).text(reason).text(""),
    }
}

pub(super) fn failure_of(message: &Message) -> Result<Error> {
    let fields = message.fields();
    let mut at = 1;
    let what = text_at(&fields, &mut at)?;
    let detail = text_at(&fields, &mut at)?;
    Ok(match fields.u8(0)? {
        1 => Error::Damaged {
            what: what.into(),
            detail,
        },
        2 => Error::Unsupported { what, detail },
        3 => Error::NotFound,
        4 => Error::NotADirectory,
        5 => Error::NotAFile,
        6 => Error::LinkLoop,
        7 => Error::TooLarge {
            what: what.into(),
            limit: detail.parse().unwrap_or(0),
        },
        _ => Error::Reader(what),
    })
}
