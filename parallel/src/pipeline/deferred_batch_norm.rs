//! [`DeferredBatchNorm`]: running statistics of the mini-batch, though the layer sees only micro-batches.
//!
//! ```text
//! micro-batch   0          1          2 = the last
//! normalised    by its own statistics, each
//! pending       m0         m0 + m1    m0 + m1 + m2  -->  running mean and variance move, once
//! ```
//! Moments are merged in f64 in the order of the micro-batches (Chan, Golub, LeVeque: Updating formulae, 1979), never as a
//! difference of large squares. The variance that is kept is the unbiased one, as in any [`BatchNorm`]. They stay on the device
//! (`moments.rs`), so the layer makes no host wait for a GPU.

use std::convert::Infallible;
use std::sync::{Mutex, MutexGuard};

use phalanx_nn::autograd::{BatchNorm as BatchNormArgs, Var, is_recomputing};
use phalanx_nn::{BatchNorm, Module, Parameter, Sequential};
use phalanx_tensor::{Category, Context, DType, Tensor, unpoisoned};

use super::MicroBatch;
use super::moments::Moments;
use crate::{Error, Result};

/// A [`BatchNorm`] that normalises each micro-batch by its own statistics, and updates the running statistics once for the
/// mini-batch, by the statistics of all its rows. Parameters, buffers and names are those of the `BatchNorm`. Source: torchgpipe
/// (arXiv:2004.09910).
///
/// [`MicroBatch::current`] tells it which micro-batch it sees, and of how many. Without that a pass is a whole batch, and the
/// result is bit for bit that of a `BatchNorm`. Recomputation does not update statistics. After a mini-batch that failed, the
/// next one starts afresh.
///
/// ```
/// # use phalanx_nn::{BatchNormConfig, Module, Scope, autograd::Var};
/// # use phalanx_parallel::pipeline::{DeferredBatchNorm, MicroBatch};
/// # use phalanx_tensor::{DType, Device};
/// let norm = BatchNormConfig::new(1).init_1d(&Scope::new(7, DType::F64, Device::CPU))?;
/// let deferred = DeferredBatchNorm::of(&norm);
/// for (index, rows) in [[0.0, 1.0], [2.0, 3.0]].into_iter().enumerate() {
///     let _part = MicroBatch { index, count: 2 }.enter();
///     deferred.forward(&Var::from_slice(&rows, &[2, 1], Device::CPU)?)?;
/// }
/// let mean = norm.running_mean.as_ref().map(|mean| mean.tensor().item::<f64>());
/// assert_eq!(mean.transpose()?, Some(0.1 * 1.5));
/// # Ok::<(), phalanx_nn::Error>(())
/// ```
pub struct DeferredBatchNorm {
    norm: BatchNorm,
    pending: Mutex<Pending>,
}

/// The moments of the micro-batches of this mini-batch that were seen so far.
#[derive(Default)]
struct Pending {
    seen: usize,
    moments: Option<Moments>,
}

impl DeferredBatchNorm {
    /// A deferred layer with the parameters and buffers of `norm`.
    pub fn of(norm: &BatchNorm) -> DeferredBatchNorm {
        DeferredBatchNorm { norm: norm.clone(), pending: Mutex::default() }
    }

    /// The layer that has the parameters and buffers.
    pub fn norm(&self) -> &BatchNorm {
        &self.norm
    }

    /// The output, normalised by the statistics of `x` alone, and these statistics.
    fn normalised(&self, x: &Var) -> Result<(Var, Moments)> {
        self.norm.check(x)?;
        let channels = x.shape()[1];
        let zeros = || {
            let _category = Context::with(|c| c.category = Category::Buffers);
            Tensor::zeros(&[channels], DType::F64, x.device())
        };
        // With momentum 1 the running statistics become those of the batch.
        let [mut mean, mut var] = [zeros()?, zeros()?];
        let numbers = BatchNormArgs { training: true, momentum: 1.0, eps: self.norm.eps() };
        let [weight, bias] = [&self.norm.weight, &self.norm.bias].map(|p| p.as_ref().map(Parameter::var));
        let y = x.batch_norm(Some([&mut mean, &mut var]), weight.as_ref(), bias.as_ref(), &numbers)?;
        Ok((y, Moments::new((x.numel() / channels) as f64, mean, &var)?))
    }

