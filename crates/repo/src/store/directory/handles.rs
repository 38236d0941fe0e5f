//! Open files of packs, so that a read is one system call instead of five.

use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::store::ObjectName;

const HANDLE_COUNT_MAX: usize = 32;

/// The most recently read files, the latest at the end.
#[derive(Debug, Default)]
pub(super) struct FileHandles {
    files: Mutex<Vec<(ObjectName, Arc<File>)>>,
}

impl FileHandles {
    pub(super) fn find(&self, name: &ObjectName) -> Option<Arc<File>> {
        let mut files = self.lock();
        let at = files.iter().rposition(|(known, _)| known == name)?;
        files[at..].rotate_left(1);
        files.last().map(|(_, file)| Arc::clone(file))
    }

    pub(super) fn keep(&self, name: &ObjectName, file: &Arc<File>) {
        let mut files = self.lock();
        files.retain(|(known, _)| known != name);
        if files.len() >= HANDLE_COUNT_MAX {
            files.remove(0);
        }
        files.push((name.clone(), Arc::clone(file)));
    }

    pub(super) fn forget(&self, name: &ObjectName) {
        self.lock().retain(|(known, _)| known != name);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(ObjectName, Arc<File>)>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ObjectKind;

    fn name(number: usize) -> ObjectName {
        ObjectName::new(ObjectKind::Pack, &format!("{number:08x}")).unwrap()
    }

    #[test]
    fn the_handle_used_longest_ago_goes_first() {
        let handles = FileHandles::default();
        let file = Arc::new(tempfile::tempfile().unwrap());
        for number in 0..HANDLE_COUNT_MAX {
            handles.keep(&name(number), &file);
        }
        assert!(handles.find(&name(0)).is_some());
        handles.keep(&name(HANDLE_COUNT_MAX), &file);
        assert!(handles.find(&name(0)).is_some());
        assert!(handles.find(&name(1)).is_none());
        assert_eq!(handles.lock().len(), HANDLE_COUNT_MAX);
        handles.forget(&name(0));
        assert!(handles.find(&name(0)).is_none());
    }
}
