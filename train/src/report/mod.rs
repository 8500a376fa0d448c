//! [`Report`]: what a training run was, as one page that opens anywhere.
//!
//! A program fills a [`Report`] field by field while it trains and writes [`Report::to_html`] to a file. The page makes no request: its
//! style, its script and its data are inside. What nothing was put into does not show.
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
pub use layout::{Holds, Layout};
use serde::{Deserialize, Serialize};
pub use step::{Collective, Lane, Memory, Operation, Pass, Profile, Profiled, Span, SpanKind, Timeline};
pub use texts::{Machine, Sample, Setting};

/// A training run, as its page shows it. Every field may stay empty.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// What the run is called: the page's heading.
    pub name: String,
    /// How long, how large, how it ended.
    pub summary: Summary,
    /// What was measured at each step.
    pub curves: Curves,
    /// What happened at single steps.
    pub marks: Vec<Mark>,
    /// The memory of one step, one a rank.
    pub memory: Vec<Memory>,
    /// Which rank holds what. One rank alone needs none.
    pub layout: Option<Layout>,
    /// What ran when, in one step.
    pub timeline: Option<Timeline>,
    /// What ranks told each other: one for each rank, kind and group.
    pub collectives: Vec<Collective>,
    /// The time of each operation.
    pub profile: Profile,
    /// Texts that the model wrote as training went, oldest first.
    pub samples: Vec<Sample>,
    /// Every setting, in the order to show.
    pub settings: Vec<Setting>,
    /// What the run ran on.
    pub machine: Machine,
    /// The command line that repeats the run, quoted for a shell.
    pub command: String,
}

impl Report {
    /// The page. It holds everything that it needs.
    pub fn to_html(&self) -> String {
        html::page(self)
    }
}
