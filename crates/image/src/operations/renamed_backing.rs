//! The file of a qcow2 image as it would be with another name of its backing file.

use std::ops::Range;
use std::path::Path;

use holdfast_block::{BlockDevice, ExtentKind, ExtentList, FileDevice, IoMode, Result as BlockResult, to_usize};

use crate::Result;
use crate::formats::qcow2::header::{Qcow2Header, cluster_bits_of, with_backing_name};
use crate::model::format::HEAD_BYTES;

/// The bytes of a qcow2 file with another name of its backing file. The file itself is not changed.
pub struct RenamedBacking {
    file: FileDevice,
    /// What the file begins with.
    head: Vec<u8>,
}

impl RenamedBacking {
    /// Opens the file at `path`, whose backing file is called `name` in what is read.
    ///
    /// # Errors
    /// The file is not a qcow2 image with a backing file, or the name is too long for its header.
    pub fn open(path: &Path, name: &str) -> Result<Self> {
        let file = FileDevice::open(path, IoMode::Buffered)?;
        let image = path.display().to_string();
        let file_bytes = file.size_bytes();
        let read = |length: u64| -> Result<Vec<u8>> {
            let mut bytes = vec![0; to_usize(file_bytes.min(length))];
            file.read_at(&mut bytes, 0)?;
            Ok(bytes)
        };
        let cluster_bytes = 1 << cluster_bits_of(&read(HEAD_BYTES)?, &image)?;
        let head = read(cluster_bytes)?;
        Qcow2Header::parse(&head, file_bytes, &image)?;
        let head = with_backing_name(&head, name)?;
        Ok(Self { file, head })
    }
}

impl BlockDevice for RenamedBacking {
    fn size_bytes(&self) -> u64 {
        self.file.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        self.file.read_at(buffer, offset)?;
        if let Some(head) = self.head.get(to_usize(offset)..) {
            let length = head.len().min(buffer.len());
            buffer[..length].copy_from_slice(&head[..length]);
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        let length = range.end.saturating_sub(range.start);
        self.check_bounds(range.start, length)?;
        let head_bytes = (self.head.len() as u64).saturating_sub(range.start).min(length);
        if head_bytes == 0 {
            return self.file.extents(range, extent_count_max);
        }
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(head_bytes, ExtentKind::Data);
        Ok(list)
    }

    fn block_size_bytes(&self) -> u32 {
        self.file.block_size_bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::path::Path;

    use holdfast_block::conformance::Conformance;
    use holdfast_block::{BlockDevice as _, BlockDeviceMut as _};

    use super::RenamedBacking;
    use crate::{BackingFile, CreateOptions, Error, Format, OpenOptions, create, open, open_mut};

    fn overlay(folder: &Path, name: &str) -> std::path::PathBuf {
        let base = folder.join(name);
        if !base.exists() {
            create(&base, &CreateOptions::new(Format::Raw, 1 << 20)).unwrap();
        }
        let path = folder.join("top.qcow2");
        let mut options = CreateOptions::new(Format::Qcow2, 1 << 20);
        options.qcow2.backing = Some(BackingFile {
            name: name.to_owned(),
            format: Format::Raw,
        });
        create(&path, &options).unwrap();
        path
    }

    #[test]
    fn the_copy_has_another_backing_file_and_the_same_content() {
        let folder = tempfile::tempdir().unwrap();
        let path = overlay(folder.path(), "base.raw");
        let image = open_mut(&path, &OpenOptions::default()).unwrap();
        image.write_at(b"content", 70_000).unwrap();
        image.flush().unwrap();
        drop(image);
        let before = std::fs::read(&path).unwrap();
        for name in ["a-longer-name-of-the-base.raw", "b"] {
            create(&folder.path().join(name), &CreateOptions::new(Format::Raw, 1 << 20)).unwrap();
            let renamed = RenamedBacking::open(&path, name).unwrap();
            let mut content = vec![0; before.len()];
            renamed.read_at(&mut content, 0).unwrap();
            Conformance::new().check_read_only(&renamed, &content);
            let copy = folder.path().join("copy.qcow2");
            std::fs::File::create(&copy).unwrap().write_all(&content).unwrap();
            let image = open(&copy, &OpenOptions::default()).unwrap();
            assert_eq!(image.layers()[1].path, folder.path().join(name));
            let mut found = [0; 7];
            image.read_at(&mut found, 70_000).unwrap();
            assert_eq!(&found, b"content");
        }
        assert!(std::fs::read(&path).unwrap() == before);
    }

    #[test]
    fn a_name_that_does_not_fit_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = overlay(folder.path(), "base.raw");
        let refused = RenamedBacking::open(&path, &"x".repeat(1024)).err().unwrap();
        assert!(matches!(refused, Error::InvalidOption { .. }), "{refused}");
        let alone = folder.path().join("alone.qcow2");
        create(&alone, &CreateOptions::new(Format::Qcow2, 1 << 20)).unwrap();
        let refused = RenamedBacking::open(&alone, "base.raw").err().unwrap();
        assert!(matches!(refused, Error::InvalidOption { .. }), "{refused}");
        assert!(
            RenamedBacking::open(&folder.path().join("base.raw"), "b")
                .err()
                .unwrap()
                .is_corrupt()
        );
    }
}
