//! The operations, one file or folder each. An operation checks its arguments once, makes its output on any
//! device, and computes it where there are elements.

mod accumulate;
mod add;
mod any_nan;
mod cast;
mod full;
mod mul;
pub mod optim;
mod scale;
mod sum;
mod sum_of_squares;
mod tanh;

pub use accumulate::accumulate_;
pub use add::{add, add_scalar};
pub use any_nan::any_nan;
pub use cast::cast;
pub use full::{fill_, full};
pub use mul::{mul, mul_scalar};
pub use scale::scale_;
pub use sum::sum;
pub use sum_of_squares::{NORM_BLOCK, sum_of_squares_blocks};
pub use tanh::{tanh, tanh_backward};
