//! [`ArrivalCounts`]: how many gradients each leaf has got in a pass and how many it is to get, so when it is complete.
//!
//! ```text
//! by default             one each
//! find_unused            one each, none of those that the graph of the loss does not reach
//! static_graph           first pass: not known before its end; afterwards as many as in the first pass
//! ```

use std::collections::HashSet;

use phalanx_nn::Parameter;
use phalanx_nn::autograd::Leaf;

/// The gradients that a pass which synchronises has given to each leaf.
pub(super) struct ArrivalCounts {
    got: Vec<u32>,
    /// How many each leaf gets in this pass. `None` in the first pass of a static graph.
    expected: Option<Vec<u32>>,
    /// Whether the first pass tells how many there are in each.
    is_static: bool,
    /// How many each leaf of a static graph got in the first pass.
    learned: Option<Vec<u32>>,
    /// The leaves in the order of their last gradients.
    order: Vec<usize>,
}

impl ArrivalCounts {
    pub(super) fn new(leaves: usize, is_static: bool) -> ArrivalCounts {
        let (got, order) = (vec![0; leaves], Vec::new());
        let mut counts = ArrivalCounts { got, expected: None, is_static, learned: None, order };
        counts.begin();
        counts
    }

    /// A pass begins.
    pub(super) fn begin(&mut self) {
        self.expected = if self.is_static { self.learned.clone() } else { Some(vec![1; self.got.len()]) };
    }

    /// The pass gives gradients to `reached` alone, as far as the graph of its outputs tells.
    pub(super) fn expect(&mut self, leaves: &[(Parameter, Leaf)], reached: &[Leaf]) {
        let Some(expected) = self.expected.as_mut().filter(|_| !self.is_static) else { return };
        let reached: HashSet<u64> = reached.iter().map(Leaf::id).collect();
        for (expected, (_, leaf)) in expected.iter_mut().zip(leaves) {
            *expected = u32::from(reached.contains(&leaf.id()));
        }
    }

    /// A leaf got a gradient.
    ///
    /// # Errors
    /// Why it was to get no more, as the end of a sentence that begins with the parameter's name.
    pub(super) fn arrive(&mut self, number: usize) -> Result<(), String> {
        self.got[number] += 1;
        if self.got[number] > 1 {
            self.order.retain(|earlier| *earlier != number);
        }
        self.order.push(number);
        let (got, Some(expected)) = (self.got[number], &self.expected) else { return Ok(()) };
        match (expected[number], self.is_static) {
            (expected, _) if got <= expected => Ok(()),
            (expected, true) => Err(static_graph_changed(got, expected)),
            (0, false) => Err("got a gradient, and the graph of the loss does not lead to it; run the backward pass \
                               between `ddp.begin()` and `ddp.finish()`, which finds unused parameters at its end"
                .into()),
            (_, false) => Err("its gradient came again after it was sent; give each use a site of its own".into()),
        }
    }

    /// Whether a leaf has all its gradients of this pass.
    pub(super) fn is_complete(&self, number: usize) -> bool {
        self.expected.as_ref().is_some_and(|expected| self.got[number] == expected[number])
    }

    /// The leaves that get none in this pass.
    pub(super) fn unused(&self) -> Vec<usize> {
        let expected = self.expected.iter().flatten().enumerate();
        expected.filter(|(_, expected)| **expected == 0).map(|(number, _)| number).collect()
    }

    /// Whether a leaf has got a gradient in this pass.
    pub(super) fn has_arrived(&self, number: usize) -> bool {
        self.got[number] > 0
    }

    /// The leaves that have got gradients in this pass, in the order of their last ones.
    pub(super) fn order(&self) -> &[usize] {
        &self.order
    }

    /// The pass that gave the gradients is over: a static graph's first one tells how many there are in each.
    ///
    /// # Errors
    /// The first leaf of a static graph that got fewer than in the first pass, and the end of the sentence.
    pub(super) fn end(&mut self) -> Result<(), (usize, String)> {
        if !self.is_static {
            return Ok(());
        }
        let learned = self.learned.get_or_insert_with(|| self.got.clone());
        match (0..learned.len()).find(|&number| self.got[number] != learned[number]) {
            None => Ok(()),
            Some(number) => Err((number, static_graph_changed(self.got[number], learned[number]))),
        }
    }

    /// Forgets the gradients of the pass.
    pub(super) fn clear(&mut self) {
        self.got.fill(0);
        self.order.clear();
    }
}

/// Of a leaf of a static graph that got another number of gradients than in the first pass.
fn static_graph_changed(got: u32, wanted: u32) -> String {
    format!(
        "got {got} gradients in this pass, and {wanted} in the first: the graph has changed; set \
         `DdpConfig::static_graph` to false, and `find_unused` if parameters may get none"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leaf_is_complete_with_its_first_gradient() {
        let mut counts = ArrivalCounts::new(2, false);
        assert!(!counts.is_complete(0) && counts.unused().is_empty());
        counts.arrive(0).unwrap();
        assert!(counts.is_complete(0) && !counts.is_complete(1) && counts.end().is_ok());
        assert!(counts.arrive(0).unwrap_err().contains("came again"));
    }

    #[test]
    fn the_first_pass_of_a_static_graph_tells_of_the_later_ones() {
        let mut counts = ArrivalCounts::new(3, true);
        [0, 1, 0].into_iter().for_each(|number| counts.arrive(number).unwrap());
        assert!((0..3).all(|number| !counts.is_complete(number)), "nothing is known yet");
        assert_eq!(counts.order(), [1, 0]);
        counts.end().unwrap();
        counts.clear();
        counts.begin();
        assert_eq!(counts.unused(), [2]);
        counts.arrive(0).unwrap();
        assert!(!counts.is_complete(0));
        counts.arrive(0).unwrap();
        assert!(counts.is_complete(0) && counts.is_complete(2));
        let (number, why) = counts.end().unwrap_err();
        assert!(number == 1 && why.contains("got 0 gradients in this pass, and 1 in the first"), "{why}");
        assert!(counts.arrive(2).unwrap_err().contains("`DdpConfig::static_graph`"));
    }
}
