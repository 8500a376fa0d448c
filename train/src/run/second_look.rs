//! [`cause_of_divergence`]: computes the gradients of a diverged step once more, with the weights that it had, to say which rank,
//! micro-batch and parameter its numbers come from.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use phalanx_kernels as kernels;
use phalanx_nn::{Batch, Parameter};
use phalanx_parallel::all_gather_object;
use phalanx_parallel::mesh::Axis;
use phalanx_tensor::{Tensor, unpoisoned};
use serde::{Deserialize, Serialize};

use super::step::{StepOptions, forward_backward, loss_value, training_context};
use crate::Result;
use crate::run::Run;

/// Names that a message lists.
const LISTED: usize = 3;

/// What a rank finds. Micro-batches are known by their first row in the global batch, which no two replicas share.
#[derive(Serialize, Deserialize)]
struct Findings {
    /// The pipeline's rank.
    stage: usize,
    /// The first tensor of the batch that is not finite, and the first row of its micro-batch.
    batch: Option<(usize, usize)>,
    /// Parameters whose values are not finite.
    values: Vec<String>,
    /// Each micro-batch's number, first row and loss (its bits).
    losses: Vec<(usize, usize, u64)>,
    /// Gradients that are not finite: the number and the first row of the first micro-batch that has one, and the parameter's number and
    /// name.
    gradients: Vec<(usize, usize, usize, String)>,
    /// The bits of the largest sum of a gradient's squares, and the parameter's name. The bits of numbers that are not negative are in the
    /// numbers' order.
    largest: Option<(u64, String)>,
}

/// Says where the numbers of a diverged step come from, as the end of a sentence. The parameters must have the values that they had in the
/// step. Their gradients are zeroed. All ranks call it.
pub(crate) fn cause_of_divergence(run: &Run, micros: &[Batch], step: u64, scale: f64) -> Result<String> {
    let watch = |_: &'static str, _| {};
    let options = StepOptions { scale, ..run.setup.step_options(run.counted_in(step), &watch) };
    let own = findings(run, micros, options, step)?;
    run.setup.data_parallel.zero_grad()?;
    Ok(text(&all_gather_object(run.mesh_rank.all_ranks(), &own)?))
}

fn findings(run: &Run, micros: &[Batch], options: StepOptions<'_>, step: u64) -> Result<Findings> {
    let parameters = run.model.parameters();
    let mut values = Vec::new();
    for parameter in &parameters {
        if !all_finite(&parameter.tensor())? {
            values.push(parameter.name().to_string());
        }
    }
    let mut batch = None;
    for micro in micros.iter().rev() {
        for (index, tensor) in micro.tensors.iter().enumerate().rev() {
            if !all_finite(tensor)? {
                batch = Some((index, micro.first_row));
            }
        }
    }
    let (losses, calls) = passes(run, &parameters, micros, options, step)?;
    let first_row = |number: usize| micros.get(number).map_or(0, |micro| micro.first_row);
    let mut own = Vec::new();
    if run.mesh_rank.counts_loss() {
        for (number, (loss, micro)) in losses.iter().zip(micros).enumerate() {
            let rows = micro.tensors.first().map_or(1, |tensor| tensor.shape().first().copied().unwrap_or(1));
            let counted = run.counted(step, micro.first_row..micro.first_row + rows);
            let share = counted as f64 / options.counted as f64;
            own.push((number, micro.first_row, (loss_value(loss)? / options.scale / share).to_bits()));
        }
    }
    let gradients = calls.into_iter().zip(&parameters).enumerate();
    let gradients = gradients.filter_map(|(index, (calls, parameter))| {
        let number = calls.odd?;
        Some((number, first_row(number), index, parameter.name().to_string()))
    });
    let squares = options.data_parallel.grad_squares()?;
    let sums = squares.sums.to_vec::<f64>()?.into_iter().zip(&squares.of);
    let largest = sums.map(|(sum, square)| (sum.to_bits(), square.name.clone())).max();
    Ok(Findings {
        stage: run.mesh_rank.groups.along(Axis::Pp).rank(),
        batch,
        values,
        losses: own,
        gradients: gradients.collect(),
        largest,
    })
}

/// The gradients of a parameter that passes have made so far. A backward pass of a micro-batch makes one at each of its sites, and
/// micro-batches come in order.
#[derive(Clone, Copy, Default)]
struct Calls {
    number: usize,
    /// The number of the first gradient that is not finite.
    odd: Option<usize>,
}

