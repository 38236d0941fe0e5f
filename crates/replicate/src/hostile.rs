//! The parser of requests from another host, for fuzzing; see [`holdfast_block::hostile`].

use holdfast_block::hostile::{Outcome, Parser};

/// The parsers of this crate.
pub const PARSERS: &[Parser] = &[Parser {
    name: "peer_request",
    feed: peer_request,
}];

/// Valid requests: name of the parser, name of the seed, bytes.
pub fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let requests = [
        ("abilities", r#"{"kind":"zfs","ask":"abilities"}"#),
        (
            "list",
            r#"{"kind":"btrfs","ask":{"datasets":{"name":"/srv/vms","is_tree":false}}}"#,
        ),
        (
            "receive",
            r#"{"kind":"zfs","ask":{"receive":{"dataset":"tank/b/web","snapshots":[{"name":"a","identity":"7","time_s":1,"is_bookmark":false,"hold_count":0,"record":null}],"is_packed":true}}}"#,
        ),
        (
            "keep",
            r#"{"kind":"zfs","ask":{"keep":{"dataset":"tank/b","snapshot":"a","tag":"holdfast-replicate-1","means":"Hold"}}}"#,
        ),
    ];
    requests
        .map(|(name, text)| ("peer_request", name, text.as_bytes().to_vec()))
        .to_vec()
}

/// Decodes a request, and checks that requests to add to a dataset are accepted only for that dataset and those below
/// it.
pub fn peer_request(bytes: &[u8]) -> Outcome {
    crate::peer_server::hostile_request(bytes)
}
