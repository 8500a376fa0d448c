//! [`FolderLock`]: only one process at a time writes into a run's folder.
//!
//! The lock is `flock`'s. On NFS the client asks the server for it, so it also keeps out processes on other machines, if the server offers
//! locks and the folder is mounted with them. A server that cannot answer for a moment is asked again; without locks the run says that it
//! goes on without.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use phalanx_tensor::io::atomic::{create_folder, is_at};

use crate::machine::host;
use crate::{Error, Result};

/// The locked file. Its text says which process has the lock.
const NAME: &str = ".lock";
/// Bytes of such a text that are read.
const TEXT_MAX: u64 = 200;

/// The lock on a run's folder, until it is dropped. The operating system has it, so a process that dies loses it.
#[derive(Debug)]
pub(crate) struct FolderLock {
    _file: File,
    path: PathBuf,
    /// Folders that were not there before. They are removed in the end if a run that failed has left them empty.
    made: Vec<PathBuf>,
}

impl FolderLock {
    /// Locks a folder, which is made if it is not there.
    ///
    /// # Errors
    /// If another process has the lock, with its number and its host; or if the folder cannot be written to.
    pub fn take(folder: &Path) -> Result<FolderLock> {
        let failed = |e: io::Error| Error::file(folder, format!("wanted a folder to write to: {e}"));
        let missing = folder.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let made = missing.map(Path::to_path_buf).collect();
        let path = folder.join(NAME);
        loop {
            create_folder(folder).map_err(failed)?;
            let mut file = File::options();
            let mut file =
                file.read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
            match try_lock(&file) {
                // A process that ends removes the file, perhaps after this one has opened it.
                Ok(()) if !is_at(&file, &path).map_err(failed)? => continue,
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let (mut by, shown) = (String::new(), folder.display());
                    let _ = file.take(TEXT_MAX).read_to_string(&mut by);
                    let by = by.lines().next().filter(|by| !by.contains(char::is_control));
                    return Err(Error::Config(format!(
                        "{shown} is in use by {}; choose another `out`, or wait for it",
                        by.unwrap_or("another process")
                    )));
                }
                Err(TryLockError::Error(error)) => {
                    let warned = "goes on without a lock, which this file system does not give";
                    let line =
                        format!("{}: {warned} ({error}): let no other run write there\n", folder.display());
                    let _ = io::stderr().write_all(line.as_bytes());
                }
            }
            let text = format!("process {} on {}\n", std::process::id(), host());
            let written =
                file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(text.as_bytes()));
            written.map_err(failed)?;
            return Ok(FolderLock { _file: file, path, made });
        }
    }
}

/// How often a lock is asked for that cannot be given for a moment.
const TRIES: u32 = 10;
/// How long after each other.
const PAUSE: Duration = Duration::from_millis(200);

/// Asks for the lock, again if a server cannot give it for a moment.
fn try_lock(file: &File) -> Result<(), TryLockError> {
    // ENOLCK: on Linux 37, on macOS 77.
    let is_short = |error: &io::Error| {
        error.kind() == io::ErrorKind::Interrupted || matches!(error.raw_os_error(), Some(37 | 77))
    };
    for _ in 1..TRIES {
        match file.try_lock() {
            Err(TryLockError::Error(error)) if is_short(&error) => std::thread::sleep(PAUSE),
            asked => return asked,
        }
    }
    file.try_lock()
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        // While it is locked. What cannot be removed, such as a folder with files, stays.
        let _ = fs::remove_file(&self.path);
        for folder in &self.made {
            let _ = fs::remove_dir(folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_locked_once_until_the_lock_is_dropped() {
        let root = std::env::temp_dir().join(format!("phalanx-lock-{}", std::process::id()));
        let folder = root.join("a/b");
        let lock = FolderLock::take(&folder).unwrap();
        let error = FolderLock::take(&folder).unwrap_err().to_string();
        let wanted = format!("is in use by process {} on {}; ", std::process::id(), host());
        assert!(error.contains(&wanted), "{error}");
        drop(lock);
        assert!(!root.exists(), "folders are left");
        let lock = FolderLock::take(&folder).unwrap();
        fs::write(folder.join("file"), "").unwrap();
        drop(lock);
        assert!(folder.join("file").exists() && !folder.join(NAME).exists());
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn what_is_no_folder_is_refused() {
        let error = FolderLock::take(Path::new("/dev/null/run")).unwrap_err().to_string();
        assert!(error.contains("/dev/null/run: wanted a folder to write to: "), "{error}");
    }

    /// An error that lasts would otherwise be tried again without end.
    #[test]
    #[cfg(unix)]
    fn a_name_that_cannot_be_looked_up_is_an_error() {
        let file = File::open("/dev/null").unwrap();
        assert!(is_at(&file, Path::new("/dev/null")).unwrap());
        assert!(!is_at(&file, Path::new("/dev/zero")).unwrap());
        assert!(!is_at(&file, Path::new("/dev/nothing-has-this-name")).unwrap());
        let error = is_at(&file, Path::new("/dev/null/.lock")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotADirectory);
    }

    #[test]
    fn threads_that_take_and_drop_a_lock_have_it_one_at_a_time() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        let folder = std::env::temp_dir().join(format!("phalanx-locks-{}", std::process::id()));
        let (holders, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        if let Ok(lock) = FolderLock::take(&folder) {
                            assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                            taken.fetch_add(1, Ordering::SeqCst);
                            holders.fetch_sub(1, Ordering::SeqCst);
                            drop(lock);
                        }
                    }
                });
            }
        });
        assert!(taken.into_inner() > 100);
    }
}
