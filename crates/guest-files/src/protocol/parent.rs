//! The side that has the device.

use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};

use holdfast_block::{BlockDevice, Error as DeviceError};

use super::message::{self, Message, OpenedFileSystem};
use crate::{
    Content, DirectoryEntry, Error, ExtendedAttribute, FilePiece, FileSystem, Metadata, NodeId, PIECE_BYTES_MAX, Result,
};

/// Longest target of a link.
const TARGET_BYTES_MAX: usize = 32 << 10;

/// The process that reads a file system: [`Read`] and [`Write`] are its output and input. A read that takes too long
/// must fail.
pub trait ReaderProcess: Read + Write + Send {
    /// How the process ended, or why it does not answer: completes the sentence "the reader of the file system ...".
    /// The process is not used any more.
    fn end(&mut self, error: &io::Error) -> String;
}

/// A file system whose reader is another process.
pub struct RemoteFileSystem<'a> {
    link: SharedLink<'a>,
    /// The volume of an appliance; a process has one volume.
    volume: Option<u32>,
    opened: OpenedFileSystem,
}

/// The connection to a process. File systems of an appliance share it.
pub(super) type SharedLink<'a> = Arc<Mutex<Link<'a>>>;

pub(super) struct Link<'a> {
    process: Box<dyn ReaderProcess + 'a>,
    /// The volume whose bytes the process asks for; an appliance has disks of its own.
    device: Option<Arc<dyn BlockDevice>>,
    /// The volume of an appliance that requests mean.
    current: Option<u32>,
    /// How the process ended.
    ended: Option<String>,
}

impl<'a> RemoteFileSystem<'a> {
    /// Has `process` open the file system of `device`.
    pub fn open(process: Box<dyn ReaderProcess + 'a>, device: Arc<dyn BlockDevice>, content: Content) -> Result<Self> {
        let request = message::open(content, device.size_bytes());
        let mut link = Link::new(process, Some(device));
        let answer = link.request(&request, message::OPENED, &mut |_| Ok(()))?;
        Ok(Self {
            link: Arc::new(Mutex::new(link)),
            volume: None,
            opened: message::opened_of(&answer)?,
        })
    }

    /// Has an appliance mount one of its volumes.
    pub(super) fn mount(link: SharedLink<'a>, volume: u32) -> Result<Self> {
        let answer = {
            let mut link = link.lock().unwrap_or_else(PoisonError::into_inner);
            link.current = None;
            let answer = link.request(&Message::new(message::MOUNT).u32(volume), message::OPENED, &mut |_| {
                Ok(())
            })?;
            link.current = Some(volume);
            answer
        };
        Ok(Self {
            link,
            volume: Some(volume),
            opened: message::opened_of(&answer)?,
        })
    }

    fn request(
        &mut self,
        request: &Message,
        expected: u8,
        visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>,
    ) -> Result<Message> {
        let mut link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(volume) = self.volume
            && link.current != Some(volume)
            && link.ended.is_none()
        {
            link.send(&Message::new(message::USE).u32(volume))?;
            link.current = Some(volume);
        }
        link.request(request, expected, visit)
    }
}

impl<'a> Link<'a> {
    pub(super) fn new(process: Box<dyn ReaderProcess + 'a>, device: Option<Arc<dyn BlockDevice>>) -> Self {
        Self {
            process,
            device,
            current: None,
            ended: None,
        }
    }

    /// Sends a request and answers reads until the result arrives.
    pub(super) fn request(
        &mut self,
        request: &Message,
        expected: u8,
        visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>,
    ) -> Result<Message> {
        if let Some(reason) = &self.ended {
            return Err(Error::Reader(reason.clone()));
        }
        let mut device_error = None;
        let mut visited = Ok(());
        let result = self.exchange(request, expected, &mut device_error, &mut |entry| {
            // After an error the rest is received and dropped, so that the process can be used again.
            if visited.is_ok() {
                visited = visit(entry);
            }
        });
        match (result, device_error) {
            (Err(_), Some(error)) => Err(Error::Device(error)),
            (result, _) => visited.and(result),
        }
    }

