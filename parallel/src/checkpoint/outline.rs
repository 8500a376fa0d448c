//! [`Outline`]: who writes what where, as all ranks agree.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::assign::{Described, Whole, assign};
use super::contents::{Contents, contents};
use super::folder::Folder;
use super::stream::Pinned;
use crate::comm::Comm;
use crate::tell::{all_ok, tell};
use crate::{Error, Result};

/// The tensors, and what stands in each rank's file.
pub(super) struct Outline {
    pub(super) wholes: BTreeMap<String, Whole>,
    pub(super) contents: Vec<Contents>,
}

/// What a rank says before a save.
#[derive(Serialize, Deserialize)]
struct Intent {
    folder: String,
    parts: Vec<Described>,
}

impl Outline {
    /// Of what all ranks have. The first makes the folder before any other rank hears of it.
    ///
    /// # Errors
    /// On every rank, if some rank's parts are not well-formed, ranks disagree on a tensor or the folder, no rank has some of
    /// a tensor's elements, or the folder cannot be made.
    pub(super) fn agree(comm: &Comm, folder: &Folder, parts: &[Pinned]) -> Result<Outline> {
        let told = tell(comm, &intend(comm, folder, parts).map_err(|e| e.to_string()))?;
        let told = all_ok(comm, told)?;
        if let Some(rank) = told.iter().position(|other| other.folder != told[0].folder) {
            let (first, other) = (&told[0].folder, &told[rank].folder);
            return Err(Error::Config(format!("save: rank 0 has {first}, rank {rank} has {other}")));
        }
        let described: Vec<Vec<Described>> = told.into_iter().map(|intent| intent.parts).collect();
        let wholes = assign(&described).map_err(|why| Error::Config(format!("save: {why}")))?;
        let contents = contents(&wholes, comm.size());
        Ok(Outline { wholes, contents })
    }
}

fn intend(comm: &Comm, folder: &Folder, parts: &[Pinned]) -> Result<Intent> {
    let parts = parts.iter().map(Pinned::describe).collect::<Result<_>>()?;
    if comm.rank() == 0 {
        folder.begin()?;
    }
    Ok(Intent { folder: folder.path().display().to_string(), parts })
}
