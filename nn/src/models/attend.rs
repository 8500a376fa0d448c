//! Causal self-attention between the maps: heads apart, rotary positions, cache, dropout.

use std::ops::Range;

use phalanx_autograd::{Attention, Rope, Var};
use phalanx_tensor::{DType, Device};

use super::{Documents, KvCache};
use crate::layers::activation_window;
use crate::modules::Dropout;
use crate::{Error, Layers, Result};

/// What attention of one layer needs beside queries, keys and values.
pub(crate) struct Attend {
    /// The query heads here, out of `all`.
    heads: Range<usize>,
    all: usize,
    /// Key heads here.
    key_heads: usize,
    /// The key head of each query head, where they do not share them evenly.
    uses: Option<Vec<i64>>,
    dim: usize,
    rope: Option<f64>,
    dropout: Dropout,
}

/// What the positions of a call are.
pub(crate) enum Rows<'a> {
    /// Whole sequences.
    Whole,
    /// Further positions of sequences whose earlier ones are in the cache.
    Further(&'a mut KvCache),
    /// Whole sequences of documents, which do not see each other.
    Packed(&'a Documents),
}

impl<'a> From<Option<&'a mut KvCache>> for Rows<'a> {
    fn from(cache: Option<&'a mut KvCache>) -> Rows<'a> {
        cache.map_or(Rows::Whole, Rows::Further)
    }
}

/// The whole model's heads.
pub(crate) struct Heads {
    pub(crate) query: usize,
    pub(crate) key: usize,
    pub(crate) dim: usize,
}

impl Attend {
    /// Attention of the heads that `layers` has here; `rope`: the base of rotary positions.
    pub(crate) fn new(
        layers: &impl Layers,
        heads: Heads,
        rope: Option<f64>,
        dropout: Dropout,
    ) -> Result<Attend> {
        let here = layers.heads(heads.query)?;
        let keys = layers.key_heads(heads.query, heads.key)?;
        let uses: Vec<usize> = here.clone().map(|i| i * heads.key / heads.query - keys.start).collect();
        let even = |(i, &key): (usize, &usize)| key == i * keys.len() / here.len();
        let evenly = here.len().is_multiple_of(keys.len()) && uses.iter().enumerate().all(even);
        let uses = (!evenly).then(|| uses.into_iter().map(|key| key as i64).collect());
        let (all, dim) = (heads.query, heads.dim);
        Ok(Attend { heads: here, all, key_heads: keys.len(), uses, dim, rope, dropout })
    }

    /// An empty cache for `batch` sequences of at most `capacity` positions.
    pub(crate) fn cache(
        &self,
        batch: usize,
        capacity: usize,
        dtype: DType,
        device: Device,
    ) -> Result<KvCache> {
        KvCache::new(batch, self.key_heads, capacity, self.dim, dtype, device)
    }

    /// Queries `[B, T, heads dim]`, keys and values `[B, T, key heads dim]`: the heads' results, as the queries.
    pub(crate) fn run(&self, [q, k, v]: [&Var; 3], rows: Rows<'_>) -> Result<Var> {
        if let Some(odd) = [q, k, v].into_iter().find(|x| x.rank() != 3) {
            let why = format!("got {:?} after the first map, wanted [B, T, features]", odd.shape());
            return Err(Error::invalid("attention", why));
        }
        let (cache, documents) = match rows {
            Rows::Whole => (None, None),
            Rows::Further(cache) => (Some(cache), None),
            Rows::Packed(documents) => (None, Some(documents)),
        };
        documents.map_or(Ok(()), |documents| documents.check(q.shape()[0], q.shape()[1]))?;
        let before = cache.as_ref().map_or(0, |cache| cache.len());
        let split = |x: &Var, heads: usize| -> Result<Var> {
            let shape = [x.shape()[0], x.shape()[1], heads, self.dim];
            Ok(x.reshape_to(&shape)?.transpose(1, 2)?)
        };
        let turned = |x: Var| -> Result<Var> {
            let Some(base) = self.rope else { return Ok(x) };
            Ok(x.rope(documents.map(Documents::positions), &Rope { base, offset: before as i64 })?)
        };
        let (q, k) = (turned(split(q, self.heads.len())?)?, turned(split(k, self.key_heads)?)?);
        let v = split(v, self.key_heads)?;
        let (k, v) = match cache {
            Some(cache) => cache.append(&k, &v)?,
            None => (k, v),
        };
        let (k, v) = (self.used(k)?, self.used(v)?);
        let y = if self.dropout.is_active() {
            self.composed(&q, &k, &v, before, documents)?
        } else {
            self.fused(&q, &k, &v, before, documents)?
        };
        let (batch, positions) = (y.shape()[0], y.shape()[2]);
        Ok(y.transpose(1, 2)?.reshape_to(&[batch, positions, self.heads.len() * self.dim])?)
    }

    /// Keys or values of a head for each query head, unless they are shared evenly.
    fn used(&self, x: Var) -> Result<Var> {
        let Some(uses) = &self.uses else { return Ok(x) };
        Ok(x.index_select(1, &Var::from_slice(uses, &[uses.len()], x.device())?)?)
    }

    fn fused(&self, q: &Var, k: &Var, v: &Var, before: usize, documents: Option<&Documents>) -> Result<Var> {
        let positions = q.shape()[2];
        let config = Attention {
            is_causal: before == 0,
            enable_gqa: k.shape()[1] != self.heads.len(),
            ..Attention::default()
        };
        let mask = match before > 0 && positions > 1 {
            true => Some(causal_mask(positions, before, q.device())?),
            false => documents.map(|documents| documents.first_keys().clone()),
        };
        Ok(q.scaled_dot_product_attention(k, v, mask.as_ref(), &config)?)
    }

    /// With dropout on the probabilities, which must therefore exist.
    fn composed(
        &self,
        q: &Var,
        k: &Var,
        v: &Var,
        before: usize,
        documents: Option<&Documents>,
    ) -> Result<Var> {
        let (queries, keys) = (q.shape()[2], k.shape()[2]);
        let (k, v) = (self.shared(k)?, self.shared(v)?);
        let scores = q.matmul(&k.transpose(2, 3)?)?.mul_scalar((self.dim as f64).sqrt().recip())?;
        let hidden = causal_mask(queries, before, q.device())?.eq_scalar(false)?;
        let mut scores = scores.masked_fill(&hidden, f64::NEG_INFINITY)?;
        if let Some(documents) = documents {
            let numbers = Var::arange(0, keys as i64, 1, DType::I64, q.device())?;
            scores = scores.masked_fill(&numbers.lt(documents.first_keys())?, f64::NEG_INFINITY)?;
        }
        let p = scores.softmax(-1)?;
        let window =
            activation_window(p.shape(), &[(1, self.heads.start, self.all), (2, before, before + queries)])?;
        debug_assert_eq!(keys, before + queries);
        Ok(self.dropout.forward_in(&p, &window)?.matmul(&v)?)
    }

    /// Keys or values repeated for the query heads that share them.
    fn shared(&self, x: &Var) -> Result<Var> {
        let group = self.heads.len() / x.shape()[1];
        if group == 1 {
            return Ok(x.clone());
        }
        let [batch, heads, positions, dim] = [x.shape()[0], x.shape()[1], x.shape()[2], x.shape()[3]];
        let repeated = x.unsqueeze(2)?.broadcast_to(&[batch, heads, group, positions, dim])?;
        Ok(repeated.reshape_to(&[batch, heads * group, positions, dim])?)
    }
}

/// `[queries, before + queries]`: true where the key is not later than the query.
fn causal_mask(queries: usize, before: usize, device: Device) -> Result<Var> {
    let keys = before + queries;
    let seen: Vec<bool> = (0..queries).flat_map(|q| (0..keys).map(move |k| k <= before + q)).collect();
    Ok(Var::from_slice(&seen, &[queries, keys], device)?)
}
