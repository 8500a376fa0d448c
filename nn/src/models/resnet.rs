//! ResNet: stages of convolutions whose results are added to their inputs.
//!
//! ```text
//! x = max_pool(relu(norm(conv7x7(image))))
//! x = act(shortcut(x) + layers(x))           basic: 3x3, 3x3; bottleneck: 1x1 to a quarter of the channels, 3x3, 1x1
//! logits = classifier(mean of x over pixels)
//! ```
//! Source: He et al.: Deep residual learning for image recognition (2015).

use phalanx_autograd::Var;
use phalanx_kernels::PoolOptions;
use phalanx_tensor::DType;
use serde_json::{Map, Value, json};

use super::Activation;
use super::check::{LAYERS_MAX, check_sizes};
use super::fields::{Fields, activation_name, dtype_name, numbered_labels, set_labels};
use super::pretrained::Pretrained;
use crate::mode::modes;
use crate::{
    BatchNorm, BatchNormConfig, Conv2d, Conv2dConfig, Error, Init, Linear, LinearConfig, Mode, Module,
    Result, Scope, parameters,
};

/// A ResNet's sizes and settings.
#[derive(Clone, Debug, PartialEq)]
pub struct ResNetConfig {
    /// Channels of images.
    pub channels: usize,
    /// Channels after the first convolution.
    pub stem: usize,
    /// The stages: channels, and how many blocks there are.
    pub stages: Vec<ResNetStage>,
    /// Whether a block is a bottleneck of three convolutions, rather than two.
    pub bottleneck: bool,
    /// The nonlinearity after the stem and after each block. Inside blocks it is relu.
    pub activation: Activation,
    /// Whether the first stage halves height and width too, as the later ones do.
    pub halves_first: bool,
    /// Whether a bottleneck halves them in its first convolution, rather than in its second.
    pub halves_early: bool,
    /// The names of the classes.
    pub labels: Vec<String>,
}

/// A stage of a ResNet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResNetStage {
    /// Channels of its output.
    pub channels: usize,
    /// Its blocks.
    pub blocks: usize,
}

const CLASS: &str = "ResNetForImageClassification";

impl ResNetConfig {
    /// ResNet's settings for stages of so many channels and blocks each, for images of three channels.
    pub fn new(bottleneck: bool, stem: usize, stages: &[(usize, usize)], labels: usize) -> ResNetConfig {
        let stage = |&(channels, blocks): &(usize, usize)| ResNetStage { channels, blocks };
        ResNetConfig {
            channels: 3,
            stem,
            stages: stages.iter().map(stage).collect(),
            bottleneck,
            activation: Activation::Relu,
            halves_first: false,
            halves_early: false,
            labels: numbered_labels(labels),
        }
    }

    fn check(&self) -> Result<(), String> {
        check_sizes(&[
            ("channels", self.channels),
            ("embedding_size", self.stem),
            ("stages", self.stages.len()),
            ("labels", self.labels.len()),
        ])?;
        for stage in &self.stages {
            check_sizes(&[("hidden_sizes", self.inner(stage.channels)), ("depths", stage.blocks)])?;
        }
        match self.stages.iter().try_fold(0usize, |sum, stage| sum.checked_add(stage.blocks)) {
            Some(0..=LAYERS_MAX) => Ok(()),
            _ => Err(format!("depths has more than {LAYERS_MAX} blocks")),
        }
    }

    /// Channels inside a block.
    fn inner(&self, channels: usize) -> usize {
        if self.bottleneck { channels / 4 } else { channels }
    }

    /// The convolutions of a block, each `[inputs, outputs, kernel, stride]`.
    fn convolutions(&self, inputs: usize, outputs: usize, stride: usize) -> Vec<[usize; 4]> {
        let inner = self.inner(outputs);
        let [first, second] = if self.halves_early { [stride, 1] } else { [1, stride] };
        match self.bottleneck {
            true => vec![[inputs, inner, 1, first], [inner, inner, 3, second], [inner, outputs, 1, 1]],
            false => vec![[inputs, outputs, 3, stride], [outputs, outputs, 3, 1]],
        }
    }

    /// Each block by its stage and its place there: inputs, outputs and stride.
    fn blocks(&self) -> impl Iterator<Item = (usize, usize, [usize; 3])> {
        let inputs = std::iter::once(self.stem).chain(self.stages.iter().map(|stage| stage.channels));
        inputs.zip(&self.stages).enumerate().flat_map(|(s, (inputs, stage))| {
            let stride = if s > 0 || self.halves_first { 2 } else { 1 };
            (0..stage.blocks).map(move |i| match i {
                0 => (s, i, [inputs, stage.channels, stride]),
                _ => (s, i, [stage.channels, stage.channels, 1]),
            })
        })
    }

