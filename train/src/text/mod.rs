//! Text: [`Bpe`] learns tokens and cuts text into them, [`Codec`] is how a model's folder cuts text, [`Corpus`] is what a language model
//! reads, and [`PrepareConfig`] makes token files of large texts for it.

mod bpe;
mod codec;
mod corpus;
mod prepare;

pub use bpe::Bpe;
pub use codec::{Codec, TOKENIZER};
use corpus::check_vocabulary;
pub use corpus::{Corpus, CorpusConfig, TRAINING, VALIDATION, text_of_folder};
pub use prepare::PrepareConfig;
