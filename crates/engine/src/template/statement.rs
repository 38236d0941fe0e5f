//! The signed text: it contains everything about a template that matters.
//!
//! Each statement has exactly one text form, so that a signature matches what was parsed: any other text is refused.
//! `docs/format/template.md` defines it byte by byte.

use std::fmt::Write as _;

use jiff::Timestamp;

use super::digest::Digest;
use super::label::{TemplateLabel, TemplateName, TemplateTag};
use crate::job::DiskName;
use crate::job::error::TemplateError;

const HEADING: &str = "holdfast-template";
const VERSION: &str = "1";
/// Largest statement in bytes.
pub(super) const STATEMENT_BYTES_MAX: usize = 64 << 10;
const DESCRIPTION_BYTES_MAX: usize = 1024;
const PIECE_COUNT_MAX: usize = 128;
const CONTENT_CONTEXT: &str = "holdfast template 1 content";

/// The description of a template by its signer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statement {
    /// Name and tag.
    pub label: TemplateLabel,
    /// When it was pushed, to the millisecond.
    pub time: Timestamp,
    /// A description: one line, or empty.
    pub description: String,
    /// The disks, in order, then the other files of the machine.
    pub pieces: Vec<Piece>,
}

/// A part of the content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Its kind.
    pub kind: PieceKind,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// The digest of its bytes.
    pub digest: Digest,
    /// Its name: `vda`, `domain.xml`.
    pub name: DiskName,
}

/// Kind of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PieceKind {
    /// A disk.
    Disk,
    /// A small file: the configuration, variables of the firmware.
    File,
}

impl PieceKind {
    const fn word(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::File => "file",
        }
    }
}

fn is_plain_line(text: &str) -> bool {
    text.trim() == text && !text.chars().any(char::is_control)
}

impl Statement {
    /// Makes a statement.
    ///
    /// # Errors
    /// The description is not one line; there are no pieces, too many, or two of the same name.
    pub fn new(
        label: TemplateLabel,
        time: Timestamp,
        description: String,
        pieces: Vec<Piece>,
    ) -> Result<Self, TemplateError> {
        let statement = Self {
            label,
            time,
            description,
            pieces,
        };
        let fault = statement.fault();
        fault.map_or(Ok(statement), |reason| Err(TemplateError::Unsayable { reason }))
    }

    fn fault(&self) -> Option<&'static str> {
        let names = |kind| self.pieces.iter().filter(move |piece| piece.kind == kind);
        let mut sorted: Vec<&str> = self.pieces.iter().map(|piece| piece.name.as_str()).collect();
        sorted.sort_unstable();
        if self.description.len() > DESCRIPTION_BYTES_MAX || !is_plain_line(&self.description) {
            Some("its description is not one line of at most 1024 bytes")
        } else if names(PieceKind::Disk).next().is_none() {
            Some("it has no disk")
        } else if self.pieces.len() > PIECE_COUNT_MAX {
            Some("it has more than 128 disks and files")
        } else if !self.pieces.is_sorted_by_key(|piece| piece.kind) {
            Some("its disks do not come before its files")
        } else if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            Some("two of its parts have one name")
        } else if self.time.as_nanosecond() % 1_000_000 != 0 || !(0..=9999).contains(&self.time_year()) {
            Some("its time cannot be written down")
        } else if self.encode().len() > STATEMENT_BYTES_MAX {
            Some("it is too long")
        } else {
            None
        }
    }

    fn time_year(&self) -> i16 {
        self.time.to_zoned(jiff::tz::TimeZone::UTC).year()
    }

    /// The text that is signed.
    pub fn encode(&self) -> String {
        let mut text = format!(
            "{HEADING} {VERSION}\nname {}\ntag {}\ntime {:.3}\n",
            self.label.name, self.label.tag, self.time
        );
        if !self.description.is_empty() {
            writeln!(text, "description {}", self.description).expect("writing to a string does not fail");
        }
        text + &self.content_text()
    }

    fn content_text(&self) -> String {
        let mut text = String::new();
        for piece in &self.pieces {
            let (kind, size_bytes) = (piece.kind.word(), piece.size_bytes);
            writeln!(text, "{kind} {size_bytes} {} {}", piece.digest, piece.name)
                .expect("writing to a string does not fail");
        }
        text
    }

    /// The digest of the content: the hash of the lines about disks and files. It is the same under every name and tag.
    pub fn content(&self) -> Digest {
        Digest::of(CONTENT_CONTEXT, &[self.content_text().as_bytes()])
    }

    /// The disks.
    pub fn disks(&self) -> impl Iterator<Item = &Piece> {
        self.pieces.iter().filter(|piece| piece.kind == PieceKind::Disk)
    }

    /// The file of this name.
    pub(super) fn file(&self, name: &str) -> Option<&Piece> {
        let mut files = self.pieces.iter().filter(|piece| piece.kind == PieceKind::File);
        files.find(|piece| piece.name.as_str() == name)
    }

    /// Bytes of all disks together; saturates at the largest number.
    pub fn size_bytes(&self) -> u64 {
        self.disks().map(|piece| piece.size_bytes).fold(0, u64::saturating_add)
    }

    /// Parses a statement.
    ///
    /// # Errors
    /// A later version, or a text that this program would write differently.
    pub fn decode(text: &str) -> Result<Self, TemplateError> {
        let wrong = |reason| TemplateError::Statement { reason };
        if text.len() > STATEMENT_BYTES_MAX {
            return Err(wrong("it is too long"));
        }
        let mut lines = text.lines();
        match lines.next().and_then(|line| line.split_once(' ')) {
            Some((HEADING, VERSION)) => {}
            Some((HEADING, version)) => {
                return Err(TemplateError::FutureVersion {
                    version: version.chars().take(16).collect(),
                });
            }
            _ => return Err(wrong("it does not begin as one")),
        }
        let mut field = |name: &str| lines.next().and_then(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let label = TemplateLabel {
            name: TemplateName::new(field("name").ok_or(wrong("it has no name"))?)?,
            tag: TemplateTag::new(field("tag").ok_or(wrong("it has no tag"))?)?,
        };
        let time = field("time").and_then(|time| time.parse().ok());
        let time = time.ok_or(wrong("it has no time"))?;
        let (mut description, mut pieces) = (String::new(), Vec::new());
        for line in lines {
            match line.split_once(' ') {
                Some(("description", words)) if pieces.is_empty() && description.is_empty() => {
                    words.clone_into(&mut description);
                }
                _ => pieces.push(piece(line).ok_or(wrong("a line about a disk or file makes no sense"))?),
            }
            if pieces.len() > PIECE_COUNT_MAX {
                break;
            }
        }
        let statement = Self {
            label,
            time,
            description,
            pieces,
        };
        if let Some(reason) = statement.fault() {
            return Err(wrong(reason));
        }
        if statement.encode() != text {
            return Err(wrong("it could be written in another way"));
        }
        Ok(statement)
    }
}

