//! [`Saver`]: starts saves and waits for them. [`SaveJob`]: one save, on a thread of its own.
//!
//! ```text
//! save()    ─► thread: all ranks exchange their parts ─► plan ─► each writes its file, chunk by chunk ─► rank 0 commits
//! release() ◄─          all chunks are copied  ◄─ thread that copies    exchanging progress every 200 ms       │
//! wait()    ◄──────────────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Both threads are the save's own, so a save takes part of a core, and none of the threads that compute.
//! Ranks exchange their progress, so a disk may be slower than the communicator's timeout, all ranks stop soon after one fails,
//! and all know the cause.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_tensor::DType;
use serde::{Deserialize, Serialize};

use super::background::Background;
use super::chunk::Chunk;
use super::finite::check_finite;
use super::folder::Folder;
use super::index::{Checksum, Index, file_name};
use super::plan::{Contents, PartInfo, SavePlan, assign, contents};
use super::queue::{Closing, Queue};
use super::stream::Stream;
use super::{BLOCK, Settings, file_error};
use crate::all_gather::{all_gather_object, all_ok};
use crate::comm::Comm;
use crate::sharded_tensor::ShardedTensor;
use crate::{Error, Result};

/// Saves the parts of all ranks as one checkpoint, in the background and atomically: whenever a run is killed, the last
/// checkpoint that was complete is found. Every rank has one.
///
/// A save streams from the tensors themselves through a few chunks of 4 MiB. It copies nothing else but the buffers
/// of modules (running statistics), which passes change; and what the disk has not taken when an update is about to write the tensors
/// ([`Saver::release`]).
#[derive(Debug)]
pub struct Saver {
    comm: Comm,
    block: usize,
    finite: bool,
    pub(super) create: Create,
    memory: usize,
    logs: Vec<(PathBuf, File)>,
    background: Background,
    /// Of the save that is under way, or was last.
    queue: Option<Arc<Queue>>,
}

impl Saver {
    /// A saver for the ranks of `comm`, with a communicator of its own, so that its messages do not mix with those
    /// of training. All ranks call this, in the same order relative to the other groups that they make.
    ///
    /// # Errors
    /// Never: the new group has all members of `comm`.
    pub fn new(comm: &Comm) -> Result<Saver> {
        let comm = comm.group(&(0..comm.size()).collect::<Vec<_>>())?;
        let (create, background): (Create, _) = (|path| File::create_new(path), Background::default());
        let (block, memory) = (BLOCK, MEMORY);
        Ok(Saver { comm, block, finite: false, create, memory, logs: Vec::new(), background, queue: None })
    }

    /// Sets the size of the blocks that have a checksum each, [`BLOCK`] if this is not called. Larger blocks mean fewer
    /// checksums in the index.
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

    /// Sets how many bytes of the tensors may be copied into memory when they are about to be written and the disk is slower: 1 GiB if
    /// this is not called. With 0 [`Saver::release`] waits until the disk has taken almost all.
    #[must_use]
    pub fn with_memory(mut self, bytes: usize) -> Saver {
        self.memory = bytes;
        self
    }

    /// Whether a save fails that has NaN or infinity in a parameter or an optimizer's state, or NaN in a buffer. The checkpoint before
    /// stays then.
    #[must_use]
    pub fn require_finite(mut self, finite: bool) -> Saver {
        self.finite = finite;
        self
    }

    /// Files that the next save puts on disk before the checkpoint is complete, with their paths, such as a log of the steps that led to
    /// it. A power failure then leaves no checkpoint that is ahead of its log. Only rank 0's are.
    pub fn sync_first(&mut self, logs: Vec<(PathBuf, File)>) {
        self.logs = logs;
    }

