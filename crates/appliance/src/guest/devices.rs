//! The disks of an appliance, and the volumes on them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{BlockDevice, Clock as _, Error as DeviceError, ExtentKind, ExtentList, SystemClock};
use holdfast_guest_files::protocol::{ApplianceVolume, ApplianceVolumes, ScanReport, ScanRequest};
use holdfast_guest_files::{Content, Error, FileSystem, Result, detect_content};

use super::members::{MemberDevice, assemble, read_member};
use super::modules::try_load;
use super::mounted::{MountRequest, mount_volume};
use holdfast_host::{LocalTools, StreamTools as _, Tools as _};

const BLOCK_CLASS: &str = "/sys/class/block";
const SECTOR_BYTES: u64 = 512;
/// Layers of arrays, encryption and volume groups on one another.
const LAYER_COUNT_MAX: usize = 6;
const DISK_LOOK_INTERVAL: Duration = Duration::from_millis(10);
const DISK_LOOK_COUNT: u32 = 1000;
/// A volume group of a hundred disks, in emulation.
const PROGRAM_PATIENCE: Duration = Duration::from_secs(240);
/// The configuration of LVM: there is no udev, and thin pools are not repaired.
const LVM_CONFIGURATION: &str = "global{thin_check_executable=\"\" cache_check_executable=\"\" use_lvmpolld=0 \
    event_activation=0 locking_type=1} activation{udev_sync=0 udev_rules=0 verify_udev_operations=0 monitoring=0} \
    devices{obtain_device_list_from_udev=0 external_device_info_source=\"none\" use_devicesfile=0 \
    multipath_component_detection=0} backup{backup=0 archive=0}";

/// A block device of the appliance.
#[derive(Debug, Clone)]
struct Leaf {
    /// The name that users know.
    name: String,
    /// The name of the kernel: `vda1`.
    device: String,
}

/// The disks, and what was found on them.
#[derive(Default)]
pub(super) struct GuestDisks {
    found: Vec<FoundVolume>,
}

struct FoundVolume {
    path: PathBuf,
    content: Content,
    /// All devices of a btrfs.
    identity: Option<Vec<u8>>,
    problem: Option<String>,
}

impl ApplianceVolumes for GuestDisks {
    fn scan(&mut self, request: &ScanRequest) -> Result<ScanReport> {
        let mut search = Search {
            request,
            report: ScanReport::default(),
            found: Vec::new(),
            array_count: 0,
            opened_count: 0,
            groups: Vec::new(),
        };
        let mut leaves = disks(&request.disks)?;
        for _ in 0..LAYER_COUNT_MAX {
            leaves = search.layer(leaves);
            if leaves.is_empty() {
                break;
            }
        }
        self.found = search.found;
        Ok(search.report)
    }

    fn mount(&mut self, volume: u32) -> Result<Box<dyn FileSystem>> {
        let found = usize::try_from(volume).ok().and_then(|number| self.found.get(number));
        let found = found.ok_or_else(|| Error::Reader("has no such volume".to_owned()))?;
        if let Some(problem) = &found.problem {
            return Err(Error::Unsupported {
                what: problem.clone(),
                detail: String::new(),
            });
        }
        let others = self
            .found
            .iter()
            .filter(|other| other.identity.is_some() && other.identity == found.identity);
        mount_volume(&MountRequest {
            device: &found.path,
            content: found.content,
            number: volume,
            parts: others.map(|other| other.path.clone()).collect(),
        })
    }
}

/// The disks by their serial numbers, and their partitions.
fn disks(names: &[String]) -> Result<Vec<Leaf>> {
    let mut devices: BTreeMap<String, String> = BTreeMap::new();
    let clock = SystemClock::new();
    for _ in 0..DISK_LOOK_COUNT {
        for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
            if let Ok(serial) = fs::read_to_string(entry.path().join("serial")) {
                devices.insert(
                    serial.trim().to_owned(),
                    entry.file_name().to_string_lossy().into_owned(),
                );
            }
        }
        if devices.len() >= names.len() {
            break;
        }
        clock.sleep(DISK_LOOK_INTERVAL);
    }
    let mut leaves = Vec::new();
    for (number, name) in names.iter().enumerate() {
        let device = devices.get(&format!("d{number}"));
        let device = device.ok_or_else(|| Error::Reader(format!("does not have the disk {name}")))?;
        leaves.extend(partitions(name, device));
    }
    Ok(leaves)
}

/// The partitions of a device; the device itself if it has none.
fn partitions(name: &str, device: &str) -> Vec<Leaf> {
    let folder = Path::new(BLOCK_CLASS).join(device);
    let mut parts = Vec::new();
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        let number = fs::read_to_string(entry.path().join("partition"));
        if let Some(number) = number.ok().and_then(|number| number.trim().parse::<u32>().ok()) {
            parts.push((number, entry.file_name().to_string_lossy().into_owned()));
        }
    }
    parts.sort();
    if parts.is_empty() {
        let name = if name.contains('/') {
            name.to_owned()
        } else {
            format!("{name}:whole")
        };
        return vec![Leaf {
            name,
            device: device.to_owned(),
        }];
    }
    let leaves = parts.into_iter().map(|(number, device)| Leaf {
        name: format!("{name}:{number}"),
        device,
    });
    leaves.collect()
}

