//! [`StagedSequence`]: the stages of one rank of layers in a row, with skips between layers of any stages.

use std::ops::Range;

use phalanx_nn::autograd::Var;
use phalanx_tensor::{DType, Device, Tensor};

use super::{Chunks, SkipRoute};
use crate::pipeline::gpipe::{Batch, Partition, Route, Sequence, Skippable, Skips, routes, verify_skips};
use crate::{Error, Result};

/// A rank's stages of a [`Sequence`], whose layers may take and give several values and may stash and pop skips. Each rank
/// builds the layers of its own stages and knows the skips of all.
///
/// ```
/// use std::sync::Arc;
/// use phalanx_nn::{LinearConfig, Scope, Tanh, autograd::Var};
/// use phalanx_parallel::pipeline::gpipe::{Sequence, Skippable};
/// use phalanx_parallel::pipeline::ranks::{Pipeline, StageArgs, StageFn, StagedSequence};
/// use phalanx_parallel::pipeline::schedule::one_f_one_b;
/// use phalanx_parallel::{Result, launch};
/// use phalanx_tensor::DType;
///
/// // Two stages, of two layers and of one; these layers have no skips.
/// let (balance, skippables) = ([2, 1], vec![Skippable::new(); 3]);
/// let losses = launch::threads(2, |rank| -> Result<_> {
///     let scope = Scope::new(7, DType::F32, rank.device());
///     let linear = |name: &str| LinearConfig::new(3, 3).init(&scope.child(name));
///     let own = match rank.rank() {
///         0 => Sequence::new().with(linear("0")?).with(Tanh),
///         _ => Sequence::new().with(linear("2")?),
///     };
///     let model = Arc::new(StagedSequence::new(&balance, &skippables, vec![(rank.rank(), own)])?);
///     let skips = model.skips().to_vec();
///     let stage_fn = StageFn::of_values(move |args: StageArgs<'_, Var>, inputs: &[Var]| {
///         let given = if args.stage == 0 { std::slice::from_ref(args.batch) } else { inputs };
///         let outputs = model.run(args.stage, given)?;
///         Ok(if args.stage == 1 { vec![outputs[0].square()?.sum_all()?] } else { outputs })
///     });
///     let x = Var::from_slice(&[1.0f32; 6], &[2, 3], rank.device())?;
///     let pipeline = Pipeline::new(&one_f_one_b(2, 1)?, rank.comm().clone(), rank.device())?;
///     Ok(pipeline.train(&stage_fn.with_skips(skips).on(x, 0))?.len())
/// });
/// assert_eq!(losses.unwrap(), [0, 1]);
/// # Ok::<(), phalanx_parallel::Error>(())
/// ```
pub struct StagedSequence {
    stages: Chunks<Sequence>,
    routes: Vec<Route>,
    skips: Vec<SkipRoute>,
}

impl StagedSequence {
    /// `balance` is the number of layers of each stage of the model, and `skippables` the skips of all its layers
    /// ([`Sequence::skippables`]). `own` has the layers of this rank's stages, by the numbers of the stages, ascending.
    ///
    /// # Errors
    /// If skips do not match ([`verify_skips`]), or a stage has other layers than `balance` and `skippables` say.
    pub fn new(
        balance: &[usize],
        skippables: &[Skippable],
        own: Vec<(usize, Sequence)>,
    ) -> Result<StagedSequence> {
        verify_skips(skippables)?;
        let partition = Partition::new(balance, &vec![Device::CPU; balance.len()])?;
        if partition.layers() != skippables.len() {
            let (got, wanted) = (skippables.len(), partition.layers());
            return Err(Error::Config(format!(
                "staged sequence: got the skips of {got} layers, wanted those of {wanted}: {balance:?}"
            )));
        }
        let number = |(stage, layers): (usize, Sequence)| {
            let range = partition.stages().get(stage).map_or(0..0, |stage| stage.layers.clone());
            if layers.skippables() == skippables[range.clone()] && !range.is_empty() {
                return Ok((stage, layers.numbered_from(range.start)));
            }
            let (got, wanted) = (describe(&layers.skippables()), describe(&skippables[range.clone()]));
            Err(Error::Config(format!(
                "staged sequence: stage {stage} {got}, wanted {wanted}: layers {range:?}"
            )))
        };
        let stages = Chunks::new(own.into_iter().map(number).collect::<Result<_>>()?);
        let routes = routes(skippables, &partition);
        let skips = routes.iter().map(|route| SkipRoute { from: route.from, to: route.to }).collect();
        Ok(StagedSequence { stages, routes, skips })
    }

    /// The skips between stages, for [`Stages::skips`](super::Stages::skips).
    pub fn skips(&self) -> &[SkipRoute] {
        &self.skips
    }

    /// The outputs of a stage, as [`Stages::forward_values`](super::Stages::forward_values) gives them: values, and the skips that
    /// begin at it. `inputs` are those that it gets; of the first stage, the values of the batch.
    ///
    /// # Errors
    /// If the stage is not on this rank, the number of inputs is wrong, or a layer refuses.
    pub fn run(&self, stage: usize, inputs: &[Var]) -> Result<Vec<Var>> {
        let layers = self.stages.of(stage)?;
        let incoming: Vec<&Route> = self.routes.iter().filter(|route| route.to == stage).collect();
        let Some(values) = inputs.len().checked_sub(incoming.len()).filter(|&values| values > 0) else {
            let (got, skips) = (inputs.len(), incoming.len());
            return Err(Error::Config(format!(
                "staged sequence: stage {stage} got {got} inputs, wanted {skips} skips and at least 1 value"
            )));
        };
        let (values, popped) = inputs.split_at(values);
        let mut skips = Skips::default();
        for (route, value) in incoming.into_iter().zip(popped) {
            skips.hold(&route.skip, (!is_none(value)).then(|| value.clone()));
        }
        let all: Range<usize> = 0..layers.layers().len();
        let mut outputs = layers.run_layers(all, Batch::from(values.to_vec()), &mut skips)?.into_values();
        for route in self.routes.iter().filter(|route| route.from == stage) {
            let stashed = skips.take(&route.skip).flatten();
            outputs.push(stashed.map_or_else(|| none(outputs[0].device()), Ok)?);
        }
        Ok(outputs)
    }
}

fn describe(layers: &[Skippable]) -> String {
    let skips: Vec<String> = layers.iter().map(|layer| format!("[{layer}]")).collect();
    format!("of {} layers with skips {}", layers.len(), skips.join(" "))
}

/// What is sent of a skip that was stashed as `None`: booleans without elements.
fn none(device: Device) -> Result<Var> {
    Ok(Var::new(Tensor::empty(&[0], DType::Bool, device)?))
}

fn is_none(value: &Var) -> bool {
    value.dtype() == DType::Bool && value.shape() == [0]
}

phalanx_nn::parameters!(StagedSequence { stages = "" });
