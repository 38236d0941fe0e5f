//! Requests, legal or not, and the required answers: as data, with the known deviations of peers and their reasons.

use crate::raw::Style;
use crate::servers::Peer;

/// Bytes of the export "disk": data up to [`DATA_END`], zeroes from there on.
pub(crate) const SIZE: u64 = (1 << 20) + 512;
pub(crate) const DATA_END: u64 = 512 << 10;

/// The reaction of a server to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expect {
    /// Success; a read returns the bytes of the export.
    Done,
    /// An error, after which the connection continues.
    Error(u32),
    Closed,
    /// The case is not run.
    NotAsked,
}

pub(crate) struct RequestCase {
    pub(crate) name: &'static str,
    pub(crate) style: Style,
    pub(crate) flags: u16,
    pub(crate) kind: u16,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    /// Number of bytes that follow the header.
    pub(crate) payload: u64,
    pub(crate) expect: Expect,
}

impl RequestCase {
    fn flags(mut self, flags: u16) -> Self {
        self.flags = flags;
        self
    }

    fn payload(mut self, payload: u64) -> Self {
        self.payload = payload;
        self
    }
}

fn request(name: &'static str, style: Style, kind: u16, offset: u64, length: u64, expect: Expect) -> RequestCase {
    let has_payload = kind == WRITE;
    RequestCase {
        name,
        style,
        flags: if has_payload && style == Style::Extended {
            PAYLOAD
        } else {
            0
        },
        kind,
        offset,
        length,
        payload: if has_payload { length } else { 0 },
        expect,
    }
}

const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const CACHE: u16 = 5;
const ZEROES: u16 = 6;
const STATUS: u16 = 7;

const FUA: u16 = 1;
const NO_HOLE: u16 = 2;
const DF: u16 = 4;
const ONE: u16 = 8;
const FAST: u16 = 16;
const PAYLOAD: u16 = 32;

const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;
const ENOTSUP: u32 = 95;

pub(crate) fn request_cases() -> Vec<RequestCase> {
    let mut cases = legal_requests();
    cases.extend(illegal_requests());
    cases.extend(extended_requests());
    cases
}

fn legal_requests() -> Vec<RequestCase> {
    use Expect::Done;
    use Style::{Simple, Structured};
    let end = SIZE - 512;
    vec![
        request("a read", Simple, READ, 4096, 4096, Done),
        request("a structured read", Structured, READ, 4096, 4096, Done),
        request("a read of nothing", Structured, READ, 4096, 0, Done),
        request("a simple read of nothing", Simple, READ, 4096, 0, Done),
        request("a read of everything", Simple, READ, 0, SIZE, Done),
        request("a structured read of everything", Structured, READ, 0, SIZE, Done),
        request("a read in one chunk", Structured, READ, DATA_END - 4096, 65_536, Done).flags(DF),
        request("a read of the end", Simple, READ, end, 512, Done),
        request("a read of odd bytes", Structured, READ, 4097, 1001, Done),
        request("a read with FUA", Simple, READ, 0, 512, Done).flags(FUA),
        request("a write", Simple, WRITE, 900_000, 5000, Done),
        request("a write of nothing", Simple, WRITE, 0, 0, Done),
        request("a durable write", Structured, WRITE, end, 512, Done).flags(FUA),
        request("a flush", Simple, FLUSH, 0, 0, Done),
        request("a trim", Simple, TRIM, 900_000, 70_000, Done),
        request("a durable trim", Structured, TRIM, 900_000, 70_000, Done).flags(FUA),
        request("zeroes", Simple, ZEROES, 900_001, 70_000, Done),
        request("zeroes that take space", Structured, ZEROES, 900_001, 70_000, Done).flags(NO_HOLE),
        request("zeroes up to the end", Simple, ZEROES, end, 512, Done).flags(FUA | NO_HOLE),
        request("reading ahead", Simple, CACHE, 0, 65_536, Done),
        request("block status", Structured, STATUS, 0, SIZE, Done),
        request("block status of one extent", Structured, STATUS, 1000, 10_000, Done).flags(ONE),
    ]
}

