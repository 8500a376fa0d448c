//! ViT: an image as a row of patches in a transformer, classified by a token in front of them.
//!
//! ```text
//! x = [cls; conv(image)] + positions
//! x += attention(norm1(x));   x += linear2(act(linear1(norm2(x))))
//! logits = classifier(norm(x of token 0))
//! ```
//! Source: Dosovitskiy et al.: An image is worth 16x16 words (2020).

use std::sync::Arc;

use phalanx_autograd::{CrossEntropy, Reduction, Var};
use phalanx_tensor::{DType, Dims};
use serde_json::{Map, Value, json};

use super::check::{check_layers, check_numbers, check_sizes};
use super::encoder::{BlockConfig, Blocks, Encoder, EncoderConfig};
use super::fields::{Fields, activation_name, dtype_name, numbered_labels, set_labels};
use super::pretrained::{Pretrained, renamed};
use super::{Activation, DecoderStage, RecomputeMode};
use crate::mode::modes;
use crate::{
    Batch, Conv2d, Conv2dConfig, Dropout, Error, Init, LayerFactory, LayerNorm, LayerNormConfig, Linear,
    LinearConfig, Mode, Module, OneDevice, Parameter, Parameters, Result, Scope, WrappedUnit, parameters,
};

/// A ViT's sizes and settings.
#[derive(Clone, Debug, PartialEq)]
pub struct VitConfig {
    /// Height and width of images, in pixels.
    pub image: [usize; 2],
    /// Height and width of patches, in pixels.
    pub patch: [usize; 2],
    /// Channels of images.
    pub channels: usize,
    /// Blocks.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Features of the stream.
    pub width: usize,
    /// Features inside a block's perceptron.
    pub inner: usize,
    /// The perceptron's nonlinearity.
    pub activation: Activation,
    /// Added to variances in norms.
    pub eps: f64,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Dropout of the embedding and of the branches' outputs.
    pub dropout: f64,
    /// Dropout of attention's probabilities.
    pub attention_dropout: f64,
    /// The names of the classes.
    pub labels: Vec<String>,
    /// Standard deviation of initial weights.
    pub init_std: f64,
}

const CLASS: &str = "ViTForImageClassification";

/// What files call the parts of a block.
const LAYER: [(&str, &[&str]); 6] = [
    (
        "self_attn.in_proj_",
        &["attention.attention.query.", "attention.attention.key.", "attention.attention.value."],
    ),
    ("self_attn.out_proj.", &["attention.output.dense."]),
    ("linear1.", &["intermediate.dense."]),
    ("linear2.", &["output.dense."]),
    ("norm1.", &["layernorm_before."]),
    ("norm2.", &["layernorm_after."]),
];

impl VitConfig {
    /// ViT's settings for a model of that size, for images of three channels, without dropout.
    pub fn new(
        image: [usize; 2],
        patch: [usize; 2],
        layers: usize,
        heads: usize,
        width: usize,
        labels: usize,
    ) -> VitConfig {
        VitConfig {
            image,
            patch,
            channels: 3,
            layers,
            heads,
            width,
            inner: width.saturating_mul(4),
            activation: Activation::Gelu,
            eps: 1e-12,
            qkv_bias: true,
            dropout: 0.0,
            attention_dropout: 0.0,
            labels: numbered_labels(labels),
            init_std: 0.02,
        }
    }

    /// The number of patches of an image.
    fn patches(&self) -> usize {
        (self.image[0] / self.patch[0]).saturating_mul(self.image[1] / self.patch[1])
    }

    fn check(&self) -> Result<(), String> {
        check_sizes(&[
            ("patch height", self.patch[0]),
            ("patch width", self.patch[1]),
            ("channels", self.channels),
            ("heads", self.heads),
            ("width", self.width),
            ("inner", self.inner),
            ("labels", self.labels.len()),
        ])?;
        if self.patches() == 0 {
            let VitConfig { image, patch, .. } = self;
            return Err(format!("images of {image:?} pixels have no patch of {patch:?}, wanted at least 1"));
        }
        check_layers(self.layers)?;
        check_numbers(self.eps, self.init_std, &[self.dropout, self.attention_dropout])
    }
}

impl Pretrained for VitConfig {
    type Model = Vit;

    fn from_json(fields: &Map<String, Value>) -> Result<VitConfig, String> {
        let f = Fields::new(fields);
        f.must_say("model_type", "vit")?;
        f.architecture(&[CLASS])?;
        let size = |name: &str, usual| Ok::<_, String>(f.size(name)?.unwrap_or(usual));
        let config = VitConfig {
            image: f.height_and_width("image_size")?.unwrap_or([224; 2]),
            patch: f.height_and_width("patch_size")?.unwrap_or([16; 2]),
            channels: size("num_channels", 3)?,
            layers: size("num_hidden_layers", 12)?,
            heads: size("num_attention_heads", 12)?,
            width: size("hidden_size", 768)?,
            inner: size("intermediate_size", 3072)?,
            activation: f.activation("hidden_act", "gelu")?,
            eps: f.number("layer_norm_eps", 1e-12)?,
            qkv_bias: f.flag("qkv_bias", true)?,
            dropout: f.number("hidden_dropout_prob", 0.0)?,
            attention_dropout: f.number("attention_probs_dropout_prob", 0.0)?,
            labels: f.labels()?,
            init_std: f.number("initializer_range", 0.02)?,
        };
        // These are of other tasks.
        f.all_read(&["encoder_stride", "pooler_act", "pooler_output_size"])?;
        config.check()?;
        Ok(config)
    }

