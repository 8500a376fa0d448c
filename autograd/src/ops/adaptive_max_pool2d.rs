//! The largest pixels of windows that cover an image: window i of n holds rows `i h / n` to `ceil((i + 1) h / n)`.
//!
//! Along each dimension the windows are laid side by side, the shorter ones with their last pixel repeated, and pooled by
//! `max_pool2d`, whose derivative it has.

use std::ops::Range;

use phalanx_kernels::PoolOptions;
use phalanx_tensor::Error;

use super::avg_pool2d::image;
use super::composed::composed;
use crate::{Result, Var};

const OP: &str = "adaptive_max_pool2d";

impl Var {
    /// The largest pixels of `size` windows that cover the images `[channels, h, w]` or `[n, channels, h, w]`, as equal as
    /// they can be; NaN wins.
    ///
    /// # Errors
    /// If the images have no pixels, or the dtype is no floating-point one.
    pub fn adaptive_max_pool2d(&self, size: [usize; 2]) -> Result<Var> {
        let from = image(OP, self)?;
        if (0..2).any(|i| from[i] == 0 && size[i] > 0) {
            return Err(Error::shape(OP, format!("an image of {from:?}"), "one of at least one pixel").into());
        }
        composed(OP, &[self], |x| {
            let columns = x[0].pooled_to(x[0].rank() - 1, size[1])?;
            columns.pooled_to(x[0].rank() - 2, size[0])
        })
    }

    /// The largest of `size` windows along one of the last two dimensions.
    fn pooled_to(&self, dim: usize, size: usize) -> Result<Var> {
        if size == 0 {
            return self.narrow(dim, 0, 0);
        }
        let windows = windows(self.shape()[dim], size)?;
        let longest = windows.iter().map(Range::len).max().unwrap_or(1);
        let side_by_side = match windows.iter().all(|window| window.len() == longest)
            && longest * size == self.shape()[dim]
        {
            true => self.clone(),
            false => {
                let place = |window: &Range<usize>, i: usize| (window.start + i).min(window.end - 1) as i64;
                let places: Vec<i64> =
                    windows.iter().flat_map(|window| (0..longest).map(|i| place(window, i))).collect();
                self.index_select(dim, &Var::from_slice(&places, &[places.len()], self.device())?)?
            }
        };
        let kernel = if dim + 1 == self.rank() { [1, longest] } else { [longest, 1] };
        side_by_side.max_pool2d(&PoolOptions::new(kernel))
    }
}

fn windows(image: usize, size: usize) -> Result<Vec<Range<usize>>> {
    let mut windows = Vec::new();
    let room = windows.try_reserve_exact(size);
    room.map_err(|_| Error::range(OP, format!("a size of {size}"), "one that fits in memory"))?;
    let bound = |at: usize, up: u128| ((at as u128 * image as u128 + up) / size as u128) as usize;
    windows.extend((0..size).map(|at| bound(at, 0)..bound(at + 1, size as u128 - 1)));
    Ok(windows)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn windows_cover_the_image_and_derivatives_hold() {
        let x = Var::from_slice(&[5.0, 1.0, 2.0, 9.0, 3.0, 4.0, 8.0, 0.0, 7.0, 6.0], &[1, 2, 5], Device::CPU)
            .unwrap();
        let y = x.adaptive_max_pool2d([1, 3]).unwrap();
        assert_eq!(y.to_vec::<f64>().unwrap(), [8.0, 9.0, 9.0]);
        assert_eq!(x.adaptive_max_pool2d([2, 1]).unwrap().to_vec::<f64>().unwrap(), [9.0, 8.0]);
        assert_eq!(x.adaptive_max_pool2d([0, 3]).unwrap().shape(), [1, 0, 3]);
        for size in [[1, 1], [2, 3], [4, 2], [3, 7], [5, 4]] {
            check_twice(&[&[2, 2, 5, 4]], |v| v[0].tanh()?.adaptive_max_pool2d(size));
        }
        assert!(x.narrow(2, 0, 0).unwrap().adaptive_max_pool2d([1, 1]).is_err());
        assert!(x.adaptive_max_pool2d([1, usize::MAX]).is_err());
        assert!(x.to(DType::I64).unwrap().adaptive_max_pool2d([1, 1]).is_err());
    }
}
