//! Low-rank adapters (LoRA, DoRA): a [`LayerFactory`] that puts one beside each linear layer of some names, and trains nothing else but
//! whole modules of some names.
//!
//! ```text
//! y = W x + scale B A x,   A: [rank, in], at first random;   B: [out, rank], at first 0;   scale = alpha / rank
//! ```
//! Beside a column layer B is cut as its weight is, and A is whole; beside a row layer and an embedding A is cut, and B is whole. So an adapter
//! works under every layout under which the model does. Layers whose weights a family's files join have one A, and each its rows of B. With DoRA
//! ([`magnitude`]) a layer has a magnitude too, which is cut as its rows are.
//! Sources: Hu et al.: LoRA (2021); Kalajdzievski: A rank stabilization scaling factor for fine-tuning with LoRA (2023).

mod adapted;
mod check;
mod config;
#[cfg(test)]
mod embedding_tests;
mod files;
#[cfg(test)]
mod joined_tests;
mod magnitude;
mod modules;
#[cfg(test)]
mod peft_tests;
#[cfg(test)]
mod tests;
mod ties;
#[cfg(test)]
mod ties_tests;
#[cfg(test)]
mod trained_tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use phalanx_autograd::Var;
use phalanx_tensor::{Tensor, unpoisoned};

use self::magnitude::MAGNITUDE;
use super::Decoder;
use crate::layer_factory::{EmbeddingSpec, LinearMap, LinearSpec};
use crate::modules::{Dropout, Linear};
use crate::{
    Error, ExpertExchange, FileNames, HeadsNormSpec, Init, LayerFactory, Module, OneDevice, Parameter,
    Parameters, Result, Scope,
};

pub use adapted::{Adapted, AdaptedEmbedding, BiasedHead};
pub use config::{BaseWeights, LoraConfig, TrainedBiases};
pub use files::{load_adapter, merged, save_adapter};
pub use modules::Modules;

use adapted::{Adapter, EmbeddingAdapter, GateAdapter};
use check::no_layer;
use modules::{Expert, Layer, in_model, is_within};

/// The path of a head with a table of its own.
const HEAD: &str = "lm_head";
/// The ends of the names of an embedding's adapter.
const EMBEDDING_A: &str = ".lora_embedding_A.weight";
const EMBEDDING_B: &str = ".lora_embedding_B.weight";

impl LoraConfig {
    /// The layers of one device with these adapters.
    ///
    /// # Errors
    /// As [`Lora::new`].
    pub fn layers(&self) -> Result<Arc<Lora>> {
        Ok(Arc::new(Lora::new(OneDevice, self.clone())?))
    }
}

fn wrong(why: String) -> Error {
    Error::invalid("LoRA", why)
}

/// Makes the layers of a model with adapters beside some, all of whose other parameters are frozen.
pub struct Lora<L: LayerFactory = OneDevice> {
    layers: Arc<L>,
    config: LoraConfig,
    /// Whether a linear layer was made since parameters were last handed out.
    has_linear: AtomicBool,
    model: Mutex<Model>,
}

/// The model that layers are made for.
struct Model {
    names: FileNames,
    /// Whether all of its blocks are made.
    whole: bool,
    /// While it is made, by the paths of layers in transformers' model: the first layer here of those that are joined there, and its A.
    firsts: BTreeMap<String, (String, Parameter)>,
}

impl Default for Model {
    /// One whose files have its own names.
    fn default() -> Model {
        Model { names: Arc::new(str::to_string), whole: true, firsts: BTreeMap::new() }
    }
}

impl<L: LayerFactory> Lora<L> {
    /// Adapters beside layers that `layers` makes.
    ///
    /// # Errors
    /// If a rank is 0, settings exclude each other, or an expression is not supported.
    pub fn new(layers: L, config: LoraConfig) -> Result<Lora<L>> {
        config.check_settings().map_err(wrong)?;
        let has_linear = AtomicBool::new(false);
        Ok(Lora { layers: Arc::new(layers), config, has_linear, model: Mutex::default() })
    }

