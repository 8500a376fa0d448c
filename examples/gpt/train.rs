//! `train`: from the flags to a trained model.

use std::path::Path;
use std::sync::Arc;

use phalanx::nn::models::{ModelConfig, keep_settings, save_config};
use phalanx::parallel::hybrid::{adapted_decoder, decoder};
use phalanx::parallel::{launch::Rank, planning::decoder_layers};
use phalanx::train::text::Codec;
use phalanx::train::{MODEL, MODEL_FOLDERS, check_memory, digest, plan_decoder, sample};
use phalanx::train::{MeshRank, Progress, Replay, Result, Run, Settings, Trainer};
use phalanx::train::{save_decoder, start, stop_on_signals};

use crate::gpt::{Gpt, optimizers};

/// Trains as the settings say, profiles five steps of it, plans its pipeline, or repeats steps.
pub fn train(settings: &Settings<Gpt>, command: &str, replay: Option<&Replay>) -> Result<()> {
    let mut gpt = settings.resolve()?;
    gpt.run.resume = replay.map(|replay| replay.from.clone()).or(gpt.run.resume);
    gpt.check()?;
    let name = format!("{:08x}", digest(settings.to_toml(&[]).as_bytes()) as u32);
    gpt.run.rescue = Some(Path::new("target/gpt").join(name));
    start(&gpt.run, crate::complain, |process| {
        let here = Gpt { run: gpt.run.for_process(process)?, ..gpt.clone() };
        train_here(&here, settings, command, replay, process)
    })
}

/// What this process does of it: everything, or one rank's part.
fn train_here(
    gpt: &Gpt,
    settings: &Settings<Gpt>,
    command: &str,
    replay: Option<&Replay>,
    process: Option<&Rank>,
) -> Result<()> {
    let (config, corpus, from_folder) = gpt.plan()?;
    let (run, context) = (&gpt.run, gpt.text.context);
    if gpt.init.is_none() && !run.device.is_meta() {
        // The weights, their gradients, two moments and perhaps a master; inputs and targets.
        let model = config.matrix_elements() * 4.0 * run.dtype.size().max(4) as f64;
        let batch = 16.0 * run.batch as f64 * context as f64;
        check_memory(&[("a model (`layers`, `width`)", model), ("a batch (`batch`, `context`)", batch)])?;
    }
    let (data, digest, bytes_per_token) = corpus.data(config.vocabulary(), run.seed)?;
    if !gpt.quiet && process.is_none_or(|rank| rank.rank() == 0) {
        corpus.summaries().iter().for_each(|said| crate::say(said));
    }
    let codec = Arc::new(corpus.into_codec());
    let (rule, decay, tokenizer) = (gpt.optimizer, gpt.weight_decay, codec.clone());
    let (model, dtype) = (config.clone(), run.dtype);
    let mut trainer = Trainer::new(run.clone())
        .in_process_group(process)
        .settings("gpt", settings)
        .sources(data)
        .flops(config.flops(context, run.layout.recompute))
        .bytes_per_token(bytes_per_token)
        .optimizers(move |parameters, lr| optimizers(rule, decay, parameters, lr))
        .extra_files(move |folder| tokenizer.save(folder))
        .extra_files(move |folder| Ok(save_config(&model, dtype, folder)?))
        .stop_when(stop_on_signals()?)
        .identity("data", digest);
    for (key, size) in ["layers", "heads", "width"].into_iter().zip(gpt.sizes()) {
        trainer = trainer.identity(key, size);
    }
    for key in ["architecture", "vocabulary", "optimizer", "context", "dropout", "lora"] {
        trainer = trainer.identity(key, settings.value(key).unwrap_or("default".into()));
    }
    if from_folder {
        trainer = trainer.identity(MODEL, config.to_json(run.dtype));
    }
    let base = gpt.base();
    if let (Some(base), Some(_)) = (&base, &gpt.lora) {
        trainer = trainer.frozen_from(base);
    }
    if let Some(path) = &gpt.metrics {
        trainer = trainer.metrics(path);
    }
    let part = |rank: &MeshRank| {
        let (layout, groups, scope, init) = (&run.layout, &rank.groups, rank.scope(run), base.as_deref());
        Ok(match &gpt.lora {
            None => decoder(&config, layout, groups, &scope, init)?,
            Some(lora) => adapted_decoder(&config, lora, layout, groups, &scope, init)?,
        })
    };
    if let Some(replay) = replay {
        return trainer.replay(replay, part)?.check().map(|said| crate::say(&said));
    }
    if ["plan", "profile"].contains(&command) || run.device.is_meta() {
        let told: Vec<String> = match command {
            "plan" => vec![plan_decoder(run, context, |s, x| Ok(decoder_layers(&config, s, x)?))?],
            "profile" => trainer.profile(5, part)?.iter().map(|profile| profile.table()).collect(),
            _ => trainer.memory(part)?,
        };
        told.iter().for_each(|text| crate::say(text));
        return Ok(());
    }
    if !gpt.quiet {
        trainer = trainer.callback(Progress::default().of_tokens(bytes_per_token));
    }
    if !gpt.quiet && codec.is_text() {
        let (config, gpt, codec) = (config.clone(), gpt.clone(), codec.clone());
        trainer = trainer
            .every(gpt.sample_every, move |run| sample(run, &config, &codec, &gpt.prompt, gpt.run.seed));
    }
    let (saved, from) = (config.clone(), gpt.clone());
    let summary = trainer.at_end(move |run| save(run, &saved, &from, &codec)).run_parts(part)?;
    let folder =
        run.folder().or(run.rescue.as_deref()).filter(|_| process.is_none_or(|rank| rank.rank() == 0));
    if let (Some("interrupted"), Some(folder)) = (summary.stopped.as_deref(), folder) {
        let folder = folder.display();
        let flags = format!("--config {folder}/config.toml --resume {folder}");
        crate::say(&format!("go on with: cargo run --release --example gpt -- train {flags}"));
    }
    Ok(())
}

/// Writes the model, and the best one, as Hugging Face folders. All ranks call it.
fn save(run: &mut Run, config: &ModelConfig, gpt: &Gpt, codec: &Codec) -> Result<()> {
    let Some(out) = run.config().folder().map(Path::to_path_buf) else { return Ok(()) };
    let has_best = run.config().keep_best && run.best_loss().is_some();
    for name in MODEL_FOLDERS.iter().take(1 + usize::from(has_best)) {
        if *name == MODEL_FOLDERS[1] {
            run.load_best()?;
        }
        if save_decoder(run, config, gpt.lora.as_ref(), out.join(name))? {
            if let Some(init) = &gpt.init {
                keep_settings(init, out.join(name))?;
            }
            codec.save(&out.join(name))?;
        }
    }
    Ok(())
}
