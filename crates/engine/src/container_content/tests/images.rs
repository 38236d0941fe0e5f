//! Images in layouts that the tests write.

use std::path::{Path, PathBuf};

use aws_lc_rs::digest::{SHA256, digest};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{ContentSource, FillReport, TarInput, fill_root, folder, listing, read, shell, with_job, write};
use crate::container_content::{ImageChoice, ImagePlatform, is_image_archive};
use crate::job::Result;

fn sha256(bytes: &[u8]) -> String {
    let hash = digest(&SHA256, bytes);
    let digits = hash.as_ref().iter().flat_map(|byte| [byte >> 4, byte & 0xf]);
    digits
        .filter_map(|digit| char::from_digit(u32::from(digit), 16))
        .collect()
}

/// A layout with one blob after another.
struct Layout {
    path: PathBuf,
}

impl Layout {
    fn new(parent: &Path) -> Self {
        let path = folder(parent, "layout");
        write(&path.join("oci-layout"), br#"{"imageLayoutVersion":"1.0.0"}"#);
        std::fs::create_dir_all(path.join("blobs/sha256")).unwrap();
        Self { path }
    }

    fn blob(&self, bytes: &[u8], media_type: &str) -> Value {
        let hex = sha256(bytes);
        write(&self.path.join("blobs/sha256").join(&hex), bytes);
        json!({"mediaType": media_type, "digest": format!("sha256:{hex}"), "size": bytes.len()})
    }

    fn document(&self, document: &Value, media_type: &str) -> Value {
        self.blob(document.to_string().as_bytes(), media_type)
    }

    fn index(&self, manifests: &[Value]) {
        let index = json!({"schemaVersion": 2, "manifests": manifests});
        write(&self.path.join("index.json"), index.to_string().as_bytes());
    }

    /// A manifest of layers, each with its unpacked bytes.
    fn image(&self, layers: &[(Vec<u8>, Vec<u8>)], architecture: &str) -> Value {
        let diff_ids: Vec<_> = layers
            .iter()
            .map(|(_, tar)| format!("sha256:{}", sha256(tar)))
            .collect();
        let config = json!({
            "architecture": architecture, "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids},
            "config": {"Env": ["PATH=/bin"], "Cmd": ["sh"], "Entrypoint": null, "User": "1000:1000", "WorkingDir": "/srv",
                       "ExposedPorts": {"80/tcp": {}}, "Labels": {"a": "b"}},
        });
        let config = self.document(&config, "application/vnd.oci.image.config.v1+json");
        let layers: Vec<_> = layers
            .iter()
            .map(|(packed, _)| self.blob(packed, "application/vnd.oci.image.layer.v1.tar+gzip"))
            .collect();
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers});
        let mut descriptor = self.document(&manifest, "application/vnd.oci.image.manifest.v1+json");
        descriptor["platform"] = json!({"architecture": architecture, "os": "linux"});
        descriptor
    }
}

fn tagged(mut descriptor: Value, tag: &str) -> Value {
    descriptor["annotations"] = json!({"org.opencontainers.image.ref.name": tag});
    descriptor
}

/// Layers by GNU tar: the second one has whiteouts behind the files of their folder, and a new file in an opaque folder.
fn layers(parent: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    shell(
        parent,
        "mkdir -p 1/etc 1/opaque/old 1/usr/lib 2/etc 2/opaque 2/lib 3/etc
         printf 1 > 1/etc/kept; printf 1 > 1/etc/removed; printf 1 > 1/opaque/old/file; mkdir -p 1/etc/tree/sub; : > 1/etc/tree/sub/f
         ln -s usr/lib 1/lib; printf 2 > 2/etc/again; : > 2/etc/.wh.removed; : > 2/etc/.wh.again; : > 2/etc/.wh.tree
         printf 2 > 2/opaque/new; : > 2/opaque/.wh..wh..opq; printf 2 > 2/lib/through-link; printf 3 > 3/etc/.wh.kept; : > 3/etc/last
         tar -C 1 -cf 1.tar . ; tar -C 2 -cf 2.tar opaque/new opaque/.wh..wh..opq lib/through-link etc ; tar -C 3 -cf 3.tar etc
         gzip -k 1.tar; zstd -q 2.tar -o 2.tar.zst; cp 3.tar 3.tar.plain",
    );
    let bytes = |name: &str| read(&parent.join(name));
    vec![
        (bytes("1.tar.gz"), bytes("1.tar")),
        (bytes("2.tar.zst"), bytes("2.tar")),
        (bytes("3.tar.plain"), bytes("3.tar")),
    ]
}

