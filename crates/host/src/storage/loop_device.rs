//! Block devices of files (loop devices).
//!
//! Sources: loop(4), `include/uapi/linux/loop.h`.
#![expect(unsafe_code, reason = "ioctl; the contract stands beside each use")]

use std::fs::File;
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, NoArg, Opcode, Setter, ioctl};

const CONTROL: &str = "/dev/loop-control";
const BLOCK_DEVICES: &str = "/sys/block";
const GET_FREE: Opcode = 0x4C82;
const CONFIGURE: Opcode = 0x4C0A;
const CLEAR: Opcode = 0x4C01;
const SET_CAPACITY: Opcode = 0x4C07;
/// Another process may take a free device first.
const ATTEMPT_COUNT_MAX: usize = 16;

const FLAG_READ_ONLY: u32 = 1;
/// The device is released when its last user closes it, such as a file system that is unmounted.
const FLAG_AUTOCLEAR: u32 = 4;
/// Reads and writes do not pass the page cache of the file.
const FLAG_DIRECT_IO: u32 = 16;

/// `struct loop_info64`.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopInfo>() == 232 && size_of::<LoopConfig>() == 304);

/// A call whose result is the return value.
struct Returned<const OPCODE: Opcode>;

// SAFETY: the call takes no pointer, and its return value is a number.
unsafe impl<const OPCODE: Opcode> Ioctl for Returned<OPCODE> {
    type Output = IoctlOutput;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        OPCODE
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut std::ffi::c_void) -> rustix::io::Result<IoctlOutput> {
        Ok(output)
    }
}

/// What a loop device shows.
#[derive(Debug, Clone, Copy)]
pub struct LoopRequest<'a> {
    /// The file.
    pub file: &'a Path,
    /// Offset in the file.
    pub offset: u64,
    /// Bytes from there on; 0 for all.
    pub length: u64,
    /// Whether it cannot be written.
    pub is_read_only: bool,
}

/// A loop device. The system releases it when it is dropped and no file system on it is mounted.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    file: File,
}

impl LoopDevice {
    /// Makes a block device of a file.
    ///
    /// # Errors
    /// The user is not root, the system has no loop devices, or the file cannot be opened.
    pub fn attach(request: &LoopRequest<'_>) -> std::io::Result<Self> {
        let file = File::options()
            .read(true)
            .write(!request.is_read_only)
            .open(request.file)?;
        let control = File::options().read(true).write(true).open(CONTROL)?;
        for _ in 0..ATTEMPT_COUNT_MAX {
            // SAFETY: GET_FREE takes no argument and returns a number.
            let number = unsafe { ioctl(&control, Returned::<GET_FREE>) }?;
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = File::options().read(true).write(!request.is_read_only).open(&path)?;
            match configure(&device, file.as_raw_fd(), request) {
                Ok(()) => return Ok(Self { path, file: device }),
                Err(Errno::BUSY) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Err(Errno::BUSY.into())
    }

    /// The path of the device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Releases the device at once if nothing uses it.
    ///
    /// # Errors
    /// It is in use.
    pub fn detach(self) -> std::io::Result<()> {
        // SAFETY: CLEAR takes no argument.
        Ok(unsafe { ioctl(&self.file, NoArg::<CLEAR>::new()) }?)
    }
}

fn configure(device: &File, file: RawFd, request: &LoopRequest<'_>) -> Result<(), Errno> {
    let mut file_name = [0; 64];
    // For `losetup` of systems without sysfs; the last byte stays zero.
    for (to, from) in file_name
        .iter_mut()
        .zip(request.file.as_os_str().as_bytes().iter().take(63))
    {
        *to = *from;
    }
    let read_only = if request.is_read_only { FLAG_READ_ONLY } else { 0 };
    let config = LoopConfig {
        fd: u32::try_from(file).map_err(|_| Errno::BADF)?,
        block_size: 0,
        info: LoopInfo {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset: request.offset,
            size_limit: request.length,
            number: 0,
            encrypt_type: 0,
            encrypt_key_size: 0,
            flags: FLAG_AUTOCLEAR | FLAG_DIRECT_IO | read_only,
            file_name,
            crypt_name: [0; 64],
            encrypt_key: [0; 32],
            init: [0; 2],
        },
        reserved: [0; 8],
    };
    // SAFETY: CONFIGURE reads a `struct loop_config`, which has the layout of `LoopConfig`.
    unsafe { ioctl(device, Setter::<CONFIGURE, LoopConfig>::new(config)) }
}

/// Adopts the new size of the file of a loop device.
///
/// # Errors
/// The device cannot be opened, or the caller is not root.
pub fn refresh_loop_size(device: &Path) -> std::io::Result<()> {
    let device = File::options().read(true).write(true).open(device)?;
    // SAFETY: SET_CAPACITY takes no argument.
    Ok(unsafe { ioctl(&device, NoArg::<SET_CAPACITY>::new()) }?)
}

/// The loop devices of a file: an absolute path without symbolic links.
pub fn loop_devices_of(file: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(BLOCK_DEVICES) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name();
        let backing = std::fs::read(entry.path().join("loop/backing_file")).unwrap_or_default();
        if backing.trim_ascii_end() == file.as_os_str().as_bytes() {
            found.push(Path::new("/dev").join(name));
        }
    }
    found
}

/// The file of a loop device; none if it is not one, or has no file.
pub fn file_of_loop_device(device: &Path) -> Option<PathBuf> {
    let name = device.strip_prefix("/dev").ok()?;
    let file = Path::new(BLOCK_DEVICES).join(name).join("loop/backing_file");
    let path = std::fs::read(file).ok()?;
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(path.trim_ascii_end())))
}
