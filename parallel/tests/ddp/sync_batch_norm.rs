//! Normalisation over the batch of all ranks, held against that of the whole batch on one device.

use phalanx_nn::autograd::ContextMode;
use std::ops::Range;

use phalanx_nn::autograd::{GradCheck, Options, Var, checkpoint, grad, gradcheck, gradgradcheck};
use phalanx_nn::{
    BatchNorm, BatchNormConfig, Linear, LinearConfig, Module, Parameters, Scope, Sequential, Tanh, parameters,
};
use phalanx_parallel::comm::Reduction;
use phalanx_parallel::data_parallel::{Ddp, DdpConfig, SyncBatchNorm};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{Context, ContextGuard, DType, Device, Tensor};

const CHANNELS: usize = 3;

fn norm(places: &[usize], dtype: DType, device: Device, config: BatchNormConfig) -> BatchNorm {
    let scope = Scope::new(5, dtype, device);
    let made = if places.len() == 2 { config.init_2d(&scope) } else { config.init_1d(&scope) }.unwrap();
    let set = |p: &Option<phalanx_nn::Parameter>, values: [f64; CHANNELS]| {
        let values = Tensor::from_slice(&values, &[CHANNELS], Device::CPU).unwrap();
        p.iter().for_each(|p| p.load(&values).unwrap());
    };
    set(&made.weight, [0.5, -1.5, 2.0]);
    set(&made.bias, [0.1, 0.2, -0.3]);
    made
}

/// Rows of [N, 3, places..] data around `mean`, a function of `seed`.
fn rows(rows: Range<usize>, places: &[usize], seed: usize, mean: f64, spread: f64) -> (Vec<f64>, Vec<usize>) {
    let each = CHANNELS * places.iter().product::<usize>();
    let value = |i: usize| {
        let fraction = ((i + 1) as f64 * 0.618_033_988_749_894_9 + seed as f64 * 0.37).fract();
        mean + spread * (fraction * fraction - 0.3) * (1 + i % 5) as f64
    };
    let shape = [rows.len(), CHANNELS].iter().chain(places).copied().collect();
    ((rows.start * each..rows.end * each).map(value).collect(), shape)
}

fn tensor((values, shape): (Vec<f64>, Vec<usize>), dtype: DType, device: Device) -> Tensor {
    let tensor = Tensor::from_slice(&values, &shape, Device::CPU).unwrap().to_device(device, false).unwrap();
    phalanx_kernels::cast(&tensor, dtype).unwrap()
}

fn wide(t: &Tensor) -> Vec<f64> {
    phalanx_kernels::cast(t, DType::F64).unwrap().to_vec().unwrap()
}

fn train() -> ContextGuard {
    Context::with(|c| c.set_train(true))
}

/// Outputs, gradients of the input, of weight and bias, and the state of all passes.
#[derive(Debug, Default)]
struct Seen {
    y: Vec<f64>,
    dx: Vec<f64>,
    affine: Vec<Vec<f64>>,
    state: Vec<Vec<f64>>,
}

/// Two training passes and an evaluation with rows `share` of the batch.
fn passes(layer: &impl Module, share: Range<usize>, places: &[usize], dtype: DType, mean: f64) -> Seen {
    let device = phalanx_nn::state_dict(layer).first().map_or(Device::CPU, |(_, t)| t.device());
    let mut seen = Seen::default();
    for pass in 0..3 {
        let _train = (pass < 2).then(train);
        let x = Var::leaf(tensor(rows(share.clone(), places, pass, mean, 1.0), dtype, device)).unwrap();
        let y = layer.forward(&x).unwrap();
        seen.y.extend(wide(y.tensor()));
        let dy = tensor(rows(share.clone(), places, pass + 7, 0.1, 1.0), dtype, device);
        y.backward_with(Var::new(dy)).unwrap();
        seen.dx.extend(wide(x.grad().unwrap().tensor()));
    }
    seen.affine = layer.parameters().iter().map(|p| wide(&p.grad().unwrap().unwrap())).collect();
    let buffers = phalanx_nn::state_dict(layer)
        .into_iter()
        .filter(|(name, _)| !name.ends_with('t') && !name.ends_with("as"));
    seen.state = buffers.map(|(_, t)| wide(&t)).collect();
    seen
}

