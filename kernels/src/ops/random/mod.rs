//! Random numbers, each a function of the stream and of its element's place in the whole tensor alone: threads,
//! shards and repetitions draw the same ones.

mod cuda;
mod dropout;
mod fill;
mod words;

pub use dropout::dropout;
pub use fill::{normal, truncated_normal, uniform};