    fn to_json(&self, dtype: DType) -> Value {
        let square = |[height, width]: [usize; 2]| match height == width {
            true => json!(height),
            false => json!([height, width]),
        };
        let mut json = json!({
            "architectures": [CLASS], "model_type": "vit", "dtype": dtype_name(dtype),
            "image_size": square(self.image), "patch_size": square(self.patch), "num_channels": self.channels,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "hidden_size": self.width,
            "intermediate_size": self.inner, "hidden_act": activation_name(self.activation),
            "layer_norm_eps": self.eps, "qkv_bias": self.qkv_bias, "hidden_dropout_prob": self.dropout,
            "attention_probs_dropout_prob": self.attention_dropout, "initializer_range": self.init_std,
        });
        set_labels(&mut json, &self.labels);
        json
    }

    fn init(&self, scope: &Scope) -> Result<Vit> {
        self.init_stage_beside(&Arc::new(OneDevice), scope, DecoderStage::whole(self.layers), None)
    }

    fn mode(model: &Vit) -> &Mode {
        &model.mode
    }

    fn matrix_elements(&self) -> f64 {
        let f = |n: usize| n as f64;
        let block = 4.0 * f(self.width) + 2.0 * f(self.inner);
        let patch = f(self.channels) * f(self.patch[0]) * f(self.patch[1]);
        (patch + f(self.patches()) + f(self.layers) * block) * f(self.width)
    }

    fn file_names(&self, name: &str) -> Vec<String> {
        match name.starts_with("classifier.") {
            true => vec![name.to_string()],
            false => renamed(&format!("vit.{name}"), &LAYER),
        }
    }

    fn is_unused(&self, stored: &str) -> bool {
        stored.starts_with("vit.pooler.")
    }
}

impl EncoderConfig for VitConfig {
    type Of<L: LayerFactory> = Vit<L>;

    fn blocks(&self) -> usize {
        self.layers
    }

    fn init_stage_beside<L: LayerFactory>(
        &self,
        layers: &Arc<L>,
        scope: &Scope,
        stage: DecoderStage,
        _first: Option<&Vit<L>>,
    ) -> Result<Vit<L>> {
        self.check().map_err(|why| Error::invalid("ViT", why))?;
        let init = Init::TruncatedNormal { mean: 0.0, std: self.init_std };
        let block = BlockConfig {
            width: self.width,
            heads: self.heads,
            inner: self.inner,
            dropout: self.dropout,
            attention_dropout: self.attention_dropout,
            activation: self.activation,
            eps: self.eps,
            norm_first: true,
            qkv_bias: self.qkv_bias,
            init,
        };
        let head = || -> Result<NormAndClassifier> {
            let classifier = LinearConfig::new(self.width, self.labels.len()).with_init(init);
            let norm = LayerNormConfig::new(&[self.width]).with_eps(self.eps);
            Ok(NormAndClassifier {
                norm: norm.init(&scope.child("layernorm"))?,
                classifier: classifier.init(&scope.child("classifier"))?,
            })
        };
        let embeddings = stage.first.then(|| Embeddings::new(self, scope, init)).transpose()?;
        let head = stage.last.then(head).transpose()?;
        let places = scope.child("encoder").child("layer");
        let model = Vit {
            embeddings: embeddings.map(WrappedUnit::of),
            blocks: Blocks::new(&block, layers, &places, stage, self.layers)?,
            head: head.map(WrappedUnit::of),
            positions: self.patches() + 1,
            mode: Mode::default(),
        };
        layers.built(&model.parameters())?;
        Ok(model)
    }
}

/// A ViT, or a stage of one. [`VitConfig`] makes it and reads its folders.
pub struct Vit<L: LayerFactory = OneDevice> {
    embeddings: Option<WrappedUnit<Embeddings>>,
    blocks: Blocks<L>,
    head: Option<WrappedUnit<NormAndClassifier>>,
    /// Patches of an image, and the token in front of them.
    positions: usize,
    mode: Mode,
}

modes!([L: LayerFactory] Vit<L>);
parameters!([L: LayerFactory] Vit<L> { embeddings, blocks = "encoder.layer", head = "" });

