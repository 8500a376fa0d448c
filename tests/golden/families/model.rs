//! Whole models out of Hugging Face folders: scores, loss, gradients, a few steps of training.

use phalanx::nn::models::{Decoder, ModelConfig, load_model, next_token_targets};
use phalanx::nn::{AdamW, Group, Parameters, Rule, Scope};
use phalanx::{DType, Device, Tensor, Var};
use serde_json::Value;

use crate::case::{Attrs, Case, Set, compare};

type Checked = Result<(), String>;

/// The model family.
pub fn run(set: &Set, case: &Case) -> Option<Checked> {
    matches!(case.op.as_str(), "model:gpt2" | "model:llama").then(|| check(set, case))
}

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(set: &Set, case: &Case) -> Checked {
    let attrs = Attrs::new(&case.attrs);
    let folder = set.folder.join(attrs.str_or("dir", ""));
    let (config, model) = load_model(folder, &Scope::new(0, DType::F32, set.device)).map_err(said)?;
    let train = attrs.get("train").ok_or("no training")?;
    let prefixes = [attrs.str_or("grad_prefix", "grad."), attrs.str_or("final_prefix", "final.")];
    let losses = attrs.str_or("losses", "losses");
    let (tokens, labels) = (set.tensor(case, "input_ids")?, set.tensor(case, "labels")?);
    let tokens = Var::new(tokens);

    let x = model.forward(&tokens).map_err(said)?;
    let logits = model.logits(&x).map_err(said)?;
    compare("logits", logits.tensor(), &set.tensor(case, "logits")?, case.rtol, case.atol)?;
    let loss = loss(&model, &tokens, &labels)?;
    compare("loss", loss.tensor(), &set.tensor(case, "loss")?, case.rtol, case.atol)?;
    loss.backward().map_err(said)?;
    for parameter in model.parameters() {
        let (name, grad) = (parameter.name(), parameter.grad().map_err(said)?.ok_or("no gradient")?);
        check_parameter(
            set,
            case,
            &config,
            &format!("{}{name}", prefixes[0]),
            name,
            &grad,
            [case.rtol, case.atol],
        )?;
    }
    training(set, case, (&config, &model), train, (&tokens, &labels), [losses, prefixes[1]])
}

fn loss(model: &Decoder, tokens: &Var, labels: &Tensor) -> Result<Var, String> {
    let (targets, counted) = next_token_targets(labels).map_err(said)?;
    let x = model.forward(tokens).map_err(said)?;
    model.loss(&x, &Var::new(targets), 1.0 / counted as f64).map_err(said)
}

fn training(
    set: &Set,
    case: &Case,
    (config, model): (&ModelConfig, &Decoder),
    train: &Value,
    (tokens, labels): (&Var, &Tensor),
    [losses, prefix]: [&str; 2],
) -> Checked {
    let number = |name: &str| train[name].as_f64().ok_or(format!("no train.{name}"));
    let beta = |i: usize| train["betas"][i].as_f64().ok_or("no betas");
    let group = Group::new(model.parameters(), number("lr")?).with_weight_decay(number("weight_decay")?);
    let adam = AdamW::default().with_betas(beta(0)?, beta(1)?).with_eps(number("eps")?);
    let mut optimizer = adam.init(vec![group]).map_err(said)?;
    let mut seen = Vec::new();
    for _ in 0..number("steps")? as usize {
        optimizer.zero_grad().map_err(said)?;
        let loss = loss(model, tokens, labels)?;
        seen.push(loss.item::<f32>().map_err(said)?);
        loss.backward().map_err(said)?;
        optimizer.step().map_err(said)?;
    }
    let tolerance = [number("rtol")?, number("atol")?];
    let seen = Tensor::from_slice(&seen, &[seen.len()], Device::CPU).map_err(said)?;
    compare("losses", &seen, &set.tensor(case, losses)?, tolerance[0], tolerance[1])?;
    for parameter in model.parameters() {
        let name = parameter.name();
        check_parameter(set, case, config, &format!("{prefix}{name}"), name, &parameter.tensor(), tolerance)?;
    }
    Ok(())
}

/// Compares with the stored tensor, which has the file's name and layout.
fn check_parameter(
    set: &Set,
    case: &Case,
    config: &ModelConfig,
    what: &str,
    name: &str,
    got: &Tensor,
    [rtol, atol]: [f64; 2],
) -> Checked {
    let (family, turned) = match config {
        ModelConfig::Gpt(_) => (
            "transformer.",
            ["c_attn.weight", "c_proj.weight", "c_fc.weight"].iter().any(|m| name.ends_with(m)),
        ),
        _ => ("model.", false),
    };
    let family = if name.starts_with("lm_head") { "" } else { family };
    let key = what.replace(name, &format!("{family}{name}"));
    let got = if turned { got.transpose(0, 1).map_err(said)? } else { got.clone() };
    compare(what, &got, &set.tensor(case, &key)?, rtol, atol)
}
