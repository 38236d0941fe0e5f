//! The conformance tests for all stores; an implementation only has to pass a constructor.

use std::collections::BTreeMap;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use super::seeded::Seeded;
use crate::store::{ObjectKind, ObjectName, Put, Result, Store, StoreError};

const LARGE_BYTES: usize = 9 << 20;

/// Tests stores created by `make`, each empty, for all promises of [`Store`] that one process can observe.
///
/// # Panics
/// A promise is broken.
pub fn check(make: &mut dyn FnMut() -> Arc<dyn Store>) {
    let cases: [fn(&Arc<dyn Store>); 15] = [
        an_empty_store_has_nothing,
        stored_objects_are_read_back,
        objects_of_all_kinds_are_apart,
        the_first_put_of_a_name_stays,
        ranges_are_exact,
        a_bound_on_the_length_is_kept,
        a_streamed_object_appears_whole_at_its_commit,
        an_abandoned_object_does_not_exist,
        an_object_on_its_way_is_not_cleaned_away_while_it_is_young,
        a_deleted_object_is_gone_and_its_name_free,
        lists_are_complete,
        ages_are_of_the_objects_that_there_are,
        listing_may_delete_objects_and_stops_at_an_error,
        one_of_many_at_once_creates,
        partial_objects_are_invisible,
    ];
    for case in cases {
        case(&make());
    }
}

/// Checks that a store with the objects of [`fill`] can be read, and rejects changes with [`StoreError::ReadOnly`].
///
/// # Panics
/// A promise is broken.
pub fn check_read_only(store: &dyn Store) {
    assert_eq!(listing(store, ObjectKind::Pack).len(), 5);
    let pack = name(ObjectKind::Pack, "00aa");
    assert_eq!(store.get(&pack, 100).expect("readable"), b"pack");
    let new = name(ObjectKind::Pack, "ffff");
    let is_read_only = |error: StoreError| matches!(error, StoreError::ReadOnly { .. });
    assert!(store.put(&new, b"new").is_err_and(is_read_only));
    let streamed = store.create(&new).and_then(|mut writer| {
        writer.append(b"new")?;
        writer.commit()
    });
    assert!(streamed.is_err_and(is_read_only));
    assert!(store.delete(&pack).is_err_and(is_read_only));
    assert_eq!(store.get(&pack, 100).expect("readable"), b"pack");
    assert!(store.length(&new).is_err_and(|error| error.is_not_found()));
}

/// Puts the objects that [`check_read_only`] expects.
///
/// # Panics
/// The store cannot be written.
pub fn fill(store: &dyn Store) {
    for text in ["00aa", "00ab", "01aa", "7faa", "feaa"] {
        store
            .put(&name(ObjectKind::Pack, text), b"pack")
            .expect("the store takes an object");
    }
}

fn name(kind: ObjectKind, text: &str) -> ObjectName {
    ObjectName::new(kind, text).expect("a valid name")
}

fn index(text: &str) -> ObjectName {
    name(ObjectKind::Index, text)
}

fn listing(store: &dyn Store, kind: ObjectKind) -> BTreeMap<ObjectName, u64> {
    let mut objects = BTreeMap::new();
    store
        .list(kind, &mut |name, length| {
            assert_eq!(name.kind(), kind);
            assert!(objects.insert(name, length).is_none(), "an object came twice");
            Ok(())
        })
        .expect("the store lists");
    objects
}

