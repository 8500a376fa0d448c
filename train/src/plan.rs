//! Plans of pipelines as files: [`plan_layers`] measures a model and writes one, and [`Config::plan`](crate::Config::plan) names one
//! that a run follows.
//!
//! ```toml
//! [[stage]]
//! layers = 3      # how many, after those of the stage before
//! replicas = 2    # ranks that take micro-batches in turn
//! ```
//! Every stage has both keys, whole numbers from 1 up. The layers of all stages are those of the model, and the replicas are the
//! pipeline's ranks.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use phalanx_nn::Scope;
use phalanx_nn::autograd::Var;
use phalanx_parallel::pipeline::gpipe::Sequence;
use phalanx_parallel::planning::{LayerProfile, Level, StagePlan, StageReplicas, plan, profile};
use phalanx_tensor::{DType, Tensor};
use toml::{Table, Value};

use crate::{Config, Error, Result};

/// How long the layers are measured.
const BUDGET: Duration = Duration::from_secs(2);

/// Bytes a second between ranks if the configuration does not say.
const BANDWIDTH: f64 = 10e9;

/// Measures the layers of a model on `sample`, a micro-batch, and returns PipeDream's plan for the configuration's ranks and
/// [links](Config::links) as the text of a file, with the numbers that it was made from as comments.
///
/// ```
/// use phalanx_nn::{LinearConfig, Scope, Tanh, autograd::Var};
/// use phalanx_nn::tensor::{DType, Device};
/// use phalanx_parallel::pipeline::gpipe::Sequence;
/// use phalanx_train::{Config, Layout, plan_layers};
///
/// let scope = Scope::new(7, DType::F32, Device::CPU);
/// let linear = |name: &str| LinearConfig::new(8, 8).init(&scope.child(name));
/// let layers = Sequence::new().with(linear("0")?).with(Tanh).with(linear("2")?);
/// let config = Config { layout: Layout { dp: 3, ..Layout::default() }, ..Config::default() };
/// let text = plan_layers(&config, &layers, &Var::from_slice(&[0.5f32; 16], &[2, 8], Device::CPU)?)?;
/// assert!(text.contains("\n[[stage]]") && text.contains("\nreplicas = "), "{text}");
/// # Ok::<(), phalanx_train::Error>(())
/// ```
///
/// # Errors
/// If layers are split (`tp`), the links are not those of the ranks, or as [`profile`] and [`plan`].
pub fn plan_layers(config: &Config, layers: &Sequence, sample: &Var) -> Result<String> {
    if config.layout.tp > 1 {
        return Err(wrong(format!(
            "`tp` is {}, and a plan is of layers that are not split; wanted 1",
            config.layout.tp
        )));
    }
    let text = config.links.clone().unwrap_or_else(|| format!("{}x{BANDWIDTH:e}", config.ranks()));
    let levels = links(&text).ok_or_else(|| wrong(format!("`links` is {text}, wanted {LINKS}")))?;
    let width = levels.iter().fold(1_usize, |ranks, level| ranks.saturating_mul(level.width));
    if width != config.ranks() {
        return Err(wrong(format!("`links` {text} are of {width} ranks, and there are {}", config.ranks())));
    }
    let measured = profile(layers, sample, BUDGET)?;
    let planned = plan(&measured, &levels)?;
    let stages = to_text(&StagePlan::from(&planned), &measured);
    let all: f64 = measured.iter().map(|layer| layer.time).sum();
    Ok(format!(
        "# PipeDream's plan for {width} ranks with links {text}.\n\
         # A micro-batch takes {:.3} ms on one rank. By these measurements the pipeline ends one every {:.3} ms.\n{stages}",
        all * 1e3,
        planned.time * 1e3
    ))
}

