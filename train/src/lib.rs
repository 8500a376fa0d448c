//! Training runs: any model, on one device or any mesh of ranks.
//!
//! ```text
//! Trainer ---------------------------------------------- a run as one value: configuration, data, model, loss
//!    |
//! training, guarded, gpu_step, asynchronous ------------ the loop over steps of one rank
//!    |
//! Run, checkpoints, inspect, profile ------------------- one rank's state from its first step to its last
//!    |
//! step, validation, divergence, optimizers, trace ------ the parts of a step
//!    |
//! Place, start, ranks ---------------------------------- how a run starts its ranks
//!    |
//! Config, Settings, data, text, report, Record --------- configuration by keys, data sets, texts, plain data of reports
//! ```
//! The crate contains no model and no command line. A [`Run`] trains a
//! [`StagedModel`](phalanx_parallel::hybrid::StagedModel): a rank's stages of a model, which compute a loss from a
//! batch. [`Trainer`] builds one from a plain module or from a sequence of layers.
//!
//! | for | items |
//! |---|---|
//! | a run in one call | [`Trainer`], [`Config`], [`Layout`], [`Summary`] |
//! | a loop of your own | [`Run`], [`start`], [`ranks`], [`Place`], [`Data`], [`Averaged`] |
//! | data sets | [`data::Dataset`], [`data::TensorDataset`], [`data::DataLoader`]; `ImageFolder`, `Csv`, `JsonLines` with the features `images`, `csv`, `json` |
//! | texts | [`data::TokenFile`], [`data::IndexedTokens`], [`data::Blend`], [`data::prepare`], [`text::Bpe`], [`text::Codec`] |
//! | divergence and plateaus | [`OnDivergence`], [`Plateau`] |
//! | reports of a run | [`Callback`], [`Event`], [`Record`], [`Reporter`], [`report::Report`], [`Trace`] |
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
#[allow(deprecated)]
pub use machine::{check_memory, room};
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
