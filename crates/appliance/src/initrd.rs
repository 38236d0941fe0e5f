//! The first file system of an appliance: this program, its libraries, kernel modules, and programs that kinds of
//! volumes need.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::kernel::ModuleIndex;
use super::{ApplianceError, ApplianceKernel, elf};
use holdfast_host::{StreamTools, Tools};

/// Modules that are loaded at the start, or when a volume needs them. A kernel can lack some of them.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "crc32c_generic",
    "crc32c_intel",
    "crc32c_cryptoapi",
    "libcrc32c",
    "ext4",
    "xfs",
    "btrfs",
    "f2fs",
    "reiserfs",
    "jfs",
    "nilfs2",
    "squashfs",
    "isofs",
    "udf",
    "erofs",
    "hfsplus",
    "bcachefs",
    "vfat",
    "exfat",
    "ntfs3",
    "nls_utf8",
    "nls_cp437",
    "nls_ascii",
    "nls_iso8859_1",
    "dm_mod",
    "dm_snapshot",
    "dm_thin_pool",
    "dm_mirror",
    "dm_raid",
    "dm_cache",
    "dm_cache_smq",
    "dm_writecache",
    "dm_integrity",
    "dm_zero",
    "dm_crypt",
    "dm_vdo",
    "kvdo",
    "md_mod",
    "linear",
    "raid0",
    "raid1",
    "raid10",
    "raid456",
    "xts",
    "cbc",
    "ecb",
    "essiv",
    "aesni_intel",
    "aes_generic",
    "sha256_generic",
    "sha512_generic",
    "algif_skcipher",
    "algif_hash",
    "serpent_generic",
    "twofish_generic",
    "adiantum",
];
/// The list of modules in the initrd: a line for each, with the numbers of its files in the order of loading.
pub(super) const MODULE_LIST: &str = "modules/list";

/// A program that a kind of volume needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ApplianceProgram {
    /// Activates volume groups.
    Lvm,
    /// Opens encrypted volumes.
    Cryptsetup,
}

impl ApplianceProgram {
    const fn name(self) -> &'static str {
        match self {
            Self::Lvm => "lvm",
            Self::Cryptsetup => "cryptsetup",
        }
    }

    fn find(self) -> Option<PathBuf> {
        let mut folders = holdfast_host::PROGRAM_PATH.split(':');
        folders.find_map(|folder| Some(Path::new(folder).join(self.name())).filter(|path| path.is_file()))
    }

    /// Whether it is installed.
    pub fn is_present(self) -> bool {
        self.find().is_some()
    }

    /// An error if it is not installed.
    pub fn require(self) -> Result<(), ApplianceError> {
        let purpose = match self {
            Self::Lvm => "volumes of LVM",
            Self::Cryptsetup => "volumes that LUKS encrypts",
        };
        let missing = || ApplianceError::NoProgram {
            program: self.name(),
            purpose,
        };
        self.find().map(drop).ok_or_else(missing)
    }
}

/// Builds an initrd: an archive of about 40 MB, in memory. Programs that are not installed are left out.
pub fn build_initrd(
    kernel: &ApplianceKernel,
    programs: &BTreeSet<ApplianceProgram>,
    tools: &dyn StreamTools,
) -> Result<Vec<u8>, ApplianceError> {
    let mut archive = Archive::default();
    let this = std::env::current_exe().map_err(ApplianceError::Start)?;
    archive.add_program("init", &this, tools)?;
    for program in programs {
        if let Some(path) = program.find() {
            archive.add_program(&format!("sbin/{}", program.name()), &path, tools)?;
        }
    }
    let index = ModuleIndex::read(kernel)?;
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    let mut list = String::new();
    for module in MODULES {
        let mut line = (*module).to_owned();
        for file in index.files_of(module) {
            let next = numbers.len();
            let number = *numbers.entry(file).or_insert(next);
            if number == next {
                archive.add(
                    &format!("modules/{number}"),
                    Kind::File,
                    &unpacked(&index.path(file), tools)?,
                );
            }
            line.push(' ');
            line.push_str(&number.to_string());
        }
        list.push_str(&line);
        list.push('\n');
    }
    archive.add(MODULE_LIST, Kind::File, list.as_bytes());
    for folder in [
        "proc",
        "sys",
        "dev",
        "tmp",
        "etc",
        "mnt",
        "run/lock/lvm",
        "run/lvm",
        "run/cryptsetup",
    ] {
        archive.add_folder(folder);
    }
    Ok(archive.finish())
}

/// The bytes of a module.
fn unpacked(path: &Path, tools: &dyn StreamTools) -> Result<Vec<u8>, ApplianceError> {
    let packer = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(path).map_err(|error| ApplianceError::file("read", path, error)),
    };
    let mut piped = tools.start(packer, &["-dc", &path.to_string_lossy()])?;
    drop(piped.take_input());
    let mut bytes = Vec::new();
    let output = piped.take_output();
    let read = output.map(|mut output| std::io::Read::read_to_end(&mut output, &mut bytes));
    match read {
        Some(Ok(_)) if !bytes.is_empty() => Ok(bytes),
        Some(Err(error)) => Err(ApplianceError::file("unpack", path, error)),
        _ => Err(ApplianceError::file(
            "unpack",
            path,
            std::io::ErrorKind::UnexpectedEof.into(),
        )),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    File,
    Program,
    Folder,
}