fn close(got: &[f64], wanted: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (a, b) in got.iter().zip(wanted) {
        assert!((a - b).abs() <= tolerance * b.abs().max(1.0), "{what}: {a}, wanted {b}");
    }
}

/// Ranks' rows: all the ways in which `cuts` says.
fn compare(
    cuts: &[usize],
    places: &[usize],
    dtype: DType,
    mean: f64,
    config: BatchNormConfig,
    tolerance: f64,
) {
    let what = format!("{cuts:?} {places:?} {dtype}");
    let whole =
        passes(&norm(places, dtype, Device::CPU, config), 0..cuts[cuts.len() - 1], places, dtype, mean);
    let all = launch::threads(cuts.len() - 1, |rank| -> Result<Seen> {
        let layer = SyncBatchNorm::of(&norm(places, dtype, rank.device(), config), rank.comm())?;
        let share = cuts[rank.rank()]..cuts[rank.rank() + 1];
        Ok(passes(&layer, share, places, dtype, mean))
    });
    let all = all.unwrap();
    // Ranks' rows follow each other within each pass.
    let joined = |part: fn(&Seen) -> &Vec<f64>| -> Vec<f64> {
        let third = |seen: &Seen, pass: usize| {
            let each = part(seen).len() / 3;
            part(seen)[pass * each..][..each].to_vec()
        };
        (0..3).flat_map(|pass| all.iter().flat_map(move |seen| third(seen, pass))).collect()
    };
    close(&joined(|s| &s.y), &whole.y, tolerance, &what);
    close(&joined(|s| &s.dx), &whole.dx, tolerance, &what);
    for (number, wanted) in whole.affine.iter().enumerate() {
        let sum: Vec<f64> = (0..CHANNELS).map(|c| all.iter().map(|s| s.affine[number][c]).sum()).collect();
        close(&sum, wanted, 10.0 * tolerance, &what);
    }
    for seen in &all {
        assert_eq!(seen.state, all[0].state, "{what}: ranks differ");
        assert_eq!(seen.state.len(), whole.state.len());
        seen.state.iter().zip(&whole.state).for_each(|(got, wanted)| close(got, wanted, tolerance, &what));
    }
}

#[test]
fn every_share_of_the_batch_gives_what_the_whole_batch_gives() {
    let config = BatchNormConfig::new(CHANNELS);
    for cuts in [&[0, 7][..], &[0, 4, 8], &[0, 1, 7], &[0, 0, 5], &[0, 3, 3, 4, 9], &[0, 6, 6, 6]] {
        for places in [&[][..], &[4], &[2, 3]] {
            compare(cuts, places, DType::F64, 3.0, config, 1e-12);
        }
    }
    compare(&[0, 2, 5], &[4], DType::F64, 3.0, config.with_momentum(None).with_affine(false), 1e-12);
    compare(&[0, 2, 5], &[4], DType::F64, 3.0, config.with_eps(0.1), 1e-12);
    compare(&[0, 2, 5], &[4], DType::F32, 3.0, config, 2e-5);
    compare(&[0, 2, 5], &[4], DType::BF16, 0.0, config, 4e-2);
}

#[test]
fn small_deviations_of_a_large_mean_are_seen() {
    let all = launch::threads(2, |rank| -> Result<Vec<f64>> {
        let plain = BatchNormConfig::new(CHANNELS).with_eps(0.0);
        let layer = SyncBatchNorm::of(&norm(&[64], DType::F32, rank.device(), plain), rank.comm())?;
        let _train = train();
        let share = 8 * rank.rank()..8 * (rank.rank() + 1);
        let x = tensor(rows(share, &[64], 1, 1000.0, 0.01), DType::F32, rank.device());
        Ok(wide(layer.forward(&Var::new(x))?.tensor()))
    });
    let x = wide(&tensor(rows(0..16, &[64], 1, 1000.0, 0.01), DType::F32, Device::CPU));
    let x = Tensor::from_slice(&x, &[16, CHANNELS, 64], Device::CPU).unwrap();
    let _train = train();
    let whole = norm(&[64], DType::F64, Device::CPU, BatchNormConfig::new(CHANNELS).with_eps(0.0));
    let wanted = wide(whole.forward(&Var::new(x)).unwrap().tensor());
    close(&all.unwrap().concat(), &wanted, 1e-5, "mean 1000");
}

