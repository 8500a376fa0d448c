//! Keys and values of earlier positions, kept for generation.

use phalanx_autograd::Var;
use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Tensor};

use crate::{Error, Result};

/// One layer's keys and values: `[batch, heads, capacity, dim]`, of which the first [`KvCache::len`] positions are
/// filled.
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

    /// Positions there is room for.
    pub fn capacity(&self) -> usize {
        self.keys.shape()[2]
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Adds positions, and returns the keys and values of all.
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
