//! [`ZeroConfig`]: what is sharded over the ranks, and how.

use phalanx_nn::{Parameter, Parameters};
use phalanx_tensor::{DType, Device};

use super::Ownership;
use crate::data_parallel::Average;
use crate::{Error, Result};

/// Which parts of the state are sharded over the ranks. Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
/// Parameter Models" (2020), section 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroStage {
    /// Optimizer state (ZeRO-1).
    Optimizer = 1,
    /// Optimizer state and gradients (ZeRO-2).
    Gradients = 2,
    /// Optimizer state, gradients and parameters (ZeRO-3, fully sharded data parallelism).
    Parameters = 3,
}

/// Which units' parameters stay gathered between forward and backward, in [`ZeroStage::Parameters`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reshard {
    /// None: every unit is gathered twice a step.
    Always,
    /// Those of the last unit, whose backward begins at once.
    #[default]
    ExceptLast,
    /// All: a unit is gathered once a step, and freed after its backward.
    Never,
}

/// When a backward pass gathers the parameters of the unit whose gradients are computed next (torch: `BackwardPrefetch`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackwardPrefetch {
    /// Before the present unit's gradients are computed: two units are gathered at a time.
    #[default]
    Pre,
    /// After them, when the present unit is freed: one unit is gathered at a time. The gather overlaps the sending of gradients.
    Post,
    /// When it is about to compute.
    None,
}

/// Which units are gathered before they compute, in [`ZeroStage::Parameters`]. What comes next is known from the pass before; at
/// first it is guessed from the order in which units are registered. `true.into()` is the default, `false.into()` gathers nothing
/// ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefetch {
    /// How many units ahead of the present one a forward pass gathers (1).
    pub forward: usize,
    /// When a backward pass gathers the next unit ([`BackwardPrefetch::Pre`]).
    pub backward: BackwardPrefetch,
    /// How many units are gathered or being gathered at a time, at most (2; torch: `limit_all_gathers`): the one that computes, and
    /// those ahead. The units around it do not count, nor does the root, nor do units that stay for their backward pass ([`Reshard`]).
    pub limit: usize,
}

impl Default for Prefetch {
    fn default() -> Prefetch {
        Prefetch { forward: 1, backward: BackwardPrefetch::Pre, limit: 2 }
    }
}

impl From<bool> for Prefetch {
    fn from(on: bool) -> Prefetch {
        match on {
            true => Prefetch::default(),
            false => Prefetch { forward: 0, backward: BackwardPrefetch::None, limit: 1 },
        }
    }
}

/// Where [`Zero::full_state_dict_with`](super::Zero::full_state_dict_with) puts a whole state (torch: `FullStateDictConfig`). The default is
/// rank 0's memory on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FullStateDict {
    /// Whether rank 0 alone gets it; otherwise every rank does.
    pub rank0_only: bool,
    /// Whether it is moved to the CPU; otherwise it stays on the parameters' device.
    pub offload_to_cpu: bool,
}

impl Default for FullStateDict {
    fn default() -> FullStateDict {
        FullStateDict { rank0_only: true, offload_to_cpu: true }
    }
}

