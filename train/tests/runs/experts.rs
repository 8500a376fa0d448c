//! Runs of models with experts that ranks divide, against one rank that has all experts; what does not go with them is refused by name.

use phalanx_nn::models::{Experts, Family, ModelConfig, RouterLosses, TransformerConfig};
use phalanx_nn::{Optimizer, Parameter};
use phalanx_parallel::hybrid::{Layout, decoder};
use phalanx_parallel::mesh::{Groups, Mesh};
use phalanx_tensor::Device;
use phalanx_train::data::{TokenWindows, Tokens};
use phalanx_train::{AnyRule, Asynchronous, Config, MeshRank, Offload, Result, Trainer};

use super::plans::{CONTEXT, MakeOptimizers, planned, short, train_by};
use super::{Told, config, run};

const NONE: RouterLosses = RouterLosses { balance: 0.0, z: 0.0 };
const LOSSES: RouterLosses = RouterLosses { balance: 0.02, z: 0.001 };

fn mixture(losses: RouterLosses) -> ModelConfig {
    let mut config = TransformerConfig::new(Family::Mixtral, 31, CONTEXT, 2, 2, 16);
    config.inner = 24;
    let (dense, bias_step) = (Vec::new(), 0.01);
    config.experts =
        Some(Experts { count: 4, chosen: 2, inner: 24, normalized: true, dense, losses, bias_step });
    ModelConfig::Transformer(config)
}

fn muon(parameters: Vec<Parameter>, lr: f64) -> Result<Vec<Optimizer<AnyRule>>> {
    phalanx_train::muon(parameters, lr, 0.1, |p| p.is_matrix() && p.name().starts_with("layers"))
}

fn adafactor(parameters: Vec<Parameter>, lr: f64) -> Result<Vec<Optimizer<AnyRule>>> {
    phalanx_train::adafactor(parameters, lr, 0.1)
}

/// With digests of every step, so copies of experts and of the rest are compared too.
fn checked(layout: Layout, zero: u8, chains: usize) -> Config {
    Config { digests: 1, check_replicas: 1, zero, chains, ..short(layout) }
}

fn ranks([dp, pp, ep]: [usize; 3]) -> Layout {
    Layout { dp, pp, ep, ..Layout::default() }
}

#[test]
fn a_run_with_divided_experts_has_the_bits_of_one_rank() {
    let cases = [
        (2, NONE, &[([2, 1, 2], 0), ([2, 2, 2], 1)][..]),
        (2, LOSSES, &[([2, 1, 1], 0), ([2, 1, 2], 0), ([2, 2, 2], 1)]),
        (4, LOSSES, &[([4, 1, 2], 1), ([4, 1, 4], 2), ([4, 1, 2], 3)]),
    ];
    for (dp, losses, layouts) in cases {
        let model = mixture(losses);
        let wanted = train_by(checked(Layout::default(), 0, dp), &model, phalanx_train::adamw).unwrap();
        for &(mesh, zero) in layouts {
            let got = train_by(checked(ranks(mesh), zero, 1), &model, phalanx_train::adamw);
            assert!(got.unwrap() == wanted, "{mesh:?}, ZeRO {zero}");
        }
    }
}

/// Without flushes too a stage passes its routers' sums on, whatever the stages and their replicas are.
#[test]
fn losses_of_routers_do_not_depend_on_the_stages_of_double_buffers() {
    let mut model = mixture(LOSSES);
    let ModelConfig::Transformer(config) = &mut model else { unreachable!() };
    config.experts.as_mut().unwrap().bias_step = 0.0;
    let doubled = Some(Asynchronous::DoubleBuffered);
    let run = |layout: Layout, asynchronous| {
        let config = Config { asynchronous, clip: None, ..short(layout) };
        train_by(config, &model, phalanx_train::adamw).unwrap()
    };
    let wanted = run(Layout { pp: 2, micro_batches: 4, ..Layout::default() }, doubled);
    for of in [&[(1, 1), (3, 1)][..], &[(2, 2), (1, 1), (1, 1)]] {
        assert!(run(planned(of, 4), doubled) == wanted, "{of:?}");
    }
    assert!(
        run(Layout { micro_batches: 4, ..Layout::default() }, None) != wanted,
        "weights are not an update old"
    );
}

