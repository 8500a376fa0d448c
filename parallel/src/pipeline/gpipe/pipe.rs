//! [`GPipe`]: a model over several devices; [`GPipeConfig`]: its micro-batches, recomputation and observer.

use phalanx_nn::autograd::ContextMode;
use std::fmt;
use std::sync::Arc;

use phalanx_nn::autograd::{Var, join};
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{Entry, Module, Parameter, Parameters, Result as NnResult};
use phalanx_tensor::{Context, Device};

use super::copy::{CopyStreams, Sent};
use super::observe::PassObserver;
use super::worker::{ForwardPass, Mailboxes, StageModule};
use super::{Batch, Cell, Layer, Observer, Partition, Sequence, gather, routes, scatter, verify_skips};
use crate::{Error, Result};

/// The former name of [`RecomputeMode`] here.
#[deprecated(since = "0.1.0", note = "is `phalanx_nn::models::RecomputeMode`")]
pub type Checkpoint = RecomputeMode;

/// How a [`GPipe`] runs.
#[derive(Clone)]
pub struct GPipeConfig {
    micro_batches: usize,
    recompute: RecomputeMode,
    observer: Option<Observer>,
}

impl GPipeConfig {
    /// At most `micro_batches` micro-batches, all but the last one recomputed.
    pub fn new(micro_batches: usize) -> GPipeConfig {
        GPipeConfig { micro_batches, recompute: RecomputeMode::ExceptLast, observer: None }
    }

    /// With the micro-batches recomputed that `mode` says.
    #[must_use]
    pub fn with_recompute(self, mode: RecomputeMode) -> GPipeConfig {
        GPipeConfig { recompute: mode, ..self }
    }

    /// The former name of [`GPipeConfig::with_recompute`].
    #[deprecated(since = "0.1.0", note = "renamed to `with_recompute`")]
    #[must_use]
    pub fn with_checkpoint(self, mode: RecomputeMode) -> GPipeConfig {
        self.with_recompute(mode)
    }

    /// Which micro-batches are recomputed.
    pub fn recompute(&self) -> RecomputeMode {
        self.recompute
    }

    /// With an observer of every pass and copy. On GPUs it is told the device's times ([`Span`](super::Span)).
    #[must_use]
    pub fn with_observer(self, observer: Observer) -> GPipeConfig {
        GPipeConfig { observer: Some(observer), ..self }
    }
}

impl fmt::Debug for GPipeConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let observed = self.observer.is_some();
        write!(f, "{} micro-batches, recomputed {}, observed {observed}", self.micro_batches, self.recompute)
    }
}

/// A model divided into stages, each on a device. A batch goes through it in micro-batches, and the stages compute different
/// micro-batches at the same time; see the [module](super).
///
/// Its parameters have the same names as in the plain model under every partition.
pub struct GPipe {
    model: Arc<Sequence>,
    partition: Partition,
    stages: Vec<Arc<StageModule>>,
    copy_streams: Arc<CopyStreams>,
    config: GPipeConfig,
}

impl GPipe {
    /// A pipeline of the model's layers. The caller has built each layer on the device that the partition names.
    ///
    /// # Errors
    /// If the partition has another number of layers than the model, a parameter or buffer is on another device than its
    /// layer or belongs to two stages, skips do not match, the number of micro-batches is 0, or attention alone is to be recomputed.
    pub fn new(model: Sequence, partition: Partition, config: GPipeConfig) -> Result<GPipe> {
        check(&model, &partition, &config)?;
        let routes = routes(&model.skippables(), &partition);
        let model = Arc::new(model);
        let stage = |(i, own): (usize, &super::StageLayers)| {
            let incoming = routes.iter().filter(|route| route.to == i).cloned().collect();
            let outgoing = routes.iter().filter(|route| route.from == i).cloned().collect();
            Arc::new(StageModule { model: model.clone(), own: own.clone(), incoming, outgoing })
        };
        let stages = partition.stages().iter().enumerate().map(stage).collect();
        let devices = partition.devices();
        let neighbours = devices.windows(2).map(|pair| (pair[0], pair[1]));
        let skips = routes.iter().map(|route| (devices[route.from], devices[route.to]));
        let copy_streams = Arc::new(CopyStreams::new(neighbours.chain(skips))?);
        Ok(GPipe { stages, copy_streams, model, partition, config })
    }

