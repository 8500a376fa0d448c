//! Skip connections: values that pass over layers.
//!
//! A layer *stashes* a value and a later layer *pops* it. Between stages the value goes straight to the stage that pops it,
//! past the stages between (torchgpipe, section 3.3, where the carrier is called a portal):
//!
//! ```text
//! stage 0   stash ─────┐ copy stream cpu:0 → cpu:2
//! stage 1   ...        │
//! stage 2   pop   <────┘
//! ```
//! The source's memory is free as soon as the copy is done, and the copy's as soon as the cell that pops it is done with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

use phalanx_nn::autograd::Var;

use super::Partition;
use crate::{Error, Result};

/// Keeps names apart: two U-Nets in one model can both have a skip `1to3`. A copy is the same namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace(usize);

impl Namespace {
    /// A namespace that equals no other.
    #[expect(
        clippy::new_without_default,
        reason = "two calls give different namespaces, which would surprise in a default"
    )]
    pub fn new() -> Namespace {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        Namespace(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// A name in this namespace.
    pub fn skip(self, name: impl Into<String>) -> Skip {
        Skip { namespace: Some(self), name: name.into() }
    }
}

/// A skip connection. It is stashed once and popped once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Skip {
    /// The namespace of the name; `None` is a namespace too.
    pub namespace: Option<Namespace>,
    /// Its name in the namespace.
    pub name: String,
}

impl Skip {
    /// A name without a namespace.
    pub fn new(name: impl Into<String>) -> Skip {
        Skip { namespace: None, name: name.into() }
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.namespace {
            Some(Namespace(number)) => write!(f, "`{}` of namespace {number}", self.name),
            None => write!(f, "`{}`", self.name),
        }
    }
}

/// The skips that a layer stashes and pops. In each forward pass the layer must stash and pop all of these, and no others.
///
/// ```
/// use phalanx_parallel::pipeline::gpipe::{Skip, Skippable};
/// let skippable = Skippable::new().stash(Skip::new("a")).pop(Skip::new("b"));
/// assert_eq!(skippable.to_string(), "stashes `a`, pops `b`");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skippable {
    /// The skips that the layer stashes.
    pub stashes: Vec<Skip>,
    /// The skips that the layer pops.
    pub pops: Vec<Skip>,
}

impl Skippable {
    /// No skips yet.
    pub fn new() -> Skippable {
        Skippable::default()
    }

    /// With one more skip that the layer stashes.
    #[must_use]
    pub fn stash(mut self, skip: Skip) -> Skippable {
        self.stashes.push(skip);
        self
    }

    /// With one more skip that the layer pops.
    #[must_use]
    pub fn pop(mut self, skip: Skip) -> Skippable {
        self.pops.push(skip);
        self
    }
}

impl fmt::Display for Skippable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verbs = [("stashes", &self.stashes), ("pops", &self.pops)];
        let each =
            verbs.into_iter().flat_map(|(verb, skips)| skips.iter().map(move |s| format!("{verb} {s}")));
        f.write_str(&each.collect::<Vec<_>>().join(", "))
    }
}

/// Checks before anything runs that every skip is stashed once and then popped once. `layers` are in order.
///
/// # Errors
/// If a skip is popped before it is stashed, stashed or popped twice, or never popped. The error lists all such skips.
pub fn verify_skips(layers: &[Skippable]) -> Result<()> {
    let (mut stashed, mut popped) = (BTreeSet::<&Skip>::new(), BTreeSet::<&Skip>::new());
    let mut problems = Vec::new();
    for (layer, skippable) in layers.iter().enumerate() {
        let mut problem = |what: &str, skip: &Skip, why: &str| {
            problems.push(format!("layer {layer} {what} {skip}, which {why}"));
        };
        for skip in &skippable.pops {
            if skippable.stashes.contains(skip) {
                problem("pops", skip, "it stashes itself");
            } else if !stashed.contains(skip) {
                problem("pops", skip, "no layer before it stashes");
            }
            if !popped.insert(skip) {
                problem("pops", skip, "was popped before");
            }
        }
        for skip in &skippable.stashes {
            if !stashed.insert(skip) {
                problem("stashes", skip, "was stashed before");
            }
        }
    }
    problems
        .extend(stashed.difference(&popped).map(|skip| format!("no layer pops {skip}, which is stashed")));
    if problems.is_empty() {
        return Ok(());
    }
    Err(Error::Config(format!("gpipe: skip connections do not match: {}", problems.join("; "))))
}

/// A skip from the stage that stashes it to another one that pops it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// The stage that pops it.
    pub to: usize,
    /// The stage that stashes it.
    pub from: usize,
    /// The skip.
    pub skip: Skip,
}

