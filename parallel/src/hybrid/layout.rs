//! [`Layout`]: how a run is laid out over its ranks, as plain data.

use phalanx_nn::models::{ModelConfig, RecomputeMode};

use crate::expert_parallel::check_divides;
use crate::mesh::Mesh;
use crate::pipeline::schedule::{Schedule, by_name, one_f_one_b};
use crate::planning::StagePlan;
use crate::tensor_parallel::TensorParallel;
use crate::{Error, Result};

/// How a run is laid out over its ranks: the size of each axis of parallelism, the schedule, and recomputation.
///
/// ```
/// use phalanx_nn::models::{GptConfig, ModelConfig};
/// use phalanx_parallel::hybrid::Layout;
///
/// let model = ModelConfig::Gpt(GptConfig::new(256, 64, 4, 6, 96));
/// let layout = Layout { tp: 4, dp: 2, ..Layout::default() };
/// let error = layout.check(&model, 8, 64).unwrap_err().to_string();
/// assert!(error.ends_with("the nearest layout that can be: dp 2 x tp 3 x pp 1"), "{error}");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The number of replicas of the model (data parallelism).
    pub dp: usize,
    /// The number of ranks over which layers are split (tensor parallelism).
    pub tp: usize,
    /// The number of ranks among which the stages are divided (pipeline parallelism).
    pub pp: usize,
    /// The number of replicas in a row that divide the experts of mixtures among themselves (expert parallelism); 1 for none.
    pub ep: usize,
    /// The pipeline's schedule, of [`NAMES`](crate::pipeline::schedule::NAMES).
    pub schedule: String,
    /// The number of stages of a rank, in schedules with several.
    pub chunks: usize,
    /// The number of micro-batches into which a replica's sub-batch is split.
    pub micro_batches: usize,
    /// What backward recomputes: with several stages the whole stage, for the micro-batches of the mode; with one stage blocks. Attention
    /// alone ([`RecomputeMode::Attention`]) is recomputed in every block of every stage.
    pub recompute: RecomputeMode,
    /// Whether activations between layers are split by positions (sequence parallelism).
    pub sequence_parallel: bool,
    /// How many logits a rank holds at a time (all if `None`); see
    /// [`Decoder::set_logits_max`](phalanx_nn::models::Decoder::set_logits_max).
    pub logits_max: Option<usize>,
    /// Whether each tensor-parallel rank sends its part of what a pipeline stage sends ([`Pipeline::scatter_gather`]). Not with sequence
    /// parallelism, whose ranks have parts only.
    ///
    /// [`Pipeline::scatter_gather`]: crate::pipeline::ranks::Pipeline::scatter_gather
    pub scatter_gather: bool,
    /// The stages with their layers and replicas, if they are not even. There are as many pipeline ranks as it has. The
    /// schedule is 1F1B, or one without flushes over [`Layout::replicas`].
    pub plan: Option<StagePlan>,
}

impl Default for Layout {
    /// One rank.
    fn default() -> Layout {
        Layout {
            dp: 1,
            tp: 1,
            pp: 1,
            ep: 1,
            schedule: "1f1b".into(),
            chunks: 2,
            micro_batches: 1,
            recompute: RecomputeMode::Never,
            sequence_parallel: false,
            logits_max: None,
            scatter_gather: false,
            plan: None,
        }
    }
}

impl Layout {
    /// The ranks' mesh.
    ///
    /// # Errors
    /// If an axis has no ranks, or the replicas cannot be expert groups.
    pub fn mesh(&self) -> Result<Mesh> {
        Ok(Mesh::new(self.tp, self.dp, self.pp)?.with_expert_groups(self.ep)?)
    }

    /// The schedule of a replica's ranks. With one stage it runs one micro-batch after the other, under every schedule name.
    ///
    /// # Errors
    /// For an unknown name, and if a number is 0.
    pub fn schedule(&self) -> Result<Schedule> {
        if let Some(plan) = &self.plan {
            return plan.schedule(self.micro_batches);
        }
        let schedule = by_name(&self.schedule, self.pp, self.chunks, self.micro_batches)?;
        Ok(if schedule.stages() == 1 { one_f_one_b(1, self.micro_batches)? } else { schedule })
    }

    /// Checks whether a model can be trained in this layout, on batches of `sequences` sequences of `positions` positions.
    ///
    /// # Errors
    /// If not. The error has the reason and the nearest layout that works.
    pub fn check(&self, model: &ModelConfig, sequences: usize, positions: usize) -> Result<()> {
        let Err(error) = self.check_fits(model, sequences, positions) else { return Ok(()) };
        let possible = |layout: &Layout| layout.check_fits(model, sequences, positions).is_ok();
        let Some(nearest) = self.nearest(model, sequences, possible) else { return Err(error) };
        Err(Error::Config(format!(
            "{error}; the nearest layout that can be: {}",
            self.describe_changes(&nearest)
        )))
    }

