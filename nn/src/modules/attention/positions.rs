//! Which positions a call of attention computes: the cache of earlier ones ([`KvCache`]), and rows of several documents ([`Documents`]).

use phalanx_autograd::Var;
use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Tensor};

use crate::{Error, Result};

/// One layer's keys and values of earlier positions, kept for generation: `[batch, heads, capacity, dim]`, of which the first
/// [`KvCache::len`] positions are filled.
#[derive(Debug)]
pub struct KvCache {
    keys: Tensor,
    values: Tensor,
    len: usize,
}

impl KvCache {
    /// An empty cache.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn new(
        batch: usize,
        heads: usize,
        capacity: usize,
        dim: usize,
        dtype: DType,
        device: Device,
    ) -> Result<KvCache> {
        let zeros = || Tensor::zeros(&[batch, heads, capacity, dim], dtype, device);
        Ok(KvCache { keys: zeros()?, values: zeros()?, len: 0 })
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        self.keys.shape()[0]
    }

    /// Positions filled.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is filled.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The largest number of positions.
    pub fn capacity(&self) -> usize {
        self.keys.shape()[2]
    }

    /// Removes all positions.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Adds positions, and returns the keys and values of all positions.
    ///
    /// # Errors
    /// If there is no room.
    pub fn append(&mut self, keys: &Var, values: &Var) -> Result<(Var, Var)> {
        let (new, capacity) = (keys.shape()[2], self.capacity());
        if self.len + new > capacity {
            let why = format!("{} positions and {new} more, room for {capacity}", self.len);
            return Err(Error::invalid("cache", why));
        }
        for (kept, more) in [(&self.keys, keys), (&self.values, values)] {
            kernels::copy_(&mut kept.narrow(2, self.len, new)?, more.tensor())?;
        }
        self.len += new;
        let filled = |kept: &Tensor| Ok::<_, Error>(Var::new(kept.narrow(2, 0, self.len)?));
        Ok((filled(&self.keys)?, filled(&self.values)?))
    }
}

/// Where documents begin in rows of tokens that hold several. Attention stays inside a document, and each document's positions begin at
/// 0, as with Megatron's `--reset-attention-mask` and `--reset-position-ids`. So a document has the stream that it has in a row of its
/// own.
#[derive(Clone, Debug)]
pub struct Documents {
    starts: Var,
    positions: Var,
    first_keys: Var,
}

impl Documents {
    /// `starts` `[B, T]` (i64) has for each position the position in its row at which its document begins. Starts must not decrease
    /// along a row, and must be from 0 to the position itself. Attention refuses others, on a GPU when its result is read.
    ///
    /// # Errors
    /// If `starts` is no matrix of i64.
    pub fn new(starts: &Var) -> Result<Documents> {
        let (&[rows, length], DType::I64) = (starts.shape(), starts.dtype()) else {
            let got = format!("got starts of documents {:?} {}", starts.shape(), starts.dtype());
            return Err(Error::invalid("Documents", format!("{got}, wanted [B, T] i64")));
        };
        let positions = Var::arange(0, length as i64, 1, DType::I64, starts.device())?.sub(starts)?;
        let first_keys = starts.reshape_to(&[rows, 1, length, 1])?;
        Ok(Documents { starts: starts.clone(), positions, first_keys })
    }

    /// The position at which each position's document begins, `[B, T]`.
    pub fn starts(&self) -> &Var {
        &self.starts
    }

    /// Each position's number in its document, `[B, T]`.
    pub fn positions(&self) -> &Var {
        &self.positions
    }

    /// The starts as a mask of attention, `[B, 1, T, 1]`.
    pub(crate) fn first_keys(&self) -> &Var {
        &self.first_keys
    }

    /// Refuses rows of other sizes.
    pub(crate) fn check(&self, rows: usize, length: usize) -> Result<()> {
        if self.starts.shape() == [rows, length] {
            return Ok(());
        }
        let got = format!("got starts of documents {:?}", self.starts.shape());
        Err(Error::invalid("Documents", format!("{got}, wanted those of the tokens, [{rows}, {length}]")))
    }
}
