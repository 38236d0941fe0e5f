use std::collections::BTreeMap;

use holdfast_repo::Manifest;
use jiff::tz::TimeZone;

use super::{Claimant, Continuation, MachineIdentity, MachinesByName, NameClaim};
use crate::job::{Error, NoProgress};
use crate::repository::calendar::{Calendar, SKEW_MS};

const A: &str = "11111111-1111-4111-8111-11111111111a";
const NOW_MS: i64 = 1000;
const B: &str = "22222222-2222-4222-8222-22222222222b";

fn manifest(machine: &str, time_ms: i64, notes: &[(&str, &str)]) -> Manifest {
    let notes: BTreeMap<&str, &str> = notes.iter().copied().collect();
    let id = format!("{time_ms:032x}");
    let value = serde_json::json!({ "format": 1, "id": id, "machine": machine, "time_ms": time_ms, "disks": [], "copy": id, "notes": notes });
    serde_json::from_value(value).unwrap()
}

fn of_machine(time_ms: i64, uuid: &str) -> Manifest {
    manifest("web1", time_ms, &[("uuid", uuid), ("method", "filter")])
}

fn check(
    all: &[Manifest],
    claimant: Claimant<'_>,
    continuation: Continuation,
) -> Result<(Vec<i64>, Option<String>), String> {
    let claim = NameClaim {
        name: "web1",
        claimant,
        continuation,
    };
    let zone = TimeZone::UTC;
    let calendar = Calendar::at(NOW_MS, &zone, &NoProgress);
    match claim.check(all, calendar, &NoProgress) {
        Ok(granted) => {
            let own = granted.own.iter().map(|manifest| manifest.time_ms);
            Ok((own.collect(), granted.note.map(|(_, text)| text)))
        }
        Err(error @ Error::NameTaken(_)) => Err(error.to_string()),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn uuids_are_normalized_and_zero_is_no_identity() {
    let plain = MachineIdentity::of_uuid(A);
    for text in [
        A.to_uppercase(),
        A.replace('-', ""),
        format!("{{{A}}}"),
        format!(" {A}\n"),
    ] {
        assert_eq!(MachineIdentity::of_uuid(&text), plain, "{text}");
    }
    for text in ["", "00000000-0000-0000-0000-000000000000"] {
        assert_eq!(MachineIdentity::of_uuid(text), MachineIdentity::Unidentified, "{text}");
    }
    // An identity that is not a UUID still distinguishes machines.
    assert_ne!(MachineIdentity::of_uuid("vm-100"), MachineIdentity::of_uuid("vm-101"));
    assert_eq!(MachineIdentity::of(&manifest("m", 1, &[])), MachineIdentity::Images);
    let without = manifest("m", 1, &[("imported_from", "OVA")]);
    assert_eq!(MachineIdentity::of(&without), MachineIdentity::Unidentified);
}

#[test]
fn a_name_belongs_to_the_machine_of_its_newest_snapshot() {
    let all = [
        of_machine(1, A),
        of_machine(2, &A.to_uppercase()),
        manifest("db", 9, &[]),
    ];
    let same = Continuation::SameIdentity;
    assert_eq!(check(&all, Claimant::Machine(A), same), Ok((vec![1, 2], None)));
    assert_eq!(check(&[], Claimant::Machine(A), same), Ok((vec![], None)));
    for claimant in [
        Claimant::Machine(B),
        Claimant::Machine(""),
        Claimant::Images,
        Claimant::Archive(Some(B)),
        Claimant::Archive(None),
        // An older state of the machine would become the newest snapshot of this name.
        Claimant::Archive(Some(A)),
    ] {
        let refusal = check(&all, claimant, same).unwrap_err();
        assert!(refusal.contains(A), "{refusal}");
    }
    let images = [manifest("web1", 1, &[])];
    assert_eq!(check(&images, Claimant::Images, same), Ok((vec![1], None)));
    assert!(check(&images, Claimant::Machine(A), same).is_err());
    let imports = [manifest("web1", 1, &[("uuid", A), ("imported_from", "XVA")])];
    assert_eq!(check(&imports, Claimant::Archive(Some(A)), same), Ok((vec![1], None)));
    assert_eq!(check(&imports, Claimant::Machine(A), same), Ok((vec![1], None)));
    assert!(check(&imports, Claimant::Archive(None), same).is_err());
}

#[test]
fn machines_that_share_a_name_are_compared_with_their_own_snapshots() {
    let all = [
        of_machine(1, A),
        of_machine(2, B),
        of_machine(3, A),
        manifest("web1", 0, &[]),
    ];
    let same = Continuation::SameIdentity;
    assert_eq!(check(&all, Claimant::Machine(A), same), Ok((vec![1, 3], None)));
    assert!(check(&all, Claimant::Machine(B), same).is_err());
    let named = MachinesByName::of(&all);
    assert_eq!(named.count("web1"), 3);
    assert!(named.is_same(&all[0], &all[2]) && !named.is_same(&all[0], &all[1]));
    assert_eq!(named.shared().collect::<Vec<_>>(), [("web1", 3)]);
}

#[test]
fn a_snapshot_from_the_future_does_not_hold_a_name() {
    let same = Continuation::SameIdentity;
    let future_ms = NOW_MS + SKEW_MS + 1;
    let mut all = vec![of_machine(future_ms, A), of_machine(1, B)];
    assert_eq!(check(&all, Claimant::Machine(B), same), Ok((vec![1], None)));
    assert!(check(&all, Claimant::Machine(A), same).unwrap_err().contains(B));
    // The machine was replaced by request; the clock had been wrong before.
    all[1] = manifest("web1", 1, &[("uuid", B), ("method", "filter"), ("continues", A)]);
    let (own, note) = check(&all, Claimant::Machine(B), same).unwrap();
    assert_eq!((own, note.as_deref()), (vec![future_ms, 1], Some(A)));
    // If it is the only snapshot of the name, it counts.
    assert!(check(&all[..1], Claimant::Machine(B), same).is_err());
    assert_eq!(
        check(&all[..1], Claimant::Machine(A), same),
        Ok((vec![future_ms], None))
    );
}

#[test]
fn machines_without_a_uuid_are_distinguished_by_their_address() {
    let [first, second] = ["none@host.1234:/run/a.qmp", "none@host.1234:/run/b.qmp"];
    let same = Continuation::SameIdentity;
    // A snapshot of an earlier version belongs to the first machine that is backed up.
    let mut all = vec![of_machine(1, "00000000-0000-0000-0000-000000000000")];
    let (own, note) = check(&all, Claimant::Machine(first), same).unwrap();
    assert_eq!((own, note.as_deref()), (vec![1], Some("unidentified")));
    all.push(manifest(
        "web1",
        2,
        &[("uuid", first), ("method", "filter"), ("continues", "unidentified")],
    ));
    let (own, note) = check(&all, Claimant::Machine(first), same).unwrap();
    assert_eq!((own, note.as_deref()), (vec![1, 2], Some("unidentified")));
    let refusal = check(&all, Claimant::Machine(second), same).unwrap_err();
    assert!(
        refusal.contains("a machine without a UUID at host.1234:/run/a.qmp"),
        "{refusal}"
    );
    assert_eq!(MachinesByName::of(&all).count("web1"), 1);
    all.push(of_machine(3, second));
    assert_eq!(MachinesByName::of(&all).count("web1"), 2);
    // A machine that gets a UUID counts as another one, unless the user states otherwise.
    assert!(check(&all[..2], Claimant::Machine(A), same).is_err());
}

/// The statement must outlive the snapshot for which it was made.
#[test]
fn a_statement_applies_to_later_snapshots() {
    let mut all = vec![of_machine(1, A), manifest("web1", 2, &[])];
    let (own, note) = check(&all, Claimant::Machine(B), Continuation::Stated).unwrap();
    assert_eq!((own, note.as_deref()), (vec![1, 2], Some(&*format!("{A} images"))));
    let note = note.unwrap();
    all.push(manifest(
        "web1",
        3,
        &[("uuid", B), ("method", "filter"), ("continues", &note)],
    ));
    assert_eq!(MachinesByName::of(&all).count("web1"), 1);
    // The next snapshot repeats the statement for the remaining snapshots.
    let left = [all[0].clone(), all[2].clone()];
    let (own, note) = check(&left, Claimant::Machine(B), Continuation::SameIdentity).unwrap();
    assert_eq!((own, note.as_deref()), (vec![1, 3], Some(A)));
    // The replaced machine does not get the name back without a statement.
    assert!(check(&all, Claimant::Machine(A), Continuation::SameIdentity).is_err());
    // Statements connect machines in any order, also indirectly.
    let joined = [
        of_machine(1, A),
        of_machine(2, B),
        manifest("web1", 3, &[("uuid", "c"), ("continues", &format!("{A} {B}"))]),
    ];
    assert_eq!(MachinesByName::of(&joined).count("web1"), 1);
    assert_eq!(MachinesByName::of(joined.iter().rev()).count("web1"), 1);
}