const EXPECTED: &str = "etc\netc/again\netc/last\nlib\nopaque\nopaque/new\nusr\nusr/lib\nusr/lib/through-link\n";

fn names(root: &Path) -> String {
    shell(root, "find . -mindepth 1 -printf '%P\\n' | sort")
}

fn fill(layout: &Path, root: &Path, reference: Option<&str>, architecture: &str) -> Result<FillReport> {
    let source = ContentSource::Image {
        layout: layout.to_owned(),
        choice: ImageChoice {
            reference: reference.map(str::to_owned),
            platform: ImagePlatform {
                architecture: architecture.to_owned(),
                variant: None,
            },
        },
    };
    with_job(|job| fill_root(root, source, job))
}

#[test]
fn layers_are_applied_in_order_from_a_folder_and_from_an_archive() {
    let directory = TempDir::new().unwrap();
    let layout = Layout::new(directory.path());
    layout.index(&[tagged(layout.image(&layers(directory.path()), "arm64"), "12")]);
    shell(&layout.path, "tar -cf ../layout.tar .");
    let mut listings = Vec::new();
    for (name, path) in [
        ("folder", layout.path.clone()),
        ("archive", directory.path().join("layout.tar")),
    ] {
        let root = folder(directory.path(), name);
        let report = fill(&path, &root, Some("12"), "arm64").unwrap();
        assert_eq!(names(&root), EXPECTED);
        let image = report.image.unwrap();
        assert_eq!(
            (image.reference.as_deref(), image.platform.as_str()),
            (Some("12"), "linux/arm64")
        );
        assert_eq!(
            (image.environment, image.command),
            (vec!["PATH=/bin".to_owned()], vec!["sh".to_owned()])
        );
        assert_eq!(
            (image.exposed_ports, image.user),
            (vec!["80/tcp".to_owned()], "1000:1000".to_owned())
        );
        assert_eq!(
            (image.entrypoint, image.working_directory),
            (Vec::new(), "/srv".to_owned())
        );
        shell(&root, "touch -d 2001-01-01 . usr/lib opaque");
        listings.push(listing(&root));
    }
    assert_eq!(listings[0], listings[1]);
}

#[test]
fn umoci_unpacks_the_same_files() {
    if !super::has_program("umoci") || !super::is_root() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let layout = Layout::new(directory.path());
    layout.index(&[tagged(layout.image(&layers(directory.path())[..1], "amd64"), "one")]);
    let root = folder(directory.path(), "root");
    fill(&layout.path, &root, None, "amd64").unwrap();
    shell(
        directory.path(),
        "umoci unpack --image layout:one bundle >/dev/null 2>&1",
    );
    assert_eq!(listing(&root), listing(&directory.path().join("bundle/rootfs")));
}

#[test]
fn images_are_chosen_by_tag_platform_and_digest() {
    let directory = TempDir::new().unwrap();
    let layout = Layout::new(directory.path());
    let all = layers(directory.path());
    let (amd64, arm64) = (layout.image(&all[..1], "amd64"), layout.image(&all, "arm64"));
    let mut unknown = layout.image(&all[..1], "amd64");
    unknown["platform"] = json!({"architecture": "unknown", "os": "unknown"});
    let nested = json!({"schemaVersion": 2, "manifests": [unknown, amd64.clone(), arm64.clone()]});
    let nested = layout.document(&nested, "application/vnd.oci.image.index.v1+json");
    let mut full = amd64.clone();
    full["annotations"] = json!({"io.containerd.image.name": "docker.io/library/debian:latest",
                                 "org.opencontainers.image.ref.name": "latest"});
    layout.index(&[tagged(nested, "multi"), full, tagged(amd64.clone(), "single")]);
    let mut number = 0;
    let mut filled = |reference: Option<&str>, architecture: &str| {
        number += 1;
        let root = folder(directory.path(), &format!("root{number}"));
        let result = fill(&layout.path, &root, reference, architecture);
        result
            .map(|_| names(&root))
            .map_err(|error| holdfast_block::error_text(&error))
    };
    assert_eq!(filled(Some("multi"), "arm64").unwrap(), EXPECTED);
    let single = filled(Some("single"), "amd64").unwrap();
    assert!(single.contains("etc/removed"));
    for reference in ["debian", "debian:latest", "library/debian:latest", "latest", "multi"] {
        assert_eq!(
            filled(Some(reference), "amd64").as_deref(),
            Ok(single.as_str()),
            "{reference}"
        );
    }
    assert_eq!(filled(amd64["digest"].as_str(), "amd64").unwrap(), single);
    let error = filled(Some("none"), "amd64").unwrap_err();
    assert!(
        error.contains("no image \"none\" in the layout; it has multi, docker.io/library/debian:latest, single"),
        "{error}"
    );
    let error = filled(None, "amd64").unwrap_err();
    assert!(error.contains("several images, choose one: multi,"), "{error}");
    let error = filled(Some("multi"), "s390x").unwrap_err();
    assert!(
        error.contains("not made for linux/s390x; it is made for linux/amd64, linux/arm64"),
        "{error}"
    );
    let error = filled(Some("single"), "arm64").unwrap_err();
    assert!(error.contains("it is made for linux/amd64"), "{error}");
}

