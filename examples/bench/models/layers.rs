//! The layers of the models, as PyTorch's papers and examples have them.

use phalanx::autograd::Var;
use phalanx::nn::models::Activation;
use phalanx::nn::{
    AdaptiveAvgPool2d, BatchNormConfig, Conv2d, Conv2dConfig, ConvTranspose2d, EmbeddingConfig, Flatten,
    Init, LayerNormConfig, LinearConfig, Lstm, MaxPool2d, Module, Parameter, PoolOptions, RecurrentConfig,
    Relu, Relu6, Result, Scope, Sequential, SequentialConfig, TransformerEncoderLayerConfig, parameters,
};

fn conv(inputs: usize, outputs: usize, kernel: usize, stride: usize) -> Conv2dConfig {
    let config = Conv2dConfig::new(inputs, outputs, [kernel; 2]).with_stride([stride; 2]);
    config.with_padding([kernel / 2; 2]).with_bias(false)
}

fn conv_norm(inputs: usize, outputs: usize, kernel: usize, stride: usize) -> SequentialConfig {
    let conv = conv(inputs, outputs, kernel, stride);
    SequentialConfig::new().with(conv).with(BatchNormConfig::new(outputs))
}

/// `f(x)` plus `x`, or plus a projection of it.
struct Residual {
    f: Sequential,
    shortcut: Option<Sequential>,
}

parameters!(Residual { f, shortcut });

impl Module for Residual {
    fn forward(&self, x: &Var) -> Result<Var> {
        let carried = self.shortcut.as_ref().map(|layers| layers.forward(x)).transpose()?;
        Ok(self.f.forward(x)?.add(carried.as_ref().unwrap_or(x))?)
    }
}

/// The basic block. Source: He et al.: Deep residual learning (2015).
fn basic(inputs: usize, outputs: usize, stride: usize) -> impl FnOnce(&Scope) -> Result<Residual> + Send {
    move |scope| {
        let f = conv_norm(inputs, outputs, 3, stride).with(Relu).with(conv(outputs, outputs, 3, 1));
        let f = f.with(BatchNormConfig::new(outputs)).init(&scope.child("f"))?;
        let projects = stride != 1 || inputs != outputs;
        let shortcut = projects.then(|| conv_norm(inputs, outputs, 1, stride).init(&scope.child("shortcut")));
        Ok(Residual { f, shortcut: shortcut.transpose()? })
    }
}

/// ResNet-18 for 200 classes, 11.3 million parameters.
pub fn resnet18() -> SequentialConfig {
    let pool = MaxPool2d(PoolOptions { stride: [2; 2], padding: [1; 2], ..PoolOptions::new([3; 2]) });
    let mut layers = conv_norm(3, 64, 7, 2).with(Relu).with(pool);
    let mut inputs = 64;
    for (outputs, stride) in [(64, 1), (128, 2), (256, 2), (512, 2)] {
        layers = layers.with_fn(basic(inputs, outputs, stride)).with(Relu);
        layers = layers.with_fn(basic(outputs, outputs, 1)).with(Relu);
        inputs = outputs;
    }
    layers.with(AdaptiveAvgPool2d([1; 2])).with(Flatten::default()).with(LinearConfig::new(512, 200))
}

/// An inverted residual. Source: Sandler et al.: MobileNetV2 (2018).
fn inverted(inputs: usize, outputs: usize, stride: usize, wider: usize) -> SequentialConfig {
    let inner = inputs * wider;
    let widened = match wider {
        1 => SequentialConfig::new(),
        _ => conv_norm(inputs, inner, 1, 1).with(Relu6),
    };
    let mut depthwise = conv(inner, inner, 3, stride);
    depthwise = depthwise.with_options(phalanx::kernels::ConvOptions {
        stride: [stride; 2],
        padding: [1; 2],
        groups: inner,
        ..Default::default()
    });
    let layers = widened.with(depthwise).with(BatchNormConfig::new(inner)).with(Relu6);
    layers.with(conv(inner, outputs, 1, 1)).with(BatchNormConfig::new(outputs))
}

/// MobileNetV2 for small images: its first convolution keeps their size. 2.5 million parameters.
pub fn mobilenet() -> SequentialConfig {
    let mut layers = conv_norm(3, 32, 3, 1).with(Relu6);
    let mut inputs = 32;
    let stages = [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ];
    for (wider, outputs, count, stride) in stages {
        for n in 0..count {
            let (from, stride) = if n == 0 { (inputs, stride) } else { (outputs, 1) };
            let block = inverted(from, outputs, stride, wider);
            layers = match n {
                0 => layers.with(block),
                _ => {
                    layers.with_fn(|scope| Ok(Residual { f: block.init(&scope.child("f"))?, shortcut: None }))
                }
            };
        }
        inputs = outputs;
    }
    let head = SequentialConfig::new().with(AdaptiveAvgPool2d([1; 2])).with(Flatten::default());
    layers.with(conv_norm(320, 1280, 1, 1)).with(Relu6).with(head).with(LinearConfig::new(1280, 200))
}

