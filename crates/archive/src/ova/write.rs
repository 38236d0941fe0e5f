//! Writing an OVA.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write};
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;

use aws_lc_rs::digest::{Context, SHA256};
use holdfast_block::BlockDevice;
use holdfast_image::{Continue, ImageId, StreamOptions, write_stream_optimized};

use super::manifest::line_of;
use crate::tar::{BLOCK_BYTES, header, padding_of};
use crate::{Error, Result};

/// A disk to write into an archive.
#[derive(Clone)]
pub struct OvaDisk<'d> {
    /// The name of its image, as in the descriptor.
    pub href: String,
    /// The identity of its image.
    pub id: ImageId,
    /// Its content.
    pub device: Arc<dyn BlockDevice + 'd>,
}

/// The output of an archive. The length of an image precedes it, but is known only when it has been compressed.
pub enum OvaOutput {
    /// A file, whose headers are completed afterwards.
    File(File),
    /// A pipe: each image is first written to an unnamed temporary file in this folder.
    Pipe(Box<dyn Write + Send>, PathBuf),
}

/// Options for writing an archive.
#[derive(Debug, Clone, Copy)]
pub struct OvaWriteOptions {
    /// Number of compression threads.
    pub threads: NonZero<usize>,
    /// Compression level, 1 to 12; `None` for the default.
    pub level: Option<u32>,
    /// Modification time of the members, in seconds since 1970.
    pub time: u64,
}

/// The result of writing an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OvaWritten {
    /// Bytes of the archive.
    pub bytes: u64,
}

