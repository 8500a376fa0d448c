//! GPT and Llama over ranks have one device's losses, gradients and parameters.

use phalanx_nn::models::{Decoder, GptConfig, LlamaConfig, ModelConfig};
use phalanx_nn::{Group, Layers, OneDevice, Parameters, Rule, Sgd};
use phalanx_parallel::data_parallel::Entries;
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device};

use crate::kit::{
    Cut, ROWS, STEPS, assert_close, backward, build, gpt, llama, part_of, train_alone, train_cut,
};

/// Every kind of cut: heads that divide by all ranks tried, key heads that do, and key heads that do not.
fn cases() -> Vec<(ModelConfig, Cut)> {
    let untied = ModelConfig::Gpt(GptConfig { tied: false, ..GptConfig::new(259, 12, 4, 6, 48) });
    let biased = LlamaConfig {
        attention_bias: true,
        mlp_bias: true,
        tied: true,
        key_heads: 2,
        ..LlamaConfig::new(256, 12, 4, 6, 48)
    };
    let models = [
        (gpt(6, 0.2), &[2, 3][..]),
        (gpt(4, 0.2), &[4]),
        (untied, &[3]),
        (llama(6, 6, 0.1), &[2, 3]),
        (llama(6, 2, 0.1), &[2, 3]), // over 3 ranks, two key heads for three query heads each: the second rank uses both
        (llama(6, 3, 0.1), &[2]), // the first rank uses two of three key heads, one of them for two query heads
        (llama(4, 2, 0.1), &[4]),
        (ModelConfig::Llama(biased), &[3]),
    ];
    let cuts = |(config, ranks): (ModelConfig, &'static [usize])| {
        ranks.iter().flat_map(|&ranks| Cut::both(ranks)).map(move |cut| (config.clone(), cut))
    };
    models.into_iter().flat_map(cuts).collect()
}

/// The loss, and gradients and values by name after one step of SGD.
fn step<L: Layers>(model: &Decoder<L>) -> Result<(f64, [Entries; 2])> {
    let parameters = model.parameters();
    let mut optimizer = Sgd::default().init(vec![Group::new(parameters.clone(), 0.1)])?;
    let loss = backward(model, 0, 0..ROWS)?;
    let grads = parameters.iter().map(|p| Ok((p.name().to_string(), p.grad()?.unwrap().copy()?)));
    let grads = grads.collect::<Result<_>>()?;
    optimizer.step()?;
    Ok((loss, [grads, parameters.iter().map(|p| (p.name().to_string(), p.tensor())).collect()]))
}

#[test]
fn one_step_of_sgd_gives_one_devices_gradients_and_parameters() {
    for (config, cut) in cases() {
        let alone = build(&config, OneDevice, DType::F64, Device::CPU).unwrap();
        let (loss, whole) = step(&alone).unwrap();
        launch::threads(cut.ranks, |rank| -> Result<()> {
            let model = build(&config, cut.layers(rank.comm()), DType::F64, rank.device())?;
            let (own_loss, own) = step(&model)?;
            assert_close("loss", &[own_loss], &[loss], 1e-13);
            for (what, own, whole) in [("gradient", &own[0], &whole[0]), ("value", &own[1], &whole[1])] {
                for (parameter, (_, values)) in model.parameters().iter().zip(own) {
                    let what = format!("{what} of {} over {cut:?}", parameter.name());
                    assert_close(&what, &values.to_vec::<f64>()?, &part_of(parameter, whole), 1e-12);
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn losses_of_all_steps_are_one_devices_and_the_same_on_every_rank() {
    for (config, cut) in cases() {
        for (dtype, tolerance) in [(DType::F64, 1e-11), (DType::F32, 1e-5)] {
            let alone = train_alone(&config, dtype, STEPS, 1);
            let ranks = train_cut(&config, dtype, cut, STEPS, 1);
            assert!(ranks.iter().all(|losses| *losses == ranks[0]), "{cut:?}");
            for (step, (a, b)) in alone.iter().zip(&ranks[0]).enumerate() {
                assert!((a - b).abs() <= tolerance * a.abs(), "step {step}: {a} {b} {dtype} {cut:?}");
            }
        }
    }
}
