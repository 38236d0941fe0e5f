//! A server that continues after another one has ended.

use super::{
    Directory, INIT, NodeId, OPEN, OPENDIR, READ, READDIR, RELEASE, TIME_MS, World, Writable, file, offer, range, write,
};
use crate::fuse::session::{Negotiation, SessionStart};
use crate::fuse::wire::resend_notification;

const WRITE: u32 = 16;
const RESEND: u32 = 1 << 7;

fn root(content: Writable) -> Directory {
    let mut root = Directory::new(TIME_MS);
    root.insert("disk", file(content)).unwrap();
    root
}

/// The offer of a kernel with these capabilities in the second word.
fn offer_with(high: u32) -> Vec<u8> {
    let mut fields = offer(7, 45, 1 << 30);
    fields[16..20].copy_from_slice(&high.to_ne_bytes());
    fields
}

#[test]
fn successors_are_possible_if_the_kernel_sends_requests_again() {
    for (high, expected) in [
        (RESEND, Negotiation::WithSuccessors),
        (!RESEND, Negotiation::WithoutSuccessors),
    ] {
        let world = World::with(&root(Writable::default()), SessionStart::New);
        assert_eq!(world.session.negotiation(), Negotiation::Pending);
        let reply = world.ask(INIT, NodeId(0), &offer_with(high));
        assert_eq!(world.session.negotiation(), expected);
        assert_eq!(reply.u32_at(32), high & RESEND);
        assert_eq!(reply.u32_at(12) >> 30 & 1, 1);
    }
}

/// The kernel does not negotiate again, and does not open files again.
#[test]
fn a_successor_knows_the_handles_of_its_predecessor() {
    let content = Writable::default();
    let device = std::sync::Arc::clone(&content.device);
    let first = World::with(&root(content), SessionStart::New);
    first.ask(INIT, NodeId(0), &offer_with(RESEND));
    let node = first.node("disk");
    let (handle, listing) = (first.open(OPEN, node), first.open(OPENDIR, NodeId::ROOT));
    let listed = first.ask(READDIR, NodeId::ROOT, &range(listing, 0, 4096));
    drop(first);
    let start = SessionStart::Successor { predecessor_count: 1 };
    let second = World::with(&root(Writable { device }), start);
    assert_eq!(second.session.negotiation(), Negotiation::WithSuccessors);
    assert_eq!(second.ask(WRITE, node, &write(handle, 0, b"after")).error, 0);
    assert_eq!(&second.ask(READ, node, &range(handle, 0, 6)).body, b"after\x01");
    assert_eq!(second.ask(READDIR, NodeId::ROOT, &range(listing, 0, 4096)), listed);
    // New handles differ from those of the predecessor.
    let new = second.open(OPEN, node);
    assert_ne!(new, handle);
    second.ask(RELEASE, node, &range(handle, 0, 0));
    assert_eq!(second.ask(READ, node, &range(new, 0, 1)).body, b"a");
    // A directory is no file, whatever its handle.
    assert_eq!(second.ask(READ, NodeId::ROOT, &range(77, 0, 1)).error, 21);
}

#[test]
fn the_notification_has_the_form_of_the_kernel() {
    let mut expected = 16_u32.to_ne_bytes().to_vec();
    expected.extend(7_i32.to_ne_bytes());
    expected.extend([0; 8]);
    assert_eq!(resend_notification().to_vec(), expected);
}