/// Bytes in a pattern that does not repeat.
fn pattern(length: usize) -> Vec<u8> {
    let mut seeded = Seeded::new(length as u64);
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend_from_slice(&seeded.next().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

fn an_empty_store_has_nothing(store: &Arc<dyn Store>) {
    for kind in ObjectKind::ALL {
        assert!(listing(store, kind).is_empty(), "{kind}");
    }
    for absent in [ObjectName::config(), index("a"), name(ObjectKind::Pack, "aa00")] {
        assert!(matches!(store.get(&absent, 10), Err(StoreError::NotFound { name }) if name == absent));
        assert!(store.length(&absent).is_err_and(|error| error.is_not_found()));
        let read = store.get_range(&absent, 0, &mut [0]);
        assert!(read.is_err_and(|error| error.is_not_found()));
        store.delete(&absent).expect("deleting what is not there is fine");
    }
    assert!(!store.describe().is_empty());
}

fn stored_objects_are_read_back(store: &Arc<dyn Store>) {
    for length in [0, 1, 511, 4096, 65_537, LARGE_BYTES] {
        let name = name(ObjectKind::Pack, &format!("ab{length}"));
        let bytes = pattern(length);
        assert_eq!(store.put(&name, &bytes).expect("put"), Put::Created);
        assert_eq!(store.length(&name).expect("length"), length as u64);
        assert!(store.get(&name, length as u64).expect("get") == bytes);
        assert_eq!(listing(store, ObjectKind::Pack).get(&name), Some(&(length as u64)));
    }
}

fn objects_of_all_kinds_are_apart(store: &Arc<dyn Store>) {
    let names = || {
        ObjectKind::ALL.into_iter().map(|kind| match kind {
            ObjectKind::Config => ObjectName::config(),
            _ => name(kind, "ab12"),
        })
    };
    for name in names() {
        let put = store.put(&name, name.to_string().as_bytes());
        assert_eq!(put.expect("put"), Put::Created, "{name}");
    }
    for name in names() {
        assert_eq!(store.get(&name, 100).expect("get"), name.to_string().as_bytes());
        assert_eq!(listing(store, name.kind()).into_keys().collect::<Vec<_>>(), [name]);
    }
    let mut foreign_files = Vec::new();
    let mut visit = |path| {
        foreign_files.push(path);
        Ok(())
    };
    store
        .foreign_files(&mut visit)
        .expect("the store looks for foreign files");
    assert!(foreign_files.is_empty(), "{foreign_files:?}");
}

fn the_first_put_of_a_name_stays(store: &Arc<dyn Store>) {
    assert_eq!(store.put(&index("a"), b"first").expect("put"), Put::Created);
    assert_eq!(store.put(&index("a"), b"second").expect("put"), Put::AlreadyExists);
    let mut writer = store.create(&index("a")).expect("create");
    writer.append(b"third").expect("append");
    assert_eq!(writer.commit().expect("commit"), Put::AlreadyExists);
    assert_eq!(store.get(&index("a"), 100).expect("get"), b"first");
    assert_eq!(listing(store, ObjectKind::Index).len(), 1);
}

fn ranges_are_exact(store: &Arc<dyn Store>) {
    let pack = name(ObjectKind::Pack, "0123");
    let bytes = pattern(10_000);
    store.put(&pack, &bytes).expect("put");
    for (offset, length) in [
        (0, 0),
        (0, 1),
        (0, 10_000),
        (1, 4095),
        (4096, 4096),
        (9_999, 1),
        (10_000, 0),
    ] {
        let mut buffer = vec![0; length];
        store
            .get_range(&pack, offset as u64, &mut buffer)
            .expect("a range inside");
        assert_eq!(buffer, bytes[offset..offset + length]);
    }
    for (offset, length, expected) in [(9_999, 2, 10_001), (10_000, 1, 10_001), (1 << 40, 1, (1 << 40) + 1)] {
        match store.get_range(&pack, offset, &mut vec![0; length]) {
            Err(StoreError::ShortObject {
                name,
                expected: actual,
                actual: 10_000,
            }) => assert_eq!((name, actual), (pack.clone(), expected)),
            other => panic!("a range past the end answered {other:?}"),
        }
    }
    assert!(store.get_range(&pack, u64::MAX, &mut [0; 8]).is_err());
}

fn a_bound_on_the_length_is_kept(store: &Arc<dyn Store>) {
    store.put(&index("a"), &[7; 100]).expect("put");
    assert_eq!(store.get(&index("a"), 100).expect("at the bound"), [7; 100]);
    assert!(matches!(
        store.get(&index("a"), 99),
        Err(StoreError::TooLarge {
            length: 100,
            length_max: 99,
            ..
        })
    ));
}

fn a_streamed_object_appears_whole_at_its_commit(store: &Arc<dyn Store>) {
    let pack = name(ObjectKind::Pack, "5a5a");
    let bytes = pattern(2 * LARGE_BYTES + 5);
    let mut writer = store.create(&pack).expect("create");
    for piece in bytes.chunks(1_000_003) {
        writer.append(piece).expect("append");
        assert!(store.length(&pack).is_err_and(|error| error.is_not_found()));
        assert!(listing(store, ObjectKind::Pack).is_empty());
    }
    assert_eq!(writer.commit().expect("commit"), Put::Created);
    assert!(store.get(&pack, bytes.len() as u64).expect("get") == bytes);

    let empty = name(ObjectKind::Pack, "5a00");
    let writer = store.create(&empty).expect("create");
    assert_eq!(writer.commit().expect("commit"), Put::Created);
    assert_eq!(store.length(&empty).expect("length"), 0);
}

fn an_object_on_its_way_is_not_cleaned_away_while_it_is_young(store: &Arc<dyn Store>) {
    assert_eq!(store.clean(Duration::ZERO).expect("nothing was begun yet"), 0);
    let mut writer = store.create(&name(ObjectKind::Pack, "00aa")).expect("created");
    writer.append(b"pack").expect("appended");
    assert_eq!(store.clean(Duration::from_secs(3600)).expect("it is young"), 0);
    assert_eq!(writer.commit().expect("still there"), Put::Created);
    assert_eq!(store.clean(Duration::from_secs(3600)).expect("nothing is left"), 0);
}

fn an_abandoned_object_does_not_exist(store: &Arc<dyn Store>) {
    let mut writer = store.create(&index("a")).expect("create");
    writer.append(b"abandoned").expect("append");
    drop(writer);
    assert!(store.length(&index("a")).is_err_and(|error| error.is_not_found()));
    assert!(listing(store, ObjectKind::Index).is_empty());
    assert_eq!(store.put(&index("a"), b"put").expect("put"), Put::Created);
}

fn a_deleted_object_is_gone_and_its_name_free(store: &Arc<dyn Store>) {
    let pack = name(ObjectKind::Pack, "77aa");
    for round in [&b"one"[..], b"another"] {
        assert_eq!(store.put(&pack, round).expect("put"), Put::Created);
        let mut buffer = vec![0; round.len()];
        store.get_range(&pack, 0, &mut buffer).expect("get");
        assert_eq!(buffer, round);
        store.delete(&pack).expect("delete");
        store.delete(&pack).expect("deleting twice is fine");
        assert!(
            store
                .get_range(&pack, 0, &mut buffer)
                .is_err_and(|error| error.is_not_found())
        );
        assert!(listing(store, ObjectKind::Pack).is_empty());
    }
}

fn lists_are_complete(store: &Arc<dyn Store>) {
    let mut expected = BTreeMap::new();
    for number in 0..300_usize {
        let pack = name(ObjectKind::Pack, &format!("{:02x}{number:030}", number % 7));
        store.put(&pack, &vec![1; number]).expect("put");
        expected.insert(pack, number as u64);
    }
    assert_eq!(listing(store, ObjectKind::Pack), expected);
}

fn ages_are_of_the_objects_that_there_are(store: &Arc<dyn Store>) {
    let ages = |kind| {
        let mut ages = BTreeMap::new();
        store
            .ages(kind, &mut |name, age| {
                assert!(ages.insert(name, age).is_none(), "an object came twice");
                Ok(())
            })
            .expect("the store knows ages");
        ages
    };
    assert!(ages(ObjectKind::Writer).is_empty());
    fill(&**store);
    for number in 0..20 {
        let writer = name(ObjectKind::Writer, &format!("{number}"));
        store.put(&writer, b"writer").expect("put");
    }
    for kind in [ObjectKind::Writer, ObjectKind::Pack] {
        let ages = ages(kind);
        assert!(ages.keys().eq(listing(store, kind).keys()), "{kind}");
        // An hour is far more than the inaccuracy of the store's clock and the duration of the test.
        let is_young = |age: &Option<Duration>| age.is_none_or(|age| age < Duration::from_secs(3600));
        assert!(ages.values().all(is_young), "{kind}");
    }
}

fn listing_may_delete_objects_and_stops_at_an_error(store: &Arc<dyn Store>) {
    fill(store);
    let mut visited = 0;
    let stopped = store.list(ObjectKind::Pack, &mut |name, _| {
        visited += 1;
        Err(StoreError::NotFound { name })
    });
    assert!(stopped.is_err());
    assert_eq!(visited, 1);
    store
        .list(ObjectKind::Pack, &mut |name, _| store.delete(&name))
        .expect("a list that deletes");
    assert!(listing(store, ObjectKind::Pack).is_empty());
}

fn one_of_many_at_once_creates(store: &Arc<dyn Store>) {
    const WRITERS: usize = 8;
    for round in 0..20 {
        let pack = name(ObjectKind::Pack, &format!("{round:04}"));
        let barrier = Barrier::new(WRITERS);
        let race = |writer: usize| -> Result<Put> {
            let bytes = vec![u8::try_from(writer).expect("few writers"); 1000 + writer];
            barrier.wait();
            if writer.is_multiple_of(2) {
                return store.put(&pack, &bytes);
            }
            let mut stream = store.create(&pack)?;
            stream.append(&bytes)?;
            stream.commit()
        };
        let puts: Vec<Put> = std::thread::scope(|scope| {
            let race = &race;
            let threads: Vec<_> = (0..WRITERS).map(|writer| scope.spawn(move || race(writer))).collect();
            let outcomes = threads.into_iter().map(|thread| thread.join().expect("no panic"));
            outcomes.map(|put| put.expect("put")).collect()
        });
        let winners: Vec<_> = (0..WRITERS).filter(|writer| puts[*writer] == Put::Created).collect();
        let [winner] = winners[..] else {
            panic!("{} writers created {pack}", winners.len());
        };
        let bytes = store.get(&pack, 2000).expect("get");
        assert_eq!(bytes.len(), 1000 + winner);
        assert!(bytes.iter().all(|byte| usize::from(*byte) == winner));
    }
}

fn partial_objects_are_invisible(store: &Arc<dyn Store>) {
    const OBJECTS: usize = 30;
    const LENGTH: usize = 300_000;
    let names: Vec<_> = (0..OBJECTS).map(|number| index(&format!("n{number}"))).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (number, name) in names.iter().enumerate() {
                if number.is_multiple_of(2) {
                    store.put(name, &pattern(LENGTH)).expect("put");
                    continue;
                }
                let mut writer = store.create(name).expect("create");
                for piece in pattern(LENGTH).chunks(1000) {
                    writer.append(piece).expect("append");
                }
                writer.commit().expect("commit");
            }
        });
        let expected = pattern(LENGTH);
        for name in &names {
            let bytes = loop {
                match store.get(name, LENGTH as u64) {
                    Err(StoreError::NotFound { .. }) => std::thread::yield_now(),
                    other => break other.expect("get"),
                }
            };
            assert!(bytes == expected, "{name} was seen before it was whole");
            assert_eq!(listing(store, ObjectKind::Index).get(name), Some(&(LENGTH as u64)));
        }
    });
}
