//! Further positions of sequences whose earlier ones are in caches.

use phalanx_autograd::Var;
use phalanx_tensor::{DType, Device, Dims};

use super::{Decoder, InputEmbedding, WrappedUnit};
use crate::models::{KvCache, RowPart};
use crate::{Entry, Error, LayerFactory, Parameters, Result};

/// Further tokens of a row, of which a stage of a model has seen the earlier ones.
pub struct RowTokens<'a> {
    /// One for each block of the stage, of batch 1.
    pub caches: &'a mut [KvCache],
    /// How many tokens the stage has seen.
    pub before: usize,
    /// The further tokens.
    pub tokens: &'a [i64],
}

impl<L: LayerFactory> Decoder<L> {
    /// The device of the parameters, of which not all are visited, as each token asks.
    pub fn device(&self) -> Device {
        let mut device = None;
        let visitor = &mut |_: &str, entry: Entry<'_>| device = device.or(Some(entry.tensor().device()));
        if let Some(block) = self.blocks.first() {
            block.visit("", visitor);
        }
        self.embed.visit("", visitor);
        self.tail.visit("", visitor);
        device.unwrap_or(Device::CPU)
    }

    /// The former context of long rope ([`RopeScaling::LongRope`](crate::RopeScaling::LongRope)), if the model has it: where caches have as
    /// many positions or fewer, further ones beyond are refused, since earlier keys are rotated otherwise then. Generation begins such a row
    /// again.
    pub fn turning_point(&self) -> Option<usize> {
        self.turning_point
    }

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
    /// If this is not a whole model, or there is not one cache for each block, all of one length and with room for the new positions.
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
        let _whole = WholeStream::new(&*self.layers, new)?;
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
    /// If this is not a whole model, a row has no tokens or too many, or its caches do not fit.
    pub fn extend_rows(&self, rows: &mut [(&mut [KvCache], &[i64])]) -> Result<Var> {
        self.check_whole()?;
        let rows = rows.iter_mut().map(|(caches, tokens)| {
            let before = caches.first().map_or(0, KvCache::len);
            RowTokens { caches, before, tokens }
        });
        let mut rows: Vec<RowTokens<'_>> = rows.collect();
        self.extend_stage(None, &mut rows)
    }