impl<L: LayerFactory> Vit<L> {
    /// The stream `[B, positions, width]` after this stage's last block: of images `[B, channels, height, width]` on the first stage, and
    /// of the stream of the stage before on others.
    ///
    /// # Errors
    /// If the input is not that of this stage.
    pub fn hidden(&self, input: &Var) -> Result<Var> {
        let _mode = self.mode.enter();
        let x = match &self.embeddings {
            Some(embeddings) => embeddings.call(input, false, Embeddings::run)?,
            None => self.blocks.received(Some(input))?,
        };
        self.blocks.run(x, None)
    }

    /// The logits of classes `[B, labels]` of the stream after the last block.
    ///
    /// # Errors
    /// If this stage has no head, or the stream does not fit.
    pub fn logits(&self, x: &Var) -> Result<Var> {
        let _mode = self.mode.enter();
        let head = self.head.as_ref().ok_or_else(|| Error::invalid("ViT", "this stage has no head"))?;
        head.call(x, false, NormAndClassifier::run)
    }

    /// The cross entropies of the labels `[B]` (i64; -100 is ignored), added and multiplied by `scale`.
    ///
    /// # Errors
    /// If this stage has no head, or stream or labels do not fit.
    pub fn loss(&self, x: &Var, labels: &Var, scale: f64) -> Result<Var> {
        let config = CrossEntropy { reduction: Reduction::Sum, scale, wide: true, ..CrossEntropy::default() };
        Ok(self.logits(x)?.cross_entropy(labels, &config)?)
    }
}

/// Batches have images and labels.
impl<L: LayerFactory> Encoder for Vit<L> {
    fn stage(&self) -> &DecoderStage {
        self.blocks.stage()
    }

    fn set_recompute(&mut self, mode: RecomputeMode) {
        self.blocks.set_recompute(mode);
    }

    fn stream(&self, batch: &Batch) -> Option<(Dims, DType)> {
        Some(self.blocks.stream(batch.rows(), self.positions))
    }

    fn run(&self, input: Option<&Var>, batch: &Batch, scale: f64) -> Result<Var> {
        let [images, labels] = batch.vars()?;
        let x = match (input, self.stage().first) {
            (None, true) => self.hidden(&images)?,
            (Some(stream), false) => self.hidden(stream)?,
            (stream, _) => self.blocks.received(stream)?,
        };
        if self.stage().last { self.loss(&x, &labels, scale) } else { Ok(x) }
    }
}

/// Images `[B, channels, height, width]` to the logits of classes `[B, labels]`.
impl<L: LayerFactory> Module for Vit<L> {
    fn forward(&self, images: &Var) -> Result<Var> {
        if self.embeddings.is_none() {
            return Err(Error::invalid("ViT", "this stage has no embedding"));
        }
        self.logits(&self.hidden(images)?)
    }
}

/// Patches as a row of positions. They are of all features on every rank.
struct Embeddings {
    cls_token: Parameter,
    position_embeddings: Parameter,
    projection: Conv2d,
    dropout: Dropout,
    /// Channels, height and width.
    image: [usize; 3],
}

parameters!(Embeddings { cls_token, position_embeddings, projection = "patch_embeddings.projection" });

impl Embeddings {
    fn new(config: &VitConfig, scope: &Scope, init: Init) -> Result<Embeddings> {
        let scope = scope.child("embeddings");
        let projection = Conv2dConfig::new(config.channels, config.width, config.patch);
        let projection = projection.with_stride(config.patch).with_init(init);
        let positions = [1, config.patches().saturating_add(1), config.width];
        Ok(Embeddings {
            cls_token: scope.parameter("cls_token", &[1, 1, config.width], init)?,
            position_embeddings: scope.parameter("position_embeddings", &positions, init)?,
            projection: projection.init(&scope.child("patch_embeddings").child("projection"))?,
            dropout: Dropout::new(config.dropout, &scope.child("dropout"))?,
            image: [config.channels, config.image[0], config.image[1]],
        })
    }

    fn run(&self, images: &Var) -> Result<Var> {
        let Some((&batch, [..])) = images.shape().split_first().filter(|(_, image)| **image == self.image)
        else {
            let why = format!("got images of shape {:?}, wanted [B, ..{:?}]", images.shape(), self.image);
            return Err(Error::invalid("ViT", why));
        };
        let patches = self.projection.forward(images)?.flatten(2, -1)?.transpose(1, 2)?;
        let cls = self.cls_token.var().broadcast_to(&[batch, 1, patches.shape()[2]])?;
        let x = Var::cat(&[&cls, &patches], 1)?.add(&self.position_embeddings.var())?;
        self.dropout.forward(&x)
    }
}

struct NormAndClassifier {
    norm: LayerNorm,
    classifier: Linear,
}

parameters!(NormAndClassifier { norm = "layernorm", classifier });

impl NormAndClassifier {
    fn run(&self, x: &Var) -> Result<Var> {
        self.classifier.forward(&self.norm.forward(x)?.select(1, 0)?)
    }
}
