//! [`StagePlan`]: the stages of a pipeline, each with its layers and its replicas, in which a [`Plan`] ends and from which ranks
//! build their stages; and the layers of a language model as a plan counts them.

use std::ops::Range;

use phalanx_nn::Scope;
use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Decoder, DecoderStage, ModelConfig};

use super::{Plan, PlannedStage};
use crate::pipeline::gpipe::{Batch, Layer, Sequence, Skips};
use crate::pipeline::schedule::{Schedule, replicated};
use crate::{Error, Result};

/// A stage: consecutive layers, and the number of ranks that compute it in turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageReplicas {
    /// The layers.
    pub layers: Range<usize>,
    /// The number of its replicas.
    pub replicas: usize,
}

/// The stages of a pipeline in a row, each on as many ranks as it has replicas.
///
/// ```
/// use phalanx_parallel::planning::{LayerProfile, Level, StagePlan, plan};
///
/// let layer = |time, parameter_bytes| LayerProfile { time, activation_bytes: 1e3, parameter_bytes };
/// // Two fast layers with many parameters, after a slow one with few.
/// let layers = [layer(3.0, 1e3), layer(0.5, 1e9), layer(0.5, 1e9)];
/// let plan = StagePlan::from(&plan(&layers, &[Level { width: 4, bandwidth: 1e9 }])?);
/// let stages: Vec<_> = plan.stages().iter().map(|stage| (stage.layers.clone(), stage.replicas)).collect();
/// assert_eq!(stages, [(0..1, 3), (1..3, 1)]);
/// assert_eq!(plan.schedule(6)?.ranks.len(), 4);
/// # Ok::<(), phalanx_parallel::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagePlan {
    stages: Vec<StageReplicas>,
    /// What errors call it.
    name: String,
}

impl StagePlan {
    /// A plan of these stages.
    ///
    /// # Errors
    /// If there is no stage, a stage has no layer or no replica, or its layers do not follow those of the stage before.
    pub fn new(stages: Vec<StageReplicas>) -> Result<StagePlan> {
        let mut end = 0;
        for (i, StageReplicas { layers, replicas }) in stages.iter().enumerate() {
            if layers.start != end || layers.is_empty() || *replicas == 0 {
                return Err(Error::Config(format!(
                    "plan: got layers {layers:?} with {replicas} replicas for stage {i}, wanted layers from {end} on and at \
                     least 1 replica"
                )));
            }
            end = layers.end;
        }
        match stages.is_empty() {
            true => Err(Error::Config("plan: got no stage, wanted at least 1".into())),
            false => Ok(StagePlan::of(stages)),
        }
    }

    fn of(stages: Vec<StageReplicas>) -> StagePlan {
        StagePlan { stages, name: "plan".into() }
    }

    /// The plan with a name for errors, such as the path of its file. Without one they call it `plan`.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> StagePlan {
        StagePlan { name: name.into(), ..self }
    }

    /// What errors call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The stages, in order.
    pub fn stages(&self) -> &[StageReplicas] {
        &self.stages
    }

    /// The number of layers of all stages.
    pub fn layers(&self) -> usize {
        self.stages.last().map_or(0, |stage| stage.layers.end)
    }

    /// The number of layers of each stage.
    pub fn balance(&self) -> Vec<usize> {
        self.stages.iter().map(|stage| stage.layers.len()).collect()
    }

    /// The number of replicas of each stage.
    pub fn replicas(&self) -> Vec<usize> {
        self.stages.iter().map(|stage| stage.replicas).collect()
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.stages.iter().fold(0, |ranks, stage| ranks.saturating_add(stage.replicas))
    }

    /// The schedule of its ranks: 1F1B, in which replicas take micro-batches in turn.
    ///
    /// # Errors
    /// As [`replicated`].
    pub fn schedule(&self, micro_batches: usize) -> Result<Schedule> {
        Ok(replicated(&self.replicas(), micro_batches)?)
    }

    /// Refuses a model of another number of layers; `layers` says in words which these are.
    ///
    /// # Errors
    /// If it has another number.
    pub fn check_layers(&self, wanted: usize, layers: &str) -> Result<()> {
        let got = self.layers();
        match got == wanted {
            true => Ok(()),
            false => Err(Error::Config(format!(
                "{}: got stages of {got} layers in all, wanted {wanted}: {layers}",
                self.name
            ))),
        }
    }

    /// The stages of a language model of this many blocks. Its layers are the embedding, the blocks, and the final norm with the
    /// head and the loss.
    ///
    /// # Errors
    /// As [`StagePlan::check_layers`].
    pub fn decoder_stages(&self, blocks: usize) -> Result<Vec<DecoderStage>> {
        self.check_layers(blocks + 2, &format!("the embedding, {blocks} blocks and the head"))?;
        let stage = |StageReplicas { layers, .. }: &StageReplicas| decoder_stage(layers, blocks);
        Ok(self.stages.iter().map(stage).collect())
    }
}