    /// How the adapters are made.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// The layer of this path.
    fn layer(&self, path: &str) -> Layer {
        let name = in_model(&(unpoisoned(self.model.lock()).names)(&format!("{path}.weight")));
        let mut layer = Layer::new(path, name.strip_suffix(".weight").unwrap_or(&name));
        // An expert's gate and up map have one adapter then.
        if let Some(expert) = Expert::of(&layer.peft).filter(|_| layer.has_weight(&self.config.weights)) {
            layer.peft = format!("{}.{}", layer.parameter, expert.number);
        }
        layer
    }

    /// Whether the parameter of this name is of one of these modules.
    fn is_of(&self, name: &str, modules: &[String]) -> bool {
        let stored = (unpoisoned(self.model.lock()).names)(name);
        is_within(name, modules) || is_within(&in_model(&stored), modules)
    }

    /// Whether the parameter of this name is of a module that is trained as it is.
    fn is_trained(&self, name: &str) -> bool {
        !is_adapter(name) && self.is_of(name, &self.config.trained)
    }

    /// The settings of a layer's adapter, if it is to have one.
    fn settings(&self, scope: &Scope) -> Result<Option<LoraConfig>> {
        let layer = self.layer(scope.path());
        let is_trained = self.config.trains(&layer);
        let is_target = !is_trained && self.config.is_target(&layer).map_err(wrong)?;
        is_target.then(|| self.config.of_target(&layer)).transpose()
    }

    /// A layer of a block, with an adapter of these two maps beside it if it is to have one. `is_whole` says that every rank has all of its rows.
    fn adapted<C: LinearMap, A: LinearMap, B: LinearMap>(
        &self,
        scope: &Scope,
        settings: Option<&LoraConfig>,
        base: C,
        is_whole: bool,
        down: impl FnOnce(&Scope) -> Result<A>,
        up: impl FnOnce(&Scope) -> Result<B>,
    ) -> Result<Adapted<L, C, A, B>> {
        self.has_linear.store(true, Relaxed);
        if self.config.base == BaseWeights::Int8 && !self.is_trained(base.weight().name()) {
            base.weight().hold_in_int8()?;
        }
        let adapted = self.beside(scope, settings, base, down, up)?;
        if let Some(Adapter { magnitude: Some(magnitude), .. }) = &adapted.adapter
            && is_whole
        {
            // Every rank uses all rows for its part of the heads.
            self.layers.partial(std::slice::from_ref(magnitude))?;
        }
        Ok(adapted)
    }

    /// A layer, with an adapter of these two maps beside it if it is to have one.
    fn beside<C: LinearMap, A: LinearMap, B: LinearMap>(
        &self,
        scope: &Scope,
        settings: Option<&LoraConfig>,
        base: C,
        down: impl FnOnce(&Scope) -> Result<A>,
        up: impl FnOnce(&Scope) -> Result<B>,
    ) -> Result<Adapted<L, C, A, B>> {
        let layers = self.layers.clone();
        let Some(settings) = settings else { return Ok(Adapted { layers, base, adapter: None }) };
        // A single head cannot be cut, so this is an error where layers are.
        if self.config.dropout > 0.0 && self.layers.heads(1).is_err() {
            let why = format!("got dropout {} with layers that are cut, wanted 0", self.config.dropout);
            return Err(Error::invalid("LoRA", why));
        }
        let adapter = Adapter {
            lora_a: down(&scope.child("lora_A"))?,
            lora_b: up(&scope.child("lora_B"))?,
            magnitude: self.config.dora.then(|| magnitude::magnitude(scope, base.weight())).transpose()?,
            dropout: Dropout::new(self.config.dropout, &scope.child("lora_dropout"))?,
            scale: settings.scale(),
        };
        Ok(Adapted { layers, base, adapter: Some(adapter) })
    }