/// The skips that are popped on another stage than stashed, sorted by the stage that pops them, then by the stage that
/// stashes them.
pub fn routes(layers: &[Skippable], partition: &Partition) -> Vec<Route> {
    let popped_in = |skip: &Skip| {
        let layer = layers.iter().position(|layer| layer.pops.contains(skip))?;
        partition.stage(layer)
    };
    let mut routes: Vec<Route> = Vec::new();
    for (layer, skippable) in layers.iter().enumerate() {
        for skip in &skippable.stashes {
            if let (Some(from), Some(to)) = (partition.stage(layer), popped_in(skip))
                && from != to
            {
                routes.push(Route { to, from, skip: skip.clone() });
            }
        }
    }
    routes.sort();
    routes
}

/// The stashed values of one micro-batch. Each layer gets it ([`super::Layer::run`]) to stash and pop its skips.
#[derive(Debug, Default)]
pub struct Skips {
    held: BTreeMap<Skip, Option<Var>>,
    /// The skips that the running layer has still to stash and pop.
    open: Skippable,
    layer: usize,
}

impl Skips {
    /// Keeps a value, or `None`, for the layer that pops it.
    ///
    /// # Errors
    /// If the layer does not declare that it stashes this skip, has stashed it already, or the last value was not popped.
    pub fn stash(&mut self, skip: &Skip, value: impl Into<Option<Var>>) -> Result<()> {
        close(&mut self.open.stashes, skip).ok_or_else(|| {
            self.wrong(format!("stashes {skip}, which it does not declare or has done already"))
        })?;
        match self.held.insert(skip.clone(), value.into()) {
            None => Ok(()),
            Some(_) => {
                Err(self.wrong(format!("stashes {skip}, which no layer has popped since it was stashed")))
            }
        }
    }

    /// Takes the value that was stashed, which may be `None`.
    ///
    /// # Errors
    /// If the layer does not declare that it pops this skip, or it was not stashed.
    pub fn pop(&mut self, skip: &Skip) -> Result<Option<Var>> {
        close(&mut self.open.pops, skip).ok_or_else(|| {
            self.wrong(format!("pops {skip}, which it does not declare or has done already"))
        })?;
        self.take(skip).ok_or_else(|| self.wrong(format!("pops {skip}, which no layer has stashed")))
    }

    /// Keeps a value that another stage has stashed.
    pub(crate) fn hold(&mut self, skip: &Skip, value: Option<Var>) {
        self.held.insert(skip.clone(), value);
    }

    /// Takes a value that another stage pops.
    pub(crate) fn take(&mut self, skip: &Skip) -> Option<Option<Var>> {
        self.held.remove(skip)
    }

    /// Replaces each value by `f` of it.
    pub(crate) fn map(&mut self, f: impl Fn(Var) -> Result<Var>) -> Result<()> {
        self.held.values_mut().flatten().try_for_each(|value| {
            *value = f(value.clone())?;
            Ok(())
        })
    }

    /// Runs a layer, and checks that it stashes and pops the skips that it declares.
    pub(super) fn within<T>(
        &mut self,
        layer: usize,
        declared: Skippable,
        run: impl FnOnce(&mut Skips) -> Result<T>,
    ) -> Result<T> {
        (self.layer, self.open) = (layer, declared);
        let done = run(self)?;
        if self.open == Skippable::default() {
            return Ok(done);
        }
        Err(self.wrong(format!("declares that it {}, but has not", self.open)))
    }

    fn wrong(&self, why: String) -> Error {
        Error::Config(format!("gpipe: layer {} {why}", self.layer))
    }
}

