//! Requests to files.

use std::io::ErrorKind;
use std::ops::Range;

use holdfast_block::{BlockDevice, BlockDeviceMut, Error as DeviceError, ExtentKind};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::{FuseSession, Outcome, READ_BYTES_MAX, SessionStart};
use crate::fuse::handles::OpenFile;
use crate::fuse::wire::{
    AttributeChange, Attributes, FileAccess, HandleId, NodeId, NodeType, ReadRange, SeekTarget, SpaceChange,
    WriteRequest, open_flag,
};

/// Extents of a device that one step of a search for data or a hole looks at.
const SEEK_EXTENT_COUNT: usize = 256;

/// A file that was opened.
pub(super) struct OpenedFile {
    pub(super) handle: HandleId,
    pub(super) flags: u32,
}

impl FuseSession {
    pub(super) fn open(&self, node: NodeId) -> Result<OpenedFile, Errno> {
        let file = self.open_node(node)?;
        let flags = match file.attributes.node_type {
            // The file system above has a cache of its own.
            NodeType::File(FileAccess::Writable) => open_flag::DIRECT | open_flag::PARALLEL_WRITES,
            _ => open_flag::KEEPS_CACHE,
        };
        let handle = self.handles.open_file(file).ok_or(Errno::NFILE)?;
        Ok(OpenedFile { handle, flags })
    }

    fn open_node(&self, node: NodeId) -> Result<OpenFile, Errno> {
        if let Some(file) = self.handles.file_of(node) {
            return Ok(file);
        }
        let attributes = self.attributes(node)?;
        let content = self.tree.content(node).ok_or(match attributes.node_type {
            NodeType::Directory => Errno::ISDIR,
            NodeType::File(_) | NodeType::Link => Errno::INVAL,
        })?;
        let device = content.open().map_err(|error| {
            self.events.open_failed(&content.identity(), &error);
            match error.kind() {
                ErrorKind::NotFound => Errno::STALE,
                _ => Errno::IO,
            }
        })?;
        Ok(OpenFile { attributes, device })
    }

    /// The file of a handle. A handle of a predecessor is opened again.
    fn file(&self, node: NodeId, handle: HandleId) -> Result<OpenFile, Errno> {
        match (self.handles.file(handle), self.start) {
            (Some(file), _) => Ok(file),
            (None, SessionStart::New) => Err(Errno::BADF),
            (None, SessionStart::Successor { .. }) => {
                let file = self.open_node(node)?;
                self.handles.adopt(handle, file.clone());
                Ok(file)
            }
        }
    }

    /// Reports an error of a device. A full disk of the host is distinguished from other errors.
    fn failed(&self, file: &OpenFile, error: &DeviceError) -> Errno {
        let content = self.tree.content(file.attributes.node);
        let name = content.map_or_else(|| "a removed file".to_owned(), |content| content.identity());
        self.events.request_failed(&name, error);
        if error.is_no_space() { Errno::NOSPC } else { Errno::IO }
    }

    /// Reads up to the end of the file.
    pub(super) fn read(&self, node: NodeId, range: ReadRange, body: &mut Vec<u8>) -> Outcome {
        let file = self.file(node, range.handle)?;
        let device = file.device.reader();
        let left = device.size_bytes().saturating_sub(range.offset);
        let length = u64::from(range.length.min(READ_BYTES_MAX)).min(left);
        // The read overwrites everything, so only bytes that the buffer did not have yet are cleared.
        body.resize(usize::try_from(length).expect("at most 1 MiB"), 0);
        if body.is_empty() {
            // A device refuses a read that starts past its end.
            return Ok(());
        }
        let read = device.read_at(body, range.offset);
        read.map_err(|error| self.failed(&file, &error))
    }

    /// Writes, and returns the number of bytes. A file does not grow.
    pub(super) fn write(&self, node: NodeId, request: &WriteRequest<'_>) -> Result<u32, Errno> {
        let file = self.file(node, request.handle)?;
        let device = writer(&file)?;
        device
            .check_bounds(request.offset, request.data.len() as u64)
            .map_err(|_| Errno::NOSPC)?;
        let written = device.write_at(request.data, request.offset);
        written.map_err(|error| self.failed(&file, &error))?;
        Ok(u32::try_from(request.data.len()).expect("at most 1 MiB"))
    }