    /// The output for a batch of one value or several. The input is on the first stage's device, the output on the last's.
    ///
    /// # Errors
    /// If the batch's values have different numbers of rows or are on another device, or the first error of a stage. All
    /// workers have ended when it returns.
    pub fn run(&self, input: impl Into<Batch>) -> Result<Batch> {
        let input = input.into();
        let Some(first) = self.stages.first() else { return Ok(input) };
        input.check_device(first.own.device)?;
        let micro_batches = scatter(&input, self.config.micro_batches)?;
        drop(input);
        let context = Context::current();
        let recomputed =
            if context.train() { self.config.recompute.recomputed(micro_batches.len()) } else { 0 };
        let observer = self.config.observer.as_ref();
        let observer = observer.map(|observer| PassObserver::new(observer, &self.partition)).transpose()?;
        let pass = ForwardPass {
            stages: &self.stages,
            copy_streams: &self.copy_streams,
            observer,
            offsets: micro_batches.iter().map(|(_, rows)| rows.start).collect(),
            recomputed,
            context,
            mailboxes: Mailboxes::default(),
        };
        for (micro_batch, (batch, _)) in micro_batches.into_iter().enumerate() {
            let values = batch.into_values().into_iter().map(Sent::Local).collect();
            pass.mailboxes.post(Cell { micro_batch, stage: 0 }, values);
        }
        pass.run();
        let (outputs, last_phonies) = pass.mailboxes.end()?;
        join_phonies(gather(outputs.into_iter().map(Batch::from).collect())?, &last_phonies)
    }

    /// The layers, in order.
    pub fn layers(&self) -> &[Box<dyn Layer>] {
        self.model.layers()
    }

    /// How many layers there are.
    pub fn len(&self) -> usize {
        self.layers().len()
    }

    /// Whether there are no layers.
    pub fn is_empty(&self) -> bool {
        self.layers().is_empty()
    }

    /// The stages.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// The device of each stage: inputs belong on the first, outputs come on the last.
    pub fn devices(&self) -> Vec<Device> {
        self.partition.devices()
    }

    /// The settings.
    pub fn config(&self) -> &GPipeConfig {
        &self.config
    }
}

/// Joins the phonies of the devices' last cells to the output. So backward reaches them first, and the recomputations that
/// hang on them need not wait for a gradient.
fn join_phonies(mut output: Batch, last_phonies: &[Var]) -> Result<Batch> {
    let place = output.values().iter().position(Var::requires_grad);
    if let Some(place) = place {
        for tie in last_phonies {
            output[place] = join(&output[place], tie)?;
        }
    }
    Ok(output)
}

fn check(model: &Sequence, partition: &Partition, config: &GPipeConfig) -> Result<()> {
    let wrong = |why: String| Err(Error::Config(format!("gpipe: {why}")));
    let (layers, balanced) = (model.layers().len(), partition.layers());
    if layers != balanced {
        let balance: Vec<usize> = partition.stages().iter().map(|stage| stage.layers.len()).collect();
        return wrong(format!(
            "got a balance of {balance:?}, which is {balanced} layers, wanted the model's {layers}"
        ));
    }
    if config.micro_batches == 0 {
        return wrong("got 0 micro-batches, wanted at least 1".into());
    }
    if config.recompute == RecomputeMode::Attention {
        let wanted = "which is a mode of transformer models; wanted never, except-last or always";
        return wrong(format!("got recomputation of attention, {wanted}"));
    }
    let mut seen: Vec<(usize, String, Parameter)> = Vec::new();
    for (layer, module) in model.layers().iter().enumerate() {
        let stage = partition.stage(layer).unwrap_or_default();
        let wanted = partition.stages()[stage].device;
        let mut problem = None;
        module.visit(&layer.to_string(), &mut |path, entry| {
            let device = entry.tensor().device();
            if device != wanted {
                problem = Some(format!("got {path} on {device}, wanted it on {wanted}, where its layer is"));
            } else if let Entry::Parameter(parameter) = entry {
                match seen.iter().find(|(other, _, known)| *other != stage && known.is(parameter)) {
                    Some((other, known, _)) => {
                        problem = Some(format!(
                            "{path} of stage {stage} is {known} of stage {other}; wanted one stage"
                        ));
                    }
                    None => seen.push((stage, path.to_string(), parameter.clone())),
                }
            }
        });
        if let Some(problem) = problem {
            return wrong(problem);
        }
    }
    verify_skips(&model.skippables())
}

phalanx_nn::parameters!(GPipe { model = "" });

impl Module for GPipe {
    fn forward(&self, x: &Var) -> NnResult<Var> {
        let output = self.run(x).and_then(Batch::one);
        output.map_err(|error| match error {
            Error::Nn(error) => error,
            other => phalanx_nn::autograd::Error::from(other).into(),
        })
    }
}
