//! Legal and illegal requests.

use super::{
    FORGET, GETATTR, INIT, LOOKUP, LSEEK, NodeId, OPEN, OPENDIR, OWNER, READ, READDIR, READDIRPLUS, READLINK, RELEASE,
    RELEASEDIR, STATFS, TIME_MS, World, message, offer, range, seek, space, text, write,
};

const EIO: i32 = 5;
const EBADF: i32 = 9;
const ENOTDIR: i32 = 20;
const EISDIR: i32 = 21;
const EINVAL: i32 = 22;
const ENFILE: i32 = 23;
const EROFS: i32 = 30;
const ENOENT: i32 = 2;
const ENXIO: i32 = 6;
const ENOSYS: i32 = 38;
const EPROTO: i32 = 71;
const ESTALE: i32 = 116;

/// A node that does not exist.
const UNKNOWN: NodeId = NodeId(99);

#[test]
fn the_negotiation_accepts_what_both_sides_support() {
    let world = World::unnegotiated();
    let reply = world.ask(INIT, NodeId(0), &offer(7, 45, 1 | 1 << 5 | 1 << 16 | 1 << 22 | 1 << 30));
    assert_eq!((reply.error, reply.body.len()), (0, 64));
    assert_eq!((reply.u32_at(0), reply.u32_at(4)), (7, 38));
    // At most the readahead of the kernel.
    assert_eq!(reply.u32_at(8), 128 << 10);
    // Asynchronous reads and larger requests, and neither large writes nor a cache of writes.
    assert_eq!(reply.u32_at(12), 1 | 1 << 22 | 1 << 30);
    // Writes of 4096 bytes at most, times in nanoseconds, and requests of 256 pages.
    assert_eq!((reply.u32_at(20), reply.u32_at(24)), (4096, 1));
    assert_eq!(reply.u32_at(28) & 0xffff, 256);
}

#[test]
fn versions_without_the_present_reply_are_refused() {
    for (major, minor, error) in [(6, 99, EPROTO), (7, 22, EPROTO), (7, 23, 0), (7, 999, 0)] {
        let reply = World::unnegotiated().ask(INIT, NodeId(0), &offer(major, minor, 0));
        assert_eq!(reply.error, error, "{major}.{minor}");
    }
    // A later kernel asks again with the version of the reply.
    let world = World::unnegotiated();
    assert_eq!(world.ask(INIT, NodeId(0), &offer(8, 0, 0)).u32_at(0), 7);
    assert_eq!(world.ask(GETATTR, NodeId::ROOT, &[0; 16]).error, EIO);
    assert_eq!(world.ask(INIT, NodeId(0), &offer(7, 38, 0)).error, 0);
    assert_eq!(world.ask(GETATTR, NodeId::ROOT, &[0; 16]).error, 0);
}

#[test]
fn nothing_is_answered_before_the_negotiation() {
    let world = World::unnegotiated();
    for opcode in [LOOKUP, GETATTR, OPEN, READ, STATFS, OPENDIR] {
        let fields = if opcode == LOOKUP {
            text("sparse")
        } else {
            range(1, 0, 1)
        };
        assert_eq!(world.ask(opcode, NodeId::ROOT, &fields).error, EIO, "{opcode}");
    }
}

