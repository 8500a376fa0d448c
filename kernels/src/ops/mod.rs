//! The operations, one file or folder each. An operation checks its arguments once, makes its output on any
//! device, and computes it where there are elements.

mod accumulate;
mod add;
mod any_nan;
mod cast;
mod cat;
mod copy;
mod flip;
mod full;
mod linear;
mod matmul;
mod mul;
pub mod optim;
mod pad;
mod scale;
mod sum;
mod sum_of_squares;
mod tanh;
mod tril;

pub use accumulate::accumulate_;
pub use add::{add, add_scalar};
pub use any_nan::any_nan;
pub use cast::cast;
pub use cat::cat;
pub use copy::copy_;
pub use flip::flip;
pub use full::{fill_, full};
pub use linear::linear;
pub use matmul::{matmul, matmul_accumulate_};
pub use mul::{mul, mul_scalar};
pub use pad::pad;
pub use scale::scale_;
pub use sum::{mean, sum};
pub use sum_of_squares::{NORM_BLOCK, sum_of_squares_blocks};
pub use tanh::{tanh, tanh_backward};
pub use tril::{tril, triu};
