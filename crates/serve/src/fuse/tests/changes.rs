//! Files that change while they are mounted.

use super::{
    Directory, GETATTR, LOOKUP, NodeId, OPEN, OPENDIR, READ, READDIR, READLINK, RELEASE, Sparse, TIME_MS, TreeEntry,
    Unopenable, World, file, range, sample, text,
};

const ENOENT: i32 = 2;
const ESTALE: i32 = 116;

#[test]
fn what_stays_keeps_its_node() {
    let world = World::new();
    let before = ["below", "below/sparse", "damaged", "link", "sparse"].map(|path| world.node(path));
    let mut root = sample();
    root.insert("new", file(Sparse)).unwrap();
    world.tree.replace(&root);
    let after = ["below", "below/sparse", "damaged", "link", "sparse"].map(|path| world.node(path));
    assert_eq!(after, before);
    assert!(!before.contains(&world.node("new")));
}

/// `latest` leads to the new snapshot at once, although the kernel has looked it up before.
#[test]
fn a_link_with_another_target_keeps_its_node() {
    let world = World::new();
    let node = world.node("link");
    let mut root = sample();
    let link = TreeEntry::Link {
        target: "sparse".into(),
        modified_ms: TIME_MS,
    };
    root.insert("link", link).unwrap();
    world.tree.replace(&root);
    assert_eq!(world.node("link"), node);
    assert_eq!(world.ask(READLINK, node, &[]).body, b"sparse");
}

/// The kernel may still use the node of the removed file.
#[test]
fn a_file_with_other_content_has_another_node() {
    let world = World::new();
    let before = world.node("sparse");
    let mut root = sample();
    root.insert("sparse", file(Unopenable)).unwrap();
    world.tree.replace(&root);
    assert_ne!(world.node("sparse"), before);
    assert_eq!(world.ask(GETATTR, before, &[0; 16]).error, ESTALE);
    // And no later file gets its number.
    world.tree.replace(&sample());
    assert_ne!(world.node("sparse"), before);
}

#[test]
fn an_open_file_stays_readable_after_its_removal() {
    let world = World::new();
    let node = world.node("below/sparse");
    let handle = world.open(OPEN, node);
    let attributes = world.ask(GETATTR, node, &[0; 16]);
    world.tree.replace(&Directory::new(TIME_MS));
    assert_eq!(world.ask(LOOKUP, NodeId::ROOT, &text("below")).error, ENOENT);
    assert_eq!(world.ask(READ, node, &range(handle, 8192, 2)).body, [3, 3]);
    // The kernel asks for the size when a read reaches the end.
    assert_eq!(world.ask(GETATTR, node, &[0; 16]), attributes);
    let second = world.open(OPEN, node);
    for open in [handle, second] {
        assert_eq!(world.ask(GETATTR, node, &[0; 16]).error, 0);
        world.ask(RELEASE, node, &range(open, 0, 0));
    }
    for opcode in [GETATTR, OPEN] {
        assert_eq!(world.ask(opcode, node, &[0; 16]).error, ESTALE);
    }
}

/// A program that reads a directory in parts sees each entry once.
#[test]
fn a_listing_does_not_change_while_it_is_read() {
    let world = World::new();
    let handle = world.open(OPENDIR, NodeId::ROOT);
    let before = world.ask(READDIR, NodeId::ROOT, &range(handle, 0, 4096));
    world.tree.replace(&Directory::new(TIME_MS));
    assert_eq!(world.ask(READDIR, NodeId::ROOT, &range(handle, 0, 4096)), before);
}

#[test]
fn names_that_no_file_can_have_are_refused() {
    let mut directory = Directory::new(TIME_MS);
    for name in ["", ".", "..", "a/b", "a\0b", &"x".repeat(256)] {
        assert!(directory.insert(name, file(Sparse)).is_err(), "{name:?}");
    }
    assert!(
        directory
            .insert("x".repeat(255), TreeEntry::Directory(Directory::new(0)))
            .is_ok()
    );
}
