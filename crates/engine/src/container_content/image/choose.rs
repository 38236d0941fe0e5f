//! Finds the manifest of an image, and the layers in it.

use std::path::Path;

use super::super::layout::{BlobDigest, BlobName, LayoutFiles};
use super::super::root_path::components;
use super::documents::{
    ConfigurationDocument, Descriptor, ManifestDocument, PlatformDocument, SavedImage, bad, is_short_for, parse,
};
use super::{ImageChoice, ImageConfiguration, ImagePlatform, layout_error};
use crate::ContainerContentError;
use crate::job::Result;

/// Indexes in indexes.
const INDEX_DEPTH_MAX: usize = 4;
/// More layers than any engine creates (127).
const LAYER_COUNT_MAX: usize = 1000;

/// A chosen image, whose documents were checked.
pub(super) struct ChosenImage {
    pub(super) configuration: ImageConfiguration,
    pub(super) layers: Vec<ChosenLayer>,
}

/// A layer, lowest first.
pub(super) struct ChosenLayer {
    pub(super) blob: BlobName,
    /// The digest of the layer when it is unpacked.
    pub(super) unpacked: BlobDigest,
}

/// Chooses an image of a layout.
///
/// # Errors
/// It is no layout; no image, or more than one, is meant; a document is damaged.
pub(super) fn choose(files: &LayoutFiles, path: &Path, choice: &ImageChoice) -> Result<ChosenImage> {
    if let Some(index) = files.document("index.json")? {
        // The file exists in every layout, and tells it apart from other folders with an index.json.
        if files.document("oci-layout")?.is_none() {
            return Err(layout_error(path, "it has an index.json, but no oci-layout"));
        }
        let index: ManifestDocument = parse(&index, "index.json")?;
        return from_index(files, index.manifests.unwrap_or_default(), choice);
    }
    if let Some(manifest) = files.document("manifest.json")? {
        return from_saved(files, &parse::<Vec<SavedImage>>(&manifest, "manifest.json")?, choice);
    }
    Err(layout_error(path, "it has neither index.json nor manifest.json"))
}

fn from_index(files: &LayoutFiles, manifests: Vec<Descriptor>, choice: &ImageChoice) -> Result<ChosenImage> {
    let manifests: Vec<_> = manifests.into_iter().filter(|one| !is_attestation(one)).collect();
    let names = || {
        manifests
            .iter()
            .map(|one| one.name().unwrap_or(&one.digest).to_owned())
            .collect()
    };
    let candidates: Vec<Descriptor> = match &choice.reference {
        None => manifests.clone(),
        Some(reference) => manifests
            .iter()
            .filter(|one| one.is_called(reference))
            .cloned()
            .collect(),
    };
    if let Some(reference) = choice.reference.clone().filter(|_| candidates.is_empty()) {
        let present = names();
        return Err(ContainerContentError::NoSuchImage { reference, present }.into());
    }
    let first = candidates
        .first()
        .ok_or_else(|| bad("index.json", "it has no images"))?;
    // Several platforms of one image have one name; one image may have several names.
    let has_one_digest = candidates.iter().all(|one| one.digest == first.digest);
    let has_platforms = candidates
        .iter()
        .all(|one| one.name() == first.name() && one.platform.is_some());
    if !has_one_digest && !has_platforms {
        return Err(ContainerContentError::SeveralImages { present: names() }.into());
    }
    let reference = first.name().map(str::to_owned);
    let mut image = from_manifests(files, &candidates, choice, 0)?;
    image.configuration.reference = reference;
    Ok(image)
}

/// Statements about an image, which Docker stores beside it.
fn is_attestation(descriptor: &Descriptor) -> bool {
    let is_unknown = descriptor
        .platform
        .as_ref()
        .is_some_and(|platform| platform.os == "unknown");
    is_unknown || descriptor.annotation("vnd.docker.reference.type").is_some()
}

