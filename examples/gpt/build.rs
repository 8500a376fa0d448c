//! What is trained: the model, this rank's part of it, what its ranks share, and the optimizer.

use std::path::Path;
use std::sync::Arc;

use phalanx::nn::models::{GptConfig, ModelConfig, check_size, load_weights, read_config};
use phalanx::nn::{AdamW, Group, Layers, OneDevice, Optimizer, Parameters, Rule, Scope};
use phalanx::parallel::checkpoint::Saver;
use phalanx::parallel::data_parallel::DataParallel;
use phalanx::parallel::hybrid::{OnMesh, Part};
use phalanx::parallel::mesh::Axis;
use phalanx::parallel::pipeline::ranks::{Chunks, Pipeline, TiedTable};
use phalanx::parallel::tensor_parallel::TensorParallel;
use phalanx::{DType, Device};

use crate::args::{GradPrecision, Precision, TrainArgs};
use crate::checkpoint;
use crate::ranks::Place;
use crate::step::Saving;
use crate::text::Codec;
use crate::trace::Lane;

/// What is trained on this rank, and how it is read.
pub struct Run {
    pub place: Place,
    pub lane: Lane,
    /// This rank's part of the model, which may hold no values outside of a step.
    pub model: Arc<dyn Part>,
    pub pipeline: Pipeline,
    /// What the ranks share of it.
    pub share: Arc<dyn DataParallel>,
    /// Elements of the whole model's parameters.
    pub parameters: usize,
    pub config: ModelConfig,
    pub optimizer: Optimizer<AdamW>,
    pub saver: Saving,
    pub codec: Arc<Codec>,
}

/// What is to be trained, how text is cut, and whether a folder said so and not the flags.
pub fn plan(args: &TrainArgs) -> Result<(ModelConfig, Codec, bool), String> {
    let began_with = match args.resume.as_ref().filter(|run| began_with_folder(run)) {
        Some(folder) => checkpoint::open(folder)?.settings().get(FROM_FOLDER).cloned().zip(Some(folder)),
        None => None,
    };
    let (folder, file, config) = match (&args.init, began_with) {
        (Some(folder), _) => (folder, folder.join("config.json"), read_config(folder)),
        (None, Some((config, folder))) => {
            let file = folder.join(checkpoint::NAME);
            (folder, file.clone(), ModelConfig::parse(&config, &file))
        }
        (None, None) => {
            let [layers, heads, width] = args.sizes();
            let config = GptConfig::new(256, args.context, layers, heads, width);
            return Ok((ModelConfig::Gpt(config.with_dropout(args.dropout)), Codec::Bytes(None), false));
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
    Ok((config, Codec::of(folder)?, true))
}

/// This rank's part of the model and its optimizer, new or from a folder.
pub fn build(
    args: &TrainArgs,
    place: Place,
    lane: Lane,
    config: ModelConfig,
    codec: Arc<Codec>,
) -> Result<Run, String> {
    let tp = place.groups.along(Axis::Tp);
    if tp.size() == 1 {
        return build_of(args, OneDevice, place, lane, config, codec);
    }
    let layers = TensorParallel::new(tp).with_sequence_parallel(args.sequence_parallel);
    build_of(args, layers, place, lane, config, codec)
}

fn build_of(
    args: &TrainArgs,
    layers: impl Layers,
    place: Place,
    lane: Lane,
    config: ModelConfig,
    codec: Arc<Codec>,
) -> Result<Run, String> {
    let grad_dtype = match (args.grad_dtype, args.dtype) {
        (Some(GradPrecision::Bf16), _) => DType::BF16,
        (None, Precision::F64) => DType::F64,
        _ => DType::F32,
    };
    let scope = Scope::new(args.seed, args.dtype.dtype(), place.device);
    let (layout, line) = (args.layout(), place.groups.along(Axis::Pp));
    let build = || {
        let schedule = layout.schedule()?;
        args.init.iter().try_for_each(|folder| check_size(&config, folder))?;
        let mut model = Chunks::build(&config, &Arc::new(layers), &scope, &schedule, line.rank())?;
        if let Some(folder) = &args.init {
            model.iter().try_for_each(|stage| load_weights(stage, &config, folder))?;
        }
        let mut pipeline = Pipeline::new(&schedule, line.clone(), place.device)?;
        if schedule.stages() == 1 {
            model.iter_mut().for_each(|stage| stage.set_recompute(layout.recompute));
        } else {
            pipeline = pipeline.recompute(layout.recompute);
        }
        if args.device.is_meta() {
            pipeline = pipeline.with_slow_receivers()?;
        }
        if let Some(observer) = lane.actions() {
            pipeline = pipeline.observer(observer);
        }
        model.parameters().iter().try_for_each(|p| p.set_grad_dtype(grad_dtype))?;
        let replicas = place.share(&model, grad_dtype, args.zero)?;
        let share: Arc<dyn DataParallel> =
            Arc::new(OnMesh::new(&model, replicas, place.groups.clone(), &schedule)?);
        let mut trained = share.parameters();
        if args.scheme().is_some()
            && let Some(follower) = TiedTable::new(&model, &schedule, line)?.filter(TiedTable::is_duplicate)
        {
            // Without flushes the last stage receives the tied table's values.
            trained.retain(|p| !p.is(follower.table()));
        }
        let groups = Group::decay_matrices(trained, args.lr, args.weight_decay);
        let optimizer = AdamW::default().with_betas(0.9, 0.95).init(groups)?;
        let saver = Saving::new(Saver::new(place.all_ranks())?);
        Ok::<_, phalanx::parallel::Error>((model, pipeline, share, optimizer, saver))
    };
    let (model, pipeline, share, optimizer, saver) = build().map_err(|e| e.to_string())?;
    let (model, parameters) = (Arc::new(model), count(&config).map_err(|e| e.to_string())?);
    Ok(Run { place, lane, model, pipeline, share, parameters, config, optimizer, saver, codec })
}

/// Elements of a model's parameters.
fn count(config: &ModelConfig) -> phalanx::nn::Result<usize> {
    let model = config.init(&Scope::new(0, DType::F32, Device::Meta(0)))?;
    Ok(model.parameters().iter().map(|p| p.tensor().numel()).sum())
}

/// Where a checkpoint keeps the model's sizes if they came from a folder and not from flags.
pub const FROM_FOLDER: &str = "model";

fn began_with_folder(run: &Path) -> bool {
    checkpoint::open(run).is_ok_and(|saved| saved.settings().contains_key(FROM_FOLDER))
}
