//! Checks of a [`Config`]: [`Config::check`] refuses settings that do not fit each other, and [`Keyed::settle`] completes a configuration
//! once all its keys are set. Errors name the keys.

use std::cmp::Reverse;
use std::path::Path;

use phalanx_parallel::hybrid::Layout;
use phalanx_parallel::pipeline::schedule::common_multiple;
use phalanx_tensor::Device;

use super::rates::total;
use super::{AUTO, Asynchronous, Config, Offload, OnDivergence, Plateau};
use crate::settings::{GivenValues, Key, Keyed};
use crate::{Error, Result, checkpoints};

fn refuse(why: impl Into<String>) -> Result<()> {
    Err(Error::Config(format!("train: {}", why.into())))
}

/// Ranks in one process at most.
const RANKS_MAX: usize = 256;
/// Threads of a rank at most.
const THREADS_MAX: usize = 1024;

/// The longest timeout: a year.
const SECONDS_MAX: f64 = 365.0 * 86_400.0;

impl Config {
    /// Refuses settings that no model can be trained with.
    ///
    /// # Errors
    /// The key that does not fit, and the values that would.
    pub fn check(&self) -> Result<()> {
        self.check_counts()?;
        self.check_numbers()?;
        self.check_ranks()?;
        self.check_offload()?;
        self.check_batch()?;
        self.check_files()?;
        self.check_plan()?;
        self.check_asynchronous()
    }