fn from_manifests(
    files: &LayoutFiles,
    candidates: &[Descriptor],
    choice: &ImageChoice,
    depth: usize,
) -> Result<ChosenImage> {
    if depth > INDEX_DEPTH_MAX {
        return Err(bad("index", "it has indexes in indexes, more than 4"));
    }
    let wanted = &choice.platform;
    let is_wanted = |one: &&Descriptor| one.platform.as_ref().is_none_or(|platform| fits(platform, wanted));
    let Some(chosen) = candidates.iter().find(is_wanted) else {
        let platforms = candidates.iter().filter_map(|one| one.platform.as_ref());
        return Err(no_platform(wanted, platforms.map(name_of).collect()));
    };
    let blob = chosen.blob()?;
    let digest = blob.digest.text();
    let document: ManifestDocument = parse(&files.blob_document(&blob)?, &format!("manifest {digest}"))?;
    if document.schema_version.is_some_and(|version| version != 2) {
        return Err(bad(
            &format!("manifest {digest}"),
            "it has the old schema 1; push the image again",
        ));
    }
    if let Some(manifests) = document.manifests {
        let manifests: Vec<_> = manifests.into_iter().filter(|one| !is_attestation(one)).collect();
        return from_manifests(files, &manifests, choice, depth + 1);
    }
    let (Some(config), Some(layers)) = (document.config, document.layers) else {
        let media_type = document.media_type.unwrap_or_else(|| chosen.media_type.clone());
        return Err(bad(
            &format!("manifest {digest}"),
            format!("it has no config and layers ({media_type})"),
        ));
    };
    check_layer_types(&config, &layers, &digest)?;
    let configuration: ConfigurationDocument = parse(
        &files.blob_document(&config.blob()?)?,
        &format!("configuration {}", config.digest),
    )?;
    let layers = layers.iter().map(Descriptor::blob).collect::<Result<Vec<_>>>()?;
    chosen_image(configuration, layers, digest, choice)
}

fn check_layer_types(config: &Descriptor, layers: &[Descriptor], digest: &str) -> Result<()> {
    const CONFIGS: [&str; 2] = [
        "application/vnd.oci.image.config.v1+json",
        "application/vnd.docker.container.image.v1+json",
    ];
    let document = format!("manifest {digest}");
    if !CONFIGS.contains(&config.media_type.as_str()) {
        let reason = format!("it is not a container, but {:?}", config.media_type);
        return Err(bad(&document, reason));
    }
    let is_layer = |layer: &&Descriptor| {
        let name = layer.media_type.as_str();
        (name.starts_with("application/vnd.oci.image.layer.")
            || name.starts_with("application/vnd.docker.image.rootfs."))
            && !name.ends_with("+encrypted")
    };
    match layers.iter().find(|layer| !is_layer(layer)) {
        Some(layer) => Err(bad(
            &document,
            format!("a layer has the unknown type {:?}", layer.media_type),
        )),
        None => Ok(()),
    }
}

/// An image of `docker save` without an image layout: layers are named by their folders, and checked by the digests of their
/// unpacked content.
fn from_saved(files: &LayoutFiles, images: &[SavedImage], choice: &ImageChoice) -> Result<ChosenImage> {
    let tags = |image: &SavedImage| image.repo_tags.clone().unwrap_or_default();
    let present = || -> Vec<String> {
        let named = images
            .iter()
            .map(|image| tags(image).into_iter().next().unwrap_or_else(|| image.config.clone()));
        named.collect()
    };
    let is_called = |image: &&SavedImage| match &choice.reference {
        None => true,
        Some(reference) => tags(image).iter().any(|tag| is_short_for(reference, tag)),
    };
    let found: Vec<&SavedImage> = images.iter().filter(is_called).collect();
    let image = match (found.as_slice(), &choice.reference) {
        ([image], _) => *image,
        ([], Some(reference)) => {
            let (reference, present) = (reference.clone(), present());
            return Err(ContainerContentError::NoSuchImage { reference, present }.into());
        }
        _ => return Err(ContainerContentError::SeveralImages { present: present() }.into()),
    };
    let file_name = image.config.rsplit('/').next().unwrap_or_default();
    let digest = BlobDigest::parse(&format!("sha256:{}", file_name.trim_end_matches(".json")))?;
    let config = BlobName {
        digest: digest.clone(),
        size_bytes: None,
        file: Some(file_in_layout(&image.config)?),
    };
    let configuration: ConfigurationDocument = parse(&files.blob_document(&config)?, &image.config)?;
    let diff_ids = configuration
        .rootfs
        .as_ref()
        .and_then(|rootfs| rootfs.diff_ids.clone())
        .unwrap_or_default();
    if diff_ids.len() != image.layers.len() {
        return Err(bad("manifest.json", "the configuration has another number of layers"));
    }
    let blobs = image.layers.iter().zip(&diff_ids).map(|(file, digest)| {
        Ok(BlobName {
            digest: BlobDigest::parse(digest)?,
            size_bytes: None,
            file: Some(file_in_layout(file)?),
        })
    });
    let blobs = blobs.collect::<Result<Vec<_>>>()?;
    let mut chosen = chosen_image(configuration, blobs, digest.text(), choice)?;
    chosen.configuration.reference = tags(image).into_iter().next();
    Ok(chosen)
}

