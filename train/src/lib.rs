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

mod asynchronous;
mod callback;
pub mod checkpoints;
mod config;
pub mod data;
mod divergence;
mod error;
mod gpu_step;
mod guarded;
mod identity;
mod inspect;
mod machine;
mod model;
mod optimizers;
mod outputs;
mod place;
mod profile;
mod record;
pub mod report;
mod reporter;
mod run;
mod settings;
mod step;
pub mod text;
mod trace;
mod trainer;
mod training;
mod validation;

pub use phalanx_parallel::hybrid::Layout;

pub use callback::{Callback, Event, Line, Progress};
pub use config::{Asynchronous, Backend, Config, OnDivergence, Plateau};
pub use data::Data;
pub use error::{Error, Result};
pub use identity::digest;
pub use machine::room;
pub use optimizers::{AnyRule, Averaged, adamw, adamw_with, muon};
pub use place::{Observers, Place, ranks, start};
pub use record::{Record, Summary, numbers_in};
pub use reporter::Reporter;
pub use run::Run;
pub use settings::{Given, Key, Keyed, Kind, Settings, Source, Value};
pub use trace::{Lane, Trace};
pub use trainer::Trainer;

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
