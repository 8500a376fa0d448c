//! [`Folder`]: the folders of a checkpoint, before, during and after a save; the commit of a save.
//!
//! ```text
//! begin   .NAME.old is removed, if NAME is on disk       a killed save leaves it
//!         .NAME.saving is made                           a killed save leaves it; the next one removes it
//! ranks   each writes its file, and syncs it
//! commit  the index is written and synced; .NAME.saving is synced: all files are on disk under their names
//!         NAME, if there is one -> .NAME.old             killed here, the old one is found as .NAME.old
//!         .NAME.saving -> NAME                           from here on the new one is found
//!         the folder around them is synced               from here on the new one is found after a power failure too
//!         .NAME.old is removed
//! ```
//! Nothing is removed before the names of what takes its place are on disk. One run writes at a time.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use phalanx_tensor::io::atomic::{create_folder, sync_folder};

use super::file_error;
use crate::Result;

/// The file whose presence makes a folder a checkpoint.
const INDEX: &str = "checkpoint.json";

/// Where a checkpoint is or will be.
#[derive(Clone, Debug)]
pub(super) struct Folder {
    path: PathBuf,
    saving: PathBuf,
    old: PathBuf,
}

impl Folder {
    /// The folder of that name.
    ///
    /// # Errors
    /// If the path does not end in a name.
    pub(super) fn new(path: &Path) -> Result<Folder> {
        let name =
            path.file_name().ok_or_else(|| file_error(path, "the path does not end in a folder's name"))?;
        let beside = |end: &str| path.with_file_name(format!(".{}.{end}", name.to_string_lossy()));
        Ok(Folder { path: path.into(), saving: beside("saving"), old: beside("old") })
    }

    /// Where the checkpoint is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Where a save is written, before it is a checkpoint.
    pub(super) fn saving(&self) -> &Path {
        &self.saving
    }

    /// The checkpoint that is there, and the text of its index.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn read_index(&self) -> Result<(&Path, PathBuf, String)> {
        let found = |folder: &&Path| folder.join(INDEX).exists();
        let folder = [&*self.path, &*self.old].into_iter().find(found).unwrap_or(&self.path);
        let path = folder.join(INDEX);
        let kind = fs::metadata(&path).map_err(|e| file_error(&path, e))?;
        if !kind.is_file() {
            // A pipe, for example, would be waited for.
            return Err(file_error(&path, "this is no file"));
        }
        let text = fs::read_to_string(&path).map_err(|e| file_error(&path, e))?;
        Ok((folder, path, text))
    }

    /// Makes the folder of a save, and removes that of a killed one.
    ///
    /// # Errors
    /// If something else is there that is no checkpoint, or has files of others, or the disk refuses.
    pub(super) fn begin(&self) -> Result<()> {
        let empty = |folder: &Path| fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
        if self.path.exists() && !self.path.join(INDEX).exists() && !empty(&self.path) {
            return Err(file_error(&self.path, "is there and is no checkpoint; it is left as it is"));
        }
        for leftover in [&self.saving, &self.old] {
            if let Some(name) = foreign(leftover) {
                let why =
                    format!("it has {name:?}, which no checkpoint has; it is left as it is: move it away");
                return Err(file_error(leftover, why));
            }
        }
        let done = || -> io::Result<()> {
            if self.old.exists() {
                match self.path.join(INDEX).exists() {
                    true => {
                        // A save that was killed has renamed the new one, perhaps not yet on disk.
                        sync_folder(self.parent())?;
                        fs::remove_dir_all(&self.old)?;
                    }
                    false => fs::rename(&self.old, &self.path)?,
                }
            }
            if self.saving.exists() {
                fs::remove_dir_all(&self.saving)?;
            }
            create_folder(self.parent())?;
            fs::create_dir(&self.saving)
        };
        done().map_err(|e| file_error(&self.saving, e))
    }

    /// Makes a checkpoint of the files that were written: writes the index and renames the folder.
    ///
    /// # Errors
    /// If a file is not there as long as it was written, or the disk refuses.
    pub(super) fn commit(&self, index: &str, files: &[(String, usize)]) -> Result<()> {
        for (name, bytes) in files {
            let path = self.saving.join(name);
            let there =
                fs::metadata(&path).map_err(|e| file_error(&path, format!("{e}; ranks share one disk")))?;
            if there.len() != *bytes as u64 {
                return Err(file_error(&path, format!("got {} bytes, {bytes} were written", there.len())));
            }
        }
        let done = || -> io::Result<()> {
            let mut file = fs::File::create_new(self.saving.join(INDEX))?;
            file.write_all(index.as_bytes())?;
            file.sync_all()?;
            sync_folder(&self.saving)?;
            if self.path.join(INDEX).exists() {
                fs::rename(&self.path, &self.old)?;
            }
            fs::rename(&self.saving, &self.path)?;
            sync_folder(self.parent())
        };
        done().map_err(|e| file_error(&self.path, e))?;
        self.remove(&self.old);
        Ok(())
    }

    /// The folder that they are in.
    fn parent(&self) -> &Path {
        self.path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    /// Removes the files of a save that failed.
    pub(super) fn discard(&self) {
        self.remove(&self.saving);
    }

    /// A folder that cannot be removed now is removed by the next save.
    fn remove(&self, folder: &Path) {
        let _ = fs::remove_dir_all(folder);
    }
}

/// A name in a folder that no save gives; none if there is no folder.
fn foreign(folder: &Path) -> Option<String> {
    let names =
        fs::read_dir(folder).ok()?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is_ours = |name: &str| {
        let number = name.strip_prefix("rank-").and_then(|rest| rest.strip_suffix(".safetensors"));
        name == INDEX || number.is_some_and(|number| number.parse::<usize>().is_ok())
    };
    names.into_iter().find(|name| !is_ours(name))
}
