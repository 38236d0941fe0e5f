//! JSON-RPC 1.0 and 2.0.

use serde_json::{Value, json};

use super::MethodCall;
use crate::failure::Answer;

/// The version of the protocol, and the client's id of the call.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Envelope {
    is_version_2: bool,
    id: Value,
}

/// Parses a call; `None` without id, parameters or method: XAPI does not accept notifications.
pub(crate) fn read(body: &[u8]) -> Option<(Envelope, MethodCall)> {
    let value: Value = serde_json::from_slice(body).ok()?;
    let id = value.get("id").filter(|id| id.is_string() || id.is_i64())?.clone();
    let is_version_2 = match value.get("jsonrpc") {
        None => false,
        Some(version) if version == "2.0" => true,
        Some(_) => return None,
    };
    let call = MethodCall {
        method: value.get("method")?.as_str()?.to_owned(),
        parameters: value.get("params")?.as_array()?.clone(),
    };
    Some((Envelope { is_version_2, id }, call))
}

/// Writes an answer.
pub(crate) fn write(envelope: &Envelope, answer: &Answer<Value>) -> String {
    let id = &envelope.id;
    let answer = match (answer, envelope.is_version_2) {
        (Ok(result), true) => json!({"jsonrpc": "2.0", "result": result, "id": id}),
        (Ok(result), false) => json!({"result": result, "error": null, "id": id}),
        (Err(failure), true) => json!({
            "jsonrpc": "2.0",
            "error": {"code": 1, "message": failure.code, "data": failure.parameters},
            "id": id,
        }),
        (Err(failure), false) => json!({"result": null, "error": failure.words(), "id": id}),
    };
    answer.to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{read, write};
    use crate::failure::Failure;

    #[test]
    fn both_versions_are_answered_in_kind() {
        let one = br#"{"method":"VM.get_all","params":["S"],"id":"x"}"#;
        let two = br#"{"jsonrpc":"2.0","method":"VM.get_all","params":["S"],"id":3}"#;
        let failure = Err(Failure::new("SESSION_INVALID", &["S"]));
        let (envelope, call) = read(one).unwrap();
        assert_eq!(call.parameters, [json!("S")]);
        let answer = r#"{"error":["SESSION_INVALID","S"],"id":"x","result":null}"#;
        assert_eq!(write(&envelope, &failure), answer);
        let (envelope, _) = read(two).unwrap();
        let answer = r#"{"error":{"code":1,"data":["S"],"message":"SESSION_INVALID"},"id":3,"jsonrpc":"2.0"}"#;
        assert_eq!(write(&envelope, &failure), answer);
        assert_eq!(
            write(&envelope, &Ok(json!(7))),
            r#"{"id":3,"jsonrpc":"2.0","result":7}"#
        );
    }

    #[test]
    fn malformed_calls_are_refused() {
        for body in [
            "",
            "[]",
            r#"{"method":"m","params":[]}"#,
            r#"{"method":"m","id":1}"#,
            r#"{"jsonrpc":"1.5","method":"m","params":[],"id":1}"#,
            r#"{"method":"m","params":[],"id":null}"#,
        ] {
            assert!(read(body.as_bytes()).is_none(), "{body}");
        }
    }
}