/// Writes an archive: the descriptor of the machine, which becomes `NAME.ovf`, the disks in the order in which it names them, and a manifest.
///
/// Images are stream-optimized VMDKs, compressed on all cores. `progress` gets the number of disk bytes that are done, and can abort with an error.
///
/// # Errors
/// Reading the disks, writing, errors of `progress`. The output is then incomplete.
pub fn write_ova(
    output: OvaOutput,
    name: &str,
    descriptor: &str,
    disks: &[OvaDisk<'_>],
    options: OvaWriteOptions,
    progress: &mut dyn FnMut(u64) -> std::io::Result<()>,
) -> Result<OvaWritten> {
    let mut writer = Writer {
        output,
        at: 0,
        manifest: String::new(),
        options,
    };
    writer.text(&format!("{name}.ovf"), descriptor.as_bytes())?;
    let mut before = 0;
    for disk in disks {
        let mut advance = |done| progress(before + done);
        match &writer.output {
            OvaOutput::File(_) => writer.disk_in_place(disk, &mut advance)?,
            OvaOutput::Pipe(_, folder) => {
                let folder = folder.clone();
                writer.disk_through_file(disk, &folder, &mut advance)?;
            }
        }
        before += disk.device.size_bytes();
    }
    let manifest = std::mem::take(&mut writer.manifest);
    writer.text(&format!("{name}.mf"), manifest.as_bytes())?;
    writer.put(&[0; 2 * BLOCK_BYTES])?;
    writer.flush()?;
    Ok(OvaWritten { bytes: writer.at })
}

struct Writer {
    output: OvaOutput,
    /// Bytes written.
    at: u64,
    manifest: String,
    options: OvaWriteOptions,
}

impl Writer {
    fn stream(&mut self) -> &mut dyn Write {
        match &mut self.output {
            OvaOutput::File(file) => file,
            OvaOutput::Pipe(stream, _) => stream,
        }
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let offset = self.at;
        self.stream()
            .write_all(bytes)
            .map_err(|source| Error::Write { offset, source })?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let offset = self.at;
        self.stream().flush().map_err(|source| Error::Write { offset, source })
    }

    fn text(&mut self, name: &str, content: &[u8]) -> Result<()> {
        self.put(&header(name, content.len() as u64, self.options.time))?;
        self.put(content)?;
        self.put(&vec![0; padding_of(content.len() as u64)])?;
        let mut context = Context::new(&SHA256);
        context.update(content);
        self.manifest += &line_of(name, context.finish().as_ref());
        Ok(())
    }

    /// Writes an image after a header that is completed later.
    fn disk_in_place(
        &mut self,
        disk: &OvaDisk<'_>,
        progress: &mut dyn FnMut(u64) -> std::io::Result<()>,
    ) -> Result<()> {
        let header_at = self.at;
        self.put(&[0; BLOCK_BYTES])?;
        let options = self.options;
        let (length, digest) = write_image(self.stream(), disk, options, progress)?;
        self.at += length;
        self.put(&vec![0; padding_of(length)])?;
        let end = self.at;
        if let OvaOutput::File(file) = &mut self.output {
            let filled = file
                .seek(SeekFrom::Start(header_at))
                .and_then(|_| file.write_all(&header(&disk.href, length, options.time)))
                .and_then(|()| file.seek(SeekFrom::Start(end)));
            filled.map_err(|source| Error::Write {
                offset: header_at,
                source,
            })?;
        }
        self.manifest += &line_of(&disk.href, &digest);
        Ok(())
    }

    /// Writes an image to a temporary file, then its header and its content.
    fn disk_through_file(
        &mut self,
        disk: &OvaDisk<'_>,
        folder: &std::path::Path,
        progress: &mut dyn FnMut(u64) -> std::io::Result<()>,
    ) -> Result<()> {
        let stored = |source| Error::Spool {
            folder: folder.to_owned(),
            source,
        };
        let mut file = tempfile::tempfile_in(folder).map_err(stored)?;
        let (length, digest) = write_image(&mut file, disk, self.options, progress).map_err(|error| match error {
            Error::Write { source, .. } => stored(source),
            other => other,
        })?;
        file.rewind().map_err(stored)?;
        self.put(&header(&disk.href, length, self.options.time))?;
        let mut buffer = vec![0; 1 << 20];
        loop {
            let count = file.read(&mut buffer).map_err(stored)?;
            if count == 0 {
                break;
            }
            self.put(buffer.get(..count).unwrap_or_default())?;
        }
        self.put(&vec![0; padding_of(length)])?;
        self.manifest += &line_of(&disk.href, &digest);
        Ok(())
    }
}

/// Writes an image; returns its length and its SHA-256.
fn write_image(
    output: &mut dyn Write,
    disk: &OvaDisk<'_>,
    options: OvaWriteOptions,
    progress: &mut dyn FnMut(u64) -> std::io::Result<()>,
) -> Result<(u64, Vec<u8>)> {
    let mut output = HashingWriter {
        output,
        context: Context::new(&SHA256),
        length: 0,
        failure: None,
    };
    let image = StreamOptions {
        name: &disk.href,
        id: disk.id,
        level: options.level,
        threads: options.threads,
    };
    let mut stopped = None;
    let written = write_stream_optimized(&*disk.device, &mut output, &image, &mut |done| match progress(done) {
        Ok(()) => Continue::Go,
        Err(error) => {
            stopped = Some(error);
            Continue::Stop
        }
    });
    if let Some(source) = stopped {
        return Err(Error::Write {
            offset: output.length,
            source,
        });
    }
    // The image's error hides that writing the archive failed: report that failure instead.
    if let Some(source) = output.failure {
        return Err(Error::Write {
            offset: output.length,
            source,
        });
    }
    written?;
    progress(disk.device.size_bytes()).map_err(|source| Error::Write {
        offset: output.length,
        source,
    })?;
    Ok((output.length, output.context.finish().as_ref().to_vec()))
}

/// A copy of an error that is reported twice.
fn duplicate_error(error: &std::io::Error) -> std::io::Error {
    match error.raw_os_error() {
        Some(number) => std::io::Error::from_raw_os_error(number),
        None => std::io::Error::new(error.kind(), error.to_string()),
    }
}

/// Counts and hashes written bytes, and keeps the error of a failed write.
struct HashingWriter<'a> {
    output: &'a mut dyn Write,
    context: Context,
    length: u64,
    failure: Option<std::io::Error>,
}

impl Write for HashingWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = self.output.write(bytes).inspect_err(|error| {
            if error.kind() != std::io::ErrorKind::Interrupted {
                self.failure = Some(duplicate_error(error));
            }
        })?;
        self.context.update(bytes.get(..count).unwrap_or_default());
        self.length += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.output.flush()
    }
}
