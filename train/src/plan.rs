//! Plans of pipelines as files: [`plan_layers`] measures a model and writes one, and [`Config::plan`](crate::Config::plan) names one
//! that a run follows.
//!
//! ```toml
//! [[stage]]
//! layers = 3      # how many, after those of the stage before
//! replicas = 2    # ranks that take micro-batches in turn
//! ```

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
/// [links](Config::links) as the text of a file, with the measured numbers as comments.
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
/// assert!(text.contains("[[stage]]\nlayers = "), "{text}");
/// # Ok::<(), phalanx_train::Error>(())
/// ```
///
/// # Errors
/// If the links are not those of the ranks, or as [`profile`] and [`plan`].
pub fn plan_layers(config: &Config, layers: &Sequence, sample: &Var) -> Result<String> {
    let levels = match config.links.as_deref() {
        Some(text) => links(text).ok_or_else(|| wrong(format!("`links` is {text}, wanted {LINKS}")))?,
        None => vec![Level { width: config.ranks(), bandwidth: BANDWIDTH }],
    };
    let width: usize = levels.iter().map(|level| level.width).product();
    if width != config.ranks() {
        return Err(wrong(format!("`links` are of {width} ranks, and there are {}", config.ranks())));
    }
    let measured = profile(layers, sample, BUDGET)?;
    let planned = plan(&measured, &levels)?;
    let text = to_text(&StagePlan::from(&planned), &measured);
    Ok(format!(
        "# One micro-batch every {:.3} ms, if measured times and links hold.\n{text}",
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
        let _ = writeln!(text, "\n[[stage]]\nlayers = {}\nreplicas = {replicas}", layers.len());
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
/// If the file cannot be read, or is no plan.
pub(crate) fn read(path: &Path) -> Result<StagePlan> {
    let at = |why: String| Error::data(path.display().to_string(), why);
    let text = std::fs::read_to_string(path).map_err(|e| at(e.to_string()))?;
    let table: Table = text.parse().map_err(|e: toml::de::Error| at(e.to_string()))?;
    let wanted = "wanted [[stage]] tables with `layers` and `replicas`, whole numbers from 1 up";
    let stages = match (table.len(), table.get("stage")) {
        (1, Some(Value::Array(stages))) => stages,
        _ => {
            let keys: Vec<&String> = table.keys().collect();
            return Err(at(format!("got keys {keys:?}, {wanted}")));
        }
    };
    let mut end = 0_usize;
    let stage = |(i, stage): (usize, &Value)| {
        let number = |key: &str| {
            let number = usize::try_from(stage.get(key)?.as_integer()?).ok()?;
            (number > 0).then_some(number)
        };
        let known = stage.as_table().is_some_and(|table| table.len() == 2);
        let (Some(layers), Some(replicas), true) = (number("layers"), number("replicas"), known) else {
            return Err(at(format!("stage {i} is {stage:?}, {wanted}")));
        };
        let start = end;
        end = start.checked_add(layers).ok_or_else(|| at(format!("stage {i} has {layers} layers")))?;
        Ok(StageReplicas { layers: start..end, replicas })
    };
    let stages = stages.iter().enumerate().map(stage).collect::<Result<Vec<_>>>()?;
    Ok(StagePlan::new(stages)?)
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
        assert!(text.contains("# layer 4: 1.000 ms, 4 bytes of output, 8 of parameters"), "{text}");
        assert_eq!(read_text(&text).unwrap(), plan);
    }

    #[test]
    fn what_is_no_plan_is_refused_with_its_place() {
        let error = |text: &str| read_text(text).unwrap_err().to_string();
        assert!(error("stages = 2").contains("got keys [\"stages\"], wanted [[stage]] tables"));
        assert!(error("[[stage]]\nlayers = 0\nreplicas = 1").contains("stage 0 is"));
        assert!(error("[[stage]]\nlayers = 1\nreplicas = 1\nrank = 0").contains("stage 0 is"));
        assert!(error("[[stage").contains("phalanx-plan"));
        assert!(error("stage = []").contains("got no stage"));
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