    fn exchange(
        &mut self,
        request: &Message,
        expected: u8,
        device_error: &mut Option<DeviceError>,
        visit: &mut dyn FnMut(DirectoryEntry),
    ) -> Result<Message> {
        self.send(request)?;
        loop {
            let answer = self.receive()?;
            match answer.tag {
                message::READ => {
                    let bytes = self.read(&answer);
                    let reply = bytes.unwrap_or_else(|error| {
                        device_error.get_or_insert(error);
                        Message::new(message::NO_BYTES)
                    });
                    self.send(&reply)?;
                }
                message::ENTRIES if expected == message::END => {
                    message::entries_of(&answer)?.into_iter().for_each(&mut *visit);
                }
                message::FAILED => return Err(message::failure_of(&answer)?),
                tag if tag == expected => return Ok(answer),
                _ => return Err(self.lost(&io::Error::other("an answer to another request"))),
            }
        }
    }

    fn read(&self, request: &Message) -> holdfast_block::Result<Message> {
        let fields = request.fields();
        let (Ok(offset), Ok(length)) = (fields.u64(0), fields.u32(8)) else {
            return Err(DeviceError::layer(Error::Reader("sent an invalid request".to_owned())));
        };
        let length = (length as usize).min(message::READ_BYTES_MAX);
        let mut bytes = vec![0; length];
        let Some(device) = &self.device else {
            return Err(DeviceError::layer(Error::Reader(
                "asked for bytes of its own disks".to_owned(),
            )));
        };
        device.read_at(&mut bytes, offset)?;
        Ok(Message {
            tag: message::BYTES,
            body: bytes,
        })
    }

    fn send(&mut self, message: &Message) -> Result<()> {
        message.send(&mut self.process).map_err(|error| self.lost(&error))
    }

    fn receive(&mut self) -> Result<Message> {
        match Message::receive(&mut self.process) {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(self.lost(&io::ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(self.lost(&error)),
        }
    }

    fn lost(&mut self, error: &io::Error) -> Error {
        let reason = self.process.end(error);
        self.ended = Some(reason.clone());
        Error::Reader(reason)
    }
}

impl FileSystem for RemoteFileSystem<'_> {
    fn root(&self) -> NodeId {
        self.opened.root
    }

    fn ignores_case(&self) -> bool {
        self.opened.ignores_case
    }

    fn notes(&self) -> Vec<String> {
        self.opened.notes.clone()
    }

    fn metadata(&mut self, node: NodeId) -> Result<Metadata> {
        let request = Message::new(message::METADATA).u64(node.0);
        message::metadata_of(&self.request(&request, message::METADATA_IS, &mut |_| Ok(()))?)
    }

    fn read_directory(&mut self, node: NodeId, visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>) -> Result<()> {
        let request = Message::new(message::DIRECTORY).u64(node.0);
        self.request(&request, message::END, visit).map(drop)
    }

    fn read_file(&mut self, node: NodeId, offset: u64, length_max: usize) -> Result<FilePiece> {
        let length_max = length_max.min(PIECE_BYTES_MAX);
        let length = u32::try_from(length_max).unwrap_or(0);
        let request = Message::new(message::FILE).u64(node.0).u64(offset).u32(length);
        let answer = self.request(&request, message::PIECE, &mut |_| Ok(()))?;
        message::piece_of(&answer, length_max)
    }

    fn read_link(&mut self, node: NodeId) -> Result<Vec<u8>> {
        let request = Message::new(message::LINK).u64(node.0);
        let answer = self.request(&request, message::TARGET, &mut |_| Ok(()))?;
        if answer.body.is_empty() || answer.body.len() > TARGET_BYTES_MAX || answer.body.contains(&0) {
            return Err(answer.fields().damaged("the target of a link is invalid"));
        }
        Ok(answer.body)
    }

    fn attributes(&mut self, node: NodeId) -> Result<Vec<ExtendedAttribute>> {
        let request = Message::new(message::ATTRIBUTES).u64(node.0);
        message::attributes_of(&self.request(&request, message::ATTRIBUTES_ARE, &mut |_| Ok(()))?)
    }
}
