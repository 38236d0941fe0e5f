//! Verbs about image files, machine archives, streams and templates.

mod archive;
mod compress;
pub(crate) mod container;
mod export;
mod image;
mod import;
mod template;

use crate::commands::verb::verbs;

verbs! {
    pub(crate) enum ImageFileVerb {
        /// Inspect, check, convert, create and resize disk images
        "image" => Image(image::ImageArgs),
        /// Create, mount and snapshot containers: disks in a folder
        "container" => Container(container::ContainerArgs),
        /// Import a machine from an archive (OVA, XVA, VMA)
        "import" => Import(import::ImportArgs),
        /// Export a machine to an archive or to another hypervisor
        "export" => Export(export::ExportArgs),
        /// Inspect and check machine archives and packed streams
        "archive" => Archive(archive::ArchiveArgs),
        /// Compress a stream on all cores, with an index for random access
        "compress" => Compress(compress::CompressArgs),
        /// Share signed images and machines by name and tag
        "template" => Template(template::TemplateArgs),
    }
}
