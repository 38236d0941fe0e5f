//! Disks on a command line of QEMU: they become raw files with other paths.

use std::path::Path;

use super::CommandLine;
use super::pairs::OptionPairs;

/// Formats of images. A node of another driver above a file is a filter, and stays.
const FORMATS: [&str; 11] = [
    "raw",
    "qcow2",
    "qcow",
    "qed",
    "vdi",
    "vhdx",
    "vmdk",
    "vpc",
    "parallels",
    "bochs",
    "dmg",
];
/// Options of formats, which a raw file does not have. A raw image may begin at an offset of its file.
const FORMAT_OPTIONS: [&str; 17] = [
    "backing",
    "cache-clean-interval",
    "cache-size",
    "data-file",
    "discard-no-unref",
    "force-size",
    "force-size-calc",
    "l2-cache-entry-size",
    "l2-cache-size",
    "lazy-refcounts",
    "offset",
    "overlap-check",
    "pass-discard-other",
    "pass-discard-request",
    "pass-discard-snapshot",
    "refcount-cache-size",
    "size",
];
/// Options that name the image of a disk, and the disk's index.
const IMAGE_OPTIONS: [(&str, &str); 4] = [("-hda", "0"), ("-hdb", "1"), ("-hdc", "2"), ("-hdd", "3")];

/// Where a command line names the image of a disk.
enum ImageMention {
    /// The value of a `-drive` has it at this key.
    Drive { value: usize, key: String },
    /// The value of a `-blockdev` has it at this key.
    Blockdev { value: usize, key: String },
    /// A `-hda` and so on, or a word without an option.
    Plain {
        option: Option<usize>,
        value: usize,
        index: &'static str,
    },
}

impl CommandLine {
    /// Makes the disk whose image is `from` the raw file `to`.
    ///
    /// # Errors
    /// Why that is not possible, for users.
    pub(super) fn move_disk(&mut self, from: &Path, to: &Path) -> Result<(), String> {
        let mut mentions = self.mentions_of(from);
        let (Some(mention), true) = (mentions.pop(), mentions.is_empty()) else {
            return Err(format!(
                "the command line of its QEMU does not name {} exactly once: the disk was changed since it was started, or is \
                 described by a file",
                from.display()
            ));
        };
        let to = to.display().to_string();
        match mention {
            ImageMention::Drive { value, key } => self.change(value, |pairs| {
                refuse_encrypted(pairs, "", from)?;
                pairs.set(&key, &to);
                pairs.remove(|key| key == "driver" || is_format_option(key, ""));
                pairs.set("format", "raw");
                use_file(pairs, "file.");
                Ok(())
            }),
            ImageMention::Blockdev { value, key } => self.move_node(value, &key, &to, from),
            ImageMention::Plain { option, value, index } => {
                let drive = format!("file={},format=raw,index={index},media=disk", to.replace(',', ",,"));
                match option {
                    Some(option) => {
                        "-drive".clone_into(&mut self.arguments[option]);
                        self.arguments[value] = drive;
                    }
                    None => drop(self.arguments.splice(value..=value, ["-drive".to_owned(), drive])),
                }
                Ok(())
            }
        }
    }

    fn mentions_of(&self, image: &Path) -> Vec<ImageMention> {
        let is_it = |text: &str| self.folder.join(text) == image;
        let mut mentions = Vec::new();
        for argument in self.options() {
            let Some(value) = argument.value else {
                continue;
            };
            let text = &self.arguments[value];
            match argument.name {
                Some("-drive") => {
                    let keys = OptionPairs::parse(text).keys_of(is_it).into_iter();
                    let keys = keys.filter(|key| key == "file" || key == "file.filename");
                    mentions.extend(keys.map(|key| ImageMention::Drive { value, key }));
                }
                Some("-blockdev") => {
                    let keys = OptionPairs::parse(text).keys_of(is_it).into_iter();
                    let keys = keys.filter(|key| key == "filename" || key.ends_with(".filename"));
                    mentions.extend(keys.map(|key| ImageMention::Blockdev { value, key }));
                }
                None if is_it(text) => mentions.push(ImageMention::Plain {
                    option: None,
                    value,
                    index: IMAGE_OPTIONS[0].1,
                }),
                Some(name) if is_it(text) => {
                    let known = IMAGE_OPTIONS.iter().find(|(option, _)| *option == name);
                    mentions.extend(known.map(|(_, index)| ImageMention::Plain {
                        option: Some(value - 1),
                        value,
                        index,
                    }));
                }
                _ => {}
            }
        }
        mentions
    }

