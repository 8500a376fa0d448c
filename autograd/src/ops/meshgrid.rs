//! Coordinates of the points of a grid.
//!
//! Views; derivative: the sum over what was repeated.

use std::borrow::Borrow;

use phalanx_tensor::{Dims, Error};

use super::composed::named;
use crate::{Result, Var};

/// Which dimension of [`Var::meshgrid`]'s results belongs to which input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MeshIndexing {
    /// Dimension `i` to input `i`, as PyTorch's default.
    #[default]
    Ij,
    /// The first two exchanged, as NumPy's default: rows belong to the second input.
    Xy,
}

impl Var {
    /// Of vectors (or single numbers) one tensor each, of all their sizes, that varies along its own dimension only.
    ///
    /// # Errors
    /// If there is none, one has more than one dimension, or dtypes or devices differ.
    pub fn meshgrid<V: Borrow<Var>>(vars: &[V], indexing: MeshIndexing) -> Result<Vec<Var>> {
        const OP: &str = "meshgrid";
        let Some(first) = vars.first().map(Borrow::borrow) else {
            return Err(Error::invalid(OP, "got no tensors, wanted at least one").into());
        };
        let vars = || vars.iter().map(Borrow::borrow);
        if let Some(wide) = vars().find(|v| v.rank() > 1) {
            return Err(Error::shape(OP, format!("{:?}", wide.shape()), "at most one dimension").into());
        }
        if let Some(other) = vars().find(|v| v.dtype() != first.dtype()) {
            let wanted = format!("{}, as the first operand", first.dtype());
            return Err(Error::dtype(OP, other.dtype(), wanted).into());
        }
        if let Some(other) = vars().find(|v| v.device() != first.device()) {
            return Err(Error::Device { op: OP, left: first.device(), right: other.device() }.into());
        }
        let shape: Dims = vars().map(Var::numel).collect();
        let grid = |(i, v): (usize, &Var)| -> Result<Var> {
            let mut own = Dims::from_elem(1, shape.len());
            own[i] = shape[i];
            let grid = v.reshape_to(&own)?.broadcast_to(&shape)?;
            let swaps = indexing == MeshIndexing::Xy && shape.len() > 1;
            if swaps { grid.transpose(0, 1) } else { Ok(grid) }
        };
        named(OP, vars().enumerate().map(grid).collect())
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::MeshIndexing;
    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn grids_are_numpys_and_have_their_derivatives() {
        let x = Var::from_slice(&[1i64, 2, 3], &[3], Device::CPU).unwrap();
        let y = Var::from_slice(&[4i64, 5], &[2], Device::CPU).unwrap();
        for (indexing, shape) in [(MeshIndexing::Ij, [3, 2]), (MeshIndexing::Xy, [2, 3])] {
            let grids = Var::meshgrid(&[&x, &y], indexing).unwrap();
            assert!(grids.iter().all(|grid| grid.shape() == shape));
            let along = grids[0].select(usize::from(indexing == MeshIndexing::Ij), 0).unwrap();
            assert_eq!(along.to_vec::<i64>().unwrap(), [1, 2, 3]);
        }
        check_twice(&[&[3], &[], &[2]], |v| {
            let grids = Var::meshgrid(v, MeshIndexing::Xy)?;
            grids[0].mul(&grids[1])?.mul(&grids[2])
        });
        assert!(Var::meshgrid::<Var>(&[], MeshIndexing::Ij).is_err());
        assert!(Var::meshgrid(&[x.clone(), y.to(DType::F32).unwrap()], MeshIndexing::Ij).is_err());
        assert!(Var::meshgrid(&[x.unsqueeze(0).unwrap()], MeshIndexing::Ij).is_err());
    }
}
