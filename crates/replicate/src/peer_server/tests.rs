//! Requests that are permitted to a peer that may only add snapshots to a dataset.

use std::sync::Arc;

use holdfast_block::SystemClock;
use holdfast_host::provider::{Dataset, ProviderKind};

use super::{PeerServer, is_plain, is_reached_without_links};
use crate::peer::PeerRequest;

fn may(root: &Dataset, line: &str) -> bool {
    let sides = |_| panic!("no request reaches the file systems");
    let server = PeerServer {
        sides: &sides,
        root: Some(root.clone()),
        clock: Arc::new(SystemClock::new()),
    };
    let request: PeerRequest = serde_json::from_str(line).unwrap();
    server.check(&request).is_ok()
}

#[test]
fn only_datasets_at_or_below_the_root_are_permitted() {
    let root = Dataset {
        provider: ProviderKind::Zfs,
        name: "tank/backup/web".to_owned(),
    };
    let list = |kind: &str, name: &str| {
        let ask = serde_json::json!({ "kind": kind, "ask": { "datasets": { "name": name, "is_tree": true } } });
        may(&root, &ask.to_string())
    };
    assert!(list("zfs", "tank/backup/web") && list("zfs", "tank/backup/web/a b/c"));
    for name in [
        "tank",
        "tank/backup/webx",
        "tank/backup/web/../x",
        "tank/backup/web/",
        "tank/backup/web@a",
        "/tank",
    ] {
        assert!(!list("zfs", name), "{name}");
    }
    assert!(!list("btrfs", "tank/backup/web"));
    assert!(may(&root, r#"{"kind":"zfs","ask":"abilities"}"#));
    assert!(!may(&root, r#"{"kind":"btrfs","ask":"abilities"}"#));
}

#[test]
fn names_with_special_characters_are_refused() {
    for good in ["", "/a", "/a b/c-d.e:f_g"] {
        assert!(is_plain(good), "{good}");
    }
    for bad in [
        "a", "/", "/a/", "//a", "/.a", "/..", "/-a", "/ a", "/a@b", "/a#b", "/a%b", "/ä", "/a\n",
    ] {
        assert!(!is_plain(bad), "{bad:?}");
    }
}

#[test]
fn paths_through_links_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_str().unwrap();
    std::fs::create_dir(folder.path().join("real")).unwrap();
    std::os::unix::fs::symlink("/etc", folder.path().join("link")).unwrap();
    let reached = |name: &str| is_reached_without_links(root, &format!("{root}/{name}"));
    assert!(reached("real") && reached("real/new/newer") && is_reached_without_links(root, root));
    assert!(!reached("link") && !reached("link/new"));
}