    fn block(&self, scope: &Scope, [inputs, outputs, stride]: [usize; 3]) -> Result<Block> {
        let layers = self.convolutions(inputs, outputs, stride);
        let layer = |(i, spec)| NormedConv::new(spec, &scope.child("layer").child(i));
        let shortcut = || NormedConv::new([inputs, outputs, 1, stride], &scope.child("shortcut"));
        Ok(Block {
            shortcut: (inputs != outputs || stride != 1).then(shortcut).transpose()?,
            layers: layers.into_iter().enumerate().map(layer).collect::<Result<_>>()?,
            activation: self.activation,
        })
    }
}

impl Pretrained for ResNetConfig {
    type Model = ResNet;

    fn from_json(fields: &Map<String, Value>) -> Result<ResNetConfig, String> {
        let f = Fields::new(fields);
        f.must_say("model_type", "resnet")?;
        f.architecture(&[CLASS])?;
        let channels = f.sizes("hidden_sizes")?.unwrap_or(vec![256, 512, 1024, 2048]);
        let blocks = f.sizes("depths")?.unwrap_or(vec![3, 4, 6, 3]);
        if channels.len() != blocks.len() {
            return Err(format!(
                "hidden_sizes has {} entries and depths {}, wanted as many",
                channels.len(),
                blocks.len()
            ));
        }
        let stage = |(channels, blocks)| ResNetStage { channels, blocks };
        let config = ResNetConfig {
            channels: f.size("num_channels")?.unwrap_or(3),
            stem: f.size("embedding_size")?.unwrap_or(64),
            stages: channels.into_iter().zip(blocks).map(stage).collect(),
            bottleneck: match f.text("layer_type")? {
                None | Some("bottleneck") => true,
                Some("basic") => false,
                Some(other) => {
                    return Err(format!("layer_type {other:?} is not supported, wanted basic or bottleneck"));
                }
            },
            activation: f.activation("hidden_act", "relu")?,
            halves_first: f.flag("downsample_in_first_stage", false)?,
            halves_early: f.flag("downsample_in_bottleneck", false)?,
            labels: f.labels()?,
        };
        // The names of stages serve those that take the stages' outputs.
        f.all_read(&["out_features", "out_indices", "stage_names"])?;
        config.check()?;
        Ok(config)
    }

    fn to_json(&self, dtype: DType) -> Value {
        let each = |size: fn(&ResNetStage) -> usize| self.stages.iter().map(size).collect::<Vec<_>>();
        let mut json = json!({
            "architectures": [CLASS], "model_type": "resnet", "dtype": dtype_name(dtype),
            "num_channels": self.channels, "embedding_size": self.stem,
            "hidden_sizes": each(|stage| stage.channels), "depths": each(|stage| stage.blocks),
            "layer_type": if self.bottleneck { "bottleneck" } else { "basic" },
            "hidden_act": activation_name(self.activation), "downsample_in_first_stage": self.halves_first,
            "downsample_in_bottleneck": self.halves_early,
        });
        set_labels(&mut json, &self.labels);
        json
    }

    fn init(&self, scope: &Scope) -> Result<ResNet> {
        self.check().map_err(|why| Error::invalid("ResNet", why))?;
        let mut stages: Vec<Stage> = Vec::new();
        let places = scope.child("encoder").child("stages");
        for (s, i, sizes) in self.blocks() {
            let block = self.block(&places.child(s).child("layers").child(i), sizes)?;
            match stages.get_mut(s) {
                Some(stage) => stage.layers.push(block),
                None => stages.push(Stage { layers: vec![block] }),
            }
        }
        let last = self.stages.last().map_or(self.stem, |stage| stage.channels);
        let embedder = scope.child("embedder").child("embedder");
        Ok(ResNet {
            embedder: NormedConv::new([self.channels, self.stem, 7, 2], &embedder)?,
            stages,
            classifier: LinearConfig::new(last, self.labels.len())
                .init(&scope.child("classifier").child(1))?,
            activation: self.activation,
            mode: Mode::default(),
        })
    }

    fn mode(model: &ResNet) -> &Mode {
        &model.mode
    }

    fn matrix_elements(&self) -> f64 {
        let convolutions = self.blocks().flat_map(|(.., [i, o, stride])| self.convolutions(i, o, stride));
        let elements = |[i, o, kernel, _]: [usize; 4]| i as f64 * o as f64 * (kernel * kernel) as f64;
        elements([self.channels, self.stem, 7, 2]) + convolutions.map(elements).sum::<f64>()
    }