    /// Begins to save parts of tensors as the checkpoint `folder`, which all ranks share, in the place of one that
    /// is there; first waits for the save before. All ranks call it; rank 0's settings are saved. Until
    /// [`Saver::release`] or [`Saver::wait`] has returned, the tensors must not be written: a write is detected (by the tensor's version)
    /// and makes `wait` fail. Buffers of modules are copied first and may be written.
    ///
    /// A tensor that several ranks have is written once, so their copies must be equal. Buffers may differ: the first rank's are
    /// written.
    ///
    /// # Errors
    /// The error of the previous save, if it failed (see [`Saver::wait`]); or if the path does not end in a name,
    /// or a buffer cannot be copied.
    pub fn save(
        &mut self,
        folder: impl AsRef<Path>,
        parts: Vec<ShardedTensor>,
        settings: &Settings,
    ) -> Result<()> {
        self.wait()?;
        let (comm, folder) = (self.comm.clone(), Folder::new(folder.as_ref())?);
        let new = |part| VersionedPart::new(part, self.finite);
        let parts = parts.into_iter().map(new).collect::<Result<_>>()?;
        let (settings, block, create) = (settings.clone(), self.block, self.create);
        let (logs, queue) = (std::mem::take(&mut self.logs), Arc::new(Queue::new(self.memory)));
        let copied = Arc::clone(&queue);
        let job = SaveJob { comm, folder, parts, settings, block, create, logs, queue };
        self.background.start(&self.comm, "saves a checkpoint", move || {
            // Also if it panics.
            let _closing = Closing(Arc::clone(&job.queue));
            job.run()
        })?;
        self.queue = Some(copied);
        Ok(())
    }

    /// Whether no save is under way.
    pub fn is_idle(&self) -> bool {
        self.background.is_idle()
    }

    /// Waits until the tensors of the save that is under way may be written, if one is: their values are on disk or copied. The checkpoint
    /// is complete once [`Saver::wait`] has returned.
    ///
    /// # Errors
    /// That of a save which has failed by now ([`Saver::wait`]).
    pub fn release(&mut self) -> Result<()> {
        if let Some(queue) = &self.queue {
            queue.release();
        }
        if self.is_idle() { self.wait() } else { Ok(()) }
    }

    /// Waits for the save that is under way, if one is. Then the checkpoint is complete and on disk.
    ///
    /// # Errors
    /// The error of any rank, on every rank: parts that are not well-formed or do not make up whole tensors, a disk that
    /// refuses, a tensor that was written meanwhile, a rank that is gone. Then there is no new checkpoint, and the old one
    /// is still there.
    pub fn wait(&mut self) -> Result<()> {
        self.queue = None;
        self.background.wait()
    }
}

/// A rank's folder and parts, exchanged before a save.
#[derive(Serialize, Deserialize)]
struct LocalPlan {
    folder: String,
    parts: Vec<PartInfo>,
}

impl SavePlan {
    /// The plan for the parts of all ranks. Rank 0 makes the folder before the other ranks go on.
    ///
    /// # Errors
    /// On every rank, if some rank's parts are not well-formed, ranks disagree on a tensor or the folder, no rank has some of
    /// a tensor's elements, or the folder cannot be made.
    pub(super) fn agree(comm: &Comm, folder: &Folder, parts: &[VersionedPart]) -> Result<SavePlan> {
        let told = all_gather_object(comm, &local_plan(comm, folder, parts).map_err(|e| e.to_string()))?;
        let told = all_ok(comm, told)?;
        if let Some(rank) = told.iter().position(|other| other.folder != told[0].folder) {
            let (first, other) = (&told[0].folder, &told[rank].folder);
            return Err(Error::Config(format!("save: rank 0 has {first}, rank {rank} has {other}")));
        }
        let described: Vec<Vec<PartInfo>> = told.into_iter().map(|plan| plan.parts).collect();
        let wholes = assign(&described).map_err(|why| Error::Config(format!("save: {why}")))?;
        let contents = contents(&wholes, comm.size());
        Ok(SavePlan { wholes, contents })
    }
}

fn local_plan(comm: &Comm, folder: &Folder, parts: &[VersionedPart]) -> Result<LocalPlan> {
    let parts = parts.iter().map(VersionedPart::describe).collect::<Result<_>>()?;
    if comm.rank() == 0 {
        folder.begin()?;
    }
    Ok(LocalPlan { folder: folder.path().display().to_string(), parts })
}

/// Bytes of tensors that are copied at most when they are about to be written.
const MEMORY: usize = 1 << 30;

/// How long a rank writes between two exchanges of progress.
const INTERVAL: Duration = Duration::from_millis(200);

/// Bytes that are checked and copied at a time: they are in the second-level cache when they are read again.
const PIECE: usize = 1 << 16;

/// How the files are made.
pub(super) type Create = fn(&Path) -> io::Result<File>;

