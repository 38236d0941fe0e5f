//! Changes to the images of a machine that is shut off.

use std::path::Path;

use holdfast_block::to_usize;

use super::{History, Outcome, PIECE_BYTES, SIZE_BYTES_MAX, SIZE_BYTES_MIN};
use crate::host::{system, text};
use crate::machines::at;

impl History {
    pub(super) fn off(&mut self) -> Outcome {
        let disk = self.disk();
        let (image, format) = (self.world.top_image(disk), self.format(disk));
        match self.random.below(14) {
            0 => Ok(()),
            1 => self.keep(disk, &image, &format),
            2 => self.put_back(disk),
            3 => self.flatten(disk, &image, &format),
            4 => {
                self.exchange();
                Ok(())
            }
            5 => self.change_base(disk, &image, &format),
            6 => {
                let other = self.new_path("moved");
                std::fs::copy(&image, &other).unwrap();
                self.world.put(disk, &other, &format);
                Ok(())
            }
            7 => self.snapshot_in_image(disk, &image),
            8 => self.meddle_in_image(disk, &image),
            9 => self.resize_image(disk, &image, &format),
            10 => self.commit_image(disk, &image, &format),
            11 => self.merge_base(disk, &image, &format),
            12 => self.restore_in_place(),
            _ => self.write_image(disk, &image, &format),
        }
    }

    fn keep(&mut self, disk: usize, image: &Path, format: &str) -> Outcome {
        if self.chain(disk).len() > 1 {
            return Err("it has a base".to_owned());
        }
        let copy = self.new_path("kept");
        std::fs::copy(image, &copy).unwrap();
        self.kept
            .push((copy, format.to_owned(), self.world.disks[disk].clone()));
        Ok(())
    }

    /// Replaces the image by an earlier copy, perhaps of the other disk.
    fn put_back(&mut self, disk: usize) -> Outcome {
        if self.kept.is_empty() {
            return Err("nothing was kept".to_owned());
        }
        let number = to_usize(self.random.below(self.kept.len() as u64));
        let (image, format, bytes) = self.kept.swap_remove(number);
        self.world.put(disk, &image, &format);
        self.world.disks[disk] = bytes;
        Ok(())
    }

    fn flatten(&mut self, disk: usize, image: &Path, format: &str) -> Outcome {
        let flat = self.new_path("flat");
        let mut words = vec!["convert", "-f", format, "-O", "qcow2"];
        if format == "qcow2" && self.random.one_in(2) {
            words.push("--bitmaps");
        }
        system("qemu-img", &[&words[..], &[text(image), text(&flat)]].concat())?;
        self.world.put(disk, &flat, "qcow2");
        Ok(())
    }

    fn exchange(&mut self) {
        let images = [0, 1].map(|disk| (self.world.top_image(disk), self.format(disk)));
        let nowhere = self.new_path("nowhere");
        self.world.put(0, &nowhere, "raw");
        self.world.put(1, &images[0].0, &images[0].1);
        self.world.put(0, &images[1].0, &images[1].1);
        self.world.disks.swap(0, 1);
    }

    /// The image gets another base.
    fn change_base(&mut self, disk: usize, image: &Path, format: &str) -> Outcome {
        let chain = self.chain(disk);
        let below = chain.get(1).ok_or("there is no base")?;
        let (file, kind) = (below["filename"].as_str().unwrap(), below["format"].as_str().unwrap());
        let base = self.new_path("base");
        std::fs::copy(file, &base).unwrap();
        let size_bytes = below["virtual-size"].as_u64().unwrap();
        let offset = self.random.below(size_bytes / PIECE_BYTES) * PIECE_BYTES;
        let line = format!("write -P 222 {offset} {PIECE_BYTES}");
        system("qemu-io", &["-f", kind, "-c", &line, text(&base)])?;
        let words = ["rebase", "-u", "-f", format, "-F", kind, "-b", text(&base), text(image)];
        system("qemu-img", &words)?;
        self.world.put(disk, image, format);
        self.world.disks[disk] = self.content(image, format);
        Ok(())
    }