/// [`plan_layers`] of a language model, on the tokens of a micro-batch of the configuration, `positions` of each row. `layers`
/// builds the layers in a scope, with these tokens as targets ([`decoder_layers`](phalanx_parallel::planning::decoder_layers)).
///
/// # Errors
/// As [`plan_layers`] and `layers`.
pub fn plan_decoder(
    config: &Config,
    positions: usize,
    layers: impl FnOnce(&Scope, &Var) -> Result<Sequence>,
) -> Result<String> {
    let rows = (config.batch / config.layout.micro_batches.max(1)).max(1);
    let tokens = Var::new(Tensor::zeros(&[rows, positions], DType::I64, config.device)?);
    let layers = layers(&Scope::new(config.seed, config.dtype, config.device), &tokens)?;
    plan_layers(config, &layers, &tokens)
}

fn wrong(why: String) -> Error {
    Error::Config(why)
}

/// The form of [`Config::links`].
pub(crate) const LINKS: &str =
    "WIDTHxBYTES_A_SECOND for each level of the network, the lowest first, such as 4x1e11,2x1e9";

/// Reads levels of a network.
pub(crate) fn links(text: &str) -> Option<Vec<Level>> {
    let level = |text: &str| {
        let (width, bandwidth) = text.trim().split_once('x')?;
        let (width, bandwidth) = (width.parse().ok()?, bandwidth.parse::<f64>().ok()?);
        (width > 0 && bandwidth.is_finite() && bandwidth > 0.0).then_some(Level { width, bandwidth })
    };
    text.split(',').map(level).collect()
}

fn to_text(plan: &StagePlan, measured: &[LayerProfile]) -> String {
    let mut text = String::new();
    for StageReplicas { layers, replicas } in plan.stages() {
        let time: f64 = measured[layers.clone()].iter().map(|layer| layer.time).sum();
        let _ = writeln!(text, "\n[[stage]] # {:.3} ms on one rank", time * 1e3);
        let _ = writeln!(text, "layers = {}\nreplicas = {replicas}", layers.len());
        for (number, layer) in layers.clone().zip(&measured[layers.clone()]) {
            let LayerProfile { time, activation_bytes, parameter_bytes } = layer;
            let time = time * 1e3;
            let _ = writeln!(
                text,
                "# layer {number}: {time:.3} ms, {activation_bytes} bytes of output, {parameter_bytes} of parameters"
            );
        }
    }
    text
}

/// Reads a plan.
///
/// # Errors
/// The file, the key, what it is and what was wanted.
pub(crate) fn read(path: &Path) -> Result<StagePlan> {
    let at = |why: String| Error::file(path, why);
    let text = std::fs::read_to_string(path).map_err(|e| at(e.to_string()))?;
    let table: Table =
        text.parse().map_err(|e: toml::de::Error| at(e.to_string().trim().replace('\n', " ")))?;
    let stages = match (table.keys().find(|key| *key != "stage"), table.get("stage")) {
        (Some(key), _) => return Err(at(format!("got a key {key:?}, wanted \"stage\" alone"))),
        (None, Some(Value::Array(stages))) if !stages.is_empty() => stages,
        (None, got) => {
            let got = got.map_or("none".into(), shown);
            return Err(at(format!("got \"stage\" {got}, wanted a table [[stage]] for each stage")));
        }
    };
    let mut end = 0_usize;
    let stage = |(i, stage): (usize, &Value)| {
        let wanted = |got: String, wanted: &str| at(format!("stage {i}: got {got}, wanted {wanted}"));
        let both = "\"layers\" and \"replicas\"";
        let table = stage.as_table().ok_or_else(|| wanted(shown(stage), both))?;
        if let Some(key) = table.keys().find(|key| !["layers", "replicas"].contains(&&key[..])) {
            return Err(wanted(format!("a key {key:?}"), both));
        }
        let number = |key: &str| {
            let value = table.get(key).ok_or_else(|| wanted(format!("no {key:?}"), both))?;
            let number = value.as_integer().and_then(|number| u16::try_from(number).ok());
            let number = number.filter(|number| *number > 0).map(usize::from);
            number
                .ok_or_else(|| wanted(format!("{key:?} {}", shown(value)), "a whole number from 1 to 65535"))
        };
        let (layers, replicas) = (number("layers")?, number("replicas")?);
        end += layers;
        Ok(StageReplicas { layers: end - layers..end, replicas })
    };
    let stages = stages.iter().enumerate().map(stage).collect::<Result<Vec<_>>>()?;
    Ok(StagePlan::new(stages)?.named(path.display().to_string()))
}

