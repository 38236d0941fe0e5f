//! What a server must answer, legal or not, as data: each case with known deviations of peers, and their reasons.

use crate::raw::{Style, context_query, info_query, string};
use crate::servers::Peer;

/// Bytes of the export "disk": data up to [`DATA_END`], zeroes from there on.
pub(crate) const SIZE: u64 = (1 << 20) + 512;
pub(crate) const DATA_END: u64 = 512 << 10;

/// The reaction of a server to the last option of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Replies of these kinds, the last of which is final; the connection goes on.
    Replies(Vec<u32>),
    /// The same, and then the connection is closed.
    RepliesAndClose(Vec<u32>),
    /// That many bytes, and transmission begins.
    Bytes(usize),
    Closed,
}

pub(crate) struct OptionCase {
    pub(crate) name: &'static str,
    pub(crate) client_flags: u32,
    /// Options that come first, and are accepted.
    pub(crate) before: Vec<(u32, Vec<u8>)>,
    pub(crate) option: u32,
    pub(crate) data: Vec<u8>,
    pub(crate) outcome: Outcome,
}

const ACK: u32 = 1;
const SERVER: u32 = 2;
const INFO: u32 = 3;
const CONTEXT: u32 = 4;
const UNSUP: u32 = 0x8000_0001;
const POLICY: u32 = 0x8000_0002;
const INVALID: u32 = 0x8000_0003;
const UNKNOWN: u32 = 0x8000_0006;
const TOO_BIG: u32 = 0x8000_0009;
const EXT_REQD: u32 = 0x8000_000a;

const EXPORT_NAME: u32 = 1;
const ABORT: u32 = 2;
const LIST: u32 = 3;
const PEEK: u32 = 4;
const STARTTLS: u32 = 5;
const INFO_OPTION: u32 = 6;
const GO: u32 = 7;
const STRUCTURED: u32 = 8;
const LIST_CONTEXT: u32 = 9;
const SET_CONTEXT: u32 = 10;
const EXTENDED: u32 = 11;

fn option(name: &'static str, option: u32, data: impl Into<Vec<u8>>, kinds: &[u32]) -> OptionCase {
    OptionCase {
        name,
        client_flags: 3,
        before: Vec::new(),
        option,
        data: data.into(),
        outcome: Outcome::Replies(kinds.to_vec()),
    }
}

impl OptionCase {
    fn after(mut self, before: &[(u32, Vec<u8>)]) -> Self {
        self.before = before.to_vec();
        self
    }

    fn structured(self) -> Self {
        self.after(&[(STRUCTURED, Vec::new())])
    }

    fn ends(mut self, outcome: Outcome) -> Self {
        self.outcome = outcome;
        self
    }

    fn flags(mut self, flags: u32) -> Self {
        self.client_flags = flags;
        self
    }
}

pub(crate) fn option_cases() -> Vec<OptionCase> {
    let mut cases = basic_options();
    cases.extend(info_options());
    cases.extend(context_options());
    cases
}

fn basic_options() -> Vec<OptionCase> {
    vec![
        option("an unknown option", 99, [], &[UNSUP]),
        option("an unknown option with data", 0xffff_ffff, vec![7; 4000], &[UNSUP]),
        option("an option that was withdrawn", PEEK, string("disk"), &[UNSUP]),
        option("an unknown option that is too big", 99, vec![0; 1 << 20], &[UNSUP]),
        option("an option that is too big", INFO_OPTION, vec![0; 1 << 20], &[TOO_BIG]),
        option("a list", LIST, [], &[SERVER, ACK]),
        option("a list with data", LIST, [0], &[INVALID]),
        option("goodbye", ABORT, [], &[]).ends(Outcome::RepliesAndClose(vec![ACK])),
        option("goodbye with data", ABORT, [1, 2, 3], &[]).ends(Outcome::RepliesAndClose(vec![ACK])),
        option("TLS where there is none", STARTTLS, [], &[POLICY]),
        option("TLS with data", STARTTLS, [0], &[INVALID]),
        option("structured replies", STRUCTURED, [], &[ACK]),
        option("structured replies with data", STRUCTURED, [0], &[INVALID]),
        option("structured replies again", STRUCTURED, [], &[ACK]).structured(),
        option("extended headers", EXTENDED, [], &[ACK]),
        option("extended headers with data", EXTENDED, [0], &[INVALID]),
        option("structured replies after extended headers", STRUCTURED, [], &[EXT_REQD])
            .after(&[(EXTENDED, Vec::new())]),
        option("client flags that are unknown", LIST, [], &[])
            .flags(1 << 7)
            .ends(Outcome::Closed),
        option("an export by name", EXPORT_NAME, "disk", &[]).ends(Outcome::Bytes(10)),
        option("an export by name, with zeroes", EXPORT_NAME, "disk", &[])
            .flags(1)
            .ends(Outcome::Bytes(134)),
        option(
            "an export by name in newstyle that is not fixed",
            EXPORT_NAME,
            "disk",
            &[],
        )
        .flags(0)
        .ends(Outcome::Bytes(134)),
        option("an export by a name that there is not", EXPORT_NAME, "other", &[]).ends(Outcome::Closed),
        option(
            "an export by a name that is too long",
            EXPORT_NAME,
            vec![b'x'; 5000],
            &[],
        )
        .ends(Outcome::Closed),
    ]
}

