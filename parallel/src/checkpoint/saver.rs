//! [`Saver`]: starts saves, and waits for them.

use std::collections::BTreeMap;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::thread::JoinHandle;

use serde::{Deserialize, Serialize};

use super::assign::{Described, assign};
use super::contents::contents;
use super::folder::Folder;
use super::job::{Create, Job};
use super::stream::Pinned;
use super::{BLOCK, Settings};
use crate::comm::Comm;
use crate::part::Part;
use crate::tell::{all_ok, tell};
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

/// What a rank says before a save.
#[derive(Serialize, Deserialize)]
struct Intent {
    folder: String,
    parts: Vec<Described>,
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
            let why = format!("checkpoint: got blocks of {bytes} bytes, wanted a multiple of 8 up to 1 GiB");
            return Err(Error::Config(why));
        }
        self.block = bytes;
        Ok(self)
    }

    /// Begins to save parts of tensors as the checkpoint `folder`, which all ranks share, in the place of one that is there;
    /// first waits for the save before. All ranks call it; rank 0's settings are saved. Until [`Saver::wait`] has returned,
    /// the tensors must not be written, which is found; buffers may be.
    ///
    /// What several ranks have is written once: their copies have to be equal.
    ///
    /// # Errors
    /// On every rank, if some rank's parts are not well-formed, ranks disagree on a tensor, no rank has some of its elements,
    /// or the folder cannot be made.
    pub fn save(&mut self, folder: impl AsRef<Path>, parts: Vec<Part>, settings: &Settings) -> Result<()> {
        self.wait()?;
        let folder = folder.as_ref();
        let told = tell(&self.comm, &self.intend(folder, &parts).map_err(|e| e.to_string()))?;
        let told = all_ok(&self.comm, told)?;
        if let Some(rank) = told.iter().position(|other| other.folder != told[0].folder) {
            let (first, other) = (&told[0].folder, &told[rank].folder);
            return Err(Error::Config(format!("save: rank 0 has {first}, rank {rank} has {other}")));
        }
        let described: Vec<Vec<Described>> = told.into_iter().map(|intent| intent.parts).collect();
        let wholes = assign(&described).map_err(|why| Error::Config(format!("save: {why}")))?;
        let contents = contents(&wholes, self.comm.size());
        let mut pinned = BTreeMap::new();
        for placed in &contents[self.comm.rank()].pieces {
            let part = &parts[placed.part];
            let values = if part.buffer { part.values.copy()? } else { part.values.clone() };
            pinned.entry(placed.part).or_insert_with(|| Pinned::new(&part.name, values));
        }
        let (comm, create, settings) = (self.comm.clone(), self.create, settings.clone());
        let folder = Folder::new(folder)?;
        self.start(Job { comm, folder, settings, block: self.block, wholes, contents, parts: pinned, create })
    }

    /// What this rank has. The first makes the folder before any other rank hears of it.
    fn intend(&self, folder: &Path, parts: &[Part]) -> Result<Intent> {
        let describe = |part: &Part| -> Result<Described> {
            if part.values.device().is_meta() {
                return Err(Error::Config(format!("save: {} is on meta and has no elements", part.name)));
            }
            let (name, dtype) = (part.name.clone(), part.values.dtype());
            Ok(Described { name, dtype, place: part.place()?, buffer: part.buffer })
        };
        let parts = parts.iter().map(describe).collect::<Result<_>>()?;
        if self.comm.rank() == 0 {
            Folder::new(folder)?.begin()?;
        }
        Ok(Intent { folder: folder.display().to_string(), parts })
    }

    fn start(&mut self, job: Job) -> Result<()> {
        let comm = self.comm.clone();
        let work = move || {
            let comm = job.comm.clone();
            catch_unwind(AssertUnwindSafe(|| job.run())).unwrap_or_else(|_| {
                let why = "the thread that saves a checkpoint panicked";
                comm.fail(why);
                Err(Error::Config(why.into()))
            })
        };
        let spawned = std::thread::Builder::new().name("checkpoint".into()).spawn(work);
        let spawned = spawned.inspect_err(|e| comm.fail(&format!("save: no thread: {e}")));
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
    /// What went wrong on any rank, on every rank: a disk that refuses, a tensor that was written meanwhile, a rank that is
    /// gone. Then there is no new checkpoint, and the old one is still there.
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
