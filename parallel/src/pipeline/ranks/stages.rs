//! What the stages of a pipeline compute, which the caller brings: [`Stages`], a trait that the executor calls; [`StageFn`], the same
//! as a function of [`StageArgs`] (Megatron-LM: `forward_step`).

use std::ops::Range;
use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::{Parameter, cut};
use phalanx_tensor::{DType, Dims, Tensor};

use crate::data_parallel::{DataParallel, NoSync};
use crate::pipeline::MicroBatch;

use super::SkipRoute;
use crate::{Error, Result};

/// The computation of a rank's stages, which are numbered over the whole model.
///
/// With recomputation `forward` is called twice for a micro-batch and must compute the same. Side effects are allowed only in
/// the first call, where [`is_recomputing`](phalanx_nn::autograd::is_recomputing) is false.
pub trait Stages: Send + Sync + 'static {
    /// The stage's output for a micro-batch: activations for the next stage, or, of the last stage, the loss, a tensor of one
    /// element, from which the backward pass begins. `input` is the output of the stage before; the first stage has none.
    ///
    /// Every implementation has this or [`Stages::forward_values`].
    ///
    /// # Errors
    /// Any error; it ends the run of all ranks.
    fn forward(&self, stage: usize, _micro_batch: usize, _input: Option<&Var>) -> Result<Var> {
        let why = "got neither `Stages::forward` nor `Stages::forward_values`, wanted one of them";
        Err(Error::Config(format!("stage {stage}: {why}")))
    }

    /// [`Stages::forward`] with any number of values between stages: the stage's outputs, at least one, which are the inputs of
    /// the next stage, in this order. The last stage gives the loss alone. Gradients flow back through those of floating-point
    /// dtypes; others (lengths, masks) are constants.
    ///
    /// # Errors
    /// Any error; it ends the run of all ranks.
    fn forward_values(&self, stage: usize, micro_batch: usize, inputs: &[Var]) -> Result<Vec<Var>> {
        if inputs.len() > 1 {
            let got = inputs.len();
            return Err(Error::Config(format!(
                "stage {stage}: got {got} inputs for `Stages::forward`, which takes one; wanted `Stages::forward_values`"
            )));
        }
        Ok(vec![self.forward(stage, micro_batch, inputs.first())?])
    }

    /// The shape and dtype of a stage's input. If it is `None`, a header with both is sent before each input. All ranks must
    /// give it, or none.
    fn input_spec(&self, _stage: usize, _micro_batch: usize) -> Option<Spec> {
        None
    }

    /// [`Stages::input_spec`] of a stage with any number of inputs.
    fn input_specs(&self, stage: usize, micro_batch: usize) -> Option<Vec<Spec>> {
        self.input_spec(stage, micro_batch).map(|spec| vec![spec])
    }

    /// The skips of the whole model, the same on every rank. The inputs of a stage are then the values of the stage before,
    /// followed by the skips that end at it, in the order of this list; its outputs are values, followed by the skips that
    /// begin at it. [`Stages::input_specs`] describes all that a stage receives: the values, and every skip that begins
    /// before it and ends at it or later.
    fn skips(&self) -> &[SkipRoute] {
        &[]
    }

    /// The parameters of a stage, whose gradients its replicas add. Only stages with replicas
    /// ([`replicated`](crate::pipeline::schedule::replicated)) need it.
    ///
    /// # Errors
    /// If they are not known.
    fn parameters(&self, stage: usize) -> Result<Vec<Parameter>> {
        let why =
            "got no parameters, wanted `Stages::parameters`, whose gradients the replicas of the stage add";
        Err(Error::Config(format!("stage {stage}: {why}")))
    }

    /// A guard that is held during every `B`, `I` and `W` except those of a stage's last micro-batch. While it lives, gradients
    /// only accumulate. With data parallelism it is [`no_sync`](crate::data_parallel::DataParallel::no_sync).
    fn no_sync(&self) -> Option<NoSync> {
        None
    }
}

/// The shape and dtype of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Sizes, outermost first.
    pub shape: Dims,
    /// The elements' type.
    pub dtype: DType,
}

impl Spec {
    /// The shape and dtype of `tensor`.
    pub fn of(tensor: &Tensor) -> Spec {
        Spec { shape: Dims::from_slice(tensor.shape()), dtype: tensor.dtype() }
    }
}