#[test]
fn damaged_blobs_are_noticed_before_anything_is_written() {
    let directory = TempDir::new().unwrap();
    let layout = Layout::new(directory.path());
    layout.index(&[layout.image(&layers(directory.path()), "amd64")]);
    let blobs = layout.path.join("blobs/sha256");
    for (number, blob) in std::fs::read_dir(&blobs).unwrap().enumerate() {
        let path = blob.unwrap().path();
        let good = read(&path);
        let mut flipped = good.clone();
        *flipped.last_mut().unwrap() ^= 1;
        let longer = [&good[..], b"\0"].concat();
        for (kind, bad) in [("flipped", Some(flipped)), ("longer", Some(longer)), ("missing", None)] {
            match bad {
                Some(bad) => write(&path, &bad),
                None => std::fs::remove_file(&path).unwrap(),
            }
            let root = folder(directory.path(), &format!("root-{number}-{kind}"));
            let error = fill(&layout.path, &root, None, "amd64").unwrap_err().to_string();
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(error.contains(name), "{kind}: {error}");
            assert_eq!(names(&root), "", "{kind}");
            write(&path, &good);
        }
    }
    let root = folder(directory.path(), "good");
    fill(&layout.path, &root, None, "amd64").unwrap();
}

#[test]
fn archives_of_old_docker_save_are_read() {
    let directory = TempDir::new().unwrap();
    let save = folder(directory.path(), "save");
    let all = layers(directory.path());
    let diff_ids: Vec<_> = all.iter().map(|(_, tar)| format!("sha256:{}", sha256(tar))).collect();
    let config = json!({"architecture": "amd64", "os": "linux", "rootfs": {"diff_ids": diff_ids}}).to_string();
    let config_name = format!("{}.json", sha256(config.as_bytes()));
    write(&save.join(&config_name), config.as_bytes());
    for (number, (_, tar)) in all.iter().enumerate() {
        write(&folder(&save, &format!("layer{number}")).join("layer.tar"), tar);
    }
    // The same layer of another image is a link.
    shell(
        &save,
        "mkdir shared && mv layer0/layer.tar shared/ && ln -s ../shared/layer.tar layer0/layer.tar",
    );
    let layers = ["layer0/layer.tar", "layer1/layer.tar", "layer2/layer.tar"];
    let manifest = json!([{"Config": config_name, "RepoTags": ["debian:12"], "Layers": layers}]);
    write(&save.join("manifest.json"), manifest.to_string().as_bytes());
    shell(&save, "tar -cf ../save.tar *");
    let archive = directory.path().join("save.tar");
    let root = folder(directory.path(), "root");
    let report = fill(&archive, &root, Some("debian:12"), "amd64").unwrap();
    assert_eq!(names(&root), EXPECTED);
    assert_eq!(report.image.unwrap().reference.as_deref(), Some("debian:12"));
    shell(
        &save,
        "printf x | dd of=layer2/layer.tar bs=1 seek=2000 conv=notrunc 2>/dev/null; tar -cf ../save.tar *",
    );
    let error = fill(&archive, &folder(directory.path(), "damaged"), None, "amd64").unwrap_err();
    assert!(error.to_string().contains("another digest"), "{error}");
    let error = fill(&save.join("shared"), &folder(directory.path(), "none"), None, "amd64").unwrap_err();
    assert!(
        error.to_string().contains("neither index.json nor manifest.json"),
        "{error}"
    );
}

