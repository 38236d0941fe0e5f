//! Starts a machine from its saved memory.
//!
//! libvirt reads the format that `virsh save` writes: a header, the machine's configuration, and QEMU's stream.
//! Holdfast writes this format to a named pipe, so that the memory is not stored. A libvirt that cannot read a pipe
//! gets a file. Source: libvirt's `src/qemu/qemu_saveimage.h`, version 2 of the format, unchanged since 0.9.2; the
//! cookie exists since 3.1.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_hardware::xml::Element;
use roxmltree::Document;
use rustix::fs::{CWD, Mode, OFlags};
use virt::sys;

use super::Libvirt;
use crate::hypervisor::error::{Error, Result};
use crate::hypervisor::traits::{MEMORY_PIPE, Resumption};

const MAGIC: &[u8; 16] = b"LibvirtQemudSave";
const VERSION: u32 = 2;
/// Unused numbers of the header.
const UNUSED: usize = 14;
/// The first version of libvirt that opens the file twice.
const READS_TWICE: [u32; 3] = [11, 2, 0];
/// Interval of the checks whether libvirt has opened the pipe.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

impl Libvirt {
    /// Since 11.2 libvirt opens the file for its header, and again to read all of it.
    pub(super) fn reads_memory_twice(&self) -> bool {
        self.version().is_some_and(|version| version >= READS_TWICE)
    }

    /// Uses a pipe if libvirt reads it only once. If the pipe is not read to its end for any reason (libvirt opens it
    /// twice, or its mount namespace hides the folder), uses a file in the folder of the machine's images.
    pub(super) fn start_from_memory(&self, resumption: &Resumption<'_>) -> Result<()> {
        let name = super::change::name_in(resumption.configuration);
        let refused = |reason: String| Error::Refused {
            action: "resume",
            machine: name.clone(),
            reason,
        };
        let head = head(resumption.configuration, resumption.original_configuration).map_err(refused)?;
        if !self.reads_memory_twice() {
            match self.start_by_pipe(&head, resumption) {
                Ok(()) => return Ok(()),
                Err(PipeFailure::Final(reason)) => return Err(refused(reason)),
                Err(PipeFailure::NotRead) => {}
            }
        }
        write_to_file(&head, resumption).map_err(|error| refused(error.to_string()))?;
        self.restore(resumption.file).map_err(refused)
    }

    fn restore(&self, path: &Path) -> std::result::Result<(), String> {
        let path = path.to_str().ok_or("its path is not UTF-8")?;
        let restored = self
            .connection_at_work()
            .restore_domain_flags(path, None, sys::VIR_DOMAIN_SAVE_RUNNING);
        restored.map_err(|error| error.message().to_owned())
    }

