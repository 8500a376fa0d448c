//! [`Stage`]: the layers of a stage as a function of what enters it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use phalanx_nn::autograd::{Recompute, Result as GradResult, Var, checkpoint_apart, is_recomputing};

use super::timeline::{Phase, Watch};
use super::{Batch, Route, Sequence, Skips, StageLayers};
use crate::Result;
use crate::pipeline::MicroBatch;

/// A stage, and the skips that enter and leave it.
pub(super) struct Stage {
    pub(super) model: Arc<Sequence>,
    pub(super) own: StageLayers,
    pub(super) incoming: Vec<Route>,
    pub(super) outgoing: Vec<Route>,
}

/// What crosses a stage's border: the batch, and the skips in the order of the routes, where some are nothing.
pub(super) struct Parcel {
    pub(super) batch: Vec<Var>,
    pub(super) skips: Vec<Option<Var>>,
}

impl Parcel {
    /// The values in a row; and what it takes to undo that.
    pub(super) fn pack(self) -> (Vec<Var>, Packing) {
        let packing =
            Packing { batch: self.batch.len(), skips: self.skips.iter().map(Option::is_some).collect() };
        (self.batch.into_iter().chain(self.skips.into_iter().flatten()).collect(), packing)
    }
}

/// How a parcel's values lie in a row.
#[derive(Clone, Default)]
pub(super) struct Packing {
    batch: usize,
    skips: Vec<bool>,
}

impl Packing {
    pub(super) fn unpack(&self, values: Vec<Var>) -> Parcel {
        let mut values = values.into_iter();
        let batch = values.by_ref().take(self.batch).collect();
        let skips = self.skips.iter().map(|&there| if there { values.next() } else { None }).collect();
        Parcel { batch, skips }
    }
}

/// A stage's output, and how to recompute it, if that is to be done.
pub(super) struct Computed {
    pub(super) values: Vec<Var>,
    pub(super) packing: Packing,
    pub(super) recompute: Option<Recompute>,
}

impl Stage {
    /// What leaves the stage if `input` enters it. With `recomputed`, its inner values are not kept.
    ///
    /// # Errors
    /// If a layer refuses, or leaves its device.
    pub(super) fn compute(
        self: &Arc<Stage>,
        input: Parcel,
        recomputed: bool,
        part: MicroBatch,
        watch: &Watch,
    ) -> Result<Computed> {
        let (values, packing) = input.pack();
        let left = Arc::new(Mutex::new(Packing::default()));
        let (stage, watch, packed) = (self.clone(), watch.clone(), left.clone());
        let function = move |values: &[Var]| -> GradResult<Vec<Var>> {
            let begin = Instant::now();
            let _part = part.enter();
            let (output, packing) = stage.run(packing.unpack(values.to_vec()))?.pack();
            *packed.lock().unwrap_or_else(PoisonError::into_inner) = packing;
            watch.over(if is_recomputing() { Phase::Recompute } else { Phase::Forward }, begin);
            Ok(output)
        };
        let (values, recompute) = match recomputed {
            true => checkpoint_apart(function, &values.iter().collect::<Vec<_>>())?,
            false => (function(&values)?, None),
        };
        let packing = std::mem::take(&mut *left.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(Computed { values, packing, recompute })
    }

    /// Runs the layers.
    fn run(&self, input: Parcel) -> Result<Parcel> {
        let mut skips = Skips::default();
        self.incoming.iter().zip(input.skips).for_each(|(route, value)| skips.hold(&route.skip, value));
        let batch = self.model.run_layers(self.own.layers.clone(), input.batch.into(), &mut skips)?;
        batch.check_device(self.own.device)?;
        let skips: Vec<_> = self.outgoing.iter().map(|route| skips.take(&route.skip).flatten()).collect();
        Batch::from(skips.iter().flatten().cloned().collect::<Vec<_>>()).check_device(self.own.device)?;
        Ok(Parcel { batch: batch.into_values(), skips })
    }
}
