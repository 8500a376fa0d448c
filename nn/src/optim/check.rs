//! What an optimizer refuses of its groups.

use std::cell::Cell;

use super::Group;
use crate::error::from_zero;
use crate::{Error, Result};

thread_local! {
    /// Whether this thread is one of several ranks.
    static ONE_OF_RANKS: Cell<bool> = const { Cell::new(false) };
}

/// Says that this thread is one of so many ranks. Of several, some may hold no parameters: a stage without any, or a share
/// of nothing. An optimizer of nothing is no mistake there.
#[doc(hidden)]
pub fn note_ranks(ranks: usize) {
    ONE_OF_RANKS.set(ranks > 1);
}

/// Whether it has been said that others of several ranks may hold what this one does not.
pub(super) fn is_one_of_ranks() -> bool {
    ONE_OF_RANKS.get()
}

/// Refuses rates and decays that are negative or no numbers.
pub(super) fn check_groups(groups: &[Group]) -> Result<()> {
    let odd = |x: f64| !x.is_finite() || x < 0.0;
    let Some((i, group)) = groups.iter().enumerate().find(|(_, g)| odd(g.lr) || odd(g.weight_decay)) else {
        return Ok(());
    };
    let what = format!("optimizer, group {i}");
    from_zero(&what, "a learning rate of", group.lr)?;
    from_zero(&what, "a weight decay of", group.weight_decay)
}

/// Refuses two parameters of one name: their state would be saved under it.
pub(super) fn refuse_twins(groups: &[Group]) -> Result<()> {
    let mut sorted: Vec<_> = groups.iter().flat_map(|g| &g.parameters).collect();
    sorted.sort_by(|a, b| a.name().cmp(b.name()));
    let Some(pair) = sorted.windows(2).find(|pair| pair[0].name() == pair[1].name()) else { return Ok(()) };
    let name = pair[0].name();
    let why = match pair[0].is(pair[1]) {
        true => format!("the parameter {name:?} came twice, wanted it once"),
        false => format!(
            "two parameters are called {name:?}, wanted a name for each: make each layer in a scope of its own, \
             `scope.child(\"fc1\")`"
        ),
    };
    Err(Error::invalid("optimizer", why))
}
