//! Rows of a table: looked up, or summed in bags.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dim, Dims, Error};

use super::frame::{composed, named};
use super::gather::zeros;
use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, grads2, record};

/// `y[.., :] = weight[index[..], :]`: rows of a table.
///
/// Derivative: row `r` of `dweight` is the sum of `dy` where the index is `r`, positions ascending; the padding row's
/// is zero. Shapes: weight `[rows, ..]`, index any, result `[index's shape, ..]`. The index is saved. Where the
/// weight's gradient is kept in a buffer, it is added there row by row and never exists apart.
impl Var {
    /// The rows of this table at the indices (i64 or i32, of any shape). The row `padding` gets no gradient; it may
    /// be counted from the end.
    ///
    /// # Errors
    /// If this has no dimension, or an index or `padding` is out of range.
    pub fn embedding(&self, index: &Var, padding: Option<isize>) -> Result<Var> {
        begins();
        let y = match self.panels() {
            Some(panels) => panels.embedding(index.tensor())?,
            None => kernels::embedding(self.tensor(), index.tensor())?,
        };
        let rows = self.shape()[0];
        let place = |row: isize| {
            let place = if row < 0 { rows.checked_sub(row.unsigned_abs()) } else { Some(row.unsigned_abs()) };
            let wrong =
                || Error::range("embedding", format!("padding row {row}"), format!("one of {rows} rows"));
            place.filter(|&place| place < rows).ok_or_else(wrong)
        };
        let padding = padding.map(place).transpose()?;
        record("embedding", &[self, index], y, |s: &SaveContext<'_>| {
            Ok(Embedding { from: Dims::from_slice(self.shape()), padding, index: s.input(1)? })
        })
    }
}

struct Embedding {
    from: Dims,
    padding: Option<usize>,
    index: SavedVariable,
}

impl Backward for Embedding {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (index, dy, rows) = (cx.get(&self.index)?, cx.dy(), self.from[0]);
        if cx.create_graph() {
            let flat = index.reshape_to(&[index.numel()])?;
            let mut shape = self.from.clone();
            shape[0] = flat.numel();
            let sums = zeros(dy, &self.from)?.index_add(0, &flat, &dy.reshape_to(&shape)?, 1.0)?;
            return grads2(Some(self.without_padding(&sums)?), None);
        }
        let (dy, index) = (dy.tensor(), index.tensor());
        if cx.accumulate_into(0, |to| {
            Ok(kernels::embedding_backward_accumulate_(to, dy, index, self.padding)?)
        })? {
            return grads2(None, None);
        }
        grads2(Some(Var::new(kernels::embedding_backward(dy, index, rows, self.padding)?)), None)
    }
}

impl Embedding {
    /// The padding row replaced by zeros.
    fn without_padding(&self, sums: &Var) -> Result<Var> {
        let Some(row) = self.padding else { return Ok(sums.clone()) };
        let mut shape = self.from.clone();
        shape[0] = 1;
        let after = sums.narrow(0, row + 1, self.from[0] - row - 1)?;
        Var::cat(&[sums.narrow(0, 0, row)?, zeros(sums, &shape)?, after], 0)
    }
}

// Sums, means or maxima of rows of a table.
//
// Composed of `embedding` and a reduction, or of `index_add` where the bags have different lengths; their derivatives.

/// What [`Var::embedding_bag`] makes of a bag's rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BagMode {
    /// Their sum, each times its weight where there are weights.
    Sum,
    /// Their mean, 0 for an empty bag.
    #[default]
    Mean,
    /// The largest elements of bags of one length, 0 for an empty bag.
    Max,
}

/// How [`Var::embedding_bag`] takes its bags.
#[derive(Clone, Debug, Default)]
pub struct EmbeddingBagOptions {
    /// What is made of a bag.
    pub mode: BagMode,
    /// Where each bag begins (i64, `[bags]`, from 0 ascending), for indices of one dimension.
    pub offsets: Option<Var>,
    /// A weight for each index, of its shape, for sums.
    pub weights: Option<Var>,
    /// A row that does not count and gets no gradient; may be counted from the end.
    pub padding: Option<isize>,
}