    fn check_counts(&self) -> Result<()> {
        let Layout { dp, tp, pp, ep, micro_batches, chunks, .. } = self.layout;
        let counts = [
            ("steps", self.steps as usize),
            ("batch", self.batch),
            ("emulate-dp", self.chains),
            ("keep-last", self.keep_last),
            ("dp", dp),
            ("tp", tp),
            ("pp", pp),
            ("ep", ep),
            ("micro-batches", micro_batches),
            ("virtual-stages", chunks),
            ("threads", self.threads.unwrap_or(1)),
            ("prefetch", self.prefetch),
            ("patience", self.patience.unwrap_or(1)),
            ("validation-rows", self.validation_rows.unwrap_or(1)),
        ];
        if let Some((key, _)) = counts.iter().find(|(_, n)| *n == 0) {
            return refuse(format!("`{key}` is 0, wanted at least 1"));
        }
        if self.threads.is_some_and(|n| n > THREADS_MAX) {
            return refuse(format!("`threads` is more than {THREADS_MAX}"));
        }
        if self.workers > THREADS_MAX {
            return refuse(format!("`workers` is more than {THREADS_MAX}"));
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<()> {
        let lr = self.lr.peak();
        if !(0.0..f64::INFINITY).contains(&lr) {
            return refuse(format!("`lr` is {lr}, wanted a number from 0 up"));
        }
        self.lr.check()?;
        if let Some(total) = total(&mut self.lr.clone()).filter(|total| **total < self.steps) {
            let steps = self.steps;
            return refuse(format!(
                "`steps` is {steps}, and the schedule of the rate (`lr`) ends after {total}"
            ));
        }
        for (key, seconds) in [("timeout", self.timeout_s), ("join-timeout", self.join_timeout_s)] {
            if !(1e-3..=SECONDS_MAX).contains(&seconds) {
                return refuse(format!("`{key}` is {seconds}, wanted seconds from 0.001 to {SECONDS_MAX}"));
            }
        }
        if let Some(clip) = self.clip.filter(|clip| clip.is_nan() || *clip <= 0.0) {
            return refuse(format!("`clip` is {clip}, wanted more than 0, or none"));
        }
        for (key, times) in [("explodes-at", self.explodes_at), ("norm-explodes-at", self.norm_explodes_at)] {
            if times.is_nan() || times <= 1.0 {
                return refuse(format!("`{key}` is {times}, wanted more than 1"));
            }
        }
        if let Some(ema) = self.ema.filter(|ema| !(0.0..1.0).contains(ema)) {
            return refuse(format!("`ema` is {ema}, wanted a number from 0 to below 1"));
        }
        if let Some(Plateau { factor, patience }) = self.plateau
            && !(factor > 0.0 && factor < 1.0 && patience > 0)
        {
            let wanted = "wanted a factor between 0 and 1 and a patience of at least 1";
            return refuse(format!(
                "`plateau-factor` is {factor} and `plateau-patience` {patience}, {wanted}"
            ));
        }
        if self.plateau.is_some() && self.validate_every == 0 {
            return refuse("`plateau-factor` needs validations on the way (`validate-every`)");
        }
        Ok(())
    }

    fn check_ranks(&self) -> Result<()> {
        if self.zero > 3 {
            return refuse(format!("`zero` is {}, wanted 0, 1, 2 or 3", self.zero));
        }
        // On a meta device one rank of each stage runs for all ranks of its stage.
        let most = if self.device.is_meta() { usize::from(u16::MAX) } else { RANKS_MAX };
        let ranks = self.ranks();
        if ranks > most {
            return refuse(format!("got {ranks} ranks, wanted 1 to {most}"));
        }
        if let (Device::Cuda(1..), true) = (self.device, ranks > 1) {
            return refuse(format!(
                "`device` {} is one, got {ranks} ranks, wanted `device` cuda",
                self.device
            ));
        }
        if self.chains > 1 && (ranks > 1 || self.zero > 0) {
            let (chains, zero) = (self.chains, self.zero);
            return refuse(format!(
                "`emulate-dp` {chains} is for one rank without ZeRO, got {ranks} ranks and `zero` {zero}"
            ));
        }
        self.check_expert_groups()?;
        if self.layout.sequence_parallel && self.layout.tp == 1 {
            return refuse("`sequence-parallel` goes with `tp`, got `tp` 1");
        }
        let Layout { tp, pp, sequence_parallel, scatter_gather, .. } = self.layout;
        if scatter_gather && (tp == 1 || pp == 1) {
            return refuse(format!("`scatter-gather` goes with `tp` and `pp`, got `tp` {tp} and `pp` {pp}"));
        }
        if scatter_gather && sequence_parallel {
            return refuse(
                "`scatter-gather` goes without `sequence-parallel`, whose ranks send parts anyway",
            );
        }
        Ok(())
    }

    /// Refuses expert groups that are no part of the replicas.
    fn check_expert_groups(&self) -> Result<()> {
        let Layout { dp, ep, .. } = self.layout;
        match dp.is_multiple_of(ep) {
            true => Ok(()),
            false => refuse(format!("`ep` {ep} does not divide `dp` {dp}, whose ranks divide the experts")),
        }
    }

    fn check_offload(&self) -> Result<()> {
        let (zero, dp) = (self.zero, self.layout.dp);
        match self.offload {
            _ if self.offload_activations && self.asynchronous.is_some() => refuse(
                "`offload-activations` goes with a `schedule` that flushes between steps, got pipedream",
            ),
            Offload::None if self.offload_dir.is_some() => {
                refuse("`offload-dir` goes with `offload` optimizer or parameters, got none")
            }
            Offload::None => Ok(()),
            Offload::Parameters if zero != 3 => refuse(format!(
                "`offload` parameters goes with `zero` 3, got `zero` {zero}; wanted that or `offload` optimizer"
            )),
            _ if zero == 0 && dp > 1 => {
                refuse(format!("`offload` optimizer of `dp` {dp} goes with `zero` 1, 2 or 3, got `zero` 0"))
            }
            _ if self.chains > 1 => {
                refuse(format!("`offload` goes without `emulate-dp`, got {}", self.chains))
            }
            _ if self.asynchronous.is_some() => {
                refuse("`offload` goes with a `schedule` that flushes between steps, got pipedream")
            }
            _ => Ok(()),
        }
    }

    fn check_batch(&self) -> Result<()> {
        let (Layout { dp, tp, pp, micro_batches, .. }, batch) = (&self.layout, self.batch);
        if !batch.is_multiple_of(*dp) {
            let near = |other: &usize| (other.abs_diff(*dp), Reverse(*other));
            let nearest = (1..=batch.min(2 * dp)).filter(|dp| batch.is_multiple_of(*dp)).min_by_key(near);
            return refuse(format!(
                "a batch of {batch} rows cannot be shared by `dp` {dp}; the nearest layout that can be: dp {} x tp {tp} x pp {pp}",
                nearest.unwrap_or(1)
            ));
        }
        let share = batch / dp / self.chains;
        if share == 0 {
            return refuse(format!(
                "a batch of {batch} rows cannot be cut into `emulate-dp` {}",
                self.chains
            ));
        }
        if *micro_batches > share {
            return refuse(format!(
                "a share of {share} rows cannot be cut into {micro_batches} micro-batches"
            ));
        }
        Ok(())
    }

    /// Refuses policies that need files or validations if there are none.
    fn check_files(&self) -> Result<()> {
        let saves = self.folder().is_some();
        match self.on_divergence {
            OnDivergence::Rollback { .. } if !saves => {
                refuse("`on-divergence` rollback goes back to a checkpoint, and needs a folder (`out`)")
            }
            OnDivergence::Rollback { .. } if self.save_every == 0 => {
                refuse("`on-divergence` rollback needs checkpoints on the way (`save-every`)")
            }
            _ if self.keep_best && !saves => {
                refuse("`keep-best` keeps a checkpoint, and needs a folder (`out`)")
            }
            _ if self.restore_best && !self.keep_best => refuse("`restore-best` goes with `keep-best`"),
            _ if self.patience.is_some() && self.validate_every == 0 => {
                refuse("`patience` needs validations on the way (`validate-every`)")
            }
            _ => Ok(()),
        }
    }

    /// Refuses what does not go with stages that have replicas.
    fn check_plan(&self) -> Result<()> {
        self.layout.check_plan()?;
        let Some(plan) = &self.layout.plan else {
            return match &self.plan {
                None => Ok(()),
                Some(path) => refuse(format!(
                    "`plan` {} was not read; `Settings` do it, and set `Layout::plan`",
                    path.display()
                )),
            };
        };
        match (self.zero, self.offload) {
            _ if plan.ranks() == plan.stages().len() => Ok(()),
            (0, Offload::None) => Ok(()),
            (0, _) => refuse("`offload` goes with a `plan` of one replica a stage"),
            (zero, _) => refuse(format!("`zero` {zero} goes with a `plan` of one replica a stage")),
        }
    }

    fn check_asynchronous(&self) -> Result<()> {
        let Some(scheme) = self.asynchronous else { return Ok(()) };
        let name = match scheme {
            Asynchronous::WeightStashing => "pipedream",
            Asynchronous::VerticalSync => "pipedream-vertical-sync",
            Asynchronous::DoubleBuffered => "pipedream-2bw",
        };
        let refuse = |why: String| refuse(format!("`schedule` {name} {why}"));
        let Layout { dp, pp, micro_batches: pieces, .. } = self.layout;
        if dp > 1 || self.zero > 0 || self.chains > 1 {
            return refuse(format!(
                "has one replica: got `dp` {}, `zero` {}",
                dp.max(self.chains),
                self.zero
            ));
        }
        if self.device.is_meta() {
            return refuse("is not measured on `device` meta".into());
        }
        let round = common_multiple(&self.layout.replicas());
        match scheme {
            Asynchronous::WeightStashing | Asynchronous::VerticalSync if pieces != round => refuse(format!(
                "updates after a micro-batch of every replica: got `micro-batches` {pieces}, wanted {round}"
            )),
            Asynchronous::DoubleBuffered if pieces < pp => {
                refuse(format!("wants as many `micro-batches` as `pp` {pp}, got {pieces}"))
            }
            _ if self.digests + self.check_replicas > 0 => refuse(
                "has no step whose gradients and weights are compared (`digests`, `check-replicas`)".into(),
            ),
            _ if self.scales_loss() => refuse("does not scale losses (`loss-scaling`)".into()),
            _ if self.on_divergence != OnDivergence::Stop => {
                refuse("can only stop when it diverges (`on-divergence`)".into())
            }
            _ => Ok(()),
        }
    }

    /// Refuses settings about validations if there is no validation data. (A meta device validates nothing.)
    pub(crate) fn check_validation(&self, has_data: bool) -> Result<()> {
        let asked = [
            ("validate-every", self.validate_every > 0),
            ("patience", self.patience.is_some()),
            ("keep-best", self.keep_best),
            ("plateau-factor", self.plateau.is_some()),
        ];
        match asked.iter().find(|(_, asked)| *asked) {
            Some((name, _)) if !has_data && !self.device.is_meta() => {
                refuse(format!("got `{name}` without validation data (`validation`), wanted both or neither"))
            }
            _ => Ok(()),
        }
    }
}

impl Keyed for Config {
    fn keys() -> Vec<Key<Config>> {
        super::keys::keys()
    }

    fn settle(&mut self, given: &GivenValues<'_>) -> Result<()> {
        self.settle_plan(given)?;
        self.settle_ranks(given)?;
        self.settle_pieces(given)?;
        self.settle_schedule(given)?;
        self.settle_resume()?;
        match self.on_divergence {
            OnDivergence::Stop if is_given_over(given, "divergence-limit", "on-divergence") => {
                conflict("`divergence-limit` goes with `on-divergence` skip or rollback, and it is stop")
            }
            _ => Ok(()),
        }
    }
}

fn conflict(why: impl Into<String>) -> Result<()> {
    Err(Error::Config(why.into()))
}

/// A key's whole number, whose form was checked when the key was set.
fn whole(given: &GivenValues<'_>, name: &str) -> Option<usize> {
    given(name)?.1.parse().ok()
}

/// Whether a key is given, and no later source gives the other key, which would overrule this one.
fn is_given_over(given: &GivenValues<'_>, name: &str, other: &str) -> bool {
    given(name).is_some_and(|(source, _)| given(other).is_none_or(|(other, _)| other <= source))
}

impl Config {
    /// Sets the number of replicas by `ranks`.
    fn settle_ranks(&mut self, given: &GivenValues<'_>) -> Result<()> {
        let Some(all) = whole(given, "ranks").filter(|_| is_given_over(given, "ranks", "dp")) else {
            return Ok(());
        };
        if all == 0 {
            return conflict("`ranks` is 0, wanted at least 1");
        }
        let (tp, pp) = (self.layout.tp, self.layout.pp);
        let has_dp = is_given_over(given, "dp", "ranks") && !self.dp_auto;
        if !has_dp {
            self.layout.dp = (all / tp.saturating_mul(pp).max(1)).max(1);
        }
        let (dp, ranks) = (self.layout.dp, self.ranks());
        match has_dp {
            _ if ranks == all => Ok(()),
            true => {
                conflict(format!("`ranks` {all} is not `dp` {dp} x `tp` {tp} x `pp` {pp}, which is {ranks}"))
            }
            false => conflict(format!(
                "`ranks` {all} is no multiple of `tp` {tp} x `pp` {pp}; the nearest is `dp` {dp}, {ranks} ranks"
            )),
        }
    }

    /// Reads the plan, which says how many pipeline ranks there are.
    fn settle_plan(&mut self, given: &GivenValues<'_>) -> Result<()> {
        let Some(path) = &self.plan else { return Ok(()) };
        let plan = crate::plan::read(path)?;
        if let Some(pp) = whole(given, "pp").filter(|&pp| pp != plan.ranks()) {
            let (wanted, replicas) = (plan.ranks(), plan.replicas());
            return conflict(format!(
                "{}: replicas {replicas:?} are {wanted} ranks, and `pp` is {pp}",
                plan.name()
            ));
        }
        (self.layout.pp, self.layout.plan) = (plan.ranks(), Some(plan));
        Ok(())
    }

    /// Divides a rank's micro-batches among its chains.
    fn settle_pieces(&mut self, given: &GivenValues<'_>) -> Result<()> {
        let (pieces, chains) = (whole(given, "micro-batches"), whole(given, "emulate-dp"));
        let pieces = pieces.unwrap_or(self.layout.micro_batches.saturating_mul(self.chains));
        self.chains = chains.unwrap_or(self.chains);
        let chains = self.chains;
        if chains == 0 || pieces == 0 {
            let key = if chains == 0 { "emulate-dp" } else { "micro-batches" };
            return conflict(format!("`{key}` is 0, wanted at least 1"));
        }
        if !self.batch.is_multiple_of(chains) {
            return conflict(format!("`emulate-dp` {chains} does not divide `batch` {}", self.batch));
        }
        if !pieces.is_multiple_of(chains) {
            return conflict(format!("`emulate-dp` {chains} does not divide `micro-batches` {pieces}"));
        }
        self.layout.micro_batches = pieces / chains;
        Ok(())
    }

    /// Replaces `resume` auto by the run's folder if it has a checkpoint, and else by none.
    fn settle_resume(&mut self) -> Result<()> {
        if self.resume.as_deref() != Some(Path::new(AUTO)) {
            return Ok(());
        }
        let Some(out) = &self.out else {
            return conflict("`resume` auto goes on with the run in `out`, which is not given");
        };
        self.resume = checkpoints::is_there(out).then(|| out.clone());
        Ok(())
    }

    /// Refuses keys of a pipeline that have no effect.
    fn settle_schedule(&mut self, given: &GivenValues<'_>) -> Result<()> {
        if let Some((_, schedule)) =
            given("schedule").filter(|_| given("pp").is_none() && self.layout.pp == 1)
        {
            return conflict(format!("`schedule` {schedule} goes with `pp`, which is not given"));
        }
        let stages =
            whole(given, "virtual-stages").filter(|_| is_given_over(given, "virtual-stages", "schedule"));
        match (&self.layout.schedule[..], stages) {
            (_, None) | ("interleaved", _) | ("zb-v", Some(2)) => Ok(()),
            ("zb-v", Some(n)) => conflict(format!("`virtual-stages` is {n}, and zb-v always has 2")),
            (other, Some(n)) => conflict(format!(
                "`virtual-stages` {n} goes with `schedule` interleaved, and the schedule is {other}"
            )),
        }
    }
}
