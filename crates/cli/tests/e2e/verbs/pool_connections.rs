//! Connections to a pool: certificates, logins, retries and addresses.

use holdfast_xapi_server::Fault;

use super::pools::World;
use crate::program::stderr;

#[test]
fn no_password_is_sent_to_a_pool_with_an_unknown_certificate() {
    let world = World::new();
    let machine = world.machine();
    let wrong = "00:".repeat(31) + "00";
    let words = [
        "backup",
        &machine,
        "--pool-password-file",
        "password",
        "--pool-certificate",
        &wrong,
    ];
    let (kind, message) = world.rig.error(1, &words);
    assert!(message.contains(&world.pool.fingerprint()), "{message}");
    assert_eq!(kind, "refused");
    // The program does not ask for a password either before the certificate of the pool is accepted.
    let (kind, message) = world.rig.error(1, &["backup", &machine]);
    assert!(message.contains(&world.pool.fingerprint()), "{message}");
    assert_eq!(kind, "refused");
    assert_eq!(world.pool.calls(), [] as [String; 0], "no password was sent");
    world.rig.write("password", b"guess\n");
    let (_, message) = world.fails(1, &["backup", &machine]);
    assert!(message.contains("rejects the login of root"), "{message}");
    let (_, message) = world.fails(2, &["backup", "xen://root:secret@host/web1"]);
    assert!(message.contains("remove the password"), "{message}");
}

/// A restarting toolstack gives no answer for a moment.
#[test]
fn read_only_requests_are_retried() {
    let world = World::new();
    let faults = world.pool.faults();
    faults.times(Fault::RpcStatus(503), 2);
    faults.once(Fault::HandlerStatus(503));
    world.report(&["backup", &world.machine()]);
    world.assert_holds();
    world.assert_clean(2);
    // The number of retries is limited.
    faults.times(Fault::RpcStatus(503), 100);
    let (kind, message) = world.fails(1, &["backup", &world.machine()]);
    assert_eq!(kind, "io", "{message}");
    assert!(message.contains("503"), "{message}");
    faults.clear();
    world.assert_clean(2);
}

#[test]
fn an_invalid_address_is_reported_without_its_password() {
    let world = World::new();
    for (word, expected) in [
        ("xen://root:secret@host/web1", "remove the password"),
        ("xen://host:443:/web1", "several colons"),
        ("xen:///web1", "it has no host"),
    ] {
        for words in [&["machines", word][..], &["backup", word]] {
            let output = world.run(words);
            let text = stderr(&output);
            assert_eq!(output.status.code(), Some(2), "{text}");
            assert!(text.contains(expected) && !text.contains("secret"), "{text}");
        }
    }
}