/// A save.
pub(super) struct SaveJob {
    pub(super) comm: Comm,
    pub(super) folder: Folder,
    pub(super) parts: Vec<VersionedPart>,
    pub(super) settings: Settings,
    pub(super) block: usize,
    pub(super) create: Create,
    /// Files that are put on disk before the checkpoint is complete.
    pub(super) logs: Vec<(PathBuf, File)>,
    pub(super) queue: Arc<Queue>,
}

/// Tells a queue that no more chunks come, also when the thread that copies them panics.
struct End<'a>(&'a Queue);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl SaveJob {
    /// Writes this rank's file; when all ranks have, the first makes a checkpoint of the files.
    ///
    /// # Errors
    /// The error of any rank, on every rank; or the error that ended the run.
    pub(super) fn run(self) -> Result<()> {
        let plan = SavePlan::agree(&self.comm, &self.folder, &self.parts)?;
        let done = self.write(&plan).and_then(|checksums| {
            let committed = match self.comm.rank() {
                0 => self.commit(&plan, &checksums).map_err(|e| e.to_string()),
                _ => Ok(()),
            };
            all_ok(&self.comm, all_gather_object(&self.comm, &committed)?)
        });
        // Rank 0 alone removes it, since rank 0 begins the next save.
        if done.is_err() && self.comm.rank() == 0 {
            self.folder.discard();
        }
        done.map(drop)
    }

    /// Copies and writes; the checksums of all ranks.
    fn write(&self, plan: &SavePlan) -> Result<Vec<Vec<u64>>> {
        std::thread::scope(|scope| {
            let copy = std::thread::Builder::new().name("checkpoint copy".into());
            let copy = copy.spawn_scoped(scope, || self.copy(plan));
            // Without a thread the chunks are missed, and the others hear of it.
            if let Err(e) = copy {
                self.queue.push(Err(Error::Config(format!("save: no thread: {e}"))));
                self.queue.end();
            }
            let written = self.write_copied();
            self.queue.close();
            written
        })
    }

    /// Copies what this rank's file has.
    fn copy(&self, plan: &SavePlan) {
        let _end = End(&self.queue);
        if let Err(e) = self.fill(&plan.contents[self.comm.rank()]) {
            self.queue.push(Err(e));
        }
    }

    fn fill(&self, contents: &Contents) -> Result<()> {
        let mut filler = Filler { queue: &self.queue, chunk: self.queue.chunk(), wanted: true };
        filler.add(&contents.header);
        for piece in &contents.pieces {
            for elements in piece.blocks(self.block) {
                let mut checksum = Checksum::new(0);
                self.parts[piece.part].read(elements, |bytes| {
                    checksum.update(bytes);
                    filler.add(bytes);
                })?;
                filler.chunk.checksums.push(checksum.digest());
                if !filler.wanted {
                    return Ok(());
                }
            }
        }
        filler.push();
        Ok(())
    }

    fn write_copied(&self) -> Result<Vec<Vec<u64>>> {
        let mut writing = self.begin();
        let mut checksums: Vec<Option<Vec<u64>>> = vec![None; self.comm.size()];
        while checksums.contains(&None) {
            let complete = writing.as_mut().map_err(|e| e.clone()).and_then(Writing::go_on);
            let all = all_ok(&self.comm, all_gather_object(&self.comm, &complete)?)?;
            for (known, complete) in checksums.iter_mut().zip(all) {
                *known = complete.or(known.take());
            }
        }
        Ok(checksums.into_iter().flatten().collect())
    }

    fn begin(&self) -> Result<Writing<'_>, String> {
        let path = self.folder.saving().join(file_name(self.comm.rank()));
        let file = (self.create)(&path).map_err(|e| file_error(&path, e).to_string())?;
        Ok(Writing { path, stream: Some(Stream::new(file)), checksums: Vec::new(), queue: &self.queue })
    }

    fn commit(&self, plan: &SavePlan, checksums: &[Vec<u64>]) -> Result<()> {
        for (path, log) in &self.logs {
            log.sync_data().map_err(|e| file_error(path, e))?;
        }
        let index = Index::new(&self.settings, self.block, plan, checksums);
        let text = index.text().map_err(|why| file_error(self.folder.saving(), why))?;
        let files: Vec<(String, usize)> = index.files.into_iter().map(|f| (f.name, f.bytes)).collect();
        self.folder.commit(&text, &files)
    }
}

