//! Checks of the flags, before any file is read.

use std::path::Path;

use phalanx::nn::models::ModelConfig;
use phalanx::parallel::hybrid::Layout;
use phalanx::{DType, Device, Tensor};

use crate::args::TrainArgs;
use crate::choices::{Backend, Rule};

/// Threads of a rank at most.
const THREADS_MAX: usize = 1024;
/// Blocks of a model at most.
const LAYERS_MAX: usize = 1 << 16;
/// Ranks in one process at most.
const RANKS_MAX: usize = 256;

/// Refuses a number of tokens that is less than that of the bytes, or beyond reason.
pub fn check_vocabulary(vocabulary: usize) -> Result<(), String> {
    let (least, most) = (256, 1 << 20);
    match (least..=most).contains(&vocabulary) {
        true => Ok(()),
        false => Err(format!("--vocabulary is {vocabulary}, wanted {least} to {most}")),
    }
}

impl TrainArgs {
    /// Refuses what cannot be, in one line.
    pub fn check(&self) -> Result<(), String> {
        let positive = [
            ("--steps", self.steps as usize),
            ("--batch", self.batch),
            ("--context", self.context),
            ("--layers", self.layers.unwrap_or(1)),
            ("--heads", self.heads.unwrap_or(1)),
            ("--width", self.width.unwrap_or(1)),
            ("--micro-batches", self.micro_batches),
            ("--emulate-dp", self.emulate_dp),
            ("--threads", self.threads.unwrap_or(1)),
            ("--ranks", self.ranks.unwrap_or(1)),
            ("--dp", self.dp.unwrap_or(1)),
            ("--tp", self.tp),
            ("--pp", self.pipeline_ranks()),
            ("--virtual-stages", self.virtual_stages.unwrap_or(1)),
            ("--keep-last", self.keep_last),
            ("--patience", self.patience.unwrap_or(1)),
        ];
        if let Some((flag, _)) = positive.iter().find(|(_, n)| *n == 0) {
            return Err(format!("{flag} is 0, wanted at least 1"));
        }
        if self.threads.is_some_and(|n| n > THREADS_MAX) {
            return Err(format!("--threads is more than {THREADS_MAX}"));
        }
        let [layers, heads, width] = self.sizes();
        if layers > LAYERS_MAX {
            return Err(format!("--layers is {layers}, wanted at most {LAYERS_MAX}"));
        }
        if !width.is_multiple_of(heads) {
            return Err(format!("--heads {heads} does not divide --width {width}"));
        }
        let numbers = [
            ("--lr", self.lr, 0.0..f64::INFINITY),
            ("--lr-min", self.lr_min, 0.0..f64::INFINITY),
            ("--weight-decay", self.weight_decay, 0.0..f64::INFINITY),
            ("--dropout", self.dropout, 0.0..1.0),
            ("--clip", self.clip, 0.0..f64::INFINITY),
        ];
        if let Some((flag, x, range)) = numbers.iter().find(|(_, x, range)| !range.contains(x)) {
            return Err(format!("{flag} is {x}, wanted a number from {} up to {}", range.start, range.end));
        }
        self.vocabulary.map_or(Ok(()), check_vocabulary)?;
        if let (Some(data), Some(_)) = (self.data.as_ref().filter(|path| path.is_dir()), &self.validation) {
            let data = data.display();
            return Err(format!(
                "--validation does not go with --data {data}, a prepared folder, which has held out its own"
            ));
        }
        if self.validate_every > 0
            && self.data.as_ref().is_some_and(|path| path.is_file())
            && self.validation.is_none()
        {
            return Err("--validate-every goes with --validation, which is not given".into());
        }
        self.check_rule()?;
        self.check_backend()?;
        // Whether there is such a device at all.
        Tensor::empty(&[0], DType::F32, self.device).map_err(|e| format!("--device {}: {e}", self.device))?;
        self.check_ranks()?;
        self.check_schedule()?;
        self.check_batch()
    }

