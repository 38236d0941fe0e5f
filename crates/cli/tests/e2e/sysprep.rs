//! Guests with an identity of their own: the arguments of virt-sysprep, and its result.
//!
//! A stand-in replaces virt-sysprep: it writes a mark into the first sector of every image, by a program that locks
//! images like QEMU.

use crate::rig::{Rig, noise};
use crate::templates;

const MIB: usize = 1 << 20;

/// Marks the images, and logs its arguments.
const WORKING: &str = r#"#!/bin/sh
echo "$*" >>"${0%/*}/asked"
while [ $# -gt 0 ]; do
  case $1 in
    --format) format=$2; shift ;;
    --add) qemu-io -f "$format" -c 'write -P 0xab 0 512' "$2" >/dev/null || exit 1; shift ;;
  esac
  shift
done
"#;

const FAILING: &str = "#!/bin/sh\necho 'virt-sysprep: error: no operating systems were found' >&2\nexit 1\n";

/// Installs a virt-sysprep that marks images.
pub(crate) fn install_working(rig: &mut Rig) {
    rig.have_program("virt-sysprep", WORKING);
}

/// Installs a virt-sysprep that finds no guest.
pub(crate) fn install_failing(rig: &mut Rig) {
    rig.have_program("virt-sysprep", FAILING);
}

/// The arguments of virt-sysprep since the last query.
pub(crate) fn take_arguments(rig: &Rig) -> String {
    let take_arguments = String::from_utf8(rig.read("programs/asked")).unwrap();
    std::fs::remove_file(rig.path("programs/asked")).unwrap();
    take_arguments
}

/// The bytes of a disk with the mark.
pub(crate) fn marked(bytes: &[u8]) -> Vec<u8> {
    let mut marked = bytes.to_vec();
    marked[..512].fill(0xab);
    marked
}

fn disk_of(rig: &Rig, image: &str) -> Vec<u8> {
    rig.ok(&["image", "convert", "--force", image, "out.raw"]);
    rig.read("out.raw")
}

#[test]
fn virt_sysprep_runs_before_clones_get_their_final_names() {
    let mut rig = Rig::empty();
    let bytes = noise(2 * MIB, 7);
    rig.write("base.raw", &bytes);
    rig.ok(&["image", "convert", "base.raw", "base.qcow2"]);
    install_working(&mut rig);
    for (name, way) in [
        ("web1.qcow2", &[][..]),
        ("web2.qcow2", &["--overlay"]),
        ("web3.qcow2", &["--copy"]),
    ] {
        rig.ok(&[&["clone", "base.qcow2", name, "--sysprep"][..], way].concat());
        let words = take_arguments(&rig);
        let host = name.trim_end_matches(".qcow2");
        assert!(
            words.contains("ssh-hostkeys") && words.contains(&format!("--hostname {host} ")),
            "{words}"
        );
        // The image has a temporary name.
        assert!(words.trim_end().ends_with(".partial"), "{words}");
        assert!(disk_of(&rig, name) == marked(&bytes), "{name}");
    }
    assert!(disk_of(&rig, "base.qcow2") == bytes, "the image was changed");
    let before = rig.names(".");
    install_failing(&mut rig);
    for way in ["--overlay", "--copy"] {
        let (_, text) = rig.error(1, &["clone", "base.qcow2", "web4.qcow2", "--sysprep", way]);
        assert!(
            text.contains("web4.qcow2") && text.contains("no operating systems"),
            "{text}"
        );
    }
    assert_eq!(rig.names("."), before);
}

#[test]
fn a_pulled_template_gets_an_identity_of_its_own() {
    let mut rig = templates::rig();
    let bytes = templates::image(&rig, "base.raw", 1);
    templates::push(&rig, "debian", "base.raw", "anna", &[]);
    let sysprep = |target| [&templates::pull_words("debian", target)[..], &["--sysprep"]].concat();
    install_working(&mut rig);
    rig.ok(&sysprep("web7.qcow2"));
    assert!(take_arguments(&rig).contains("--hostname web7 "));
    assert!(disk_of(&rig, "web7.qcow2") == marked(&bytes));
    rig.ok(&sysprep("machines"));
    let words = take_arguments(&rig);
    assert!(words.contains("--hostname machines --format qcow2 --add "), "{words}");
    let names = rig.names("machines");
    let image = names.iter().find(|name| name.contains(".qcow2")).unwrap();
    assert!(disk_of(&rig, &format!("machines/{image}")) == marked(&bytes));
    // The template is unchanged.
    rig.ok(&templates::pull_words("debian", "again.raw"));
    assert!(rig.read("again.raw") == bytes);
    let before = rig.names(".");
    install_failing(&mut rig);
    for target in ["web8.qcow2", "others"] {
        let (_, text) = rig.error(1, &sysprep(target));
        assert!(text.contains(target) && text.contains("no operating systems"), "{text}");
    }
    assert_eq!(rig.names("."), before);
}
