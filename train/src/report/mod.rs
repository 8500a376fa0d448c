//! [`Report`]: what a training run was, as one page that opens anywhere.
//!
//! A program fills a [`Report`] field by field while it trains and writes [`Report::to_html`] to a file. The page makes no request: its
//! style, script and data are inside. Parts without data are left out.
//!
//! ```text
//!   Report --- heading, layout, texts --> HTML (reads without a script, too)
//!      \------ Drawn, as JSON ---------> page/*.js draws curves, memory, timeline and tables
//! ```
//!
//! Beside the page a run leaves files for other tools: [`table`] (CSV), [`events`] (TensorBoard), [`svg`] (a picture of the loss).

mod curves;
pub mod events;
mod format;
mod html;
mod layout;
mod step;
pub mod svg;
pub mod table;
mod texts;

pub use curves::{Chart, Curves, Mark, MarkKind, Series};
pub use html::Summary;
pub use layout::{Layout, RankStorage};
use serde::{Deserialize, Serialize};
pub(crate) use step::conspicuous;
pub use step::{Collective, Lane, Memory, Operation, Pass, Profile, Profiled, Span, SpanKind, Timeline};
pub use texts::{Machine, Sample, Setting};

/// The former name of [`RankStorage`].
#[deprecated(since = "0.1.0", note = "renamed to `RankStorage`")]
pub type Holds = RankStorage;

/// The contents of a run's page. Every field may be empty.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// The run's name: the page's heading.
    pub name: String,
    /// Duration, size, and how the run ended.
    pub summary: Summary,
    /// The measurements of each step.
    pub curves: Curves,
    /// Events at single steps.
    pub marks: Vec<Mark>,
    /// The memory of one step, for each rank.
    pub memory: Vec<Memory>,
    /// What each rank holds. A run on one rank has none.
    pub layout: Option<Layout>,
    /// The spans of one step.
    pub timeline: Option<Timeline>,
    /// The communication: one entry for each rank, kind and group.
    pub collectives: Vec<Collective>,
    /// The share of time that the other ranks waited for each rank, as measured last.
    pub waited_for: Vec<f64>,
    /// The time of each operation.
    pub profile: Profile,
    /// Samples that the model wrote during training, oldest first.
    pub samples: Vec<Sample>,
    /// Every setting, in the order to show.
    pub settings: Vec<Setting>,
    /// The machine.
    pub machine: Machine,
    /// The command line that repeats the run, quoted for a shell.
    pub command: String,
}

impl Report {
    /// The page as one HTML file.
    pub fn to_html(&self) -> String {
        html::page(self)
    }
}
