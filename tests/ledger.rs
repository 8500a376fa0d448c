//! The ledger of a `meta` device equals that of a CPU, to the byte in each category, for whole training steps: each
//! dtype, recompute mode and optimizer, on a transformer and on a convolution net.

use phalanx::autograd::ContextMode;
use std::sync::Arc;

use phalanx::autograd::no_grad;
use phalanx::kernels::{ConvOptions, Gelu as Kind, PoolOptions};
use phalanx::nn::models::{DecoderStage, GptConfig, LlamaConfig, RecomputeMode};
use phalanx::nn::{
    Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, AdaptiveAvgPool2d, AvgPool2d, BatchNormConfig, Clip,
    Conv2dConfig, CrossEntropyLoss, Dropout, EmbeddingSpec, Gelu, Group, Head, Init, Lamb, LayerFactory,
    Lion, Loss, MaxPool2d, OneDevice, Relu, Rmsprop, Rule, Sgd,
};
use phalanx::nn::{Linear, LinearConfig, LossScaler, Module, Parameter, Parameters, Result, Scope};
use phalanx::nn::{Sequential, Silu, WrappedUnit, clip_grad_norm_, grad_norm};
use phalanx::tensor::{Category, RngKey};
use phalanx::{Context, DType, Device, Tensor, Var};

/// Bytes now and at peak: each category, then all.
type Books = Vec<(String, usize, usize)>;

fn books(device: Device) -> Books {
    let ledger = device.ledger().expect("a ledger");
    let mut books: Books = Category::ALL
        .iter()
        .map(|&c| (format!("{c:?}"), ledger.category(c).now, ledger.category(c).peak))
        .collect();
    books.push(("total".into(), ledger.total().now, ledger.total().peak));
    books
}

/// The ledgers after each phase of a training on a CPU and on a meta device that no other test uses.
fn assert_equal_books(what: &str, number: u16, f: impl Fn(Device) -> Result<Vec<Books>>) {
    let run = |device: Device| {
        let ledger = device.ledger().expect("a ledger");
        assert_eq!(ledger.total().now, 0, "{what}: {device} is in use");
        ledger.reset_peak();
        f(device).unwrap_or_else(|e| panic!("{what} on {device}: {e}"))
    };
    let (cpu, meta) = (run(Device::Cpu(number)), run(Device::Meta(number)));
    assert!(cpu[0].iter().filter(|(_, _, peak)| *peak > 0).count() >= 5, "{what}: {cpu:?}");
    for (phase, (cpu, meta)) in cpu.iter().zip(&meta).enumerate() {
        assert_eq!(cpu, meta, "{what}, phase {phase}");
    }
}

fn optimizers() -> Vec<(&'static str, Box<dyn Rule>)> {
    vec![
        ("sgd", Box::new(Sgd { momentum: 0.9, ..Sgd::default() })),
        ("adam", Box::new(Adam::default())),
        ("adamw", Box::new(AdamW::default())),
        ("rmsprop", Box::new(Rmsprop { centered: true, ..Rmsprop::default() })),
        ("adagrad", Box::new(Adagrad::default())),
        ("lion", Box::new(Lion::default())),
        ("adadelta", Box::new(Adadelta::default())),
        ("adamax", Box::new(Adamax::default())),
        ("lamb", Box::new(Lamb::default())),
        ("adafactor", Box::new(Adafactor::default())),
    ]
}

const MODES: [RecomputeMode; 3] = [RecomputeMode::Never, RecomputeMode::ExceptLast, RecomputeMode::Always];

/// Three steps with a scaled loss, clipped gradients and, in bf16, gradients kept in f32, then the loss without a
/// graph. The ledger is read after each phase, and its peak is reset.
fn train(
    rule: Box<dyn Rule>,
    parameters: Vec<Parameter>,
    device: Device,
    loss: impl Fn(u64) -> Result<Var>,
) -> Result<Vec<Books>> {
    let mut all = Vec::new();
    let mut note = || -> Result<()> {
        all.push(books(device));
        device.ledger()?.reset_peak();
        Ok(())
    };
    for parameter in parameters.iter().filter(|p| p.dtype() == DType::BF16) {
        parameter.set_grad_dtype(DType::F32)?;
    }
    let mut optimizer = rule.init(Group::decay_matrices(parameters, 1e-3, 0.1))?;
    let mut scaler = LossScaler::new(8.0, 2)?;
    for step in 0..3 {
        let _context = Context::with(|c| {
            c.set_train(true);
            c.rng = RngKey { seed: 1, step };
        });
        optimizer.zero_grad()?;
        loss(step)?.mul_scalar(scaler.scale())?.backward()?;
        note()?;
        let norm = grad_norm(&optimizer.parameters())? / scaler.scale();
        note()?;
        let grads = optimizer.parameters().into_iter().filter_map(|p| p.grad().transpose());
        let mut grads = grads.collect::<Result<Vec<Tensor>>>()?;
        for p in [1.0, 2.0, f64::INFINITY] {
            clip_grad_norm_(&mut grads, 1e3, p)?;
            note()?;
        }
        drop(grads);
        assert!(scaler.update(norm.is_finite()), "a step of finite numbers");
        optimizer.step_scaled(Clip::new(norm, 1.0).scale / scaler.scale())?;
        note()?;
    }
    let _without = no_grad();
    loss(3)?;
    note()?;
    Ok(all)
}

