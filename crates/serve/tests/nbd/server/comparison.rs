//! Runs the same cases on Holdfast's server and on others: this finds errors of the server and wrong cases.

#![allow(clippy::print_stdout, reason = "it prints what it leaves out")]

use std::path::Path;
use std::sync::Arc;

use holdfast_block::MemoryDevice;
use holdfast_serve::nbd::{Export, ExportDevice, FixedExports};

use super::option_cases::{OptionCase, Outcome, option_cases, option_differences};
use super::request_cases::{DATA_END, Expect, REQUEST_DIFFERENCES, RequestCase, SIZE, request_cases};
use crate::raw::{Raw, Style, option_bytes, u32_at, u64_at};
use crate::servers::{OurServer, Peer, PeerServer};

fn contents() -> Vec<u8> {
    let mut random = holdfast_block::SeededRandom::new(11);
    let mut bytes = vec![0; usize::try_from(SIZE).unwrap()];
    random.fill(&mut bytes[..usize::try_from(DATA_END).unwrap()]);
    bytes
}

fn server() -> OurServer {
    let device = Arc::new(MemoryDevice::from_bytes(&contents()));
    OurServer::start(FixedExports::new([Export::new("disk", ExportDevice::Writable(device))]))
}

#[test]
fn our_server_answers_every_case() {
    let server = server();
    check(None, &server.socket());
}

#[test]
fn nbdkit_answers_the_same_cases() {
    let peer_server = PeerServer::start(Peer::Nbdkit, &contents());
    check(Some(Peer::Nbdkit), &peer_server.socket());
}

#[test]
fn qemu_nbd_answers_the_same_cases() {
    let peer_server = PeerServer::start(Peer::QemuNbd, &contents());
    check(Some(Peer::QemuNbd), &peer_server.socket());
}