const OP: &str = "embedding_bag";

impl Var {
    /// Of this table `[rows, width]` the reduced rows at the indices of each bag: `[bags, length]` of i64 or i32 to
    /// `[bags, width]`, or with offsets `[count]` to `[offsets, width]`.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, an index or the padding row is out of range, there are weights and no
    /// sum is asked for, or a maximum of bags with offsets is.
    pub fn embedding_bag(&self, index: &Var, options: &EmbeddingBagOptions) -> Result<Var> {
        let refuse = |got: String, wanted: &str| Err(Error::shape(OP, got, wanted).into());
        if self.rank() != 2 {
            return refuse(format!("a table of shape {:?}", self.shape()), "[rows, width]");
        }
        let wanted = if options.offsets.is_some() { 1 } else { 2 };
        if index.rank() != wanted {
            let wanted = "[bags, length], or [count] with offsets";
            return refuse(format!("indices of shape {:?}", index.shape()), wanted);
        }
        if let Some(weights) = &options.weights {
            if options.mode != BagMode::Sum {
                let why = format!("weights are for sums, not for {:?}", options.mode);
                return Err(Error::invalid(OP, why).into());
            }
            if weights.shape() != index.shape() {
                let got = format!("weights of shape {:?}", weights.shape());
                return refuse(got, "that of the indices");
            }
        }
        let padding = options.padding.map(|row| row.resolve(self.shape()[0], OP)).transpose()?;
        let counts = padding.map(|row| index.ne_scalar(row as i64)).transpose()?;
        // Rows are looked up as they are and added in f32, so that no half table is widened.
        let rows = named(OP, self.embedding(index, options.padding))?;
        let inputs: Vec<&Var> = [&rows].into_iter().chain(&options.weights).collect();
        composed(OP, &inputs, |inputs| {
            let (rows, weights) = (inputs[0].clone(), inputs.get(1));
            let bags = Bags { rows, weights, counts: counts.as_ref(), mode: options.mode };
            match &options.offsets {
                Some(offsets) => bags.from(offsets),
                None => bags.of_one_length(),
            }
        })
    }
}

/// The rows that the indices name.
struct Bags<'a> {
    /// `[.., width]`
    rows: Var,
    weights: Option<&'a Var>,
    /// Which of the indices count, all of them if absent.
    counts: Option<&'a Var>,
    mode: BagMode,
}

