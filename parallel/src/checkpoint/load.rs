//! Reading parts of a checkpoint, under any layout: the plan first, then the blocks that hold some of them.

use std::collections::HashSet;

use phalanx_kernels as kernels;
use phalanx_nn::Mismatch;
use phalanx_tensor::Tensor;

use super::index::{Piece, Stored};
use super::reader::{Reader, by_block};
use super::{Checkpoint, file_error};
use crate::Result;
use crate::comm::Comm;
use crate::part::{Overlap, Part, Place, fill};
use crate::tell::{all_ok, tell};

/// A part that is to be read, and whether it may be converted.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) part: Part,
    pub(super) converted: bool,
}

impl Wanted {
    /// In the dtype that was saved.
    pub(super) fn exactly(part: &Part) -> Wanted {
        Wanted { part: part.clone(), converted: false }
    }

    /// In its own dtype.
    pub(super) fn converted(part: &Part) -> Wanted {
        Wanted { part: part.clone(), converted: true }
    }
}

/// What pieces of a tensor, by their numbers, have of a part.
type Sources = Vec<(usize, Vec<Overlap>)>;

impl Checkpoint {
    /// Reads values into the tensors of parts, which must be of the dtype that was saved. Ranks need not read together.
    ///
    /// # Errors
    /// If tensors are not there or of another size or dtype; then nothing is changed. If a file cannot be read or is
    /// damaged; then some tensors have their new values and others have not.
    pub fn read(&self, parts: &[Part]) -> Result<()> {
        self.read_wanted(&Vec::from_iter(parts.iter().map(Wanted::exactly)))
    }

    /// [`Checkpoint::read`], which converts values to the dtypes of the parts.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub fn read_converted(&self, parts: &[Part]) -> Result<()> {
        self.read_wanted(&Vec::from_iter(parts.iter().map(Wanted::converted)))
    }

    /// [`Checkpoint::read`] on all ranks, each its parts. Every tensor of the checkpoint must be one that some rank reads.
    ///
    /// # Errors
    /// What goes wrong on any rank, on every rank; or tensors that no rank wants.
    pub fn load(&self, comm: &Comm, parts: &[Part]) -> Result<()> {
        let names = parts.iter().map(|part| &*part.name).collect();
        self.load_wanted(comm, &Vec::from_iter(parts.iter().map(Wanted::exactly)), &names)
    }

    /// Reads on all ranks; `known` are names that this rank has a use for, read or not.
    pub(super) fn load_wanted(&self, comm: &Comm, wanted: &[Wanted], known: &HashSet<&str>) -> Result<()> {
        let read = self.read_wanted(wanted).map_err(|e| e.to_string());
        let has = |name: &String| known.contains(name.as_str());
        let uses: Vec<bool> = self.index.tensors.keys().map(has).collect();
        let all = all_ok(comm, tell(comm, &read.map(|()| uses))?)?;
        let unused = |(number, name): (usize, &String)| {
            let used = all.iter().any(|uses| uses.get(number).is_some_and(|&used| used));
            (!used).then(|| name.clone())
        };
        let unexpected = self.index.tensors.keys().enumerate().filter_map(unused).collect();
        Ok(Mismatch { unexpected, ..Mismatch::default() }.check(&self.path.display().to_string())?)
    }

    fn read_wanted(&self, wanted: &[Wanted]) -> Result<()> {
        let (mut problems, mut plans) = (Mismatch::default(), Vec::new());
        for Wanted { part, converted } in wanted {
            let (name, place) = (&part.name, part.place()?);
            let Some(stored) = self.index.tensors.get(name) else {
                problems.missing.push(name.clone());
                continue;
            };
            if stored.shape.iter().product::<usize>() != place.whole() {
                problems.misshaped.push((name.clone(), stored.shape.clone(), place.shape));
                continue;
            }
            let (got, wanted) = (stored.dtype, part.values.dtype());
            if got != wanted && !converted && place.elements() > 0 {
                return Err(self.error(format!("tensor {name:?} was saved as {got}, wanted {wanted}")));
            }
            let sources = sources(stored, &place);
            if !fill(place.elements(), sources.iter().flat_map(|(_, overlaps)| overlaps.iter().copied())) {
                return Err(
                    self.error(format!("tensor {name:?} is incomplete: elements of {place:?} are missing"))
                );
            }
            plans.push((part, stored, sources));
        }
        problems.check(&self.path.display().to_string())?;
        let mut reader = Reader::new(&self.path, &self.index);
        plans
            .iter()
            .try_for_each(|(part, stored, sources)| self.read_part(&mut reader, part, stored, sources))
    }

    fn read_part(
        &self,
        reader: &mut Reader<'_>,
        part: &Part,
        stored: &Stored,
        sources: &Sources,
    ) -> Result<()> {
        if part.values.device().is_meta() {
            return Ok(());
        }
        let flat = part.values.with_shape(&[part.values.numel()])?;
        if stored.dtype == flat.dtype() && !flat.device().is_cuda() {
            return self.read_into(reader, &part.name, &mut flat.clone(), stored, sources);
        }
        let mut read = Tensor::empty(flat.shape(), stored.dtype, flat.device().host())?;
        self.read_into(reader, &part.name, &mut read, stored, sources)?;
        Ok(flat.clone().copy_from(&kernels::cast(&read, flat.dtype())?)?)
    }

    /// Reads what pieces have of a tensor of one dimension.
    fn read_into(
        &self,
        reader: &mut Reader<'_>,
        name: &str,
        to: &mut Tensor,
        stored: &Stored,
        sources: &Sources,
    ) -> Result<()> {
        let (size, start) = (stored.dtype.size(), to.offset());
        for (number, overlaps) in sources {
            let piece = &stored.pieces[*number];
            for (block, overlaps) in by_block(overlaps, self.index.block / size) {
                let bytes = reader.block(name, piece, size, block)?;
                let mut values = to.write_bytes("load")?;
                for Overlap { from, to, count } in overlaps {
                    let to = (start + to) * size;
                    values[to..to + count * size].copy_from_slice(&bytes[from * size..(from + count) * size]);
                }
            }
        }
        Ok(())
    }

    fn error(&self, why: String) -> crate::Error {
        file_error(&self.path, why)
    }
}

/// Which pieces have what of a part.
fn sources(stored: &Stored, place: &Place) -> Sources {
    let of = |(number, piece): (usize, &Piece)| (number, piece.place.overlaps(place));
    stored.pieces.iter().enumerate().map(of).filter(|(_, overlaps)| !overlaps.is_empty()).collect()
}
