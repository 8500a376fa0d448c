//! Text: [`Bpe`] learns byte pairs, [`Codec`] is a model's tokenizer, [`Corpus`] is the data of a language
//! model, and [`PrepareConfig`] makes token files of large texts for it.

mod bpe;
#[cfg(feature = "chat")]
mod chat;
mod codec;
#[cfg(feature = "chat")]
mod conversations;
mod corpus;
mod end_tokens;
mod folder_text;
mod prepare;
#[cfg(feature = "chat")]
mod template;

pub use bpe::Bpe;
#[cfg(feature = "chat")]
pub use chat::Chat;
pub use codec::{Codec, TOKENIZER};
#[cfg(feature = "chat")]
pub use conversations::Conversations;
use corpus::check_vocabulary;
pub use corpus::{Answers, Corpus, CorpusConfig, TRAINING, VALIDATION};
pub use end_tokens::end_tokens;
pub use folder_text::text_of_folder;
pub use prepare::PrepareConfig;
#[cfg(feature = "chat")]
pub use template::{ChatTemplate, Message, Rendered};