/// The path of a file that a document names. A path that leads out of the layout is refused.
fn file_in_layout(name: &str) -> Result<String> {
    let parts = components(name.as_bytes())?;
    Ok(String::from_utf8_lossy(&parts.join(&b'/')).into_owned())
}

fn chosen_image(
    document: ConfigurationDocument,
    layers: Vec<BlobName>,
    digest: String,
    choice: &ImageChoice,
) -> Result<ChosenImage> {
    if !fits(&document.platform, &choice.platform) {
        return Err(no_platform(&choice.platform, vec![name_of(&document.platform)]));
    }
    if layers.len() > LAYER_COUNT_MAX {
        return Err(bad(
            &digest,
            format!("it has {} layers, more than {LAYER_COUNT_MAX}", layers.len()),
        ));
    }
    let diff_ids = document.rootfs.and_then(|rootfs| rootfs.diff_ids).unwrap_or_default();
    if diff_ids.len() != layers.len() {
        let counts = format!("{} layers, and digests of {}", layers.len(), diff_ids.len());
        return Err(bad(
            &digest,
            format!("it has {counts} unpacked ones (rootfs.diff_ids); it is damaged, create it again"),
        ));
    }
    let layers = layers.into_iter().zip(&diff_ids).map(|(blob, id)| {
        Ok(ChosenLayer {
            blob,
            unpacked: BlobDigest::parse(id)?,
        })
    });
    let run = document.config.unwrap_or_default();
    let keys = |map: Option<std::collections::BTreeMap<String, serde_json::Value>>| map.unwrap_or_default().into_keys();
    Ok(ChosenImage {
        layers: layers.collect::<Result<_>>()?,
        configuration: ImageConfiguration {
            reference: None,
            digest,
            platform: name_of(&document.platform),
            environment: run.env.unwrap_or_default(),
            entrypoint: run.entrypoint.unwrap_or_default(),
            command: run.cmd.unwrap_or_default(),
            user: run.user.unwrap_or_default(),
            working_directory: run.working_dir.unwrap_or_default(),
            exposed_ports: keys(run.exposed_ports).collect(),
            volumes: keys(run.volumes).collect(),
            stop_signal: run.stop_signal.unwrap_or_default(),
            labels: run.labels.unwrap_or_default(),
        },
    })
}

fn fits(platform: &PlatformDocument, wanted: &ImagePlatform) -> bool {
    let variant = |text: Option<&str>| {
        text.filter(|variant| *variant != "v8" || platform.architecture != "arm64")
            .map(str::to_owned)
    };
    platform.os == "linux"
        && platform.architecture == wanted.architecture
        && (wanted.variant.is_none() || variant(wanted.variant.as_deref()) == variant(platform.variant.as_deref()))
}

fn name_of(platform: &PlatformDocument) -> String {
    let variant = platform.variant.as_ref().map(|variant| format!("/{variant}"));
    format!(
        "{}/{}{}",
        platform.os,
        platform.architecture,
        variant.unwrap_or_default()
    )
}

fn no_platform(wanted: &ImagePlatform, present: Vec<String>) -> crate::Error {
    let wanted = wanted.to_string();
    ContainerContentError::NoPlatform { wanted, present }.into()
}
