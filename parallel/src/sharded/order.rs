//! [`Order`]: the order in which wrapped modules compute, which tells what to gather ahead. The steps of a pass are noted, and the
//! next pass is expected to have the same ones.
//!
//! ```text
//! first pass    forward: modules as they are registered        backward: as they left the forward pass, the last first
//! later ones    the steps of the pass before, forward, recomputed and backward
//! ```
//! An evaluation between two whole passes is not noted. If a module is not the expected one, its next place among the expected steps is
//! looked for, so a module that is left out or added costs one wrong guess. Source: Zhao et al., "PyTorch FSDP" (2023), section 3.3.2.

/// Which pass a module computes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    /// A forward pass that is repeated during a backward pass.
    Recompute,
    Backward,
}

/// A wrapped module, by number, and its pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) module: usize,
    pub(super) pass: Pass,
}

/// Steps that are noted at most: a program that runs forward passes alone, and never ends one, begins again then.
const STEPS_MAX: usize = 1 << 20;

/// The expected steps, and those of the present pass.
pub(super) struct Order {
    expected: Vec<Step>,
    /// The number of the step that is expected next.
    next: usize,
    steps: Vec<Step>,
    /// The modules whose forward pass is over, in this order, and those whose backward pass is over.
    left: [Vec<usize>; 2],
    /// The modules in the order in which the last whole pass has left them backward.
    finished: Vec<usize>,
    /// Whether a whole pass was noted.
    known: bool,
}

impl Order {
    /// For so many modules.
    pub(super) fn new(modules: usize) -> Order {
        let expected = (0..modules).map(|module| Step { module, pass: Pass::Forward }).collect();
        Order {
            expected,
            next: 0,
            steps: Vec::new(),
            left: Default::default(),
            finished: Vec::new(),
            known: false,
        }
    }

    /// A module begins to compute, in a pass that has a backward pass (`records`) or in an evaluation.
    pub(super) fn enter(&mut self, step: Step, records: bool) {
        let evaluates_again = !records && self.steps.first() == Some(&step);
        if evaluates_again && self.steps.iter().all(|step| step.pass == Pass::Forward) {
            let pass = std::mem::take(&mut self.steps);
            if !self.known {
                (self.expected, self.next) = (pass, 0);
            }
        }
        let begins_backward =
            step.pass == Pass::Backward && self.steps.last().is_none_or(|step| step.pass != Pass::Backward);
        if begins_backward && !self.known {
            let backward = |&module: &usize| Step { module, pass: Pass::Backward };
            (self.expected, self.next) = (self.left[0].iter().rev().map(backward).collect(), 0);
        }
        if self.steps.len() == STEPS_MAX {
            self.forget();
        }
        // An evaluation between whole passes is no part of the next one. One inside a pass, such as a teacher's, is.
        if records || !self.known || !self.steps.is_empty() {
            self.steps.push(step);
        }
        let (before, after) = self.expected.split_at(self.next);
        let place = |steps: &[Step]| steps.iter().position(|expected| *expected == step);
        let found = place(after).map(|place| before.len() + place).or_else(|| place(before));
        self.next = found.map_or(self.next, |found| found + 1);
    }

    fn forget(&mut self) {
        self.steps.clear();
        self.left.iter_mut().for_each(Vec::clear);
    }

    /// A module has computed; forward, it was recorded.
    pub(super) fn leave(&mut self, Step { module, pass }: Step) {
        match pass {
            Pass::Forward => self.left[0].push(module),
            Pass::Recompute => {}
            Pass::Backward => self.left[1].push(module),
        }
    }

    /// The pass is over.
    pub(super) fn end(&mut self) {
        if !self.left[1].is_empty() {
            self.expected = std::mem::take(&mut self.steps);
            self.finished = std::mem::take(&mut self.left[1]);
            self.known = true;
        }
        self.next = 0;
        self.forget();
    }

    /// The modules in the order in which the last whole pass has left them backward.
    pub(super) fn finished(&self) -> &[usize] {
        &self.finished
    }

