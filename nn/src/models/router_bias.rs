//! [`RouterBias`]: a bias of each expert that a router adds when it chooses, and that moves against the experts' loads: balance without a loss.

use std::sync::{Arc, Mutex};

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Device, Tensor, unpoisoned};

use crate::{Buffer, Entry, Error, Parameters, Result};

/// The biases b of a mixture's experts. A token takes the experts of the largest p + b, weighted by p alone. After each step, with the loads of
/// all its tokens,
///
/// ```text
/// b_e += step * sign(mean load - load_e)
/// ```
/// In training the loads are counted as forward passes run. The wrapper of a mesh in `phalanx-parallel` adds them over all replicas and moves
/// the biases; a program of its own calls [`RouterBias::update`] with its loads. Clones are handles on the same biases.
///
/// Sources: Wang et al.: Auxiliary-loss-free load balancing (2024); DeepSeek-AI: DeepSeek-V3 (2024), section 2.1.2, whose scores are sigmoids.
#[derive(Clone)]
pub struct RouterBias(Arc<State>);

struct State {
    /// f32 `[experts]`
    values: Buffer,
    step: f64,
    /// Pairs of each expert since the last update.
    loads: Mutex<Vec<u64>>,
}

/// What files call it, as DeepSeek's do.
pub(crate) const ROUTER_BIAS: &str = "e_score_correction_bias";

impl RouterBias {
    pub(crate) fn new(experts: usize, step: f64, device: Device) -> Result<RouterBias> {
        let values = Buffer::new(Tensor::zeros(&[experts], DType::F32, device)?);
        Ok(RouterBias(Arc::new(State { values, step, loads: Mutex::new(vec![0; experts]) })))
    }

    /// The biases, of numbers on the host.
    pub(crate) fn values(&self) -> Result<Vec<f64>> {
        Ok(kernels::cast(&self.0.values.tensor(), DType::F64)?.to_vec()?)
    }

    /// Counts pairs of tokens and experts.
    pub(crate) fn count(&self, pairs: &[usize]) {
        let mut loads = unpoisoned(self.0.loads.lock());
        loads.iter_mut().zip(pairs).for_each(|(load, &pairs)| *load += pairs as u64);
    }

    /// The pairs of tokens and each expert that this rank has counted since the last call of [`RouterBias::update`] or [`RouterBias::reset`].
    pub fn loads(&self) -> Vec<u64> {
        unpoisoned(self.0.loads.lock()).clone()
    }

    /// Forgets what was counted, as that of a step that is left out.
    pub fn reset(&self) {
        unpoisoned(self.0.loads.lock()).fill(0);
    }

    /// Moves the biases by the loads of a whole step, the same on all ranks, and counts anew.
    ///
    /// # Errors
    /// If there is not a load for each expert, or the biases cannot be written.
    pub fn update(&self, loads: &[u64]) -> Result<()> {
        self.reset();
        let mut held = self.0.values.tensor();
        if loads.len() != held.numel() {
            let why = format!("got {} loads, wanted one for each of {} experts", loads.len(), held.numel());
            return Err(Error::invalid("router bias", why));
        }
        if held.device().is_meta() {
            return Ok(());
        }
        let mean = loads.iter().sum::<u64>() as f64 / loads.len() as f64;
        let sign = |load: u64| if load as f64 == mean { 0.0 } else { (mean - load as f64).signum() };
        let moved = self.values()?.into_iter().zip(loads).map(|(b, &load)| b + self.0.step * sign(load));
        let moved = Tensor::from_vec(moved.collect::<Vec<f64>>(), &[loads.len()], held.device())?;
        Ok(kernels::copy_(&mut held, &kernels::cast(&moved, DType::F32)?)?)
    }
}

impl Parameters for RouterBias {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        visitor(path, Entry::Buffer(&self.0.values));
    }
}

#[cfg(test)]
mod tests {
    use phalanx_autograd::Var;

    use super::*;
    use crate::models::{Decoder, Family, TransformerConfig};
    use crate::{Scope, inference};

    #[test]
    fn biases_move_by_a_step_against_the_error_of_the_load() {
        let bias = RouterBias::new(4, 0.25, Device::CPU).unwrap();
        bias.count(&[4, 0, 2, 2]);
        bias.count(&[3, 1, 2, 2]);
        assert_eq!(bias.loads(), [7, 1, 4, 4]);
        bias.update(&bias.loads()).unwrap();
        assert_eq!((bias.values().unwrap(), bias.loads()), (vec![-0.25, 0.25, 0.0, 0.0], vec![0; 4]));
        bias.update(&[0, 1, 1, 6]).unwrap();
        assert_eq!(bias.values().unwrap(), [0.0, 0.5, 0.25, -0.25]);
        let refused = bias.update(&[1]).unwrap_err().to_string();
        assert!(refused.contains("got 1 loads, wanted one for each of 4 experts"), "{refused}");
    }

    fn model(bias_step: f64) -> Decoder {
        let size = TransformerConfig::new(Family::Llama, 37, 12, 2, 2, 16);
        let mut config = Family::samples(&size).into_iter().find(|c| c.family == Family::OlmoE).unwrap();
        config.experts.as_mut().unwrap().bias_step = bias_step;
        config.init(&Scope::new(3, DType::F32, Device::CPU)).unwrap()
    }

    #[test]
    fn a_bias_chooses_experts_and_does_not_weigh_them() {
        let tokens: Vec<i64> = (0..24).map(|i| i * 7919 % 37).collect();
        let tokens = Var::from_slice(&tokens, &[2, 12], Device::CPU).unwrap();
        let run = |model: &Decoder| model.forward(&tokens).unwrap().tensor().to_bytes().unwrap();
        let (plain, biased) = (model(0.0), model(0.5));
        assert!(plain.router_biases().is_empty());
        let wanted = run(&plain);
        assert!(run(&biased) == wanted, "biases of 0 change nothing");
        let biases = biased.router_biases();
        let loads: Vec<Vec<u64>> = biases.iter().map(RouterBias::loads).collect();
        assert!(loads.len() == 2 && loads.iter().all(|loads| loads.iter().sum::<u64>() == 2 * 24));
        {
            let _inference = inference();
            run(&biased);
        }
        assert_eq!(biases.iter().map(RouterBias::loads).collect::<Vec<_>>(), loads, "training alone counts");
        // All biases moved alike choose the same experts; with one that is far above, every token takes that.
        biases.iter().for_each(|bias| bias.0.values.tensor().copy_from(&full(&[8.0; 4])).unwrap());
        assert!(run(&biased) == wanted, "a bias does not weigh");
        biases.iter().for_each(|bias| {
            bias.reset();
            bias.0.values.tensor().copy_from(&full(&[0.0, 0.0, 8.0, 0.0])).unwrap();
        });
        assert!(run(&biased) != wanted);
        assert!(biases.iter().all(|bias| bias.loads()[2] == 24));
    }

    fn full(values: &[f32]) -> Tensor {
        Tensor::from_slice(values, &[values.len()], Device::CPU).unwrap()
    }
}
