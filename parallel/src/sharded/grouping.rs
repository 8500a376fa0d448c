//! Which parameters are gathered together, and which of them can lie in one buffer.

use std::collections::BTreeMap;

use phalanx_nn::{Parameter, Parameters};
use phalanx_tensor::{DType, Device};

use super::Stage;

/// Parameters that are gathered together, and the first and last of the units that use them.
pub(super) type Grouped = (Vec<Parameter>, Option<(usize, usize)>);

/// The groups of a model, in the order of their first units, that of no unit, the root, in front; and each unit's group.
pub(super) fn group(model: &(impl Parameters + ?Sized)) -> (Vec<Grouped>, Vec<usize>) {
    let mut used: Vec<Vec<Parameter>> = Vec::new();
    model.visit_units(&mut |unit| used.push([unit.parameters(), unit.borrowed()].concat()));
    // Units that share a parameter are one group, which has the number of its first unit.
    let mut units: Vec<usize> = (0..used.len()).collect();
    for (a, b) in (0..used.len()).flat_map(|a| (a + 1..used.len()).map(move |b| (a, b))) {
        if used[a].iter().any(|p| used[b].iter().any(|q| p.is(q))) {
            let (from, to) = (units[a].max(units[b]), units[a].min(units[b]));
            units.iter_mut().filter(|unit| **unit == from).for_each(|unit| *unit = to);
        }
    }
    let mut groups: Vec<Grouped> = vec![(Vec::new(), None)];
    let mut numbers: BTreeMap<usize, usize> = BTreeMap::new();
    for (unit, group) in units.iter_mut().enumerate() {
        let number = *numbers.entry(*group).or_insert(groups.len());
        match groups.get_mut(number) {
            Some((_, bounds)) => *bounds = bounds.map(|(first, _)| (first, unit)),
            None => groups.push((Vec::new(), Some((unit, unit)))),
        }
        *group = number;
    }
    for parameter in model.parameters() {
        let unit = used.iter().position(|used| used.iter().any(|p| p.is(&parameter)));
        groups[unit.map_or(0, |unit| units[unit])].0.push(parameter);
    }
    (groups, units)
}

/// A group's parameters in sets that can lie in one buffer. Frozen ones are spread only where parameters are.
pub(super) fn runs(parameters: Vec<Parameter>, stage: Stage) -> Vec<Vec<Parameter>> {
    let mut sets: Vec<((DType, Device, bool), Vec<Parameter>)> = Vec::new();
    let spread = |p: &Parameter| p.is_trained() || stage == Stage::Parameters;
    for parameter in parameters.into_iter().filter(spread) {
        let kind = (parameter.dtype(), parameter.device(), parameter.is_trained());
        match sets.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, set)) => set.push(parameter),
            None => sets.push((kind, vec![parameter])),
        }
    }
    sets.into_iter().map(|(_, set)| set).collect()
}
