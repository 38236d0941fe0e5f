//! Every format with every kind of content, compared with QEMU: `docs/image-matrix.md` is the result.
//!
//! With `HOLDFAST_UPDATE_SNAPSHOTS=1` the document is written; otherwise it must match.

use std::fmt::Write as _;
use std::fs;
use std::num::NonZero;
use std::path::{Path, PathBuf};

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, MemoryDevice};
use holdfast_image::{
    BackingFile, BlockOptions, Continue, CreateOptions, Format, ImageId, ImageKind, OpenOptions, Qcow2Options,
    StreamOptions, create, open, open_mut, write_stream_optimized,
};

use crate::peer::others::Reader;
use crate::peer::{
    Lab, Random, assert_clean, assert_reads_as, flatten, overwrite, path_text, qemu_img, qemu_io_as, sample_disk, work,
};

const MIB: u64 = 1 << 20;
const TABLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/image-matrix.md");

/// A variant of a format.
struct Variant {
    name: &'static str,
    format: Format,
    kind: ImageKind,
    /// Options by which QEMU writes the same.
    peer: &'static str,
    /// The maximum size of the disk.
    size_bytes_max: u64,
}

const FORMS: &[Variant] = &[
    variant("raw", Format::Raw, ImageKind::Fixed, "", u64::MAX),
    variant("qcow2", Format::Qcow2, ImageKind::Dynamic, "", u64::MAX),
    variant("VDI, dynamic", Format::Vdi, ImageKind::Dynamic, "", u64::MAX),
    variant("VDI, fixed", Format::Vdi, ImageKind::Fixed, "-o static=on", u64::MAX),
    variant(
        "VHD, dynamic",
        Format::Vhd,
        ImageKind::Dynamic,
        "-o force_size=on",
        2040 << 30,
    ),
    variant(
        "VHD, fixed",
        Format::Vhd,
        ImageKind::Fixed,
        "-o force_size=on,subformat=fixed",
        2040 << 30,
    ),
    variant("VHDX, dynamic", Format::Vhdx, ImageKind::Dynamic, "", u64::MAX),
    variant(
        "VHDX, fixed",
        Format::Vhdx,
        ImageKind::Fixed,
        "-o subformat=fixed",
        u64::MAX,
    ),
    variant(
        "VMDK, sparse",
        Format::Vmdk,
        ImageKind::Dynamic,
        "-o subformat=monolithicSparse",
        (2 << 40) - 512,
    ),
    variant(
        "VMDK, stream",
        Format::Vmdk,
        ImageKind::Stream,
        "-o subformat=streamOptimized",
        u64::MAX,
    ),
    variant("Parallels", Format::Parallels, ImageKind::Dynamic, "", u64::MAX),
];

const fn variant(
    name: &'static str,
    format: Format,
    kind: ImageKind,
    peer: &'static str,
    size_bytes_max: u64,
) -> Variant {
    Variant {
        name,
        format,
        kind,
        peer,
        size_bytes_max,
    }
}

impl Variant {
    fn options(&self, size_bytes: u64) -> CreateOptions {
        let kind = if self.kind == ImageKind::Stream {
            ImageKind::Dynamic
        } else {
            self.kind
        };
        CreateOptions {
            blocks: BlockOptions {
                kind,
                ..BlockOptions::default()
            },
            ..CreateOptions::new(self.format, size_bytes)
        }
    }

    fn open_options(&self) -> OpenOptions {
        OpenOptions {
            format: Some(self.format),
            ..OpenOptions::default()
        }
    }

    /// Writes an image of this disk by our code.
    fn make(&self, path: &Path, disk: &[u8]) {
        let size_bytes = disk.len() as u64;
        if self.kind == ImageKind::Stream {
            stream_of(&MemoryDevice::from_bytes(disk), path);
            return;
        }
        create(path, &self.options(size_bytes)).unwrap();
        let image = open_mut(path, &self.open_options()).unwrap();
        image.write_at(disk, 0).unwrap();
        image.flush().unwrap();
    }

    /// Asserts that all readers read this disk.
    fn agree(&self, path: &Path, disk: &[u8], lab: &Lab, what: &str) {
        self.both_agree(path, disk, lab, what);
        self.others_agree(&[path], disk, lab, &format!("{}, {what}", self.name));
    }

    /// Asserts that QEMU and our code read this disk.
    fn both_agree(&self, path: &Path, disk: &[u8], lab: &Lab, what: &str) {
        let what = format!("{}, {what}", self.name);
        assert_reads_as(&open(path, &self.open_options()).unwrap(), disk, &what);
        if self.format != Format::Raw {
            assert_clean(path);
        }
        // QEMU can check neither raw images nor VHDs.
        if !matches!(self.format, Format::Raw | Format::Vhd) {
            qemu_img(&["check", "-f", self.format.qemu_name(), path_text(path)]);
        }
        if self.format == Format::Raw {
            assert!(fs::read(path).unwrap() == disk, "{what}");
        } else {
            assert!(
                flatten(path, lab)[..disk.len()] == *disk,
                "{what}: the peer reads other data"
            );
        }
    }

