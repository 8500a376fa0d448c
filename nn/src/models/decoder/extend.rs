//! Further positions of sequences whose earlier ones are in caches.

use phalanx_autograd::Var;

use super::{Decoder, InputEmbedding, WrappedUnit};
use crate::models::{KvCache, RowPart};
use crate::{Error, LayerFactory, Result};

impl<L: LayerFactory> Decoder<L> {
    /// Empty caches for `batch` sequences of at most `capacity` positions, one a block.
    ///
    /// # Errors
    /// If they cannot be allocated.
    pub fn caches(&self, batch: usize, capacity: usize) -> Result<Vec<KvCache>> {
        self.blocks.iter().map(|block| block.module().cache(batch, capacity)).collect()
    }

    /// Empty caches for one row, one a block, which grow by pages of so many positions ([`KvCache::with_pages`]).
    ///
    /// # Errors
    /// If they cannot be allocated.
    pub fn row_caches(&self, page: usize) -> Result<Vec<KvCache>> {
        let caches = self.caches(1, 0)?;
        Ok(caches.into_iter().map(|cache| cache.with_pages(page)).collect())
    }

    /// Scores `[B, vocabulary]` of the last of further positions `[B, T]` of sequences whose earlier positions are in the caches. For a
    /// whole model.
    ///
    /// # Errors
    /// If this is not a whole model, the stream is sharded by positions, or there is not one cache for each block, all of one length and
    /// with room for the new positions.
    pub fn extend(&self, tokens: &Var, caches: &mut [KvCache]) -> Result<Var> {
        let before = caches.first().map_or(0, KvCache::len);
        let (embed, tail) = (self.embedding()?, self.tail()?);
        self.check_tokens(tokens, before)?;
        let (batch, new) = (tokens.shape()[0], tokens.shape()[1]);
        let fits = |c: &KvCache| c.batch() == batch && c.len() == before && c.has_room(new);
        if caches.len() != self.blocks.len() || !caches.iter().all(fits) {
            let each: Vec<_> = caches.iter().map(|c| (c.batch(), c.len(), c.capacity())).collect();
            let got = format!("got caches of (batch, positions, capacity) {each:?}");
            let wanted =
                format!("wanted {} of ({batch}, {before}, {} or more)", self.blocks.len(), before + new);
            return Err(Error::invalid("extend", format!("{got}, {wanted}")));
        }
        embed.module().check_whole_stream(new)?;
        let _mode = self.mode.enter();
        let mut x = embed.module().run(tokens, before, None)?;
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block.module().extend(&x, cache)?;
        }
        let last = x.narrow(1, x.shape()[1] - 1, 1)?.squeeze(&[1])?;
        tail.module().logits(&last)
    }

    /// Scores `[rows, vocabulary]` of the last of each row's further tokens. Each row has caches of its own: one for each block, of batch 1.
    /// Rows need not have equal numbers of earlier and of new positions. There is no padding: linear maps take the tokens of all rows one
    /// after the other, and attention takes row by row. So a row has the scores that it has alone, on a CPU bit for bit.
    ///
    /// # Errors
    /// If this is not a whole model, the stream is sharded by positions, a row has no tokens or too many, or its caches do not fit.
    pub fn extend_rows(&self, rows: &mut [(&mut [KvCache], &[i64])]) -> Result<Var> {
        let (embed, tail) = (self.embedding()?, self.tail()?);
        let mut numbers = Vec::new();
        for (row, (caches, tokens)) in rows.iter().enumerate() {
            let before = caches.first().map_or(0, KvCache::len);
            let fits = |c: &KvCache| c.batch() == 1 && c.len() == before && c.has_room(tokens.len());
            if caches.len() != self.blocks.len() || !caches.iter().all(fits) {
                let wanted = "of batch 1, of one length, with room for the new tokens";
                let why = format!(
                    "got {} caches of row {row}, wanted {} {wanted}",
                    caches.len(),
                    self.blocks.len()
                );
                return Err(Error::invalid("extend_rows", why));
            }
            if tokens.is_empty() || before + tokens.len() > self.context {
                let got = format!("got {} tokens of row {row} after {before} positions", tokens.len());
                let why = format!("{got}, wanted at least 1 and at most {} positions", self.context);
                return Err(Error::invalid("extend_rows", why));
            }
            numbers.extend((before..before + tokens.len()).map(|number| number as i64));
        }
        if numbers.is_empty() {
            return Err(Error::invalid("extend_rows", "got no rows, wanted at least 1"));
        }
        embed.module().check_whole_stream(numbers.len())?;
        let _mode = self.mode.enter();
        let (shape, device) = ([1, numbers.len()], self.device());
        let tokens: Vec<i64> = rows.iter().flat_map(|(_, tokens)| tokens.iter().copied()).collect();
        let tokens = Var::from_slice(&tokens, &shape, device)?;
        let numbers = || Var::from_slice(&numbers, &shape, device);
        let numbers = embed.module().positions.is_some().then(numbers).transpose()?;
        let mut x = embed.module().run(&tokens, 0, numbers.as_ref())?;
        for (i, block) in self.blocks.iter().enumerate() {
            let parts = rows.iter_mut();
            let parts = parts.map(|(caches, tokens)| RowPart { cache: &mut caches[i], count: tokens.len() });
            let mut parts: Vec<RowPart<'_>> = parts.collect();
            x = block.module().extend_rows(&x, &mut parts)?;
        }
        let x = x.squeeze(&[0])?;
        if rows.len() == x.shape()[0] {
            return tail.module().logits(&x);
        }
        let mut end = 0;
        let ends = rows.iter().map(|(_, tokens)| {
            end += tokens.len();
            end as i64 - 1
        });
        let ends = Var::from_slice(&ends.collect::<Vec<i64>>(), &[rows.len()], device)?;
        tail.module().logits(&x.index_select(0, &ends)?)
    }

    fn embedding(&self) -> Result<&WrappedUnit<InputEmbedding<L>>> {
        self.embed.as_ref().ok_or_else(|| Error::invalid("extend", "this stage has no embedding"))
    }
}

impl<L: LayerFactory> InputEmbedding<L> {
    fn check_whole_stream(&self, positions: usize) -> Result<()> {
        match self.layers.stream(positions)?.len() == positions {
            true => Ok(()),
            false => Err(Error::invalid("extend", "the stream is cut by positions, wanted all of them here")),
        }
    }
}