fn info_options() -> Vec<OptionCase> {
    let cut_off = |length: u32| [length.to_be_bytes().as_slice(), b"disk\0\0"].concat();
    vec![
        option("information", INFO_OPTION, info_query("disk", &[]), &[INFO, ACK]),
        option(
            "information of all kinds",
            INFO_OPTION,
            info_query("disk", &[0, 1, 3]),
            &[INFO, INFO, INFO, ACK],
        ),
        option(
            "information of a kind that is unknown",
            INFO_OPTION,
            info_query("disk", &[999]),
            &[INFO, ACK],
        ),
        option(
            "information about nothing",
            INFO_OPTION,
            info_query("other", &[]),
            &[UNKNOWN],
        ),
        option("information without data", INFO_OPTION, [], &[INVALID]),
        option(
            "a name that is longer than the option",
            INFO_OPTION,
            cut_off(5),
            &[INVALID],
        ),
        option("a name of absurd length", INFO_OPTION, cut_off(u32::MAX), &[INVALID]),
        option("a name that leaves bytes over", INFO_OPTION, cut_off(2), &[INVALID]),
        option(
            "a name that is too long",
            INFO_OPTION,
            info_query(&"x".repeat(5000), &[]),
            &[TOO_BIG],
        ),
        option(
            "a name that is no text",
            GO,
            b"\0\0\0\x02\xff\xfe\0\0".to_vec(),
            &[INVALID],
        ),
        option(
            "a list of information that is cut off",
            GO,
            b"\0\0\0\x04disk\0\x02\0\0".to_vec(),
            &[INVALID],
        ),
        option("going", GO, info_query("disk", &[3]), &[INFO, INFO, ACK]),
        option("going nowhere", GO, info_query("other", &[]), &[UNKNOWN]),
    ]
}

fn context_options() -> Vec<OptionCase> {
    let cut_off = [
        string("disk"),
        1_u32.to_be_bytes().to_vec(),
        99_u32.to_be_bytes().to_vec(),
    ]
    .concat();
    let miscounted = [string("disk"), 2_u32.to_be_bytes().to_vec(), string("base:allocation")].concat();
    let left_over = [context_query("disk", &["base:allocation"]), vec![0]].concat();
    let query = |queries: &[&str]| context_query("disk", queries);
    vec![
        option(
            "contexts without structured replies",
            SET_CONTEXT,
            query(&["base:allocation"]),
            &[INVALID],
        ),
        option(
            "a list of contexts without structured replies",
            LIST_CONTEXT,
            query(&[]),
            &[CONTEXT, ACK],
        ),
        option("a list of all contexts", LIST_CONTEXT, query(&[]), &[CONTEXT, ACK]).structured(),
        option(
            "a list of a namespace",
            LIST_CONTEXT,
            query(&["base:"]),
            &[CONTEXT, ACK],
        )
        .structured(),
        option(
            "a list of a context",
            LIST_CONTEXT,
            query(&["base:allocation"]),
            &[CONTEXT, ACK],
        )
        .structured(),
        option(
            "a list of what is unknown",
            LIST_CONTEXT,
            query(&["x-none:such"]),
            &[ACK],
        )
        .structured(),
        option("a context", SET_CONTEXT, query(&["base:allocation"]), &[CONTEXT, ACK]).structured(),
        option(
            "a context twice",
            SET_CONTEXT,
            query(&["base:allocation", "base:allocation"]),
            &[CONTEXT, ACK],
        )
        .structured(),
        option("no context", SET_CONTEXT, query(&[]), &[ACK]).structured(),
        option("a namespace is no context", SET_CONTEXT, query(&["base:"]), &[ACK]).structured(),
        option(
            "a context that is unknown",
            SET_CONTEXT,
            query(&["base:other", "x-none:such"]),
            &[ACK],
        )
        .structured(),
        option(
            "contexts of nothing",
            SET_CONTEXT,
            context_query("other", &["base:allocation"]),
            &[UNKNOWN],
        )
        .structured(),
        option("a query that is cut off", SET_CONTEXT, cut_off, &[INVALID]).structured(),
        option("queries that are miscounted", SET_CONTEXT, miscounted, &[INVALID]).structured(),
        option("queries that leave bytes over", SET_CONTEXT, left_over, &[INVALID]).structured(),
        option("contexts without data", SET_CONTEXT, [], &[INVALID]).structured(),
    ]
}