    fn check_fits(&self, model: &ModelConfig, sequences: usize, positions: usize) -> Result<()> {
        let refuse = |why: String| Err(Error::Config(why));
        self.mesh()?;
        if self.chunks == 0 || self.micro_batches == 0 {
            return refuse(format!(
                "got {} chunks and {} micro-batches, wanted at least 1",
                self.chunks, self.micro_batches
            ));
        }
        if !sequences.is_multiple_of(self.dp) {
            return refuse(format!("a batch of {sequences} sequences cannot be shared by dp {}", self.dp));
        }
        let most = model.layers().max(2);
        if self.chunks > most {
            let (got, blocks) = (self.chunks, model.layers());
            return refuse(format!(
                "{blocks} blocks are to be {got} stages of each rank, wanted at most {most}"
            ));
        }
        if let Some(plan) = &self.plan {
            plan.decoder_stages(model.layers())?;
            self.check_plan()?;
        }
        let sub_batch = sequences / self.dp;
        if self.micro_batches > sub_batch {
            let pieces = self.micro_batches;
            return refuse(format!(
                "a share of {sub_batch} sequences cannot be cut into {pieces} micro-batches"
            ));
        }
        if self.scatter_gather && self.sequence_parallel {
            return refuse(
                "scatter-gather: got sequence parallelism, whose ranks send their positions alone, wanted it off".into(),
            );
        }
        self.check_experts(model)?;
        let cut = self.sequence_parallel.then_some(positions);
        Ok(TensorParallel::check(model, self.tp, cut)?)
    }

    /// Refuses to divide the experts of a model that has none, or that cannot be divided so.
    pub(super) fn check_experts(&self, model: &ModelConfig) -> Result<()> {
        match model.experts() {
            _ if self.ep == 1 => Ok(()),
            None => Err(Error::Config(format!(
                "expert parallelism: got ep {} for a model without experts, wanted 1",
                self.ep
            ))),
            Some(experts) => Ok(check_divides(experts.count, self.ep)?),
        }
    }

    /// Refuses divided experts where `what` does not go with them.
    pub(super) fn check_undivided(&self, what: &str) -> Result<()> {
        match self.ep {
            1 => Ok(()),
            ep => Err(Error::Config(format!("{what}: got expert parallelism of ep {ep}, wanted 1"))),
        }
    }

    /// The number of replicas of each stage, by the plan; one of each pipeline rank without it.
    pub fn replicas(&self) -> Vec<usize> {
        self.plan.as_ref().map_or_else(|| vec![1; self.pp], StagePlan::replicas)
    }

    /// Refuses ranks, a schedule or micro-batches that are not those of the plan, if there is one.
    ///
    /// # Errors
    /// If they are not.
    pub fn check_plan(&self) -> Result<()> {
        let Some(plan) = &self.plan else { return Ok(()) };
        let replicas = plan.replicas();
        let (ranks, most) = (plan.ranks(), replicas.iter().copied().max().unwrap_or(1));
        let Layout { dp, pp, micro_batches, schedule, .. } = self;
        let why = if *pp != ranks {
            format!("got pp {pp}, wanted the {ranks} ranks of stages with replicas {replicas:?}")
        } else if schedule != "1f1b" {
            format!("got schedule {schedule}, wanted 1f1b, or one without flushes")
        } else if most > 1 && *dp > 1 {
            format!("got dp {dp} around stages with replicas {replicas:?}, wanted 1")
        } else if *micro_batches < most {
            format!("got {micro_batches} micro-batches, wanted one for each of {most} replicas")
        } else {
            return Ok(());
        };
        Err(Error::Config(format!("{}: {why}", plan.name())))
    }

    /// The layout that works and has the least sum of differences; of several the one with the most ranks.
    fn nearest(
        &self,
        model: &ModelConfig,
        sequences: usize,
        possible: impl Fn(&Layout) -> bool,
    ) -> Option<Layout> {
        let around = |n: usize| 1..=n.saturating_mul(2).clamp(1, SEARCHED);
        let candidates = around(self.dp).flat_map(|dp| around(self.tp).map(move |tp| (dp, tp)));
        let chunks = self.chunks.clamp(1, model.layers().max(2));
        let layouts = candidates.map(|(dp, tp)| {
            let micro_batches = self.micro_batches.clamp(1, (sequences / dp).max(1));
            Layout { dp, tp, micro_batches, chunks, ..self.clone() }
        });
        let far = |layout: &Layout| {
            let ranks = layout.dp.abs_diff(self.dp) + layout.tp.abs_diff(self.tp);
            let distance = ranks + layout.micro_batches.abs_diff(self.micro_batches);
            (distance, std::cmp::Reverse(layout.dp * layout.tp))
        };
        layouts.filter(possible).min_by_key(far)
    }

