//! Training runs: any model, on one device or any mesh of ranks.
//!
//! ```text
//! Trainer      a run as one value: configuration, data, model, loss
//! Config       how it trains, whatever it trains           Data      what it reads
//! start, ranks, Place   how a run comes to have ranks      Run       one rank, from its first step to its last
//! Settings     a configuration by keys: files, words, help    Record, Summary, Callback   what it reports
//! ```
//! It knows no model and no command line. A [`Run`] trains a [`Part`](phalanx_parallel::hybrid::Part): a rank's stages of a model,
//! which give a loss from a batch. [`Trainer`] makes parts of plain modules and of layers in a row.
//!
//! | for | items |
//! |---|---|
//! | a run in one call | [`Trainer`], [`Config`], [`Layout`], [`Summary`] |
//! | a loop of your own | [`Run`], [`start`], [`ranks`], [`Place`], [`Data`], [`Averaged`] |
//! | data sets | [`data::Dataset`], [`data::TensorDataset`], [`data::DataLoader`]; `ImageFolder`, `Csv`, `JsonLines` with the features `images`, `csv`, `json` |
//! | texts | [`data::TokenFile`], [`data::IndexedTokens`], [`data::Blend`], [`data::prepare`], [`text::Bpe`], [`text::Codec`] |
//! | numbers that go wrong | [`OnDivergence`], [`Plateau`] |
//! | what a run reports | [`Callback`], [`Event`], [`Record`], [`Reporter`], [`report::Report`], [`Trace`] |
//! | checkpoints | [`checkpoints::latest`], [`checkpoints::best`] |
#![forbid(unsafe_code)]

mod ahead;
mod asynchronous;
mod averaged;
mod callback;
mod captured;
pub mod checkpoints;
mod command;
mod config;
pub mod data;
mod divergence;
mod error;
mod guarded;
mod holds;
mod identity;
mod inspect;
mod machine;
mod means;
mod memory;
mod mfu;
mod model;
mod optimizers;
mod outputs;
mod place;
mod profile;
mod progress;
mod rate;
mod record;
pub mod report;
mod reporter;
mod room;
mod run;
mod settings;
mod step;
pub mod text;
mod trace;
mod trainer;
mod training;
mod validation;

pub use phalanx_parallel::hybrid::Layout;

pub use averaged::Averaged;
pub use callback::{Callback, Event};
pub use config::{Asynchronous, Backend, Config, OnDivergence, Plateau};
pub use error::{Error, Result};
pub use means::Data;
pub use optimizers::{AnyRule, adamw, adamw_with, muon};
pub use place::{Observers, Place, digest, ranks, start};
pub use progress::{Line, Progress};
pub use record::{Record, Summary, numbers_in};
pub use reporter::Reporter;
pub use room::room;
pub use run::Run;
pub use settings::{Given, Key, Keyed, Kind, Settings, Source, Value};
pub use trace::{Lane, Trace};
pub use trainer::Trainer;

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
