//! Text: [`Bpe`] learns byte pairs, [`Codec`] is a model's tokenizer, [`Corpus`] is the data of a language
//! model, and [`PrepareConfig`] makes token files of large texts for it.

mod bpe;
mod codec;
mod corpus;
mod prepare;

pub use bpe::Bpe;
pub use codec::{Codec, TOKENIZER};
use corpus::check_vocabulary;
pub use corpus::{Corpus, CorpusConfig, TRAINING, VALIDATION, text_of_folder};
pub use prepare::PrepareConfig;
