//! What is trained: the model's sizes, a rank's part of it, its optimizers, and the whole of it afterwards.

use std::path::Path;
use std::sync::Arc;

use phalanx::DType;
use phalanx::nn::models::{
    Decoder, GptConfig, LlamaConfig, ModelConfig, check_size, load_weights, read_config,
};
use phalanx::nn::{
    AdamW, Group, Layers, Muon, OneDevice, Optimizer, Parameter, Parameters, Scope, load_state_dict,
};
use phalanx::parallel::mesh::Axis;
use phalanx::parallel::pipeline::ranks::Chunks;
use phalanx::parallel::tensor_parallel::{TensorParallel, gather_parameters};
use phalanx::train::text::{Bpe, Codec};
use phalanx::train::{self, AnyRule, Data, Lane, Place, Run, checkpoints};

use crate::args::{Architecture, Rule, TrainArgs};
use crate::text::Corpus;

/// The model's configuration and its tokenizer. The flag is true if a model's folder gave them, and false if the command line did.
pub fn plan(args: &TrainArgs, corpus: &Corpus) -> Result<(ModelConfig, Codec, bool), String> {
    let began_with = match args.resume.as_ref().filter(|run| began_with_folder(run)) {
        Some(folder) => {
            let saved = checkpoints::latest(folder).map_err(|e| e.to_string())?;
            saved.settings().get(FROM_FOLDER).cloned().zip(Some(folder))
        }
        None => None,
    };
    let (folder, file, config) = match (&args.init, began_with) {
        (Some(folder), _) => (folder, folder.join("config.json"), read_config(folder)),
        (None, Some((config, folder))) => {
            let file = folder.join(checkpoints::NAME);
            (folder, file.clone(), ModelConfig::parse(&config, &file))
        }
        (None, None) => {
            let codec = match (args.vocabulary, corpus) {
                (Some(vocabulary), _) => Codec::Pairs(Bpe::train(corpus.text()?, vocabulary), None),
                (None, Corpus::Prepared(folder)) => Codec::of(folder).map_err(|e| e.to_string())?,
                (None, Corpus::Text { .. }) => Codec::Bytes(None),
            };
            return Ok((fresh(args, codec.vocabulary()), codec, false));
        }
    };
    let mut config = config.map_err(|e| e.to_string())?;
    args.check_sizes(&config, &file)?;
    config.set_dropout(args.dropout);
    if args.context > config.context() {
        let (wanted, got) = (args.context, config.context());
        return Err(format!(
            "{}: --context {wanted} is more than the model's {got} positions",
            folder.display()
        ));
    }
    Ok((config, Codec::of(folder).map_err(|e| e.to_string())?, true))
}

/// A new model of the flags' sizes.
fn fresh(args: &TrainArgs, vocabulary: usize) -> ModelConfig {
    let ([layers, heads, width], context) = (args.sizes(), args.context);
    match args.architecture {
        Some(Architecture::Llama) => {
            let config = LlamaConfig::new(vocabulary, context, layers, heads, width);
            ModelConfig::Llama(LlamaConfig { tied: true, dropout: args.dropout, ..config })
        }
        _ => ModelConfig::Gpt(
            GptConfig::new(vocabulary, context, layers, heads, width).with_dropout(args.dropout),
        ),
    }
}

/// Where a checkpoint keeps the model's sizes if they came from a folder and not from flags.
pub const FROM_FOLDER: &str = "model";

fn began_with_folder(run: &Path) -> bool {
    checkpoints::latest(run).is_ok_and(|saved| saved.settings().contains_key(FROM_FOLDER))
}

/// This rank's part of a run: new, or with weights from a folder.
pub fn run(
    args: &TrainArgs,
    place: Place,
    lane: Lane,
    config: &ModelConfig,
    data: Data,
) -> train::Result<Run> {
    let tp = place.groups.along(Axis::Tp);
    if tp.size() == 1 {
        return run_of(args, OneDevice, place, lane, config, data);
    }
    let layers = TensorParallel::new(tp).with_sequence_parallel(args.sequence_parallel);
    run_of(args, layers, place, lane, config, data)
}

fn run_of(
    args: &TrainArgs,
    layers: impl Layers,
    place: Place,
    lane: Lane,
    config: &ModelConfig,
    data: Data,
) -> train::Result<Run> {
    let (how, rank) = (args.config(), place.groups.along(Axis::Pp).rank());
    let schedule = how.layout.schedule()?;
    args.init.iter().try_for_each(|folder| check_size(config, folder))?;
    let mut model = Chunks::build(config, &Arc::new(layers), &place.scope(&how), &schedule, rank)?;
    if let Some(folder) = &args.init {
        model.iter().try_for_each(|stage| load_weights(stage, config, folder))?;
    }
    if schedule.stages() == 1 {
        model.iter_mut().for_each(|stage| stage.set_recompute(how.layout.recompute));
    }
    Run::new(&how, place, lane, model, data, &|parameters, lr| optimizers(args, parameters, lr))
}

/// AdamW for everything, or for all but the matrices inside the model, which are Muon's.
fn optimizers(
    args: &TrainArgs,
    parameters: Vec<Parameter>,
    lr: f64,
) -> train::Result<Vec<Optimizer<AnyRule>>> {
    let adamw = |groups| {
        let rule: AnyRule = Box::new(AdamW::default().with_betas(0.9, 0.95));
        Optimizer::new(rule, groups)
    };
    if args.optimizer == Rule::Adamw {
        return Ok(vec![adamw(Group::decay_matrices(parameters, lr, args.weight_decay))?]);
    }
    let ends = ["wte", "wpe", "embed_tokens", "lm_head"];
    let is_inside = |p: &Parameter| p.is_matrix() && !ends.iter().any(|end| p.name().contains(end));
    let (inside, rest): (Vec<_>, Vec<_>) = parameters.into_iter().partition(is_inside);
    let muon: AnyRule = Box::<Muon>::default();
    let mut all = vec![adamw(vec![Group::new(rest, lr)])?];
    if !inside.is_empty() {
        all.push(Optimizer::new(muon, vec![Group::new(inside, lr).with_weight_decay(args.weight_decay)])?);
    }
    Ok(all)
}

/// The whole model, on the first rank. All ranks call it.
pub fn whole(run: &Run, config: &ModelConfig) -> train::Result<Option<Decoder>> {
    let _values = run.share().gathered()?;
    let groups = &run.place().groups;
    // The other replicas have the same.
    if groups.at().dp > 0 {
        return Ok(None);
    }
    let parameters = run.model().parameters();
    let entries = gather_parameters(&parameters, groups.model())?;
    if !run.place().is_first() {
        return Ok(None);
    }
    let dtype = parameters.first().map_or(DType::F32, Parameter::dtype);
    let model = config.init(&Scope::new(0, dtype, run.place().device))?;
    load_state_dict(&model, entries)?;
    Ok(Some(model))
}
