//! torchgpipe's simplified U-Net (its `benchmarks/models/unet`): the flat list of its layers, and the layers themselves.
//!
//! ```text
//! [encoder]------------------[decoder]--[segment]        each encoder and decoder and the bottleneck:
//!    [encoder]------------[decoder]                       convolution, dropout, norm, leaky relu, several times
//!        [encoder]----[decoder]                           encoders end with a skip and a halving,
//!             [bottleneck]                                decoders begin with a doubling and that skip
//! ```

use phalanx::autograd::ContextMode;
use phalanx::nn::{
    self, Conv2dConfig, Entry, GroupNormConfig, LeakyRelu, MaxPool2d, Module, Parameters, Scope,
};
use phalanx::parallel::pipeline::gpipe::{Batch, Layer, Partition, Sequence, Skip, Skippable, Skips};
use phalanx::{Context, DType, Var, kernels, parallel};

use crate::Result;

/// Colours of the images.
pub const INPUTS: usize = 3;
/// Numbers for each pixel of the output.
pub const OUTPUTS: usize = 1;

/// A U-Net's sizes.
#[derive(Clone, Copy, Debug)]
pub struct UNet {
    /// Halvings of the image, at least 1.
    pub depth: usize,
    /// Convolutions in a row: torchgpipe's B, at least 2.
    pub convs: usize,
    /// Channels of the first encoder: torchgpipe's C.
    pub channels: usize,
}

/// One layer of the U-Net, before it is built on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// A convolution without bias that keeps the image's size.
    Conv { inputs: usize, outputs: usize, kernel: usize },
    /// A tenth of the channels left out.
    Dropout,
    /// Each channel of each image to mean 0 and variance 1.
    Norm { channels: usize },
    /// The leaky relu.
    Relu,
    /// Keeps the image for the decoder of this level.
    Stash { level: usize },
    /// Half as high and wide.
    Down,
    /// Twice as high and wide.
    Up,
    /// Puts the channels of the encoder of this level behind those that come.
    PopCat { level: usize },
}

impl UNet {
    /// All layers, in order.
    pub fn layers(&self) -> Vec<LayerKind> {
        let UNet { depth, channels, .. } = *self;
        let wide = |level: usize| channels << level;
        let mut layers = Vec::new();
        for level in 0..depth {
            let inputs = if level == 0 { INPUTS } else { wide(level - 1) };
            self.cell(&mut layers, [inputs, wide(level), wide(level)]);
            layers.extend([LayerKind::Stash { level }, LayerKind::Down]);
        }
        self.cell(&mut layers, [wide(depth - 1), wide(depth), wide(depth - 1)]);
        for level in (0..depth).rev() {
            layers.extend([LayerKind::Up, LayerKind::PopCat { level }]);
            self.cell(&mut layers, [wide(level + 1), wide(level) / 2, wide(level) / 2]);
        }
        layers.push(LayerKind::Conv { inputs: channels / 2, outputs: OUTPUTS, kernel: 1 });
        layers
    }

    /// Convolutions from the first number of channels over the second to the last.
    fn cell(&self, layers: &mut Vec<LayerKind>, [first, middle, last]: [usize; 3]) {
        for conv in 0..self.convs {
            let inputs = if conv == 0 { first } else { middle };
            let outputs = if conv + 1 == self.convs { last } else { middle };
            let conv = LayerKind::Conv { inputs, outputs, kernel: 3 };
            layers.extend([conv, LayerKind::Dropout, LayerKind::Norm { channels: outputs }, LayerKind::Relu]);
        }
    }

    /// The layers, each on the device that the partition gives it.
    pub fn build(&self, partition: &Partition) -> Result<Sequence> {
        let layer = |(i, kind): (usize, LayerKind)| {
            let device = partition.device(i).ok_or("the partition is of fewer layers than the model")?;
            kind.build(&Scope::new(1, DType::F32, device).child(i))
        };
        let layers: Result<Vec<Box<dyn Layer>>> = self.layers().into_iter().enumerate().map(layer).collect();
        Ok(layers?.into())
    }
}