#[test]
fn first_and_second_derivatives_hold() {
    let all = launch::threads(1, |rank| -> Result<()> {
        let config = BatchNormConfig::new(CHANNELS).with_eps(1e-2);
        for places in [&[][..], &[4]] {
            let layer = SyncBatchNorm::of(&norm(places, DType::F64, rank.device(), config), rank.comm())?;
            let _train = train();
            let f = |v: &[Var]| Ok(layer.forward(&v[0])?);
            let x = tensor(rows(0..4, places, 0, 0.0, 1.0), DType::F64, rank.device());
            gradcheck(f, std::slice::from_ref(&x), GradCheck::default())?;
            gradgradcheck(f, &[x], GradCheck::default())?;
        }
        Ok(())
    });
    all.unwrap();
}

/// The gradients of the squared length of the gradient of x, by x and by the weight.
fn penalty(layer: &impl Module, share: Range<usize>) -> [Vec<f64>; 2] {
    let _train = train();
    let device = layer.parameters()[0].device();
    let x = Var::leaf(tensor(rows(share.clone(), &[2], 0, 0.0, 1.0), DType::F64, device)).unwrap();
    let y = layer.forward(&x).unwrap();
    let dy = Var::new(tensor(rows(share, &[2], 9, 0.1, 1.0), DType::F64, device));
    let options = Options { create_graph: true, ..Options::default() };
    let dx = grad(&[(y, Some(dy))], &[&x], options).unwrap().swap_remove(0).unwrap();
    dx.mul(&dx).unwrap().sum_all().unwrap().backward().unwrap();
    [x.grad().unwrap(), Var::new(layer.parameters()[0].grad().unwrap().unwrap())].map(|g| wide(g.tensor()))
}

#[test]
fn second_derivatives_are_those_of_the_whole_batch() {
    let config = BatchNormConfig::new(CHANNELS).with_eps(1e-2);
    let [dx, dw] = penalty(&norm(&[2], DType::F64, Device::CPU, config), 0..5);
    let all = launch::threads(3, |rank| -> Result<_> {
        let layer = SyncBatchNorm::of(&norm(&[2], DType::F64, rank.device(), config), rank.comm())?;
        Ok(penalty(&layer, [0..1, 1..1, 1..5][rank.rank()].clone()))
    });
    let all = all.unwrap();
    close(&all.iter().flat_map(|own| own[0].clone()).collect::<Vec<f64>>(), &dx, 1e-11, "x");
    let sum: Vec<f64> = (0..CHANNELS).map(|c| all.iter().map(|own| own[1][c]).sum()).collect();
    close(&sum, &dw, 1e-11, "weight");
}

#[test]
fn derivatives_of_all_ranks_losses_hold_against_differences() {
    let all = launch::threads(2, |rank| -> Result<()> {
        let config = BatchNormConfig::new(CHANNELS).with_eps(1e-2);
        let layer = SyncBatchNorm::of(&norm(&[2], DType::F64, rank.device(), config), rank.comm())?;
        let _train = train();
        let share = [0..1, 1..4][rank.rank()].clone();
        let (own, shape) = rows(share.clone(), &[2], 0, 0.0, 1.0);
        let dy = tensor(rows(share, &[2], 9, 0.1, 1.0), DType::F64, rank.device());
        let total = |values: &[f64]| -> Result<f64> {
            let x = Var::new(Tensor::from_slice(values, &shape, rank.device())?);
            let y = layer.forward(&x)?;
            let mut loss =
                Tensor::scalar(y.mul(&Var::new(dy.clone()))?.sum_all()?.item::<f64>()?, Device::CPU)?;
            rank.comm().all_reduce(&mut loss, Reduction::Sum)?;
            Ok(loss.item()?)
        };
        let x = Var::leaf(Tensor::from_slice(&own, &shape, rank.device())?)?;
        layer.forward(&x)?.backward_with(Var::new(dy.clone()))?;
        let dx = wide(x.grad().unwrap().tensor());
        // One element of one rank at a time.
        for (mover, elements) in [(0, 6), (1, 18)] {
            for element in 0..elements {
                let at = |step: f64| {
                    let mut moved = own.clone();
                    if rank.rank() == mover {
                        moved[element] += step;
                    }
                    total(&moved)
                };
                let slope = (at(1e-5)? - at(-1e-5)?) / 2e-5;
                if rank.rank() == mover {
                    close(&dx[element..=element], &[slope], 1e-8, "difference");
                }
            }
        }
        Ok(())
    });
    all.unwrap();
}

