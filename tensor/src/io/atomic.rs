//! Writing a file so that a reader finds the old content or the new one, never a part; what else puts names of files on disk.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

/// Replaces the file at `path` by what `fill` writes (through a buffer), or creates it.
///
/// The bytes go to a temporary file in the same folder, `.NAME.PID.NUMBER.tmp`, which is synced to disk and then
/// renamed to `path`; the folder is synced last. So, when the process is killed or the power fails:
///
/// - before the rename: `path` is what it was, and the temporary file may be left over (it never looks like the
///   file itself, and no later write uses it);
/// - after the rename: `path` is the new file, complete and on disk (a power failure right after it may still bring
///   back the old file, until this function has returned);
/// - after `Ok`: the new file survives whatever happens.
///
/// On an error or a panic of `fill` the temporary file is removed and `path` stays what it was. Two writers of one
/// path do not disturb each other: the last rename wins. A symbolic link at `path` is replaced, not followed.
///
/// To return an error of this crate from `fill`, wrap it: `io::Error::other(error)`; it comes out as it was.
///
/// # Errors
/// [`Error::File`] if the file cannot be written, else what `fill` returned.
///
/// ```
/// use phalanx_tensor::io::atomic;
/// # fn main() -> phalanx_tensor::Result<()> {
/// let path = std::env::temp_dir().join(format!("phalanx-doc-{}.json", std::process::id()));
/// atomic::write(&path, |file| file.write_all(b"{}"))?;
/// assert_eq!(std::fs::read(&path).ok(), Some(b"{}".to_vec()));
/// # std::fs::remove_file(&path).ok();
/// # Ok(())
/// # }
/// ```
pub fn write(path: impl AsRef<Path>, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let path = path.as_ref();
    replace(path, fill).map_err(|e| match e.downcast::<Error>() {
        Ok(error) => error,
        Err(e) => Error::file(path, e),
    })
}

fn replace(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let folder = parent(path);
    let (mut temporary, file) = Temporary::create(path, folder)?;
    let mut buffered = BufWriter::with_capacity(1 << 20, &file);
    fill(&mut buffered)?;
    buffered.flush()?;
    file.sync_all()?;
    std::fs::rename(&temporary.path, path)?;
    temporary.renamed = true;
    sync_folder(folder)
}

/// Puts on disk which files a folder has: after `Ok` their names survive a power failure. Some network file systems do not offer that for
/// folders, and make names last by themselves; there it does nothing.
///
/// # Errors
/// If the folder cannot be opened, or the disk refuses.
pub fn sync_folder(folder: impl AsRef<Path>) -> io::Result<()> {
    if !cfg!(unix) {
        return Ok(());
    }
    match File::open(folder)?.sync_all() {
        Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        synced => synced,
    }
}

/// Makes a folder and its parents where they are missing. After `Ok` those that were made survive a power failure.
///
/// # Errors
/// If one cannot be made, or the disk refuses.
pub fn create_folder(folder: impl AsRef<Path>) -> io::Result<()> {
    let folder = folder.as_ref();
    let missing = folder.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
    let parents: Vec<&Path> = missing.map(parent).collect();
    std::fs::create_dir_all(folder)?;
    parents.into_iter().try_for_each(sync_folder)
}

/// Whether the open file is the one of that name: another process may have removed it, and made another. On a network file system the name
/// may be looked up in a cache that is some seconds old.
///
/// # Errors
/// If the name cannot be looked up.
#[cfg(unix)]
pub fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata()?, std::fs::metadata(path)) {
        (open, Ok(named)) => Ok((open.dev(), open.ino()) == (named.dev(), named.ino())),
        (_, Err(error)) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        (_, Err(error)) => Err(error),
    }
}

/// Whether the open file is the one of that name: a file that is open keeps it.
///
/// # Errors
/// If the name cannot be looked up.
#[cfg(not(unix))]
pub fn is_at(_: &File, path: &Path) -> io::Result<bool> {
    path.try_exists()
}

/// The folder that a path lies in.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The file being written, removed on drop unless it got its final name.
struct Temporary {
    path: PathBuf,
    renamed: bool,
}

impl Temporary {
    fn create(path: &Path, folder: &Path) -> io::Result<(Temporary, File)> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let no_name =
            || io::Error::new(io::ErrorKind::InvalidInput, "the path does not end in a file's name");
        let name = path.file_name().ok_or_else(no_name)?;
        loop {
            let mut hidden = OsString::from(".");
            hidden.push(name);
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            hidden.push(format!(".{}.{number}.tmp", std::process::id()));
            let path = folder.join(hidden);
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => return Ok((Temporary { path, renamed: false }, file)),
                // Left over by a killed process whose id came again.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(e) => return Err(e),
            }
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.renamed {
            // Nothing can be done about a failure here, and the first error is on its way.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
