//! What a language model writes while it is trained: its ranks write it together, and the whole model on one rank writes the same.

use phalanx_nn::models::{
    BaseWeights, Family, Generation, GenerationStep, LoraConfig, ModelConfig, TransformerConfig,
    generate_rows as by_one_device, save_model,
};
use phalanx_nn::{SampleOptions, Scope};
use phalanx_parallel::hybrid::{StagedModel, adapted_decoder, decoder};
use phalanx_train::{Asynchronous, MeshRank, Run, generate_rows, generate_saved, whole_decoder};

use super::packed::{CONTEXT, models, packed};
use super::*;

/// Trains a model for two steps, and writes.
fn writes(model: &ModelConfig, config: Config, lora: Option<&LoraConfig>) {
    let config = Config { dtype: DType::F64, steps: 2, validate_every: 0, ..config };
    let (written, count) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (texts, calls, whole, adapters) = (written.clone(), count.clone(), model.clone(), lora.cloned());
    let write = move |run: &Run| {
        let prompts = [vec![3u32, 1], vec![7; 15], vec![9]];
        let sampling =
            SampleOptions { temperature: 0.9, top_k: Some(20), seed: 3, ..SampleOptions::default() };
        let generation = || Generation::new(8).with_sampling(sampling).with_end_tokens(&[0, 5]);
        let rows = generate_rows(run, &prompts, generation(), |_| {
            assert!(run.mesh_rank().is_first());
            calls.fetch_add(1, Ordering::Relaxed);
            true
        })?;
        assert_eq!(rows.is_some(), run.mesh_rank().groups.at().dp < run.config().layout.ep);
        if let Some(whole) = whole_decoder(run, &whole, adapters.as_ref())? {
            assert_eq!(
                rows.unwrap(),
                by_one_device(&whole, &prompts, generation(), |_| true)?,
                "{:?}",
                run.config().layout
            );
            texts.fetch_add(1, Ordering::Relaxed);
        }
        Ok(None)
    };
    let part = |rank: &MeshRank| -> Result<Box<dyn StagedModel>> {
        let (layout, groups, scope) = (&config.layout, &rank.groups, rank.scope(&config));
        Ok(match lora {
            None => decoder(model, layout, groups, &scope, None)?,
            Some(lora) => adapted_decoder(model, lora, layout, groups, &scope, None)?,
        })
    };
    let trainer = Trainer::new(config.clone()).samples(packed(), CONTEXT).every(2, write);
    trainer.run_parts(part).unwrap();
    assert_eq!(written.load(Ordering::Relaxed), 1, "{:?}", config.layout);
    assert!(count.load(Ordering::Relaxed) >= 3);
}

fn layout(dp: usize, tp: usize, pp: usize) -> Layout {
    Layout { dp, tp, pp, micro_batches: 2, ..Layout::default() }
}

#[test]
fn ranks_write_what_the_whole_model_writes() {
    let models = models();
    let layouts = [
        (layout(1, 1, 1), 0),
        (layout(2, 1, 1), 3),
        (layout(1, 2, 1), 0),
        (Layout { sequence_parallel: true, ..layout(1, 2, 1) }, 0),
        (layout(1, 1, 2), 0),
        (Layout { schedule: "zb-v".into(), ..layout(1, 1, 2) }, 0),
        (layout(2, 2, 2), 3),
    ];
    for (i, (layout, zero)) in layouts.into_iter().enumerate() {
        writes(&models[i % 2], config(layout, zero), None);
    }
    writes(&models[1], Config { ema: Some(0.5), ..config(layout(1, 2, 2), 0) }, None);
}

#[test]
fn ranks_that_divide_the_experts_write_what_the_whole_model_writes() {
    let size =
        TransformerConfig { key_heads: 2, ..TransformerConfig::new(Family::Llama, 32, CONTEXT, 4, 2, 16) };
    let is_mixtral = |config: &TransformerConfig| config.family == Family::Mixtral;
    let model = ModelConfig::from(Family::samples(&size).into_iter().find(is_mixtral).unwrap());
    for (dp, tp, pp) in [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)] {
        writes(&model, config(Layout { ep: 2, ..layout(dp, tp, pp) }, 0), None);
    }
}