/// A layout whose image has these layers, which are not compressed.
fn layout_of(parent: &Path, tars: &[&str]) -> Layout {
    let layout = Layout::new(parent);
    let layers: Vec<_> = tars.iter().map(|name| read(&parent.join(name))).collect();
    let layers: Vec<_> = layers.into_iter().map(|tar| (tar.clone(), tar)).collect();
    layout.index(&[layout.image(&layers, "amd64")]);
    layout
}

/// An opaque folder in the place of a link once emptied the folder that the link leads to.
#[test]
fn whiteouts_do_not_follow_a_link_that_the_layer_replaces() {
    let directory = TempDir::new().unwrap();
    // In the third layer, the whiteout stands before its folder; in the fourth, the folder is not in the layer at all.
    shell(
        directory.path(),
        "mkdir -p 1/usr/lib 1/usr/bin 1/usr/share 2/lib 3/bin 4/share; ln -s usr/lib usr/bin usr/share 1/
         : > 1/usr/lib/kept; : > 1/usr/lib/named; : > 1/usr/bin/kept; : > 1/usr/share/kept
         : > 2/lib/.wh..wh..opq; : > 2/lib/.wh.named; : > 2/lib/new; : > 3/bin/.wh..wh..opq; : > 4/share/.wh..wh..opq
         tar -C 1 -cf 1.tar . ; tar -C 2 -cf 2.tar lib
         tar -C 3 --no-recursion -cf 3.tar bin/.wh..wh..opq bin ; tar -C 4 -cf 4.tar share/.wh..wh..opq",
    );
    let layout = layout_of(directory.path(), &["1.tar", "2.tar", "3.tar", "4.tar"]);
    let root = folder(directory.path(), "root");
    fill(&layout.path, &root, None, "amd64").unwrap();
    let expected = "bin\nlib\nlib/new\nshare\nusr\nusr/bin\nusr/bin/kept\nusr/lib\nusr/lib/kept\nusr/lib/named\n\
                    usr/share\nusr/share/kept\n";
    assert_eq!(names(&root), expected);
    let kinds = shell(&root, "stat -c %F lib bin share");
    assert_eq!(kinds, "directory\ndirectory\nsymbolic link\n");
}

/// Errors of a whiteout were once ignored, and what it removes stayed.
#[test]
fn a_whiteout_that_cannot_be_applied_is_an_error() {
    let directory = TempDir::new().unwrap();
    shell(
        directory.path(),
        "mkdir -p 1 2/loop 3/file 3/none; ln -s loop 1/loop; : > 1/file; : > 2/loop/.wh.name
         : > 3/file/.wh.name; : > 3/none/.wh..wh..opq
         tar -C 1 -cf 1.tar . ; tar -C 2 -cf 2.tar loop/.wh.name; tar -C 3 -cf 3.tar file/.wh.name none/.wh..wh..opq",
    );
    let layout = layout_of(directory.path(), &["1.tar", "3.tar"]);
    let root = folder(directory.path(), "root");
    fill(&layout.path, &root, None, "amd64").unwrap();
    assert_eq!(names(&root), "file\nloop\n");
    std::fs::remove_dir_all(&layout.path).unwrap();
    let layout = layout_of(directory.path(), &["1.tar", "2.tar"]);
    let error = fill(&layout.path, &folder(directory.path(), "bad"), None, "amd64").unwrap_err();
    let text = holdfast_block::error_text(&error);
    assert!(text.contains("open the folder of loop/name: Too many levels"), "{text}");
}