impl Bags<'_> {
    /// The rows with what does not count as 0, times their weights.
    fn terms(&self) -> Result<Var> {
        let weighted = self.weights.map(|weights| self.rows.mul(&weights.unsqueeze(-1)?)).transpose()?;
        let rows = weighted.unwrap_or_else(|| self.rows.clone());
        match self.counts {
            Some(counts) => rows.masked_fill(&counts.eq_scalar(0)?.unsqueeze(-1)?, 0.0),
            None => Ok(rows),
        }
    }

    /// 1 for an index that counts, else 0.
    fn ones(&self) -> Result<Var> {
        let shape = &self.rows.shape()[..self.rows.rank() - 1];
        match self.counts {
            Some(counts) => counts.to(self.rows.dtype()),
            None => Ok(Var::new(kernels::full(shape, 1.0, self.rows.dtype(), self.rows.device())?)),
        }
    }

    fn of_one_length(&self) -> Result<Var> {
        if self.mode == BagMode::Max {
            return self.largest();
        }
        let sums = self.terms()?.sum(&[1], false)?;
        if self.mode == BagMode::Sum {
            Ok(sums)
        } else {
            sums.div(&at_least_one(&self.ones()?.sum(&[1], false)?)?)
        }
    }

    fn largest(&self) -> Result<Var> {
        let &[bags, length, width] = self.rows.shape() else {
            unreachable!("indices of two dimensions were looked up")
        };
        if length == 0 {
            return zeros(&self.rows, &[bags, width]);
        }
        let Some(counts) = self.counts else { return Ok(self.rows.max(1, false)?.0) };
        let left_out = counts.eq_scalar(0)?.unsqueeze(-1)?;
        let empty = counts.to(DType::I64)?.sum(&[1], true)?.eq_scalar(0)?;
        let largest = self.rows.masked_fill(&left_out, f64::NEG_INFINITY)?.max(1, false)?.0;
        largest.masked_fill(&empty, 0.0)
    }

    /// Of bags that begin at the offsets.
    fn from(&self, offsets: &Var) -> Result<Var> {
        if self.mode == BagMode::Max {
            return Err(Error::invalid(OP, "a maximum is made of bags of one length, without offsets").into());
        }
        if offsets.rank() != 1 {
            return Err(Error::shape(OP, format!("offsets of shape {:?}", offsets.shape()), "[bags]").into());
        }
        let (count, bags) = (self.rows.shape()[0], offsets.numel());
        check_offsets(offsets, count)?;
        let width = self.rows.shape()[1];
        if count == 0 || bags == 0 {
            return zeros(&self.rows, &[bags, width]);
        }
        // The bag of each index: how many bags have begun there, less one.
        let none = Var::new(kernels::full(&[count + 1], 0, DType::I64, offsets.device())?);
        let one = Var::new(kernels::full(&[bags], 1, DType::I64, offsets.device())?);
        let begun = none.index_add(0, offsets, &one, 1.0)?.cumsum(0)?;
        let bag = begun.narrow(0, 0, count)?.sub_scalar(1)?;
        let total = |terms: &Var| {
            let mut shape = terms.shape().to_vec();
            shape[0] = bags;
            zeros(terms, &shape)?.index_add(0, &bag, terms, 1.0)
        };
        let sums = total(&self.terms()?)?;
        let sum = self.mode == BagMode::Sum;
        if sum { Ok(sums) } else { sums.div(&at_least_one(&total(&self.ones()?.unsqueeze(-1)?)?)?) }
    }
}

/// `[bags]` or `[bags, 1]` of numbers of rows as a column of divisors.
fn at_least_one(counts: &Var) -> Result<Var> {
    counts.clamp(Some(1.0.into()), None)?.reshape_to(&[counts.numel(), 1])
}

