//! A linear map along one dimension in which every output is the weighted sum of a few inputs.
//!
//! Made of one `index_select` of as many elements as the longest sum has for each output, a product with the weights and a sum, so
//! that what an output does not depend on cannot spoil it, as a NaN would in a matrix product.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dims, Result, Tensor};
use smallvec::SmallVec;

/// The inputs of one output, with their weights.
pub(super) type Line = SmallVec<[(usize, f64); 4]>;

/// Such a map.
pub(super) struct Lines {
    pub inputs: usize,
    pub lines: Vec<Line>,
}

impl Lines {
    /// Whether every output is one of the inputs.
    pub fn only_picks(&self) -> bool {
        self.lines.iter().all(|line| matches!(line.as_slice(), [(_, 1.0)]))
    }

    /// Whether there are more outputs than inputs.
    pub fn grows(&self) -> bool {
        self.lines.len() > self.inputs
    }

    fn is_identity(&self) -> bool {
        let same = |(at, line): (usize, &Line)| matches!(line.as_slice(), [(from, 1.0)] if *from == at);
        self.lines.len() == self.inputs && self.lines.iter().enumerate().all(same)
    }

    /// The transposed map.
    pub fn transposed(&self) -> Lines {
        let mut lines = vec![Line::new(); self.inputs];
        for (to, line) in self.lines.iter().enumerate() {
            for &(from, weight) in line {
                match lines[from].last_mut() {
                    Some((last, sum)) if *last == to => *sum += weight,
                    _ => lines[from].push((to, weight)),
                }
            }
        }
        Lines { inputs: self.lines.len(), lines }
    }

    /// The map of dimension `dim`, with weights in `dtype`.
    pub fn apply(&self, x: &Tensor, dim: usize, dtype: DType) -> Result<Tensor> {
        if self.is_identity() {
            return Ok(x.clone());
        }
        let outputs = self.lines.len();
        let terms = self.lines.iter().map(SmallVec::len).max().unwrap_or(0).max(1);
        // A sum with fewer terms repeats its first input with the weight 0.
        let term = |nth: usize, line: &Line| {
            line.get(nth).copied().unwrap_or((line.first().map_or(0, |&(from, _)| from), 0.0))
        };
        let all = || (0..terms).flat_map(|nth| self.lines.iter().map(move |line| term(nth, line)));
        let places: Vec<i64> = all().map(|(from, _)| from as i64).collect();
        let places = Tensor::from_slice(&places, &[places.len()], x.device())?;
        let picked = kernels::index_select(x, dim, &places)?;
        if self.only_picks() {
            return Ok(picked);
        }
        let mut shape = Dims::from_slice(picked.shape());
        shape[dim] = outputs;
        shape.insert(dim, terms);
        let weights: Vec<f64> = all().map(|(_, weight)| weight).collect();
        let mut by_output = Dims::from_elem(1, shape.len() - dim);
        (by_output[0], by_output[1]) = (terms, outputs);
        let weights = kernels::cast(&Tensor::from_slice(&weights, &by_output, x.device())?, dtype)?;
        kernels::sum(&kernels::mul(&picked.with_shape(&shape)?, &weights)?, &[dim], false)
    }
}