/// A removal once gave the folder the current time.
#[test]
fn a_folder_keeps_its_time_when_a_layer_removes_a_file_in_it() {
    let directory = TempDir::new().unwrap();
    shell(
        directory.path(),
        "mkdir -p 1/etc 1/opaque 2/etc 2/opaque; : > 1/etc/a; : > 1/opaque/a; : > 2/etc/.wh.a; : > 2/opaque/.wh..wh..opq
         touch -d 2001-02-03 1/etc 1/opaque
         tar -C 1 -cf 1.tar . ; tar -C 2 -cf 2.tar etc/.wh.a opaque/.wh..wh..opq",
    );
    let layout = layout_of(directory.path(), &["1.tar", "2.tar"]);
    let root = folder(directory.path(), "root");
    fill(&layout.path, &root, None, "amd64").unwrap();
    assert_eq!(names(&root), "etc\nopaque\n");
    assert_eq!(
        shell(&root, "date -r etc +%F; date -r opaque +%F"),
        "2001-02-03\n2001-02-03\n"
    );
}

#[test]
fn an_image_without_digests_of_its_layers_is_refused() {
    let directory = TempDir::new().unwrap();
    shell(directory.path(), "mkdir 1; : > 1/file; tar -C 1 -cf 1.tar .");
    let layout = Layout::new(directory.path());
    let tar = read(&directory.path().join("1.tar"));
    let layer = layout.blob(&tar, "application/vnd.oci.image.layer.v1.tar");
    for rootfs in [json!(null), json!({"diff_ids": []})] {
        let config = json!({"architecture": "amd64", "os": "linux", "rootfs": rootfs});
        let config = layout.document(&config, "application/vnd.oci.image.config.v1+json");
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": [layer]});
        layout.index(&[layout.document(&manifest, "application/vnd.oci.image.manifest.v1+json")]);
        let root = directory.path().join("root");
        std::fs::create_dir_all(&root).unwrap();
        let error = fill(&layout.path, &root, None, "amd64").unwrap_err().to_string();
        assert!(error.contains("1 layers, and digests of 0"), "{error}");
        assert_eq!(names(&root), "");
    }
}

#[test]
fn paths_in_a_manifest_do_not_lead_out_of_the_layout() {
    let directory = TempDir::new().unwrap();
    let save = folder(directory.path(), "save");
    shell(directory.path(), "mkdir 1; : > 1/file; tar -C 1 -cf 1.tar .");
    let diff_id = format!("sha256:{}", sha256(&read(&directory.path().join("1.tar"))));
    let config = json!({"architecture": "amd64", "os": "linux", "rootfs": {"diff_ids": [diff_id]}}).to_string();
    let config_name = format!("{}.json", sha256(config.as_bytes()));
    let outside = directory.path().join(&config_name);
    write(&outside, config.as_bytes());
    write(&save.join(&config_name), config.as_bytes());
    let root = folder(directory.path(), "root");
    for (config, layer, expected) in [
        (config_name.clone(), "../1.tar".to_owned(), "leads out"),
        (format!("../{config_name}"), "1.tar".to_owned(), "leads out"),
        // An absolute path is one in the layout.
        (
            config_name,
            directory.path().join("1.tar").display().to_string(),
            "it is missing",
        ),
        (outside.display().to_string(), "1.tar".to_owned(), "it is missing"),
    ] {
        let manifest = json!([{"Config": config, "RepoTags": ["one"], "Layers": [layer]}]);
        write(&save.join("manifest.json"), manifest.to_string().as_bytes());
        let error = fill(&save, &root, None, "amd64").unwrap_err().to_string();
        assert!(error.contains(expected), "{config} {layer}: {error}");
    }
}

/// The blobs of an image once became the files of the container.
#[test]
fn an_archive_of_an_image_is_not_unpacked_as_files() {
    let directory = TempDir::new().unwrap();
    shell(directory.path(), "mkdir 1; : > 1/file; tar -C 1 -cf 1.tar .");
    let layout = layout_of(directory.path(), &["1.tar"]);
    shell(&layout.path, "tar -cf ../layout.tar .; gzip -k ../layout.tar");
    let is_image = |name: &str| with_job(|job| is_image_archive(&directory.path().join(name), job).unwrap());
    assert!(is_image("layout.tar") && is_image("layout.tar.gz") && !is_image("1.tar"));
    let stream = Box::new(std::io::Cursor::new(read(&directory.path().join("layout.tar"))));
    let source = ContentSource::Tar(TarInput::Stream(stream));
    let root = folder(directory.path(), "root");
    let error = with_job(|job| fill_root(&root, source, job)).unwrap_err();
    assert!(error.to_string().contains("is an archive of images"), "{error}");
}