/// Offsets that the host can see begin at 0, ascend and stay inside.
fn check_offsets(offsets: &Var, count: usize) -> Result<()> {
    if offsets.device().is_cuda() || offsets.device().is_meta() {
        return Ok(());
    }
    let values = named(OP, offsets.to(DType::I64))?.to_vec::<i64>()?;
    let starts = values.first().is_none_or(|&first| first == 0);
    let ascends = values.windows(2).all(|pair| pair[0] <= pair[1]);
    if starts && ascends && values.last().is_none_or(|&last| last as usize <= count) {
        return Ok(());
    }
    Err(Error::invalid(
        OP,
        format!("got offsets {values:?}, wanted them from 0 ascending to at most {count}"),
    )
    .into())
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Tensor};

    use super::{BagMode, EmbeddingBagOptions};
    use crate::ops::testing::check_twice;
    use crate::{Options, Var, grad};

    #[test]
    fn rows_have_their_derivatives_and_the_padding_row_has_none() {
        let index = Var::from_slice(&[2i64, 0, 2, 1], &[2, 2], Device::CPU).unwrap();
        check_twice(&[&[3, 2]], |v| {
            let y = v[0].embedding(&index, None)?;
            y.mul(&y)
        });
        let w = Var::leaf(Tensor::from_slice(&[1.0; 6], &[3, 2], Device::CPU).unwrap()).unwrap();
        for create_graph in [false, true] {
            let y = w.embedding(&index, Some(-1)).unwrap();
            let options = Options { create_graph, ..Options::default() };
            let dw = grad(&[(y.sum_all().unwrap(), None)], &[&w], options).unwrap().remove(0).unwrap();
            assert_eq!(dw.to_vec::<f64>().unwrap(), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]);
        }
    }

    fn ints(values: &[i64], shape: &[usize]) -> Var {
        Var::from_slice(values, shape, Device::CPU).unwrap()
    }

    #[test]
    fn bags_with_offsets_are_those_of_one_length() {
        let table = Var::from_slice(&[1.0, -2.0, 3.0, 5.0, 0.5, 7.0], &[3, 2], Device::CPU).unwrap();
        let (even, flat) = (ints(&[0, 1, 2, 2], &[2, 2]), ints(&[0, 1, 2, 2], &[4]));
        for mode in [BagMode::Sum, BagMode::Mean] {
            for padding in [None, Some(1), Some(-1)] {
                let options = EmbeddingBagOptions { mode, padding, ..EmbeddingBagOptions::default() };
                let wanted = table.embedding_bag(&even, &options).unwrap().to_vec::<f64>().unwrap();
                let options = EmbeddingBagOptions { offsets: Some(ints(&[0, 2, 4], &[3])), ..options };
                let got = table.embedding_bag(&flat, &options).unwrap().to_vec::<f64>().unwrap();
                assert_eq!(got, [&wanted[..], &[0.0, 0.0]].concat());
            }
        }
        let largest = EmbeddingBagOptions { mode: BagMode::Max, ..EmbeddingBagOptions::default() };
        assert_eq!(
            table.embedding_bag(&even, &largest).unwrap().to_vec::<f64>().unwrap(),
            [3.0, 5.0, 0.5, 7.0]
        );
        let largest = EmbeddingBagOptions { padding: Some(2), ..largest };
        assert_eq!(
            table.embedding_bag(&even, &largest).unwrap().to_vec::<f64>().unwrap(),
            [3.0, 5.0, 0.0, 0.0]
        );
    }

    #[test]
    fn first_and_second_derivatives_hold() {
        let index = ints(&[0, 2, 2, 1, 0, 3], &[2, 3]);
        for mode in [BagMode::Sum, BagMode::Mean, BagMode::Max] {
            let options = EmbeddingBagOptions { mode, ..EmbeddingBagOptions::default() };
            check_twice(&[&[4, 2]], |v| v[0].tanh()?.embedding_bag(&index, &options));
        }
        let flat = index.reshape(&[-1]).unwrap();
        check_twice(&[&[4, 2], &[6]], |v| {
            let (weights, offsets) = (Some(v[1].clone()), Some(ints(&[0, 0, 4], &[3])));
            let options = EmbeddingBagOptions { mode: BagMode::Sum, offsets, weights, padding: None };
            v[0].tanh()?.embedding_bag(&flat, &options)
        });
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let table = Var::from_slice(&[0.0; 6], &[3, 2], Device::CPU).unwrap();
        let index = ints(&[0, 1], &[2]);
        let error =
            |options: EmbeddingBagOptions| table.embedding_bag(&index, &options).unwrap_err().to_string();
        let sum = EmbeddingBagOptions { mode: BagMode::Sum, ..EmbeddingBagOptions::default() };
        assert!(error(sum.clone()).contains("[count] with offsets"));
        for offsets in [&[1, 2][..], &[0, 3], &[0, 2, 1], &[0, -1]] {
            let offsets = Some(ints(offsets, &[offsets.len()]));
            assert!(
                error(EmbeddingBagOptions { offsets, ..sum.clone() })
                    .starts_with("embedding_bag: got offsets")
            );
        }
        let offsets = Some(ints(&[0], &[1]));
        assert!(
            error(EmbeddingBagOptions { offsets: offsets.clone(), mode: BagMode::Max, ..sum.clone() })
                .contains("maximum")
        );
        let weights = Some(table.select(0, 0).unwrap());
        let weighted = EmbeddingBagOptions { offsets, weights, mode: BagMode::Mean, ..sum };
        assert!(error(weighted).contains("weights are for sums"));
        assert!(
            table
                .embedding_bag(&ints(&[0, 3], &[1, 2]), &EmbeddingBagOptions::default())
                .unwrap_err()
                .to_string()
                .contains("index 3")
        );
    }
}