    /// The modules that the last whole pass has used forward, in this order; none if there was none.
    pub(super) fn known_forward(&self) -> impl Iterator<Item = usize> {
        let steps = self.expected.iter().filter(|_| self.known);
        steps.take_while(|step| step.pass == Pass::Forward).map(|step| step.module)
    }

    /// The step that is expected next.
    pub(super) fn next(&self) -> Option<Step> {
        self.expected.get(self.next).copied()
    }

    /// The modules that are expected next, as long as they compute forward, or in a backward pass, like `pass`.
    pub(super) fn ahead(&self, pass: Pass) -> impl Iterator<Item = usize> {
        let alike = move |step: &&Step| (step.pass == Pass::Forward) == (pass == Pass::Forward);
        self.expected[self.next..].iter().take_while(alike).map(|step| step.module)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs steps, and after each asks which module is expected next.
    fn guesses(order: &mut Order, steps: &[(usize, Pass)]) -> Vec<Option<usize>> {
        let guess = |&(module, pass): &(usize, Pass)| {
            order.enter(Step { module, pass }, true);
            order.leave(Step { module, pass });
            order.ahead(pass).next()
        };
        steps.iter().map(guess).collect()
    }

    const F: Pass = Pass::Forward;
    const R: Pass = Pass::Recompute;
    const B: Pass = Pass::Backward;

    #[test]
    fn the_first_pass_is_guessed_by_registration_and_by_what_has_left() {
        let mut order = Order::new(3);
        assert_eq!(guesses(&mut order, &[(0, F), (1, F), (2, F)]), [Some(1), Some(2), None]);
        assert_eq!(guesses(&mut order, &[(2, B), (1, B), (0, B)]), [Some(1), Some(0), None]);
    }

    #[test]
    fn later_passes_are_expected_to_be_like_the_one_before() {
        let mut order = Order::new(4);
        // Module 1 is not called, module 2 is called twice, module 0 is recomputed.
        let pass = [(3, F), (2, F), (0, F), (2, F), (2, B), (0, B), (0, R), (0, B), (2, B), (3, B)];
        guesses(&mut order, &pass);
        order.end();
        let wanted = [2, 0, 2].map(Some).into_iter().chain([None]);
        let wanted: Vec<_> = wanted.chain([0, 0, 0, 2, 3].map(Some)).chain([None]).collect();
        assert_eq!(guesses(&mut order, &pass), wanted);
        order.end();
        assert_eq!(guesses(&mut order, &pass), wanted);
    }

    #[test]
    fn a_change_costs_one_wrong_guess() {
        let mut order = Order::new(4);
        guesses(&mut order, &[(0, F), (1, F), (2, F), (3, F), (0, B)]);
        order.end();
        assert_eq!(guesses(&mut order, &[(0, F), (2, F), (3, F)]), [Some(1), Some(3), None]);
        order.end();
        // An unknown step does not lose the place.
        assert_eq!(guesses(&mut order, &[(0, F), (0, R), (1, F)]), [Some(1), None, Some(2)]);
    }

    #[test]
    fn evaluations_are_learnt_until_a_whole_pass_is_known_and_never_pile_up() {
        let mut order = Order::new(3);
        let evaluate = |order: &mut Order| {
            let enter = |module| {
                order.enter(Step { module, pass: F }, false);
                order.ahead(F).next()
            };
            [2, 0, 1].map(enter)
        };
        evaluate(&mut order);
        assert_eq!(evaluate(&mut order), [Some(0), Some(1), None]);
        guesses(&mut order, &[(0, F), (1, F), (2, F), (2, B)]);
        order.end();
        for _ in 0..5 {
            evaluate(&mut order);
        }
        assert!(order.steps.is_empty());
        let pass = [(0, F), (1, F), (2, F), (2, B)];
        assert_eq!(guesses(&mut order, &pass[..2]), [Some(1), Some(2)]);
        guesses(&mut order, &pass[2..]);
        order.end();
        assert_eq!(order.expected, pass.map(|(module, pass)| Step { module, pass }));
    }
}