struct Search<'a> {
    request: &'a ScanRequest,
    report: ScanReport,
    found: Vec<FoundVolume>,
    array_count: usize,
    opened_count: usize,
    /// Logical volumes that were found already.
    groups: Vec<String>,
}

impl Search<'_> {
    /// Looks at devices, and returns those that appeared by it.
    fn layer(&mut self, leaves: Vec<Leaf>) -> Vec<Leaf> {
        let mut next = Vec::new();
        let mut members = Vec::new();
        let mut has_group = false;
        for leaf in leaves {
            let opened = Device::open(&leaf.device).map_err(DeviceError::layer);
            let (device, detected) = match opened.and_then(|device| {
                let detected = detect_content(&device).map_err(DeviceError::layer)?;
                Ok((device, detected))
            }) {
                Ok(opened) => opened,
                Err(error) => {
                    self.report
                        .notes
                        .push(format!("{}: {}", leaf.name, holdfast_block::error_text(&error)));
                    continue;
                }
            };
            let (content, label) = detected;
            let mut problem = None;
            match content {
                Content::MdMember => match (read_member(&device), number_of(&leaf.device)) {
                    (Some(member), Some(number)) => members.push(MemberDevice { member, number }),
                    _ => problem = Some("its superblock cannot be read".to_owned()),
                },
                Content::LvmMember => has_group = true,
                Content::Luks => match self.open_encrypted(&leaf) {
                    Ok(inner) => {
                        next.push(inner);
                        continue;
                    }
                    Err(reason) => problem = Some(reason),
                },
                _ => {}
            }
            self.add(&leaf, &device, content, label, problem);
        }
        let first = self.array_count;
        let arrays = assemble(members, first, &mut self.report.notes);
        self.array_count += arrays.len();
        next.extend(arrays.iter().flat_map(|array| partitions(&array.name, &array.device)));
        if has_group {
            next.extend(self.activate_groups());
        }
        next
    }

    fn add(&mut self, leaf: &Leaf, device: &Device, content: Content, label: Option<String>, problem: Option<String>) {
        let identity = (content == Content::Btrfs).then(|| {
            let mut identity = vec![0; 16];
            device.read_at(&mut identity, (64 << 10) + 32).ok().map(|()| identity)
        });
        self.report.volumes.push(ApplianceVolume {
            name: leaf.name.clone(),
            content,
            label,
            size_bytes: device.size_bytes,
            problem: problem.clone(),
        });
        self.found.push(FoundVolume {
            path: device_path(&leaf.device),
            content,
            identity: identity.flatten(),
            problem,
        });
    }

    /// Opens an encrypted volume with one of the passphrases.
    fn open_encrypted(&mut self, leaf: &Leaf) -> std::result::Result<Leaf, String> {
        if self.request.passphrases.is_empty() {
            return Err("encrypted by LUKS, and no passphrase is given".to_owned());
        }
        if !Path::new("/sbin/cryptsetup").exists() {
            return Err("encrypted by LUKS, and cryptsetup is not installed".to_owned());
        }
        try_load(&[
            "dm_mod",
            "dm_crypt",
            "dm_integrity",
            "aesni_intel",
            "aes_generic",
            "xts",
            "cbc",
            "ecb",
            "essiv",
            "sha256_generic",
            "sha512_generic",
            "algif_skcipher",
            "algif_hash",
            "adiantum",
            "serpent_generic",
            "twofish_generic",
        ]);
        let target = format!("opened{}", self.opened_count);
        let path = device_path(&leaf.device);
        let mut last = String::new();
        for passphrase in &self.request.passphrases {
            let path = path.to_string_lossy();
            let words = [
                "open",
                "--type",
                "luks",
                "--disable-locks",
                "--batch-mode",
                "--key-file",
                "-",
                &path,
                &target,
            ];
            let tools = tools();
            let mut program = tools.start("cryptsetup", &words).map_err(|error| error.to_string())?;
            program.write_input(passphrase).map_err(|error| error.to_string())?;
            let ended = program.answer(&SystemClock::new(), PROGRAM_PATIENCE);
            let (ended, _) = ended.map_err(|error| error.to_string())?;
            if ended.is_success() {
                self.opened_count += 1;
                // Without udev the node below /dev/mapper is no link to the device.
                let node = fs::metadata(Path::new("/dev/mapper").join(&target)).map(|node| node.rdev());
                let device = node.and_then(|number| {
                    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
                    fs::canonicalize(format!("/sys/dev/block/{major}:{minor}"))
                });
                let device = device.map_err(|error| format!("opened by LUKS, and has no device: {error}"))?;
                return Ok(Leaf {
                    name: leaf.name.clone(),
                    device: kernel_name(&device),
                });
            }
            last = match ended.code {
                Some(2) => "encrypted by LUKS, and the passphrase is wrong".to_owned(),
                _ => format!("encrypted by LUKS, and cannot be opened: {}", ended.reason()),
            };
        }
        Err(last)
    }

    /// Activates all volume groups; returns their logical volumes.
    fn activate_groups(&mut self) -> Vec<Leaf> {
        if !Path::new("/sbin/lvm").exists() {
            self.report
                .notes
                .push("volume groups are not read: lvm2 is not installed".to_owned());
            return Vec::new();
        }
        try_load(&["dm_mod"]);
        let list = ["lvs", "--noheadings", "--separator", "|", "-a", "-o", "segtype"];
        for kind in ask_lvm(&list).unwrap_or_default().lines() {
            match kind.trim() {
                kind if kind.starts_with("thin") => try_load(&["dm_thin_pool"]),
                kind if kind.starts_with("raid") => {
                    // The kernel would ask for the module of a level by a program that is not here.
                    try_load(&["raid0", "raid1", "raid10", "raid456", "dm_raid"]);
                }
                kind if kind.starts_with("cache") => try_load(&["dm_cache", "dm_cache_smq"]),
                kind if kind.starts_with("vdo") => try_load(&["dm_vdo", "kvdo"]),
                "mirror" => try_load(&["dm_mirror"]),
                "snapshot" => try_load(&["dm_snapshot"]),
                "writecache" => try_load(&["dm_writecache"]),
                "integrity" => try_load(&["dm_integrity"]),
                _ => {}
            }
        }
        // Snapshots are not marked as such by the kind of their segments.
        try_load(&["dm_snapshot", "dm_zero"]);
        if let Err(reason) = ask_lvm(&["vgchange", "--activate", "y", "--ignoreactivationskip", "--sysinit"]) {
            self.report
                .notes
                .push(format!("not all volumes of LVM can be activated: {reason}"));
        }
        let fields = "vg_name,lv_name,lv_kernel_major,lv_kernel_minor,segtype,lv_active";
        let words = ["lvs", "--noheadings", "--separator", "|", "-o", fields];
        let mut leaves = Vec::new();
        for line in ask_lvm(&words).unwrap_or_default().lines() {
            let parts: Vec<&str> = line.trim().split('|').collect();
            let [group, volume, major, minor, kind, active] = parts.as_slice() else {
                continue;
            };
            let name = format!("{group}/{volume}");
            if matches!(*kind, "thin-pool" | "cache-pool" | "vdo-pool") || self.groups.contains(&name) {
                continue;
            }
            let device = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}"));
            match device {
                Ok(device) if *active == "active" => {
                    self.groups.push(name.clone());
                    leaves.push(Leaf {
                        name,
                        device: kernel_name(&device),
                    });
                }
                _ => self
                    .report
                    .notes
                    .push(format!("{name}: the volume cannot be activated")),
            }
        }
        leaves
    }
}

