//! Which positions a call of attention computes: the cache of earlier ones ([`KvCache`]), parts of several rows ([`RowPart`]), and rows of
//! several documents ([`Documents`]).

use phalanx_autograd::Var;
use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Scalar, Tensor};

use crate::{Error, Result};

/// One layer's keys and values of earlier positions, kept for generation: `[batch, heads, capacity, dim]`, of which the first ones are
/// filled.
///
/// Its capacity is fixed, or it consists of pages ([`KvCache::with_pages`]): then it holds the positions that it has, rounded up to
/// whole pages. The pages of a cache lie side by side, because the kernels of attention want positions of one stride. A cache that needs a
/// further page therefore moves. One that has many pages takes a quarter more of them at a time, so that each position is copied some four times,
/// however many there are.
#[derive(Debug)]
pub struct KvCache {
    keys: Tensor,
    values: Tensor,
    /// Positions so far.
    len: usize,
    /// How many of the last of them are here.
    kept: usize,
    /// Positions of a page, if it has pages.
    page: Option<usize>,
    /// The number of keys that a query sees.
    window: Option<usize>,
    /// How many positions the sequences are known to have.
    expected: usize,
    /// The length of sequences by which the positions so far were rotated.
    rotated: usize,
}

impl KvCache {
    /// An empty cache of a fixed capacity.
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
        let (keys, values, page, window) = (zeros()?, zeros()?, None, None);
        Ok(KvCache { keys, values, len: 0, kept: 0, page, window, expected: 0, rotated: 0 })
    }

    /// The same cache, which grows by pages of so many positions from now on. A cache of a layer with a window then gives up positions that
    /// no later query sees.
    #[must_use]
    pub fn with_pages(mut self, positions: usize) -> KvCache {
        self.page = Some(positions.max(1));
        self
    }

    /// The same cache of a layer whose queries see so many keys.
    pub(crate) fn with_window(mut self, window: Option<usize>) -> KvCache {
        self.window = window;
        self
    }

    /// Says how many positions the sequences are known to have, those that are here included. Rotary positions may depend on the length of a
    /// sequence ([`RopeScaling`](crate::RopeScaling)), so the first pieces of a long prompt are rotated as its last one is.
    pub fn expect(&mut self, positions: usize) {
        self.expected = self.expected.max(positions);
    }

    /// The length by which `new` further positions are rotated.
    ///
    /// # Errors
    /// If the sequences grow beyond the turning point of long rope, up to which the positions so far were rotated otherwise.
    pub(super) fn length_with(&mut self, new: usize, turning_point: Option<usize>) -> Result<usize> {
        let length = self.expected.max(self.len + new);
        if let Some(former) = turning_point.filter(|former| (self.rotated > *former) != (length > *former))
            && self.len > 0
        {
            let got =
                format!("got {new} positions more after {} of long rope's former context {former}", self.len);
            let why = format!("{got}, beyond which earlier keys are rotated otherwise");
            return Err(Error::invalid(
                "cache",
                format!("{why}; wanted an empty cache, and all positions again"),
            ));
        }
        self.rotated = length;
        Ok(length)
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        self.keys.shape()[0]
    }

    /// Positions so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there has been no position yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of positions for which memory is held.
    pub fn capacity(&self) -> usize {
        self.keys.shape()[2]
    }

    /// Whether so many further positions can be added.
    pub(crate) fn has_room(&self, new: usize) -> bool {
        self.page.is_some() || self.kept + new <= self.capacity()
    }

    /// Removes all positions.
    pub fn clear(&mut self) {
        (self.len, self.kept, self.expected, self.rotated) = (0, 0, 0, 0);
    }

    /// Adds positions, and returns the keys and values of all positions that are here: the last ones, and all of them unless the cache has
    /// pages and its layer a window.
    ///
    /// # Errors
    /// If there is no room.
    pub fn append(&mut self, keys: &Var, values: &Var) -> Result<(Var, Var)> {
        let new = keys.shape()[2];
        if self.kept + new > self.capacity() {
            self.grow(new)?;
        }
        for (kept, more) in [(&self.keys, keys), (&self.values, values)] {
            kernels::copy_(&mut kept.narrow(2, self.kept, new)?, more.tensor())?;
        }
        self.len += new;
        self.kept += new;
        let filled = |kept: &Tensor| Ok::<_, Error>(Var::new(kept.narrow(2, 0, self.kept)?));
        Ok((filled(&self.keys)?, filled(&self.values)?))
    }

    /// Moves the positions that later queries see to memory that has room for `new` more.
    fn grow(&mut self, new: usize) -> Result<()> {
        let Some(page) = self.page else {
            let why = format!("{} positions and {new} more, room for {}", self.len, self.capacity());
            return Err(Error::invalid("cache", why));
        };
        // The next query sees itself and these.
        let seen = self.window.map_or(self.kept, |window| self.kept.min(window.saturating_sub(1)));
        let more = self.window.map_or(seen / 4, |window| (seen / 4).min(window.saturating_sub(seen)));
        let mut capacity = (seen + more.max(new)).next_multiple_of(page);
        if seen < self.kept {
            // The number of positions grows no more, and without a page to spare the cache would move with each token.
            capacity += page;
        }
        for buffer in [&mut self.keys, &mut self.values] {
            let &[batch, heads, _, dim] = buffer.shape() else { unreachable!("made with four dimensions") };
            let grown = Tensor::empty(&[batch, heads, capacity, dim], buffer.dtype(), buffer.device())?;
            kernels::copy_(&mut grown.narrow(2, 0, seen)?, &buffer.narrow(2, self.kept - seen, seen)?)?;
            *buffer = grown;
        }
        self.kept = seen;
        Ok(())
    }
}

/// Further positions of one row among those of other rows, which lie one after the other in a stream `[1, all positions, width]`.
#[derive(Debug)]
pub struct RowPart<'a> {
    /// The row's earlier positions in a layer; a cache of batch 1.
    pub cache: &'a mut KvCache,
    /// How many positions the row has in this call.
    pub count: usize,
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

    /// Which positions are those of documents of more than so many positions, `[B, T]` bool.
    pub(super) fn longer_than(&self, positions: usize) -> Result<Var> {
        let length = self.starts.shape()[1] as i64;
        // A document is that long if its position of this number is in the row and has its start.
        let beyond = self.starts.add_scalar(positions as i64)?;
        let inside = beyond.clamp(None, Some(Scalar::Int(length - 1)))?;
        let is_same = self.starts.gather(1, &inside)?.eq(&self.starts)?;
        Ok(is_same.logical_and(&beyond.lt_scalar(length)?)?)
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