fn decoder_stage(layers: &Range<usize>, blocks: usize) -> DecoderStage {
    let block = |layer: usize| layer.clamp(1, blocks + 1) - 1;
    let blocks_of = block(layers.start)..block(layers.end);
    DecoderStage { layers: blocks_of, first: layers.start == 0, last: layers.end == blocks + 2 }
}

/// The stages at the workers. A stage of `r` groups that divide it among stages of their own is as many stages here, each with
/// `r` times the replicas that it has in a group.
impl From<&Plan> for StagePlan {
    fn from(plan: &Plan) -> StagePlan {
        StagePlan::of(plan.stages.iter().flat_map(|stage| at_workers(stage, 1)).collect())
    }
}

fn at_workers(stage: &PlannedStage, groups: usize) -> Vec<StageReplicas> {
    let replicas = groups * stage.replicas;
    if stage.inside.is_empty() {
        return vec![StageReplicas { layers: stage.layers.clone(), replicas }];
    }
    stage.inside.iter().flat_map(|inside| at_workers(inside, replicas)).collect()
}

/// The layers of a language model, one after the other, for [`profile()`](super::profile()): the embedding, the blocks, and the
/// final norm with the head and the loss against `targets`. A tied table is two tables here, as it is on two ranks.
///
/// # Errors
/// If a layer cannot be built.
pub fn decoder_layers(config: &ModelConfig, scope: &Scope, targets: &Var) -> Result<Sequence> {
    let blocks = config.layers();
    let layers = std::sync::Arc::new(phalanx_nn::OneDevice);
    let layer = |i: usize| {
        let decoder = config.init_stage(&layers, scope, decoder_stage(&(i..i + 1), blocks))?;
        Ok(Box::new(DecoderLayer { decoder, targets: targets.clone() }) as Box<dyn Layer>)
    };
    Ok(Sequence::from((0..blocks + 2).map(layer).collect::<Result<Vec<_>>>()?))
}

/// A piece of a language model as a layer.
struct DecoderLayer {
    decoder: Decoder,
    targets: Var,
}

impl Layer for DecoderLayer {
    fn run(&self, input: Batch, _: &mut Skips) -> Result<Batch> {
        let x = self.decoder.forward(&input.one()?)?;
        let is_last = self.decoder.stage().last;
        Ok(if is_last { self.decoder.loss(&x, &self.targets, 1.0)?.into() } else { x.into() })
    }
}

phalanx_nn::parameters!(DecoderLayer { decoder = "" });

#[cfg(test)]
mod tests {
    use phalanx_nn::models::GptConfig;
    use phalanx_tensor::{DType, Device};
    use std::time::Duration;

    use super::*;
    use crate::planning::{Level, plan, profile};

    fn stages(of: &[(Range<usize>, usize)]) -> Vec<StageReplicas> {
        of.iter()
            .map(|(layers, replicas)| StageReplicas { layers: layers.clone(), replicas: *replicas })
            .collect()
    }

