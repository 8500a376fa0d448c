//! [`Rate`]: what a plateau has left of the learning rate.

use crate::Plateau;

/// How far the rate has been lowered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rate {
    /// The share of the schedule's rate.
    pub share: f64,
    /// Validations without a lower loss since it was lowered.
    pub stale: usize,
}

impl Default for Rate {
    fn default() -> Rate {
        Rate { share: 1.0, stale: 0 }
    }
}

impl Rate {
    /// After a validation.
    pub fn hear(&mut self, plateau: Plateau, lower: bool) {
        self.stale = if lower { 0 } else { self.stale + 1 };
        if self.stale >= plateau.patience {
            *self = Rate { share: self.share * plateau.factor, stale: 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_falls_after_validations_in_a_row_without_a_lower_loss() {
        let (mut rate, plateau) = (Rate::default(), Plateau { factor: 0.5, patience: 2 });
        let mut shares = Vec::new();
        for lower in [true, false, false, false, true, false, false] {
            rate.hear(plateau, lower);
            shares.push(rate.share);
        }
        assert_eq!(shares, [1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25]);
    }
}
