//! Calls and answers on the wire: JSON-RPC and XML-RPC.
//!
//! Source: `doc/content/xen-api/wire-protocol.md` of xen-api. Inside the server, values are JSON values.

pub(crate) mod json;
pub(crate) mod xml;

use serde_json::Value;

/// A received call.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MethodCall {
    pub(crate) method: String,
    pub(crate) parameters: Vec<Value>,
}
