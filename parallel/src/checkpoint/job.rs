//! [`Job`]: a save. It runs on a thread of its own.
//!
//! Ranks tell each other how they are every so often: so a disk may be slower than ranks wait for each other, all stop soon
//! when one fails, and all know the cause.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::folder::Folder;
use super::index::{Index, file_name};
use super::outline::Outline;
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
    pub(super) parts: Vec<Pinned>,
    pub(super) settings: Settings,
    pub(super) block: usize,
    pub(super) create: Create,
}

/// How a rank is.
#[derive(Serialize, Deserialize)]
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
    pub(super) fn run(self) -> Result<()> {
        let outline = Outline::agree(&self.comm, &self.folder, &self.parts)?;
        let done = self.write(&outline).and_then(|checksums| {
            let committed = match self.comm.rank() {
                0 => self.commit(&outline, &checksums).map_err(|e| e.to_string()),
                _ => Ok(()),
            };
            all_ok(&self.comm, tell(&self.comm, &committed)?)
        });
        // By one rank alone, which is the one to begin the next save.
        if done.is_err() && self.comm.rank() == 0 {
            self.folder.give_up();
        }
        done.map(drop)
    }

    /// The checksums of all ranks.
    fn write(&self, outline: &Outline) -> Result<Vec<Vec<u64>>> {
        let mut writing = self.begin(outline);
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

    fn begin<'a>(&'a self, outline: &'a Outline) -> Result<Writing<'a>, String> {
        let contents = &outline.contents[self.comm.rank()];
        let path = self.folder.saving().join(file_name(self.comm.rank()));
        let stream = (self.create)(&path).and_then(|file| Stream::new(file, &contents.header, self.block));
        let stream = Some(stream.map_err(|e| file_error(&path, e).to_string())?);
        let blocks = contents.pieces.iter().flat_map(move |piece| {
            piece.blocks(self.block).map(move |elements| (&self.parts[piece.part], elements))
        });
        Ok(Writing { path, stream, blocks: Box::new(blocks), checksums: Vec::new() })
    }

    fn commit(&self, outline: &Outline, checksums: &[Vec<u64>]) -> Result<()> {
        let index = Index::new(&self.settings, self.block, outline, checksums);
        let text = index.text().map_err(|why| file_error(self.folder.saving(), why))?;
        let files: Vec<(String, usize)> = index.files.into_iter().map(|f| (f.name, f.bytes)).collect();
        self.folder.commit(&text, &files)
    }
}

/// A rank's file, half written.
struct Writing<'a> {
    path: PathBuf,
    stream: Option<Stream>,
    /// What is left: elements of parts.
    blocks: Box<dyn Iterator<Item = (&'a Pinned, Range<usize>)> + 'a>,
    /// Of a file that is complete.
    checksums: Vec<u64>,
}

impl Writing<'_> {
    /// Writes for a while.
    fn go_on(&mut self) -> Result<Progress, String> {
        let start = Instant::now();
        if let Some(stream) = &mut self.stream {
            for (part, elements) in self.blocks.by_ref() {
                stream.add(part, elements).map_err(|why| format!("{}: {why}", self.path.display()))?;
                if start.elapsed() > INTERVAL {
                    return Ok(Progress::Writing);
                }
            }
        }
        if let Some(stream) = self.stream.take() {
            self.checksums = stream.finish().map_err(|e| file_error(&self.path, e).to_string())?;
        }
        Ok(Progress::Written(self.checksums.clone()))
    }
}