/// Removes a skip from a list, if it is there.
fn close(open: &mut Vec<Skip>, skip: &Skip) -> Option<Skip> {
    let place = open.iter().position(|other| other == skip)?;
    Some(open.swap_remove(place))
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::*;

    #[test]
    fn a_namespace_equals_its_copies_and_no_other() {
        let (a, b) = (Namespace::new(), Namespace::new());
        let copy = a;
        assert_eq!(a, copy);
        assert_ne!(a, b);
        assert_eq!(a.skip("x"), copy.skip("x"));
        assert_ne!(a.skip("x"), b.skip("x"));
        assert_ne!(a.skip("x"), Skip::new("x"));
    }

    fn stash(name: &str) -> Skippable {
        Skippable::new().stash(Skip::new(name))
    }

    fn pop(name: &str) -> Skippable {
        Skippable::new().pop(Skip::new(name))
    }

    fn problem(layers: &[Skippable]) -> String {
        let message = verify_skips(layers).unwrap_err().to_string();
        message.strip_prefix("gpipe: skip connections do not match: ").unwrap().to_string()
    }

    #[test]
    fn each_skip_is_stashed_once_and_then_popped_once() {
        verify_skips(&[]).unwrap();
        verify_skips(&[stash("a"), Skippable::new(), pop("a")]).unwrap();
        assert_eq!(problem(&[stash("a")]), "no layer pops `a`, which is stashed");
        assert_eq!(problem(&[pop("a")]), "layer 0 pops `a`, which no layer before it stashes");
        assert!(problem(&[pop("a"), stash("a")]).starts_with("layer 0 pops `a`, which no layer"));
        assert_eq!(
            problem(&[stash("a"), stash("a"), pop("a")]),
            "layer 1 stashes `a`, which was stashed before"
        );
        assert_eq!(problem(&[stash("a"), pop("a"), pop("a")]), "layer 2 pops `a`, which was popped before");
    }

    #[test]
    fn a_layer_may_stash_and_pop_but_not_the_same() {
        let both = stash("b").pop(Skip::new("a"));
        verify_skips(&[stash("a"), both, pop("b")]).unwrap();
        assert_eq!(problem(&[stash("a").pop(Skip::new("a"))]), "layer 0 pops `a`, which it stashes itself");
    }

    #[test]
    fn a_pair_of_layers_comes_twice_only_in_two_namespaces() {
        let twice = problem(&[stash("a"), pop("a"), stash("a"), pop("a")]);
        assert_eq!(
            twice,
            "layer 2 stashes `a`, which was stashed before; layer 3 pops `a`, which was popped before"
        );
        let (m, n) = (Namespace::new(), Namespace::new());
        let pair = |n: Namespace| [Skippable::new().stash(n.skip("a")), Skippable::new().pop(n.skip("a"))];
        verify_skips(&[pair(m), pair(n)].concat()).unwrap();
    }

    /// To, from and name.
    fn found(layers: &[Skippable], balance: &[usize]) -> Vec<(usize, usize, String)> {
        let devices: Vec<Device> = (0..4).map(Device::Cpu).collect();
        let routes = routes(layers, &Partition::new(balance, &devices).unwrap());
        routes.into_iter().map(|route| (route.to, route.from, route.skip.name)).collect()
    }

    #[test]
    fn what_stays_inside_a_stage_has_no_route() {
        let pass = Skippable::new;
        assert!(found(&[pass(), pass()], &[1, 1]).is_empty());
        assert!(found(&[pass(), stash("a"), pop("a")], &[1, 2]).is_empty());
    }

    #[test]
    fn neighbours_and_far_stages_are_reached_directly() {
        let pass = Skippable::new;
        assert_eq!(found(&[stash("a"), pop("a")], &[1, 1]), [(1, 0, "a".into())]);
        assert_eq!(found(&[stash("a"), pass(), pass(), pop("a")], &[1, 2, 1]), [(2, 0, "a".into())]);
    }

    #[test]
    fn several_come_in_the_order_of_their_sources() {
        let both = Skippable::new().pop(Skip::new("b")).pop(Skip::new("a"));
        let wanted = [(2, 0, "b".into()), (2, 1, "a".into())];
        assert_eq!(found(&[stash("b"), stash("a"), both], &[1, 1, 1]), wanted);
    }

    #[test]
    fn one_name_in_two_namespaces_is_two_skips() {
        let (m, n) = (Namespace::new(), Namespace::new());
        let stash = |n: Namespace| Skippable::new().stash(n.skip("a"));
        let pop = |n: Namespace| Skippable::new().pop(n.skip("a"));
        let wanted = [(1, 0, "a".into()), (2, 0, "a".into())];
        assert_eq!(found(&[stash(m), stash(n), pop(n), pop(m)], &[2, 1, 1]), wanted);
    }

    #[test]
    fn popping_what_no_layer_has_stashed_is_an_error() {
        let (mut skips, a) = (Skips::default(), Skip::new("a"));
        let pop = |skips: &mut Skips| skips.within(4, Skippable::new().pop(Skip::new("a")), |s| s.pop(&a));
        assert_eq!(
            pop(&mut skips).unwrap_err().to_string(),
            "gpipe: layer 4 pops `a`, which no layer has stashed"
        );
        skips.hold(&a, None);
        assert!(pop(&mut skips).unwrap().is_none());
        let refused = pop(&mut skips).err().unwrap().to_string();
        assert!(refused.contains("pops `a`, which no layer has stashed"), "{refused}");
    }

    #[test]
    fn stashing_over_what_is_still_there_is_an_error() {
        let (mut skips, a) = (Skips::default(), Skip::new("a"));
        let stash = |skips: &mut Skips| {
            skips.within(1, Skippable::new().stash(Skip::new("a")), |s| s.stash(&a, None))
        };
        stash(&mut skips).unwrap();
        let message = stash(&mut skips).unwrap_err().to_string();
        assert_eq!(message, "gpipe: layer 1 stashes `a`, which no layer has popped since it was stashed");
    }
}
