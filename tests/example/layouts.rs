//! Layout equality: a GPT of four blocks over the workspace's own text, dropout on, clipping active, under every number of
//! ranks and every ZeRO stage.

use std::fs;

use super::{Folder, gpt};

const STEPS: usize = 20;
const RUN: [&str; 20] = [
    "train",
    "--layers",
    "4",
    "--heads",
    "4",
    "--width",
    "64",
    "--context",
    "32",
    "--batch",
    "24",
    "--dropout",
    "0.1",
    "--clip",
    "0.5",
    "--lr",
    "3e-3",
    "--warmup",
    "4",
    "--quiet",
];

/// Losses and norms as printed, and the final model's bytes.
#[derive(PartialEq)]
struct Trained {
    steps: Vec<[f64; 2]>,
    model: Vec<u8>,
}

fn run(args: &[&str], more: &[&str]) {
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/ARCHITECTURE.md");
    let output = gpt(&[&RUN[..], &["--data", data, "--threads", "1"], args, more].concat());
    assert!(output.status.success(), "{more:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn train(folder: &Folder, more: &[&str]) -> Trained {
    let out = folder.path("out");
    run(&["--steps", "20", "--out", &out], more);
    let lines = fs::read_to_string(format!("{out}/metrics.jsonl")).expect("metrics");
    let number = |record: &serde_json::Value, key: &str| record[key].as_f64();
    let step = |line: &str| {
        let record: serde_json::Value = serde_json::from_str(line).ok()?;
        Some([number(&record, "loss")?, number(&record, "grad_norm")?])
    };
    let steps: Vec<[f64; 2]> = lines.lines().filter_map(step).collect();
    let model = fs::read(format!("{out}/model/model.safetensors")).expect("a model");
    fs::remove_dir_all(out).expect("a folder");
    assert_eq!(steps.len(), STEPS, "{more:?}");
    Trained { steps, model }
}

fn same(got: &Trained, wanted: &Trained, layout: &[&str]) {
    assert_eq!(got.steps, wanted.steps, "{layout:?}: losses and norms");
    assert!(got.model == wanted.model, "{layout:?}: final parameters");
}

/// Every stage on `ranks` ranks with `micros` micro-batches each, against one rank that adds in the same order.
fn check(folder: &Folder, ranks: usize, micros: usize, more: &[&str]) {
    let [d, m, all] = [ranks, micros, ranks * micros].map(|n| n.to_string());
    let mut alone = vec!["--micro-batches", &all, "--emulate-dp", &d];
    if micros == 1 {
        // Ranks and the micro-batches of one chain are added in the same order.
        alone.truncate(2);
    }
    let wanted = train(folder, &[&alone, more].concat());
    assert!(wanted.steps.iter().filter(|[_, norm]| *norm > 0.5).count() > STEPS / 2, "clipping has to act");
    for zero in ["0", "1", "2", "3"] {
        let layout = [&["--dp", &d, "--micro-batches", &m, "--zero", zero], more].concat();
        same(&train(folder, &layout), &wanted, &layout);
    }
}

#[test]
fn every_layout_has_the_bits_of_one_rank() {
    let folder = Folder::new("layouts");
    for ranks in [1, 2, 3, 4, 8] {
        check(&folder, ranks, 1, &[]);
    }
    check(&folder, 2, 2, &[]);
    check(&folder, 3, 2, &["--recompute", "always"]);
    check(&folder, 2, 1, &["--dtype", "bf16"]);
    check(&folder, 4, 2, &["--dtype", "bf16"]);
    for optimizer in ["muon", "lamb", "adafactor"] {
        check(&folder, 3, 1, &["--optimizer", optimizer]);
    }
}

#[test]
fn pipelines_and_cut_layers_train_the_same_model() {
    let folder = Folder::new("layouts-all");
    let chain = train(&folder, &["--micro-batches", "4"]);
    let chains = train(&folder, &["--micro-batches", "6", "--emulate-dp", "2"]);
    for (layout, wanted) in [
        ("--pp 2 --micro-batches 4 --schedule gpipe", &chain),
        ("--pp 3 --micro-batches 4 --schedule 1f1b --recompute always", &chain),
        ("--pp 2 --virtual-stages 3 --micro-batches 4 --schedule interleaved", &chain),
        ("--pp 3 --micro-batches 4 --schedule zb-h1 --recompute except-last", &chain),
        ("--pp 2 --dp 2 --micro-batches 3 --schedule zb-v --zero 3", &chains),
        ("--pp 2 --dp 2 --micro-batches 3 --zero 1", &chains),
        ("--pp 2 --dp 2 --micro-batches 3 --zero 0", &chains),
    ] {
        let layout: Vec<&str> = layout.split(' ').collect();
        same(&train(&folder, &layout), wanted, &layout);
    }
    for layout in
        ["--tp 2 --micro-batches 4", "--tp 2 --dp 2 --pp 2 --micro-batches 3 --sequence-parallel --zero 2"]
    {
        let layout: Vec<&str> = layout.split(' ').collect();
        let wanted = if layout.contains(&"--dp") { &chains } else { &chain };
        for ([loss, _], [wanted, _]) in train(&folder, &layout).steps.iter().zip(&wanted.steps) {
            assert!((loss / wanted - 1.0).abs() < 1e-5, "{layout:?}: {loss}, wanted {wanted}");
        }
    }
}

#[test]
fn gradients_in_bf16_come_near() {
    let folder = Folder::new("layouts-bf16");
    let wanted = train(&folder, &[]);
    for zero in ["0", "3"] {
        let got = train(&folder, &["--dp", "2", "--zero", zero, "--grad-dtype", "bf16"]);
        for ([loss, _], [wanted, _]) in got.steps.iter().zip(&wanted.steps) {
            assert!((loss / wanted - 1.0).abs() < 5e-3, "--zero {zero}: {loss}, wanted {wanted}");
        }
    }
}

#[test]
fn a_run_goes_on_under_another_layout() {
    let folder = Folder::new("layouts-resume");
    let [whole, half, out] = ["whole", "half", "out"].map(|name| folder.path(name));
    let constant = ["--lr-schedule", "constant"];
    let model = |out: &str| fs::read(format!("{out}/model/model.safetensors")).expect("a file");
    run(&["--steps", "8", "--micro-batches", "4", "--emulate-dp", "4", "--out", &whole], &constant);
    run(&["--steps", "4", "--dp", "4", "--zero", "3", "--out", &half], &constant);
    for layout in [
        &["--dp", "4", "--zero", "0"][..],
        &["--dp", "4", "--zero", "2"],
        &["--dp", "1", "--zero", "3", "--micro-batches", "4"],
        &["--micro-batches", "4", "--emulate-dp", "4"],
        &["--pp", "2", "--dp", "4", "--zero", "2", "--schedule", "zb-h1"],
    ] {
        run(&["--steps", "8", "--resume", &half, "--out", &out], &[layout, &constant].concat());
        assert!(model(&out) == model(&whole), "{layout:?}");
        fs::remove_dir_all(&out).expect("a folder");
    }
}

#[test]
fn pipelines_without_flushes_train_go_on_and_are_plain_training_on_one_rank() {
    let folder = Folder::new("layouts-asynchronous");
    let wanted = train(&folder, &[]);
    let split = |layout: &'static str| -> Vec<&str> { layout.split(' ').collect() };
    let one = split("--pp 1 --schedule pipedream");
    same(&train(&folder, &one), &wanted, &one);
    let layout = split("--pp 3 --schedule pipedream-2bw --micro-batches 4 --recompute always");
    let got = train(&folder, &layout);
    assert!((got.steps[0][0] / wanted.steps[0][0] - 1.0).abs() < 1e-5, "the first weights");
    assert!(got.steps[2..] != wanted.steps[2..], "gradients are of older weights");
    assert!(got.steps[STEPS - 1][0] < got.steps[0][0] - 0.3, "{:?}", got.steps);
    // A save flushes the pipeline, whether or not the run ends there.
    let [whole, half, out] = ["whole", "half", "out"].map(|name| folder.path(name));
    let layout = split("--pp 2 --schedule pipedream --lr-schedule constant --save-every 4");
    let model = |out: &str| fs::read(format!("{out}/model/model.safetensors")).expect("a file");
    run(&["--steps", "7", "--out", &whole], &layout);
    run(&["--steps", "4", "--out", &half], &layout);
    run(&["--steps", "7", "--resume", &half, "--out", &out], &layout);
    assert!(model(&out) == model(&whole), "resumed");
}
