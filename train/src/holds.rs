//! The layout of a run, and what each rank holds of a model and keeps from step to step.

use phalanx_nn::Parameters;
use phalanx_parallel::mesh::{Axis, Coordinates};
use phalanx_tensor::Category;

use crate::report::{Holds, Layout};
use crate::run::Run;
use crate::{Config, Result};

/// Which rank holds what, if there are several.
pub(crate) fn layout(config: &Config) -> Option<Layout> {
    let (mesh, schedule) = (config.layout.mesh().ok()?, config.layout.schedule().ok()?);
    if config.ranks() == 1 {
        return None;
    }
    let holds = |rank: usize| {
        let Coordinates { tp, dp, pp } = mesh.coordinates(rank);
        let stages: Vec<usize> = schedule.stages_of(pp).collect();
        Holds { rank, data: dp, tensor: tp, pipeline: pp, stages, ..Holds::default() }
    };
    Some(Layout {
        data: mesh.size(Axis::Dp),
        tensor: mesh.size(Axis::Tp),
        pipeline: mesh.size(Axis::Pp),
        zero_stage: config.zero,
        schedule: if schedule.stages() > 1 { config.layout.schedule.clone() } else { String::new() },
        ranks: (0..config.ranks()).map(holds).collect(),
    })
}

/// What this rank holds now.
pub(crate) fn holds(run: &Run) -> Result<Holds> {
    let (place, config) = (&run.place, &run.means.config);
    let Coordinates { tp, dp, pp } = place.groups.at();
    let names: Vec<String> = run.model.parameters().iter().map(|p| p.name().to_string()).collect();
    let elements: usize = run.means.share.parameters().iter().map(|p| p.tensor().numel()).sum();
    let whole: usize = run.model.parameters().iter().map(|p| p.tensor().numel()).sum();
    let ledger = place.device.ledger()?;
    let bytes = |category| ledger.category(category).now as u64;
    Ok(Holds {
        rank: place.rank(),
        data: dp,
        tensor: tp,
        pipeline: pp,
        stages: config.layout.schedule()?.stages_of(pp).collect(),
        holds: collapsed(&names),
        // ZeRO's third stage keeps a share of each parameter.
        parameters: if config.zero == 3 { elements } else { whole } as u64,
        parameters_bytes: bytes(Category::Parameters),
        gradients_bytes: bytes(Category::Gradients),
        optimizer_bytes: bytes(Category::OptimizerState),
        device: place.device.to_string(),
    })
}

/// Parameters' names as a reader wants them: `token_embedding.weight, blocks.0.norm.weight, blocks.1.norm.weight` are `token_embedding, blocks 0-1`.
pub(crate) fn collapsed(names: &[String]) -> String {
    let mut parts: Vec<(String, Vec<u64>)> = Vec::new();
    for name in names {
        let words: Vec<&str> = name.split('.').collect();
        let number = words.iter().position(|word| word.parse::<u64>().is_ok());
        let (part, number) = match number {
            Some(at) => (words[..at].last().copied().unwrap_or("layers"), words[at].parse().ok()),
            None => (words[0], None),
        };
        match parts.iter_mut().find(|(known, _)| known == part) {
            Some((_, numbers)) => numbers.extend(number),
            None => parts.push((part.into(), number.into_iter().collect())),
        }
    }
    let text = |(part, mut numbers): (String, Vec<u64>)| {
        numbers.sort_unstable();
        numbers.dedup();
        if numbers.is_empty() { part } else { format!("{part} {}", ranges(&numbers)) }
    };
    parts.into_iter().map(text).collect::<Vec<_>>().join(", ")
}

/// `0-3, 6` of 0, 1, 2, 3 and 6.
fn ranges(numbers: &[u64]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    let text = |run: &[u64]| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run[0].to_string(),
    };
    runs.map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(names: &[&str]) -> String {
        collapsed(&names.iter().map(|name| name.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn names_are_collapsed_to_parts_and_runs_of_numbers() {
        let names =
            ["embedding.weight", "blocks.0.a.weight", "blocks.0.b.weight", "blocks.1.a.weight", "norm.bias"];
        assert_eq!(of(&names), "embedding, blocks 0-1, norm");
        assert_eq!(of(&["model.layers.2.w", "model.layers.3.w", "model.layers.7.w"]), "layers 2-3, 7");
        assert_eq!(of(&["0.weight", "0.bias", "6.weight"]), "layers 0, 6");
        assert_eq!(of(&["weight"]), "weight");
        assert_eq!(of(&[]), "");
    }
}
