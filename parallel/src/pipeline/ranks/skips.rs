//! [`SkipRoute`]: values that pass over stages; which tensors of a boundary a stage uses, and which pass it.
//!
//! ```text
//! boundary       stage 1 (skip a from 0 to 2)         boundary
//! values  ─────> inputs ──> forward ──> outputs ────> values          gradients go the other way
//! a       ──────────────────────────────────────────> a               without autograd: not kept for the backward pass
//! ```
//! A skip travels with the values between neighbouring stages (torchgpipe's portals; there a device sends to a device directly).
//! A rank between holds it from its receive to its send only.

/// A value that stage `from` computes and stage `to` uses, past the stages between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SkipRoute {
    /// The stage that gives it, among its outputs.
    pub from: usize,
    /// The stage that gets it, among its inputs; a later one.
    pub to: usize,
}

impl SkipRoute {
    /// Whether it is sent from `stage` to the next.
    fn leaves(&self, stage: usize) -> bool {
        (self.from..self.to).contains(&stage)
    }
}

/// Divides what a stage has received, which is values and then the skips of that boundary: into its inputs, and what passes it.
pub(super) fn split_inputs<T>(routes: &[SkipRoute], stage: usize, list: Vec<T>) -> (Vec<T>, Vec<T>) {
    let Some(before) = stage.checked_sub(1) else { return (list, Vec::new()) };
    split(routes, before, list, |route| route.to == stage)
}

/// The reverse of [`split_inputs`], for gradients.
pub(super) fn join_inputs<T>(routes: &[SkipRoute], stage: usize, own: Vec<T>, passing: Vec<T>) -> Vec<T> {
    let Some(before) = stage.checked_sub(1) else { return own };
    join(routes, before, own, passing, |route| route.to == stage)
}

/// Puts together what a stage sends: its outputs, which are values and then the skips that begin at it, and what passes it.
pub(super) fn join_outputs<T>(routes: &[SkipRoute], stage: usize, own: Vec<T>, passing: Vec<T>) -> Vec<T> {
    join(routes, stage, own, passing, |route| route.from == stage)
}

/// The reverse of [`join_outputs`], for gradients.
pub(super) fn split_outputs<T>(routes: &[SkipRoute], stage: usize, list: Vec<T>) -> (Vec<T>, Vec<T>) {
    split(routes, stage, list, |route| route.from == stage)
}

/// Divides the list that goes from a stage to the next.
fn split<T>(
    routes: &[SkipRoute],
    stage: usize,
    mut list: Vec<T>,
    is_own: impl Fn(&SkipRoute) -> bool,
) -> (Vec<T>, Vec<T>) {
    let crossing: Vec<&SkipRoute> = routes.iter().filter(|route| route.leaves(stage)).collect();
    let skips = list.split_off(list.len().saturating_sub(crossing.len()));
    let (mut own, mut passing) = (list, Vec::new());
    for (route, skip) in crossing.into_iter().zip(skips) {
        if is_own(route) { own.push(skip) } else { passing.push(skip) }
    }
    (own, passing)
}

/// The reverse of [`split`].
fn join<T>(
    routes: &[SkipRoute],
    stage: usize,
    mut own: Vec<T>,
    passing: Vec<T>,
    is_own: impl Fn(&SkipRoute) -> bool,
) -> Vec<T> {
    let crossing: Vec<&SkipRoute> = routes.iter().filter(|route| route.leaves(stage)).collect();
    let count = crossing.iter().filter(|route| is_own(route)).count();
    let mut begun = own.split_off(own.len().saturating_sub(count)).into_iter();
    let mut passing = passing.into_iter();
    own.extend(
        crossing.into_iter().filter_map(|route| if is_own(route) { begun.next() } else { passing.next() }),
    );
    own
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(from: usize, to: usize) -> SkipRoute {
        SkipRoute { from, to }
    }

    #[test]
    fn a_boundary_has_the_values_and_then_the_skips_that_cross_it() {
        let routes = [route(0, 2), route(1, 3), route(0, 3)];
        assert_eq!(join_outputs(&routes, 0, vec!["x", "a", "c"], vec![]), ["x", "a", "c"]);
        let (own, passing) = split_inputs(&routes, 1, vec!["x", "a", "c"]);
        assert_eq!((&own[..], &passing[..]), (&["x"][..], &["a", "c"][..]));
        assert_eq!(join_outputs(&routes, 1, vec!["y", "b"], passing), ["y", "a", "b", "c"]);
        let (own, passing) = split_inputs(&routes, 2, vec!["y", "a", "b", "c"]);
        assert_eq!((&own[..], &passing[..]), (&["y", "a"][..], &["b", "c"][..]));
        assert_eq!(split_inputs(&routes, 3, vec!["z", "b", "c"]), (vec!["z", "b", "c"], vec![]));
    }

    #[test]
    fn gradients_go_back_by_the_same_places() {
        let routes = [route(0, 2), route(1, 3), route(0, 3)];
        for stage in 1..3 {
            let received: Vec<usize> = (0..if stage == 1 { 3 } else { 4 }).collect();
            let (own, passing) = split_inputs(&routes, stage, received.clone());
            assert_eq!(join_inputs(&routes, stage, own, passing), received);
            let sent: Vec<usize> = (0..if stage == 1 { 4 } else { 3 }).collect();
            let (own, passing) = split_outputs(&routes, stage, sent.clone());
            assert_eq!(join_outputs(&routes, stage, own, passing), sent);
        }
    }
}
