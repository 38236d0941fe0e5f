//! Verbs about image files, machine archives, streams and templates.

mod archive;
mod compress;
mod export;
mod image;
mod import;
mod template;

use crate::commands::verb::verbs;

verbs! {
    pub(crate) enum ImageFileVerb {
        /// Work on disk image files, without a repository
        "image" => Image(image::ImageArgs),
        /// Take in a machine from an archive of another hypervisor
        "import" => Import(import::ImportArgs),
        /// Make an archive for another hypervisor of a machine
        "export" => Export(export::ExportArgs),
        /// Look into machine archives and packed streams, without a repository
        "archive" => Archive(archive::ArchiveArgs),
        /// Pack a stream on all cores, with an index behind it
        "compress" => Compress(compress::CompressArgs),
        /// Share prepared images and machines with colleagues, by name and tag, signed
        "template" => Template(template::TemplateArgs),
    }
}