#[test]
fn too_few_elements_on_all_ranks_and_wrong_shapes_are_refused() {
    let all = launch::threads(2, |rank| -> Result<()> {
        let layer = norm(&[], DType::F64, rank.device(), BatchNormConfig::new(CHANNELS));
        let layer = SyncBatchNorm::of(&layer, rank.comm())?;
        let _train = train();
        let run = |rows_: Range<usize>, places: &[usize]| {
            let x = tensor(rows(rows_, places, 0, 0.0, 1.0), DType::F64, rank.device());
            layer.forward(&Var::new(x)).map(|_| ())
        };
        let error = run(0..rank.rank(), &[]).unwrap_err().to_string();
        assert!(error.contains("SyncBatchNorm") && error.contains("got 1 elements"), "{error}");
        let error = run(0..2, &[2, 2]).unwrap_err().to_string();
        assert!(error.contains("wanted [2, 3] dimensions"), "{error}");
        Ok(run(0..1, &[])?)
    });
    all.unwrap();
}

#[test]
fn it_shares_the_layer_it_was_made_of_and_counts_a_repeated_pass_once() {
    let all = launch::threads(2, |rank| -> Result<()> {
        let plain = norm(&[], DType::F64, rank.device(), BatchNormConfig::new(CHANNELS));
        let layer = SyncBatchNorm::of(&plain, rank.comm())?;
        let names =
            |m: &dyn Fn() -> Vec<(String, Tensor)>| m().into_iter().map(|(n, _)| n).collect::<Vec<_>>();
        assert_eq!(names(&|| phalanx_nn::state_dict(&layer)), names(&|| phalanx_nn::state_dict(&plain)));
        assert!(layer.parameters().iter().zip(plain.parameters()).all(|(a, b)| a.is(&b)));
        let _train = train();
        let x = Var::leaf(tensor(rows(0..3, &[], rank.rank(), 0.0, 1.0), DType::F64, rank.device()))?;
        let run = move |v: &[Var]| Ok(vec![layer.forward(&v[0])?.tanh()?]);
        let y = checkpoint(run, &[&x])?;
        let before: Vec<f64> = wide(&plain.running_mean.as_ref().unwrap().tensor());
        y[0].sum_all()?.backward()?;
        assert_eq!(wide(&plain.running_mean.as_ref().unwrap().tensor()), before);
        assert_eq!(plain.num_batches_tracked.as_ref().unwrap().tensor().item::<i64>()?, 1);
        Ok(())
    });
    all.unwrap();
}

/// A norm between two maps.
struct Net<N> {
    a: Linear,
    norm: N,
    b: Linear,
}
parameters!([N: Parameters] Net<N> { a, norm, b });

impl<N> Net<N> {
    fn new(device: Device, make: impl Fn(BatchNorm) -> N) -> Net<N> {
        let scope = Scope::new(2, DType::F64, device);
        let linear = |name: &str, from, to| LinearConfig::new(from, to).init(&scope.child(name)).unwrap();
        let norm = make(BatchNormConfig::new(8).init_1d(&scope.child("norm")).unwrap());
        Net { a: linear("a", 3, 8), norm, b: linear("b", 8, 2) }
    }
}

impl<N: Module> Net<N> {
    fn loss(&self, share: Range<usize>, step: usize, device: Device) -> Var {
        let x = Var::new(tensor(rows(share, &[], step, 0.0, 1.0), DType::F64, device));
        let y = self
            .b
            .forward(&self.norm.forward(&self.a.forward(&x).unwrap()).unwrap().tanh().unwrap())
            .unwrap();
        y.mul(&y).unwrap().sum_all().unwrap()
    }
}

