//! Options of the handshake, legal or not, and the required answers: as data, with the known deviations of peers and
//! their reasons.

use crate::raw::{context_query, info_query, string};
use crate::servers::Peer;

/// The reaction of a server to the last option of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Replies of these kinds, the last of which is final; the connection continues.
    Replies(Vec<u32>),
    /// Replies of these kinds, then the connection is closed.
    RepliesAndClose(Vec<u32>),
    /// A reply of this many bytes, and transmission begins.
    Bytes(usize),
    Closed,
}

pub(crate) struct OptionCase {
    pub(crate) name: &'static str,
    pub(crate) client_flags: u32,
    /// Options that are sent first, and are accepted.
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

/// The deviations of peers in their answer to the last option of a case, and the reasons.
pub(crate) fn option_differences() -> Vec<(Peer, &'static str, Outcome, &'static str)> {
    use Peer::{Nbdkit, QemuNbd};
    const WHICH: &str = "it calls what is too big invalid";
    const LENIENT: &str = "its default plugin serves one file under every name";
    const NEW: &str = "it is older than extended headers";
    const MORE: &str = "it reports block sizes without a request";
    const LESS: &str = "it does not report block sizes";
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