    /// The A of a column layer: that of the first layer among those whose weights files join.
    fn joint_a(&self, scope: &Scope, spec: LinearSpec<'_>) -> Result<Linear> {
        let path = scope.path().strip_suffix(".lora_A").unwrap_or(scope.path());
        let peft = self.layer(path).peft;
        if let Some((first, weight)) = unpoisoned(self.model.lock()).firsts.get(&peft)
            && first != path
        {
            return Ok(Linear { weight: weight.clone(), bias: None });
        }
        let a = OneDevice.column(scope, spec)?;
        unpoisoned(self.model.lock()).firsts.insert(peft, (path.to_string(), a.weight.clone()));
        Ok(a)
    }

    /// The A of each layer among these parameters, by the layers' paths in transformers' model.
    fn all_a(&self, parameters: &[Parameter]) -> BTreeMap<String, Parameter> {
        let a = |p: &Parameter| Some((self.layer(p.name().strip_suffix(".lora_A.weight")?).peft, p.clone()));
        parameters.iter().filter_map(a).collect()
    }

    /// Gives magnitudes the lengths of the rows that they are beside. All ranks call it.
    fn reset_magnitudes(&self, parameters: &[Parameter]) -> Result<()> {
        let all_a = self.all_a(parameters);
        magnitude::reset(&*self.layers, parameters, |path| {
            let layer = self.layer(path);
            let a = all_a.get(&layer.peft).cloned();
            a.map(|a| Ok((a, self.config.of_target(&layer)?.scale()))).transpose()
        })
    }
}

impl<L: LayerFactory> LayerFactory for Lora<L> {
    type Column = Adapted<L, L::Column, Linear, L::Column>;
    type Row = Adapted<L, L::Row, L::Row, Linear>;
    type Embedding = AdaptedEmbedding<L::Embedding>;
    type Head = Adapted<L, L::Head, Linear, BiasedHead<L::Head>>;

    fn column(&self, scope: &Scope, spec: LinearSpec<'_>) -> Result<Self::Column> {
        let (settings, init) = (self.settings(scope)?, Init::layer(spec.inputs));
        let rank = [settings.as_ref().map_or(self.config.rank, |settings| settings.rank)];
        let down = LinearSpec { outputs: &rank, bias: false, init, whole: true, ..spec };
        let up = LinearSpec { inputs: rank[0], bias: self.config.biased, init: Init::ZEROS, ..spec };
        self.adapted(
            scope,
            settings.as_ref(),
            self.layers.column(scope, spec)?,
            spec.whole,
            |scope| self.joint_a(scope, down),
            |scope| self.layers.column(scope, up),
        )
    }

    fn row(&self, scope: &Scope, spec: LinearSpec<'_>) -> Result<Self::Row> {
        let (settings, init) = (self.settings(scope)?, Init::layer(spec.inputs));
        let rank = [settings.as_ref().map_or(self.config.rank, |settings| settings.rank)];
        let down = LinearSpec { outputs: &rank, bias: false, init, ..spec };
        let up = LinearSpec { inputs: rank[0], bias: self.config.biased, init: Init::ZEROS, ..spec };
        self.adapted(
            scope,
            settings.as_ref(),
            self.layers.row(scope, spec)?,
            false,
            |scope| self.layers.row(scope, down),
            |scope| OneDevice.row(scope, up),
        )
    }

    fn columns(&self, layers: &[&Self::Column], x: &Var) -> Result<Vec<Var>> {
        let bases: Vec<&L::Column> = layers.iter().map(|layer| &layer.base).collect();
        let outputs = self.layers.columns(&bases, x)?;
        layers.iter().zip(outputs).map(|(layer, y)| layer.with_adapter(x, y)).collect()
    }

