//! Training runs: any model, on one device or any mesh of ranks.
//!
//! ```text
//! Trainer ----------------------------- a run as one value: configuration, data, model, loss
//!    |
//! launch: start, ranks, MeshRank ------ starts the run's ranks; one rank of the mesh
//!    |
//! Run --------------------------------- one rank of the run, from its first step to its last: the loop and the steps (run/)
//!    |
//! checkpoints, Reporter, Trace -------- what a run writes
//!    |
//! Config, Settings, data, text, report, Record --- configuration by keys, data sets, texts, plain data of reports
//! ```
//! The crate contains no model and no command line. A [`Run`] trains a
//! [`StagedModel`](phalanx_parallel::hybrid::StagedModel): a rank's stages of a model, which compute a loss from a
//! batch. [`Trainer`] builds one from a plain module or from a sequence of layers.
//!
//! | for | items |
//! |---|---|
//! | a run in one call | [`Trainer`], [`Config`], [`Layout`], [`Summary`] |
//! | a loop of your own | [`Run`], [`start`], [`ranks`], [`MeshRank`], [`Data`], [`Averaged`] |
//! | data sets | [`data::Dataset`], [`data::TensorDataset`], [`data::DataLoader`]; `ImageFolder`, `Csv`, `JsonLines` with the features `images`, `csv`, `json` |
//! | texts | [`data::TokenFile`], [`data::IndexedTokens`], [`data::Blend`], [`data::prepare`], [`text::Bpe`], [`text::Codec`] |
//! | chats | `text::ChatTemplate`, `text::Conversations`, `text::Chat` with the feature `chat`; [`GenerateConfig`] |
//! | what the host keeps | [`Offload`] |
//! | divergence and plateaus | [`OnDivergence`], [`Plateau`] |
//! | steps that are repeated | [`Trainer::replay`], [`Replay`], [`StepDigests`] |
//! | reports of a run | [`Callback`], [`Event`], [`Record`], [`Reporter`], [`report::Report`], [`Trace`] |
//! | what a language model writes | [`sample`], [`generate_rows`], [`generate_saved`] |
//! | checkpoints | [`checkpoints::latest`], [`checkpoints::best`], [`checkpoints::list`], [`stop_on_signals`] |
#![forbid(unsafe_code)]

mod calendar;
mod callback;
pub mod checkpoints;
mod config;
mod convert;
pub mod data;
mod error;
mod folder_lock;
mod former_names;
mod generation;
mod identity;
mod language_model;
mod launch;
mod machine;
mod memory_checkpoints;
mod mesh_rank;
mod plan;
mod rank_generation;
mod record;
pub mod report;
mod reporter;
mod run;
mod settings;
mod signals;
mod staged_models;
pub mod text;
mod trace;
mod trainer;

pub use phalanx_parallel::hybrid::Layout;

pub use callback::{Callback, Event, Progress, StatusLine};
pub use config::{Asynchronous, Backend, Config, Offload, OnDivergence, Plateau, run_folder};
pub use convert::{ConvertConfig, MODEL};
pub use data::Data;
pub use error::{Error, Result};
#[allow(deprecated)]
pub use former_names::{Given, Kind, Lane, Line, Place, Source, Value, room};
pub use generation::{GenerateConfig, MODEL_FOLDERS};
pub use identity::digest;
pub use language_model::{save_decoder, whole_decoder};
pub use launch::{ranks, start};
pub use machine::check_memory;
pub use memory_checkpoints::MemoryCheckpoints;
pub use mesh_rank::{MeshRank, Observers};
pub use plan::{plan_decoder, plan_layers};
pub use rank_generation::{generate_rows, generate_saved, sample};
pub use record::{Record, StepDigests, Summary, numbers_in};
pub use reporter::Reporter;
pub use run::Run;
pub use run::optimizers::{AnyRule, Averaged, adafactor, adamw, adamw_with, lamb, muon};
pub use run::replay::{Replay, Replayed};
pub use settings::{GivenValues, Key, Keyed, SettingValue, Settings, ValueKind, ValueSource, take_flag};
pub use signals::stop_on_signals;
pub use trace::{RankTrace, Trace};
pub use trainer::Trainer;

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