fn ids(device: Device, shape: &[usize], end: i64, step: u64) -> Result<Var> {
    let count: usize = shape.iter().product();
    let ids: Vec<i64> = (0..count as i64).map(|i| (i * 7 + step as i64) % end).collect();
    Ok(Var::new(Tensor::from_slice(&ids, shape, device)?))
}

fn train_gpt(rule: Box<dyn Rule>, dtype: DType, mode: RecomputeMode, device: Device) -> Result<Vec<Books>> {
    let config = GptConfig::new(301, 16, 3, 2, 24).with_dropout(0.1);
    let mut model = config.init(&Scope::new(1, dtype, device))?;
    model.set_recompute(mode);
    train(rule, model.parameters(), device, |step| {
        let hidden = model.forward(&ids(device, &[4, 16], 301, step)?)?;
        model.loss(&hidden, &ids(device, &[4, 16], 301, step + 1)?, 1.0 / 64.0)
    })
}

/// Blocks of convolutions, each with another norm, nonlinearity and pooling, and a linear layer to ten classes.
struct ConvNet {
    blocks: Vec<WrappedUnit<Sequential>>,
    head: Linear,
}

impl ConvNet {
    fn new(scope: &Scope) -> Result<ConvNet> {
        let at = |i: usize| scope.child(i);
        let wide = ConvOptions { padding: [1; 2], ..ConvOptions::default() };
        let grouped = ConvOptions { stride: [2, 1], groups: 4, ..wide };
        let doubled = ConvOptions { stride: [2; 2], ..wide };
        let overlapping = PoolOptions { stride: [1; 2], padding: [1; 2], ..PoolOptions::new([2; 2]) };
        let blocks = [
            Sequential::new()
                .with(Conv2dConfig::new(3, 8, [3; 2]).with_options(wide).init(&at(0).child("conv"))?)
                .with(BatchNormConfig::new(8).init_2d(&at(0).child("norm"))?)
                .with(Relu)
                .with(MaxPool2d(PoolOptions::new([2; 2])))
                .with(Dropout::new(0.1, &at(0))?),
            Sequential::new()
                .with(
                    Conv2dConfig::new(8, 12, [3, 2])
                        .with_options(grouped)
                        .with_bias(false)
                        .init(&at(1).child("conv"))?,
                )
                .with(BatchNormConfig::new(12).with_momentum(None).init_2d(&at(1).child("norm"))?)
                .with(Gelu { kind: Kind::Tanh })
                .with(AvgPool2d { options: overlapping, count_include_pad: false }),
            Sequential::new()
                .with(
                    Conv2dConfig::new(12, 6, [3; 2])
                        .with_options(doubled)
                        .with_output_padding([1, 0])
                        .init_transposed(&at(2).child("conv"))?,
                )
                .with(BatchNormConfig::new(6).with_affine(false).init_2d(&at(2).child("norm"))?)
                .with(Silu)
                .with(AdaptiveAvgPool2d([2, 3])),
        ];
        let blocks = blocks.into_iter().map(|block| WrappedUnit::new(Arc::new(block))).collect();
        Ok(ConvNet { blocks, head: LinearConfig::new(36, 10).init(&scope.child("head"))? })
    }

    fn parameters(&self) -> Vec<Parameter> {
        let blocks = self.blocks.iter().flat_map(|block| block.module().parameters());
        blocks.chain(self.head.parameters()).collect()
    }

    fn loss(&self, images: &Var, classes: &Var, mode: RecomputeMode) -> Result<Var> {
        let mut x = images.clone();
        for (i, block) in self.blocks.iter().enumerate() {
            let recompute = match mode {
                RecomputeMode::Never | RecomputeMode::Attention => false,
                RecomputeMode::ExceptLast => i + 1 < self.blocks.len(),
                RecomputeMode::Always => true,
            };
            x = block.call(&x, recompute, |block, x| block.forward(x))?;
        }
        let smooth = CrossEntropyLoss { label_smoothing: 0.1, ..CrossEntropyLoss::default() };
        smooth.forward(&self.head.forward(&x.flatten(1, -1)?)?, classes)
    }
}

