//! [`generate_rows`]: the ranks of one replica continue prompts, each with its part of the model only.
//!
//! ```text
//! tp 2, pp 2; the rows are two groups, a and b              time -->
//!
//! stage 0   embedding, blocks    ranks 0, 1    a     b     a'    b'       each rank caches the keys and values of its heads
//!                                               \     \     \             streams [1, T, width] go to the next stage
//! stage 1   blocks, head         ranks 2, 3          a     b     a'       tp ranks gather the logits of their parts of the vocabulary
//!                                                     |     |
//! rank 2 draws, and tells the tokens to all           a'    b'
//! rank 0 calls back, and tells all which rows have ended
//! ```
//! The loop over tokens is that of one device, [`generate_rows_by`]; this is the model that it asks. All ranks run the loop over the same
//! rows. Stages work on unlike groups at a time. Where ranks have several stages there is one group, whose rows pass each stage in as many parts as
//! there are ranks.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;

use phalanx_nn::autograd::{Var, waiting};
use phalanx_nn::models::{
    CausalModel, Decoder, Generated, Generation, GenerationEnd, GenerationStep, KvCache, RowTokens,
    generate_rows_by,
};
use phalanx_nn::{LayerFactory, Result as NnResult, cut};
use phalanx_tensor::{Device, Tensor};
use xxhash_rust::xxh64::Xxh64;

use super::{Layout, StagedModel};
use crate::agreement::{Facts, agree};
use crate::all_gather::all_gather_object;
use crate::comm::{Call, Comm, Error as CommError, Pending};
use crate::mesh::{Axis, Groups};
use crate::pipeline::ranks::Spec;
use crate::{Error, Result};

/// A stage of a language model, as generation uses it: a [`Decoder`] of any kind of layers.
pub trait CausalStage {
    /// As [`Decoder::context`].
    fn context(&self) -> usize;

    /// As [`Decoder::vocabulary`].
    fn vocabulary(&self) -> usize;

    /// As [`Decoder::learned_positions`].
    fn learned_positions(&self) -> Option<usize>;

    /// As [`Decoder::turning_point`].
    fn turning_point(&self) -> Option<usize>;

    /// The device of the stage.
    fn device(&self) -> Device;

    /// The blocks that the stage has.
    fn blocks(&self) -> usize;

    /// As [`Decoder::row_caches`].
    ///
    /// # Errors
    /// If they cannot be allocated.
    fn row_caches(&self, page: usize) -> NnResult<Vec<KvCache>>;

    /// What goes from stage to stage for so many positions.
    fn row_stream(&self, positions: usize) -> Spec;