    fn write_image(&mut self, disk: usize, image: &Path, format: &str) -> Outcome {
        let (byte, offset, length) = self.place(disk);
        let line = format!("write -P {byte} {offset} {length}");
        system("qemu-io", &["-f", format, "-c", &line, text(image)])?;
        self.world.disks[disk][to_usize(offset)..to_usize(offset + length)].fill(byte);
        Ok(())
    }

    /// Creates, applies or deletes an internal snapshot of one image.
    fn snapshot_in_image(&mut self, disk: usize, image: &Path) -> Outcome {
        let name = format!("q{}", self.random.below(2));
        let option = ["-c", "-a", "-a", "-d"][to_usize(self.random.below(4))];
        system("qemu-img", &["snapshot", option, &name, text(image)])?;
        self.world.disks[disk] = self.content(image, "qcow2");
        Ok(())
    }

    fn meddle_in_image(&mut self, disk: usize, image: &Path) -> Outcome {
        let chain = self.chain(disk);
        let bitmaps = &chain[0]["format-specific"]["data"]["bitmaps"];
        let names = bitmaps.as_array().into_iter().flatten();
        let names: Vec<&str> = names.filter_map(|bitmap| bitmap["name"].as_str()).collect();
        let bitmap_name = names.iter().find(|name| name.starts_with("holdfast-"));
        let bitmap_name = *bitmap_name.ok_or("there is no bitmap")?;
        self.made += 1;
        let copy = format!("copy{}", self.made);
        let steps: &[&[&str]] = match self.random.below(6) {
            0 => &[&["--remove"]],
            1 => &[&["--clear"]],
            2 => &[&["--disable"]],
            3 => &[&["--remove"], &["--add"]],
            // Writes are recorded; then the old content of the bitmap is merged into it.
            4 => &[&["--clear", "--enable"]],
            _ => {
                let words = [
                    "bitmap",
                    "-f",
                    "qcow2",
                    "--add",
                    "--merge",
                    bitmap_name,
                    text(image),
                    &copy,
                ];
                return system("qemu-img", &words).map(drop);
            }
        };
        for words in steps {
            let words = [&["bitmap", "-f", "qcow2"], *words, &[text(image), bitmap_name]].concat();
            system("qemu-img", &words)?;
        }
        Ok(())
    }

    fn resize_image(&mut self, disk: usize, image: &Path, format: &str) -> Outcome {
        let pieces = (SIZE_BYTES_MAX - SIZE_BYTES_MIN) / PIECE_BYTES;
        let size_bytes = SIZE_BYTES_MIN + self.random.below(pieces + 1) * PIECE_BYTES;
        let words = ["resize", "-f", format, "--shrink", text(image), &size_bytes.to_string()];
        system("qemu-img", &words)?;
        self.world.disks[disk] = self.content(image, format);
        Ok(())
    }

    /// Commits the top image into the one below it; the top image stays, and is empty.
    fn commit_image(&mut self, disk: usize, image: &Path, format: &str) -> Outcome {
        if self.chain(disk).len() < 2 {
            return Err("there is no base".to_owned());
        }
        system("qemu-img", &["commit", "-q", "-f", format, text(image)])?;
        self.world.disks[disk] = self.content(image, format);
        Ok(())
    }

    /// Merges the base into the top image.
    fn merge_base(&mut self, disk: usize, image: &Path, format: &str) -> Outcome {
        if self.chain(disk).len() < 2 {
            return Err("there is no base".to_owned());
        }
        system("qemu-img", &["rebase", "-f", format, "-b", "", text(image)])?;
        self.world.put(disk, image, format);
        Ok(())
    }

    /// Restores both disks in place from the newest snapshot.
    fn restore_in_place(&mut self) -> Outcome {
        let uri = self.world.lab.uri();
        let words = at(&uri, &["restore", "web1@latest", "--to-machine", "--in-place"]);
        let output = self.world.rig.run(&words);
        self.read_disks();
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        assert!(
            self.stored.as_ref() == Some(&self.world.disks),
            "the restore in place is wrong"
        );
        Ok(())
    }
}
