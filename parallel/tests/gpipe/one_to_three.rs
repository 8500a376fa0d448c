//! Three convolutions and a skip from the first to the last: torchgpipe's `1to3`, with its weights.

use phalanx_kernels as kernels;
use phalanx_nn::autograd::Var;
use phalanx_nn::{Conv2d, Conv2dConfig, Module, Scope, parameters};
use phalanx_parallel::Result;
use phalanx_parallel::pipeline::gpipe::{
    Batch, GPipe, GPipeConfig, Layer, Partition, Sequence, Skip, Skippable, Skips, scatter,
};
use phalanx_tensor::{DType, Device, Tensor};

use crate::kit::*;

/// Weights and biases that PyTorch 1.x and later draw for seed 0.
const WEIGHTS: [([f64; 9], [f64; 3]); 3] = [
    (
        [
            -0.004322518,
            0.30971584,
            -0.47518533,
            -0.4248946,
            -0.22236897,
            0.15482073,
            -0.011439145,
            0.45777494,
            -0.0512364,
        ],
        [0.15277413, -0.1744828, -0.11348708],
    ),
    (
        [
            -0.5515707,
            -0.38236874,
            -0.23799711,
            0.021387115,
            0.22824688,
            0.34642333,
            -0.39140946,
            -0.25141457,
            0.20970349,
        ],
        [0.4794247, -0.11881878, 0.43203798],
    ),
    (
        [
            -0.09305926,
            0.0610918,
            0.5227769,
            -0.5355907,
            -0.36346388,
            -0.14616501,
            -0.22505105,
            0.4988311,
            -0.3742267,
        ],
        [-0.2657733, -0.40336025, -0.54072374],
    ),
];

struct Third {
    conv: Conv2d,
    place: usize,
}
parameters!(Third { conv });

impl Third {
    fn new(place: usize, dtype: DType, device: Device) -> Third {
        let conv = Conv2dConfig::new(3, 3, [1, 1]).init(&Scope::new(0, dtype, device).child(place)).unwrap();
        let (weight, bias) = WEIGHTS[place];
        conv.weight.load(&Tensor::from_slice(&weight, &[3, 3, 1, 1], device).unwrap()).unwrap();
        conv.bias.as_ref().unwrap().load(&Tensor::from_slice(&bias, &[3], device).unwrap()).unwrap();
        Third { conv, place }
    }
}

impl Layer for Third {
    fn run(&self, input: Batch, skips: &mut Skips) -> Result<Batch> {
        let (x, skip) = (input.one()?, Skip::new("1to3"));
        if self.place == 0 {
            skips.stash(&skip, x.clone())?;
        }
        let y = self.conv.forward(&x)?;
        let skipped = if self.place == 2 { skips.pop(&skip)? } else { None };
        Ok(skipped.iter().try_fold(y, |y, skipped| y.add(skipped))?.into())
    }

    fn skippable(&self) -> Skippable {
        let skip = Skip::new("1to3");
        match self.place {
            0 => Skippable::new().stash(skip),
            1 => Skippable::new(),
            _ => Skippable::new().pop(skip),
        }
    }
}

fn model(dtype: DType, place: impl Fn(usize) -> Device) -> Sequence {
    (0..3).map(|i| Third::new(i, dtype, place(i))).fold(Sequence::new(), Sequence::with)
}

/// The gradient of the mean of `rows` images' outputs by `y`.
fn of_the_mean(y: &Var, rows: usize) -> Var {
    let whole = y.numel() / y.shape()[0] * rows;
    Var::new(kernels::full(y.shape(), 1.0 / whole as f64, y.dtype(), y.device()).unwrap())
}

#[test]
fn every_balance_and_mode_gives_the_plain_models_bits() {
    let own = devices(3);
    let (rows, shape) = (10, [10, 3, 7, 5]);
    let plain = model(DType::F64, |_| Device::CPU);
    let part = |(part, _): (Batch, _)| Var::leaf(part.one().unwrap().into_tensor()).unwrap();
    let xs = scatter(&constant(4, &shape, Device::CPU).into(), 3).unwrap();
    let xs: Vec<Var> = xs.into_iter().map(part).collect();
    let ys: Vec<Var> = xs.iter().map(|x| plain.run(x).and_then(Batch::one).unwrap()).collect();
    ys.iter().rev().for_each(|y| y.backward_with(of_the_mean(y, rows)).unwrap());
    let dx = xs.iter().flat_map(|x| bits(&x.grad().unwrap())).collect::<Vec<_>>();
    let wanted = (ys.iter().flat_map(bits).collect::<Vec<_>>(), dx, gradients(&plain));
    for balance in [&[3][..], &[1, 2], &[2, 1], &[1, 1, 1]] {
        for mode in MODES {
            let partition = Partition::new(balance, &own).unwrap();
            let layers = model(DType::F64, |layer| partition.device(layer).unwrap());
            let config = GPipeConfig::new(3).with_checkpoint(mode);
            let piped = GPipe::new(layers, partition, config).unwrap();
            let x = leaf(4, &shape, own[0]);
            let y = piped.run(&x).and_then(Batch::one).unwrap();
            y.backward_with(of_the_mean(&y, rows)).unwrap();
            let got = (bits(&y), bits(&x.grad().unwrap()), gradients(&piped));
            assert!(got == wanted, "{balance:?}, {mode}");
        }
    }
}

#[test]
fn norms_are_torchgpipes() {
    let own = devices(3);
    let partition = Partition::new(&[1, 1, 1], &own).unwrap();
    let layers = model(DType::F32, |layer| own[layer]);
    let piped = GPipe::new(layers, partition, GPipeConfig::new(3)).unwrap();
    let (rows, shape) = (30, [30, 3, 224, 224]);
    // Uniform in [0, 1), as torch's rand.
    let values: Vec<f32> =
        numbers(5, shape.iter().product()).into_iter().map(|v| (v / 2.0 + 0.5) as f32).collect();
    let x = Var::leaf(Tensor::from_slice(&values, &shape, own[0]).unwrap()).unwrap();
    let y = piped.run(&x).and_then(Batch::one).unwrap();
    y.backward_with(of_the_mean(&y, rows)).unwrap();
    let norm = |v: &Var| v.to_vec::<f32>().unwrap().iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    // The gradient depends on the weights alone. The output is of other draws than torchgpipe's; PyTorch makes 1038.8108 of
    // these.
    let (output, gradient) = (norm(&y), norm(&x.grad().unwrap()));
    assert!((gradient / 0.000_453_305_3 - 1.0).abs() < 1e-6, "{gradient}");
    assert!((output / 1038.8108 - 1.0).abs() < 1e-6 && (output / 1039.159 - 1.0).abs() < 1e-3, "{output}");
}