fn piece(line: &str) -> Option<Piece> {
    let mut words = line.splitn(4, ' ');
    let kind = match words.next()? {
        "disk" => PieceKind::Disk,
        "file" => PieceKind::File,
        _ => return None,
    };
    Some(Piece {
        kind,
        size_bytes: words.next()?.parse().ok()?,
        digest: words.next()?.parse().ok()?,
        name: DiskName::new(words.next()?).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::{Piece, PieceKind, Statement};
    use crate::job::DiskName;
    use crate::template::digest::digest_bytes;

    fn statement() -> Statement {
        let piece = |kind, name: &str| Piece {
            kind,
            size_bytes: 5 << 30,
            digest: digest_bytes(name.as_bytes()),
            name: DiskName::new(name).unwrap(),
        };
        Statement::new(
            "team/debian:12".parse().unwrap(),
            "2026-11-23T20:50:09.5Z".parse().unwrap(),
            "Debian 12, büro".to_owned(),
            vec![
                piece(PieceKind::Disk, "vda"),
                piece(PieceKind::Disk, "data disk"),
                piece(PieceKind::File, "domain.xml"),
            ],
        )
        .unwrap()
    }

    #[test]
    fn a_statement_is_read_as_it_was_written() {
        let text = statement().encode();
        assert!(
            text.starts_with(
                "holdfast-template 1\nname team/debian\ntag 12\ntime 2026-11-23T20:50:09.500Z\ndescription Debian 12, büro\ndisk 5368709120 "
            ),
            "{text}"
        );
        assert_eq!(Statement::decode(&text).unwrap(), statement());
        let plain = Statement {
            description: String::new(),
            ..statement()
        };
        assert_eq!(Statement::decode(&plain.encode()).unwrap(), plain);
    }

    /// If two texts had the same meaning, one template could have two signatures, or one signature could match two templates.
    #[test]
    fn there_is_one_way_only_to_write_it() {
        let text = statement().encode();
        for (from, to) in [
            ("template 1", "template 01"),
            ("name team", "name  team"),
            ("09.500Z", "09.5Z"),
            ("09.500Z", "09.500+00:00"),
            ("09.500Z", "09.5001Z"),
            ("description Debian", "description  Debian"),
            ("description Debian 12, büro\n", "description \n"),
            ("5368709120", "+5368709120"),
            ("5368709120", "05368709120"),
            ("\ntag", "\r\ntag"),
            ("disk", "file"),
            (" vda", " data disk"),
            (" vda", " ../vda"),
            (" vda", ""),
            ("domain.xml\n", "domain.xml"),
            ("domain.xml\n", "domain.xml\n\n"),
        ] {
            assert!(text.contains(from));
            let other = text.replacen(from, to, 1);
            assert!(Statement::decode(&other).is_err(), "{other}");
        }
        assert!(Statement::decode("").is_err());
    }

    #[test]
    fn a_later_version_is_named_in_the_error() {
        let later = statement().encode().replacen("template 1", "template 2", 1);
        let error = Statement::decode(&later).unwrap_err();
        assert!(error.to_string().contains("version 2"), "{error}");
    }

    #[test]
    fn the_content_is_the_same_under_every_name() {
        let one = statement();
        let mut other = Statement {
            label: "x".parse().unwrap(),
            description: "y".to_owned(),
            ..one.clone()
        };
        assert_eq!(one.content(), other.content());
        other.pieces[0].size_bytes += 1;
        assert_ne!(one.content(), other.content());
        other = one.clone();
        other.pieces.pop();
        assert_ne!(one.content(), other.content());
    }

    #[test]
    fn what_cannot_be_said_is_refused() {
        let new = |description: &str, pieces| {
            Statement::new("x".parse().unwrap(), statement().time, description.to_owned(), pieces)
        };
        assert!(new("two\nlines", statement().pieces).is_err());
        assert!(new(&"x".repeat(1025), statement().pieces).is_err());
        assert!(new("", Vec::new()).is_err());
        assert!(new("", vec![statement().pieces[0].clone(); 2]).is_err());
        assert!(new("", statement().pieces.into_iter().rev().collect()).is_err());
    }
}
