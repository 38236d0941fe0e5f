//! The fields of each class, with their initial values.
//!
//! Source: `ocaml/idl/datamodel.ml`, `datamodel_vm.ml` and `datamodel_host.ml` of xen-api. Integers and floats are
//! distinguished as there, because both wire formats distinguish them.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use crate::database::Record;

/// The date that xapi writes if there is none.
pub(crate) const EPOCH: &str = "19700101T00:00:00Z";

static BLANKS: LazyLock<BTreeMap<String, Record>> =
    LazyLock::new(|| serde_json::from_str(include_str!("schema.json")).expect("schema.json is checked by a test"));

/// The class with this name.
pub(crate) fn class(name: &str) -> Option<&'static str> {
    BLANKS.get_key_value(name).map(|(class, _)| class.as_str())
}

/// A record of `class` with the initial values.
pub(crate) fn blank(class: &str) -> Record {
    BLANKS.get(class).cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{blank, class};

    #[test]
    fn each_class_has_a_uuid_and_floats_are_floats() {
        for name in [
            "VM", "VDI", "VBD", "VIF", "SR", "PBD", "PIF", "host", "network", "pool", "session", "task",
        ] {
            assert_eq!(class(name), Some(name));
            assert!(blank(name).contains_key("uuid"), "{name}");
        }
        assert!(blank("VM")["HVM_shadow_multiplier"].is_f64());
        assert!(blank("task")["progress"].is_f64());
        assert_eq!(class("vm"), None);
    }
}
