//! Files of adapters as PEFT writes them, and weights with what adapters add to them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use phalanx_kernels as kernels;
use phalanx_tensor::io::{SafeTensors, save_safetensors};
use phalanx_tensor::{Device, Tensor};

use super::magnitude::{self, MAGNITUDE};
use super::modules::{Expert, ExpertPart, Layer, ends_with_any, in_model};
use super::{
    EMBEDDING_A, EMBEDDING_B, HEAD, Lora, LoraConfig, Modules, adapted_layers, adapters, is_adapter,
};
use crate::models::save::as_in_files;
use crate::models::stored::{Layout, Rows, Stored};
use crate::models::{Decoder, DecoderStage, ModelConfig};
use crate::{Error, LayerFactory, Mismatch, Parameter, Parameters, Result};

const WEIGHTS: &str = "adapter_model.safetensors";
/// What is before the names of the model's own modules there.
const PREFIX: &str = "base_model.model.";

impl LoraConfig {
    /// Rows of a weight with what an adapter adds to them: the weight `[rows, in]`, `A` `[rank, in]`, these rows of `B` `[rows, rank]`, and
    /// with DoRA of the magnitude `[rows]`.
    ///
    /// # Errors
    /// If the shapes do not fit, or there is a magnitude without DoRA, or none with it.
    pub fn merge(
        &self,
        weight: &Tensor,
        a: &Tensor,
        b: &Tensor,
        magnitude: Option<&Tensor>,
    ) -> Result<Tensor> {
        if magnitude.is_some() != self.dora {
            let got = if self.dora { "no magnitude with DoRA" } else { "a magnitude without DoRA" };
            return Err(Error::invalid("LoRA: merge", format!("got {got}")));
        }
        if let Some(magnitude) = magnitude {
            return magnitude::Adapted { weight, a, b, scale: self.scale() }.merged(magnitude);
        }
        self.add_scaled(weight, &kernels::matmul(b, a)?)
    }

    /// Rows of an embedding `[rows, width]` with what an adapter adds to them: the same rows of `A` `[rows, rank]`, and `B` `[width, rank]`.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn merge_embedding(&self, table: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.add_scaled(table, &kernels::matmul(a, &b.transpose(0, 1)?)?)
    }

    /// A layer's bias `[out]` with that of an adapter's `B` ([`LoraConfig::biased`]).
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn merge_bias(&self, bias: &Tensor, of_b: &Tensor) -> Result<Tensor> {
        self.add_scaled(bias, of_b)
    }

    fn add_scaled(&self, x: &Tensor, more: &Tensor) -> Result<Tensor> {
        let more = kernels::mul_scalar(more, self.scale().into())?;
        Ok(kernels::add(x, &kernels::cast(&more, x.dtype())?)?)
    }
}

/// PEFT's files of a model's adapters and trained modules. Layers whose weights the family's files join have one adapter there: their `A`, and
/// the rows of `B` that are those of their weights.
///
/// Experts whose joined weights have one (`target_parameters`) have it together: the rows of `A` are `[experts, rank]`, and the columns of `B`
/// `[rank, experts]`. PEFT puts what has an adapter for one weight into another for the next one, so `gate_up_proj` is inside `down_proj`.
struct PeftFiles<'a> {
    config: ModelConfig,
    lora: &'a LoraConfig,
    /// The paths of layers with an adapter.
    adapted: BTreeSet<String>,
    /// Of the model's own parameters, by their names there.
    rows: BTreeMap<String, usize>,
}

impl Layout for PeftFiles<'_> {
    fn stored(&self, name: &str) -> Stored {
        if let Some((stored, _)) = self.of_expert(name) {
            return stored;
        }
        let Stored { names, rows, transposed } = self.config.stored(name);
        let mut stored = format!("{PREFIX}{}", in_model(&names.concat()));
        // PEFT puts a layer with an adapter into another one.
        let of_embedding = stored
            .strip_suffix(".weight")
            .filter(|_| name.ends_with(EMBEDDING_A) || name.ends_with(EMBEDDING_B));
        if let Some(stored) = of_embedding {
            return Stored { transposed: name.ends_with(EMBEDDING_A), ..Stored::whole(stored) };
        }
        let is_inside = name.strip_suffix(".bias").is_some_and(|layer| self.adapted.contains(layer));
        if let Some(layer) = stored.strip_suffix(".bias").filter(|_| is_inside) {
            stored = format!("{layer}.base_layer.bias");
        }
        Stored { transposed, ..Stored::part(stored, rows) }
    }

    fn is_known(&self, _: &str) -> bool {
        false
    }
}