    fn start_by_pipe(&self, head: &[u8], resumption: &Resumption<'_>) -> std::result::Result<(), PipeFailure> {
        let pipe = resumption.folder.join(MEMORY_PIPE);
        let made = rustix::fs::mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR);
        made.map_err(|errno| PipeFailure::Final(errno.to_string()))?;
        let is_over = AtomicBool::new(false);
        let (restored, written) = std::thread::scope(|scope| {
            let writer = scope.spawn(|| write_to_pipe(&pipe, head, resumption, &is_over));
            let restored = self.restore(&pipe);
            is_over.store(true, Ordering::Relaxed);
            (
                restored,
                writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            )
        });
        drop(std::fs::remove_file(&pipe));
        match (restored, written) {
            (Ok(()), _) => Ok(()),
            (Err(_), Err(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(PipeFailure::NotRead),
            // If the memory could not be read, QEMU's message about the end of the stream adds no information.
            (Err(_), Err(error)) => Err(PipeFailure::Final(error.to_string())),
            (Err(reason), Ok(())) => Err(PipeFailure::Final(reason)),
        }
    }
}

/// Why a machine did not start through a pipe.
enum PipeFailure {
    /// The pipe was not read to its end: a file may work.
    NotRead,
    /// The machine cannot start. A file would not help.
    Final(String),
}

/// Writes everything to a new file with permissions only for this user and libvirt.
fn write_to_file(head: &[u8], resumption: &Resumption<'_>) -> std::io::Result<()> {
    let options = File::options().write(true).create_new(true).mode(0o600).to_owned();
    let mut file = options.open(resumption.file)?;
    file.write_all(head)?;
    (resumption.write)(&mut file)
}

/// Writes everything to the pipe once a reader has opened it.
fn write_to_pipe(pipe: &Path, head: &[u8], resumption: &Resumption<'_>, is_over: &AtomicBool) -> std::io::Result<()> {
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).expect("flags are small");
    let mut opened = loop {
        match File::options().write(true).custom_flags(flags).open(pipe) {
            Ok(opened) => break opened,
            // There is no reader yet, or there will never be a reader.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) => {
                if is_over.load(Ordering::Relaxed) {
                    return Err(std::io::ErrorKind::BrokenPipe.into());
                }
                resumption.clock.sleep(POLL_INTERVAL);
            }
            Err(error) => return Err(error),
        }
    };
    rustix::io::ioctl_fionbio(&opened, false)?;
    opened.write_all(head)?;
    (resumption.write)(&mut opened)
}

/// Everything before QEMU's stream.
fn head(configuration: &str, original: &str) -> std::result::Result<Vec<u8>, String> {
    let cookie = cookie(original)?;
    let texts = [configuration, &cookie];
    let length: usize = texts.iter().map(|text| text.len() + 1).sum();
    let number = |number: usize| u32::try_from(number).map_err(|_| "its configuration is too long".to_owned());
    let mut head = MAGIC.to_vec();
    // Version; length of the texts; whether the machine was running; no compression; offset of the cookie.
    let numbers = [VERSION, number(length)?, 1, 0, number(configuration.len() + 1)?];
    for number in numbers.into_iter().chain([0; UNUSED]) {
        head.extend(number.to_ne_bytes());
    }
    for text in texts {
        head.extend(text.as_bytes());
        head.push(0);
    }
    Ok(head)
}

/// The cookie: the original processor, which the configuration may describe differently.
fn cookie(original: &str) -> std::result::Result<String, String> {
    let document = Document::parse(original).map_err(|error| error.to_string())?;
    let cpu = crate::hypervisor::domain_xml::child(document.root_element(), "cpu");
    let cookie = match cpu {
        Some(cpu) => Element::new("cookie").copy(cpu),
        None => Element::new("cookie"),
    };
    let reboot = Element::new("allowReboot").attribute("value", "yes");
    Ok(cookie.child(reboot).to_string())
}

#[cfg(test)]
mod tests {
    use super::{cookie, head};

    #[test]
    fn the_header_has_the_format_of_libvirt() {
        let head = head(
            "<domain/>",
            "<domain><cpu mode='custom'><model>x</model></cpu></domain>",
        )
        .unwrap();
        assert_eq!(&head[..16], b"LibvirtQemudSave");
        let number = |at: usize| u32::from_ne_bytes(head[16 + at * 4..20 + at * 4].try_into().unwrap());
        assert_eq!((number(0), number(2), number(3), number(4)), (2, 1, 0, 10));
        let texts = &head[16 + 19 * 4..];
        assert_eq!(texts.len(), usize::try_from(number(1)).unwrap());
        let texts: Vec<&[u8]> = texts.split(|byte| *byte == 0).collect();
        assert_eq!(texts[0], b"<domain/>");
        assert!(texts[1].starts_with(b"<cookie><cpu mode='custom'><model>x</model></cpu>"));
        assert!(texts[2].is_empty() && texts.len() == 3);
    }

    #[test]
    fn a_machine_without_a_cpu_element_has_none_in_the_cookie() {
        assert!(cookie("<domain/>").unwrap().starts_with("<cookie><allowReboot"));
        assert!(cookie("<domain").is_err());
    }
}