    /// Makes a range zero, and releases its space if possible. Other changes of space are not supported.
    pub(super) fn allocate(&self, node: NodeId, change: &SpaceChange) -> Outcome {
        let file = self.file(node, change.handle)?;
        let device = writer(&file)?;
        let mode = FallocateFlags::from_bits_retain(change.mode);
        let keeps_size = mode.contains(FallocateFlags::KEEP_SIZE);
        if mode - FallocateFlags::KEEP_SIZE != FallocateFlags::PUNCH_HOLE
            && mode - FallocateFlags::KEEP_SIZE != FallocateFlags::ZERO_RANGE
        {
            return Err(Errno::OPNOTSUPP);
        }
        let end = change.offset.checked_add(change.length).ok_or(Errno::FBIG)?;
        let range = match device.size_bytes() {
            size_bytes if end <= size_bytes => change.offset..end,
            size_bytes if keeps_size => change.offset.min(size_bytes)..size_bytes,
            _ => return Err(Errno::NOSPC),
        };
        let zeroed = zero(device, range);
        zeroed.map_err(|error| self.failed(&file, &error))
    }

    /// Changes of times, owners and modes are accepted and ignored, since programs such as cp set them after a write.
    pub(super) fn set_attributes(&self, node: NodeId, change: AttributeChange) -> Result<Attributes, Errno> {
        let attributes = self.attributes(node)?;
        match (attributes.node_type, change.size_bytes) {
            (NodeType::File(FileAccess::Writable), Some(size_bytes)) if size_bytes != attributes.size_bytes => {
                Err(Errno::PERM)
            }
            (NodeType::File(FileAccess::Writable), _) => Ok(attributes),
            _ => Err(Errno::ROFS),
        }
    }

    pub(super) fn sync(&self, node: NodeId, handle: HandleId) -> Outcome {
        let file = self.file(node, handle)?;
        match file.device.writer() {
            Some(device) => device.flush().map_err(|error| self.failed(&file, &error)),
            None => Ok(()),
        }
    }

    /// Flushes all files that can be written.
    pub(super) fn sync_all(&self) -> Outcome {
        for file in self.handles.writable_files() {
            if let Some(device) = file.device.writer() {
                device.flush().map_err(|error| self.failed(&file, &error))?;
            }
        }
        Ok(())
    }

    /// The next data or hole at or after `offset`. The end of the file is a hole.
    pub(super) fn seek(&self, node: NodeId, handle: HandleId, offset: u64, target: SeekTarget) -> Result<u64, Errno> {
        let file = self.file(node, handle)?;
        let found = seek(file.device.reader(), offset, target).map_err(|error| self.failed(&file, &error))?;
        found.ok_or(Errno::NXIO)
    }
}

fn writer(file: &OpenFile) -> Result<&dyn BlockDeviceMut, Errno> {
    file.device.writer().ok_or(Errno::ROFS)
}

/// Zeroes in one call are limited, so that a discard of a whole disk does not hold the locks of the device for long.
const ZERO_BYTES_MAX: u64 = 256 << 20;

fn zero(device: &dyn BlockDeviceMut, range: Range<u64>) -> holdfast_block::Result<()> {
    let mut at = range.start;
    while at < range.end {
        let end = range.end.min(at.saturating_add(ZERO_BYTES_MAX));
        device.write_zeroes(at..end)?;
        at = end;
    }
    Ok(())
}

fn seek(device: &dyn BlockDevice, offset: u64, target: SeekTarget) -> holdfast_block::Result<Option<u64>> {
    let size_bytes = device.size_bytes();
    let mut at = offset;
    while at < size_bytes {
        let list = device.extents(at..size_bytes, SEEK_EXTENT_COUNT)?;
        let found = list.iter().find(|extent| match target {
            SeekTarget::Data => extent.kind == ExtentKind::Data,
            SeekTarget::Hole => extent.kind != ExtentKind::Data,
        });
        if let Some(extent) = found {
            return Ok(Some(extent.offset.max(offset)));
        }
        at = list.end();
    }
    let is_end = target == SeekTarget::Hole && offset < size_bytes;
    Ok(is_end.then_some(size_bytes))
}