/// The reaction of a server to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expect {
    /// Success, with the bytes of the export where it is a read.
    Done,
    /// An error, after which the connection goes on.
    Error(u32),
    Closed,
    /// The case is skipped.
    NotAsked,
}

pub(crate) struct RequestCase {
    pub(crate) name: &'static str,
    pub(crate) style: Style,
    pub(crate) flags: u16,
    pub(crate) kind: u16,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    /// Bytes that follow the header.
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
        // As QEMU 10.0 sends them.
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

/// What a peer may answer to the last option of a case instead, and why.
pub(crate) fn option_differences() -> Vec<(Peer, &'static str, Outcome, &'static str)> {
    use Peer::{Nbdkit, QemuNbd};
    const WHICH: &str = "it calls what is too big invalid";
    const LENIENT: &str = "its default plugin serves one file under every name";
    const NEW: &str = "it is older than extended headers";
    const MORE: &str = "it tells the sizes of blocks unasked";
    const LESS: &str = "it does not tell sizes of blocks";
    let replies = |kinds: &[u32]| Outcome::Replies(kinds.to_vec());
    let mut differences = vec![
        (Nbdkit, "an option that is too big", replies(&[INVALID]), WHICH),
        (Nbdkit, "a name that is too long", replies(&[INVALID]), WHICH),
        (QemuNbd, "an option that is too big", replies(&[INVALID]), WHICH),
        (QemuNbd, "a name that is too long", replies(&[INVALID]), WHICH),
        (
            Nbdkit,
            "an export by a name that there is not",
            Outcome::Bytes(10),
            LENIENT,
        ),
        (Nbdkit, "information about nothing", replies(&[INFO, ACK]), LENIENT),
        (Nbdkit, "a name that is no text", replies(&[INFO, ACK]), LENIENT),
        (Nbdkit, "going nowhere", replies(&[INFO, ACK]), LENIENT),
        (Nbdkit, "contexts of nothing", replies(&[CONTEXT, ACK]), LENIENT),
        (Nbdkit, "information of all kinds", replies(&[INFO, INFO, ACK]), LESS),
        (Nbdkit, "going", replies(&[INFO, ACK]), LESS),
        (
            Nbdkit,
            "a context twice",
            replies(&[CONTEXT, CONTEXT, ACK]),
            "it does not look for doubles",
        ),
        (
            Nbdkit,
            "queries that are miscounted",
            replies(&[CONTEXT, INVALID]),
            "it answers while it reads",
        ),
        (
            Nbdkit,
            "queries that leave bytes over",
            replies(&[CONTEXT, ACK]),
            "it does not look at the rest",
        ),
        (
            QemuNbd,
            "structured replies again",
            replies(&[INVALID]),
            "the server MAY fail a repeated message",
        ),
        (QemuNbd, "information", replies(&[INFO, INFO, ACK]), MORE),
        (
            QemuNbd,
            "information of a kind that is unknown",
            replies(&[INFO, INFO, ACK]),
            MORE,
        ),
        (
            QemuNbd,
            "a name that is no text",
            replies(&[UNKNOWN]),
            "it compares bytes",
        ),
        (
            QemuNbd,
            "queries that leave bytes over",
            Outcome::RepliesAndClose(vec![CONTEXT, ACK]),
            "it takes the rest for the next option",
        ),
    ];
    for peer in [Nbdkit, QemuNbd] {
        differences.extend([
            (peer, "extended headers", replies(&[UNSUP]), NEW),
            (peer, "extended headers with data", replies(&[UNSUP]), NEW),
            (
                peer,
                "structured replies after extended headers",
                replies(&[UNSUP]),
                NEW,
            ),
        ]);
    }
    differences
}

/// The same for requests.
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