/// Runs all cases. A peer may deviate as listed, or answer correctly, because its releases differ.
fn check(peer: Option<Peer>, socket: &Path) {
    let mut wrong = Vec::new();
    let mut count = 0;
    let differences = option_differences();
    for case in option_cases() {
        let mut different = differences.iter().filter(|it| Some(it.0) == peer && it.1 == case.name);
        // The output of a failing test shows the case.
        println!("{}", case.name);
        let outcome = run_option(&case, socket);
        count += 1;
        if outcome != case.outcome && !different.any(|it| outcome == it.2) {
            wrong.push(format!("{}: {outcome:x?} instead of {:x?}", case.name, case.outcome));
        }
    }
    for case in request_cases() {
        let of_peer = REQUEST_DIFFERENCES.iter().filter(|it| Some(it.0) == peer);
        let different: Vec<Expect> = of_peer.filter(|it| it.1 == case.name).map(|it| it.2).collect();
        if different.contains(&Expect::NotAsked) {
            continue;
        }
        println!("{}", case.name);
        let Some(outcome) = run_request(&case, socket) else {
            assert!(
                peer.is_some() && case.style == Style::Extended,
                "{} was not run",
                case.name
            );
            continue;
        };
        count += 1;
        if outcome != case.expect && !different.contains(&outcome) {
            wrong.push(format!("{}: {outcome:?} instead of {:?}", case.name, case.expect));
        }
    }
    assert!(count > 80, "there are cases");
    assert!(
        wrong.is_empty(),
        "{peer:?}, {} of {count}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn every_listed_difference_belongs_to_a_case() {
    let options: Vec<_> = option_cases().into_iter().map(|case| case.name).collect();
    let requests: Vec<_> = request_cases().into_iter().map(|case| case.name).collect();
    for (peer, name, ..) in option_differences() {
        assert!(options.contains(&name), "{peer:?}: {name}");
    }
    for (peer, name, ..) in REQUEST_DIFFERENCES {
        assert!(requests.contains(name), "{peer:?}: {name}");
    }
}

fn run_option(case: &OptionCase, socket: &Path) -> Outcome {
    let mut raw = Raw::connect(socket);
    raw.say(&case.client_flags.to_be_bytes());
    for (option, data) in &case.before {
        let Some(replies) = raw.option(*option, data) else {
            return Outcome::Closed;
        };
        if replies.last().unwrap().0 != 1 {
            return Outcome::Replies(replies.into_iter().map(|(kind, _)| kind).collect());
        }
    }
    raw.say(&option_bytes(case.option, &case.data));
    if case.option == 1 {
        let length = match case.outcome {
            Outcome::Bytes(length) => length,
            _ => 10,
        };
        let Some(bytes) = raw.take(length) else {
            return Outcome::Closed;
        };
        assert_eq!(u64_at(&bytes, 0), SIZE);
        // The reply to this request proves that no more bytes precede it.
        raw.read(0, 512);
        return Outcome::Bytes(length);
    }
    let Some(replies) = raw.option_replies(case.option) else {
        return Outcome::Closed;
    };
    let kinds: Vec<u32> = replies.iter().map(|(kind, _)| *kind).collect();
    if case.option == 7 && kinds.last() == Some(&1) {
        raw.read(0, 512);
        return Outcome::Replies(kinds);
    }
    match raw.option(6, &crate::raw::info_query("disk", &[])) {
        Some(replies) => {
            assert_eq!(replies.last().unwrap().0, 1, "{}: the handshake continues", case.name);
            Outcome::Replies(kinds)
        }
        None => Outcome::RepliesAndClose(kinds),
    }
}

fn run_request(case: &RequestCase, socket: &Path) -> Option<Expect> {
    let contexts: &[&str] = match case.style {
        Style::Simple => &[],
        Style::Structured | Style::Extended => &["base:allocation"],
    };
    let mut raw = Raw::enter(socket, "disk", case.style, contexts)?;
    let payload = vec![0; usize::try_from(case.payload).unwrap()];
    let Some(answer) = raw.ask(case.flags, case.kind, case.offset, case.length, &payload) else {
        return Some(Expect::Closed);
    };
    if answer.error != 0 {
        // The connection continues.
        return Some(if raw.header_is_answered() {
            Expect::Error(answer.error)
        } else {
            Expect::Closed
        });
    }
    let (start, length) = (
        usize::try_from(case.offset).unwrap(),
        usize::try_from(case.length).unwrap(),
    );
    match case.kind {
        0 => {
            let bytes = answer.data(case.offset, length);
            assert_eq!(bytes[..], contents()[start..start + length], "{}", case.name);
            if case.flags & 4 != 0 {
                let content = answer.chunks.iter().filter(|(kind, _)| *kind != 0);
                assert_eq!(content.count(), 1, "{}: one chunk", case.name);
            }
        }
        7 => check_status(case, &answer.chunks),
        _ => {}
    }
    assert!(raw.header_is_answered(), "{}: the connection continues", case.name);
    Some(Expect::Done)
}

/// Checks the extents: they begin at the start of the range, make progress, report only zeroes as zero, and there is
/// only one if one was requested.
fn check_status(case: &RequestCase, chunks: &[(u16, Vec<u8>)]) {
    let of_status: Vec<_> = chunks.iter().filter(|(kind, _)| *kind == 5 || *kind == 6).collect();
    let [(kind, payload)] = of_status[..] else {
        panic!("{}: one chunk for one context: {chunks:?}", case.name);
    };
    let extents: Vec<(u64, u64)> = if *kind == 6 {
        assert_eq!(u32_at(payload, 4) as usize, (payload.len() - 8) / 16);
        let extents = payload[8..].chunks(16);
        extents.map(|bytes| (u64_at(bytes, 0), u64_at(bytes, 8))).collect()
    } else {
        let extents = payload[4..].chunks(8);
        extents
            .map(|bytes| (u32_at(bytes, 0).into(), u32_at(bytes, 4).into()))
            .collect()
    };
    let mut at = case.offset;
    for (length, flags) in &extents {
        assert!(*length > 0);
        if flags & 2 != 0 {
            assert!(at >= DATA_END, "{}: {at} is not zero", case.name);
        }
        at += length;
    }
    if case.flags & 8 != 0 {
        assert!(extents.len() == 1 && at <= case.offset + case.length, "{}", case.name);
    }
}

impl Raw {
    /// Whether the server answers a read.
    fn header_is_answered(&mut self) -> bool {
        self.ask(0, 0, 0, 512, &[]).is_some_and(|answer| answer.error == 0)
    }
}
