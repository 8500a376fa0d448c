//! A model of three stages whose first sends a value over the second to the third.

use phalanx_nn::autograd::Var;
use phalanx_nn::{Batch, Linear, LinearConfig, Module};
use phalanx_parallel::hybrid::{Layout, StagedModel};
use phalanx_parallel::pipeline::ranks::{SkipRoute, Spec};
use phalanx_tensor::{DType, Dims};
use phalanx_train::{Asynchronous, Config, MeshRank, Result, Trainer};

use super::{Told, config, data, loss};

const WIDTH: usize = 16;

/// A rank's stage: a linear map. The third stage adds the first one's output to its input.
struct Skipping {
    map: Linear,
    skips: [SkipRoute; 1],
}

impl Skipping {
    fn new(rank: &MeshRank, config: &Config) -> Result<Skipping> {
        let stage = rank.groups.at().pp;
        let (inputs, outputs) = [(64, WIDTH), (WIDTH, WIDTH), (WIDTH, 2)][stage];
        let map = LinearConfig::new(inputs, outputs).init(&rank.scope(config).child(stage))?;
        Ok(Skipping { map, skips: [SkipRoute { from: 0, to: 2 }] })
    }
}

phalanx_nn::parameters!(Skipping { map = "" });

impl StagedModel for Skipping {
    fn run(&self, _: usize, _: Option<&Var>, _: &Batch, _: f64) -> phalanx_parallel::Result<Var> {
        unreachable!("its stages have several values")
    }

    fn run_values(
        &self,
        stage: usize,
        inputs: &[Var],
        batch: &Batch,
        scale: f64,
    ) -> phalanx_parallel::Result<Vec<Var>> {
        let rows = batch.tensors[0].shape()[0];
        match (stage, inputs) {
            (0, []) => {
                let [pixels, _] = batch.vars()?;
                let y = self.map.forward(&pixels.reshape(&[-1, 64])?)?;
                Ok(vec![y.clone(), y])
            }
            (1, [x]) => Ok(vec![self.map.forward(x)?.tanh()?]),
            (2, [x, skip]) => {
                let mean = loss(&self.map.forward(&(x + skip)?)?, batch).unwrap();
                Ok(vec![mean.mul_scalar(rows as f64 * scale)?])
            }
            _ => panic!("stage {stage} got {} values", inputs.len()),
        }
    }

    fn stream(&self, batch: &Batch) -> Option<Spec> {
        Some(Spec { shape: Dims::from_slice(&[batch.tensors[0].shape()[0], WIDTH]), dtype: DType::F32 })
    }

    fn streams(&self, _: usize, batch: &Batch) -> Option<Vec<Spec>> {
        let spec = self.stream(batch)?;
        Some(vec![spec.clone(), spec])
    }

    fn skips(&self) -> &[SkipRoute] {
        &self.skips
    }
}

#[test]
fn skips_pass_a_stage_with_and_without_flushes() {
    let losses = |asynchronous: Option<Asynchronous>, steps: u64| -> Vec<f64> {
        let layout = Layout { pp: 3, ..Layout::default() };
        let config = Config { steps, asynchronous, validate_every: 0, clip: None, ..config(layout, 0) };
        let told = Told::default();
        let [training, _] = data();
        let trainer = Trainer::new(config.clone()).data(training).callback(told.clone());
        trainer.run_parts(|rank| Skipping::new(rank, &config)).unwrap();
        told.losses().into_iter().map(f64::from_bits).collect()
    };
    let first = losses(None, 1);
    for scheme in [Asynchronous::WeightStashing, Asynchronous::VerticalSync] {
        assert_eq!(losses(Some(scheme), 1), first, "{scheme:?}: the first step has the initial weights");
        let all = losses(Some(scheme), 40);
        assert!(all[39] < 0.8 * all[0], "{scheme:?}: {} to {}", all[0], all[39]);
    }
}
