//! `--lora`: adapters of a model's folder under several layouts, their files, and what is refused.

use phalanx::nn::models::{DecoderStage, LoraConfig, load_adapter, load_model, merged, read_config};
use phalanx::nn::{Parameters, Scope};
use phalanx::{DType, Device};

use crate::{Folder, gpt, losses, text};

const LORA: &str = "r=2,alpha=16,targets=q_proj,v_proj,down_proj";

/// A small Llama's folder.
fn base(folder: &Folder) -> String {
    let (data, out) = (folder.file("text.txt", text()), folder.path("base"));
    let sizes = ["--architecture", "llama", "--layers", "2", "--heads", "2", "--width", "16"];
    let rest = ["train", "--quiet", "--context", "16", "--batch", "4", "--steps", "2", "--data", &data];
    let output = gpt(&[&rest[..], &sizes, &["--out", &out]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    format!("{out}/model")
}

fn adapted(folder: &Folder, args: &[&str]) -> std::process::Output {
    let data = folder.path("text.txt");
    let run = ["train", "--quiet", "--context", "16", "--batch", "4", "--lr", "3e-2", "--warmup", "0"];
    gpt(&[&run[..], &["--data", &data, "--lr-schedule", "constant"], args].concat())
}

fn losses_of(folder: &Folder, args: &[&str]) -> Vec<f64> {
    let metrics = folder.path("metrics.jsonl");
    let output = adapted(folder, &[args, &["--metrics", &metrics]].concat());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    losses(&metrics).iter().map(|loss| loss.parse().expect("a number")).collect()
}

#[test]
fn adapters_learn_alike_under_every_layout() {
    let folder = Folder::new("adapters");
    let model = base(&folder);
    let run_of = |lora: &str, steps: &str, more: &[&str]| {
        losses_of(&folder, &[&["--init", &model, "--lora", lora, "--steps", steps], more].concat())
    };
    let run = |more: &[&str]| run_of(LORA, "8", more);
    let wanted = run(&[]);
    // A model of two steps has little to adapt.
    assert!((wanted[6] + wanted[7]) / 2.0 < wanted[0] - 0.03, "{wanted:?}");
    let layouts: [&[&str]; 7] = [
        &["--dp", "2"],
        &["--dp", "2", "--zero", "2"],
        &["--dp", "2", "--zero", "3"],
        &["--tp", "2"],
        &["--pp", "2", "--micro-batches", "2"],
        &["--pp", "4", "--micro-batches", "2"],
        &["--recompute", "always"],
    ];
    for layout in layouts {
        let got = run(layout);
        let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4;
        assert!(
            got.len() == 8 && got.iter().zip(&wanted).all(close),
            "{layout:?}: {got:?}, wanted {wanted:?}"
        );
    }
    // With magnitudes beside weights in 8 bits: the bits of one device, where layers are not split.
    let held = |more: &[&str]| run_of(&format!("{LORA},dora=true,base=int8"), "3", more);
    let wanted = held(&["--micro-batches", "2"]);
    let layouts: [&[&str]; 3] = [
        &["--dp", "2", "--zero", "2"],
        &["--dp", "2", "--zero", "3"],
        &["--pp", "2", "--micro-batches", "2", "--recompute", "always"],
    ];
    for layout in layouts {
        assert_eq!(held(layout), wanted, "{layout:?}");
    }
}

#[test]
fn a_run_leaves_the_merged_model_and_its_adapters_and_resumes() -> phalanx::nn::Result<()> {
    let folder = Folder::new("adapter-files");
    let (model, out) = (base(&folder), folder.path("out"));
    let whole = losses_of(&folder, &["--init", &model, "--lora", LORA, "--steps", "4"]);
    let first =
        losses_of(&folder, &["--init", &model, "--lora", LORA, "--steps", "2", "--out", &out, "--tp", "1"]);
    let rest = losses_of(&folder, &["--resume", &out, "--lora", LORA, "--steps", "4"]);
    assert_eq!([first, rest].concat(), whole);
    let without = adapted(&folder, &["--resume", &out, "--steps", "5"]);
    let said = String::from_utf8_lossy(&without.stderr).into_owned();
    assert!(without.status.code() == Some(2) && said.contains("began with --lora r=2"), "{said}");

    let scope = Scope::new(0, DType::F32, Device::CPU);
    let (config, saved) = load_model(format!("{out}/model"), &scope)?;
    let lora = LoraConfig::read(format!("{out}/model/adapter"))?;
    assert_eq!(lora, LORA.parse()?);
    let again =
        read_config(&model)?.init_stage(&lora.layers()?, &scope, DecoderStage::whole(config.layers()))?;
    phalanx::nn::models::load_weights(&again, &config, &model)?;
    load_adapter(&again, &config, format!("{out}/model/adapter"))?;
    let (_, before) = load_model(&model, &scope)?;
    let mut changed = 0;
    for ((merged, saved), before) in
        merged(&again, &lora)?.into_iter().zip(saved.parameters()).zip(before.parameters())
    {
        assert_eq!(merged.0, saved.name());
        assert!(merged.1.to_bytes()? == saved.tensor().to_bytes()?, "{}", merged.0);
        let is_target = ["q_proj", "v_proj", "down_proj"].iter().any(|target| merged.0.contains(target));
        assert_eq!(saved.tensor().to_bytes()? != before.tensor().to_bytes()?, is_target, "{}", merged.0);
        changed += usize::from(is_target);
    }
    assert_eq!(changed, 6);
    Ok(())
}

#[test]
fn adapters_that_cannot_be_are_refused() {
    let folder = Folder::new("adapter-mistakes");
    let model = base(&folder);
    let int8 = "r=2,base=int8,targets=q_proj";
    let cases: [(&[&str], &[&str]); 8] = [
        (&["--lora", LORA], &["--lora", "--init"]),
        (
            &["--init", &model, "--lora", "r=2,targets=q_proj,qproj"],
            &["no linear layer or embedding is called \"qproj\""],
        ),
        (
            &["--init", &model, "--lora", "r=0,targets=q_proj"],
            &["--lora", "r=8,alpha=16,targets=q_proj,v_proj"],
        ),
        (&["--init", &model, "--lora", "q_proj"], &["--lora", "r=8,alpha=16,targets=q_proj,v_proj"]),
        (&["--init", &model, "--tp", "2", "--lora", "r=2,dropout=0.1,targets=q_proj"], &["dropout"]),
        (&["--init", &model, "--tp", "2", "--lora", int8], &["o_proj.weight", "multiples of 64"]),
        (
            &["--init", &model, "--lora", "r=2,targets=q_proj,modules_to_save=head"],
            &["\"head\"", "tied to embed_tokens.weight"],
        ),
        (
            &["--init", &model, "--lora", "r=2,modules_to_save=,targets=q_proj"],
            &["--lora", "modules_to_save"],
        ),
    ];
    for (args, wanted) in cases {
        let output = adapted(&folder, &[args, &["--steps", "1"]].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let all = wanted.iter().all(|wanted| said.contains(wanted));
        assert!(output.status.code() == Some(2) && all && said.lines().count() == 1, "{args:?}: {said}");
    }
}