#[test]
fn each_illegal_request_has_its_error() {
    let world = World::new();
    let (sparse, below, link) = (world.node("sparse"), world.node("below"), world.node("link"));
    let (file, listing) = (world.open(OPEN, sparse), world.open(OPENDIR, NodeId::ROOT));
    let root = NodeId::ROOT;
    let cases: [(&str, u32, NodeId, Vec<u8>, i32); 34] = [
        ("an absent name", LOOKUP, root, text("nothing"), ENOENT),
        ("a name in a file", LOOKUP, sparse, text("sparse"), ENOENT),
        ("a name in an unknown node", LOOKUP, UNKNOWN, text("sparse"), ENOENT),
        ("an empty name", LOOKUP, root, text(""), EINVAL),
        ("no name", LOOKUP, root, vec![], EINVAL),
        ("a name without its end", LOOKUP, root, b"sparse".to_vec(), EINVAL),
        ("a name with a zero", LOOKUP, root, text("spa\0rse"), EINVAL),
        ("a path", LOOKUP, root, text("below/sparse"), EINVAL),
        ("attributes of an unknown node", GETATTR, UNKNOWN, vec![0; 16], ESTALE),
        ("the target of a file", READLINK, sparse, vec![], EINVAL),
        ("the target of a directory", READLINK, below, vec![], EINVAL),
        ("a directory as a file", OPEN, below, vec![0; 8], EISDIR),
        ("a link as a file", OPEN, link, vec![0; 8], EINVAL),
        ("an unknown node as a file", OPEN, UNKNOWN, vec![0; 8], ESTALE),
        ("a file as a directory", OPENDIR, sparse, vec![0; 8], ENOTDIR),
        ("a link as a directory", OPENDIR, link, vec![0; 8], ENOTDIR),
        ("an unknown node as a directory", OPENDIR, UNKNOWN, vec![0; 8], ENOTDIR),
        ("a read of an unknown handle", READ, sparse, range(99, 0, 1), EBADF),
        ("a read of a directory", READ, root, range(listing, 0, 1), EBADF),
        ("a read without its fields", READ, sparse, vec![0; 19], EINVAL),
        (
            "a listing of an unknown handle",
            READDIR,
            root,
            range(99, 0, 4096),
            EBADF,
        ),
        ("a listing of a file", READDIR, root, range(file, 0, 4096), EBADF),
        (
            "a listing with attributes of a file",
            READDIRPLUS,
            root,
            range(file, 0, 4096),
            EBADF,
        ),
        ("a listing without its fields", READDIR, root, vec![0; 8], EINVAL),
        ("a release without its handle", RELEASE, sparse, vec![0; 7], EINVAL),
        (
            "a release of a directory without its handle",
            RELEASEDIR,
            root,
            vec![],
            EINVAL,
        ),
        ("a seek from the start", LSEEK, sparse, seek(file, 0, 0), EINVAL),
        ("a seek in an unknown handle", LSEEK, sparse, seek(99, 0, 3), EBADF),
        ("a seek behind the end", LSEEK, sparse, seek(file, 16389, 3), ENXIO),
        (
            "a seek for a hole behind the end",
            LSEEK,
            sparse,
            seek(file, 1 << 40, 4),
            ENXIO,
        ),
        (
            "a seek for data behind the last",
            LSEEK,
            sparse,
            seek(file, 12288, 3),
            ENXIO,
        ),
        (
            "a second negotiation without fields",
            INIT,
            NodeId(0),
            vec![0; 12],
            EINVAL,
        ),
        ("an extended attribute", 22, sparse, vec![0; 16], ENOSYS),
        ("an opcode of the future", 4095, root, vec![], ENOSYS),
    ];
    for (what, opcode, node, fields, error) in cases {
        assert_eq!(world.ask(opcode, node, &fields).error, error, "{what}");
    }
    // SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, SETXATTR, REMOVEXATTR, CREATE, RENAME2, TMPFILE.
    for opcode in [6, 8, 9, 10, 11, 12, 13, 21, 24, 35, 45, 51] {
        assert_eq!(world.ask(opcode, sparse, &[0; 64]).error, EROFS, "{opcode}");
    }
    // SETATTR, WRITE, FALLOCATE.
    for (opcode, fields) in [(4, vec![0; 88]), (16, write(file, 0, b"x")), (43, space(file, 0, 1, 3))] {
        assert_eq!(world.ask(opcode, sparse, &fields).error, EROFS, "{opcode}");
    }
    assert_eq!(world.take_reports(), Vec::<String>::new());
}

/// A message whose length is wrong has no reply: the kernel sends exactly one request at a time.
#[test]
fn messages_without_a_header_are_not_answered() {
    let world = World::new();
    let whole = message(GETATTR, 5, NodeId::ROOT, &[0; 16]);
    for length in 0..whole.len() {
        assert_eq!(world.answer(&whole[..length]), None, "{length}");
    }
    let mut longer = whole.clone();
    longer.push(0);
    assert_eq!(world.answer(&longer), None);
    assert_eq!(world.answer(&whole).unwrap().error, 0);
}