    fn embedding(&self, scope: &Scope, spec: EmbeddingSpec) -> Result<Self::Embedding> {
        let table = self.layers.embedding(scope, spec)?;
        let Some(settings) = self.settings(scope)? else {
            return Ok(AdaptedEmbedding { table, adapter: None });
        };
        let LoraConfig { dora, biased, weights, .. } = &self.config;
        let has_weight = self.layer(scope.path()).has_weight(weights);
        let unfit = [(*dora, "use_dora"), (*biased, "lora_bias"), (has_weight, "target_parameters")];
        if let Some((_, what)) = unfit.into_iter().find(|(unfit, _)| *unfit) {
            let why = format!("{} is an embedding, for whose adapter {what} is not supported", scope.path());
            return Err(wrong(why));
        }
        let (width, init) = ([spec.width], Init::Normal { mean: 0.0, std: 1.0 });
        let rows = EmbeddingSpec { width: settings.rank, init: Init::ZEROS, tied: false, ..spec };
        let up = LinearSpec { inputs: settings.rank, outputs: &width, bias: false, init, whole: true };
        let adapter = EmbeddingAdapter {
            lora_a: self.layers.embedding(&scope.child("lora_embedding_A"), rows)?,
            lora_b: OneDevice.column(&scope.child("lora_embedding_B"), up)?,
            scale: settings.scale(),
        };
        Ok(AdaptedEmbedding { table, adapter: Some(adapter) })
    }

    fn beside_gate(&self, scope: &Scope, spec: LinearSpec<'_>) -> Result<Option<Box<dyn Module>>> {
        let layer = self.layer(scope.path());
        if !layer.has_weight(&self.config.weights) || self.config.trains(&layer) {
            return Ok(None);
        }
        let settings = self.config.of_target(&layer)?;
        let rank = [settings.rank];
        let down = LinearSpec { outputs: &rank, init: Init::layer(spec.inputs), ..spec };
        let up = LinearSpec { inputs: settings.rank, init: Init::ZEROS, ..spec };
        Ok(Some(Box::new(GateAdapter {
            lora_a: OneDevice.column(&scope.child("lora_A"), down)?,
            lora_b: OneDevice.column(&scope.child("lora_B"), up)?,
            scale: settings.scale(),
        })))
    }

    fn head(&self, scope: &Scope, spec: EmbeddingSpec, tied: Option<&Self::Embedding>) -> Result<Self::Head> {
        let base = self.layers.head(scope, spec, tied.map(|embedding| &embedding.table))?;
        // A tied head is called as the embedding here.
        if spec.tied {
            return Ok(Adapted { layers: self.layers.clone(), base, adapter: None });
        }
        let settings = self.settings(scope)?;
        let rank = settings.as_ref().map_or(self.config.rank, |settings| settings.rank);
        let init = Init::layer(spec.width);
        let down = LinearSpec { inputs: spec.width, outputs: &[rank], bias: false, init, whole: true };
        let up = EmbeddingSpec { width: rank, init: Init::ZEROS, ..spec };
        self.beside(
            scope,
            settings.as_ref(),
            base,
            |scope| OneDevice.column(scope, down),
            |scope| {
                let bias =
                    self.config.biased.then(|| self.layers.head_bias(scope, spec.count)).transpose()?;
                Ok(BiasedHead { head: self.layers.head(scope, up, None)?, bias })
            },
        )
    }

    fn heads(&self, heads: usize) -> Result<Range<usize>> {
        self.layers.heads(heads)
    }

    fn key_heads(&self, queries: usize, keys: usize) -> Result<Range<usize>> {
        self.layers.key_heads(queries, keys)
    }

    fn features(&self, features: usize) -> Result<Range<usize>> {
        self.layers.features(features)
    }

    fn stream(&self, positions: usize) -> Result<Range<usize>> {
        self.layers.stream(positions)
    }

    fn heads_norm(&self, scope: &Scope, spec: HeadsNormSpec) -> Result<Box<dyn Module>> {
        self.layers.heads_norm(scope, spec)
    }

    fn head_bias(&self, scope: &Scope, vocabulary: usize) -> Result<Parameter> {
        self.layers.head_bias(scope, vocabulary)
    }

