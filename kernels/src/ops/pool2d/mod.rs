//! Pooling: images reduced window by window, `[channels, h, w]` or `[n, channels, h, w]`.

mod cuda;
mod largest;
mod max;
mod mean;
mod options;
mod pick;
mod whole;
mod windows;

pub use max::max_pool2d;
pub use mean::{mean_pool2d, mean_unpool2d};
pub use options::PoolOptions;
pub use pick::{max_pick2d, max_unpool2d};
pub use windows::Windows;

use phalanx_tensor::{Dims, Error, Result, Tensor};

/// Elements of a row or plane that a thread works on at least.
const PIECE: usize = 8192;

/// The last two sizes of a tensor of images.
fn image(op: &'static str, x: &Tensor) -> Result<[usize; 2]> {
    match x.shape() {
        [_, h, w] | [_, _, h, w] => Ok([*h, *w]),
        other => Err(Error::shape(op, format!("{other:?}"), "[channels, h, w] or [n, channels, h, w]")),
    }
}

/// The shape with other images.
fn resized(shape: &[usize], size: [usize; 2]) -> Dims {
    let mut shape = Dims::from_slice(shape);
    let rank = shape.len();
    shape[rank - 2..].copy_from_slice(&size);
    shape
}

/// Whole rows (or planes) of so many elements that make a piece of work.
fn piece(len: usize) -> usize {
    PIECE.div_ceil(len.max(1)) * len.max(1)
}