    /// Changes the node of a file, and the node of the format above it: both in one option, or in two.
    fn move_node(&mut self, value: usize, key: &str, to: &str, from: &Path) -> Result<(), String> {
        let file = key.strip_suffix("filename").unwrap_or_default().to_owned();
        let mut name = None;
        self.change(value, |pairs| {
            pairs.set(key, to);
            use_file(pairs, &file);
            match file.strip_suffix('.') {
                None => name = pairs.get("node-name").map(str::to_owned),
                Some(path) => {
                    let above = path
                        .rsplit_once('.')
                        .map_or(String::new(), |(above, _)| format!("{above}."));
                    make_raw(pairs, &above, from)?;
                }
            }
            Ok(())
        })?;
        let Some(name) = name else { return Ok(()) };
        let blockdevs = self
            .options()
            .into_iter()
            .filter(|argument| argument.name == Some("-blockdev"));
        let others: Vec<usize> = blockdevs.filter_map(|argument| argument.value).collect();
        for other in others {
            self.change(other, |pairs| {
                for key in pairs.keys_of(|text| text == name) {
                    if let Some(above) = key
                        .strip_suffix("file")
                        .filter(|above| above.is_empty() || above.ends_with('.'))
                    {
                        make_raw(pairs, above, from)?;
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn change(
        &mut self,
        value: usize,
        change: impl FnOnce(&mut OptionPairs) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut pairs = OptionPairs::parse(&self.arguments[value]);
        let before = pairs.clone();
        change(&mut pairs)?;
        if pairs != before {
            self.arguments[value] = pairs.text();
        }
        Ok(())
    }
}

/// A volume may become a file.
fn use_file(pairs: &mut OptionPairs, prefix: &str) {
    let key = format!("{prefix}driver");
    if pairs.get(&key) == Some("host_device") {
        pairs.set(&key, "file");
    }
}

/// Makes a node of an image's format one of a raw image.
fn make_raw(pairs: &mut OptionPairs, prefix: &str, from: &Path) -> Result<(), String> {
    let key = format!("{prefix}driver");
    refuse_encrypted(pairs, prefix, from)?;
    if pairs.get(&key).is_some_and(|driver| FORMATS.contains(&driver)) {
        pairs.set(&key, "raw");
        pairs.remove(|key| is_format_option(key, prefix));
    }
    Ok(())
}

/// QEMU shows the content without encryption, so the copy would have none.
fn refuse_encrypted(pairs: &OptionPairs, prefix: &str, from: &Path) -> Result<(), String> {
    let drivers = ["driver", "format"].map(|key| format!("{prefix}{key}"));
    let is_luks = drivers.iter().any(|key| pairs.get(key) == Some("luks"));
    let encryption = format!("{prefix}encrypt.");
    if is_luks || !pairs.keys_of(|_| true).iter().all(|key| !key.starts_with(&encryption)) {
        return Err(format!(
            "{} is encrypted, and would be copied without encryption",
            from.display()
        ));
    }
    Ok(())
}

fn is_format_option(key: &str, prefix: &str) -> bool {
    let Some(rest) = key.strip_prefix(prefix) else {
        return false;
    };
    let first = rest.split('.').next().unwrap_or_default();
    FORMAT_OPTIONS.contains(&first)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::CommandLine;

    fn moved(words: &[&str], from: &str) -> Result<Vec<String>, String> {
        let mut line = CommandLine::of_words(words);
        line.move_disk(Path::new(from), Path::new("/srv/new,1.raw"))?;
        Ok(line.arguments)
    }

    fn assert_moved(words: &[&str], expected: &[&str]) {
        assert_eq!(moved(words, "/vm/a.qcow2").unwrap(), expected);
    }

    #[test]
    fn a_drive_becomes_a_raw_file() {
        assert_moved(
            &[
                "-drive",
                "file=a.qcow2,if=virtio,format=qcow2,l2-cache-size=1M,cache=none",
            ],
            &["-drive", "file=/srv/new,,1.raw,if=virtio,format=raw,cache=none"],
        );
        assert_moved(
            &[
                "-m",
                "16",
                "-drive",
                "if=none,id=d,file=/vm/a.qcow2",
                "-device",
                "virtio-blk,drive=d",
            ],
            &[
                "-m",
                "16",
                "-drive",
                "if=none,id=d,file=/srv/new,,1.raw,format=raw",
                "-device",
                "virtio-blk,drive=d",
            ],
        );
        assert_moved(
            &[
                "-drive",
                "driver=qcow2,file.driver=host_device,file.filename=/vm/a.qcow2",
            ],
            &["-drive", "file.driver=file,file.filename=/srv/new,,1.raw,format=raw"],
        );
    }

    #[test]
    fn a_node_becomes_a_raw_file_in_both_syntaxes() {
        assert_moved(
            &[
                "-blockdev",
                "driver=qcow2,node-name=d,discard=unmap,backing.driver=null-co,file.driver=file,file.filename=a.qcow2",
            ],
            &[
                "-blockdev",
                "driver=raw,node-name=d,discard=unmap,file.driver=file,file.filename=/srv/new,,1.raw",
            ],
        );
        assert_moved(
            &[
                "-blockdev",
                r#"{"driver":"qcow2","file":{"driver":"file","filename":"/vm/a.qcow2"},"node-name":"d"}"#,
            ],
            &[
                "-blockdev",
                r#"{"driver":"raw","file":{"driver":"file","filename":"/srv/new,1.raw"},"node-name":"d"}"#,
            ],
        );
    }

    #[test]
    fn a_node_above_a_file_node_becomes_raw_and_filters_stay() {
        assert_moved(
            &[
                "-blockdev",
                "driver=file,node-name=f,filename=/vm/a.qcow2",
                "-blockdev",
                "driver=qcow2,node-name=d,file=f",
                "-blockdev",
                "driver=qcow2,node-name=other,file=g",
            ],
            &[
                "-blockdev",
                "driver=file,node-name=f,filename=/srv/new,,1.raw",
                "-blockdev",
                "driver=raw,node-name=d,file=f",
                "-blockdev",
                "driver=qcow2,node-name=other,file=g",
            ],
        );
        assert_moved(
            &[
                "-blockdev",
                "driver=throttle,throttle-group=g,file.driver=qcow2,file.file.driver=file,file.file.filename=a.qcow2",
            ],
            &[
                "-blockdev",
                "driver=throttle,throttle-group=g,file.driver=raw,file.file.driver=file,file.file.filename=/srv/new,,1.raw",
            ],
        );
    }

    #[test]
    fn an_image_without_a_drive_gets_one() {
        let drive = |index| format!("file=/srv/new,,1.raw,format=raw,index={index},media=disk");
        assert_moved(&["-hdb", "a.qcow2", "-S"], &["-drive", &drive(1), "-S"]);
        assert_moved(
            &["-enable-kvm", "a.qcow2", "-m", "1G"],
            &["-enable-kvm", "-drive", &drive(0), "-m", "1G"],
        );
    }

    #[test]
    fn a_disk_that_is_not_named_once_or_is_encrypted_is_refused() {
        let drive = ["-drive", "file=a.qcow2,format=qcow2"];
        assert!(moved(&drive, "/vm/b.qcow2").unwrap_err().contains("exactly once"));
        assert!(moved(&[drive, drive].concat(), "/vm/a.qcow2").is_err());
        // It is the value of another option.
        assert!(moved(&["-name", "a.qcow2"], "/vm/a.qcow2").is_err());
        for value in [
            "file=a.qcow2,format=luks,key-secret=s",
            "file=a.qcow2,encrypt.key-secret=s",
        ] {
            assert!(
                moved(&["-drive", value], "/vm/a.qcow2")
                    .unwrap_err()
                    .contains("encrypted")
            );
        }
        let node = "driver=luks,key-secret=s,file.driver=file,file.filename=a.qcow2";
        assert!(
            moved(&["-blockdev", node], "/vm/a.qcow2")
                .unwrap_err()
                .contains("encrypted")
        );
    }
}