#[allow(clippy::too_many_lines, reason = "it is a table")]
fn illegal_requests() -> Vec<RequestCase> {
    use Expect::{Closed, Error};
    use Style::{Simple, Structured};
    let end = SIZE - 512;
    vec![
        request("a read past the end", Simple, READ, end, 513, Error(EINVAL)),
        request(
            "a structured read past the end",
            Structured,
            READ,
            SIZE,
            1,
            Error(EINVAL),
        ),
        request("a read far past the end", Simple, READ, 1 << 62, 512, Error(EINVAL)),
        request(
            "a read whose end has no number",
            Simple,
            READ,
            u64::MAX,
            2,
            Error(EINVAL),
        ),
        request(
            "a read that is too long",
            Simple,
            READ,
            0,
            (32 << 20) + 1,
            Error(EINVAL),
        ),
        request(
            "a structured read that is too long",
            Structured,
            READ,
            0,
            (32 << 20) + 1,
            Error(EOVERFLOW),
        ),
        request(
            "a read of one chunk that is not offered",
            Simple,
            READ,
            0,
            512,
            Error(EINVAL),
        )
        .flags(DF),
        request("a read that takes space", Structured, READ, 0, 512, Error(EINVAL)).flags(NO_HOLE),
        request(
            "a read with flags that are unknown",
            Simple,
            READ,
            0,
            512,
            Error(EINVAL),
        )
        .flags(1 << 14),
        request("a write past the end", Simple, WRITE, end, 513, Error(ENOSPC)),
        request(
            "a write far past the end",
            Structured,
            WRITE,
            1 << 62,
            4096,
            Error(ENOSPC),
        ),
        request(
            "a write that is too long",
            Simple,
            WRITE,
            0,
            (32 << 20) + 512,
            Error(EINVAL),
        ),
        request("a write of one extent", Simple, WRITE, 0, 512, Error(EINVAL)).flags(ONE),
        request("a trim past the end", Simple, TRIM, end, 513, Error(EINVAL)),
        request("zeroes past the end", Simple, ZEROES, end, 513, Error(ENOSPC)),
        request(
            "zeroes that take space and are quick",
            Simple,
            ZEROES,
            900_000,
            4096,
            Error(ENOTSUP),
        )
        .flags(FAST | NO_HOLE),
        request("a flush with a range", Simple, FLUSH, 512, 512, Error(EINVAL)),
        request("reading ahead past the end", Simple, CACHE, end, 513, Error(EINVAL)),
        request(
            "block status without a selected context",
            Simple,
            STATUS,
            0,
            512,
            Error(EINVAL),
        ),
        request("block status past the end", Structured, STATUS, end, 513, Error(EINVAL)),
        request("block status of nothing", Structured, STATUS, 0, 0, Error(EINVAL)),
        request("a command that is unknown", Simple, 99, 0, 512, Error(EINVAL)),
        request("a change of size", Structured, 8, 0, 512, Error(EINVAL)),
        request("a payload that is not agreed on", Simple, WRITE, 0, 512, Error(EINVAL)).flags(PAYLOAD),
        request("goodbye", Simple, 2, 0, 0, Closed),
    ]
}

fn extended_requests() -> Vec<RequestCase> {
    use Expect::{Closed, Done, Error};
    use Style::Extended;
    vec![
        request("an extended read", Extended, READ, 4096, 4096, Done),
        request("an extended read of everything", Extended, READ, 0, SIZE, Done),
        request(
            "an extended read of absurd length",
            Extended,
            READ,
            0,
            1 << 60,
            Error(EOVERFLOW),
        ),
        request("an extended write", Extended, WRITE, 900_000, 5000, Done),
        // QEMU 10.0 sends such requests.
        request("a payload that is not announced", Extended, WRITE, 900_000, 512, Done).flags(0),
        request(
            "an extended write past the end",
            Extended,
            WRITE,
            SIZE,
            512,
            Error(ENOSPC),
        ),
        request("a read with a payload", Extended, READ, 0, 512, Error(EINVAL))
            .flags(PAYLOAD)
            .payload(512),
        request(
            "an extended trim past the end",
            Extended,
            TRIM,
            0,
            1 << 40,
            Error(EINVAL),
        ),
        request("extended zeroes", Extended, ZEROES, 900_000, 100_000, Done),
        request("extended block status", Extended, STATUS, 0, SIZE, Done),
        request("block status with half a list", Extended, STATUS, 0, 10, Error(EINVAL))
            .flags(PAYLOAD)
            .payload(10),
        request("an extended flush", Extended, FLUSH, 0, 0, Done),
        request("a payload of absurd length", Extended, WRITE, 0, 1 << 40, Closed).payload(0),
    ]
}

/// The deviations of peers in their answer to a request, and the reasons.
pub(crate) const REQUEST_DIFFERENCES: &[(Peer, &str, Expect, &str)] = &[
    (Peer::Nbdkit, "a read of nothing", Expect::Error(EINVAL), "unspecified"),
    (
        Peer::Nbdkit,
        "a simple read of nothing",
        Expect::Error(EINVAL),
        "unspecified",
    ),
    (Peer::Nbdkit, "a write of nothing", Expect::Error(ENOSPC), "unspecified"),
    (
        Peer::Nbdkit,
        "a structured read that is too long",
        Expect::Error(EINVAL),
        "EOVERFLOW is allowed, not required",
    ),
    (
        Peer::QemuNbd,
        "a structured read that is too long",
        Expect::Error(EINVAL),
        "EOVERFLOW is allowed, not required",
    ),
    (
        Peer::Nbdkit,
        "a write that is too long",
        Expect::Error(ENOSPC),
        "it looks at the end of the export first",
    ),
    (
        Peer::QemuNbd,
        "a write that is too long",
        Expect::Closed,
        "the server MAY take it for an attack",
    ),
    (
        Peer::Nbdkit,
        "zeroes that take space and are quick",
        Expect::NotAsked,
        "nbdkit 1.32 does not survive it",
    ),
    (
        Peer::QemuNbd,
        "zeroes that take space and are quick",
        Expect::Done,
        "a file can be extended quickly",
    ),
    (
        Peer::QemuNbd,
        "a write past the end",
        Expect::Error(EINVAL),
        "the server SHOULD say ENOSPC",
    ),
    (
        Peer::QemuNbd,
        "a write far past the end",
        Expect::Error(EINVAL),
        "the server SHOULD say ENOSPC",
    ),
    (
        Peer::QemuNbd,
        "zeroes past the end",
        Expect::Error(EINVAL),
        "the server SHOULD say ENOSPC",
    ),
    (
        Peer::QemuNbd,
        "a flush with a range",
        Expect::Done,
        "it does not look at the range of a flush",
    ),
];
