//! Applies the layers of an image in order.
//!
//! A layer removes files of lower layers by whiteouts: `.wh.NAME` removes NAME, `.wh..wh..opq` removes everything in its folder.
//! Both concern lower layers only, wherever they stand in the layer. So a layer is read twice: first its whiteouts are
//! applied, then its files are added. That needs no list of the files of a layer. A folder of the layer replaces a link of
//! a lower layer already in the first pass, so that no whiteout in it is applied to the folder that the link leads to.

use std::io::{self, Read};
use std::path::Path;

use aws_lc_rs::digest::{Context, SHA256};
use holdfast_archive::{EndMarker, TreeEntry, TreeEntryKind, TreeTarReader};

use super::super::layout::{LayoutFiles, unpacked};
use super::super::loss::Account;
use super::super::root_path::{bad_entry, components};
use super::super::root_target::RootTarget;
use super::super::{EntrySink as _, FillReport, next_entry};
use super::ImageChoice;
use super::choose::{ChosenImage, ChosenLayer, choose};
use crate::job::{Job, Result, Unit};

const WHITEOUT: &[u8] = b".wh.";
/// Names of AUFS: the first one below is the only one with a meaning in images.
const RESERVED: &[u8] = b".wh..wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Fills a root folder from an image of a layout. Nothing is written before all blobs were checked.
pub(in super::super) fn fill_from_image(
    mut target: RootTarget,
    layout: &Path,
    choice: &ImageChoice,
    job: Job<'_>,
) -> Result<FillReport> {
    let (files, image) = checked_image(layout, choice, job)?;
    job.progress.phase("unpacking layers", Unit::Bytes);
    let mut account = Account::new(job);
    for (number, layer) in image.layers.iter().enumerate() {
        if number > 0 {
            read_layer(&files, layer, job, &mut |entry, _| apply_whiteout(&mut target, entry))?;
        }
        read_layer(&files, layer, job, &mut |entry, data| match whiteout_of(entry)? {
            Some(_) => Ok(()),
            None => target.entry(entry, data, &mut account),
        })?;
    }
    target.finish(&mut account)?;
    Ok(FillReport::of(account, Some(image.configuration)))
}

/// Checks that an image can be chosen, and all of its blobs.
pub(in super::super) fn check_image(layout: &Path, choice: &ImageChoice, job: Job<'_>) -> Result<()> {
    checked_image(layout, choice, job).map(drop)
}

fn checked_image(layout: &Path, choice: &ImageChoice, job: Job<'_>) -> Result<(LayoutFiles, ChosenImage)> {
    let files = LayoutFiles::open(layout, job)?;
    let image = choose(&files, layout, choice)?;
    job.progress.phase("checking layers", Unit::Bytes);
    for layer in &image.layers {
        files.check_blob(&layer.blob, job)?;
    }
    Ok((files, image))
}

/// What a layer removes.
#[derive(Debug, PartialEq, Eq)]
enum Whiteout {
    /// A file in a folder.
    Name { folder: Vec<u8>, name: Vec<u8> },
    /// Everything in a folder.
    Content { folder: Vec<u8> },
    /// Nothing: a file of AUFS itself.
    Nothing,
}

fn whiteout_of(entry: &TreeEntry) -> Result<Option<Whiteout>> {
    let parts = components(&entry.path)?;
    let Some((last, folder)) = parts.split_last() else {
        return Ok(None);
    };
    let Some(name) = last.strip_prefix(WHITEOUT) else {
        // A folder of AUFS, with files that are not part of the image.
        let is_reserved = parts.iter().any(|part| part.starts_with(RESERVED));
        return Ok(is_reserved.then_some(Whiteout::Nothing));
    };
    let folder = folder.join(&b'/');
    Ok(Some(match (*last, name) {
        (OPAQUE, _) => Whiteout::Content { folder },
        _ if last.starts_with(RESERVED) => Whiteout::Nothing,
        (_, b"" | b"." | b"..") => return Err(bad_entry(&entry.path, "removes no possible name")),
        (_, name) => Whiteout::Name {
            folder,
            name: name.to_vec(),
        },
    }))
}

fn apply_whiteout(target: &mut RootTarget, entry: &TreeEntry) -> Result<()> {
    match whiteout_of(entry)? {
        Some(Whiteout::Name { folder, name }) => target.remove(&folder, &name),
        Some(Whiteout::Content { folder }) => target.clear(&folder),
        None if entry.kind == TreeEntryKind::Directory => target.make_way_for_folder(&entry.path),
        Some(Whiteout::Nothing) | None => Ok(()),
    }
}

type LayerEntry<'a> = dyn FnMut(&TreeEntry, &mut dyn Read) -> Result<()> + 'a;

/// Passes all entries of a layer, and compares the digest of the unpacked layer.
fn read_layer(files: &LayoutFiles, layer: &ChosenLayer, job: Job<'_>, pass: &mut LayerEntry<'_>) -> Result<()> {
    let blob = &layer.blob;
    let origin = format!("layer {}", blob.digest.text());
    let stream = unpacked(files.open_blob(blob)?.stream, job.thread_count, &origin)?;
    let digesting = DigestReader {
        stream,
        context: Context::new(&SHA256),
    };
    // Its length was checked with its digest.
    let mut reader = TreeTarReader::new(digesting, EndMarker::Optional);
    while let Some(entry) = next_entry(&mut reader, &origin)? {
        job.interrupt.check()?;
        pass(&entry, &mut reader)?;
    }
    let context = reader.into_stream().context;
    if layer.unpacked.matches(context) {
        return Ok(());
    }
    Err(blob
        .digest
        .bad(format!("unpacked, it is not {}", layer.unpacked.text())))
}

struct DigestReader {
    stream: Box<dyn Read + Send>,
    context: Context,
}

impl Read for DigestReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.stream.read(buffer)?;
        self.context.update(buffer.get(..count).unwrap_or_default());
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use holdfast_archive::{TreeEntry, TreeEntryKind, TreeTime};

    use super::{Whiteout, whiteout_of};

    fn whiteout(path: &str) -> Option<Whiteout> {
        let entry = TreeEntry {
            path: path.into(),
            kind: TreeEntryKind::File,
            mode: 0,
            uid: 0,
            gid: 0,
            modified: TreeTime::default(),
            attributes: Vec::new(),
            unresolved_acl_count: 0,
            size_bytes: 0,
            extents: Vec::new(),
            offset: 0,
        };
        whiteout_of(&entry).ok().flatten()
    }

    #[test]
    fn names_of_whiteouts() {
        let name = |folder: &str, name: &str| {
            Some(Whiteout::Name {
                folder: folder.into(),
                name: name.into(),
            })
        };
        assert_eq!(whiteout("etc/.wh.hosts"), name("etc", "hosts"));
        assert_eq!(whiteout("./.wh.a b"), name("", "a b"));
        assert_eq!(
            whiteout("etc/.wh..wh..opq"),
            Some(Whiteout::Content {
                folder: b"etc".to_vec()
            })
        );
        assert_eq!(whiteout(".wh..wh.plnk/1.2"), Some(Whiteout::Nothing));
        assert_eq!(whiteout(".wh..wh.aufs"), Some(Whiteout::Nothing));
        for plain in ["etc/hosts", "etc/wh.a", "./", "a/.wh.", "a/.wh..", "a/.wh..."] {
            assert_eq!(whiteout(plain), None, "{plain}");
        }
    }
}