    /// Refuses backends that this build has not, or that do not go with the device.
    fn check_backend(&self) -> Result<(), String> {
        match self.backend {
            Some(Backend::Mpi) if !cfg!(feature = "mpi") => {
                Err("--backend mpi: built without MPI, wanted a build with `--features mpi`".into())
            }
            Some(Backend::Nccl) if !self.device.is_cuda() => Err(format!(
                "--backend nccl is between GPUs, got --device {}, wanted --device cuda",
                self.device
            )),
            #[cfg(feature = "nccl")]
            Some(Backend::Nccl) => {
                phalanx::parallel::comm::check_nccl().map(drop).map_err(|e| format!("--backend nccl: {e}"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses Muon where matrices are not whole.
    fn check_rule(&self) -> Result<(), String> {
        match self.optimizer {
            Rule::Muon if self.tp > 1 || self.zero > 0 => Err(format!(
                "--optimizer muon takes whole matrices, and --tp {} --zero {} cut them: wanted --optimizer adamw",
                self.tp, self.zero
            )),
            _ => Ok(()),
        }
    }

    /// Refuses sizes that are not those of the model that is continued, which `file` describes.
    pub fn check_sizes(&self, config: &ModelConfig, file: &Path) -> Result<(), String> {
        let sizes = [
            ("--layers", self.layers, config.layers()),
            ("--heads", self.heads, config.heads()),
            ("--width", self.width, config.width()),
        ];
        match sizes.iter().find(|(_, wanted, got)| wanted.is_some_and(|n| n != *got)) {
            Some((flag, wanted, got)) => {
                let (file, wanted) = (file.display(), wanted.unwrap_or(0));
                Err(format!("{file}: {flag} is {wanted}, and the model has {got}"))
            }
            None => Ok(()),
        }
    }

    /// Refuses what these ranks cannot do with a model, and says what they could.
    pub fn check_layout(&self, model: &ModelConfig) -> Result<(), String> {
        let layout = Layout { micro_batches: self.micro_batches, ..self.layout() };
        layout.check(model, self.batch, self.context).map_err(|e| e.to_string())
    }

    fn check_batch(&self) -> Result<(), String> {
        let (groups, pieces) = (self.emulate_dp, self.micro_batches);
        if !self.batch.is_multiple_of(groups) {
            return Err(format!("--emulate-dp {groups} does not divide --batch {}", self.batch));
        }
        if !pieces.is_multiple_of(groups) {
            return Err(format!("--emulate-dp {groups} does not divide --micro-batches {pieces}"));
        }
        Ok(())
    }

    /// Which ranks there are.
    fn check_ranks(&self) -> Result<(), String> {
        if self.zero > 3 {
            return Err(format!("--zero is {}, wanted 0, 1, 2 or 3", self.zero));
        }
        let ranks = self.all_ranks();
        // On a device without elements one rank stands for all.
        let most = if self.device.is_meta() { usize::from(u16::MAX) } else { RANKS_MAX };
        if !(1..=most).contains(&ranks) {
            return Err(format!("got {ranks} ranks, wanted 1 to {most}"));
        }
        if let Some(all) = self.ranks.filter(|all| *all != ranks) {
            let (dp, tp, pp) = (ranks / self.model_ranks(), self.tp, self.pipeline_ranks());
            return Err(match self.dp {
                Some(dp) => {
                    format!("--ranks {all} is not --dp {dp} x --tp {tp} x --pp {pp}, which is {ranks}")
                }
                None => format!(
                    "--ranks {all} is no multiple of --tp {tp} x --pp {pp}; the nearest is --dp {dp}, {ranks} ranks"
                ),
            });
        }
        if let (Device::Cuda(1..), true) = (self.device, ranks > 1) {
            return Err(format!("--device {} is one, got {ranks} ranks, wanted --device cuda", self.device));
        }
        if ranks > 1 && self.emulate_dp > 1 {
            return Err(format!("--emulate-dp is for one rank, got {ranks} ranks"));
        }
        if self.zero > 0 && self.emulate_dp > 1 {
            return Err(format!("--emulate-dp {} does not go with --zero {}", self.emulate_dp, self.zero));
        }
        if self.sequence_parallel && self.tp == 1 {
            return Err("--sequence-parallel goes with --tp, got --tp 1".into());
        }
        Ok(())
    }
}
