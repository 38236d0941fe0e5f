//! Two initiators share a unit: reservations, unit attentions, and resets.

use holdfast_serve::iscsi::Authentication;

use crate::initiator::{Answer, CONFLICT, Data, GOOD, Initiator, RawPdu};
use crate::targets::{TestTarget, start};

const WRITE: &[u8] = &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const READ: &[u8] = &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];

fn pair() -> (TestTarget, Initiator, Initiator) {
    let target = start(Authentication::None);
    let first = Initiator::ready_as(&target, 1);
    let second = Initiator::ready_as(&target, 2);
    (target, first, second)
}

fn reserve_out(initiator: &mut Initiator, action: u8, kind: u8, key: u64, action_key: u64) -> Answer {
    let mut list = [key.to_be_bytes(), action_key.to_be_bytes()].concat();
    list.extend([0; 8]);
    initiator.command(0, &[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], Data::Out(&list))
}

fn may(initiator: &mut Initiator) -> (bool, bool) {
    let read = initiator.command(0, READ, Data::In(512)).status;
    let write = initiator.command(0, WRITE, Data::Out(&[1; 512])).status;
    assert!([GOOD, CONFLICT].contains(&read) && [GOOD, CONFLICT].contains(&write));
    (read == GOOD, write == GOOD)
}

#[test]
fn a_persistent_reservation_excludes_others_and_can_be_preempted() {
    let (_target, mut first, mut second) = pair();
    assert_eq!(reserve_out(&mut first, 0, 0, 0, 11).status, GOOD);
    assert_eq!(reserve_out(&mut first, 1, 3, 11, 0).status, GOOD);
    assert_eq!((may(&mut first), may(&mut second)), ((true, true), (false, false)));
    assert_eq!(
        reserve_out(&mut second, 4, 3, 22, 11).status,
        CONFLICT,
        "it is not registered"
    );
    assert_eq!(reserve_out(&mut second, 0, 0, 0, 22).status, GOOD);
    assert_eq!(reserve_out(&mut second, 4, 1, 22, 11).status, GOOD);
    let attention = first.command(0, &[0; 6], Data::None);
    assert_eq!(attention.sense, Some((6, 0x2a05)), "registrations preempted");
    assert_eq!((may(&mut first), may(&mut second)), ((true, false), (true, true)));
    let keys = first.command(0, &[0x5e, 0, 0, 0, 0, 0, 0, 1, 0, 0], Data::In(256)).data;
    assert_eq!(keys[4..], [0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 22]);
    let wrong_length = second.command(0, &[0x5f, 3, 0, 0, 0, 0, 0, 0, 20, 0], Data::Out(&[0; 20]));
    assert_eq!(wrong_length.sense, Some((5, 0x1a00)));
}

#[test]
fn a_registration_outlives_its_session_and_a_reserve_does_not() {
    let (target, mut first, mut second) = pair();
    assert_eq!(reserve_out(&mut first, 6, 0, 0, 11).status, GOOD);
    assert_eq!(reserve_out(&mut first, 1, 1, 11, 0).status, GOOD);
    drop(first);
    let mut first = Initiator::ready_as(&target, 1);
    assert_eq!((may(&mut first), may(&mut second)), ((true, true), (true, false)));
    assert_eq!(reserve_out(&mut first, 3, 0, 11, 0).status, GOOD);
    let attention = second.command(0, &[0; 6], Data::None);
    assert_eq!(
        attention,
        Answer::default(),
        "it was not registered, so it learns nothing"
    );
    assert_eq!(first.command(0, &[0x16, 0, 0, 0, 0, 0], Data::None).status, GOOD);
    assert_eq!(second.command(0, &[0x16, 0, 0, 0, 0, 0], Data::None).status, CONFLICT);
    assert_eq!(second.command(0, &[0; 6], Data::None).status, CONFLICT);
    assert_eq!(second.command(0, &[0x12, 0, 0, 0, 96, 0], Data::In(96)).status, GOOD);
    drop(first);
    while second.command(0, &[0; 6], Data::None).status == CONFLICT {
        std::thread::yield_now();
    }
    assert_eq!(may(&mut second), (true, true));
}

#[test]
fn a_reset_ends_a_reserve_and_is_announced_to_all() {
    let (_target, mut first, mut second) = pair();
    first.command(0, &[0x16, 0, 0, 0, 0, 0], Data::None);
    let tag = second.next_tag();
    let reset = RawPdu::new(0x42, 0x80 | 5, tag).with_u32(24, second.command_number);
    second.send(&reset);
    let response = second.receive().unwrap();
    assert_eq!((response.opcode(), response.header[2]), (0x22, 0));
    for initiator in [&mut first, &mut second] {
        assert_eq!(initiator.command(0, &[0; 6], Data::None).sense, Some((6, 0x2903)));
        assert_eq!(may(initiator), (true, true));
    }
    assert_eq!(
        first.command(1, &[0; 6], Data::None).status,
        GOOD,
        "another unit was not reset"
    );
}

#[test]
fn a_change_of_mode_parameters_is_announced_to_others() {
    let (target, mut first, mut second) = pair();
    let mut list = [0; 16];
    list[4..10].copy_from_slice(&[0x0a, 10, 0, 0x10, 0x08, 0x40]);
    let select = first.command(0, &[0x15, 0x10, 0, 0, 16, 0], Data::Out(&list));
    assert_eq!(select.status, GOOD, "{select:?}");
    assert_eq!(second.command(0, &[0; 6], Data::None).sense, Some((6, 0x2a01)));
    let before = target.device.to_bytes();
    for initiator in [&mut first, &mut second] {
        let write = initiator.command(0, WRITE, Data::Out(&[1; 512]));
        assert_eq!(write.sense, Some((7, 0x2700)), "software write protection");
    }
    assert!(target.device.to_bytes() == before);
}