#[test]
fn training_over_ranks_is_training_on_the_whole_batch() {
    const CUTS: [usize; 4] = [0, 2, 2, 6];
    let _train = train();
    let step = |model: &dyn Parameters| {
        for parameter in model.parameters() {
            let mut values = parameter.tensor();
            let grad = parameter.grad().unwrap().unwrap();
            phalanx_kernels::add_scaled_(&mut values, &grad, -0.05).unwrap();
            parameter.zero_grad().unwrap();
        }
    };
    let whole = Net::new(Device::CPU, |norm| norm);
    for number in 0..5 {
        whole.loss(0..6, number, Device::CPU).backward().unwrap();
        step(&whole);
    }
    let wanted: Vec<Vec<f64>> = phalanx_nn::state_dict(&whole).iter().map(|(_, t)| wide(t)).collect();
    let all = launch::threads(3, |rank| -> Result<Vec<Vec<f64>>> {
        let model = Net::new(rank.device(), |norm| SyncBatchNorm::of(&norm, rank.comm()).unwrap());
        let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
        for number in 0..5 {
            ddp.backward(&model.loss(CUTS[rank.rank()]..CUTS[rank.rank() + 1], number, rank.device()))?;
            step(&model);
        }
        Ok(phalanx_nn::state_dict(&model).iter().map(|(_, t)| wide(t)).collect())
    });
    for got in all.unwrap() {
        got.iter().zip(&wanted).for_each(|(got, wanted)| close(got, wanted, 1e-11, "after 5 steps"));
    }
}

/// A norm between two maps, all in sequences.
fn sequences(device: Device) -> Sequential {
    let net = Net::new(device, |norm| norm);
    Sequential::new().with(Sequential::new().with(net.a).with(net.norm).with(Tanh)).with(net.b)
}

#[test]
fn a_converted_sequence_trains_as_the_plain_one_on_the_whole_batch() {
    let _train = train();
    let loss = |model: &Sequential, share: Range<usize>, step: usize, device: Device| {
        let x = Var::new(tensor(rows(share, &[], step, 0.0, 1.0), DType::F64, device));
        let y = model.forward(&x).unwrap();
        y.mul(&y).unwrap().sum_all().unwrap()
    };
    let whole = sequences(Device::CPU);
    loss(&whole, 0..6, 0, Device::CPU).backward().unwrap();
    let of = |model: &Sequential| -> Vec<Vec<f64>> {
        let grads = model.parameters().into_iter().map(|p| p.grad().unwrap().unwrap());
        phalanx_nn::state_dict(model).into_iter().map(|(_, t)| t).chain(grads).map(|t| wide(&t)).collect()
    };
    let all = launch::threads(3, |rank| -> Result<_> {
        let mut model = sequences(rank.device());
        let names = |model: &Sequential| -> Vec<String> {
            phalanx_nn::state_dict(model).into_iter().map(|(name, _)| name).collect()
        };
        let before = names(&model);
        assert_eq!(SyncBatchNorm::convert(&mut model, rank.comm())?, 1);
        assert_eq!(SyncBatchNorm::convert(&mut model, rank.comm())?, 0, "there are none left");
        assert_eq!(names(&model), before);
        let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
        ddp.backward(&loss(&model, [0..2, 2..2, 2..6][rank.rank()].clone(), 0, rank.device()))?;
        Ok(of(&model))
    });
    let wanted = of(&whole);
    for got in all.unwrap() {
        assert_eq!(got.len(), wanted.len());
        got.iter().zip(&wanted).for_each(|(got, wanted)| close(got, wanted, 1e-11, "a step"));
    }
}

impl Module for Net<BatchNorm> {
    fn forward(&self, x: &Var) -> phalanx_nn::Result<Var> {
        self.b.forward(&self.norm.forward(&self.a.forward(x)?)?)
    }
}

#[test]
fn a_norm_that_cannot_be_replaced_from_outside_is_named() {
    let run = |rank: launch::Rank| -> Result<usize> {
        let mut model = Sequential::new().with(Tanh).with(Net::new(rank.device(), |norm| norm));
        SyncBatchNorm::convert(&mut model, rank.comm())
    };
    let error = launch::threads(2, run).unwrap_err().to_string();
    assert!(error.contains("\"1.norm\"") && error.contains("`SyncBatchNorm::of(&norm, comm)`"), "{error}");
}
