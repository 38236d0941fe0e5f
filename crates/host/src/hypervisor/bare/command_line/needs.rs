//! Files that a command line of QEMU names.

use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use super::CommandLine;
use super::pairs::OptionPairs;

/// Options whose value is a file that QEMU writes.
const WRITTEN_BY: [&str; 3] = ["-pidfile", "-D", "-trace"];
/// Prefixes of paths: of the addresses of sockets and character devices.
const ADDRESSES: [&str; 3] = ["unix:", "file:", "pipe:"];

impl CommandLine {
    /// Records the files that exist here, by what they are: must they exist before QEMU starts, or does it create them?
    pub(super) fn find_files(&mut self) {
        let (mut files, mut made_files) = (Vec::new(), Vec::new());
        for argument in self.options() {
            let Some(value) = argument.value else { continue };
            let option = argument.name.unwrap_or("disk");
            let text = &self.arguments[value];
            let pairs = OptionPairs::parse(text);
            for text in pairs.texts() {
                let address = ADDRESSES.iter().find_map(|prefix| text.strip_prefix(prefix));
                let path = Path::new(address.unwrap_or(text));
                if !path.is_absolute() {
                    continue;
                }
                let is_written =
                    WRITTEN_BY.contains(&option) || text.starts_with("file:") || pairs.texts()[0] == "file";
                let is_written = is_written || pairs.get("logfile") == Some(text);
                let found = path.symlink_metadata();
                let is_socket = found.as_ref().is_ok_and(|found| found.file_type().is_socket());
                if is_written || (pairs.is_on("server") && (is_socket || found.is_err())) {
                    made_files.push(path.to_owned());
                } else if found.is_ok() {
                    files.push((option.to_owned(), path.to_owned()));
                }
            }
        }
        files.dedup();
        made_files.dedup();
        (self.files, self.made_files) = (files, made_files);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use super::CommandLine;

    #[test]
    fn files_are_found_with_what_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        for name in ["bios", "disk", "log", "pid"] {
            std::fs::File::create(path(name)).unwrap();
        }
        let _sockets = ["monitor", "tpm"].map(|name| UnixListener::bind(path(name)).unwrap());
        let words = [
            "-bios",
            &path("bios"),
            "-blockdev",
            &format!(
                r#"{{"driver":"raw","file":{{"driver":"file","filename":"{}"}}}}"#,
                path("disk")
            ),
            "-qmp",
            &format!("unix:{},server=on,wait=off", path("monitor")),
            "-chardev",
            &format!("socket,id=t,path={}", path("tpm")),
            "-chardev",
            &format!("socket,id=later,path={},server", path("absent")),
            "-serial",
            &format!("file:{}", path("log")),
            "-pidfile",
            &path("pid"),
            "-name",
            "/does/not/exist",
        ];
        let mut line = CommandLine::of_words(&words);
        line.find_files();
        let needed = ["bios", "disk", "tpm"].map(|name| PathBuf::from(path(name)));
        let found: Vec<PathBuf> = line.files.iter().map(|(_, path)| path.clone()).collect();
        assert_eq!(found, needed);
        assert_eq!(line.files[1].0, "-blockdev");
        let made = ["monitor", "absent", "log", "pid"].map(|name| PathBuf::from(path(name)));
        assert_eq!(line.made_files, made);
    }
}
