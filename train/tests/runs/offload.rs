//! Runs whose ranks keep optimizer state, gradients or shards in the host's memory.

use std::path::Path;
use std::sync::{Arc, Mutex};

use phalanx_nn::OneDevice;
use phalanx_nn::models::{GptConfig, ModelConfig, RecomputeMode};
use phalanx_parallel::hybrid::Layout;
use phalanx_parallel::pipeline::ranks::Chunks;
use phalanx_tensor::{Category, DType, Device};
use phalanx_train::data::TokenWindows;
use phalanx_train::{Config, MeshRank, Offload, Trainer, lamb};

use crate::{Folder, Told, config, data, layers, loss, run};

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
fn optimizer_state_on_disk_has_the_bits_of_memory_and_is_gone_at_the_end() {
    for (dp, zero, offload, dtype) in [
        (1, 0, Offload::Optimizer, DType::BF16),
        (2, 2, Offload::Optimizer, DType::F32),
        (2, 3, Offload::Parameters, DType::BF16),
    ] {
        let base = || Config { dtype, ema: Some(0.9), ..config(Layout { dp, ..Layout::default() }, zero) };
        let whole = Told::default();
        run(base(), &whole).unwrap();
        let (disk, out, told) = (Folder::new(), Folder::new(), Told::default());
        let on_disk = || Config { offload, offload_dir: Some(disk.path().join("made")), ..base() };
        // Stopped and resumed, the second half on disk again.
        run(Config { steps: 5, out: Some(out.path().into()), ..on_disk() }, &told).unwrap();
        run(Config { resume: Some(out.path().into()), ..on_disk() }, &told).unwrap();
        assert_eq!(told.losses(), whole.losses(), "dp {dp}, ZeRO {zero}, {offload:?}, {dtype}");
        assert_eq!(told.validations().last(), whole.validations().last());
        assert_eq!(std::fs::read_dir(disk.path().join("made")).unwrap().count(), 0);
    }
}

#[test]
fn optimizer_state_on_disk_is_in_the_file_of_the_rank_and_in_no_ledgers_memory() {
    let disk = Folder::new();
    let path = disk.path().join("optimizer-state-rank0.bin");
    let config = Config {
        device: Device::Cpu(80),
        offload: Offload::Optimizer,
        offload_dir: Some(disk.path().into()),
        ..config(Layout::default(), 0)
    };
    let [training, _] = data();
    let told = Told::default();
    let seen = Arc::new(Mutex::new((0, 0)));
    let (sizes, file) = (seen.clone(), path.clone());
    Trainer::new(Config { validate_every: 0, ..config })
        .data(training)
        .callback(told)
        .every(6, move |_| {
            let on_disk = Device::Cpu(80 + 512).ledger()?.on_disk().now;
            *sizes.lock().unwrap() = (std::fs::metadata(&file).unwrap().len() as usize, on_disk);
            Ok(None)
        })
        .run_layers(layers, loss)
        .unwrap();
    let (length, on_disk) = *seen.lock().unwrap();
    let weights = peak(Device::Cpu(80), Category::Parameters);
    // The state of each parameter begins at a page of the file.
    assert!(on_disk == 2 * weights && length >= on_disk && length.is_multiple_of(4096), "{on_disk} {length}");
    let hosts = [80, 80 + 512].map(|i| peak(Device::Cpu(i), Category::OptimizerState));
    assert_eq!(hosts, [0, 0]);
    assert!(!path.exists());
}