    /// [`Decoder::extend_rows`] of a stage. `input` is what the stage before has returned: the stream `[1, T, width]` of all rows' further
    /// tokens, one row's after the other's; the first stage has none. Returns the stream, or of the last stage the scores
    /// `[rows, vocabulary]`. Under sequence parallelism every rank has the whole stream here.
    ///
    /// # Errors
    /// If the input is not that of this stage, a row has no tokens or too many, or its caches do not fit.
    pub fn extend_stage(&self, input: Option<&Var>, rows: &mut [RowTokens<'_>]) -> Result<Var> {
        let numbers = self.check_rows(rows)?;
        let _whole = WholeStream::new(&*self.layers, numbers.len())?;
        let _mode = self.mode.enter();
        let mut x = match &self.embed {
            Some(embed) if input.is_none() => embed.module().run_rows(rows, &numbers, self.device())?,
            _ => self.stream_of_rows(input, numbers.len())?,
        };
        for (i, block) in self.blocks.iter().enumerate() {
            let parts = rows.iter_mut();
            let parts = parts.map(|row| RowPart { cache: &mut row.caches[i], count: row.tokens.len() });
            let mut parts: Vec<RowPart<'_>> = parts.collect();
            x = block.module().extend_rows(&x, &mut parts)?;
        }
        let Some(tail) = &self.tail else { return Ok(x) };
        let x = x.squeeze(&[0])?;
        if rows.len() == x.shape()[0] {
            return tail.module().logits(&x);
        }
        let mut end = 0;
        let ends = rows.iter().map(|row| {
            end += row.tokens.len();
            end as i64 - 1
        });
        let ends = Var::from_slice(&ends.collect::<Vec<i64>>(), &[rows.len()], x.device())?;
        tail.module().logits(&x.index_select(0, &ends)?)
    }

    /// Shape and dtype of the stream `[1, positions, width]` that [`Decoder::extend_stage`] takes and returns.
    pub fn row_stream(&self, positions: usize) -> (Dims, DType) {
        (Dims::from_slice(&[1, positions, self.width]), self.dtype)
    }

    /// Whether a sequence may have so many positions.
    pub(super) fn has_positions(&self, count: usize) -> bool {
        self.learned_positions.is_none_or(|most| count <= most)
    }

    /// The positions of the rows' further tokens, one row's after the other's.
    fn check_rows(&self, rows: &[RowTokens<'_>]) -> Result<Vec<i64>> {
        let mut numbers = Vec::new();
        for (row, RowTokens { caches, before, tokens }) in rows.iter().enumerate() {
            let (before, count) = (*before, tokens.len());
            let fits = |c: &KvCache| c.batch() == 1 && c.len() == before && c.has_room(count);
            if caches.len() != self.blocks.len() || !caches.iter().all(fits) {
                let wanted = "of batch 1, of one length, with room for the new tokens";
                let why = format!(
                    "got {} caches of row {row}, wanted {} {wanted}",
                    caches.len(),
                    self.blocks.len()
                );
                return Err(Error::invalid("extend_rows", why));
            }
            if count == 0 || !self.has_positions(before + count) {
                let got = format!("got {count} tokens of row {row} after {before} positions");
                let most = self.learned_positions.map(|most| format!(" and at most {most} positions"));
                let why = format!("{got}, wanted at least 1{}", most.unwrap_or_default());
                return Err(Error::invalid("extend_rows", why));
            }
            numbers.extend((before..before + count).map(|number| number as i64));
        }
        if numbers.is_empty() {
            return Err(Error::invalid("extend_rows", "got no rows, wanted at least 1"));
        }
        Ok(numbers)
    }

    /// The stream of the stage before.
    fn stream_of_rows(&self, input: Option<&Var>, positions: usize) -> Result<Var> {
        let (wanted, dtype) = self.row_stream(positions);
        match input {
            Some(x) if self.embed.is_none() && x.shape() == &wanted[..] && x.dtype() == dtype => {
                Ok(x.clone())
            }
            Some(x) if self.embed.is_none() => {
                let got = format!("got a stream {:?} {}", x.shape(), x.dtype());
                Err(Error::invalid("extend_stage", format!("{got}, wanted {wanted:?} {dtype}")))
            }
            Some(_) => Err(Error::invalid("extend_stage", "got a stream for the first stage, wanted none")),
            None => Err(Error::invalid("extend_stage", "got no stream for a stage without the embedding")),
        }
    }

    /// Refuses a stage that is not the whole model.
    pub(in crate::models) fn check_whole(&self) -> Result<()> {
        self.embedding()?;
        self.tail()?;
        match self.blocks.len() == self.blocks_of_all {
            true => Ok(()),
            false => Err(Error::invalid("extend", "this stage has some blocks only, wanted all of them")),
        }
    }

    fn embedding(&self) -> Result<&WrappedUnit<InputEmbedding<L>>> {
        self.embed.as_ref().ok_or_else(|| Error::invalid("extend", "this stage has no embedding"))
    }
}

impl<L: LayerFactory> InputEmbedding<L> {
    /// The stream `[1, T, width]` of the rows' tokens, of which `numbers` are the positions.
    fn run_rows(&self, rows: &[RowTokens<'_>], numbers: &[i64], device: Device) -> Result<Var> {
        let shape = [1, numbers.len()];
        let tokens: Vec<i64> = rows.iter().flat_map(|row| row.tokens.iter().copied()).collect();
        let tokens = Var::from_slice(&tokens, &shape, device)?;
        let numbers = || Var::from_slice(numbers, &shape, device);
        let numbers = self.positions.is_some().then(numbers).transpose()?;
        self.run(&tokens, 0, numbers.as_ref())
    }
}

/// Keeps the stream between the blocks whole on every rank until it is dropped.
struct WholeStream<'a, L: LayerFactory>(&'a L);

impl<L: LayerFactory> WholeStream<'_, L> {
    fn new(layers: &L, positions: usize) -> Result<WholeStream<'_, L>> {
        layers.set_whole_stream(true);
        let whole = WholeStream(layers);
        match layers.stream(positions)?.len() == positions {
            true => Ok(whole),
            false => Err(Error::invalid("extend", "the stream is cut by positions, wanted all of them here")),
        }
    }
}

impl<L: LayerFactory> Drop for WholeStream<'_, L> {
    fn drop(&mut self) {
        self.0.set_whole_stream(false);
    }
}
