//! Kernels of this host, and their modules.

#![deny(clippy::indexing_slicing)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::ApplianceError;

/// The folder with the modules of all kernels.
const MODULE_FOLDER: &str = "/lib/modules";
/// The same folder of systems whose `/lib` is not a link to it.
const OTHER_MODULE_FOLDER: &str = "/usr/lib/modules";
/// Modules without which an appliance has no disks and no channel.
const NEEDED: [&str; 3] = ["virtio_pci", "virtio_blk", "virtio_console"];

/// A kernel and its modules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApplianceKernel {
    /// The image.
    pub image: PathBuf,
    /// The folder with its modules.
    pub modules: PathBuf,
    /// Its version, which names the folder.
    pub version: String,
}

/// Finds a kernel with modules: the file `named`, or else the running kernel, or else the newest of this host.
pub fn find_kernel(named: Option<&Path>) -> Result<ApplianceKernel, ApplianceError> {
    match named {
        Some(image) => of_file(image),
        None => of_host(
            &[MODULE_FOLDER, OTHER_MODULE_FOLDER].map(PathBuf::from),
            Path::new("/boot"),
        ),
    }
}

fn of_host(folders: &[PathBuf], boot: &Path) -> Result<ApplianceKernel, ApplianceError> {
    let mut kernels = Vec::new();
    for folder in folders {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let modules = entry.path();
            let version = entry.file_name().to_string_lossy().into_owned();
            let images = [
                boot.join(format!("vmlinuz-{version}")),
                modules.join("vmlinuz"),
                boot.join(format!("kernel-{version}")),
            ];
            let image = images.into_iter().find(|image| fs::File::open(image).is_ok());
            if let Some(image) = image.filter(|_| modules.join("modules.dep").is_file()) {
                kernels.push(ApplianceKernel {
                    image,
                    modules,
                    version,
                });
            }
        }
    }
    let running = rustix::system::uname().release().to_string_lossy().into_owned();
    let rank = |kernel: &ApplianceKernel| (kernel.version == running, version_key(&kernel.version));
    kernels.sort_by_key(rank);
    kernels.pop().ok_or(ApplianceError::NoKernel)
}

/// The numbers of a version, in order: 6.10 is newer than 6.9.
fn version_key(version: &str) -> Vec<u64> {
    let numbers = version.split(|letter: char| !letter.is_ascii_digit());
    numbers.filter_map(|number| number.parse().ok()).collect()
}

fn of_file(image: &Path) -> Result<ApplianceKernel, ApplianceError> {
    let bytes = fs::read(image).map_err(|error| ApplianceError::file("read", image, error))?;
    let version = version_of(&bytes).ok_or_else(|| ApplianceError::NotAKernel {
        kernel: image.to_owned(),
    })?;
    let parent = image.parent().unwrap_or(Path::new("."));
    let places = [
        parent.join("../lib/modules").join(&version),
        parent.join("../usr/lib/modules").join(&version),
        parent.join("modules").join(&version),
        Path::new(MODULE_FOLDER).join(&version),
        // vmlinuz lies in the folder of its modules on Fedora.
        parent.to_owned(),
    ];
    let modules = places.into_iter().find(|folder| folder.join("modules.dep").is_file());
    let modules = modules.ok_or_else(|| ApplianceError::NoModules {
        kernel: image.to_owned(),
        version: version.clone(),
    })?;
    Ok(ApplianceKernel {
        image: image.to_owned(),
        modules,
        version,
    })
}

/// The version in a bzImage (Documentation/arch/x86/boot.rst: `kernel_version`).
fn version_of(bytes: &[u8]) -> Option<String> {
    if bytes.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let at = usize::from(u16::from_le_bytes(bytes.get(0x20e..0x210)?.try_into().ok()?)) + 0x200;
    let text = bytes.get(at..at + 256.min(bytes.len().checked_sub(at)?))?;
    let version = text.split(|byte| matches!(byte, b' ' | 0)).next()?;
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b".-_+~".contains(byte);
    let version = std::str::from_utf8(version).ok()?;
    (!version.is_empty() && version != ".." && version.bytes().all(|byte| is_plain(&byte))).then(|| version.to_owned())
}

/// The modules of a kernel by their names.
pub(super) struct ModuleIndex {
    folder: PathBuf,
    version: String,
    /// The file of a module and those that must be loaded before it, in this order.
    files: BTreeMap<String, Vec<String>>,
    built_in: Vec<String>,
}