    fn file_names(&self, name: &str) -> Vec<String> {
        vec![if name.starts_with("classifier.") { name.to_string() } else { format!("resnet.{name}") }]
    }
}

/// A ResNet. [`ResNetConfig`] makes it and reads its folders.
pub struct ResNet {
    embedder: NormedConv,
    stages: Vec<Stage>,
    classifier: Linear,
    activation: Activation,
    mode: Mode,
}

modes!(ResNet);
parameters!(ResNet {
    embedder = "embedder.embedder",
    stages = "encoder.stages",
    classifier = "classifier.1",
});

/// Images `[B, channels, height, width]` to the logits of classes `[B, labels]`.
impl Module for ResNet {
    fn forward(&self, images: &Var) -> Result<Var> {
        let _mode = self.mode.enter();
        let pool = PoolOptions { stride: [2; 2], padding: [1; 2], ..PoolOptions::new([3; 2]) };
        let mut x = self.activation.apply(&self.embedder.forward(images)?)?.max_pool2d(&pool)?;
        for block in self.stages.iter().flat_map(|stage| &stage.layers) {
            x = block.forward(&x)?;
        }
        self.classifier.forward(&x.adaptive_avg_pool2d([1; 2])?.flatten(1, -1)?)
    }
}

struct Stage {
    layers: Vec<Block>,
}

parameters!(Stage { layers });

/// `act(shortcut(x) + layers(x))`
struct Block {
    /// A 1x1 convolution where the sizes change.
    shortcut: Option<NormedConv>,
    layers: Vec<NormedConv>,
    activation: Activation,
}

parameters!(Block { shortcut, layers = "layer" });

impl Module for Block {
    fn forward(&self, x: &Var) -> Result<Var> {
        let mut y = x.clone();
        for (i, layer) in self.layers.iter().enumerate() {
            y = layer.forward(&y)?;
            if i + 1 < self.layers.len() {
                y = y.relu()?;
            }
        }
        let shortcut =
            self.shortcut.as_ref().map_or_else(|| Ok(x.clone()), |shortcut| shortcut.forward(x))?;
        self.activation.apply(&y.add(&shortcut)?)
    }
}

/// A convolution without bias, and the norm of its result.
struct NormedConv {
    convolution: Conv2d,
    normalization: BatchNorm,
}

parameters!(NormedConv { convolution, normalization });

impl NormedConv {
    fn new([inputs, outputs, kernel, stride]: [usize; 4], scope: &Scope) -> Result<NormedConv> {
        let fan_out = outputs as f64 * (kernel * kernel) as f64;
        let init = Init::Normal { mean: 0.0, std: (2.0 / fan_out).sqrt() };
        let convolution = Conv2dConfig::new(inputs, outputs, [kernel; 2]).with_stride([stride; 2]);
        let convolution = convolution.with_padding([kernel / 2; 2]).with_bias(false).with_init(init);
        Ok(NormedConv {
            convolution: convolution.init(&scope.child("convolution"))?,
            normalization: BatchNormConfig::new(outputs).init_2d(&scope.child("normalization"))?,
        })
    }
}

impl Module for NormedConv {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.normalization.forward(&self.convolution.forward(x)?)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::*;

    /// Where the first convolution and the shortcut halve, every other pixel of the input is not seen.
    #[test]
    fn a_bottleneck_halves_where_the_config_says() {
        let _eval = crate::eval();
        let mut pixels: Vec<f32> = (0..8 * 8 * 8).map(|i| (i % 7) as f32 - 3.0).collect();
        let image = |pixels: &[f32]| Var::from_slice(pixels, &[1, 8, 8, 8], Device::CPU).unwrap();
        let plain = image(&pixels);
        (0..8).for_each(|channel| pixels[64 * channel + 8 + 1] += 5.0);
        let other = image(&pixels);
        for halves_early in [true, false] {
            let config = ResNetConfig { halves_early, ..ResNetConfig::new(true, 8, &[(16, 1)], 2) };
            let block = config.block(&Scope::new(1, DType::F32, Device::CPU), [8, 16, 2]).unwrap();
            let [one, two] = [&plain, &other].map(|x| block.forward(x).unwrap());
            assert_eq!(one.shape(), [1, 16, 4, 4]);
            assert_eq!(one.to_vec::<f32>().unwrap() == two.to_vec::<f32>().unwrap(), halves_early);
        }
    }
}
