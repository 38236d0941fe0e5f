//! Streams that `compress` packs, and programs that read and write the same formats.

use crate::host::{system, text};
use crate::program::stderr;
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;

/// As in gzip and zstd: input that is not packed is an error, and so is empty input.
#[test]
fn input_that_is_not_packed_is_an_error() {
    let rig = Rig::empty();
    for (input, kind) in [
        (&b""[..], "cut off"),
        (b"\x1f", "cut off"),
        (b"\x28\xb5\x2f", "cut off"),
        (b"\xfd7", "cut off"),
        (b"a text, and no more", "not compressed with"),
    ] {
        let output = rig.run_with(&["compress", "-d"], input);
        assert_eq!(output.status.code(), Some(5), "{input:?}: {output:?}");
        assert!(
            stderr(&output).contains(kind) && output.stdout.is_empty(),
            "{input:?}: {output:?}"
        );
    }
}

#[test]
fn packed_streams_are_read_by_gzip_and_zstd_and_at_any_offset() {
    let rig = Rig::empty();
    let mut bytes = noise(11 * MIB + 77, 5);
    bytes[3 * MIB..6 * MIB].fill(0);
    rig.write("plain", &bytes);
    for (option, unpack) in [("--gzip", "gzip -dc"), ("--zstd", "zstd -dc")] {
        let output = rig.run_with(&["compress", option, "--threads", "3", "--max-load", "1000"], &bytes);
        assert!(output.status.success(), "{}", stderr(&output));
        rig.write("packed", &output.stdout);
        let line = format!(
            "{unpack} < '{}' | cmp - '{}'",
            text(&rig.path("packed")),
            text(&rig.path("plain"))
        );
        system("/bin/sh", &["-c", &line]).unwrap();
        let output = rig.run(&["compress", "--decompress", "packed"]);
        assert!(output.status.success() && output.stdout == bytes, "{option}");
        let output = rig.run(&[
            "archive", "read", "packed", "--offset", "7000000", "--length", "4200000",
        ]);
        assert!(
            output.stdout == bytes[7_000_000..11_200_000],
            "{option}: {}",
            stderr(&output)
        );
        let report = rig.report(&["archive", "check", "packed"]);
        assert!(
            report["archive"].is_null() && report["index_block_count"].as_u64().unwrap() > 1,
            "{report}"
        );
        let mut packed = rig.read("packed");
        packed[5 * MIB] ^= 1;
        rig.write("damaged", &packed);
        rig.code(5, &["archive", "check", "damaged"]);
        let output = rig.run(&["compress", "--decompress", "damaged"]);
        assert_eq!(output.status.code(), Some(5), "{}", stderr(&output));
    }
    let output = rig.run_with(&["compress"], b"short");
    rig.write("short", &output.stdout);
    rig.ok(&["archive", "check", "short"]);
    rig.write("damaged", &bytes);
    for (words, code, expected) in [
        (
            &["archive", "read", "packed", "--offset", "1G"][..],
            2,
            "has 11534413 bytes",
        ),
        (&["archive", "read", "damaged"], 1, "has no index"),
    ] {
        let output = rig.run(words);
        assert_eq!(output.status.code(), Some(code));
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    }
}

/// Packed files that other programs joined, padded, truncated, or packed in another way.
#[test]
fn a_packed_stream_without_an_index_is_read_to_its_end() {
    let rig = Rig::empty();
    let (one, two) = (noise(3 * MIB, 31), noise(2 * MIB, 32));
    let both = [&one[..], &two].concat();
    for (option, peer) in [("--gzip", "gzip -1"), ("--zstd", "zstd -q -1")] {
        let packed = |bytes: &[u8]| rig.run_with(&["compress", option], bytes).stdout;
        rig.write("one", &one);
        let line = format!(
            "{peer} -c < '{}' > '{}'",
            text(&rig.path("one")),
            text(&rig.path("peer"))
        );
        system("/bin/sh", &["-c", &line]).unwrap();
        // A stream of Holdfast after one of gzip or zstd, before it, and two of Holdfast.
        for file in [
            [packed(&one), packed(&two)].concat(),
            [rig.read("peer"), packed(&two)].concat(),
            [packed(&one), rig.run_with(&["compress", option], &two).stdout].concat(),
        ] {
            rig.write("joined", &file);
            let output = rig.run(&["compress", "--decompress", "joined"]);
            assert!(
                output.status.success() && output.stdout == both,
                "{option}: {}",
                stderr(&output)
            );
            let report = rig.report(&["archive", "check", "joined"]);
            assert!(
                report["archive"].is_null() && report["index_block_count"].is_null(),
                "{report}"
            );
            let output = rig.code(1, &["archive", "read", "joined", "--length", "1"]);
            assert!(stderr(&output).contains("has no index"), "{}", stderr(&output));
            let cut = &file[..file.len() - MIB];
            rig.write("cut", cut);
            let (kind, message) = rig.error(5, &["archive", "check", "cut"]);
            assert!(kind == "damage" && message.contains("cut off"), "{kind}: {message}");
            let mut damaged = file.clone();
            damaged[MIB] ^= 1;
            rig.write("damaged", &damaged);
            rig.error(5, &["archive", "check", "damaged"]);
        }
    }
    // gzip ignores zeroes after the stream, like every program that reads from a tape.
    let padded = [rig.run_with(&["compress", "--gzip"], &one).stdout, vec![0; 70_000]].concat();
    rig.write("padded.gz", &padded);
    system("gzip", &["-t", text(&rig.path("padded.gz"))]).unwrap();
    let output = rig.run(&["compress", "--decompress", "padded.gz"]);
    assert!(output.status.success() && output.stdout == one, "{}", stderr(&output));
    rig.write("garbage.gz", &[&padded[..], b"x"].concat());
    rig.error(5, &["archive", "check", "garbage.gz"]);
}