#[test]
fn ranks_write_between_the_steps_of_a_pipeline_without_flushes() {
    let layout = Layout { micro_batches: 1, ..layout(1, 1, 2) };
    let config = Config { asynchronous: Some(Asynchronous::WeightStashing), ..config(layout, 0) };
    models().iter().for_each(|model| writes(model, config.clone(), None));
}

#[test]
fn adapters_take_part_where_they_are() {
    // The names of GPT's layers, and of Llama's.
    for (model, targets) in models().into_iter().zip([["c_attn", "mlp.c_proj"], ["q_proj", "down_proj"]]) {
        let lora = LoraConfig::new(2, &targets);
        let dora = LoraConfig { dora: true, ..lora.clone() };
        let int8 = LoraConfig { base: BaseWeights::Int8, ..dora.clone() };
        writes(&model, config(layout(1, 2, 2), 0), Some(&lora));
        writes(&model, config(layout(2, 2, 1), 3), Some(&dora));
        writes(&model, config(layout(2, 1, 2), 2), Some(&int8));
        writes(&model, config(layout(2, 1, 2), 3), Some(&int8));
        let asynchronous = Some(Asynchronous::WeightStashing);
        let flowing = config(Layout { micro_batches: 1, ..layout(1, 1, 2) }, 0);
        writes(&model, Config { asynchronous, ..flowing }, Some(&int8));
    }
}

#[test]
fn a_saved_model_is_continued_by_ranks_that_read_its_parts() {
    let folder = std::env::temp_dir().join(format!("phalanx-generate-saved-{}", std::process::id()));
    for config in models() {
        let scope = Scope::new(5, DType::F32, Device::CPU);
        let model = config.init(&scope).unwrap();
        save_model(&model, &config, &folder).unwrap();
        let prompts = [vec![3u32, 1], vec![7; 15], vec![9]];
        let generation = || Generation::new(8).with_end_tokens(&[0, 5]);
        let wanted = by_one_device(&model, &prompts, generation(), |_| true).unwrap();
        for (tp, pp) in [(1, 1), (2, 1), (1, 3), (2, 2)] {
            let (layout, mut tokens) = (Layout { tp, pp, ..Layout::default() }, 0);
            let count = |step: GenerationStep<'_>| {
                tokens += usize::from(step.token.is_some());
                true
            };
            let rows = generate_saved(&folder, layout, DType::F32, &prompts, generation, count, |_| ());
            assert_eq!(rows.unwrap().unwrap(), wanted, "tp {tp}, pp {pp}");
            assert_eq!(tokens, wanted.iter().map(|row| row.tokens.len()).sum::<usize>());
        }
        let layout = Layout { tp: 3, ..Layout::default() };
        let refused =
            generate_saved(&folder, layout, DType::F32, &prompts, generation, |_| true, |_| ()).unwrap_err();
        assert!(refused.to_string().contains("attention heads: got 2 to cut over 3 ranks"), "{refused}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
    let refused = generate_saved(
        &folder,
        Layout::default(),
        DType::F32,
        &[vec![1]],
        || Generation::new(1),
        |_| true,
        |_| (),
    );
    assert!(refused.unwrap_err().to_string().contains("phalanx-generate-saved"));
}

#[test]
fn what_is_no_decoder_writes_nothing() {
    let refused = |run: &Run| {
        let why = generate_rows(run, &[[1u32]], Generation::new(1), |_| true).unwrap_err().to_string();
        assert_eq!(why, "generate: got a model that is no decoder, wanted a language model");
        Ok(None)
    };
    let config = Config { steps: 1, validate_every: 0, ..config(layout(1, 1, 2), 0) };
    Trainer::new(config).data(data()[0].clone()).every(0, refused).run_layers(layers, loss).unwrap();
}
