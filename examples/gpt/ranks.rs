//! The ranks of a run: this one alone, or several in this process that each take a share of the batch.

use phalanx::parallel::comm::Comm;
use phalanx::parallel::data_parallel::{Ddp, DdpConfig};
use phalanx::parallel::{Result, launch};
use phalanx::{DType, Device, Tensor};

use crate::args::TrainArgs;

/// One rank's place among all.
#[derive(Clone, Debug)]
pub struct Place {
    /// The device that is this rank's alone.
    pub device: Device,
    comm: Option<Comm>,
}

/// Runs `f` on every rank; the results in order.
pub fn run<T: Send>(
    args: &TrainArgs,
    f: impl Fn(Place) -> Result<T, String> + Sync,
) -> Result<Vec<T>, String> {
    let ranks = args.data_ranks();
    if ranks == 1 {
        if let (Device::Cpu(_), Some(threads)) = (args.device, args.threads) {
            args.device.set_threads(threads).map_err(|e| e.to_string())?;
        }
        return Ok(vec![f(Place { device: args.device, comm: None })?]);
    }
    let threads = launch::Threads::new(ranks);
    let threads = args.threads.map_or(threads, |each| threads.cores(each * ranks));
    let threads = if args.device.is_meta() { threads.meta() } else { threads };
    let place = |rank: launch::Rank| Place { device: rank.device(), comm: Some(rank.comm().clone()) };
    threads.run(|rank| f(place(rank))).map_err(|e| e.to_string())
}

impl Place {
    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.comm.as_ref().map_or(0, |comm| comm.rank())
    }

    /// How many ranks share the batch.
    pub fn size(&self) -> usize {
        self.comm.as_ref().map_or(1, |comm| comm.size())
    }

    /// Whether this rank writes files and shows progress.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// What adds the model's gradients over the ranks, if there are several.
    pub fn ddp(&self, model: &impl phalanx::nn::Parameters, grad_dtype: DType) -> Result<Option<Ddp>> {
        let config = DdpConfig { grad_dtype: Some(grad_dtype), ..DdpConfig::default() };
        self.comm.as_ref().map(|comm| Ddp::new(model, comm.clone(), config)).transpose()
    }

    /// The sum of a number of each rank, added in their order.
    pub fn sum(&self, own: f64) -> Result<f64> {
        Ok(self.all(own)?.into_iter().fold(0.0, |sum, x| sum + x))
    }

    /// A number of each rank, in their order.
    pub fn all(&self, own: f64) -> Result<Vec<f64>> {
        let Some(comm) = &self.comm else { return Ok(vec![own]) };
        let own = Tensor::from_slice(&[own], &[1], Device::CPU)?;
        let mut all = Tensor::zeros(&[comm.size()], DType::F64, Device::CPU)?;
        comm.all_gather(&mut all, &own)?;
        Ok(all.to_vec()?)
    }
}