fn train_conv(rule: Box<dyn Rule>, dtype: DType, mode: RecomputeMode, device: Device) -> Result<Vec<Books>> {
    let net = ConvNet::new(&Scope::new(1, dtype, device))?;
    train(rule, net.parameters(), device, |step| {
        let images = ids(device, &[4, 3, 9, 10], 23, step)?.to(dtype)?.mul_scalar(0.1)?;
        net.loss(&images, &ids(device, &[4], 10, step)?, mode)
    })
}

/// The memory of a head's loss and its gradients.
fn head_peak(dtype: DType, logits_max: usize, device: Device) -> Result<usize> {
    let scope = Scope::new(1, dtype, device);
    let table = EmbeddingSpec { count: 301, width: 8, init: Init::ZEROS, tied: false, padding: None };
    let head = OneDevice.head(&scope, table, None)?;
    let x = Var::leaf(Tensor::zeros(&[4, 128, 8], dtype, device)?)?;
    let targets = ids(device, &[4, 128], 301, 1)?;
    let (ledger, before) = (device.ledger()?, device.ledger()?.total().now);
    ledger.reset_peak();
    let loss = head.loss(&x, &targets, 1.0, logits_max)?;
    assert_eq!(loss.dtype(), DType::F32);
    loss.backward()?;
    Ok(ledger.total().peak - before)
}

#[test]
fn the_loss_of_halves_holds_their_logits_and_nothing_of_their_size() {
    let logits = 4 * 128 * 301;
    for device in [Device::Cpu(102), Device::Meta(102)] {
        for dtype in [DType::BF16, DType::F16] {
            let peak = |dtype| head_peak(dtype, usize::MAX, device).unwrap();
            let (half, whole) = (peak(dtype), peak(DType::F32));
            // The gradient is written over them.
            assert!((2 * logits..3 * logits).contains(&half), "{half} bytes for {logits} logits");
            assert!(2 * half < whole + logits, "{half} and {whole} bytes");
        }
    }
}

#[test]
fn a_loss_in_chunks_takes_the_same_memory_on_a_device_that_stores_nothing() {
    let logits = 4 * 128 * 301;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let peaks = [Device::Cpu(103), Device::Meta(103)].map(|d| head_peak(dtype, 1 << 13, d).unwrap());
        assert_eq!(peaks[0], peaks[1], "{dtype}");
        assert!(peaks[0] < dtype.size() * logits / 2, "{dtype}: {} bytes", peaks[0]);
    }
}

/// The head of a Llama 3 8B, in the second micro-batch, when its weight has a gradient: the peak falls by the logits.
#[test]
fn the_peak_of_a_llama_3_8b_s_loss_falls_by_its_logits() {
    let (device, tokens, vocabulary) = (Device::Meta(104), 4096, 128_256);
    let peak = |logits_max: usize| -> Result<usize> {
        let config = LlamaConfig::new(vocabulary, tokens, 32, 32, 4096);
        let last = DecoderStage { layers: 32..32, first: false, last: true };
        let scope = Scope::new(1, DType::BF16, device);
        let mut stage = config.init_stage(&Arc::new(OneDevice), &scope, last)?;
        stage.set_logits_max(logits_max);
        let x = Var::leaf(Tensor::zeros(&[1, tokens, 4096], DType::BF16, device)?)?;
        for _ in 0..2 {
            device.ledger()?.reset_peak();
            stage.loss(&x, &ids(device, &[1, tokens], vocabulary as i64, 1)?, 1.0)?.backward()?;
        }
        Ok(device.ledger()?.total().peak)
    };
    let (whole, chunked) = (peak(usize::MAX).unwrap(), peak(1 << 24).unwrap());
    let (logits, chunk) = (2 * tokens * vocabulary, 2 << 24);
    // A chunk is there in bf16 and widened, with the rows of its weight, and the gradient of x is added in f32.
    let taken = 3 * chunk + 4 * 4096 * (tokens + (1 << 24) / tokens);
    assert!(whole - chunked > logits - taken, "{whole} and {chunked} bytes, {logits} of logits");
}

type Training = fn(Box<dyn Rule>, DType, RecomputeMode, Device) -> Result<Vec<Books>>;

fn in_every_way(number: u16, training: Training) {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        for mode in MODES {
            for (i, (name, _)) in optimizers().iter().enumerate() {
                let rule = || optimizers().into_iter().nth(i).expect("as many").1;
                let what = format!("{name} {dtype} {mode:?}");
                assert_equal_books(&what, number, |device| training(rule(), dtype, mode, device));
            }
        }
    }
}

#[test]
fn training_a_gpt_takes_the_same_bytes_with_each_dtype_recompute_mode_and_optimizer() {
    in_every_way(100, train_gpt);
}

#[test]
fn training_a_convolution_net_takes_the_same_bytes_with_each_dtype_recompute_mode_and_optimizer() {
    in_every_way(101, train_conv);
}