    /// The other readers of this format.
    fn readers(&self) -> impl Iterator<Item = Reader> {
        Reader::of(self.format).iter().copied()
    }

    /// Asserts that the other readers read this disk from a chain, the top first.
    fn others_agree(&self, chain: &[&Path], disk: &[u8], lab: &Lab, what: &str) {
        for reader in self.readers() {
            if chain.len() > 1 && reader == Reader::Dissect && self.format == Format::Vhd {
                // dissect ignores parents and sector bitmaps.
                continue;
            }
            let found = reader.read(self.format, chain, lab);
            let found = found.unwrap_or_else(|error| panic!("{what}: {}: {error}", reader.name()));
            // It rounds up to clusters; bytes past the end of the disk are zero.
            let (same, rest) = found.split_at(disk.len().min(found.len()));
            let is_equal = same == disk && rest.iter().all(|byte| *byte == 0);
            let at = same.iter().zip(disk).position(|(left, right)| left != right);
            assert!(
                is_equal,
                "{what}: {} differs at {at:?}, {} bytes",
                reader.name(),
                found.len()
            );
        }
    }

    /// Appends the names of the readers to the result of QEMU.
    fn with_readers(&self, found: &str, is_chain: bool) -> String {
        let readers = self
            .readers()
            .filter(|reader| !is_chain || self.format != Format::Vhd || *reader != Reader::Dissect);
        named(found, &readers.map(Reader::name).collect::<Vec<_>>())
    }

    fn by_peer(&self, lab: &Lab, disk: &[u8]) -> PathBuf {
        let (raw, image) = (lab.path("source.raw"), lab.path("peer"));
        overwrite(&raw, disk);
        let mut words = vec!["convert", "-f", "raw", "-O", self.format.qemu_name()];
        words.extend(self.peer.split_whitespace());
        words.extend([path_text(&raw), path_text(&image)]);
        qemu_img(&words);
        image
    }

    /// This content, written by each side and read by both.
    fn content(&self, disk: &[u8], what: &str) -> String {
        let lab = Lab::new();
        let own_image = lab.path("ours");
        self.make(&own_image, disk);
        self.agree(&own_image, disk, &lab, what);
        let peer_image = self.by_peer(&lab, disk);
        self.agree(&peer_image, disk, &lab, what);
        self.with_readers("both ways", false)
    }

    fn random_writes(&self) -> String {
        if self.kind == ImageKind::Stream {
            return "read only".to_owned();
        }
        let lab = Lab::new();
        let (image, mut disk) = (lab.path("image"), sample_disk(20 * MIB, 4));
        self.make(&image, &disk);
        if self.format == Format::Raw {
            return "the file is the disk".to_owned();
        }
        for seed in 0..2 {
            work(&image, &mut disk, &mut Random(seed), 40);
            self.both_agree(&image, &disk, &lab, "random writes");
            qemu_io_as(self.format.qemu_name(), &image, &["write -P 0x5a 3M 2M"]);
            disk[3 << 20..5 << 20].fill(0x5a);
            self.both_agree(&image, &disk, &lab, "the peer's writes");
        }
        self.others_agree(&[&image], &disk, &lab, "random writes");
        self.with_readers("both ways", false)
    }

    fn large(&self) -> String {
        let lab = Lab::new();
        let (image, size_bytes) = (lab.path("image"), 3_u64 << 40);
        if size_bytes > self.size_bytes_max {
            assert!(create(&image, &self.options(size_bytes)).is_err(), "{}", self.name);
            return format!("refused: at most {} GiB", self.size_bytes_max.div_ceil(1 << 30));
        }
        let data = [7; 4096];
        if self.kind == ImageKind::Stream {
            let device = MemoryDevice::new(size_bytes);
            device.write_at(&data, size_bytes - 4096).unwrap();
            stream_of(&device, &image);
        } else {
            create(&image, &self.options(size_bytes)).unwrap();
            let device = open_mut(&image, &self.open_options()).unwrap();
            device.write_at(&data, size_bytes - 4096).unwrap();
            device.flush().unwrap();
        }
        let opened = open(&image, &self.open_options()).unwrap();
        let mut found = [0; 4096];
        opened.read_at(&mut found, size_bytes - 4096).unwrap();
        assert!(opened.size_bytes() == size_bytes && found == data, "{}", self.name);
        let commands = ["read -P 7 3221225468k 4k", "read -P 0 0 64k"];
        qemu_io_as(self.format.qemu_name(), &image, &commands);
        let mut names = Vec::new();
        for reader in self.readers() {
            let found = reader.read_at(self.format, &image, &lab, size_bytes - 4096, 4096);
            let (size, bytes) = found.unwrap_or_else(|error| panic!("{}: {}: {error}", self.name, reader.name()));
            if self.kind == ImageKind::Fixed && reader == Reader::Libvhdi {
                // libvhdi ignores the sector bitmap entries between the block entries of a fixed VHDX, which every
                // VHDX has (MS-VHDX, 2.5): past the first 4 GiB it reads a wrong block.
                assert!(bytes != data, "libvhdi has been fixed: update the table");
                continue;
            }
            assert!(size == size_bytes && bytes == data, "{}: {}", self.name, reader.name());
            names.push(reader.name());
        }
        named("written, and read by both", &names)
    }

