//! Every parser of the project has a fuzz target, with seeds that it accepts.

use std::collections::BTreeSet;
use std::path::Path;

use holdfast_block::hostile::{Outcome, Parser};

/// Fuzz targets that feed no single parser.
const OTHER_TARGETS: [&str; 1] = ["repository"];

fn all_parsers() -> impl Iterator<Item = &'static Parser> {
    holdfast_block::hostile::PARSERS
        .iter()
        .chain(holdfast_image::hostile::PARSERS)
        .chain(holdfast_repo::hostile::PARSERS)
        .chain(holdfast_serve::hostile::PARSERS)
        .chain(holdfast_archive::hostile::PARSERS)
        .chain(holdfast_guest_files::hostile::PARSERS)
        .chain(holdfast_hardware::hostile::PARSERS)
        .chain(holdfast_host::hostile::PARSERS)
        .chain(holdfast_engine::hostile::PARSERS)
        .chain(holdfast_replicate::hostile::PARSERS)
        .chain(holdfast_transfer::hostile::PARSERS)
}

fn names_in(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
        .collect()
}

#[test]
fn every_parser_has_a_fuzz_target_with_seeds() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let parsers: BTreeSet<String> = all_parsers().map(|parser| parser.name.to_owned()).collect();
    let mut targets = parsers.clone();
    targets.extend(OTHER_TARGETS.map(str::to_owned));
    assert_eq!(
        names_in(&fuzz.join("fuzz_targets")),
        targets,
        "fuzz targets and parsers"
    );
    assert_eq!(names_in(&fuzz.join("seeds")), parsers, "folders of seeds and parsers");
    for parser in all_parsers() {
        for entry in std::fs::read_dir(fuzz.join("seeds").join(parser.name)).unwrap() {
            let path = entry.unwrap().path();
            let outcome = (parser.feed)(&std::fs::read(&path).unwrap());
            assert_eq!(outcome, Outcome::Decoded, "{}", path.display());
        }
    }
}