    /// Adds a micro-batch's moments to those before it. The last one updates the running statistics.
    fn track(&self, moments: Moments) -> Result<()> {
        let MicroBatch { index, count } = MicroBatch::current();
        let mut pending: MutexGuard<'_, Pending> = unpoisoned(self.pending.lock());
        if index == 0 {
            *pending = Pending::default();
        }
        if index != pending.seen || index >= count {
            let wanted = match pending.seen {
                seen if index < count => format!("{seen} (each once, in ascending order)"),
                _ => format!("one below {count}"),
            };
            let got = format!("got micro-batch {index} of {count}");
            return Err(Error::Config(format!("DeferredBatchNorm: {got}, wanted {wanted}")));
        }
        let moments = match pending.moments.take() {
            Some(before) => before.with(&moments)?,
            None => moments,
        };
        pending.seen += 1;
        if pending.seen < count {
            pending.moments = Some(moments);
            return Ok(());
        }
        *pending = Pending::default();
        moments.commit(&self.norm)
    }
}

phalanx_nn::parameters!(DeferredBatchNorm { norm = "" });

impl Module for DeferredBatchNorm {
    fn forward(&self, x: &Var) -> phalanx_nn::Result<Var> {
        let whole = MicroBatch::current() == MicroBatch::WHOLE;
        if whole || !self.norm.is_training() || self.norm.running_mean.is_none() {
            return self.norm.forward(x);
        }
        let error = |error: Error| phalanx_nn::Error::from(phalanx_nn::autograd::Error::from(error));
        let (y, moments) = self.normalised(x).map_err(error)?;
        if !is_recomputing() {
            self.track(moments).map_err(error)?;
        }
        Ok(y)
    }
}

/// Replaces each [`BatchNorm`] of the sequence that keeps running statistics, in inner sequences too, by a
/// [`DeferredBatchNorm`]. Parameters, buffers and their names stay. A norm inside a module of another type is not replaced: make
/// that module with [`DeferredBatchNorm::of`].
pub fn convert(layers: &mut Sequential) {
    let Ok(()) = layers.replace_layers::<Infallible>(&mut |layer| {
        let norm = layer.downcast_ref::<BatchNorm>().filter(|norm| norm.running_mean.is_some());
        Ok(norm.map(|norm| Box::new(DeferredBatchNorm::of(norm)) as Box<dyn Module>))
    });
}

#[cfg(test)]
mod tests {
    use phalanx_nn::autograd::ContextMode;
    use std::any::Any;
    use std::ops::Range;

    use phalanx_kernels as kernels;
    use phalanx_nn::autograd::checkpoint;
    use phalanx_nn::{BatchNormConfig, Conv2dConfig, Parameters, Relu, Scope, Sequential, state_dict};
    use phalanx_tensor::Device;

    use super::*;

    const CHANNELS: usize = 3;
    const PLACES: [usize; 2] = [3, 5];

    fn norm(dtype: DType, device: Device, momentum: Option<f64>) -> BatchNorm {
        let config = BatchNormConfig::new(CHANNELS).with_momentum(momentum);
        config.init_2d(&Scope::new(1, dtype, device)).unwrap()
    }

    /// Rows of a batch whose means differ by row and whose deviations differ by channel.
    fn rows(rows: Range<usize>, seed: usize, dtype: DType, device: Device) -> Tensor {
        let each = CHANNELS * PLACES[0] * PLACES[1];
        let value = |i: usize| {
            let fraction = ((i + 1) as f64 * 0.618_033_988_749_894_9 + seed as f64 * 0.37).fract();
            (i / each) as f64
                + [1.0, 10.0, 100.0][i / (PLACES[0] * PLACES[1]) % CHANNELS] * fraction * fraction
        };
        let values: Vec<f64> = (rows.start * each..rows.end * each).map(value).collect();
        let t = Tensor::from_slice(&values, &[rows.len(), CHANNELS, PLACES[0], PLACES[1]], device).unwrap();
        kernels::cast(&t, dtype).unwrap()
    }

    /// Rows of each micro-batch.
    fn cut(batch: usize, of_one: usize) -> Vec<Range<usize>> {
        (0..batch).step_by(of_one).map(|begin| begin..batch.min(begin + of_one)).collect()
    }

    /// The outputs of the micro-batches of a mini-batch.
    fn chunked(layer: &dyn Module, micro_batches: &[Var]) -> Vec<Var> {
        let count = micro_batches.len();
        let one = |(index, x): (usize, &Var)| {
            let _part = MicroBatch { index, count }.enter();
            layer.forward(x).unwrap()
        };
        micro_batches.iter().enumerate().map(one).collect()
    }

    fn wide(t: &Tensor) -> Vec<f64> {
        kernels::cast(t, DType::F64).unwrap().to_vec().unwrap()
    }

