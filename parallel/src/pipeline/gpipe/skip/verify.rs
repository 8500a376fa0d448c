//! [`verify_skips`]: before anything runs, whether every skip is stashed once and then popped once.

use std::collections::BTreeSet;

use super::{Skip, Skippable};
use crate::{Error, Result};

/// Refuses layers, in order, of which a skip is popped before it is stashed, or stashed or popped twice, or never popped.
///
/// # Errors
/// One that lists all of it.
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

#[cfg(test)]
mod tests {
    use super::super::Namespace;
    use super::*;

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
}
