//! [`Job`]: a save, once it is known who writes what. It runs on a thread of its own.
//!
//! Ranks tell each other how they are every so often: so a disk may be slower than ranks wait for each other, all stop soon
//! when one fails, and all know the cause.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::assign::Whole;
use super::contents::Contents;
use super::folder::Folder;
use super::index::{Index, file_name};
use super::stream::{Pinned, Stream};
use super::{Settings, file_error};
use crate::Result;
use crate::comm::Comm;
use crate::tell::{all_ok, tell};

/// How long a rank writes before it hears of the others.
const INTERVAL: Duration = Duration::from_millis(200);

/// How the files are made.
pub(super) type Create = fn(&Path) -> io::Result<File>;

/// A save.
pub(super) struct Job {
    pub(super) comm: Comm,
    pub(super) folder: Folder,
    pub(super) settings: Settings,
    pub(super) block: usize,
    pub(super) wholes: BTreeMap<String, Whole>,
    pub(super) contents: Vec<Contents>,
    /// This rank's parts that it writes some of.
    pub(super) parts: BTreeMap<usize, Pinned>,
    pub(super) create: Create,
}

/// How a rank is.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Progress {
    Writing,
    /// With the checksums of its blocks.
    Written(Vec<u64>),
}

impl Job {
    /// Writes this rank's file; when all ranks have, the first makes a checkpoint of the files.
    ///
    /// # Errors
    /// What went wrong on any rank, on every rank; or what ended the run of all.
    pub(super) fn run(mut self) -> Result<()> {
        let checksums = self.write().inspect_err(|_| self.give_up())?;
        // The tensors are free as soon as everything is written, whatever the disk does now.
        self.parts.clear();
        let comm = self.comm.clone();
        let committed = match comm.rank() {
            0 => self.commit(&checksums).inspect_err(|_| self.give_up()).map_err(|e| e.to_string()),
            _ => Ok(()),
        };
        all_ok(&comm, tell(&comm, &committed)?).map(drop)
    }

    /// The checksums of all ranks.
    fn write(&self) -> Result<Vec<Vec<u64>>> {
        let mut writing = self.begin();
        loop {
            let progress = writing.as_mut().map_err(|e| e.clone()).and_then(Writing::go_on);
            let all = all_ok(&self.comm, tell(&self.comm, &progress)?)?;
            let written = |progress| match progress {
                Progress::Written(checksums) => Some(checksums),
                Progress::Writing => None,
            };
            if let Some(checksums) = all.into_iter().map(written).collect() {
                return Ok(checksums);
            }
        }
    }

    fn begin(&self) -> Result<Writing<'_>, String> {
        let contents = &self.contents[self.comm.rank()];
        let path = self.folder.saving().join(file_name(self.comm.rank()));
        let stream = (self.create)(&path).and_then(|file| Stream::new(file, &contents.header, self.block));
        let blocks = contents.pieces.iter().flat_map(|piece| {
            let shifted =
                move |block: std::ops::Range<usize>| piece.first + block.start..piece.first + block.end;
            piece.blocks(self.block).map(move |block| (piece.part, shifted(block)))
        });
        let stream = Some(stream.map_err(|e| file_error(&path, e).to_string())?);
        Ok(Writing { path, stream, blocks: Box::new(blocks), parts: &self.parts, written: Vec::new() })
    }

    fn commit(&self, checksums: &[Vec<u64>]) -> Result<()> {
        let index = Index::new(&self.settings, self.block, &self.wholes, &self.contents, checksums);
        let text = index.text().map_err(|why| file_error(self.folder.saving(), why))?;
        let files: Vec<(String, usize)> = index.files.into_iter().map(|f| (f.name, f.bytes)).collect();
        self.folder.commit(&text, &files)
    }

    /// By one rank alone, which then begins the next save.
    fn give_up(&self) {
        if self.comm.rank() == 0 {
            self.folder.give_up();
        }
    }
}

/// A rank's file, half written.
struct Writing<'a> {
    path: std::path::PathBuf,
    stream: Option<Stream>,
    /// Parts' numbers, and elements of those.
    blocks: Box<dyn Iterator<Item = (usize, std::ops::Range<usize>)> + 'a>,
    parts: &'a BTreeMap<usize, Pinned>,
    written: Vec<u64>,
}

impl Writing<'_> {
    /// Writes for a while.
    fn go_on(&mut self) -> Result<Progress, String> {
        let Some(stream) = &mut self.stream else { return Ok(Progress::Written(self.written.clone())) };
        let start = Instant::now();
        for (part, elements) in self.blocks.by_ref() {
            let Some(part) = self.parts.get(&part) else { continue };
            stream.add(part, elements).map_err(|why| format!("{}: {why}", self.path.display()))?;
            if start.elapsed() > INTERVAL {
                return Ok(Progress::Writing);
            }
        }
        if let Some(stream) = self.stream.take() {
            self.written = stream.finish().map_err(|e| file_error(&self.path, e).to_string())?;
        }
        Ok(Progress::Written(self.written.clone()))
    }
}