impl ModuleIndex {
    pub(super) fn read(kernel: &ApplianceKernel) -> Result<Self, ApplianceError> {
        let path = kernel.modules.join("modules.dep");
        let text = fs::read_to_string(&path).map_err(|error| ApplianceError::file("read", &path, error))?;
        let built_in = fs::read_to_string(kernel.modules.join("modules.builtin")).unwrap_or_default();
        let files = text.lines().filter_map(|line| line.split_once(':'));
        let index = Self {
            folder: kernel.modules.clone(),
            version: kernel.version.clone(),
            files: files
                .map(|(file, before)| {
                    let before = before.split_whitespace().rev().map(str::to_owned);
                    (module_name(file), before.chain([file.to_owned()]).collect())
                })
                .collect(),
            built_in: built_in.lines().map(module_name).collect(),
        };
        for module in NEEDED {
            if !index.built_in.iter().any(|name| name == module) && !index.files.contains_key(module) {
                return Err(ApplianceError::NoModule {
                    version: index.version,
                    module,
                });
            }
        }
        Ok(index)
    }

    /// The files of a module and of those that it needs, in the order of loading; none if the kernel has it built in, or
    /// has no such module.
    pub(super) fn files_of(&self, module: &str) -> &[String] {
        self.files.get(module).map_or(&[], Vec::as_slice)
    }

    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.folder.join(file)
    }
}

/// `kernel/fs/dm-mod.ko.xz` is the module `dm_mod`.
fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split(".ko").next().unwrap_or(name).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::path::Path;

    use super::{ModuleIndex, of_file, of_host, version_of};
    use crate::ApplianceError;

    fn write(path: &Path, content: impl AsRef<[u8]>) {
        let file = fs::File::create(path).expect("a new file");
        (&file).write_all(content.as_ref()).expect("a new file");
    }

    fn kernel(version: &str) -> Vec<u8> {
        let mut bytes = vec![0; 2048];
        bytes[0x202..0x206].copy_from_slice(b"HdrS");
        bytes[0x20e] = 0x80;
        let text = format!("{version} (root@host) #1");
        bytes[0x280..0x280 + text.len()].copy_from_slice(text.as_bytes());
        bytes
    }

    #[test]
    fn versions_are_read_from_kernels() {
        assert_eq!(
            version_of(&kernel("6.1.0-56-cloud-amd64")).unwrap(),
            "6.1.0-56-cloud-amd64"
        );
        for version in ["", "..", "6.1/../../x"] {
            assert_eq!(version_of(&kernel(version)), None, "{version}");
        }
        for length in 0..700 {
            version_of(&kernel("6.1")[..length]);
        }
    }

    #[test]
    fn the_newest_kernel_with_modules_is_chosen() {
        let root = tempfile::tempdir().expect("a folder");
        let boot = root.path().join("boot");
        let all = root.path().join("lib/modules");
        fs::create_dir_all(&boot).expect("a folder");
        let folders = [all.clone()];
        assert!(matches!(of_host(&folders, &boot), Err(ApplianceError::NoKernel)));
        for version in ["6.9.1", "6.10.0", "6.11.0", "6.12.0"] {
            fs::create_dir_all(all.join(version)).expect("a folder");
            write(&boot.join(format!("vmlinuz-{version}")), kernel(version));
        }
        // 6.11 has no modules, and 6.12 no kernel.
        for version in ["6.9.1", "6.10.0", "6.12.0"] {
            let text = "kernel/fs/xfs/xfs.ko.xz: kernel/lib/libcrc32c.ko kernel/lib/base.ko\nkernel/lib/base.ko:\n";
            write(&all.join(version).join("modules.dep"), text);
        }
        fs::remove_file(boot.join("vmlinuz-6.12.0")).expect("it was created");
        let found = of_host(&folders, &boot).unwrap();
        assert_eq!(found.version, "6.10.0");
        assert_eq!(of_file(&boot.join("vmlinuz-6.10.0")).unwrap().version, found.version);
        assert!(matches!(
            of_file(&boot.join("vmlinuz-6.11.0")),
            Err(ApplianceError::NoModules { .. })
        ));
        assert!(matches!(
            ModuleIndex::read(&found),
            Err(ApplianceError::NoModule { .. })
        ));
        let built_in = "kernel/virtio-pci.ko\nkernel/virtio_blk.ko\nkernel/virtio_console.ko\n";
        write(&found.modules.join("modules.builtin"), built_in);
        let index = ModuleIndex::read(&found).unwrap();
        let files = [
            "kernel/lib/base.ko",
            "kernel/lib/libcrc32c.ko",
            "kernel/fs/xfs/xfs.ko.xz",
        ];
        assert_eq!(index.files_of("xfs"), files);
        assert!(index.files_of("virtio_pci").is_empty());
    }
}