impl LayerKind {
    fn build(self, scope: &Scope) -> Result<Box<dyn Layer>> {
        Ok(match self {
            LayerKind::Conv { inputs, outputs, kernel } => {
                let padding = [kernel / 2; 2];
                let options = kernels::ConvOptions { padding, ..Default::default() };
                let conv = Conv2dConfig::new(inputs, outputs, [kernel; 2]).with_options(options);
                Box::new(conv.with_bias(false).init(scope)?)
            }
            LayerKind::Dropout => Box::new(Dropout2d { p: 0.1, site: scope.site() }),
            LayerKind::Norm { channels } => {
                Box::new(GroupNormConfig::new(channels, channels).with_affine(false).init(scope)?)
            }
            LayerKind::Relu => Box::new(LeakyRelu { slope: 0.01 }),
            LayerKind::Stash { level } => Box::new(Stash { level }),
            LayerKind::Down => Box::new(MaxPool2d(kernels::PoolOptions::new([2, 2]))),
            LayerKind::Up => Box::new(Upsample),
            LayerKind::PopCat { level } => Box::new(PopCat { level }),
        })
    }
}

/// In training, each channel of each image is left out with probability `p`, and the others grow by `1 / (1 - p)`.
pub struct Dropout2d {
    pub p: f64,
    pub site: u64,
}

/// Each pixel twice in both directions.
pub struct Upsample;

/// Lets the image pass and stashes it.
pub struct Stash {
    pub level: usize,
}

/// Puts the stashed channels behind those that come, which get a margin of zeros if their image is smaller.
pub struct PopCat {
    pub level: usize,
}

macro_rules! without_parameters {
    ($($layer:ty),*) => {$(
        impl Parameters for $layer {
            fn visit(&self, _: &str, _: &mut dyn FnMut(&str, Entry<'_>)) {}
        }
    )*};
}

without_parameters!(Dropout2d, Upsample, Stash, PopCat);

impl Module for Dropout2d {
    fn forward(&self, x: &Var) -> nn::Result<Var> {
        if !Context::current().train() {
            return Ok(x.clone());
        }
        let ones = kernels::full(&[x.shape()[0], x.shape()[1], 1, 1], 1.0, x.dtype(), x.device());
        Ok(x.mul(&Var::new(ones.map_err(nn::Error::from)?).dropout(self.p, self.site, None)?)?)
    }
}

impl Module for Upsample {
    fn forward(&self, x: &Var) -> nn::Result<Var> {
        let [n, c, h, w] = x.shape() else {
            let why = format!("got an input of shape {:?}, wanted [n, channels, h, w]", x.shape());
            return Err(nn::Error::invalid("Upsample", why));
        };
        let twice = x.reshape_to(&[*n, *c, *h, 1, *w, 1])?.broadcast_to(&[*n, *c, *h, 2, *w, 2])?;
        Ok(twice.reshape_to(&[*n, *c, 2 * h, 2 * w])?)
    }
}

fn skip(level: usize) -> Skip {
    Skip::new(format!("level {level}"))
}

impl Layer for Stash {
    fn run(&self, input: Batch, skips: &mut Skips) -> parallel::Result<Batch> {
        let image = input.one()?;
        skips.stash(&skip(self.level), image.clone())?;
        Ok(image.into())
    }

    fn skippable(&self) -> Skippable {
        Skippable::new().stash(skip(self.level))
    }
}

impl Layer for PopCat {
    fn run(&self, input: Batch, skips: &mut Skips) -> parallel::Result<Batch> {
        let image = input.one()?;
        let Some(skipped) = skips.pop(&skip(self.level))? else { return Ok(image.into()) };
        let margin = |dim: usize| (0, skipped.shape()[dim] as isize - image.shape()[dim] as isize);
        let image = match [margin(3), margin(2)] {
            [(0, 0), (0, 0)] => image,
            margins => image.pad(&margins, 0)?,
        };
        Ok(Var::cat(&[image, skipped], 1)?.into())
    }

    fn skippable(&self) -> Skippable {
        Skippable::new().pop(skip(self.level))
    }
}