    fn set_whole_stream(&self, whole: bool) {
        self.layers.set_whole_stream(whole);
    }

    fn on_whole_stream(&self, x: &Var, work: &mut dyn FnMut(&Var) -> Result<Var>) -> Result<Var> {
        self.layers.on_whole_stream(x, work)
    }

    fn experts(&self) -> Option<&dyn ExpertExchange> {
        self.layers.experts()
    }

    fn sum_over_ranks(&self, x: Tensor) -> Result<Tensor> {
        self.layers.sum_over_ranks(x)
    }

    fn partial(&self, parameters: &[Parameter]) -> Result<()> {
        self.layers.partial(parameters)
    }

    fn begins(&self, names: FileNames, whole: bool) {
        self.layers.begins(names.clone(), whole);
        *unpoisoned(self.model.lock()) = Model { names, whole, firsts: BTreeMap::new() };
    }

    fn unties(&self, embedding: &str) -> Result<bool> {
        self.config.unties(&self.layer(embedding), &self.layer(HEAD)).map_err(wrong)
    }

    fn built(&self, parameters: &[Parameter]) -> Result<()> {
        self.layers.built(parameters)?;
        unpoisoned(self.model.lock()).firsts.clear();
        // A pipeline's stage may have no blocks, or none of those that have adapters.
        let wanted = self.has_linear.swap(false, Relaxed) && unpoisoned(self.model.lock()).whole;
        if wanted && !parameters.iter().any(|parameter| is_adapter(parameter.name())) {
            return Err(no_layer(&self.config.chosen(), parameters));
        }
        let adapted = adapted_layers(parameters);
        let is_trained_bias = |name: &str| {
            let Some(layer) = name.strip_suffix(".bias") else { return false };
            match self.config.biases {
                TrainedBiases::None => false,
                TrainedBiases::All => true,
                TrainedBiases::OfAdapted => adapted.contains(layer),
            }
        };
        let is_frozen = |p: &&Parameter| {
            !is_adapter(p.name()) && !self.is_trained(p.name()) && !is_trained_bias(p.name())
        };
        parameters.iter().filter(is_frozen).for_each(Parameter::freeze);
        self.reset_magnitudes(parameters)
    }

    fn loaded(&self, parameters: &[Parameter]) -> Result<()> {
        self.layers.loaded(parameters)?;
        self.reset_magnitudes(parameters)
    }
}

/// The paths of the layers that have an adapter among these parameters.
fn adapted_layers(parameters: &[Parameter]) -> BTreeSet<String> {
    parameters.iter().filter_map(|p| p.name().strip_suffix(".lora_B.weight").map(String::from)).collect()
}

pub(super) fn is_adapter(name: &str) -> bool {
    let of_embedding = name.ends_with(EMBEDDING_A) || name.ends_with(EMBEDDING_B);
    name.contains(".lora_A.") || name.contains(".lora_B.") || name.ends_with(MAGNITUDE) || of_embedding
}

/// The parameters of adapters and of modules that are trained as they are, for an optimizer or a checkpoint.
pub fn adapters(model: &impl Parameters) -> Vec<Parameter> {
    model.parameters().into_iter().filter(|p| is_adapter(p.name()) || p.is_trained()).collect()
}

/// Gives the magnitudes of a model's adapters (DoRA) the lengths of the rows that they are beside, with what the adapters add now. A new
/// model has them, and [`load_weights`](super::load_weights) sets them; weights may come into a model by other means. All ranks that share
/// layers call it.
///
/// # Errors
/// If the values of a weight are not on this rank, or a rank does not take part.
pub fn reset_magnitudes<L: LayerFactory>(model: &Decoder<Lora<L>>) -> Result<()> {
    model.layers().reset_magnitudes(&model.parameters())
}

impl<L: LayerFactory> std::fmt::Debug for Lora<L> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lora").field("config", &self.config).finish_non_exhaustive()
    }
}