/// An archive in cpio's format `newc` (Documentation/driver-api/early-userspace/buffer-format.rst of Linux).
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    names: BTreeSet<String>,
}

impl Archive {
    fn add_folder(&mut self, path: &str) {
        let mut parents = Vec::new();
        for (at, _) in path.match_indices('/').chain([(path.len(), "")]) {
            parents.push(&path[..at]);
        }
        for parent in parents.into_iter().filter(|parent| !parent.is_empty()) {
            if !self.names.contains(parent) {
                self.entry(parent, Kind::Folder, &[]);
            }
        }
    }

    /// Adds a file with the folders above it, unless it exists.
    fn add(&mut self, path: &str, kind: Kind, content: &[u8]) {
        if self.names.contains(path) {
            return;
        }
        if let Some((folder, _)) = path.rsplit_once('/') {
            self.add_folder(folder);
        }
        self.entry(path, kind, content);
    }

    fn entry(&mut self, path: &str, kind: Kind, content: &[u8]) {
        let mode = match kind {
            Kind::File => 0o100_644,
            Kind::Program => 0o100_755,
            Kind::Folder => 0o040_755,
        };
        self.names.insert(path.to_owned());
        self.raw(path, mode, content);
    }

    fn raw(&mut self, path: &str, mode: u32, content: &[u8]) {
        let number = self.names.len();
        let fields = [
            number,
            mode as usize,
            0,
            0,
            1,
            0,
            content.len(),
            0,
            0,
            0,
            0,
            path.len() + 1,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.raw("TRAILER!!!", 0, &[]);
        self.bytes
    }

    /// Adds a program as `name`, with its loader and libraries.
    fn add_program(&mut self, name: &str, path: &Path, tools: &dyn Tools) -> Result<(), ApplianceError> {
        let read = |path: &Path| fs::read(path).map_err(|error| ApplianceError::file("read", path, error));
        let bytes = read(path)?;
        let program = elf::read(&bytes).ok_or_else(|| ApplianceError::NotAProgram { path: path.to_owned() })?;
        self.add(name, Kind::Program, &elf::without_symbols(bytes, &program));
        let Some(loader) = &program.interpreter else {
            return Ok(());
        };
        self.add(loader.trim_start_matches('/'), Kind::Program, &read(Path::new(loader))?);
        let listed = tools.ask(loader, &["--list", &path.to_string_lossy()])?;
        if !listed.is_success {
            return Err(ApplianceError::NotAProgram { path: path.to_owned() });
        }
        let libraries = libraries_of(&listed.output);
        // All libraries lie beside the C library: its folder is one that the loader searches.
        let folder = libraries.iter().find(|library| library.name.starts_with("libc."));
        let folder = folder
            .and_then(|library| library.path.parent())
            .unwrap_or(Path::new("/lib"));
        for library in &libraries {
            let target = folder.join(&library.name);
            let target = target.to_string_lossy();
            self.add(target.trim_start_matches('/'), Kind::Program, &read(&library.path)?);
        }
        Ok(())
    }
}

struct Library {
    name: String,
    path: PathBuf,
}

/// The libraries in the output of the loader: `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f...)`.
fn libraries_of(output: &str) -> Vec<Library> {
    let lines = output.lines().filter_map(|line| line.split_once(" => "));
    lines
        .filter_map(|(name, place)| {
            let path = place.rsplit_once(" (").map_or(place, |(path, _)| path).trim();
            path.starts_with('/').then(|| Library {
                name: name.trim().to_owned(),
                path: PathBuf::from(path),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{Archive, Kind, libraries_of};

    #[test]
    fn an_archive_has_its_folders_before_its_files_and_each_once() {
        let mut archive = Archive::default();
        archive.add("a/b/c", Kind::File, b"text");
        archive.add("a/b/c", Kind::File, b"other");
        archive.add("a/d", Kind::Program, b"");
        let bytes = archive.finish();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let places: Vec<_> = ["\u{0}a\0", "a/b\0", "a/b/c\0", "a/d\0", "TRAILER!!!\0"]
            .iter()
            .map(|name| text.find(name.trim_start_matches('\0')).expect("a name"))
            .collect();
        assert!(places.is_sorted() && bytes.len() % 4 == 0, "{places:?}");
        assert!(!text.contains("other"));
    }

    #[test]
    fn libraries_are_found_in_the_output_of_the_loader() {
        let output = "\tlinux-vdso.so.1 (0x1)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x2)\n\t/lib64/ld-linux.so.2 (0x3)\n";
        let found = libraries_of(output);
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].name.as_str(), found[0].path.to_str()),
            ("libc.so.6", Some("/lib/x/libc.so.6"))
        );
    }
}
