//! [`routes`]: between which stages skips travel.

use super::{Skip, Skippable};
use crate::pipeline::gpipe::Partition;

/// A skip from the stage that stashes it to another one that pops it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// The stage that pops it.
    pub to: usize,
    /// The stage that stashes it.
    pub from: usize,
    /// What travels.
    pub skip: Skip,
}

/// The skips that leave their stage, by the stage that pops them, then by the one that stashes them. Those that are popped
/// where they are stashed travel nowhere.
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

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::super::Namespace;
    use super::*;

    fn stash(name: &str) -> Skippable {
        Skippable::new().stash(Skip::new(name))
    }

    fn pop(name: &str) -> Skippable {
        Skippable::new().pop(Skip::new(name))
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
}
