//! Rows replaced by others, the last of several for a row.
//!
//! Saves the places, which rows are replaced, and which values are written over.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Tensor};

use crate::{Backward, Cx, Grads, Result, Saver, Var, begins, grads2, record};

/// `x` `[rows, width]` with `values` `[count, width]` in the rows that `places` name; the last of several stays.
pub(super) fn replaced(x: &Var, places: &Var, values: &Var) -> Result<Var> {
    begins();
    if values.numel() == 0 {
        return Ok(x.clone());
    }
    let rows = x.shape()[0];
    // The position that each row's value comes from, plus 1; 0 for a row that stays.
    let owners = owners(places.tensor(), rows)?;
    let taken = kernels::gt_scalar(&owners, 0.into())?;
    let from = kernels::sub_scalar(&kernels::clamp(&owners, Some(1.into()), None)?, 1.into())?;
    let column = |t: &Tensor| t.with_shape(&[t.numel(), 1]);
    let taken = column(&taken)?;
    let new = kernels::index_select(values.tensor(), 0, &from)?;
    let y = kernels::where_(&taken, &new, x.tensor())?;
    record("index_put", &[x, values], y, |s: &Saver<'_>| {
        let lost = match s.needs(1) {
            false => None,
            true => {
                let count = places.numel() as i64;
                let own = kernels::arange(1, count + 1, 1, DType::I64, x.device())?;
                let winner = kernels::index_select(&owners, 0, places.tensor())?;
                Some(column(&kernels::ne(&winner, &own)?)?)
            }
        };
        Ok(Replaced { places: places.clone(), taken: Var::new(taken), lost: lost.map(Var::new) })
    })
}

/// For each row one plus the last position that names it, or 0.
fn owners(places: &Tensor, rows: usize) -> Result<Tensor> {
    let (count, device) = (places.numel(), places.device());
    if !device.is_cuda() && !device.is_meta() {
        let mut owners = vec![0_i64; rows];
        for (position, &row) in (1..).zip(&places.to_vec::<i64>()?) {
            if let Some(owner) = usize::try_from(row).ok().and_then(|row| owners.get_mut(row)) {
                *owner = position;
            }
        }
        return Ok(Tensor::from_slice(&owners, &[rows], device)?);
    }
    let (sorted, order) = kernels::sort(places, 0, false)?;
    let last = kernels::full(&[1], true, DType::Bool, device)?;
    let ends = kernels::ne(&sorted.narrow(0, 1, count - 1)?, &sorted.narrow(0, 0, count - 1)?)?;
    let ends = kernels::cast(&kernels::cat(&[&ends, &last], 0)?, DType::I64)?;
    let positions = kernels::mul(&kernels::add_scalar(&order, 1.into())?, &ends)?;
    let none = Tensor::zeros(&[rows], DType::I64, device)?;
    Ok(kernels::index_add(&none, 0, &sorted, &positions, 1.0)?)
}

struct Replaced {
    places: Var,
    /// `[rows, 1]`: whether a row is replaced.
    taken: Var,
    /// `[count, 1]`: whether a value is written over by a later one.
    lost: Option<Var>,
}

impl Backward for Replaced {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let dx = || cx.dy().masked_fill(&self.taken, 0.0);
        let dvalues = |lost: &Var| cx.dy().index_select(0, &self.places)?.masked_fill(lost, 0.0);
        let lost = self.lost.as_ref().filter(|_| cx.needs(1));
        grads2(cx.needs(0).then(dx).transpose()?, lost.map(dvalues).transpose()?)
    }
}