    /// A chain of three images.
    fn chain(&self) -> String {
        if self.format == Format::Raw || matches!(self.kind, ImageKind::Fixed | ImageKind::Stream) {
            return "not in the format".to_owned();
        }
        if self.format == Format::Parallels {
            return "by its descriptor; not by QEMU".to_owned();
        }
        let lab = Lab::new();
        let extension = self.format.name();
        let path = |number: u64| lab.path(&format!("{number}.{extension}"));
        let size_bytes = 6 * MIB;
        let mut disk = vec![0; usize::try_from(size_bytes).unwrap()];
        for number in 0..3_u64 {
            let mut options = self.options(size_bytes);
            if let Some(before) = number.checked_sub(1) {
                if self.format == Format::Qcow2 {
                    options.qcow2 = Qcow2Options {
                        backing: Some(BackingFile {
                            name: format!("{before}.{extension}"),
                            format: self.format,
                        }),
                        ..options.qcow2
                    };
                } else {
                    options.blocks.kind = ImageKind::Differencing;
                    options.blocks.parent = Some(path(before));
                }
            }
            create(&path(number), &options).unwrap();
            work(&path(number), &mut disk, &mut Random(number), 20);
        }
        assert_reads_as(&open(&path(2), &OpenOptions::default()).unwrap(), &disk, self.name);
        let paths = [path(2), path(1), path(0)];
        let chain: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
        self.others_agree(&chain, &disk, &lab, self.name);
        if matches!(self.format, Format::Qcow2 | Format::Vmdk) {
            assert!(flatten(&path(2), &lab) == disk, "{}", self.name);
            self.with_readers("written, and read by both", true)
        } else {
            self.with_readers("written and read; not by QEMU", true)
        }
    }
}

/// The result, with the names of the other readers.
fn named(found: &str, readers: &[&str]) -> String {
    if readers.is_empty() {
        found.to_owned()
    } else {
        format!("{found}; {}", readers.join(", "))
    }
}

fn stream_of(device: &MemoryDevice, path: &Path) {
    let options = StreamOptions {
        // Readers open the file that the descriptor refers to.
        name: path.file_name().unwrap().to_str().unwrap(),
        id: ImageId([7; 16]),
        level: None,
        threads: NonZero::new(2).unwrap(),
    };
    let mut file = fs::File::create(path).unwrap();
    write_stream_optimized(device, &mut file, &options, &mut |_| Continue::Go).unwrap();
}

#[test]
fn image_matrix_matches_the_document() {
    let mut text = String::from(
        "# Image formats, compared with other programs\n\nResults of the tests of this version. `both ways`: QEMU and Holdfast read what Holdfast wrote, Holdfast reads what QEMU wrote, \
         byte for byte,\nand both check the image without a problem. After the semicolon are independent programs that read the same from all of these images:\n\
         `dissect` is dissect.hypervisor 3.21, `libvhdi` and `libvmdk` are those of Debian 12. The test `tables::matrix` writes this table.\n\n\
         | form | empty | holes and data | full of noise | random writes, in turn | odd size (7 MiB + 512) | 3 TiB, sparse | chain of three |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    for variant in FORMS {
        let noise = {
            let mut bytes = vec![0; 8 << 20];
            Random(9).fill(&mut bytes);
            bytes
        };
        let cells = [
            variant.content(&vec![0; 8 << 20], "empty"),
            variant.content(&sample_disk(16 * MIB, 3), "holes and data"),
            variant.content(&noise, "full"),
            variant.random_writes(),
            variant.content(&sample_disk(7 * MIB + 512, 5), "odd size"),
            variant.large(),
            variant.chain(),
        ];
        writeln!(text, "| {} | {} |", variant.name, cells.join(" | ")).unwrap();
    }
    text.push_str(
        "\nFixed images are created sparse. VMDKs with several files (`twoGbMaxExtent...`, `monolithicFlat`) can be read and written, but not created; \
         ploop version 1\nhas read and write tests of its own, because QEMU does not support it. QEMU refuses chains of VDI, VHD, VHDX and Parallels: those are \
         compared with the written data,\nand by the other programs.\n\nDefects of these programs that the tests work around: dissect reads VDI only block by block, Parallels only cluster by cluster, and a \
         differencing VHDX only by\nwhole bytes of its bitmaps; it does not support differencing VHDs, and its stream of a VMDK ends early if the disk is not a multiple of 8 KiB. libvhdi reads a fixed VHDX\n\
         wrong past the first 4 GiB (it ignores the bitmap entries in the block table), and uses the start of the file as the bitmaps of a differencing VHDX without any.\n",
    );
    if std::env::var_os("HOLDFAST_UPDATE_SNAPSHOTS").is_some() {
        overwrite(Path::new(TABLE), text.as_bytes());
    }
    assert!(
        fs::read_to_string(TABLE).unwrap_or_default() == text,
        "docs/image-matrix.md is outdated: HOLDFAST_UPDATE_SNAPSHOTS=1 updates it"
    );
}
