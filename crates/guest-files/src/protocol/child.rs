//! The side that reads the file system.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use holdfast_block::{BlockDevice, Error as DeviceError, ExtentKind, ExtentList};

use super::message::{self, Message, OpenedFileSystem};
use crate::{CachedDevice, Error, FileSystem, NodeId, Result, open_file_system};

/// Bytes of the volume that the child keeps.
const CACHE_BYTES: usize = 32 << 20;

/// Both directions of the connection to the parent.
pub(super) struct ParentChannel {
    input: Box<dyn Read + Send>,
    output: Box<dyn Write + Send>,
}

impl ParentChannel {
    pub(super) fn shared(input: Box<dyn Read + Send>, output: Box<dyn Write + Send>) -> SharedChannel {
        Arc::new(Mutex::new(Self { input, output }))
    }

    fn send(&mut self, message: &Message) -> io::Result<()> {
        message.send(&mut self.output)
    }

    fn receive(&mut self) -> io::Result<Option<Message>> {
        Message::receive(&mut self.input)
    }
}

pub(super) type SharedChannel = Arc<Mutex<ParentChannel>>;

/// The volume, whose bytes the parent has.
struct ParentDevice {
    channel: SharedChannel,
    size_bytes: u64,
}

impl BlockDevice for ParentDevice {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        let failed = |source: io::Error| DeviceError::io("read", offset, source);
        let mut at = offset;
        for part in buffer.chunks_mut(message::READ_BYTES_MAX) {
            let mut channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
            let length = u32::try_from(part.len()).unwrap_or(0);
            channel
                .send(&Message::new(message::READ).u64(at).u32(length))
                .map_err(failed)?;
            match channel.receive().map_err(failed)? {
                Some(answer) if answer.tag == message::BYTES && answer.body.len() == part.len() => {
                    part.copy_from_slice(&answer.body);
                }
                _ => return Err(failed(io::Error::other("the disk cannot be read"))),
            }
            at += u64::from(length);
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> holdfast_block::Result<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(range.end.saturating_sub(range.start), ExtentKind::Data);
        Ok(list)
    }
}

/// Opens the file system that the parent asks for and answers its requests, until the parent closes the connection. A
/// panic of the reader becomes an error of the request. `notes` are added to those of the file system.
///
/// # Errors
/// The connection breaks, or the parent sends what no parent sends.
pub fn serve(input: Box<dyn Read + Send>, output: Box<dyn Write + Send>, notes: &[String]) -> io::Result<()> {
    let channel = ParentChannel::shared(input, output);
    let Some(request) = receive(&channel)? else {
        return Ok(());
    };
    let mut file_system = match guarded(|| open(&channel, &request)) {
        Err(error) => return send(&channel, &message::failed(&error)),
        Ok(file_system) => file_system,
    };
    let opened = OpenedFileSystem {
        root: file_system.root(),
        ignores_case: file_system.ignores_case(),
        notes: [file_system.notes().as_slice(), notes].concat(),
    };
    send(&channel, &message::opened(&opened))?;
    while let Some(request) = receive(&channel)? {
        let answer = guarded(|| answer(&channel, &mut *file_system, &request));
        send(&channel, &answer.unwrap_or_else(|error| message::failed(&error)))?;
    }
    Ok(())
}

pub(super) fn send(channel: &SharedChannel, message: &Message) -> io::Result<()> {
    channel.lock().unwrap_or_else(PoisonError::into_inner).send(message)
}

pub(super) fn receive(channel: &SharedChannel) -> io::Result<Option<Message>> {
    channel.lock().unwrap_or_else(PoisonError::into_inner).receive()
}

/// Turns a panic into an error.
pub(super) fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("unknown");
        Err(Error::Reader(format!("failed: {text}")))
    })
}

fn open(channel: &SharedChannel, request: &Message) -> Result<Box<dyn FileSystem>> {
    let request = message::opened_request(request)?;
    let device = ParentDevice {
        channel: Arc::clone(channel),
        size_bytes: request.size_bytes,
    };
    open_file_system(Arc::new(CachedDevice::new(device, CACHE_BYTES)), request.content)
}

pub(super) fn answer(channel: &SharedChannel, file_system: &mut dyn FileSystem, request: &Message) -> Result<Message> {
    let fields = request.fields();
    let node = NodeId(fields.u64(0)?);
    match request.tag {
        message::METADATA => Ok(message::metadata(&file_system.metadata(node)?)),
        message::DIRECTORY => {
            let mut entries = Message::new(message::ENTRIES);
            file_system.read_directory(node, &mut |entry| {
                let batch = std::mem::replace(&mut entries, Message::new(message::ENTRIES));
                entries = message::add_entry(batch, &entry);
                if entries.body.len() >= message::ENTRIES_BYTES {
                    let batch = std::mem::replace(&mut entries, Message::new(message::ENTRIES));
                    send(channel, &batch).map_err(|error| Error::Reader(error.to_string()))?;
                }
                Ok(())
            })?;
            send(channel, &entries).map_err(|error| Error::Reader(error.to_string()))?;
            Ok(Message::new(message::END))
        }
        message::FILE => {
            let length_max = fields.u32(16)? as usize;
            Ok(message::piece(&file_system.read_file(
                node,
                fields.u64(8)?,
                length_max,
            )?))
        }
        message::ATTRIBUTES => message::attributes(&file_system.attributes(node)?),
        message::LINK => Ok(Message::new(message::TARGET).bytes(&file_system.read_link(node)?)),
        _ => Err(fields.damaged("it is no request")),
    }
}
