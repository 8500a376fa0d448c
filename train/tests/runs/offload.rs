//! Runs whose ranks keep optimizer state, gradients or shards in the host's memory.

use phalanx_parallel::hybrid::Layout;
use phalanx_tensor::{Category, DType, Device};
use phalanx_train::{Config, Offload};

use crate::{Folder, Told, config, run};

#[test]
fn offloaded_runs_have_the_bits_of_runs_without() {
    for (dp, pp, zero, offload, dtype) in [
        (1, 1, 0, Offload::Optimizer, DType::F32),
        (1, 1, 3, Offload::Parameters, DType::BF16),
        (2, 1, 1, Offload::Optimizer, DType::BF16),
        (2, 1, 2, Offload::Optimizer, DType::F32),
        (2, 1, 3, Offload::Optimizer, DType::BF16),
        (2, 1, 3, Offload::Parameters, DType::F32),
        (2, 2, 2, Offload::Optimizer, DType::F32),
    ] {
        let layout = Layout { dp, pp, micro_batches: 2, ..Layout::default() };
        let base = Config { dtype, ema: Some(0.9), ..config(layout, zero) };
        let (plain, offloaded) = (Told::default(), Told::default());
        run(base.clone(), &plain).unwrap();
        run(Config { offload, ..base }, &offloaded).unwrap();
        let case = format!("dp {dp} x pp {pp}, ZeRO {zero}, {offload:?}, {dtype}");
        assert_eq!((plain.losses().len(), plain.validations().len()), (12, 3));
        assert_eq!(offloaded.losses(), plain.losses(), "{case}");
        assert_eq!(offloaded.validations(), plain.validations(), "{case}");
    }
}

/// The most bytes of a category that a device had.
fn peak(device: Device, category: Category) -> usize {
    device.ledger().unwrap().category(category).peak
}

#[test]
fn the_models_device_holds_nothing_of_the_optimizer_and_the_host_all_of_it() {
    // The host of `cpu:i` is `cpu:i+512`.
    let train = |device: u16, zero, offload| {
        let config = Config { device: Device::Cpu(device), offload, ..config(Layout::default(), zero) };
        run(config, &Told::default()).unwrap();
        [Device::Cpu(device), Device::Cpu(device + 512)]
    };
    let [device, host] = train(60, 0, Offload::None);
    let (state, weights) = (peak(device, Category::OptimizerState), peak(device, Category::Parameters));
    assert!(state == 2 * weights && weights > 0, "AdamW has two moments of each weight: {state}, {weights}");
    assert_eq!(host.ledger().unwrap().total().peak, 0);
    for (number, (zero, offload)) in
        [(0, Offload::Optimizer), (2, Offload::Optimizer), (3, Offload::Optimizer), (3, Offload::Parameters)]
            .into_iter()
            .enumerate()
    {
        let [device, host] = train(61 + number as u16, zero, offload);
        let case = format!("ZeRO {zero}, {offload:?}");
        assert_eq!(peak(device, Category::OptimizerState), 0, "{case}");
        assert_eq!(peak(host, Category::OptimizerState), state, "{case}");
        assert_eq!(peak(host, Category::Gradients), weights, "{case}");
        assert_eq!(peak(host, Category::Parameters), weights, "{case}");
    }
}

#[test]
fn a_run_with_activations_on_the_host_has_the_bits_of_one_without_and_less_on_its_device() {
    for (dp, pp, zero, offload) in
        [(1, 1, 0, Offload::None), (2, 1, 3, Offload::Parameters), (1, 2, 1, Offload::None)]
    {
        let train = |first: u16, offload_activations| {
            let layout = Layout { dp, pp, micro_batches: 2, ..Layout::default() };
            let config = Config {
                // Activations of one rank in one process are on the device that is asked for.
                device: Device::Cpu(if dp * pp == 1 { first } else { 0 }),
                batch: 128 * dp,
                validate_every: 0,
                offload,
                offload_activations,
                ..config(layout, zero)
            };
            let told = Told::default();
            run(config, &told).unwrap();
            let [device, host] = [first, first + 512].map(|i| peak(Device::Cpu(i), Category::Activations));
            (told.losses(), device, host)
        };
        let (wanted, all, none) = train(70, false);
        let (losses, rest, host) = train(71, true);
        assert_eq!(losses, wanted, "dp {dp} x pp {pp}, ZeRO {zero}");
        if dp * pp == 1 {
            assert!(none == 0 && host > 0 && rest < all && rest + host >= all, "{all} {rest} {host}");
        }
    }
}

#[test]
fn a_run_with_offload_resumes_bit_for_bit_from_one_without() {
    let layout = || Layout { dp: 2, ..Layout::default() };
    let whole = Told::default();
    run(config(layout(), 2), &whole).unwrap();
    for (first, second) in [(Offload::None, Offload::Optimizer), (Offload::Optimizer, Offload::None)] {
        let (folder, told) = (Folder::new(), Told::default());
        let out = Some(folder.path().to_path_buf());
        run(Config { steps: 5, offload: first, out, ..config(layout(), 2) }, &told).unwrap();
        let resume = Some(folder.path().to_path_buf());
        run(Config { offload: second, resume, ..config(layout(), 2) }, &told).unwrap();
        assert_eq!(told.losses(), whole.losses(), "{first:?}, then {second:?}");
    }
}

#[test]
fn offload_that_cannot_be_is_refused_with_what_was_wanted() {
    let two = || Layout { dp: 2, ..Layout::default() };
    for (config, wanted) in [
        (Config { offload: Offload::Parameters, ..config(two(), 2) }, "goes with `zero` 3, got `zero` 2"),
        (
            Config { offload: Offload::Optimizer, ..config(two(), 0) },
            "goes with `zero` 1, 2 or 3, got `zero` 0",
        ),
        (
            Config { offload: Offload::Optimizer, chains: 2, ..config(Layout::default(), 0) },
            "goes without `emulate-dp`, got 2",
        ),
    ] {
        let error = run(config, &Told::default()).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error:?}, wanted {wanted:?}");
    }
}
