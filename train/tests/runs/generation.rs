//! What a language model writes while it is trained: its ranks write it together, and the whole model on one rank writes the same.

use phalanx_nn::SampleOptions;
use phalanx_nn::models::{Generation, LoraConfig, ModelConfig, generate_rows as by_one_device};
use phalanx_parallel::hybrid::{StagedModel, adapted_decoder, decoder};
use phalanx_train::{Asynchronous, MeshRank, Run, generate_rows, whole_decoder};

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
        assert_eq!(rows.is_some(), run.mesh_rank().groups.at().dp == 0);
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
fn ranks_write_between_the_steps_of_a_pipeline_without_flushes() {
    let layout = Layout { micro_batches: 1, ..layout(1, 1, 2) };
    let config = Config { asynchronous: Some(Asynchronous::WeightStashing), ..config(layout, 0) };
    models().iter().for_each(|model| writes(model, config.clone(), None));
}

#[test]
fn adapters_take_part_where_they_are() {
    // The names of GPT's layers, and of Llama's.
    for (model, targets) in models().into_iter().zip([["c_attn", "mlp.c_proj"], ["q_proj", "down_proj"]]) {
        writes(&model, config(layout(1, 2, 2), 0), Some(&LoraConfig::new(2, &targets)));
    }
}
