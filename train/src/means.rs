//! [`Means`]: how a rank trains and with whom; [`Data`]: what it reads.

use std::sync::Arc;
use std::time::Instant;

use phalanx_parallel::data_parallel::DataParallel;
use phalanx_parallel::pipeline::ranks::Pipeline;

use crate::Config;
use crate::data::{Dataset, Samples};
use crate::step::{Saving, Settings};

/// What a run reads.
#[derive(Clone)]
pub struct Data {
    /// Training samples. Row r of step s is sample `s * batch + r`.
    pub samples: Arc<dyn Samples>,
    /// What of a row counts in the mean loss: 1, or the tokens of a sequence.
    pub counted: usize,
    /// Data that is not trained on.
    pub validation: Option<Arc<dyn Dataset>>,
}

/// How a rank trains, and with whom.
pub(crate) struct Means {
    pub config: Config,
    /// What this rank runs of the model, and in which order.
    pub pipeline: Pipeline,
    /// What the ranks share of the model.
    pub share: Arc<dyn DataParallel>,
    pub saver: Saving,
    /// What it reads.
    pub data: Data,
}

impl Means {
    pub fn settings<'a>(&'a self, watch: &'a dyn Fn(&'static str, Instant)) -> Settings<'a> {
        let Means { config, pipeline, share: ranks, saver, data } = self;
        let Config { chains, clip, seed, batch, .. } = *config;
        Settings {
            chains,
            counted: batch * data.counted,
            scale: 1.0,
            ranks,
            pipeline,
            saver,
            clip,
            seed,
            watch,
        }
    }
}