    /// As [`Decoder::extend_stage`].
    ///
    /// # Errors
    /// If the input is not that of this stage, or the rows do not fit.
    fn extend_stage(&self, input: Option<&Var>, rows: &mut [RowTokens<'_>]) -> NnResult<Var>;
}

impl<L: LayerFactory> CausalStage for Decoder<L> {
    fn context(&self) -> usize {
        Decoder::context(self)
    }

    fn vocabulary(&self) -> usize {
        Decoder::vocabulary(self)
    }

    fn learned_positions(&self) -> Option<usize> {
        Decoder::learned_positions(self)
    }

    fn turning_point(&self) -> Option<usize> {
        Decoder::turning_point(self)
    }

    fn device(&self) -> Device {
        Decoder::device(self)
    }

    fn blocks(&self) -> usize {
        Decoder::blocks(self).len()
    }

    fn row_caches(&self, page: usize) -> NnResult<Vec<KvCache>> {
        Decoder::row_caches(self, page)
    }

    fn row_stream(&self, positions: usize) -> Spec {
        let (shape, dtype) = Decoder::row_stream(self, positions);
        Spec { shape, dtype }
    }

    fn extend_stage(&self, input: Option<&Var>, rows: &mut [RowTokens<'_>]) -> NnResult<Var> {
        Decoder::extend_stage(self, input, rows)
    }
}

/// [`phalanx_nn::models::generate_rows`] by the ranks that hold a replica of a model together: tensor-parallel ranks, stages, or both. All of
/// them call it with the same prompts and settings, which are compared first, and all return the same rows. `model` is this rank's part,
/// built by [`decoder`](super::decoder) or [`adapted_decoder`](super::adapted_decoder) under this layout.
///
/// `sink` is called on the first rank alone. [`Generation::processors`] run on the rank that draws, the first one of the last stage.
/// [`Generation::text`] runs on every rank and must be one function. Under ZeRO the parameters have to be gathered
/// ([`DataParallel::gathered`](crate::data_parallel::DataParallel::gathered)).
///
/// A row has the tokens that it has on one device. Stages alone change no bit of a score on a CPU. Layers that are split add in another order
/// than one device, so scores differ by rounding, and a token only where two scores are that close.
///
/// # Errors
/// [`Error::Disagreement`] on all ranks if prompts or settings differ; as [`phalanx_nn::models::generate_rows`] on all ranks; if the model is
/// no decoder; if a rank fails or does not take part.
pub fn generate_rows(
    model: &dyn StagedModel,
    layout: &Layout,
    groups: &Groups,
    prompts: &[impl AsRef<[u32]>],
    generation: Generation<'_>,
    sink: impl FnMut(GenerationStep<'_>) -> bool,
) -> Result<Vec<Generated>> {
    let part = RankPart::new(model, layout, groups)?;
    agree(part.all, &facts(&part, prompts, &generation))?;
    let rows = generate_rows_by(&part, prompts, generation, sink).and_then(|rows| {
        part.wait_for_sends(0)?;
        Ok(rows)
    });
    // What only this rank knows ends the run of the others, who would wait for it.
    rows.inspect_err(|error| {
        if part.fails_alone.get() {
            part.all.fail(&error.to_string());
        }
    })
}

/// What all ranks must have been given alike.
fn facts(part: &RankPart<'_>, prompts: &[impl AsRef<[u32]>], generation: &Generation<'_>) -> Facts {
    let (mut digest, mut tokens) = (Xxh64::new(0), 0);
    for prompt in prompts.iter().map(AsRef::as_ref) {
        digest.update(&(prompt.len() as u64).to_le_bytes());
        prompt.iter().for_each(|token| digest.update(&token.to_le_bytes()));
        tokens += prompt.len();
    }
    let prompts = format!("{} of {tokens} tokens (XXH64 {:016x})", prompts.len(), digest.digest());
    let Generation { count, sampling, end_tokens, processors, text, stop, context, piece, page } = generation;
    let facts = [
        ("generate: the stages' ranks", format!("{:?}", part.placement)),
        ("generate: the model's context and vocabulary", format!("{} and {}", part.context, part.vocabulary)),
        ("generate: where rotary positions turn", format!("{:?}", part.turning_point)),
        ("generate: the prompts", prompts),
        ("generate: `count`", count.to_string()),
        ("generate: `sampling`", format!("{sampling:?}")),
        ("generate: `end_tokens`", format!("{end_tokens:?}")),
        ("generate: the number of `processors`", processors.len().to_string()),
        ("generate: whether there is `text`", text.is_some().to_string()),
        ("generate: `stop`", format!("{stop:?}")),
        ("generate: `context`", format!("{context:?}")),
        ("generate: `piece` and `page`", format!("{piece} and {page}")),
    ];
    facts.into_iter().map(|(name, value)| (name.into(), value)).collect()
}

/// One rank's part of a model, as the loop over tokens sees it.
struct RankPart<'a> {
    /// The stages that this rank computes, ascending.
    stages: Vec<(usize, &'a dyn CausalStage)>,
    /// The rank of the line that computes each stage. Where a stage has replicas, it is the first.
    placement: Vec<usize>,
    context: usize,
    vocabulary: usize,
    learned_positions: Option<usize>,
    turning_point: Option<usize>,
    device: Device,
    /// The ranks of the pipeline.
    line: &'a Comm,
    /// All ranks of the replica; the first one calls back.
    all: &'a Comm,
    /// The rank of `all` that draws.
    draws_at: usize,
    /// As [`CausalModel::groups`] and [`CausalModel::calls_under_way`].
    groups: usize,
    calls: usize,
    /// Into how many parts a rank with several stages divides the rows of a call.
    parts: usize,
    /// What is on its way to the next stage.
    sent: RefCell<VecDeque<Pending>>,
    /// Whether other ranks do not know of an error here: from the first call on, unless all have it.
    fails_alone: Cell<bool>,
}

impl<'a> RankPart<'a> {
    fn new(model: &'a dyn StagedModel, layout: &Layout, groups: &'a Groups) -> Result<RankPart<'a>> {
        let (line, tp, all) = (groups.along(Axis::Pp), groups.along(Axis::Tp), groups.model());
        if all.size() > 1 && !all.has_peers() {
            return Err(Error::Config(
                "generate: got ranks without peers, as on meta, which draw nothing".into(),
            ));
        }
        let (schedule, here) = (layout.schedule()?, line.rank());
        if schedule.ranks.len() != line.size() {
            let (got, wanted) = (schedule.ranks.len(), line.size());
            return Err(Error::Config(format!("generate: got a layout of pp {got} for {wanted} ranks")));
        }
        let placement: Vec<usize> =
            (0..schedule.stages()).map(|stage| schedule.ranks_of(stage).start).collect();
        let no_decoder =
            || Error::Config("generate: got a model that is no decoder, wanted a language model".into());
        let own = schedule.stages_of(here).map(|stage| Some((stage, model.causal_stage(stage)?)));
        let mut stages = own.collect::<Option<Vec<_>>>().ok_or_else(no_decoder)?;
        let &(_, any) = stages.first().ok_or_else(no_decoder)?;
        stages.retain(|(stage, _)| placement[*stage] == here);
        let (count, is_single) = (placement.len(), placement.windows(2).all(|pair| pair[0] < pair[1]));
        let ahead = stages.first().map_or(count, |(stage, _)| count - stage);
        Ok(RankPart {
            context: any.context(),
            vocabulary: any.vocabulary(),
            learned_positions: any.learned_positions(),
            turning_point: any.turning_point(),
            device: any.device(),
            draws_at: placement.last().map_or(0, |rank| rank * groups.mesh().expert_ranks() * tp.size()),
            groups: if is_single { count } else { 1 },
            calls: if is_single { ahead } else { 1 },
            parts: if is_single { 1 } else { line.size() },
            stages,
            placement,
            line,
            all,
            sent: RefCell::default(),
            fails_alone: Cell::new(false),
        })
    }

    /// Waits until at most so many sends are under way.
    fn wait_for_sends(&self, most: usize) -> Result<()> {
        let mut sent = self.sent.borrow_mut();
        while sent.len() > most
            && let Some(send) = sent.pop_front()
        {
            waiting("send", || send.wait())?;
        }
        Ok(())
    }

    /// Computes a stage of some rows, with their caches of these blocks, and sends the stream on. Returns it, or the scores, if the next stage is
    /// here or there is none.
    fn run(
        &self,
        number: usize,
        stage: &dyn CausalStage,
        mut x: Option<Var>,
        rows: &mut [RowTokens<'_>],
        blocks: Range<usize>,
    ) -> Result<Option<Var>> {
        let here = self.line.rank();
        let before = number.checked_sub(1).map(|before| self.placement[before]);
        if let Some(from) = before.filter(|&rank| rank != here) {
            x = Some(self.receive(stage, rows.iter().map(|row| row.tokens.len()).sum(), from)?);
        }
        let own = rows.iter_mut().map(|RowTokens { caches, before, tokens }| RowTokens {
            caches: &mut caches[blocks.clone()],
            before: *before,
            tokens,
        });
        let y = stage.extend_stage(x.as_ref(), &mut own.collect::<Vec<_>>())?;
        let Some(&to) = self.placement.get(number + 1).filter(|&&rank| rank != here) else {
            return Ok(Some(y));
        };
        self.sent.borrow_mut().push_back(self.line.start(Call::send(y.tensor().clone(), to)));
        Ok(None)
    }

    fn receive(&self, stage: &dyn CausalStage, positions: usize, from: usize) -> Result<Var> {
        let Spec { shape, dtype } = stage.row_stream(positions);
        let stream = Tensor::empty(&shape, dtype, self.device)?;
        waiting("receive input", || self.line.run(Call::recv(stream.clone(), from)))?;
        Ok(Var::new(stream))
    }

    /// The numbers of one rank on all ranks.
    fn told(&self, own: Vec<i64>, by: usize) -> Result<Vec<i64>> {
        let mut numbers = Tensor::from_slice(&own, &[own.len()], self.device.host())?;
        waiting("tokens", || self.all.broadcast(&mut numbers, by))?;
        Ok(numbers.to_vec()?)
    }
}

impl CausalModel for RankPart<'_> {
    type Error = Error;

    fn context(&self) -> usize {
        self.context
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn learned_positions(&self) -> Option<usize> {
        self.learned_positions
    }

    fn turning_point(&self) -> Option<usize> {
        self.turning_point
    }

    fn row_caches(&self, page: usize) -> Result<Vec<KvCache>> {
        let mut caches = Vec::new();
        for (_, stage) in &self.stages {
            caches.extend(stage.row_caches(page)?);
        }
        Ok(caches)
    }

    fn extend_rows(&self, rows: &mut [RowTokens<'_>]) -> Result<Option<Var>> {
        self.fails_alone.set(true);
        // The calls before the last ones have ended, so the next rank has what was sent for them, and this does not wait for long.
        self.wait_for_sends((self.calls - 1) * self.stages.len())?;
        let parts = cut(rows.len(), self.parts.clamp(1, rows.len().max(1)));
        let (mut streams, mut first) = (vec![None; parts.len()], 0);
        for &(number, stage) in &self.stages {
            let blocks = first..first + stage.blocks();
            for (x, part) in streams.iter_mut().zip(&parts) {
                *x = self.run(number, stage, x.take(), &mut rows[part.clone()], blocks.clone())?;
            }
            first = blocks.end;
        }
        let scores: Vec<Var> = streams.into_iter().flatten().collect();
        match &scores[..] {
            _ if self.all.rank() != self.draws_at => Ok(None),
            [scores] => Ok(Some(scores.clone())),
            scores => Ok(Some(Var::cat(scores, 0)?)),
        }
    }

    fn groups(&self) -> usize {
        self.groups
    }

    fn calls_under_way(&self) -> usize {
        self.calls
    }

    fn calls_back(&self) -> bool {
        self.all.rank() == 0
    }

    fn agreed_tokens(&self, drawn: Option<NnResult<Vec<u32>>>, count: usize) -> Result<Vec<u32>> {
        const NONE: i64 = -1;
        let own = match &drawn {
            Some(Ok(tokens)) => tokens.iter().map(|&token| i64::from(token)).collect(),
            _ => vec![NONE; count],
        };
        let tokens = self.told(own, self.draws_at)?;
        if !tokens.contains(&NONE) {
            return Ok(tokens.into_iter().map(|token| token as u32).collect());
        }
        let own = drawn.and_then(NnResult::err);
        let cause = all_gather_object(self.all, &own.as_ref().map(ToString::to_string))?;
        self.fails_alone.set(false);
        let cause = cause.into_iter().flatten().next().unwrap_or_default();
        let rank = self.all.ranks()[self.draws_at];
        Err(own.map_or_else(|| CommError::Failed { rank, cause }.into(), Error::from))
    }

    fn agreed_ends(&self, own: Vec<Option<GenerationEnd>>) -> Result<Vec<Option<GenerationEnd>>> {
        let numbers = self.told(own.into_iter().flat_map(numbers_of).collect(), 0)?;
        let (pairs, _) = numbers.as_chunks::<2>();
        Ok(pairs.iter().map(|&pair| end_of(pair)).collect())
    }
}

/// An end as two numbers.
fn numbers_of(end: Option<GenerationEnd>) -> [i64; 2] {
    match end {
        None => [0, 0],
        Some(GenerationEnd::Count) => [1, 0],
        Some(GenerationEnd::Callback) => [2, 0],
        Some(GenerationEnd::Token(token)) => [3, i64::from(token)],
        Some(GenerationEnd::Stop(stop)) => [4, stop as i64],
    }
}

/// The end of [`numbers_of`].
fn end_of(numbers: [i64; 2]) -> Option<GenerationEnd> {
    match numbers {
        [1, _] => Some(GenerationEnd::Count),
        [2, _] => Some(GenerationEnd::Callback),
        [3, token] => Some(GenerationEnd::Token(token as u32)),
        [4, stop] => Some(GenerationEnd::Stop(stop as usize)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_as_they_are() {
        use GenerationEnd::*;
        for end in [None, Some(Count), Some(Callback), Some(Token(u32::MAX)), Some(Stop(7))] {
            assert_eq!(end_of(numbers_of(end)), end);
        }
    }
}