    #[test]
    fn layers_of_a_plan_are_the_embedding_the_blocks_and_the_head() {
        let plan = StagePlan::new(stages(&[(0..1, 2), (1..3, 1), (3..6, 3)])).unwrap();
        let placed = plan.decoder_stages(4).unwrap();
        let stage = |layers, first, last| DecoderStage { layers, first, last };
        assert_eq!(placed, [stage(0..0, true, false), stage(0..2, false, false), stage(2..4, false, true)]);
        let ends = StagePlan::new(stages(&[(0..5, 1), (5..6, 1)])).unwrap().decoder_stages(4).unwrap();
        assert_eq!(ends, [stage(0..4, true, false), stage(4..4, false, true)]);
        assert_eq!((plan.ranks(), plan.replicas(), plan.balance()), (6, vec![2, 1, 3], vec![1, 2, 3]));
        let error = plan.named("a.toml").decoder_stages(5).unwrap_err().to_string();
        let wanted = "a.toml: got stages of 6 layers in all, wanted 7: the embedding, 5 blocks and the head";
        assert!(error.contains(wanted), "{error}");
    }

    #[test]
    fn stages_that_do_not_follow_each_other_are_refused() {
        let error = |of: &[(Range<usize>, usize)]| StagePlan::new(stages(of)).unwrap_err().to_string();
        assert!(
            error(&[(0..2, 1), (3..4, 1)])
                .contains("layers 3..4 with 1 replicas for stage 1, wanted layers from 2 on")
        );
        assert!(error(&[(0..2, 0)]).contains("at least 1 replica"));
        assert!(error(&[(0..0, 1)]).contains("layers 0..0"));
        assert!(error(&[]).contains("got no stage"));
    }

    #[test]
    fn a_plan_of_two_levels_is_the_product_of_their_replicas() {
        let leaf = |layers, replicas| PlannedStage { layers, replicas, inside: Vec::new() };
        let outer = PlannedStage { layers: 0..3, replicas: 2, inside: vec![leaf(0..1, 3), leaf(1..3, 1)] };
        let plan = Plan {
            time: 1.0,
            stages: vec![outer, PlannedStage { inside: vec![leaf(3..4, 4)], ..leaf(3..4, 1) }],
        };
        let wanted = stages(&[(0..1, 6), (1..3, 2), (3..4, 4)]);
        assert_eq!(StagePlan::from(&plan).stages(), wanted);
    }

    #[test]
    fn a_language_model_is_profiled_and_planned() {
        let config = ModelConfig::Gpt(GptConfig::new(11, 4, 2, 2, 8));
        let scope = Scope::new(1, DType::F32, Device::CPU);
        let tokens = Var::from_slice(&[1_i64, 2, 3, 4, 5, 6, 7, 8], &[2, 4], Device::CPU).unwrap();
        let layers = decoder_layers(&config, &scope, &tokens).unwrap();
        let measured = profile(&layers, &tokens, Duration::from_millis(1)).unwrap();
        let bytes: Vec<f64> = measured.iter().map(|layer| layer.activation_bytes).collect();
        assert_eq!(bytes, [256.0, 256.0, 256.0, 4.0]);
        // The embedding has tokens and positions, the head its norm and the table.
        assert_eq!(measured[0].parameter_bytes, 4.0 * 8.0 * (11.0 + 4.0));
        assert_eq!(measured[3].parameter_bytes, 4.0 * 8.0 * (11.0 + 2.0));
        assert!(measured.iter().all(|layer| layer.time > 0.0));
        let planned = StagePlan::from(&plan(&measured, &[Level { width: 3, bandwidth: 1e12 }]).unwrap());
        assert_eq!((planned.layers(), planned.decoder_stages(2).is_ok()), (4, true));
        assert!(planned.ranks() <= 3);
    }
}
