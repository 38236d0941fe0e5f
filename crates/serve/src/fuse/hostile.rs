//! Requests of FUSE for fuzzing; see [`holdfast_block::hostile`].

use std::sync::Arc;

use holdfast_block::hostile::Outcome;
use holdfast_block::{BlockDeviceMut, MemoryDevice};

use super::event::MountEvents;
use super::session::{FuseAnswer, FuseSession, READ_BYTES_MAX, SessionStart};
use super::tree::{Directory, FileContent, FileOwner, FileTree, TreeEntry};
use super::wire::{FileAccess, REPLY_HEADER_LENGTH};
use crate::nbd::ExportDevice;

const SIZE_BYTES: usize = 10_001;

struct MemoryTree;

impl FileContent for MemoryTree {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES as u64
    }

    fn identity(&self) -> String {
        "memory".to_owned()
    }

    fn access(&self) -> FileAccess {
        FileAccess::Writable
    }

    fn open(&self) -> std::io::Result<ExportDevice> {
        let device = MemoryDevice::from_bytes(&[1; SIZE_BYTES]);
        Ok(ExportDevice::Writable(Arc::new(device) as Arc<dyn BlockDeviceMut>))
    }
}

struct NoEvents;

impl MountEvents for NoEvents {
    fn open_failed(&self, _: &str, _: &std::io::Error) {
        unreachable!("memory can be opened");
    }

    fn request_failed(&self, _: &str, _: &holdfast_block::Error) {
        unreachable!("memory can be read and written");
    }
}

fn session() -> FuseSession {
    let file = TreeEntry::File {
        content: Arc::new(MemoryTree),
        modified_ms: 0,
    };
    let link = TreeEntry::Link {
        target: "file".into(),
        modified_ms: 0,
    };
    let mut root = Directory::new(0);
    for (name, entry) in [("file", file), ("link", link)] {
        root.insert(name, entry).expect("a valid name");
    }
    let owner = FileOwner { user: 0, group: 0 };
    let tree = Arc::new(FileTree::new(&root, owner));
    FuseSession::new(tree, Arc::new(NoEvents), SessionStart::New)
}

/// Messages, each after its length in two bytes, little-endian. A message beyond the end is cut off.
pub(crate) fn requests(bytes: &[u8]) -> Outcome {
    let session = session();
    let (mut body, mut rest) = (Vec::new(), bytes);
    let mut answered = false;
    while let Some((length, after)) = rest.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(after.len());
        let (message, after) = after.split_at(length);
        rest = after;
        let FuseAnswer::Reply(header) = session.answer(message, &mut body) else {
            continue;
        };
        let total = u32::from_ne_bytes(header[..4].try_into().expect("four bytes"));
        let error = i32::from_ne_bytes(header[4..8].try_into().expect("four bytes"));
        assert_eq!(total as usize, REPLY_HEADER_LENGTH + body.len());
        assert!((-4095..=0).contains(&error), "the kernel refuses such a reply");
        assert!(error == 0 || body.is_empty());
        assert!(body.len() <= READ_BYTES_MAX as usize);
        assert_eq!(header[8..], message[8..16], "the reply to another request");
        answered |= error == 0;
    }
    if answered { Outcome::Decoded } else { Outcome::Refused }
}

/// Valid requests, of each kind.
pub(crate) fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let mut bytes = Vec::new();
    let mut request = |opcode: u32, node: u64, fields: &[u8]| {
        let length = u32::try_from(40 + fields.len()).expect("a short message");
        bytes.extend(u16::try_from(length).expect("a short message").to_le_bytes());
        bytes.extend(length.to_ne_bytes());
        bytes.extend(opcode.to_ne_bytes());
        bytes.extend(u64::from(opcode).to_ne_bytes());
        bytes.extend(node.to_ne_bytes());
        bytes.extend([0; 16]);
        bytes.extend(fields);
    };
    let range = |handle: u64, offset: u64, length: u32| {
        let mut fields = handle.to_ne_bytes().to_vec();
        fields.extend(offset.to_ne_bytes());
        fields.extend(length.to_ne_bytes());
        fields.extend([0; 20]);
        fields
    };
    let offer: Vec<u8> = [7_u32, 38, 131_072, u32::MAX, 0]
        .into_iter()
        .flat_map(u32::to_ne_bytes)
        .collect();
    request(26, 0, &offer);
    request(1, 1, b"file\0");
    request(1, 1, b"link\0");
    request(3, 2, &[0; 16]);
    request(5, 3, &[]);
    request(14, 2, &[0; 8]);
    request(15, 2, &range(1, 4000, 4096));
    request(46, 2, &range(1, 0, 3));
    request(27, 1, &[0; 8]);
    request(28, 1, &range(2, 0, 4096));
    request(44, 1, &range(2, 1, 4096));
    request(17, 1, &[]);
    let mut write = range(1, 4000, 5);
    write.extend([0; 4]);
    write.extend(b"bytes");
    request(16, 2, &write);
    let mut punch = 1_u64.to_ne_bytes().to_vec();
    punch.extend([4000_u64, 3000, 3].into_iter().flat_map(u64::to_ne_bytes));
    request(43, 2, &punch);
    request(4, 2, &[0; 88]);
    request(20, 2, &range(1, 0, 0));
    request(50, 1, &[0; 8]);
    request(18, 2, &range(1, 0, 0));
    request(29, 1, &range(2, 0, 0));
    request(2, 2, &[0; 8]);
    request(38, 1, &[]);
    vec![("fuse_requests", "each", bytes)]
}