    fn running(norm: &BatchNorm) -> [Vec<f64>; 2] {
        [&norm.running_mean, &norm.running_var].map(|buffer| wide(&buffer.as_ref().unwrap().tensor()))
    }

    fn seen(norm: &BatchNorm) -> i64 {
        norm.num_batches_tracked.as_ref().unwrap().tensor().item().unwrap()
    }

    fn distance(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| (a - b).abs() / b.abs().max(1.0)).fold(0.0, f64::max)
    }

    #[test]
    fn outputs_and_gradients_are_those_of_batch_norm_on_each_micro_batch() {
        for (of_one, requires_grad) in [(16, true), (16, false), (4, true), (4, false), (5, true)] {
            let plain = norm(DType::F32, Device::CPU, Some(0.1));
            let deferred = DeferredBatchNorm::of(&norm(DType::F32, Device::CPU, Some(0.1)));
            let run = |layer: &dyn Module| -> Vec<Vec<f64>> {
                let x = |part: Range<usize>| {
                    let t = rows(part, 0, DType::F32, Device::CPU);
                    if requires_grad { Var::leaf(t).unwrap() } else { Var::new(t) }
                };
                let xs: Vec<Var> = cut(16, of_one).into_iter().map(x).collect();
                let ys = chunked(layer, &xs);
                ys.iter().for_each(|y| y.mul(y).unwrap().sum_all().unwrap().backward().unwrap());
                let grads = layer.parameters().into_iter().map(|p| p.grad().unwrap().unwrap());
                let dxs = xs.iter().filter_map(Var::grad).map(Var::into_tensor);
                ys.iter().map(|y| y.tensor().clone()).chain(grads).chain(dxs).map(|t| wide(&t)).collect()
            };
            assert_eq!(run(&deferred), run(&plain), "micro-batches of {of_one}, {requires_grad}");
        }
    }

    #[test]
    fn running_statistics_are_those_of_the_whole_batch() {
        for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-6)] {
            for (momentum, of_one) in [(Some(0.1), 4), (None, 4), (Some(0.1), 2), (None, 3), (Some(1.0), 5)] {
                let whole = norm(dtype, Device::CPU, momentum);
                let deferred = DeferredBatchNorm::of(&norm(dtype, Device::CPU, momentum));
                // The number of micro-batches follows the batch; the last batches have fewer and one row more.
                for (step, batch) in [16, 16, 5, 1, 7].into_iter().enumerate() {
                    whole.forward(&Var::new(rows(0..batch, step, dtype, Device::CPU))).unwrap();
                    let part = |part| Var::new(rows(part, step, dtype, Device::CPU));
                    chunked(&deferred, &cut(batch, of_one).into_iter().map(part).collect::<Vec<_>>());
                    let far = [0, 1].map(|i| distance(&running(deferred.norm())[i], &running(&whole)[i]));
                    assert!(
                        far[0].max(far[1]) < tolerance,
                        "{dtype} {momentum:?} {of_one}, step {step}: {far:?}"
                    );
                    assert_eq!(seen(deferred.norm()), step as i64 + 1);
                }
            }
        }
    }

    #[test]
    fn small_deviations_of_a_large_mean_are_seen() {
        let deferred = DeferredBatchNorm::of(&norm(DType::F32, Device::CPU, Some(1.0)));
        let whole = norm(DType::F64, Device::CPU, Some(1.0));
        let place = PLACES[0] * PLACES[1];
        let values: Vec<f32> =
            (0..8 * CHANNELS * place).map(|i| 1000.0 + 0.01 * ((i * i % 17) as f32 / 8.0 - 1.0)).collect();
        let x = Tensor::from_slice(&values, &[8, CHANNELS, PLACES[0], PLACES[1]], Device::CPU).unwrap();
        let part = |p: Range<usize>| Var::new(x.narrow(0, p.start, p.len()).unwrap());
        chunked(&deferred, &cut(8, 2).into_iter().map(part).collect::<Vec<_>>());
        whole.forward(&Var::new(kernels::cast(&x, DType::F64).unwrap())).unwrap();
        for (got, wanted) in running(deferred.norm())[1].iter().zip(&running(&whole)[1]) {
            assert!((got / wanted - 1.0).abs() < 1e-5 && *wanted < 1e-4, "{got}, wanted {wanted}");
        }
    }

    #[test]
    fn a_pass_of_which_nothing_is_said_is_batch_norm_to_the_bit() {
        let whole = norm(DType::F32, Device::CPU, Some(0.1));
        let deferred = DeferredBatchNorm::of(&norm(DType::F32, Device::CPU, Some(0.1)));
        let x = Var::new(rows(0..5, 0, DType::F32, Device::CPU));
        assert_eq!(wide(deferred.forward(&x).unwrap().tensor()), wide(whole.forward(&x).unwrap().tensor()));
        assert_eq!(running(deferred.norm()), running(&whole));
        let _evaluation = Context::with(|c| c.set_train(false));
        let _part = MicroBatch { index: 1, count: 3 }.enter();
        assert_eq!(wide(deferred.forward(&x).unwrap().tensor()), wide(whole.forward(&x).unwrap().tensor()));
        assert_eq!((running(deferred.norm()), seen(deferred.norm())), (running(&whole), 1));
    }

    #[test]
    fn norms_that_keep_running_statistics_are_converted_and_no_others() {
        let scope = Scope::new(1, DType::F32, Device::CPU);
        let make = |tracked| BatchNormConfig::new(3).with_tracking(tracked).init_2d(&scope).unwrap();
        let inner = Sequential::new().with(Relu {}).with(make(true));
        let mut model = Sequential::new().with(make(true)).with(make(false)).with(inner).with(Relu {});
        let names =
            |model: &Sequential| state_dict(model).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        let (before, parameters) = (names(&model), model.parameters());
        convert(&mut model);
        assert_eq!(names(&model), before);
        assert!(model.parameters().iter().zip(&parameters).all(|(a, b)| a.is(b)));
        let is = |model: &Sequential, place: usize| {
            let any: &dyn Any = &*model.modules()[place];
            [any.is::<DeferredBatchNorm>(), any.is::<BatchNorm>()]
        };
        let (deferred, plain, other) = ([true, false], [false, true], [false, false]);
        let places = [0, 1, 2, 3].map(|place| is(&model, place));
        assert_eq!(places, [deferred, plain, other, other]);
        let any: &dyn Any = &*model.modules()[2];
        assert_eq!(is(any.downcast_ref().unwrap(), 1), deferred);
        let address = |model: &Sequential| std::ptr::from_ref(&*model.modules()[0]).cast::<()>();
        let first = address(&model);
        convert(&mut model);
        assert_eq!(address(&model), first, "one that is deferred already stays");
    }

    /// A step of gradient descent over all parameters.
    fn step(module: &dyn Module, rate: f64) {
        for parameter in module.parameters() {
            let mut values = parameter.tensor();
            kernels::add_scaled_(&mut values, &parameter.take_grad().unwrap().unwrap(), -rate).unwrap();
        }
    }

    #[test]
    fn training_in_micro_batches_evaluates_as_training_on_whole_batches() {
        let whole = norm(DType::F64, Device::CPU, Some(0.1));
        let deferred = DeferredBatchNorm::of(&norm(DType::F64, Device::CPU, Some(0.1)));
        for number in 0..5 {
            let x = |part: Range<usize>| Var::new(rows(part, number, DType::F64, Device::CPU));
            whole.forward(&x(0..16)).unwrap().sum_all().unwrap().backward().unwrap();
            let ys = chunked(&deferred, &cut(16, 4).into_iter().map(x).collect::<Vec<_>>());
            ys.iter().for_each(|y| y.sum_all().unwrap().backward().unwrap());
            step(&whole, 1.0);
            step(&deferred, 1.0);
            let _evaluation = Context::with(|c| c.set_train(false));
            let [a, b]: [&dyn Module; 2] = [&whole, &deferred];
            let [a, b] = [a, b].map(|layer| wide(layer.forward(&x(0..16)).unwrap().tensor()));
            assert!(distance(&b, &a) < 1e-9, "step {number}: {}", distance(&b, &a));
        }
    }

    #[test]
    fn behind_a_convolution_the_first_statistics_agree_and_training_goes_its_own_way() {
        let make = || {
            let scope = Scope::new(1, DType::F64, Device::CPU);
            let conv = Conv2dConfig::new(CHANNELS, CHANNELS, [1, 1]).init(&scope).unwrap();
            (norm(DType::F64, Device::CPU, Some(0.1)), Sequential::new().with(conv))
        };
        let ((whole, a), (kept, b)) = (make(), make());
        let (a, mut b) = (a.with(whole.clone()), b.with(kept.clone()));
        convert(&mut b);
        for number in 0..2 {
            let x = |part: Range<usize>| Var::new(rows(part, 0, DType::F64, Device::CPU));
            let one = a.forward(&x(0..16)).unwrap();
            let ys = chunked(&b, &cut(16, 4).into_iter().map(x).collect::<Vec<_>>());
            let parts: Vec<f64> = ys.iter().flat_map(|y| wide(y.tensor())).collect();
            assert!(distance(&parts, &wide(one.tensor())) > 1e-3, "other statistics, other outputs");
            let far = distance(&running(&kept)[1], &running(&whole)[1]);
            assert_eq!(far < 1e-12, number == 0, "step {number}: {far}");
            one.mul(&one).unwrap().mul(&one).unwrap().sum_all().unwrap().backward().unwrap();
            ys.iter().for_each(|y| y.mul(y).unwrap().mul(y).unwrap().sum_all().unwrap().backward().unwrap());
            step(&a, 1e-2);
            step(&b, 1e-2);
            assert_ne!(wide(&a.parameters()[0].tensor()), wide(&b.parameters()[0].tensor()));
        }
    }

    #[test]
    fn a_recomputed_pass_counts_once() {
        let kept = norm(DType::F64, Device::CPU, None);
        let whole = norm(DType::F64, Device::CPU, None);
        let deferred = std::sync::Arc::new(DeferredBatchNorm::of(&kept));
        for number in 0..3 {
            whole.forward(&Var::new(rows(0..7, number, DType::F64, Device::CPU))).unwrap();
            for (index, part) in cut(7, 3).into_iter().enumerate() {
                let _part = MicroBatch { index, count: 3 }.enter();
                let x = Var::leaf(rows(part, number, DType::F64, Device::CPU)).unwrap();
                let layer = deferred.clone();
                let y = checkpoint(move |v| layer.forward(&v[0])?.tanh(), &[&x]).unwrap();
                // Inside the guard: the repeated pass is told of a micro-batch too.
                y.sum_all().unwrap().backward().unwrap();
                assert!(x.grad().is_some());
            }
            assert_eq!(seen(&kept), number as i64 + 1);
            assert!(distance(&running(&kept)[1], &running(&whole)[1]) < 1e-13);
        }
    }

    #[test]
    fn what_waits_for_the_last_micro_batch_holds_no_graph() {
        let device = Device::Cpu(70);
        let deferred = DeferredBatchNorm::of(&norm(DType::F32, device, None));
        let before = device.ledger().unwrap().total().now;
        let _part = MicroBatch { index: 0, count: 2 }.enter();
        let x = Var::leaf(rows(0..4, 0, DType::F32, device)).unwrap();
        drop(deferred.forward(&x.tanh().unwrap()).unwrap());
        drop(x);
        let moments = 2 * CHANNELS * DType::F64.size();
        assert_eq!(device.ledger().unwrap().total().now, before + moments);
    }

    #[test]
    fn a_failed_mini_batch_leaves_nothing_and_a_micro_batch_out_of_turn_is_refused() {
        let kept = norm(DType::F64, Device::CPU, Some(0.5));
        let whole = norm(DType::F64, Device::CPU, Some(0.5));
        let deferred = DeferredBatchNorm::of(&kept);
        let run = |index, count, part| {
            let _part = MicroBatch { index, count }.enter();
            deferred.forward(&Var::new(rows(part, 0, DType::F64, Device::CPU))).map(|_| ())
        };
        run(0, 3, 9..14).unwrap();
        for (index, part) in cut(6, 2).into_iter().enumerate() {
            run(index, 3, part).unwrap();
        }
        whole.forward(&Var::new(rows(0..6, 0, DType::F64, Device::CPU))).unwrap();
        assert!(distance(&running(&kept)[1], &running(&whole)[1]) < 1e-13);
        run(0, 3, 0..2).unwrap();
        let error = run(2, 3, 4..6).unwrap_err().to_string();
        assert!(error.contains("got micro-batch 2 of 3, wanted 1"), "{error}");
        let error = run(1, 1, 0..2).unwrap_err().to_string();
        assert!(error.contains("got micro-batch 1 of 1, wanted one below 1"), "{error}");
    }

    #[test]
    fn a_meta_device_needs_the_same_memory() {
        let peak = |device: Device| {
            let deferred = DeferredBatchNorm::of(&norm(DType::F32, device, None));
            let parts =
                cut(7, 3).into_iter().map(|part| Var::leaf(rows(part, 0, DType::F32, device)).unwrap());
            let parts: Vec<Var> = parts.collect();
            let ledger = device.ledger().unwrap();
            ledger.reset_peak();
            chunked(&deferred, &parts).iter().for_each(|y| y.sum_all().unwrap().backward().unwrap());
            phalanx_tensor::Category::ALL.map(|category| ledger.category(category))
        };
        assert_eq!(peak(Device::Cpu(71)), peak(Device::Meta(71)));
    }
}