/// What a run says whose folder for optimizer state is on a full disk: a file system of one page, in a process of its own.
#[test]
fn a_full_disk_or_a_folder_that_cannot_be_made_is_one_error() {
    const FULL: &str = "PHALANX_TEST_FULL_DISK";
    let on_disk = |folder: &Path| Config {
        offload: Offload::Optimizer,
        offload_dir: Some(folder.to_path_buf()),
        ..config(Layout::default(), 0)
    };
    if let Some(folder) = std::env::var_os(FULL) {
        let error = run(on_disk(Path::new(&folder)), &Told::default()).unwrap_err().to_string();
        assert!(error.contains("optimizer-state-rank0.bin: has no room for"), "{error}");
        assert!(error.contains("of tensors") && error.contains("space"), "{error}");
        println!("told of the full disk");
        return;
    }
    let folder = Folder::new();
    std::fs::create_dir_all(folder.path()).unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = run(on_disk(&file.join("folder")), &Told::default()).unwrap_err().to_string();
    assert!(error.contains("`offload-dir`") && error.contains("file/folder"), "{error}");
    let script = "mount -t tmpfs -o size=8k none \"$1\" && exec \"$2\" --exact --nocapture \"$3\"";
    let name = "offload::a_full_disk_or_a_folder_that_cannot_be_made_is_one_error";
    let output = std::process::Command::new("unshare")
        .args(["-rm", "sh", "-c", script, "sh"])
        .args([folder.path(), &std::env::current_exe().unwrap(), Path::new(name)])
        .env(FULL, folder.path())
        .output();
    match output {
        Ok(output) if output.status.success() => {
            assert!(String::from_utf8_lossy(&output.stdout).contains("told of the full disk"));
        }
        Ok(output) if String::from_utf8_lossy(&output.stdout).contains("running") => {
            panic!("{}", String::from_utf8_lossy(&[output.stdout, output.stderr].concat()))
        }
        _ => println!("a full disk was not tried: this system lets no process mount a small one"),
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

#[test]
fn the_memory_of_a_run_on_a_meta_device_says_what_the_host_holds() {
    let disk = Folder::new();
    let report = |device: u16, offload, offload_dir, offload_activations| {
        let layout = Layout { recompute: RecomputeMode::Always, ..Layout::default() };
        let zero = if offload == Offload::Parameters { 3 } else { 0 };
        let device = Device::Meta(device);
        let config = Config {
            device,
            offload,
            offload_dir,
            offload_activations,
            validate_every: 0,
            ..config(layout.clone(), zero)
        };
        let model = ModelConfig::Gpt(GptConfig::new(101, 32, 2, 2, 64));
        let part = |rank: &MeshRank| {
            Ok(Chunks::build(&model, &Arc::new(OneDevice), &rank.scope(&config), &layout.schedule()?, 0)?)
        };
        let tokens = TokenWindows::new(vec![0; 400], 32, 1).unwrap();
        let text = Trainer::new(config.clone()).samples(tokens, 32).memory(part).unwrap().remove(0);
        // The first number of each row, in the parts of the report.
        move |row: &str| -> Vec<usize> {
            let rows = text.lines().filter_map(|line| line.trim_start().strip_prefix(row));
            rows.filter_map(|rest| rest.split_whitespace().next()?.parse().ok()).collect()
        }
    };
    let plain = report(90, Offload::None, None, false);
    let [state, weights] = ["optimizer state", "parameters"].map(|row| plain(row)[0]);
    assert!(plain("in files").is_empty() && state == 2 * weights);
    let optimizer = report(91, Offload::Optimizer, None, false);
    assert_eq!(optimizer("optimizer state"), [0, 0, state]);
    let all = report(92, Offload::Parameters, Some(disk.path().into()), true);
    assert_eq!((all("optimizer state"), all("in files")), (vec![0, 0, 0], vec![state]));
    assert_eq!(all("parameters")[1..], [0, weights]);
    let [.., host] = all("activations")[..] else { unreachable!("three parts") };
    // The inputs of two blocks are 16 x 32 x 64 values each.
    assert!(host >= 2 * 16 * 32 * 64 * 4, "{host}");
}

/// Lamb trains matrices by numbers of the whole parameter, which ranks exchange.
#[test]
fn a_rule_of_whole_parameters_on_disk_has_the_bits_of_memory() {
    let train = |offload, offload_dir| {
        let [training, held_out] = data();
        let told = Told::default();
        let config = Config { offload, offload_dir, ..config(Layout { dp: 2, ..Layout::default() }, 3) };
        let trainer = Trainer::new(config).data(training).validation(held_out).callback(told.clone());
        trainer.optimizers(|parameters, lr| lamb(parameters, lr, 0.1)).run_layers(layers, loss).unwrap();
        (told.losses(), told.validations())
    };
    let (wanted, disk) = (train(Offload::None, None), Folder::new());
    assert!(train(Offload::Parameters, Some(disk.path().into())) == wanted);
    assert_eq!(wanted.0.len(), 12);
}