/// Gathers the bytes of a file into chunks for a queue.
struct Filler<'a> {
    queue: &'a Queue,
    chunk: Chunk,
    /// Whether the queue wants more.
    wanted: bool,
}

impl Filler<'_> {
    fn add(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.wanted {
            bytes = self.chunk.fill(bytes);
            if self.chunk.is_full() {
                self.push();
            }
        }
    }

    fn push(&mut self) {
        self.wanted = self.queue.push(Ok(std::mem::take(&mut self.chunk)));
        // Only now: the wait may have been for a chunk that is used again.
        self.chunk = self.queue.chunk();
    }
}

/// A rank's file, half written.
struct Writing<'a> {
    path: PathBuf,
    stream: Option<Stream>,
    /// Of the blocks that are written, in order.
    checksums: Vec<u64>,
    /// The chunks that are not written yet.
    queue: &'a Queue,
}

impl Writing<'_> {
    /// Writes chunks for about [`INTERVAL`]; returns the checksums of all blocks to the call that completes the file.
    fn go_on(&mut self) -> Result<Option<Vec<u64>>, String> {
        let start = Instant::now();
        if let Some(stream) = &mut self.stream {
            while let Some(chunk) = self.queue.pop() {
                let chunk = chunk.map_err(|e| file_error(&self.path, e).to_string())?;
                stream.add(&chunk).map_err(|e| file_error(&self.path, e).to_string())?;
                self.checksums.extend_from_slice(&chunk.checksums);
                self.queue.recycle(chunk);
                if start.elapsed() > INTERVAL {
                    return Ok(None);
                }
            }
        }
        let Some(stream) = self.stream.take() else { return Ok(None) };
        stream.finish().map_err(|e| file_error(&self.path, e).to_string())?;
        Ok(Some(std::mem::take(&mut self.checksums)))
    }
}

/// A part that must not change while it is written.
pub(super) struct VersionedPart {
    pub(super) part: ShardedTensor,
    version: u64,
    /// Whether it must have finite numbers only.
    finite: bool,
}

impl VersionedPart {
    /// As it is now; a buffer is copied, since passes change it.
    ///
    /// # Errors
    /// If a buffer cannot be copied.
    pub(super) fn new(part: ShardedTensor, finite: bool) -> Result<VersionedPart> {
        let values = if part.buffer { part.values.copy()? } else { part.values };
        let version = values.version();
        Ok(VersionedPart { part: ShardedTensor { values, ..part }, version, finite })
    }

    /// Its description for the other ranks.
    ///
    /// # Errors
    /// If it is not well-formed or has no elements to write.
    pub(super) fn describe(&self) -> Result<PartInfo> {
        let ShardedTensor { name, values, buffer, .. } = &self.part;
        if values.device().is_meta() {
            return Err(Error::Config(format!("save: {name} is on meta and has no elements")));
        }
        let place = self.part.place()?;
        Ok(PartInfo { name: name.clone(), dtype: values.dtype(), place, buffer: *buffer })
    }

    /// Gives the bytes of some elements to `take`, piece by piece. The tensor is held for reading only meanwhile.
    ///
    /// # Errors
    /// If the tensor has been written since it was pinned, cannot be read, or must be finite and is not.
    pub(super) fn read(&self, elements: Range<usize>, mut take: impl FnMut(&[u8])) -> Result<()> {
        let values = &self.part.values;
        let (size, count) = (values.dtype().size(), elements.len());
        let here = values.view_into(elements.start, &[count])?;
        // A GPU's elements are waited for.
        let here = if here.device().is_cuda() { here.to_device(here.device().host(), true)? } else { here };
        let bytes = here.read_bytes("save")?;
        let bytes = &bytes[here.offset() * size..][..count * size];
        for piece in bytes.chunks(PIECE) {
            if self.finite {
                check_finite(&self.part, values.dtype(), piece)
                    .map_err(|why| Error::Config(format!("save: {why}")))?;
            }
            match values.dtype() {
                // Any byte but 0 is true, which other readers need not know.
                DType::Bool => take(&Vec::from_iter(piece.iter().map(|&byte| u8::from(byte != 0)))),
                _ => take(piece),
            }
        }
        if values.version() != self.version {
            let why = "it was written while it was being saved; wait for the save first";
            return Err(phalanx_nn::Error::invalid(format!("saving {}", self.part.name), why).into());
        }
        Ok(())
    }
}