impl<'a> PeftFiles<'a> {
    fn new(config: &ModelConfig, lora: &'a LoraConfig, parameters: &[Parameter]) -> Result<PeftFiles<'a>> {
        let (config, adapted) = (lora.model_config(config)?, adapted_layers(parameters));
        let mut files = PeftFiles { config, lora, adapted, rows: BTreeMap::new() };
        for parameter in parameters.iter().filter(|p| !is_adapter(p.name())) {
            let name = files.stored(parameter.name()).names.concat();
            *files.rows.entry(name).or_default() += parameter.whole_shape().first().copied().unwrap_or(1);
        }
        Ok(files)
    }

    /// Where an adapter is that experts have together, and the shape of its tensor.
    fn of_expert(&self, name: &str) -> Option<(Stored, [usize; 2])> {
        let (path, end) = name.split_once(".lora_")?;
        let weight = self.config.stored(&format!("{path}.weight")).names.concat();
        let layer = Layer::new(path, weight.strip_suffix(".weight")?);
        let (expert, sizes) = (Expert::of(&layer.peft)?, self.config.experts()?);
        if !layer.has_weight(&self.lora.weights) {
            return None;
        }
        let down = Expert { part: ExpertPart::Down, ..expert.clone() };
        let is_inside =
            expert.part != ExpertPart::Down && ends_with_any(&down.parameter(), &self.lora.weights);
        let inside = if is_inside { "base_layer." } else { "" };
        let rank = self.lora.of_target(&layer).ok()?.rank;
        let (from, count, outputs, inputs) = match expert.part {
            ExpertPart::Gate => (0, sizes.inner, 2 * sizes.inner, self.config.width()),
            ExpertPart::Up => (sizes.inner, sizes.inner, 2 * sizes.inner, self.config.width()),
            ExpertPart::Down => (0, self.config.width(), self.config.width(), sizes.inner),
        };
        let (rows, shape) = match end.starts_with("A.") {
            true => (Rows::Some { from: expert.number * rank, count: rank }, [sizes.count * rank, inputs]),
            false => (
                Rows::OfExpert { from, count, expert: expert.number, experts: sizes.count },
                [outputs, rank * sizes.count],
            ),
        };
        Some((Stored::part(format!("{PREFIX}{}.{inside}lora_{end}", expert.experts), rows), shape))
    }

    /// The shape of the tensor that has a parameter, and which part of it that is.
    fn place(&self, parameter: &Parameter) -> (Vec<usize>, Stored) {
        if let Some((stored, shape)) = self.of_expert(parameter.name()) {
            return (shape.to_vec(), stored);
        }
        let (stored, mut shape) = (self.stored(parameter.name()), parameter.whole_shape());
        if stored.rows != Rows::All {
            let name = stored.names.concat();
            let of = name.split_once(".lora_").map_or(name.clone(), |(layer, _)| format!("{layer}.weight"));
            shape[0] = self.rows.get(&of).copied().unwrap_or(shape[0]);
        }
        if stored.transposed {
            shape.reverse();
        }
        (shape, stored)
    }

    /// What a parameter is called there, with this end in place of `.weight`.
    fn named(&self, parameter: &Parameter, end: &str) -> String {
        let name = self.stored(parameter.name()).names.concat();
        name.strip_suffix(".weight").map(|layer| format!("{layer}{end}")).unwrap_or(name)
    }

    /// What a trained table and the head that is tied to it are called there.
    fn tied(&self, trained: &[Parameter]) -> Option<[String; 2]> {
        let table = self.config.tied_table()?;
        let names = || [self.stored(table).names.concat(), format!("{PREFIX}lm_head.weight")];
        trained.iter().any(|p| p.name() == table).then(names)
    }

    /// Adapters and trained modules as files have them.
    fn of(&self, adapters: &[Parameter]) -> Result<Vec<(String, Tensor)>> {
        let wrong = |why: String| Error::invalid("save_adapter", why);
        let mut missing = BTreeMap::<String, usize>::new();
        for adapter in adapters {
            let (shape, Stored { names, rows, .. }) = self.place(adapter);
            if rows != Rows::All {
                let whole = shape.iter().product();
                *missing.entry(names.concat()).or_insert(whole) -= adapter.tensor().numel();
            }
        }
        match missing.iter().find(|(_, rest)| **rest > 0) {
            Some((name, rest)) => Err(wrong(format!("no adapter has {rest} of the elements of {name}"))),
            None => {
                let values = |p: &Parameter| Ok((p.name().to_string(), p.values()?));
                let mut tensors = as_in_files(adapters.iter().map(values).collect::<Result<_>>()?, self)?;
                if let Some([table, head]) = self.tied(adapters) {
                    let table = tensors.iter().find(|(name, _)| *name == table);
                    tensors.extend(table.map(|(_, table)| (head, table.clone())));
                }
                Ok(tensors)
            }
        }
    }
}

/// Refuses to train what PEFT's files have no place for: a part of a weight that the family's files join from several, or an adapter of some
/// of these, and experts, which transformers' models join.
pub(super) fn check_places(config: &ModelConfig, parameters: &[Parameter]) -> Result<()> {
    let refused = |why: String| Err(Error::invalid("LoRA", why));
    let has_b = |layer: &str| parameters.iter().any(|p| p.name() == format!("{layer}.lora_B.weight"));
    for parameter in parameters.iter().filter(|p| p.is_trained()) {
        let name = parameter.name();
        if !is_adapter(name) && name.contains(".experts.") {
            return refused(format!("{name} is trained as it is, and experts have no place in PEFT's files"));
        }
        let adapted = name.strip_suffix(".lora_B.weight");
        let stored = config.stored(&adapted.map_or(name.to_string(), |layer| format!("{layer}.weight")));
        let is_apart = |p: &Parameter| {
            let trains = match adapted {
                Some(_) => p.name().strip_suffix(".weight").is_some_and(has_b),
                None => p.is_trained(),
            };
            !is_adapter(p.name()) && !trains && config.stored(p.name()).names == stored.names
        };
        if stored.rows != Rows::All && parameters.iter().any(is_apart) {
            return refused(format!(
                "the files of this family join {name} with others, and what is trained apart has no place there"
            ));
        }
    }
    Ok(())
}

/// Refuses biases of adapters beside layers that have none, as the merged model would have no place for them.
pub(super) fn check_biases(parameters: &[Parameter]) -> Result<()> {
    let has = |name: &str| parameters.iter().any(|p| p.name() == name);
    let is_alone = |layer: &&str| !has(&format!("{layer}.bias"));
    let mut layers = parameters.iter().filter_map(|p| p.name().strip_suffix(".lora_B.bias"));
    layers.find(is_alone).map_or(Ok(()), |layer| Err(no_place(layer)))
}

/// The error for a bias that cannot be merged.
fn no_place(layer: &str) -> Error {
    let why = format!("lora_bias is true, and {layer} has no bias into which its adapter's could be merged");
    Error::invalid("LoRA", format!("{why}, wanted false or other targets"))
}

/// Fills a model's adapters and trained modules, or those of a stage, from a folder as PEFT writes it, and weights that it has beside adapters
/// (`base_layer`), as of heads.
///
/// # Errors
/// If a file cannot be read, or tensors are missing, unknown or of another shape. Then no parameter is changed.
pub fn load_adapter<L: LayerFactory>(
    model: &Decoder<Lora<L>>,
    config: &ModelConfig,
    folder: impl AsRef<Path>,
) -> Result<()> {
    let file = SafeTensors::open(folder.as_ref().join(WEIGHTS))?;
    let (mut problems, mut fitting) = (Mismatch::default(), Vec::new());
    let files = PeftFiles::new(config, &model.layers().config, &model.parameters())?;
    let trained = adapters(model);
    let tied = files.tied(&trained);
    // Beside a head's adapter PEFT writes the head.
    let bases = model.parameters().into_iter().filter(|p| !is_adapter(p.name()) && !p.is_trained());
    let bases =
        bases.map(|p| (p, ".base_layer.weight")).filter(|(p, end)| file.contains(&files.named(p, end)));
    for (parameter, end) in trained.into_iter().map(|p| (p, ".weight")).chain(bases) {
        let (wanted, stored) = files.place(&parameter);
        let name = files.named(&parameter, end);
        if !file.contains(&name) {
            problems.missing.push(name);
            continue;
        }
        let shape = file.shape(&name)?.to_vec();
        match shape == wanted {
            true => fitting.push((parameter, name, stored)),
            false => problems.misshaped.push((name, shape, wanted)),
        }
    }
    if *model.stage() == DecoderStage::whole(config.layers()) {
        let known: Vec<&String> =
            fitting.iter().map(|(_, name, _)| name).chain(tied.iter().flatten()).collect();
        let unknown = |name: &&str| !known.iter().any(|known| known == name);
        problems.unexpected = file.names().filter(unknown).map(str::to_string).collect();
    }
    problems.check(&file.path().display().to_string())?;
    for (parameter, name, stored) in fitting {
        let whole = stored.rows.of(&file.tensor(&name, Device::CPU)?)?;
        let whole = if stored.transposed { whole.transpose(0, 1)? } else { whole };
        parameter.load(&parameter.part().of(&whole)?.with_shape(parameter.tensor().shape())?)?;
    }
    Ok(())
}

/// Writes a model's adapters and trained modules as PEFT does: `adapter_model.safetensors` first, `adapter_config.json` last, each atomically.
///
/// # Errors
/// If a file cannot be written, the model is a stage or a shard of a model, or some of the layers whose weights the family's files join have no
/// adapter.
pub fn save_adapter<L: LayerFactory>(
    model: &Decoder<Lora<L>>,
    config: &ModelConfig,
    lora: &LoraConfig,
    folder: impl AsRef<Path>,
) -> Result<()> {
    let (folder, parameters) = (folder.as_ref(), adapters(model));
    let is_whole = parameters.iter().all(|p| p.part().is_whole());
    if *model.stage() != DecoderStage::whole(config.layers()) || !is_whole {
        return Err(Error::invalid("save_adapter", "got a part of a model, wanted a whole one"));
    }
    let tensors = PeftFiles::new(config, lora, &model.parameters())?.of(&parameters)?;
    std::fs::create_dir_all(folder).map_err(|e| phalanx_tensor::Error::file(folder, e))?;
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let named = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
    save_safetensors(folder.join(WEIGHTS), named, &metadata)?;
    LoraConfig { targets: in_files(model, &lora.targets), ..lora.clone() }.write(folder)
}

/// Targets by the names that layers have in files, where they have others in the model.
fn in_files<L: LayerFactory>(model: &Decoder<Lora<L>>, targets: &Modules) -> Modules {
    let Modules::Names(names) = targets else { return targets.clone() };
    let adapters = adapters(model);
    let paths = adapters.iter().filter_map(|p| p.name().strip_suffix(".lora_B.weight"));
    let layers: Vec<Layer> = paths.map(|path| model.layers().layer(path)).collect();
    let mut named = Vec::new();
    for name in names {
        let called: Vec<&Layer> = layers.iter().filter(|layer| layer.is_called(name)).collect();
        let own = called.is_empty() || called.iter().any(|layer| layer.is_called_in_files(name));
        let ends = called.iter().filter_map(|layer| layer.peft.rsplit('.').next()).filter(|_| !own);
        for name in ends.chain(own.then_some(&**name)) {
            if !named.iter().any(|known| known == name) {
                named.push(name.to_string());
            }
        }
    }
    Modules::Names(named)
}

/// The tensors of a whole model by the parameters' names, with what the adapters add in the weights, for
/// [`save_tensors`](crate::models::save_tensors) with the configuration of [`LoraConfig::merged_config`]: if an embedding with an adapter
/// is tied to the head, the head's table is a tensor by itself.
///
/// # Errors
/// If a tensor cannot be computed, or an adapter has a bias and its layer has none.
pub fn merged<L: LayerFactory>(model: &Decoder<Lora<L>>, lora: &LoraConfig) -> Result<Vec<(String, Tensor)>> {
    let parameters = model.parameters();
    check_biases(&parameters)?;
    let all: BTreeMap<&str, &Parameter> = parameters.iter().map(|p| (p.name(), p)).collect();
    let all_a = model.layers().all_a(&parameters);
    let (mut tensors, mut head) = (Vec::new(), None);
    for p in parameters.iter().filter(|p| !is_adapter(p.name())) {
        let (name, values) = (p.name(), p.values()?);
        let (layer, kind) = name.rsplit_once('.').unwrap_or((name, ""));
        let beside = |end: &str| all.get(&*format!("{layer}{end}")).map(|p| p.values()).transpose();
        let target = model.layers().layer(layer);
        let (peft, settings) = (&target.peft, lora.of_target(&target)?);
        let merged = match kind {
            "weight" => match (all_a.get(peft), beside(".lora_B.weight")?) {
                (Some(a), Some(b)) => {
                    let magnitude = beside(&format!(".{MAGNITUDE}"))?;
                    Some(settings.merge(&values, &a.values()?, &b, magnitude.as_ref())?)
                }
                _ => match (beside(EMBEDDING_A)?, beside(EMBEDDING_B)?) {
                    (Some(a), Some(b)) => Some(settings.merge_embedding(&values, &a, &b)?),
                    _ => None,
                },
            },
            "bias" => beside(".lora_B.bias")?.map(|b| settings.merge_bias(&values, &b)).transpose()?,
            _ => None,
        };
        if merged.is_some() && beside(EMBEDDING_A)?.is_some() {
            head = Some((format!("{HEAD}.weight"), values.clone()));
        }
        tensors.push((name.to_string(), merged.unwrap_or(values)));
    }
    tensors.extend(head.filter(|(name, _)| !all.contains_key(&**name)));
    Ok(tensors)
}