/// The passes of the step. Returns the losses of the micro-batches, on a rank with the last stage, and what each parameter's gradients were
/// before ranks added theirs.
fn passes(
    run: &Run,
    parameters: &[Parameter],
    micros: &[Batch],
    options: StepOptions<'_>,
    step: u64,
) -> Result<(Vec<Tensor>, Vec<Calls>)> {
    let _context = training_context(options.seed, step);
    let leaves: Vec<_> = parameters
        .iter()
        .enumerate()
        .flat_map(|(i, p)| p.leaves().iter().map(move |leaf| (i, leaf)))
        .collect();
    let seen = Arc::new(Mutex::new(vec![Calls::default(); leaves.len()]));
    let mut handles = Vec::new();
    for (at, (_, leaf)) in leaves.iter().enumerate() {
        let seen = seen.clone();
        let hook = leaf.var().on_grad(move |grad| {
            let finite = all_finite(grad.tensor()).unwrap_or(true);
            let calls = &mut unpoisoned(seen.lock())[at];
            calls.odd = calls.odd.or((!finite).then_some(calls.number));
            calls.number += 1;
            Ok(None)
        });
        handles.extend(hook);
    }
    let passes = || {
        let mut losses = Vec::new();
        for chain in micros.chunks(micros.len().div_ceil(options.chains)) {
            options.data_parallel.zero_grad()?;
            losses.extend(forward_backward(&run.model, chain, options)?);
        }
        Ok(losses)
    };
    let losses: Result<Vec<Tensor>> = passes();
    handles.iter().for_each(phalanx_nn::autograd::HookHandle::remove);
    let mut calls = vec![Calls::default(); parameters.len()];
    for ((index, _), of_leaf) in leaves.iter().zip(unpoisoned(seen.lock()).iter()) {
        let odd = of_leaf.odd.into_iter().chain(calls[*index].odd).min();
        calls[*index] = Calls { number: of_leaf.number, odd };
    }
    Ok((losses?, calls))
}

/// What the ranks have found, from the earliest cause on.
fn text(all: &[Findings]) -> String {
    let mut told = String::new();
    let batch = all.iter().enumerate().filter_map(|(rank, found)| found.batch.map(|batch| (rank, batch)));
    if let Some((rank, (index, row))) = batch.min_by_key(|(_, (_, row))| *row) {
        told += &format!(
            "; tensor {index} of the batch of rank {rank} has numbers that are not finite, in the rows from {row} on"
        );
    }
    if let Some((rank, found)) = all.iter().enumerate().find(|(_, found)| !found.values.is_empty()) {
        told +=
            &format!("; rank {rank}: parameters with values that are not finite: {}", listed(&found.values));
    }
    let losses = all.iter().enumerate().flat_map(|(rank, found)| {
        found.losses.iter().map(move |&(number, row, loss)| (rank, number, row, f64::from_bits(loss)))
    });
    let losses: Vec<_> = losses.collect();
    let odd = losses.iter().filter(|(.., loss)| !loss.is_finite()).min_by_key(|(_, _, row, _)| *row);
    if let Some((rank, number, row, loss)) = odd.or(losses.iter().max_by(|a, b| a.3.total_cmp(&b.3))) {
        let which = if odd.is_some() { "the loss" } else { "the largest loss, that" };
        told += &format!("; {which} of micro-batch {number} of rank {rank} (rows from {row} on) is {loss}");
    }
    match of_gradients(all) {
        Some(gradients) => told + &gradients,
        None => match all.iter().filter_map(|found| found.largest.clone()).max() {
            Some((sum, name)) if !f64::from_bits(sum).is_finite() => {
                told + &format!("; the sum of the gradients of {name} is not finite")
            }
            Some((_, name)) => told + &format!("; the largest gradient is that of {name}"),
            None => told,
        },
    }
}

/// The gradients that are not finite in the first micro-batch that has such.
fn of_gradients(all: &[Findings]) -> Option<String> {
    let found = all.iter().enumerate().flat_map(|(rank, found)| {
        found.gradients.iter().map(move |(number, row, index, name)| {
            ((*row, rank, *number), ((found.stage, *index), name.as_str()))
        })
    });
    let found: Vec<_> = found.collect();
    let (row, rank, number) = found.iter().map(|(place, _)| *place).min()?;
    let here: BTreeSet<_> = found.iter().filter(|((at, ..), _)| *at == row).map(|(_, name)| *name).collect();
    let names: BTreeSet<&str> = here.iter().map(|(_, name)| *name).collect();
    let (first, last) = (here.first()?.1, here.last()?.1);
    let layer = first.rsplit_once('.').map_or("the model", |(layer, _)| layer);
    let to = if first == last { String::new() } else { format!(" to `{last}`") };
    Some(format!(
        "; gradients that are not finite in micro-batch {number} of rank {rank}: {}, from `{first}` (layer `{layer}`){to}",
        names.len()
    ))
}

fn all_finite(tensor: &Tensor) -> phalanx_tensor::Result<bool> {
    if !tensor.dtype().is_float() || tensor.numel() == 0 || tensor.why_withheld().is_some() {
        return Ok(true);
    }
    // x - x is NaN for an infinite x, too.
    Ok(!kernels::any_nan(&kernels::sub(tensor, tensor)?)?)
}

/// The first names, and how many more.
pub(super) fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", names[..names.len().min(LISTED)].join(", "))
}