fn ask_lvm(words: &[&str]) -> std::result::Result<String, String> {
    let words = [words, &["--config", LVM_CONFIGURATION]].concat();
    match tools().ask("lvm", &words) {
        Ok(answer) if answer.is_success => Ok(answer.output),
        Ok(answer) => Err(answer.stderr.split_whitespace().collect::<Vec<_>>().join(" ")),
        Err(error) => Err(holdfast_block::error_text(&error)),
    }
}

fn tools() -> LocalTools {
    LocalTools::new(Arc::new(SystemClock::new()), PROGRAM_PATIENCE)
}

fn kernel_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn device_path(device: &str) -> PathBuf {
    Path::new("/dev").join(device)
}

/// `252:1`.
fn number_of(device: &str) -> Option<String> {
    let text = fs::read_to_string(Path::new(BLOCK_CLASS).join(device).join("dev")).ok()?;
    Some(text.trim().to_owned())
}

/// A block device of the kernel.
struct Device {
    file: File,
    size_bytes: u64,
}

impl Device {
    fn open(device: &str) -> io::Result<Self> {
        let sectors = fs::read_to_string(Path::new(BLOCK_CLASS).join(device).join("size"))?;
        let sectors: u64 = sectors.trim().parse().map_err(io::Error::other)?;
        Ok(Self {
            file: File::open(device_path(device))?,
            size_bytes: sectors.saturating_mul(SECTOR_BYTES),
        })
    }
}

impl BlockDevice for Device {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        let read = self.file.read_exact_at(buffer, offset);
        read.map_err(|source| DeviceError::io("read", offset, source))
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> holdfast_block::Result<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(range.end.saturating_sub(range.start), ExtentKind::Data);
        Ok(list)
    }
}