#[test]
fn offloaded_optimizers_of_divided_experts_have_the_bits_of_one_rank() {
    let model = mixture(LOSSES);
    let wanted = train_by(checked(Layout::default(), 0, 4), &model, phalanx_train::adamw).unwrap();
    for (mesh, zero, offload) in [
        ([4, 1, 4], 1, Offload::Optimizer),
        ([4, 1, 2], 2, Offload::Optimizer),
        ([4, 1, 2], 3, Offload::Parameters),
    ] {
        let config = Config { offload, ..checked(ranks(mesh), zero, 1) };
        let got = train_by(config, &model, phalanx_train::adamw).unwrap();
        assert!(got == wanted, "{mesh:?}, ZeRO {zero}, offload {offload:?}");
    }
}

#[test]
fn rules_that_need_whole_parameters_have_the_bits_of_one_rank_over_divided_experts() {
    for rule in [muon as MakeOptimizers, adafactor] {
        let wanted = train_by(checked(Layout::default(), 0, 4), &mixture(NONE), rule).unwrap();
        for (mesh, zero) in [([4, 1, 2], 0), ([4, 1, 2], 1), ([4, 1, 2], 3), ([4, 1, 4], 0)] {
            let got = train_by(checked(ranks(mesh), zero, 1), &mixture(NONE), rule).unwrap();
            assert!(got == wanted, "{mesh:?}, ZeRO {zero}");
        }
    }
}

#[test]
fn what_does_not_go_with_divided_experts_is_refused() {
    let base = || short(ranks([4, 1, 2]));
    let cases = [
        (Config { layout: ranks([4, 1, 3]), ..base() }, "`ep` 3 does not divide `dp` 4"),
        (Config { layout: ranks([4, 1, 0]), ..base() }, "`ep` is 0"),
    ];
    for (config, wanted) in cases {
        let error = config.check().unwrap_err().to_string();
        assert!(error.contains(wanted), "{error:?}, wanted {wanted:?}");
    }
    let none = "got ep 2 for a model without experts that were made over these ranks, wanted 1";
    let error = run(config(ranks([2, 1, 2]), 0), &Told::default()).unwrap_err().to_string();
    assert!(error.contains(none), "{error}");
    // A model whose experts every rank has whole.
    let whole = Layout::default();
    let config = Config { batch: 4, ..config(ranks([2, 1, 2]), 0) };
    let tokens = (0..400u32).map(|i| i % 31).collect::<Vec<_>>().with_end_of_text(0);
    let trainer = Trainer::new(Config { validate_every: 0, ..config.clone() });
    let error = trainer
        .samples(TokenWindows::new(tokens, CONTEXT, 5).unwrap(), CONTEXT)
        .run_parts(|rank| {
            let groups = Groups::new(Mesh::new(1, 2, 1)?, rank.all_ranks())?;
            Ok(decoder(&mixture(NONE), &whole, &groups, &rank.scope(&config), None)?)
        })
        .unwrap_err();
    assert!(error.to_string().contains(none), "{error}");
}

/// A meta device needs no peers: its tokens are spread evenly.
#[test]
fn a_meta_device_counts_a_ranks_own_experts() {
    let parameters = |ep: usize| -> usize {
        let meta = Config { device: Device::Meta(0), workers: 0, ..short(ranks([4, 1, ep])) };
        let tokens = (0..400u32).map(|i| i % 31).collect::<Vec<_>>().with_end_of_text(0);
        let trainer =
            Trainer::new(meta.clone()).samples(TokenWindows::new(tokens, CONTEXT, 5).unwrap(), CONTEXT);
        let part = |rank: &MeshRank| {
            Ok(decoder(&mixture(NONE), &meta.layout, &rank.groups, &rank.scope(&meta), None)?)
        };
        let report = trainer.memory(part).unwrap().swap_remove(0);
        let row = report.lines().find_map(|line| line.trim_start().strip_prefix("parameters")).unwrap();
        row.split_whitespace().next().unwrap().parse().unwrap()
    };
    // Of two blocks four experts each with three matrices of 24 x 16 floats.
    let experts = 2 * 4 * 3 * 24 * 16 * 4;
    assert_eq!(
        [parameters(1) - parameters(2), parameters(1) - parameters(4)],
        [experts / 2, experts / 4 * 3]
    );
}