/// The arguments of a stage's forward pass besides the input tensor: stage, micro-batch, step and batch.
#[derive(Debug)]
pub struct StageArgs<'a, B> {
    /// The stage, numbered over the whole model.
    pub stage: usize,
    /// The micro-batch, from 0.
    pub micro_batch: usize,
    /// The number of micro-batches of the batch; in a schedule without flushes, of an update.
    pub micro_batches: usize,
    /// In a schedule without flushes the update to which the micro-batch belongs, from 0; otherwise 0.
    pub update: usize,
    /// The training step, as it was given to [`StageFn::on`].
    pub step: u64,
    /// The whole batch, as it was given to [`StageFn::on`].
    pub batch: &'a B,
}

impl<B> StageArgs<'_, B> {
    /// The micro-batch's part of `rows` rows. Parts are contiguous, and earlier micro-batches take the remainder.
    pub fn rows(&self, rows: usize) -> Range<usize> {
        cut(rows, self.micro_batches).swap_remove(self.micro_batch)
    }
}

type Forward<B> = dyn Fn(StageArgs<'_, B>, &[Var]) -> Result<Vec<Var>> + Send + Sync;

type InputSpecs<B> = dyn Fn(StageArgs<'_, B>) -> Option<Vec<Spec>> + Send + Sync;

/// The computation of a rank's stages as a function of the batch and the step, for pipelines of a program's own layers.
///
/// ```
/// use std::sync::Arc;
/// use phalanx_nn::{Group, LinearConfig, Module, Parameters, Rule, Scope, Sgd, autograd::Var};
/// use phalanx_parallel::pipeline::ranks::{Chunks, Pipeline, StageArgs, StageFn};
/// use phalanx_parallel::pipeline::schedule::one_f_one_b;
/// use phalanx_parallel::{Result, launch};
/// use phalanx_tensor::{DType, Tensor};
///
/// // Two stages on two ranks, a layer each; batches of four rows in two micro-batches.
/// let schedule = one_f_one_b(2, 2)?;
/// let losses = launch::threads(2, |rank| -> Result<Vec<f32>> {
///     let scope = Scope::new(7, DType::F32, rank.device());
///     let layer = |stage: usize| LinearConfig::new(3, 3).init(&scope.child(stage.to_string()));
///     let model = Arc::new(Chunks::new(vec![(rank.rank(), layer(rank.rank())?)]));
///     let mut optimizer = Sgd::default().init(vec![Group::new(model.parameters(), 0.01)])?;
///     let pipeline = Pipeline::new(&schedule, rank.comm().clone(), rank.device())?;
///
///     let layers = model.clone();
///     let stage_fn = StageFn::new(move |args: StageArgs<'_, Tensor>, input: Option<&Var>| {
///         let rows = args.rows(args.batch.shape()[0]);
///         let x = Var::new(args.batch.narrow(0, rows.start, rows.len())?);
///         let y = layers.of(args.stage)?.forward(input.unwrap_or(&x))?;
///         Ok(if args.stage == 1 { y.square()?.sum_all()? } else { y })
///     });
///     let mut losses = Vec::new();
///     for step in 0..3 {
///         let batch = Tensor::from_slice(&[1.0f32; 12], &[4, 3], rank.device())?;
///         for loss in pipeline.train(&stage_fn.on(batch, step))? {
///             losses.push(loss.item()?);
///         }
///         optimizer.step()?;
///         optimizer.zero_grad()?;
///     }
///     Ok(losses)
/// })
/// .unwrap();
/// assert!(losses[0].is_empty() && losses[1].len() == 6 && losses[1][5] < losses[1][0]);
/// # Ok::<(), phalanx_parallel::Error>(())
/// ```
pub struct StageFn<B> {
    forward: Arc<Forward<B>>,
    input_specs: Option<Arc<InputSpecs<B>>>,
    skips: Arc<[SkipRoute]>,
    parameters: Option<Vec<Parameter>>,
    replicas: Option<Arc<dyn DataParallel>>,
}

impl<B: Send + Sync + 'static> StageFn<B> {
    /// `forward` is [`Stages::forward`] as a function of [`StageArgs`] and the output of the stage before, which is `None` for the
    /// first stage.
    pub fn new(
        forward: impl Fn(StageArgs<'_, B>, Option<&Var>) -> Result<Var> + Send + Sync + 'static,
    ) -> StageFn<B> {
        StageFn::of_values(move |args: StageArgs<'_, B>, inputs: &[Var]| {
            if inputs.len() > 1 {
                let got = format!("stage {}: got {} inputs for a function of one", args.stage, inputs.len());
                return Err(Error::Config(format!("{got}, wanted `StageFn::of_values`")));
            }
            Ok(vec![forward(args, inputs.first())?])
        })
    }

    /// `forward` is [`Stages::forward_values`] as a function of [`StageArgs`] and the outputs of the stage before, of which the
    /// first stage has none.
    pub fn of_values(
        forward: impl Fn(StageArgs<'_, B>, &[Var]) -> Result<Vec<Var>> + Send + Sync + 'static,
    ) -> StageFn<B> {
        StageFn {
            forward: Arc::new(forward),
            input_specs: None,
            skips: Arc::new([]),
            parameters: None,
            replicas: None,
        }
    }

    /// With [`Stages::input_spec`], so that no headers are sent.
    #[must_use]
    pub fn with_input_spec(
        self,
        spec: impl Fn(StageArgs<'_, B>) -> Option<Spec> + Send + Sync + 'static,
    ) -> StageFn<B> {
        self.with_input_specs(move |args| spec(args).map(|spec| vec![spec]))
    }

    /// With [`Stages::input_specs`], so that no headers are sent.
    #[must_use]
    pub fn with_input_specs(
        self,
        specs: impl Fn(StageArgs<'_, B>) -> Option<Vec<Spec>> + Send + Sync + 'static,
    ) -> StageFn<B> {
        StageFn { input_specs: Some(Arc::new(specs)), ..self }
    }

    /// With [`Stages::skips`].
    #[must_use]
    pub fn with_skips(self, skips: Vec<SkipRoute>) -> StageFn<B> {
        StageFn { skips: skips.into(), ..self }
    }

    /// With [`Stages::parameters`], for a rank whose stage has replicas.
    #[must_use]
    pub fn with_parameters(self, parameters: Vec<Parameter>) -> StageFn<B> {
        StageFn { parameters: Some(parameters), ..self }
    }

    /// With data parallelism: each stage's gradients are added over the replicas after its last micro-batch. The program calls
    /// `begin` before [`Pipeline::train`](super::Pipeline::train), and `finish` after it.
    #[must_use]
    pub fn with_data_parallel(self, replicas: Arc<dyn DataParallel>) -> StageFn<B> {
        StageFn { replicas: Some(replicas), ..self }
    }

    /// The former name of [`StageFn::with_data_parallel`].
    #[deprecated(since = "0.1.0", note = "renamed to `with_data_parallel`")]
    #[must_use]
    pub fn shared_with(self, replicas: Arc<dyn DataParallel>) -> StageFn<B> {
        self.with_data_parallel(replicas)
    }

    /// The computation on a batch, in a step.
    pub fn on(&self, batch: B, step: u64) -> Arc<StagesOnBatch<B>> {
        let StageFn { forward, input_specs, skips, parameters, replicas } = self;
        let function = StageFn {
            forward: forward.clone(),
            input_specs: input_specs.clone(),
            skips: skips.clone(),
            parameters: parameters.clone(),
            replicas: replicas.clone(),
        };
        Arc::new(StagesOnBatch { function, batch, step })
    }
}

/// [`StageFn`] on a batch, the argument of [`Pipeline::train`](super::Pipeline::train).
pub struct StagesOnBatch<B> {
    function: StageFn<B>,
    batch: B,
    step: u64,
}

impl<B> StagesOnBatch<B> {
    fn args(&self, stage: usize, number: usize) -> StageArgs<'_, B> {
        let count = MicroBatch::current().count;
        let (micro_batch, update) = (number % count, number / count);
        StageArgs { stage, micro_batch, micro_batches: count, update, step: self.step, batch: &self.batch }
    }
}

impl<B: Send + Sync + 'static> Stages for StagesOnBatch<B> {
    fn forward_values(&self, stage: usize, micro_batch: usize, inputs: &[Var]) -> Result<Vec<Var>> {
        (self.function.forward)(self.args(stage, micro_batch), inputs)
    }

    fn input_specs(&self, stage: usize, micro_batch: usize) -> Option<Vec<Spec>> {
        let specs = self.function.input_specs.as_ref()?;
        specs(self.args(stage, micro_batch))
    }

    fn skips(&self) -> &[SkipRoute] {
        &self.function.skips
    }

    fn parameters(&self, stage: usize) -> Result<Vec<Parameter>> {
        let missing = || {
            Error::Config(format!("stage {stage} has replicas: got a `StageFn` without `with_parameters`"))
        };
        self.function.parameters.clone().ok_or_else(missing)
    }

    fn no_sync(&self) -> Option<NoSync> {
        self.function.replicas.as_ref().map(|replicas| replicas.no_sync())
    }
}
