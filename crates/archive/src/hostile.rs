//! The parsers of archives, for fuzzing: see [`holdfast_block::hostile`].

use std::io::{Cursor, Read as _};
use std::num::NonZero;
use std::sync::Arc;

use holdfast_block::hostile::{Outcome, Parser};
use holdfast_block::{MemoryDevice, Threads};
use holdfast_image::ImageId;

use crate::ova::ImageReading;
use crate::ova::disk::StreamImages;
use crate::tar::TarReader;
use crate::tree::hostile as tree_hostile;
use crate::vma::hostile as vma_hostile;
use crate::{
    ArchiveReader, OvaDisk, OvaOutput, OvaReader, OvaWriteOptions, PackOptions, PackedFile, Packer, Packing, Piece,
    Unpacked, XvaDisk, XvaReader, XvaWriteOptions, write_ova, write_xva,
};

pub use crate::vma::hostile::vma;

/// The parsers of this crate.
pub const PARSERS: &[Parser] = &[
    Parser { name: "ova", feed: ova },
    Parser {
        name: "packed_index",
        feed: packed_index,
    },
    Parser {
        name: "packed_stream",
        feed: packed_stream,
    },
    Parser {
        name: "tree_tar",
        feed: tree_tar,
    },
    Parser { name: "vma", feed: vma },
    Parser { name: "xva", feed: xva },
];

/// One thread, so that allocations have a deterministic order.
const THREADS: Threads = Threads {
    count: NonZero::<usize>::MIN,
    load_max: None,
};
/// Limit of unpacked bytes that are read: a small packed stream may expand to any size.
const UNPACKED_BYTES_MAX: u64 = 1 << 20;

/// Valid bytes for every parser of this crate: name of the parser, name of the seed, bytes.
pub fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let gzip = packed(Packing::Gzip);
    let zstd = packed(Packing::Zstd);
    let trees = tree_hostile::seeds();
    let mut seeds: Vec<_> = trees
        .into_iter()
        .map(|(name, bytes)| ("tree_tar", name, bytes))
        .collect();
    seeds.extend([
        ("packed_index", "gzip", gzip.clone()),
        ("packed_index", "zstd", zstd.clone()),
        ("packed_stream", "gzip", gzip),
        ("packed_stream", "zstd", zstd),
        ("packed_stream", "xz", xz()),
        ("ova", "disk", package()),
        ("vma", "interleaved", vma_hostile::interleaved()),
        ("vma", "written", vma_hostile::written()),
        ("xva", "disk", archive()),
    ]);
    seeds
}

/// Reads an archive of a tree.
pub fn tree_tar(bytes: &[u8]) -> Outcome {
    tree_hostile::tree_tar(bytes)
}

fn packed(packing: Packing) -> Vec<u8> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let options = PackOptions {
        packing,
        level: None,
        threads: THREADS,
    };
    let mut packer = Packer::new(Box::new(ChannelWriter(sender)), options).expect("a good level");
    std::io::copy(&mut std::io::repeat(7).take(3000), &mut packer).expect("memory");
    packer.finish().expect("memory");
    receiver.into_iter().flatten().collect()
}

fn xz() -> Vec<u8> {
    let mut packed = Vec::new();
    liblzma::bufread::XzEncoder::new(&[7; 3000][..], 0)
        .read_to_end(&mut packed)
        .expect("memory");
    packed
}

/// Sends written bytes over a channel.
struct ChannelWriter(std::sync::mpsc::Sender<Vec<u8>>);

impl std::io::Write for ChannelWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.send(bytes.to_vec()).ok();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn package() -> Vec<u8> {
    let text = "<Envelope xmlns:ovf='http://schemas.dmtf.org/ovf/envelope/1'><References><File ovf:id='f' ovf:href='d.vmdk'/></References>\
         <DiskSection><Disk ovf:capacity='1024' ovf:diskId='d' ovf:fileRef='f' ovf:format='http://www.vmware.com/interfaces/\
         specifications/vmdk.html#streamOptimized'/></DiskSection><VirtualSystem ovf:id='web1'/></Envelope>";
    let disk = OvaDisk {
        href: "d.vmdk".to_owned(),
        id: ImageId::NIL,
        device: Arc::new(MemoryDevice::from_bytes(&[7; 1024])),
    };
    let (sender, receiver) = std::sync::mpsc::channel();
    let options = OvaWriteOptions {
        threads: NonZero::<usize>::MIN,
        level: None,
        time: 0,
    };
    let output = OvaOutput::Pipe(Box::new(ChannelWriter(sender)), std::env::temp_dir());
    write_ova(output, "web1", text, &[disk], options, &mut |_| Ok(()))
        .expect("memory and a folder for temporary files");
    receiver.into_iter().flatten().collect()
}