    /// The ranks of another layout, and its other settings that differ.
    fn describe_changes(&self, other: &Layout) -> String {
        let Layout { dp, tp, pp, micro_batches, chunks, .. } = other;
        let mut told = format!("dp {dp} x tp {tp} x pp {pp}");
        if *micro_batches != self.micro_batches {
            told += &format!(", {micro_batches} micro-batches");
        }
        if *chunks != self.chunks {
            told += &format!(", {chunks} stages a rank");
        }
        told
    }
}

/// The largest number of ranks along an axis that the search for the nearest layout tries.
const SEARCHED: usize = 128;

#[cfg(test)]
mod tests {
    use phalanx_nn::models::{Experts, Family, GptConfig, RouterLosses, TransformerConfig};

    use super::*;

    #[test]
    fn what_cannot_be_is_refused_with_the_nearest_that_can() {
        let model = ModelConfig::Gpt(GptConfig::new(256, 60, 4, 6, 96));
        let nearest = |layout: Layout| layout.check(&model, 12, 60).err().map(|e| e.to_string());
        for (tp, dp, wanted) in [
            (1, 1, None),
            (6, 4, None),
            (4, 1, Some("dp 1 x tp 3 x pp 2")),
            (1, 5, Some("dp 6 x tp 1 x pp 2")),
            (5, 8, Some("dp 6 x tp 6 x pp 2")),
            (12, 1, Some("dp 1 x tp 6 x pp 2")),
        ] {
            let got = nearest(Layout { tp, dp, pp: 2, ..Layout::default() });
            match wanted {
                None => assert_eq!(got, None),
                Some(wanted) => {
                    assert!(got.as_deref().is_some_and(|e| e.ends_with(wanted)), "{got:?}, {wanted}")
                }
            }
        }
        let got = nearest(Layout { micro_batches: 13, ..Layout::default() }).unwrap();
        assert!(got.contains("12 sequences cannot be cut into 13 micro-batches"), "{got}");
        assert!(got.ends_with("dp 1 x tp 1 x pp 1, 12 micro-batches"), "{got}");
        let got = nearest(Layout { pp: 2, chunks: usize::MAX, ..Layout::default() }).unwrap();
        assert!(got.ends_with("dp 1 x tp 1 x pp 2, 4 stages a rank"), "{got}");
        let sequence = Layout { tp: 3, sequence_parallel: true, ..Layout::default() };
        assert!(sequence.check(&model, 12, 60).is_ok());
        let refused = sequence.check(&model, 12, 61).err().unwrap().to_string();
        assert!(refused.contains("got 61 to cut over 3 ranks"), "{refused}");
        let got = nearest(Layout { scatter_gather: true, ..sequence }).unwrap();
        assert!(got.contains("got sequence parallelism"), "{got}");
    }

    #[test]
    fn experts_are_divided_evenly_or_refused() {
        let mut model = TransformerConfig::new(Family::Mixtral, 256, 60, 2, 6, 96);
        let losses = RouterLosses::default();
        let experts = Experts {
            count: 6,
            chosen: 2,
            inner: 12,
            normalized: true,
            dense: vec![],
            losses,
            bias_step: 0.0,
        };
        model.experts = Some(experts);
        let refused = |layout: Layout, model: &ModelConfig| {
            layout.check(model, 12, 60).err().map(|error| error.to_string()).unwrap_or_default()
        };
        let (mixture, plain) =
            (ModelConfig::Transformer(model), ModelConfig::Gpt(GptConfig::new(256, 60, 4, 6, 96)));
        let layout = |dp, ep| Layout { dp, ep, ..Layout::default() };
        assert_eq!(refused(layout(6, 3), &mixture), "");
        let got = refused(layout(4, 4), &mixture);
        assert!(got.contains("got 6 experts for 4 ranks, wanted a multiple"), "{got}");
        let got = refused(layout(3, 2), &mixture);
        assert!(got.contains("got ep 2 of dp 3, wanted a divisor of the replicas"), "{got}");
        assert!(got.ends_with("the nearest layout that can be: dp 4 x tp 1 x pp 1"), "{got}");
        let got = refused(layout(2, 2), &plain);
        assert!(got.contains("got ep 2 for a model without experts, wanted 1"), "{got}");
        assert!(layout(2, 2).check_undivided("encoder-decoder").unwrap_err().to_string().contains("ep 2"));
    }

    #[test]
    fn one_stage_runs_one_micro_batch_after_the_other() {
        let layout = Layout { schedule: "gpipe".into(), micro_batches: 3, ..Layout::default() };
        assert_eq!(layout.schedule().unwrap().to_string().trim(), "0F0 0B0 0F1 0B1 0F2 0B2");
        assert_eq!(Layout { pp: 2, ..layout }.schedule().unwrap().placement, [0, 1]);
        assert!(Layout { schedule: "other".into(), ..Layout::default() }.schedule().is_err());
    }
}
