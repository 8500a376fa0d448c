//! [`Saver`]: starts saves, and waits for them.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::thread::JoinHandle;

use super::folder::Folder;
use super::job::{Create, Job};
use super::stream::Pinned;
use super::{BLOCK, Settings};
use crate::comm::Comm;
use crate::part::Part;
use crate::{Error, Result};

/// Saves what ranks have as one checkpoint, in the background and atomically: whenever a run is killed, the last checkpoint
/// that was complete is found. Every rank has one.
///
/// A save streams from the tensors themselves through one buffer of [`BLOCK`] bytes. It copies nothing else but the buffers
/// of modules (running statistics), which passes change.
#[derive(Debug)]
pub struct Saver {
    comm: Comm,
    block: usize,
    pub(super) create: Create,
    running: Option<JoinHandle<Result<()>>>,
}

impl Saver {
    /// For all ranks of a group, on a group of its own; they make it at the same place.
    ///
    /// # Errors
    /// Never for the group of all.
    pub fn new(comm: &Comm) -> Result<Saver> {
        let comm = comm.group(&(0..comm.size()).collect::<Vec<_>>())?;
        Ok(Saver { comm, block: BLOCK, create: |path| File::create_new(path), running: None })
    }

    /// With a buffer of another size; a larger one makes a smaller index.
    ///
    /// # Errors
    /// If it is not a multiple of 8 bytes from 8 to 1 GiB.
    pub fn with_block(mut self, bytes: usize) -> Result<Saver> {
        if bytes == 0 || !bytes.is_multiple_of(8) || bytes > 1 << 30 {
            let why = format!("save: got blocks of {bytes} bytes, wanted a multiple of 8 up to 1 GiB");
            return Err(Error::Config(why));
        }
        self.block = bytes;
        Ok(self)
    }

    /// Begins to save parts of tensors as the checkpoint `folder`, which all ranks share, in the place of one that is there;
    /// first waits for the save before. All ranks call it; rank 0's settings are saved. Until [`Saver::wait`] has returned,
    /// the tensors must not be written, which is found; buffers may be.
    ///
    /// What several ranks have is written once: their copies have to be equal. Buffers need not be, and are the first's.
    ///
    /// # Errors
    /// Of the save before, as [`Saver::wait`]; or if the path does not end in a name, or a buffer cannot be copied.
    pub fn save(&mut self, folder: impl AsRef<Path>, parts: Vec<Part>, settings: &Settings) -> Result<()> {
        self.wait()?;
        let (comm, folder) = (self.comm.clone(), Folder::new(folder.as_ref())?);
        let parts = parts.into_iter().map(Pinned::new).collect::<Result<_>>()?;
        let (settings, block, create) = (settings.clone(), self.block, self.create);
        self.start(Job { comm, folder, parts, settings, block, create })
    }

    fn start(&mut self, job: Job) -> Result<()> {
        let comm = job.comm.clone();
        let work = move || {
            catch_unwind(AssertUnwindSafe(|| job.run())).unwrap_or_else(|_| {
                let why = "the thread that saves a checkpoint panicked";
                comm.fail(why);
                Err(Error::Config(why.into()))
            })
        };
        let spawned = std::thread::Builder::new().name("checkpoint".into()).spawn(work);
        self.running = Some(spawned.map_err(|e| Error::Config(format!("save: no thread: {e}")))?);
        Ok(())
    }

    /// Whether no save is under way.
    pub fn is_idle(&self) -> bool {
        self.running.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the save that is under way, if one is. Then the checkpoint is complete and on disk.
    ///
    /// # Errors
    /// What went wrong on any rank, on every rank: parts that are not well-formed or do not make up whole tensors, a disk that
    /// refuses, a tensor that was written meanwhile, a rank that is gone. Then there is no new checkpoint, and the old one
    /// is still there.
    pub fn wait(&mut self) -> Result<()> {
        let Some(running) = self.running.take() else { return Ok(()) };
        running.join().unwrap_or_else(|_| Err(Error::Config("save: its thread panicked".into())))
    }
}

impl Drop for Saver {
    /// Waits, so that no thread is left behind; what goes wrong is told by [`Saver::wait`] alone.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}