/// A level of the U-Net: `after([x', below(x')])` with `x' = before(x)`.
struct Level {
    before: Sequential,
    below: Sequential,
    after: Sequential,
}

parameters!(Level { before, below, after });

impl Module for Level {
    fn forward(&self, x: &Var) -> Result<Var> {
        let x = self.before.forward(x)?;
        let below = self.below.forward(&x)?;
        self.after.forward(&Var::cat(&[x, below], 1)?)
    }
}

fn twice(inputs: usize, outputs: usize) -> SequentialConfig {
    conv_norm(inputs, outputs, 3, 1)
        .with(Relu)
        .with(conv(outputs, outputs, 3, 1))
        .with(BatchNormConfig::new(outputs))
        .with(Relu)
}

fn level(inputs: usize, width: usize, depth: usize, scope: &Scope) -> Result<Box<dyn Module>> {
    if depth == 0 {
        return Ok(Box::new(twice(inputs, width).init(scope)?));
    }
    let up = Conv2dConfig::new(2 * width, width, [2; 2]).with_stride([2; 2]);
    let below = SequentialConfig::new()
        .with(MaxPool2d::new([2; 2]))
        .with_fn(move |scope| level(width, 2 * width, depth - 1, scope))
        .with_fn(move |scope| -> Result<ConvTranspose2d> { up.init_transposed(scope) });
    Ok(Box::new(Level {
        before: twice(inputs, width).init(&scope.child("before"))?,
        below: below.init(&scope.child("below"))?,
        after: twice(2 * width, width).init(&scope.child("after"))?,
    }))
}

/// A U-Net of four halvings that gives each pixel one of 21 classes, 7.8 million parameters.
/// Source: Ronneberger et al.: U-Net (2015).
pub fn unet() -> SequentialConfig {
    let head = |scope: &Scope| -> Result<Conv2d> { Conv2dConfig::new(32, 21, [1; 2]).init(scope) };
    SequentialConfig::new().with_fn(|scope| level(3, 32, 4, scope)).with_fn(head)
}

/// The outputs of an LSTM, `[B, T, hidden]` to `[B T, hidden]`.
struct Recurrent {
    lstm: Lstm,
}

parameters!(Recurrent { lstm });

impl Module for Recurrent {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(self.lstm.forward(x, None, None)?.output.flatten(0, 1)?)
    }
}

/// A language model: a table, two recurrent layers, a head; 13.9 million parameters.
/// Source: Zaremba et al.: Recurrent neural network regularization (2014), without dropout.
pub fn lstm() -> SequentialConfig {
    let lstm = RecurrentConfig::new(256, 512).with_layers(2);
    SequentialConfig::new()
        .with(EmbeddingConfig::new(10_000, 256))
        .with_fn(move |scope| Ok(Recurrent { lstm: lstm.init_lstm(&scope.child("lstm"))? }))
        .with(LinearConfig::new(512, 10_000))
}

/// Images to sequences of patches, with learnt positions.
struct Patches {
    projection: Conv2d,
    positions: Parameter,
}

parameters!(Patches { positions, projection });

impl Module for Patches {
    fn forward(&self, x: &Var) -> Result<Var> {
        let patches = self.projection.forward(x)?.flatten(2, 3)?.transpose(1, 2)?;
        Ok(patches.add(&self.positions.var())?)
    }
}

/// The mean over a sequence.
struct MeanOverTime;

parameters!(MeanOverTime {});

impl Module for MeanOverTime {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(x.mean(&[1], false)?)
    }
}

/// A vision transformer, ViT-Ti with six layers, over patches of 8 x 8, 2.7 million parameters.
/// Source: Dosovitskiy et al.: An image is worth 16x16 words (2020).
pub fn vit() -> SequentialConfig {
    const WIDTH: usize = 192;
    let patches = |scope: &Scope| {
        let projection = Conv2dConfig::new(3, WIDTH, [8; 2]).with_stride([8; 2]);
        Ok(Patches {
            projection: projection.init(&scope.child("projection"))?,
            positions: scope.parameter("positions", &[64, WIDTH], Init::ZEROS)?,
        })
    };
    let layer = TransformerEncoderLayerConfig {
        inner: 4 * WIDTH,
        dropout: 0.0,
        activation: Activation::Gelu,
        norm_first: true,
        ..TransformerEncoderLayerConfig::new(WIDTH, 3)
    };
    let layers = (0..6).fold(SequentialConfig::new().with_fn(patches), |layers, _| layers.with(layer));
    layers.with(LayerNormConfig::new(&[WIDTH])).with(MeanOverTime).with(LinearConfig::new(WIDTH, 200))
}