/// A value for an error.
fn shown(value: &Value) -> String {
    match value {
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::String(text) => format!("{text:?}"),
        Value::Array(values) => format!("an array of {}", values.len()),
        other => other.type_str().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<StagePlan> {
        let path = std::env::temp_dir().join(format!(
            "phalanx-plan-{}-{:x}",
            std::process::id(),
            crate::digest(text.as_bytes())
        ));
        std::fs::write(&path, text).unwrap();
        let plan = read(&path);
        std::fs::remove_file(&path).unwrap();
        plan
    }

    #[test]
    fn a_plan_reads_back() {
        let stage = |layers, replicas| StageReplicas { layers, replicas };
        let plan = StagePlan::new(vec![stage(0..1, 2), stage(1..4, 1), stage(4..6, 3)]).unwrap();
        let layer = LayerProfile { time: 1e-3, activation_bytes: 4.0, parameter_bytes: 8.0 };
        let text = to_text(&plan, &[layer; 6]);
        assert!(text.contains("[[stage]] # 3.000 ms on one rank\nlayers = 3\nreplicas = 1"), "{text}");
        assert!(text.contains("# layer 4: 1.000 ms, 4 bytes of output, 8 of parameters"), "{text}");
        assert_eq!(read_text(&text).unwrap().stages(), plan.stages());
    }

    #[test]
    fn what_is_no_plan_is_refused_with_file_and_key() {
        let good = "[[stage]]\nlayers = 2\nreplicas = 1\n";
        for (text, wanted) in [
            ("stages = 2".into(), "got a key \"stages\", wanted \"stage\" alone"),
            (format!("ranks = 3\n{good}"), "got a key \"ranks\", wanted \"stage\" alone"),
            (String::new(), "got \"stage\" none, wanted a table [[stage]]"),
            ("stage = []".into(), "got \"stage\" an array of 0, wanted a table [[stage]]"),
            ("stage = 3".into(), "got \"stage\" 3, wanted a table [[stage]]"),
            ("stage = [3]".into(), "stage 0: got 3, wanted \"layers\" and \"replicas\""),
            (
                format!("{good}[[stage]]\nlayers = 0\nreplicas = 1"),
                "stage 1: got \"layers\" 0, wanted a whole number from 1",
            ),
            (
                "[[stage]]\nlayers = 1\nreplicas = 0".into(),
                "stage 0: got \"replicas\" 0, wanted a whole number from 1",
            ),
            ("[[stage]]\nlayers = -1\nreplicas = 1".into(), "stage 0: got \"layers\" -1"),
            ("[[stage]]\nlayers = 1\nreplicas = 1.5".into(), "stage 0: got \"replicas\" 1.5"),
            ("[[stage]]\nlayers = \"0..2\"\nreplicas = 1".into(), "stage 0: got \"layers\" \"0..2\""),
            ("[[stage]]\nlayers = 99999999999\nreplicas = 1".into(), "stage 0: got \"layers\" 99999999999"),
            (
                format!("{good}[[stage]]\nlayers = 1"),
                "stage 1: got no \"replicas\", wanted \"layers\" and \"replicas\"",
            ),
            (format!("{good}rank = 0"), "stage 0: got a key \"rank\", wanted \"layers\" and \"replicas\""),
            ("[[stage".into(), "TOML parse error at line 1"),
        ] {
            let error = read_text(&text).unwrap_err().to_string();
            assert!(error.contains("phalanx-plan-") && error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn links_have_a_width_and_a_bandwidth_for_each_level() {
        let level = |width, bandwidth| Level { width, bandwidth };
        assert_eq!(links("4x1e11, 2x1e9").unwrap(), [level(4, 1e11), level(2, 1e9)]);
        for wrong in ["", "4", "0x1", "4x0", "4xinf", "4x1e9,"] {
            assert!(links(wrong).is_none(), "{wrong}");
        }
    }
}