#[test]
fn requests_without_a_reply_are_not_answered() {
    let world = World::new();
    // FORGET, INTERRUPT, BATCH_FORGET.
    for opcode in [FORGET, 36, 42] {
        assert_eq!(
            world.answer(&message(opcode, 5, NodeId::ROOT, &[0; 16])),
            None,
            "{opcode}"
        );
    }
}

#[test]
fn requests_without_an_effect_succeed() {
    let world = World::new();
    let node = world.node("sparse");
    let handle = world.open(OPEN, node);
    // FSYNC, FLUSH, FSYNCDIR, DESTROY, SYNCFS.
    for opcode in [20, 25, 30, 38, 50] {
        let reply = world.ask(opcode, node, &range(handle, 0, 0));
        assert_eq!((reply.error, reply.body.len()), (0, 0), "{opcode}");
    }
}

#[test]
fn attributes_describe_files_directories_and_links() {
    let world = World::new();
    for (path, size_bytes, mode) in [
        ("sparse", 16389, 0o100_444),
        ("below", 0, 0o040_555),
        ("link", "below/sparse".len() as u64, 0o120_777),
    ] {
        let node = world.node(path);
        let reply = world.ask(GETATTR, node, &[0; 16]);
        assert_eq!((reply.error, reply.body.len()), (0, 104));
        let at = 16;
        assert_eq!((reply.u64_at(at), reply.u64_at(at + 8)), (node.0, size_bytes), "{path}");
        assert_eq!(reply.u64_at(at + 16), size_bytes.div_ceil(512), "{path}");
        let seconds = u64::try_from(TIME_MS / 1000).unwrap();
        assert_eq!((reply.u64_at(at + 32), reply.u32_at(at + 52)), (seconds, 250_000_000));
        assert_eq!(reply.u32_at(at + 60), mode, "{path}");
        assert_eq!(
            (reply.u32_at(at + 68), reply.u32_at(at + 72)),
            (OWNER.user, OWNER.group)
        );
        let entry = world.ask(LOOKUP, NodeId::ROOT, &text(path));
        assert_eq!(entry.body.len(), 128);
        assert_eq!(entry.body[40..], reply.body[16..], "{path}");
    }
    let target = world.ask(READLINK, world.node("link"), &[]);
    assert_eq!(target.body, b"below/sparse");
}

#[test]
fn reads_end_at_the_end_of_the_file() {
    let world = World::new();
    let node = world.node("below/sparse");
    let handle = world.open(OPEN, node);
    for (offset, length, expected) in [
        (0, 4096, vec![1; 4096]),
        (4095, 2, vec![1, 0]),
        (8191, 3, vec![0, 3, 3]),
        (16384, 4096, vec![0; 5]),
        (16389, 1, vec![]),
        (u64::MAX, u32::MAX, vec![]),
    ] {
        let reply = world.ask(READ, node, &range(handle, offset, length));
        assert_eq!((reply.error, reply.body), (0, expected), "{offset}");
    }
    // All of it, whatever is asked for.
    assert_eq!(world.ask(READ, node, &range(handle, 0, u32::MAX)).body.len(), 16389);
    assert_eq!(world.ask(RELEASE, node, &range(handle, 0, 0)).error, 0);
    assert_eq!(world.ask(READ, node, &range(handle, 0, 1)).error, EBADF);
}

#[test]
fn seeks_find_data_and_holes() {
    let world = World::new();
    let node = world.node("sparse");
    let handle = world.open(OPEN, node);
    for (offset, whence, expected) in [
        (0, 3, 0),
        (100, 3, 100),
        (4096, 3, 8192),
        (0, 4, 4096),
        (5000, 4, 5000),
        (8192, 4, 12288),
        (16388, 4, 16388),
    ] {
        let reply = world.ask(LSEEK, node, &seek(handle, offset, whence));
        assert_eq!((reply.error, reply.u64_at(0)), (0, expected), "{offset} {whence}");
    }
}

