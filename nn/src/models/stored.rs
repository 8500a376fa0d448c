//! [`Stored`]: where files have a tensor of a model, and [`Layout`], which says it for all of a model's tensors.

use phalanx_tensor::Tensor;

use crate::{Error, Result};

/// How a family's files name and cut the tensors of a model.
pub(super) trait Layout {
    /// Where files have the parameter or buffer of this name.
    fn stored(&self, name: &str) -> Stored;

    /// Whether files may have this tensor though the model has no use for it.
    fn is_known(&self, stored: &str) -> bool;
}

/// Where files have a tensor of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stored {
    /// The tensors of the files. The model's tensor has the rows of each, one after the other.
    pub(crate) names: Vec<String>,
    /// Which of their rows.
    pub(crate) rows: Rows,
    /// Whether files have the transpose.
    pub(crate) transposed: bool,
}

impl Stored {
    /// All of the tensor of this name.
    pub(crate) fn whole(name: impl Into<String>) -> Stored {
        Stored::part(name.into(), Rows::All)
    }

    /// Some rows of a tensor.
    pub(crate) fn part(name: String, rows: Rows) -> Stored {
        Stored { names: vec![name], rows, transposed: false }
    }
}

/// Rows of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rows {
    All,
    /// So many from a row on.
    Some {
        from: usize,
        count: usize,
    },
    /// The rows are `[heads, 3, features]`, of which this third.
    Third {
        third: usize,
        heads: usize,
    },
    /// So many from a row on, of which the columns are `[features, experts]`: those of one expert.
    OfExpert {
        from: usize,
        count: usize,
        expert: usize,
        experts: usize,
    },
}

impl Rows {
    /// Those rows of a tensor of a file.
    pub(crate) fn of(self, whole: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Rows::All => whole.clone(),
            Rows::Some { from, count } => whole.narrow(0, from, count)?,
            Rows::OfExpert { from, count, expert, experts } => {
                let columns = whole.shape().get(1).map_or(0, |columns| columns / experts);
                let part = whole.narrow(0, from, count)?.contiguous()?;
                part.with_shape(&[count, columns, experts])?.select(2, expert)?.contiguous()?
            }
            Rows::Third { third, heads } => {
                let rest = &whole.shape()[1..];
                let shape = [&[heads, 3, whole.shape()[0] / (3 * heads)], rest].concat();
                let part = whole.contiguous()?.with_shape(&shape)?.select(1, third)?.contiguous()?;
                part.with_shape(&[&[whole.shape()[0] / 3], rest].concat())?
            }
        })
    }

    /// Where they are among those of the same tensor.
    pub(crate) fn place(self) -> usize {
        match self {
            Rows::All => 0,
            Rows::Some { from, .. } => from,
            Rows::Third { third, .. } => third,
            Rows::OfExpert { from, expert, experts, .. } => from * experts + expert,
        }
    }

    /// The shape of those rows.
    pub(crate) fn shape(self, whole: &[usize]) -> Option<Vec<usize>> {
        let (first, rest) = whole.split_first()?;
        let rows = match self {
            Rows::All => *first,
            Rows::OfExpert { from, count, experts, .. } => {
                let columns = rest.first()?.checked_div(experts)?;
                return Some(vec![count.min(first.checked_sub(from)?), columns]);
            }
            Rows::Some { from, count } => count.min(first.checked_sub(from)?),
            Rows::Third { heads, .. } => {
                if !first.is_multiple_of(3 * heads) {
                    return None;
                }
                first / 3
            }
        };
        Some([&[rows], rest].concat())
    }

    /// The tensor of a file, of all its parts in order.
    pub(crate) fn join(self, parts: &[Tensor]) -> Result<Tensor> {
        let [first, ..] = parts else { return Err(Error::invalid("save", "got no parts of a tensor")) };
        match self {
            Rows::All => Ok(first.clone()),
            Rows::Some { .. } => Ok(phalanx_kernels::cat(&parts.iter().collect::<Vec<_>>(), 0)?),
            Rows::OfExpert { experts, .. } => {
                let of_rows = |parts: &[Tensor]| {
                    let apart = parts
                        .iter()
                        .map(|part| part.unsqueeze(2))
                        .collect::<phalanx_tensor::Result<Vec<_>>>()?;
                    let joined = phalanx_kernels::cat(&apart.iter().collect::<Vec<_>>(), 2)?;
                    joined.with_shape(&[joined.shape()[0], joined.shape()[1] * joined.shape()[2]])
                };
                let rows = parts.chunks(experts).map(of_rows).collect::<phalanx_tensor::Result<Vec<_>>>()?;
                Ok(phalanx_kernels::cat(&rows.iter().collect::<Vec<_>>(), 0)?)
            }
            Rows::Third { heads, .. } => {
                let rest = &first.shape()[1..];
                let shape = [&[heads, 1, first.shape()[0] / heads], rest].concat();
                let apart = |part: &Tensor| part.contiguous()?.with_shape(&shape);
                let apart = parts.iter().map(apart).collect::<phalanx_tensor::Result<Vec<_>>>()?;
                let whole = phalanx_kernels::cat(&apart.iter().collect::<Vec<_>>(), 1)?;
                Ok(whole.with_shape(&[&[3 * first.shape()[0]], rest].concat())?)
            }
        }
    }
}
