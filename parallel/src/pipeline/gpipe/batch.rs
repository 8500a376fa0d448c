//! [`Batch`]: one tensor or several with the same number of rows, split into micro-batches and joined again.

use std::ops::{Index, IndexMut, Range};

use phalanx_nn::Error as NnError;
use phalanx_nn::autograd::Var;
use phalanx_tensor::Device;
use smallvec::SmallVec;

use crate::{Error, Result};

/// The input or output of a layer: one value or several.
#[derive(Clone, Debug)]
pub struct Batch(SmallVec<[Var; 2]>);

impl Batch {
    /// The only value.
    ///
    /// # Errors
    /// If there is none, or more than one.
    pub fn one(self) -> Result<Var> {
        let count = self.0.len();
        let mut values = self.0.into_iter();
        match (values.next(), values.next()) {
            (Some(value), None) => Ok(value),
            _ => Err(wrong(format!("got {count} values, wanted one"))),
        }
    }

    /// The values as an array: `let [x, y] = batch.many()?`.
    ///
    /// # Errors
    /// If the batch has another number of values.
    pub fn many<const N: usize>(self) -> Result<[Var; N]> {
        let count = self.0.len();
        let values: Result<[Var; N], _> = self.0.into_vec().try_into();
        values.map_err(|_| wrong(format!("got {count} values, wanted {N}")))
    }

    /// The values.
    pub fn values(&self) -> &[Var] {
        &self.0
    }

    /// The values.
    pub fn into_values(self) -> Vec<Var> {
        self.0.into_vec()
    }

    /// The batch of `f` of each value.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn map<E>(self, f: impl FnMut(Var) -> Result<Var, E>) -> Result<Batch, E> {
        Ok(Batch(self.0.into_iter().map(f).collect::<Result<_, E>>()?))
    }

    /// The number of rows, the size of the first dimension of every value.
    ///
    /// # Errors
    /// If there is no value, a value has no dimension, or their numbers of rows differ: rows would be lost.
    pub fn rows(&self) -> Result<usize> {
        let rows = |v: &Var| v.shape().first().copied();
        match self.0.first().and_then(rows) {
            Some(count) if self.0.iter().all(|v| rows(v) == Some(count)) => Ok(count),
            _ => {
                let shapes: Vec<&[usize]> = self.0.iter().map(Var::shape).collect();
                Err(wrong(format!("got values of shapes {shapes:?}, wanted the same number of rows in each")))
            }
        }
    }

    /// Refuses values that are not on `device`.
    pub(super) fn check_device(&self, device: Device) -> Result<()> {
        match self.0.iter().find(|v| v.device() != device) {
            Some(value) => Err(wrong(format!("got a value on {}, wanted it on {device}", value.device()))),
            None => Ok(()),
        }
    }
}

impl From<Var> for Batch {
    fn from(value: Var) -> Batch {
        Batch(SmallVec::from_iter([value]))
    }
}

impl From<&Var> for Batch {
    fn from(value: &Var) -> Batch {
        Batch::from(value.clone())
    }
}

impl From<Vec<Var>> for Batch {
    fn from(values: Vec<Var>) -> Batch {
        Batch(values.into())
    }
}

impl<const N: usize> From<[Var; N]> for Batch {
    fn from(values: [Var; N]) -> Batch {
        Batch(values.into_iter().collect())
    }
}

impl Index<usize> for Batch {
    type Output = Var;

    fn index(&self, i: usize) -> &Var {
        &self.0[i]
    }
}

impl IndexMut<usize> for Batch {
    fn index_mut(&mut self, i: usize) -> &mut Var {
        &mut self.0[i]
    }
}

/// A piece of a batch, and which rows it has.
pub type MicroBatchRows = (Batch, Range<usize>);

/// At most `micro_batches` pieces of one number of rows, the last one perhaps with fewer: 9 rows in 8 are 2, 2, 2, 2, 1.
/// This is `torch.chunk`'s rule, as in torchgpipe; `even_piece` would make 8 pieces, of 2 rows and of 1.
///
/// # Errors
/// If values have different numbers of rows.
pub fn scatter(batch: &Batch, micro_batches: usize) -> Result<Vec<MicroBatchRows>> {
    let rows = batch.rows()?;
    let size = rows.div_ceil(micro_batches.max(1)).max(1);
    let count = rows.div_ceil(size).max(1);
    let mut pieces: Vec<MicroBatchRows> =
        (0..count).map(|i| (Batch(SmallVec::new()), i * size..((i + 1) * size).min(rows))).collect();
    for value in &batch.0 {
        let values = if count == 1 { SmallVec::from_iter([value.clone()]) } else { value.split(size, 0)? };
        pieces.iter_mut().zip(values).for_each(|(piece, value)| piece.0.0.push(value));
    }
    Ok(pieces)
}

/// The pieces below each other; the reverse of [`scatter`].
///
/// # Errors
/// If pieces have different numbers of values, or their values do not fit.
pub fn gather(pieces: Vec<Batch>) -> Result<Batch> {
    let counts: Vec<usize> = pieces.iter().map(|piece| piece.0.len()).collect();
    let count = counts.first().copied().unwrap_or(0);
    if counts.iter().any(|&other| other != count) {
        return Err(wrong(format!("got micro-batches of {counts:?} values, wanted the same number of each")));
    }
    if pieces.len() == 1 {
        return Ok(pieces.into_iter().fold(Batch(SmallVec::new()), |_, piece| piece));
    }
    let value = |i: usize| -> Result<Var> {
        let parts: Vec<&Var> = pieces.iter().map(|piece| &piece.0[i]).collect();
        Ok(Var::cat(&parts, 0)?)
    };
    Ok(Batch((0..count).map(value).collect::<Result<_>>()?))
}

fn wrong(why: String) -> Error {
    Error::Nn(NnError::invalid("gpipe: batch", why))
}
