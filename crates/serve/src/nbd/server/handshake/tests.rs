//! Handshakes byte by byte: input, replies and result.

use std::sync::Arc;

use holdfast_block::{DirtyBitmap, MemoryDevice};

use super::super::export::{Export, FixedExports};
use super::{HandshakeEnd, NbdSession, Progress, ServerHandshake, ServerState, TlsMode};
use crate::nbd::wire::HeaderStyle;
use crate::server::export_device::ExportDevice;

fn exports() -> FixedExports {
    let bitmap = Arc::new(DirtyBitmap::new(4660, 512).unwrap());
    let device = Arc::new(MemoryDevice::new(4660));
    let disk = Export::new("d", ExportDevice::ReadOnly(device)).with_description("hi");
    FixedExports::new([disk.with_bitmap("b", bitmap)])
}

/// The bytes of a text like "IHAVEOPT 00000003 ...": hexadecimal words become bytes; other words are text.
fn bytes(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in text.split_whitespace() {
        let is_hex = word.len() % 2 == 0 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_hex {
            let pairs = word.as_bytes().chunks(2);
            bytes.extend(pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()));
        } else {
            bytes.extend(word.trim_matches('"').as_bytes());
        }
    }
    bytes
}

/// Sends all of `input_text` at once; returns the output and the last progress.
fn talk(mode: TlsMode, input_text: &str, is_stopping: bool) -> (Vec<u8>, Progress) {
    let exports = exports();
    let server = ServerState {
        exports: &exports,
        is_stopping,
        on_error: &|name, error| unreachable!("{name}: {error}"),
    };
    let input = bytes(input_text);
    let mut handshake = ServerHandshake::new(mode);
    let (mut output, mut start) = (Vec::new(), 0);
    loop {
        let (used, progress) = handshake.step(&input[start..], server, &mut output);
        start += used;
        match progress {
            Progress::Continue => {}
            Progress::StartTls => handshake.encrypted(),
            last => return (output, last),
        }
    }
}

fn answered(input_text: &str, expected: &str) -> Progress {
    let (output, progress) = talk(TlsMode::Off, input_text, false);
    assert_eq!(output, bytes(expected), "{input_text}");
    progress
}

fn session(progress: Progress) -> NbdSession {
    match progress {
        Progress::Enter(session) => session,
        other => unreachable!("no session: {other:?}"),
    }
}

#[test]
fn the_greeting_is_that_of_fixed_newstyle() {
    let mut output = Vec::new();
    ServerHandshake::greet(&mut output);
    assert_eq!(output, bytes("NBDMAGIC IHAVEOPT 0003"));
}

#[test]
fn go_replies_with_size_flags_name_description_and_block_sizes() {
    // Flags: has-flags, read-only, multi-conn, cache.
    let progress = answered(
        "00000003 IHAVEOPT 00000007 0000000d 00000001 \"d\" 0003 0003 0001 0002",
        "0003e889045565a9 00000007 00000003 0000000c 0000 0000000000001234 0503
         0003e889045565a9 00000007 00000003 00000003 0001 \"d\"
         0003e889045565a9 00000007 00000003 00000004 0002 hi
         0003e889045565a9 00000007 00000003 0000000e 0003 00000001 00001000 02000000
         0003e889045565a9 00000007 00000001 00000000",
    );
    let session = session(progress);
    assert_eq!(session.terms.style, HeaderStyle::Simple);
    assert_eq!(session.terms.size_bytes, 4660);
}

#[test]
fn a_list_has_one_reply_per_export() {
    let progress = answered(
        "00000003 IHAVEOPT 00000003 00000000",
        "0003e889045565a9 00000003 00000002 00000007 00000001 \"d\" hi
         0003e889045565a9 00000003 00000001 00000000",
    );
    assert!(matches!(progress, Progress::NeedInput));
}

#[test]
fn the_reply_to_export_name_has_zeroes_unless_declined() {
    let progress = answered("00000003 IHAVEOPT 00000001 00000001 \"d\"", "0000000000001234 0503");
    assert_eq!(session(progress).terms.style, HeaderStyle::Simple);
    let zeroes = "00".repeat(124);
    answered(
        "00000001 IHAVEOPT 00000001 00000001 \"d\"",
        &format!("0000000000001234 0503 {zeroes}"),
    );
}

#[test]
fn contexts_are_selected_for_the_export_that_they_were_asked_of() {
    let select = "00000003 IHAVEOPT 00000008 00000000 IHAVEOPT 0000000a 00000020 00000001 \"d\" 00000001
                  00000013 qemu:dirty-bitmap:b";
    let selected = "0003e889045565a9 00000008 00000001 00000000
                    0003e889045565a9 0000000a 00000004 00000017 00000001 qemu:dirty-bitmap:b
                    0003e889045565a9 0000000a 00000001 00000000";
    let go = "IHAVEOPT 00000007 00000007 00000001 \"d\" 0000";
    // The flags contain DF now.
    let expected = "0003e889045565a9 00000007 00000003 0000000c 0000 0000000000001234 0583
                0003e889045565a9 00000007 00000001 00000000";
    let agreed = session(answered(&format!("{select} {go}"), &format!("{selected} {expected}")));
    assert_eq!(agreed.terms.contexts, [1]);
    assert_eq!(agreed.terms.style, HeaderStyle::Structured);
    // The default export is the same disk under another name, for which no context is selected.
    let elsewhere = "IHAVEOPT 00000007 00000006 00000000 0000";
    let agreed = session(answered(
        &format!("{select} {elsewhere}"),
        &format!("{selected} {expected}"),
    ));
    assert!(agreed.terms.contexts.is_empty());
}

#[test]
fn negotiated_state_is_reset_by_tls() {
    // Structured replies that were negotiated before TLS do not count after it.
    let input_text = "00000003 IHAVEOPT 00000008 00000000 IHAVEOPT 00000005 00000000
                IHAVEOPT 00000005 00000000 IHAVEOPT 00000001 00000001 \"d\"";
    let (output, progress) = talk(TlsMode::Allowed, input_text, false);
    let twice = "TLS has already started".as_bytes();
    let expected = [
        bytes("0003e889045565a9 00000008 00000001 00000000 0003e889045565a9 00000005 00000001 00000000"),
        bytes("0003e889045565a9 00000005 80000003 00000017"),
        twice.to_vec(),
        bytes("0000000000001234 0503"),
    ];
    assert_eq!(output, expected.concat());
    assert_eq!(session(progress).terms.style, HeaderStyle::Simple);
}

#[test]
fn a_stopping_server_refuses_with_shutdown() {
    let (output, _) = talk(TlsMode::Off, "00000003 IHAVEOPT 00000003 00000000", true);
    assert_eq!(output[..16], bytes("0003e889045565a9 00000003 80000007"));
    let (output, progress) = talk(TlsMode::Off, "00000003 IHAVEOPT 00000001 00000001 \"d\"", true);
    assert!(output.is_empty() && matches!(progress, Progress::End(HandshakeEnd::Refused(_))));
}

#[test]
fn the_number_of_options_is_limited() {
    let many = "IHAVEOPT 00000063 00000000 ".repeat(1001);
    let (_, progress) = talk(TlsMode::Off, &format!("00000003 {many}"), false);
    assert!(matches!(
        progress,
        Progress::End(HandshakeEnd::Malformed("options without end"))
    ));
}
