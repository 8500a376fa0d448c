//! Text: [`Bpe`] learns tokens and cuts text into them, [`Codec`] is whatever a model's folder says.

mod bpe;
mod codec;
mod json;

pub use bpe::Bpe;
pub use codec::{Codec, TOKENIZER};