/// How [`Zero`](super::Zero) spreads a model.
#[derive(Clone, Debug)]
pub struct ZeroConfig {
    /// Which parts of the state are sharded.
    pub stage: ZeroStage,
    /// How parameters are cut.
    pub ownership: Ownership,
    /// Which units stay gathered.
    pub reshard: Reshard,
    /// Which units' parameters are gathered while another one computes.
    pub prefetch: Prefetch,
    /// How many ranks share one copy (hybrid sharding): consecutive ones, a divisor of the group's size. The groups' sums
    /// are then added, in order of the groups: an order of additions of its own. `None`: all.
    pub shard_ranks: Option<usize>,
    /// Sum or mean of the ranks' gradients.
    pub average: Average,
    /// Whether parameters may get no gradient; see [`DdpConfig::find_unused`](crate::data_parallel::DdpConfig). Ranks may
    /// leave out different ones, but in [`ZeroStage::Parameters`] no units; there all gradients are sent after the pass.
    pub find_unused: bool,
    /// Whether all ranks take rank 0's buffers at the end of each pass that synchronises; see
    /// [`DdpConfig::broadcast_buffers`](crate::data_parallel::DdpConfig).
    pub broadcast_buffers: bool,
    /// Names of parameters that are left alone (torch: `ignored_modules`, `ignored_states`): each rank keeps its own values, which are
    /// neither sharded nor gathered, and its own gradients, which are neither added nor in any norm. A name is a parameter's path in
    /// the model or its [`Parameter::name`], or that of the module around it, and `*` stands for any characters. An optimizer may train
    /// them beside [`Zero::parameters`](super::Zero::parameters). The buffers of a module whose parameters are all ignored are each rank's own
    /// too. Full state dicts have rank 0's. Sharded ones have every rank's under one name, of which a load takes the first. See
    /// [`ZeroConfig::ignoring`].
    pub ignored: Vec<String>,
    /// The gradients' dtype; `None`: each parameter's own.
    pub grad_dtype: Option<DType>,
    /// The dtype that ranks keep their shards in, wider than the dtype of the computation: f32 shards of a bf16 model are
    /// rounded as they are gathered, and no master copy is needed. `None`: each parameter's own.
    pub shard_dtype: Option<DType>,
    /// Where shards, their gradients and their optimizer state live, if not on the model's device. Source: Ren et al., "ZeRO-Offload"
    /// (2021).
    pub offload: Option<Device>,
    /// Whether offloaded shards are uploaded for each all-gather of [`ZeroStage::Parameters`]. Otherwise the model's device keeps a copy
    /// of its shard, in the dtype of the computation, which is uploaded once after each update.
    pub offload_parameters: bool,
}

impl ZeroConfig {
    /// A stage, with defaults for the rest.
    pub fn new(stage: ZeroStage) -> ZeroConfig {
        ZeroConfig {
            stage,
            ownership: Ownership::Even,
            reshard: Reshard::ExceptLast,
            prefetch: Prefetch::default(),
            shard_ranks: None,
            average: Average::Sum,
            find_unused: false,
            broadcast_buffers: true,
            ignored: Vec::new(),
            grad_dtype: None,
            shard_dtype: None,
            offload: None,
            offload_parameters: true,
        }
    }

    /// That leaves the parameters and buffers of a module alone too; see [`ZeroConfig::ignored`].
    #[must_use]
    pub fn ignoring(mut self, module: &(impl Parameters + ?Sized)) -> ZeroConfig {
        self.ignored.extend(module.parameters().iter().map(|p| p.name().to_string()));
        self
    }

    /// The parameters of a model that are left alone.
    pub(super) fn ignored_of(&self, model: &(impl Parameters + ?Sized)) -> Result<Vec<Parameter>> {
        let (all, mut ignored) = (model.named_parameters(), Vec::<Parameter>::new());
        for pattern in &self.ignored {
            let is_meant =
                |(path, p): &&(String, Parameter)| names(pattern, path) || names(pattern, p.name());
            let meant: Vec<&Parameter> = all.iter().filter(is_meant).map(|(_, p)| p).collect();
            if meant.is_empty() {
                let why = format!("Zero: there is no parameter called {pattern:?}, which is to be ignored");
                return Err(Error::Config(why));
            }
            ignored.extend(meant.into_iter().cloned());
        }
        Ok(ignored)
    }

    /// The settings that must be equal on all ranks, as text. Where the shards live may differ.
    pub(super) fn shared_settings(&self) -> String {
        format!("{:?}", ZeroConfig { offload: None, offload_parameters: true, ..self.clone() })
    }