#[test]
fn errors_of_files_are_reported_with_the_file() {
    let world = World::new();
    assert_eq!(world.ask(OPEN, world.node("unopenable"), &[0; 8]).error, EIO);
    assert_eq!(world.take_reports(), ["open unopenable: no key"]);
    let damaged = world.node("damaged");
    let handle = world.open(OPEN, damaged);
    assert_eq!(world.ask(READ, damaged, &range(handle, 0, 4096)).error, EIO);
    assert_eq!(world.ask(LSEEK, damaged, &seek(handle, 0, 3)).error, EIO);
    let reports = world.take_reports();
    assert!(
        reports.len() == 2 && reports.iter().all(|text| text.starts_with("request to damaged: ")),
        "{reports:?}"
    );
}

/// The names and types of a listing that is read in parts of `length` bytes.
fn listed(world: &World, opcode: u32, length: u32) -> Vec<(String, u32)> {
    let prefix = if opcode == READDIRPLUS { 128 } else { 0 };
    let handle = world.open(OPENDIR, NodeId::ROOT);
    let (mut found, mut offset) = (Vec::new(), 0);
    loop {
        let reply = world.ask(opcode, NodeId::ROOT, &range(handle, offset, length));
        assert!(reply.error == 0 && reply.body.len() <= length as usize);
        if reply.body.is_empty() {
            return found;
        }
        let mut at = 0;
        while at < reply.body.len() {
            let start = at + prefix;
            let name_length = reply.u32_at(start + 16) as usize;
            let name = String::from_utf8(reply.body[start + 24..start + 24 + name_length].to_vec()).unwrap();
            let is_itself = name == "." || name == "..";
            if prefix > 0 && !is_itself {
                let entry = world.ask(LOOKUP, NodeId::ROOT, &text(&name));
                assert_eq!(reply.body[at..at + 128], entry.body[..], "{name}");
            }
            assert!(
                prefix == 0 || !is_itself || reply.u64_at(at) == 0,
                "{name} would be looked up"
            );
            offset = reply.u64_at(start + 8);
            found.push((name, reply.u32_at(start + 20)));
            at = start + (24 + name_length).next_multiple_of(8);
        }
        assert_eq!(at, reply.body.len());
    }
}

#[test]
fn a_listing_has_all_entries_whatever_the_length_of_its_parts() {
    let world = World::new();
    let expected = [
        (".", 4),
        ("..", 4),
        ("below", 4),
        ("damaged", 8),
        ("link", 10),
        ("sparse", 8),
        ("unopenable", 8),
    ];
    let expected: Vec<(String, u32)> = expected
        .iter()
        .map(|(name, kind)| ((*name).to_owned(), *kind))
        .collect();
    for length in [40, 64, 4096, u32::MAX] {
        assert_eq!(listed(&world, READDIR, length), expected, "{length}");
    }
    for length in [168, 512, 4096] {
        assert_eq!(listed(&world, READDIRPLUS, length), expected, "{length}");
    }
}

#[test]
fn open_files_and_directories_are_limited() {
    let world = World::new();
    let node = world.node("sparse");
    let handles: Vec<u64> = (0..64).map(|_| world.open(OPEN, node)).collect();
    assert_eq!(world.session.open_file_count(), 64);
    assert_eq!(world.ask(OPEN, node, &[0; 8]).error, ENFILE);
    world.ask(RELEASE, node, &range(handles[0], 0, 0));
    world.open(OPEN, node);
    for _ in 0..1024 {
        world.open(OPENDIR, NodeId::ROOT);
    }
    assert_eq!(world.ask(OPENDIR, NodeId::ROOT, &[0; 8]).error, ENFILE);
}

#[test]
fn no_space_is_free() {
    let reply = World::new().ask(STATFS, NodeId::ROOT, &[]);
    assert_eq!((reply.error, reply.body.len()), (0, 80));
    let bytes = 2_u64 * 16389 + 4096 + 1;
    assert_eq!(reply.u64_at(0), bytes.div_ceil(4096));
    assert_eq!((reply.u64_at(8), reply.u64_at(16)), (0, 0));
    // The root, four entries in it that are no directory, `below`, and its file.
    assert_eq!(reply.u64_at(24), 7);
}