fn archive() -> Vec<u8> {
    let disk = XvaDisk {
        id: "Ref:4".to_owned(),
        device: Arc::new(MemoryDevice::from_bytes(&[7; 700])),
    };
    let records = "<value><struct><member><name>version</name><value><struct><member><name>export_vsn</name><value>2</value>\
         </member></struct></value></member><member><name>objects</name><value><array><data><value><struct><member>\
         <name>class</name><value>VDI</value></member><member><name>id</name><value>Ref:4</value></member><member>\
         <name>snapshot</name><value><struct><member><name>virtual_size</name><value>700</value></member></struct></value>\
         </member></struct></value></data></array></value></member></struct></value>";
    let mut bytes = Vec::new();
    let options = XvaWriteOptions {
        threads: NonZero::<usize>::MIN,
        time: 0,
    };
    write_xva(&mut bytes, records, &[disk], options, &mut |_| Ok(())).expect("memory");
    bytes
}

/// The index at the end of a packed stream, and every block in it.
pub fn packed_index(bytes: &[u8]) -> Outcome {
    let Ok(file) = PackedFile::open(Arc::new(MemoryDevice::from_bytes(bytes))) else {
        return Outcome::Refused;
    };
    if file.index().size_bytes() <= UNPACKED_BYTES_MAX {
        file.check(NonZero::<usize>::MIN, &mut |_| Ok(())).ok();
    }
    Outcome::Decoded
}

/// A packed stream.
pub fn packed_stream(bytes: &[u8]) -> Outcome {
    let stream = Unpacked::new(Box::new(Cursor::new(bytes.to_vec())), THREADS);
    let read = stream.and_then(|stream| std::io::copy(&mut stream.take(UNPACKED_BYTES_MAX), &mut std::io::sink()));
    read.map_or(Outcome::Refused, |_| Outcome::Decoded)
}

/// A tape archive with a machine of XenServer.
pub fn xva(bytes: &[u8]) -> Outcome {
    XvaReader::open(bytes).map_or(Outcome::Refused, |mut reader| read_to_end(&mut reader))
}

/// A tape archive with a package.
pub fn ova(bytes: &[u8]) -> Outcome {
    // Images that are first stored in files are read by other code.
    read_ova(bytes, StreamImages::Spooled);
    read_ova(bytes, StreamImages::Streamed)
}

fn read_ova(bytes: &[u8], images: StreamImages) -> Outcome {
    let mut tar = TarReader::new(bytes);
    let Ok(Some(first)) = tar.next() else {
        return Outcome::Refused;
    };
    let reading = ImageReading {
        images,
        threads: NonZero::<usize>::MIN,
    };
    OvaReader::open_at_descriptor(tar, &first, reading).map_or(Outcome::Refused, |mut reader| read_to_end(&mut reader))
}

fn read_to_end(reader: &mut dyn ArchiveReader) -> Outcome {
    let mut ends = vec![0; reader.disks().len()];
    loop {
        let disk = match reader.next() {
            Ok(Some(Piece::Data { disk, offset, bytes })) => {
                assert!(ends[disk] <= offset, "pieces overlap");
                ends[disk] = offset + bytes.len() as u64;
                disk
            }
            Ok(Some(Piece::End { .. })) => continue,
            Ok(None) => break,
            Err(_) => return Outcome::Refused,
        };
        // The size of a disk is certain from its first piece on.
        assert!(reader.is_size_certain(disk), "the size of the disk is not known");
        assert!(
            ends[disk] <= reader.disks()[disk].size_bytes,
            "a piece is beyond its disk"
        );
    }
    drop((reader.corrections(), reader.unverified()));
    Outcome::Decoded
}