    /// Whether it fits a model, which still has its values.
    pub(super) fn check(&self, model: &(impl Parameters + ?Sized)) -> Result<()> {
        if self.prefetch.limit == 0 {
            let why = "Zero: got a prefetch limit of 0 units, wanted at least 1: the one that computes";
            return Err(Error::Config(why.into()));
        }
        for parameter in model.parameters() {
            let (name, dtype) = (parameter.name(), parameter.dtype());
            let refuse = |what: String| Err(Error::Config(format!("Zero: {name} of {dtype}: {what}")));
            let whole: usize = parameter.part().extent.iter().product();
            if parameter.tensor().numel() != whole {
                let held = parameter.tensor().numel();
                return refuse(format!("got {held} of {whole} elements; are they spread by another `Zero`?"));
            }
            if let Some(got) = self.grad_dtype.filter(|dtype| !dtype.is_float()) {
                return refuse(format!("got grad_dtype {got}, wanted a floating-point one"));
            }
            let loses = |to: &DType| !to.is_float() || (*to != dtype && to.size() <= dtype.size());
            if let Some(got) = self.shard_dtype.filter(loses) {
                return refuse(format!("got shard_dtype {got}, wanted the parameter's or a wider one"));
            }
        }
        Ok(())
    }

    /// The ranks of the group of `ranks` ranks that share a copy with `rank`, and those that hold the same shard.
    pub(super) fn groups(&self, rank: usize, ranks: usize) -> Result<(Vec<usize>, Vec<usize>)> {
        let each = self.shard_ranks.unwrap_or(ranks);
        if each == 0 || !ranks.is_multiple_of(each) {
            return Err(Error::Config(format!("got shard_ranks {each}, wanted a divisor of {ranks} ranks")));
        }
        let first = rank - rank % each;
        Ok(((first..first + each).collect(), (rank % each..ranks).step_by(each).collect()))
    }
}

/// Whether a pattern, in which `*` stands for any characters, is a name or that of a module around it.
fn names(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => name.strip_prefix(pattern).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')),
        Some((before, after)) => name.strip_prefix(before).is_some_and(|rest| {
            rest.char_indices().any(|(at, _)| names(after, &rest[at..])) || after.is_empty()
        }),
    }
}

impl TryFrom<u8> for ZeroStage {
    type Error = Error;

    fn try_from(number: u8) -> Result<ZeroStage> {
        match number {
            1 => Ok(ZeroStage::Optimizer),
            2 => Ok(ZeroStage::Gradients),
            3 => Ok(ZeroStage::Parameters),
            _ => Err(Error::Config(format!("got ZeRO stage {number}, wanted 1, 2 or 3"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_parameters_and_modules() {
        for (pattern, name, wanted) in [
            ("h.1", "h.1.attn.weight", true),
            ("h.1", "h.10.attn.weight", false),
            ("h.1.attn.weight", "h.1.attn.weight", true),
            ("attn", "h.1.attn.weight", false),
            ("*.attn", "h.1.attn.weight", true),
            ("*.bias", "h.1.attn.weight", false),
            ("h.*.weight", "h.1.attn.weight", true),
            ("h.*", "h.1.attn.weight", true),
            ("h.*.1", "h.1.attn.weight", false),
            ("*", "", true),
            ("", "h", false),
        ] {
            assert_eq!(names(pattern, name), wanted, "{pattern:?}, {name:?}");
        }
    }

    #[test]
    fn hybrid_groups() {
        let config = ZeroConfig { shard_ranks: Some(2), ..ZeroConfig::new(ZeroStage::Parameters) };
        assert_eq!(config.groups(3, 6).unwrap(), (vec![2, 3], vec![1, 3, 5]));
        let refused = config.groups(0, 3).err().unwrap().to_string();
        assert!(refused.contains("got shard_ranks 2, wanted a divisor of 3"), "{refused}");
        assert_eq!(ZeroConfig::new(ZeroStage::Optimizer).groups(1, 3).unwrap(), (vec![0, 1, 2], vec![1]));
        assert!(ZeroStage::try_from(4).unwrap_err().to_string().contains("ZeRO stage 4"));
    }
}
